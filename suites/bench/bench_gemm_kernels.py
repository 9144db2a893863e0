"""GEMM kernels against cuBLAS in BF16, on a Hopper GPU: a script that prints one table.

    python -m degarble.suites.bench.bench_gemm_kernels [--rounds N] [--tactics]

Each arm is a CUDA graph that launches once on each of several buffer sets in turn, so that the L2
cache holds nothing that is read next. Arms take turns within a round, and torch.mm on BF16 runs in
every round. A ratio is the median over rounds of cuBLAS's time over the kernel's. Operands are
random. Numbers are compared with the definition by suites/kernels, not here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm.problem import (
    BF16,
    FP8_BLOCK,
    NVFP4,
    TACTICS,
    GemmForm,
    GemmProblem,
    GemmTactic,
    choose_form,
)
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device
from degarble.suites.bench.bench_quantise_kernel import (
    Arm,
    Figure,
    captured,
    sets_for,
    timed,
)
from degarble.suites.bench.gpu import refused_here, say
from degarble.suites.bench.timing import quartiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

SHAPES = ((4096, 7168, 4096), (4096, 4096, 7168))
SMALL_ROWS = (1, 16, 128, 512)
CUBLAS = "cuBLAS, BF16"
WANTED = {BF16.name: 0.85, NVFP4.name: 0.55}  # of cuBLAS in BF16
WANTED_FP8 = 1.2  # of the BF16 form
FAMILIES = {SM90A.name: "sm90", SM100A.name: "sm100"}
SCALES = {BF16.name: "none", NVFP4.name: "e4m3", FP8_BLOCK.name: "float32"}


@dataclass(frozen=True)
class Row:
    """What an arm took beside cuBLAS in the same rounds."""

    figure: Figure
    operations: int

    @property
    def teraflops(self) -> float:
        """Operations a second over the median, in 10**12."""
        return self.operations / self.figure.median * 1e-6

    def ratio(self, other: Figure) -> float:
        """Median over rounds of another arm's time over this one's."""
        pairs = zip(self.figure.microseconds, other.microseconds, strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    def line(self, cublas: Figure) -> str:
        """One line of the table."""
        first, third = quartiles(self.figure.microseconds)
        return (
            f"| {self.figure.arm.name} | {self.figure.median:.1f} [{first:.1f}, {third:.1f}] | "
            f"{self.teraflops:.0f} | {self.ratio(cublas):.3f} |"
        )


def tensors_of(problem: GemmProblem) -> tuple[Tensor, ...]:
    """Draw operands, and D, in the order in which a kernel's launch takes them."""
    m, n, k = problem.rows, problem.columns, problem.inner
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    made: list[Tensor] = []
    for rows, scale_rows in ((m, m), (n, ceil_div(n, 128))):
        if problem.operands == BF16.name:
            made.append(torch.randn(rows, k, device="cuda").bfloat16())
        elif problem.operands == FP8_BLOCK.name:
            made.append(torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn))
            made.append(torch.rand(scale_rows, ceil_div(k, 128), device="cuda"))
        else:
            size = SWIZZLE_128X4.storage_size(rows, k // NVFP4.block)
            made.append(_bytes(256, (rows, k // 2)))
            made.append(_bytes(0x30, (size,)) + 0x20)
            made.append(torch.ones(1, device="cuda"))
    return (*made, out)


def _bytes(bound: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, bound, shape, dtype=torch.uint8, device="cuda")


def cublas_arm(problem: GemmProblem) -> Arm:
    """Multiply BF16 operands by torch.mm."""
    sets = [tensors_of(problem) for _ in range(sets_for(problem.bytes_moved))]

    def launch(a: Tensor, b: Tensor, out: Tensor) -> Callable[[], object]:
        return lambda: torch.mm(a, b.T, out=out)

    return captured(CUBLAS, problem.bytes_moved, [launch(*each) for each in sets])


def kernel_arm(problem: GemmProblem, tactic: GemmTactic | None = None) -> Arm:
    """Run a kernel, in the form of the table or another one."""
    target = target_of_device().name
    kernels = import_module(module_of(f"{FAMILIES[target]}_gemm_{problem.operands}"))
    form = choose_form(problem, target)
    if tactic:
        form = GemmForm(form.operands, form.scales, form.target, tactic)
    kernel, tactic = kernels.compile_form(form, CompileSettings()), form.tactic
    sets = [tensors_of(problem) for _ in range(sets_for(problem.bytes_moved))]

    def launch(tensors: tuple[Tensor, ...]) -> Callable[[], object]:
        return lambda: kernels.launch(kernel, form, problem, tensors)

    name = (
        f"{problem.operands}, {tactic.rows} x {tactic.columns}, cluster {tactic.cluster_rows} x "
        f"{tactic.cluster_columns}, group {tactic.group}"
    )
    return captured(name, problem.bytes_moved, [launch(each) for each in sets])


def table(extents: tuple[int, int, int], arms: Sequence[Arm], rounds: int) -> list[Row]:
    """Time arms, the first of them cuBLAS, and print them."""
    m, n, k = extents
    rows = [Row(figure, 2 * m * n * k) for figure in timed(arms, rounds)]
    say(f"\n**M {m}, N {n}, K {k}**\n\n| arm | us | TFLOP/s | of cuBLAS |\n|---|---|---|---|")
    for row in rows:
        say(row.line(rows[0].figure))
    return rows


def problems(extents: tuple[int, int, int]) -> list[GemmProblem]:
    """Return a shape in every kind of operands."""
    return [GemmProblem(*extents, operands, scales) for operands, scales in SCALES.items()]


def compare(extents: tuple[int, int, int], rounds: int) -> list[str]:
    """Compare all kernels on a shape; return what is missed."""
    arms = [cublas_arm(GemmProblem(*extents)), *map(kernel_arm, problems(extents))]
    cublas, bf16, nvfp4, fp8 = table(extents, arms, rounds)
    found = {
        "bf16 of cuBLAS": (bf16.ratio(cublas.figure), WANTED[BF16.name]),
        "nvfp4 of cuBLAS": (nvfp4.ratio(cublas.figure), WANTED[NVFP4.name]),
        "fp8_block of bf16": (fp8.ratio(bf16.figure), WANTED_FP8),
    }
    for name, (got, wanted) in found.items():
        say(f"{name}: {got:.3f}, wanted at least {wanted}")
    return [name for name, (got, wanted) in found.items() if got < wanted]


def tactics(extents: tuple[int, int, int], rounds: int) -> None:
    """Compare tactics of every kind of operands."""
    arms = [cublas_arm(GemmProblem(*extents))]
    for problem in problems(extents):
        arms += [kernel_arm(problem, tactic) for tactic in TACTICS[SM90A.name, problem.operands]]
    table(extents, arms, rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tactics", action="store_true", help="compare all rows of the table")
    settings = parser.parse_args(arguments)
    if status := refused_here(SM90A, "These forms are Hopper's."):
        return status
    missed = [why for extents in SHAPES for why in compare(extents, settings.rounds)]
    for rows in SMALL_ROWS:
        extents = (rows, 7168, 4096)
        if settings.tactics:
            tactics(extents, settings.rounds)
        else:
            compare_small(extents, settings.rounds)
    say(f"\nmissed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


def compare_small(extents: tuple[int, int, int], rounds: int) -> None:
    """Compare all kernels where memory decides; no target is set there."""
    table(extents, [cublas_arm(GemmProblem(*extents)), *map(kernel_arm, problems(extents))], rounds)


if __name__ == "__main__":
    sys.exit(main())
