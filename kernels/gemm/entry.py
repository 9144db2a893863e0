"""Compile and launch a plain (ungrouped) GEMM from its torch entry point.

This is the part that all operand formats and targets share: the arguments to compile with, the
checks of D and of the GPU, the choice of a tactic by table, and the launch. An entry point checks
its own operands, then passes all tensors to `answer`, D last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cutlass import Int32

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.gemm import contract
from degarble.kernels.gemm import problem as facts
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.compiling import any_stream, compile_kernel, current_stream
from degarble.kernels.runtime.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.kernels.gemm.problem import GemmForm, GemmProblem
    from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings
    from degarble.kernels.runtime.targets import Target

EXTENTS = 4  # of a launch: M, N, K, clusters


class GemmEntry(NamedTuple):
    """The part of an entry point that differs by kernel: how to compile, pointers, target."""

    compiled: Callable[[GemmForm, CompileSettings], CompiledKernel]
    pointers: Callable[[GemmForm, tuple[Tensor | None, ...]], tuple[Any, ...]]
    target: Target


def compiled(
    jitted: Any, pointers: tuple[Any, ...], form: GemmForm, settings: CompileSettings
) -> CompiledKernel:
    """Compile a form's launch. Pointers are those of absent tensors, so no GPU is needed."""
    if form.tactic.blocks != 1:
        raise InvalidArgument(
            "thread blocks of a processor", form.tactic.blocks, "1 in a plain GEMM",
            "Only the grouped products launch several.",
        )  # fmt: skip
    extents = tuple(Int32(1) for _ in range(EXTENTS))
    arguments = (pointers, extents, form, any_stream())
    return compile_kernel(jitted, arguments, TARGETS[form.target], settings)


def answer(
    entry: GemmEntry,
    problem: GemmProblem,
    tensors: tuple[Tensor, ...],
    settings: CompileSettings,
    form: GemmForm | None,
) -> Tensor:
    """Check D and the GPU, choose a form if none is given, and compute D."""
    out = tensors[-1]
    contract.require_output(problem, out)
    contract.require_place(tensors, entry.target)
    if problem.rows:
        form = form or facts.choose_form(problem, entry.target.name)
        launch(entry, entry.compiled(form, settings), form, problem, tensors)
    return out


def launch(
    entry: GemmEntry,
    kernel: CompiledKernel,
    form: GemmForm,
    problem: GemmProblem,
    tensors: tuple[Tensor, ...],
) -> None:
    """Launch on checked tensors. A form with swapped operands computes D^T, so extents are N, M."""
    device = tensors[-1].device.index or 0
    *_, clusters = facts.grid(problem, form.tactic, operands.processors_of(device))
    m, n = problem.rows, problem.columns
    walked = (n, m) if form.tactic.swapped else (m, n)
    extents = tuple(map(Int32, (*walked, problem.inner, clusters)))
    kernel(entry.pointers(form, tensors), extents, current_stream(device))
