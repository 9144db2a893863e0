"""Look at the heads, or the columns of an output that one rank holds, where all others are right.

A cause that is seen in one rank's columns may be one of everything: its other columns were computed
by ranks that are healthy. So outputs elsewhere are taken as they are while it is recovered, and a
variant acts in these columns alone. The same holds of single heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import FaultVariant
from degarble.harness.engine.localise.discrepancy import axis_of, outputs_beyond, spans
from degarble.harness.engine.recover.stated import operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]

RANKS = (8, 4, 2)
HEADS_APART = 3  # axes of an output that has one for heads
_FILLED = 0.5  # of a rank's columns are wrong, at least


Ends = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Share:
    """Calls of which some heads, or one rank's columns, are looked at."""

    calls: Sequence[CallRecord]
    words: str
    columns: Mapping[str, Ends]  # by output
    heads: Mapping[str, tuple[int, ...]]  # by output; one of both is empty

    def alone(self, variant: FaultVariant) -> FaultVariant:
        """Return a variant that acts there and nowhere else."""
        only: Any = partial(only_in_heads, self.heads) if self.heads else (
            partial(only_in, self.columns)
        )  # fmt: skip
        return FaultVariant(
            f"{variant.words}, in {self.words} alone", partial(only, variant.apply),
            variant.where, stores_within=variant.stores_within,
        )  # fmt: skip


def shares_of(context: ComponentContext, calls: Sequence[CallRecord]) -> Share | None:
    """Return the heads, or the smallest share of columns, that hold all wrong outputs; or None."""
    wrong: dict[str, Tensor] = {}
    hit: dict[str, Tensor] = {}
    for record in calls:
        for name, (bad, _) in (outputs_beyond(context, record, record.outputs) or {}).items():
            if bad.ndim < 2:
                return None
            own = bad.flatten(0, -2).any(0)
            if name in wrong and len(wrong[name]) != len(own):
                return None  # as wide as a call is long: these are no columns of a rank
            wrong[name] = wrong.get(name, torch.zeros_like(own)) | own
            if bad.ndim == HEADS_APART:
                heads = bad.any(2).any(0)
                hit[name] = hit.get(name, torch.zeros_like(heads)) | heads
    struck = [name for name, bad in wrong.items() if bool(bad.any())]
    return _of_heads(context, calls, struck, hit) or _of_columns(calls, struck, wrong)


def _of_heads(
    context: ComponentContext, calls: Sequence[CallRecord], struck: Sequence[str],
    hit: Mapping[str, Tensor],
) -> Share | None:  # fmt: skip
    axis = axis_of(context.component)
    if not axis or not struck or any(n not in hit or bool(hit[n].all()) for n in struck):
        return None
    heads = {name: tuple(hit[name].nonzero().flatten().tolist()) for name in struck}
    parts = [
        f"{axis}{'s' if len(own) > 1 else ''} {spans(list(own))}"
        f"{'' if len(hit) == 1 else f' of {name}'}"
        for name, own in heads.items()
    ]
    cut = [replace(record, held=_held(record, {}, heads)) for record in calls]
    return Share(cut, f"{' and '.join(parts)} of the outputs", {}, heads)


def _of_columns(
    calls: Sequence[CallRecord], struck: Sequence[str], wrong: Mapping[str, Tensor]
) -> Share | None:
    found = [(name, ends) for name in struck if (ends := _ends(wrong[name])) is not None]
    if not found or len(found) < len(struck):
        return None
    columns = dict(found)
    parts = [
        f"columns {begin} to {end - 1}{'' if len(wrong) == 1 else f' of {name}'}"
        for name, (begin, end) in columns.items()
    ]
    cut = [replace(record, held=_held(record, columns, {})) for record in calls]
    return Share(cut, f"{' and '.join(parts)} of the outputs", columns, {})


def _ends(wrong: Tensor) -> tuple[int, int] | None:
    at, wide = wrong.nonzero().flatten(), len(wrong)
    for count in RANKS:
        part = wide // count
        fills = part and wide % count == 0 and _FILLED * part <= len(at)
        if fills and int(at[0]) // part == int(at[-1]) // part:
            begin = int(at[0]) // part * part
            return begin, begin + part
    return None


def _held(
    record: CallRecord, columns: Mapping[str, Ends], heads: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    made = {}
    for name, at in (_columns_at(columns) | _heads_at(heads)).items():
        if name in record.outputs:
            made[name] = torch.zeros(record.outputs[name].shape, dtype=torch.bool)
            made[name][at] = True
    return made


def _columns_at(columns: Mapping[str, Ends]) -> dict[str, Any]:
    """Return the index of columns, by output."""
    return {name: (..., slice(*ends)) for name, ends in columns.items()}


def _heads_at(heads: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the index of heads, by output."""
    return {name: (slice(None), list(chosen)) for name, chosen in heads.items()}


@operation
def only_in(columns: Mapping[str, Ends], of: Callable[[Any], Any], call: Any) -> Any:
    """Return a call that is changed in some columns of its outputs alone."""
    return _only_at(_columns_at(columns), of, call)


@operation
def only_in_heads(heads: Mapping[str, tuple[int, ...]], of: Callable[[Any], Any], call: Any) -> Any:
    """Return a call that is changed in some heads of its outputs alone."""
    return _only_at(_heads_at(heads), of, call)


def _only_at(places: Mapping[str, Any], of: Callable[[Any], Any], call: Any) -> Any:
    changed = of(call)

    def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        right = call(inputs, weights)
        wrong = changed(inputs, weights)
        made = dict(right)
        for name, at in places.items():
            made[name] = right[name].clone()
            made[name][at] = wrong[name][at].to(right[name].dtype)
        return made

    return faulty
