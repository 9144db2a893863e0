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
    # What ran for two minutes and more in one process in a night on an H200. Contracts of experts
    # stay whole, and so begin later: beside sm90_moe they filled the memory of the device.
    shares={
        "cutedsl_h200": 16,
        "sm90_sparse_attention": 6,
        "decoder_h200": 6,
        "sparse_attention": 4,
        "sm90_moe": 4,
        "memory_checker": 14,
        "by_row": 3,
        "products": 2,
        "sm90_gemm_bf16_faults": 2,
    },
    contracts=(_SUITES / "kernels" / "test_contract.py",),
    forms=_SUITES / "backends" / "needed_forms.json",
)
