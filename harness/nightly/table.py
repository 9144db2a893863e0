"""The steps of a nightly run in their order, on one process or over the ranks of torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference.processes import broadcast_json, environment_of_child, free_port
from degarble.harness.nightly import compiling, kernels, steps
from degarble.harness.nightly.metamorphic import metamorphic
from degarble.harness.nightly.night import NightStep
from degarble.harness.nightly.steps import capture_line, captures
from degarble.harness.nightly.texts import texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from degarble.harness.nightly.night import NightConfig, StepResult


# --------------------------------------------------------------------------------------------------
# A nightly run over the ranks of torchrun: all ranks capture, rank 0 judges and reports.
#
# Each capture starts a fresh process a rank, so that what is random by launch differs between
# repeats. The other ranks wait for rank 0's commands. All other steps, pages, journal, store and
# ledger belong to rank 0: there is one report, and rank 0 alone fails. Refused are backends that
# replace components, since those are not sharded, and the user's own captures, which need no ranks.

_TORCH = "torch"


def over_ranks(steps: Sequence[NightStep], ranks: int) -> list[NightStep]:
    """Return the same steps, with captures made by all ranks."""
    shared = partial(_captures, ranks)
    return [replace(step, run=shared) if step.name == "captures" else step for step in steps]


def lead(name: str, run: Callable[[], StepResult]) -> StepResult:
    """Run a step on rank 0, and send its result to the other ranks, even if it raised."""
    said = None
    try:
        result = run()
        said = f"{result.verdict}: {result.sentence}"
        return result
    finally:
        broadcast_json({"step": name, "said": said})


def follow(name: str) -> str:
    """Execute rank 0's commands until a step is over; return its result as text."""
    while True:
        word = broadcast_json()
        if "line" in word:
            _child(word)
            continue
        assert word["step"] == name, "all ranks run the same steps"
        return str(word["said"] or "no answer: see rank 0")


def _captures(ranks: int, config: NightConfig, results: Mapping[str, StepResult]) -> StepResult:
    """Capture the prompts on all ranks together, as often as requested."""
    if config.backend != _TORCH or config.captures is not None:
        name = "--backend" if config.backend != _TORCH else "--captures"
        raise InvalidArgument(
            name, config.backend if name == "--backend" else config.captures,
            f"the references over {ranks} ranks", "Start pytest itself, without torchrun.",
        )  # fmt: skip
    result = captures(config, results, _capture_over_ranks)
    return replace(result, facts={**result.facts, "ranks": str(ranks)})


def _capture_over_ranks(config: NightConfig, prompts: Path, out: Path) -> str:
    """Make one capture by all ranks; return the error if it fails."""
    word = {"line": capture_line(config, prompts, out), "port": free_port()}
    broadcast_json(word)
    said = _child(word)
    for place in out.parent.glob(f".{out.name}.rank-*"):
        shutil.rmtree(place, ignore_errors=True)
    return said


def _child(word: Mapping[str, Any]) -> str:
    """Run a process of this rank, which meets those of the others at the port."""
    done = subprocess.run(  # noqa: S603  ours
        [sys.executable, *word["line"]],
        env=environment_of_child(os.environ, word["port"]),
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if not done.returncode else done.stderr or f"exit status {done.returncode}"


# --------------------------------------------------------------------------------------------------
# The table of a nightly run's steps, in their order.

STEPS = (
    NightStep("environment", steps.environment),
    NightStep("audit", steps.audit),
    NightStep("codecs", steps.codecs),
    NightStep("compile", compiling.compiled),
    NightStep("captures", steps.captures),
    NightStep("repeats", steps.repeats, ("captures",)),
    NightStep("check", steps.check, ("captures", "repeats"), screens=True),
    NightStep("metamorphic", metamorphic),
    NightStep("text", texts, ("captures",)),
    NightStep("museum", steps.museum),
    NightStep("kernels", kernels.kernels, ("compile",), stop=kernels.stop),
    NightStep("figures", kernels.figures),
    NightStep("history", steps.history, all_before=True),
    NightStep("ledger", steps.ledger, all_before=True),
)
