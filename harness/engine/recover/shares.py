"""Look at the columns of an output that one rank holds, where all others are right.

A cause that is seen in one rank's columns may be one of everything: its other columns were computed
by ranks that are healthy. So outputs elsewhere are taken as they are while it is recovered, and a
variant acts in these columns alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.localise.discrepancy import outputs_beyond
from degarble.harness.engine.recover.stated import operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]

RANKS = (8, 4, 2)
_FILLED = 0.5  # of a rank's columns are wrong, at least


@dataclass(frozen=True, eq=False)
class Share:
    """Calls of which one rank's columns are looked at."""

    calls: Sequence[CallRecord]
    columns: Mapping[str, tuple[int, int]]  # by output
    words: str


def shares_of(context: ComponentContext, calls: Sequence[CallRecord]) -> Share | None:
    """Return the smallest share of columns that holds all wrong outputs; None where none does."""
    wrong: dict[str, Tensor] = {}
    for record in calls:
        for name, (bad, _) in (outputs_beyond(context, record, record.outputs) or {}).items():
            if bad.ndim < 2:
                return None
            own = bad.flatten(0, -2).any(0)
            if name in wrong and len(wrong[name]) != len(own):
                return None  # as wide as a call is long: these are no columns of a rank
            wrong[name] = wrong.get(name, torch.zeros_like(own)) | own
    found = [(name, ends) for name, bad in wrong.items() if bool(bad.any())
             and (ends := _ends(bad)) is not None]  # fmt: skip
    if not found or len(found) < sum(bool(bad.any()) for bad in wrong.values()):
        return None
    columns = dict(found)
    parts = [
        f"columns {begin} to {end - 1}{'' if len(wrong) == 1 else f' of {name}'}"
        for name, (begin, end) in columns.items()
    ]
    cut = [replace(record, held=_held(record, columns)) for record in calls]
    return Share(cut, columns, f"{' and '.join(parts)} of the outputs")


def _ends(wrong: Tensor) -> tuple[int, int] | None:
    at, wide = wrong.nonzero().flatten(), len(wrong)
    for count in RANKS:
        part = wide // count
        fills = part and wide % count == 0 and _FILLED * part <= len(at)
        if fills and int(at[0]) // part == int(at[-1]) // part:
            begin = int(at[0]) // part * part
            return begin, begin + part
    return None


def _held(record: CallRecord, columns: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    made = {}
    for name, (begin, end) in columns.items():
        if name in record.outputs:
            made[name] = torch.zeros(record.outputs[name].shape, dtype=torch.bool)
            made[name][..., begin:end] = True
    return made


@operation
def only_in(columns: Mapping[str, tuple[int, int]], of: Callable[[Any], Any], call: Any) -> Any:
    """Return a call that is changed in some columns of its outputs alone."""
    changed = of(call)

    def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        right = call(inputs, weights)
        wrong = changed(inputs, weights)
        made = dict(right)
        for name, (begin, end) in columns.items():
            made[name] = right[name].clone()
            made[name][..., begin:end] = wrong[name][..., begin:end].to(right[name].dtype)
        return made

    return faulty
