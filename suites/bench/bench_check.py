"""How long `degarble check` takes on the small trained V4, start-up included, and what it holds.

Captures: nvfp4-full, a short prompt and four new tokens; healthy, and with one nibble swap in one
component. The arm is the command in a process of its own, as a person starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS
from degarble.harness.capture import capture as capturing
from degarble.harness.formats.weight import Weight
from degarble.harness.inference.model import open_model
from degarble.harness.museum.cases import ModelKey, prepare
from degarble.references import tiny
from degarble.suites.bench.timing import Neighbours, Reading, Section, Table, Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.suites.bench.timing import Settings

PACKAGES = ("torch", "numpy", "numba")
KEY = ModelKey("v4", "nvfp4-full")
RELEASED = Path(tiny.__file__).parent / "v1" / "v4"
PROMPT = "anna paints blue"
SPOILT = "layers.2.ffn.shared.w2"
SECONDS = 5.0


class Arm(NamedTuple):
    """One capture, and the exit status that its check has to have."""

    capture: Path
    status: int


def _swapped(weight: Weight) -> Weight:
    names = [each.name for each in fields(weight) if not each.name.startswith("_")]
    made = {name: getattr(weight, name) for name in names}
    codes = made["codes"]
    return Weight(**made | {"codes": (codes >> 4) | (codes << 4)})


def captured(source: Path, folder: Path, *, spoilt: bool) -> Path:
    """Capture a run, healthy or with one component that reads its nibbles the other way."""

    def opened(*args: Any, **named: Any) -> Any:
        model = open_model(*args, **named)
        calls = model.speaker.bound.calls
        healthy = calls[SPOILT]

        def faulty(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
            return healthy(inputs, {name: _swapped(weights[name]) for name in weights})

        if spoilt:
            calls[SPOILT] = faulty
        return model

    with mock.patch.object(capturing, "open_model", opened):
        capturing.capture(source, [PROMPT], folder, lambda _streamed: nullcontext())
    return folder


def arms_in(root: Path) -> dict[str, Arm]:
    """Make the checkpoint and both captures."""
    prepare(root, (KEY,))
    source = root / KEY.folder
    return {
        "healthy run": Arm(captured(source, root / "healthy", spoilt=False), EXIT_AGREES),
        "one fault: diagnosed, attributed, shrunk": Arm(
            captured(source, root / "spoilt", spoilt=True), EXIT_DIFFERS
        ),
    }


def seconds_of(arm: Arm, root: Path) -> float:
    """Run the command once."""
    line = [sys.executable, "-m", "degarble.harness.cli.main", "--quiet", "check", str(arm.capture)]
    line += ["--reference", str(RELEASED), "--json", str(root / f"{arm.capture.name}.json")]
    # As installed: a shell that forbids bytecode files would have every module compiled each time.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    status = subprocess.run(line, check=False, env=environment).returncode
    seconds = time.perf_counter() - begin
    assert status == arm.status, (arm.capture.name, status)
    return seconds


def run_arms(rounds: int) -> dict[str, Reading]:
    """Every arm once to warm caches up, then by turns."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        arms = arms_in(root)
        found: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name, arm in arms.items():
                seconds = seconds_of(arm, root)
                if number:
                    found[name].append(seconds)
    return {name: Reading(tuple(each)) for name, each in found.items()}


def run(settings: Settings) -> Section:
    """Measure both arms."""
    with Neighbours() as neighbours:
        readings = run_arms(min(settings.rounds, 5))
    rows = tuple((name, f"{reading.median:.2f}") for name, reading in readings.items())
    return Section(
        key="check",
        title="Checking a run",
        tables=(Table("`degarble check`, start-up included", ("capture", "seconds"), rows),),
        targets=tuple(
            Target(f"check of a {name}, seconds", reading.median, SECONDS, at_least=False)
            for name, reading in readings.items()
        ),
        notes=(
            "the trained small V4 in nvfp4-full, 4 layers, a short prompt and 4 new tokens",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )
