"""Where the suites of the kernels are, for the nightly run and for the start of a container.

pyproject.toml names this module under `degarble.kernel_suites`, so that the product finds the
suites through the package metadata and never names the test tree.
"""

from __future__ import annotations

from pathlib import Path

from degarble.harness.nightly.kernels import KernelSuites

_SUITES = Path(__file__).resolve().parents[1]
HERE = KernelSuites(
    # The other folders need servers, or are nights themselves.
    folders=tuple(_SUITES / name for name in ("backends", "formats", "kernels", "support")),
    bench="degarble.suites.bench.night",
    first_minute="degarble.suites.support.probes.sm100_first_minute",
    shares={
        _SUITES / "backends" / "cutedsl" / "test_cutedsl_h200.py": 6,
        _SUITES / "kernels" / "test_memory_checker.py": 8,
    },
    contracts=(_SUITES / "kernels" / "test_contract.py",),
    forms=_SUITES / "backends" / "needed_forms.json",
)
