"""Describe a plain (ungrouped) GEMM, D = A B^T: what all operand formats and targets share.

Shape letters: M, N of D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from cutlass import BFloat16, Int32

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.problem import TMA_ALIGNMENT, GemmForm, GemmProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.kernels.runtime.targets import Target

GemmOperand = Operand[GemmProblem]
BF16 = Storage(BFloat16, torch.bfloat16, TMA_ALIGNMENT)
EXTENTS = 4  # of a launch: M, N, K, clusters


def require_one_block(_problem: GemmProblem, form: GemmForm) -> None:
    """Raise on a tactic of several thread blocks a processor, unless they write D themselves."""
    if form.tactic.blocks != 1 and not form.tactic.direct:
        raise InvalidArgument(
            "thread blocks of a processor", form.tactic.blocks, "1 in a plain GEMM of many rows",
            "Only few rows and the grouped products launch several.",
        )  # fmt: skip


def described(
    entry: Callable[..., Any],
    operands: tuple[GemmOperand, ...],
    target: Target,
    refuse_form: Callable[[GemmProblem, GemmForm], None] = require_one_block,
) -> Kernel[GemmProblem, GemmForm]:
    """Describe a GEMM with these operands and D."""
    d = GemmOperand("out", BF16, lambda p: (p.rows, p.columns), output=True, label="D")
    return Kernel[GemmProblem, GemmForm](
        entry=entry,
        operands=(*operands, d),
        choose_form=facts.choose_form,
        kinds=((Int32,) * EXTENTS,),
        numbers=_numbers,
        work=lambda problem: problem.rows,
        target=target,
        refuse_form=refuse_form,
    )


def _numbers(of: LaunchContext[GemmProblem, GemmForm]) -> tuple[Any, ...]:
    problem, tactic = of.problem, of.form.tactic
    *_, clusters = facts.grid(problem, tactic, of.processors * tactic.blocks)
    # A form with swapped operands computes D^T.
    walked = facts.sides((problem.rows, problem.columns), tactic)
    return ((*walked, problem.inner, clusters),)
