"""V4-Pro's width, one layer of each type and both ends: judged within 4 GB of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-experts"])
def test_one_layer_of_each_type_is_judged_within_4_gb(recipe: str) -> None:
    line = [sys.executable, "-m", "degarble.suites.bench.peak_check_width", recipe]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    verdict, outputs, unjudged, worst, _, peak = done.stdout.split()
    assert (verdict, unjudged) == ("AGREES", "0")
    assert int(outputs) > 90
    assert 0 < float(worst) <= 0.7
    assert int(peak) <= 4 << 30
