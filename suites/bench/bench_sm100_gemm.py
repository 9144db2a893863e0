"""The NVFP4 GEMM on a B200: every tactic beside cuBLAS, a copy and its own bound; never run yet.

    python -m degarble.suites.bench.bench_sm100_gemm [--rounds N]

Shapes with many rows run all tactics of one thread block, of pairs and of their clusters; shapes
with few rows run swapped operands and the narrowest tiles. Arms and rounds are those of
bench_gemm_kernels. The bound is that of suites/kernels/sm100_table.py, whose clock and bandwidth
come from a data sheet. suites/kernels compares the numbers with the definition: run
`pytest -m b200 -k first_minute` before.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from degarble.kernels.gemm.problem import GemmForm, GemmProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import SM100A
from degarble.suites.bench import bench_gemm_kernels as plain
from degarble.suites.bench.bench_quantise_kernel import captured, copy_arm, sets_for, timed
from degarble.suites.bench.gpu import refused_here, say
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from degarble.suites.bench.bench_quantise_kernel import Arm, Figure

FEW = 32  # rows of A that swapped operands answer
SHAPES = (*sm100_table.PUBLISHED, (16, 7168, 16384), (16, 512, 7168), (16, 1536, 7168))


def tactics(rows: int) -> list[GemmForm]:
    """Return the forms that are worth a comparison at so many rows."""
    alone, pairs = blackwell.forms(), blackwell.pairs()
    if rows <= FEW:
        fit = [form for form in blackwell.swapped() if rows <= form.tactic.columns]
        return [*fit, *alone[:2]]
    clustered = [each for form in alone[2:] for each in blackwell.clustered(form)]
    of_pairs = [each for form in pairs[2:] for each in blackwell.clustered_pair(form)]
    return [*alone, *clustered, *pairs, *of_pairs]


def kernel_arm(problem: GemmProblem, form: GemmForm) -> Arm:
    """Run a form, one buffer set after the other."""
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    kernel = kernels.compile_form(form, CompileSettings())
    sets = [plain.tensors_of(problem) for _ in range(sets_for(problem.bytes_moved))]

    def launch(tensors: tuple[Tensor, ...]) -> Callable[[], object]:
        return lambda: kernels.launch(kernel, form, problem, tensors)

    return captured(blackwell.named(form), problem.bytes_moved, [launch(each) for each in sets])


def line(problem: GemmProblem, form: GemmForm, figure: Figure, cublas: Figure) -> str:
    """One line of the table: time, rate, cuBLAS's time over it, the bound over it."""
    row = plain.Row(figure, problem.operations)
    bound = sm100_table.bound_of(problem, form)
    share = bound.seconds * 1e6 / figure.median
    return f"{row.line(cublas)} {bound.limit} {share:.2f} |"


def compare(extents: tuple[int, int, int], rounds: int) -> None:
    """Time all tactics of a shape, and print them."""
    problem = GemmProblem(*extents, "nvfp4", "e4m3")
    forms = tactics(problem.rows)
    arms = [plain.cublas_arm(GemmProblem(*extents)), copy_arm(problem.bytes_moved)]
    arms += [kernel_arm(problem, form) for form in forms]
    cublas, copy, *figures = timed(arms, rounds)
    m, n, k = extents
    say(f"\n**M {m}, N {n}, K {k}**: copy {copy.terabytes_a_second:.2f} TB/s\n")
    say("| tactic | us | TFLOP/s | of cuBLAS, BF16 | of the bound |\n|---|---|---|---|---|")
    for form, figure in zip(forms, figures, strict=True):
        say(line(problem, form, figure, cublas))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    settings = parser.parse_args(arguments)
    if status := refused_here(SM100A, "Run it on a B200."):
        return status
    for extents in SHAPES:
        compare(extents, settings.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
