"""Say which data would tell more of a component whose difference nothing explains.

Numbers of a product are solved for where its inputs have full rank, with a few rows beyond it that
the solution has to predict. A difference that more rows would not help with has no such sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.recover.matrices import SPARE_ROWS
from degarble.references.linears import X, holds_codes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

_MOST_COLUMNS = 16_384  # of inputs whose rank is looked up


def lacking(context: ComponentContext, record: CallRecord) -> str:
    """Return what to capture, in one sentence; empty where more data would not raise the answer."""
    for side, tensors in (("input", record.inputs), ("output", record.outputs)):
        wild = _not_finite(tensors)
        if wild:
            return (
                f"Numbers of its {side} {wild} are not finite, and nothing is recovered from these:"
                " capture a prompt without them."
            )
    if not (X in record.inputs or holds_codes(record.inputs)):
        return ""
    call = JudgeableCall.from_twin(context.bound, context.name, record.inputs, record.expected)
    x = call.x.double().flatten(0, -2)
    rows, wide = x.shape
    names = [
        name for name, w in context.weights.items() if len(w.shape) == 2 and w.shape[1] == wide
    ]
    if not names or wide > _MOST_COLUMNS:
        return ""
    rank = int(torch.linalg.matrix_rank(x))
    more = max(wide + SPARE_ROWS - rows, wide - rank)
    if more <= 0:
        return ""
    return (
        f"Give it {more:,} more rows of inputs (tokens, in a captured run) to see every number that"
        f" it multiplied by: that takes {wide + SPARE_ROWS:,} rows of rank {wide:,}, and there are"
        f" {rows:,} of rank {rank:,}."
    )


def _not_finite(tensors: Mapping[str, Tensor]) -> str:
    wild = (n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all()))
    return next(wild, "")
