"""Every module imports alone, silently and without a warning; light modules load nothing heavy.

pytest imports the suites, with warnings as errors as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.house.repository import ROOT, modules, name_of

if TYPE_CHECKING:
    from pathlib import Path

# Loaded at every start of pytest or of the command line, or promised to run without torch.
LIGHT = (
    "degarble.harness.base.errors",
    "degarble.harness.base.protocols",
    "degarble.harness.base.version",
    "degarble.harness.capture.files.",
    "degarble.harness.plugins.",
    "degarble.harness.cli.",
    "degarble.harness.report.",
    "degarble.harness.vllm.",
    "degarble.reports.",
)

# Most of them derive from vLLM's classes: without it the refusal is typed, whatever comes first.
BOUND = "degarble.harness.vllm.bound."
NEEDS_VLLM = {f"{BOUND}{name}" for name in ("start", "model", "upstream")}
# Of the plugins these are loaded beside a model, or are programs of their own: torch is there.
BESIDE = (BOUND, "degarble.harness.vllm.engine.", "degarble.harness.vllm.verify_weights")


def failures(light: list[str], others: list[str], extra_path: Path) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")  # the package itself may be found by it
    path = os.pathsep.join((str(extra_path), *([known] if known else [])))
    environment = {**os.environ, "PYTHONPATH": path}
    script = "degarble.suites.house.import_alone"
    command = [sys.executable, "-m", script, *light, "--", *others]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_every_module_imports_alone(tmp_path: Path) -> None:
    plants = {
        "planted_warning": "import warnings\nwarnings.warn('old', DeprecationWarning)\n",
        "planted_print": "print('hello')\n",
        "planted_error": "import degarble.harness.there_is_no_such_module\n",
        "planted_heavy": "import torch\n",
    }
    for name, text in plants.items():
        (tmp_path / f"{name}.py").write_text(text)
    found_names = [name_of(path) for path in modules()]
    names = [name for name in found_names if not name.startswith("degarble.suites.")]
    light = [name for name in names if name.startswith(LIGHT) and not name.startswith(BESIDE)]
    others = [name for name in names if name not in light]
    found = failures(
        [*light, "planted_heavy"], [*others, *sorted(set(plants) - {"planted_heavy"})], tmp_path
    )
    assert found.pop("planted_warning") == "DeprecationWarning: old"
    assert found.pop("planted_print") == "prints on import: 'hello\\n'"
    assert found.pop("planted_error").startswith("ModuleNotFoundError")
    assert found.pop("planted_heavy").startswith("brings torch")
    refused = {name: found.pop(name) for name in names if name.startswith(BOUND) and name in found}
    told = refused.values()
    assert all(each.startswith("MissingDependency: vllm = ") for each in told), refused
    assert refused.keys() >= NEEDS_VLLM
    assert not found, "\n" + "\n".join(f"{name}: {error}" for name, error in found.items())
