"""Sample a recorded call for trials: few rows and few columns, those that differ most.

The call that shows most is chosen, a window of its rows, and columns of each output. A window is
contiguous and begins at a multiple of its size, so that a fault that counts rows or tiles keeps its
pattern. Calls with sequences or memory are never cut. A sample only orders trials: a named fault is
proved on every row of every call.

Shape letters: T tokens, F columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.diagnose.trial import (
    decoded_once,
    distance,
    only_roundings,
    seen_tensors,
    untouched,
)
from degarble.harness.engine.faults.regions import cancelled, extents
from degarble.harness.engine.localise.judgeable_rows import rows_by_sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]
    Measure = Callable[[Tensors, Tensors], float]

_EXPERTS = 3  # experts kept in a sample
WINDOW = 64  # rows at most
COLUMNS = 256  # of an output at most: half of them the worst, half spread evenly
_FAINT = 0.01  # of an output's length: a few roundings of BF16
_OUTSIDE = frozenset({"offsets", "state"})


@dataclass(frozen=True, eq=False)
class Sample:
    """A sight cut to a window of rows, and the columns of its outputs to compare."""

    sight: CallRecord
    columns: Mapping[str, Tensor]
    whole: bool  # whether no row was left out
    plain: Tensors | None  # its inputs with codes decoded
    rows: Tensor | None = None  # rows of the single matrix whose outputs are compared

    @cached_property
    def candidate(self) -> dict[str, Tensor]:
        """Return the tensors that a trial has to reproduce, in the chosen columns."""
        return self.looked_at(seen_tensors(self.sight))

    def before(self, measure: Measure) -> float:
        """Return the difference without any fault."""
        if measure not in self._before:
            self._before[measure] = measure(self.candidate, self.looked_at(untouched(self.sight)))
        return self._before[measure]

    @cached_property
    def only_roundings(self) -> bool:
        """Tell whether only roundings are left to explain."""
        return only_roundings(self.candidate, self.looked_at(untouched(self.sight)))

    @cached_property
    def _before(self) -> dict[Measure, float]:
        return {}

    def looked_at(self, outputs: Tensors) -> dict[str, Tensor]:
        """Keep the chosen columns of outputs."""
        return {name: self._chosen(name, each) for name, each in outputs.items()}

    def _chosen(self, name: str, output: Tensor) -> Tensor:
        columns = self.columns.get(name)
        if columns is None or output.ndim < 2 or output.shape[-1] <= int(columns[-1]):
            return output
        return output.index_select(-1, columns)


def most_telling(sights: Sequence[CallRecord]) -> CallRecord:
    """Return the call whose outputs are farthest from the right ones.

    Of faint differences, return the largest call at a similar distance: roundings are a large part
    of each, and few rows do not show what roundings hide.
    """
    far = [distance(seen_tensors(each), untouched(each)) for each in sights]
    most = max(far)
    if not most <= _FAINT:  # a NaN is not faint
        return sights[far.index(most)]
    near = [each for each, own in zip(sights, far, strict=True) if own >= most / 2]
    return max(near, key=lambda each: sum(out.numel() for out in seen_tensors(each).values()))


def sampled(scene: ComponentContext, sight: CallRecord, window: int = WINDOW) -> Sample:
    """Cut a sight to the window of rows that differs most, if its rows are independent."""
    cut = _window(sight, window) if _is_by_row(scene, sight) else sight
    whole = cut is sight
    if "experts" in cut.inputs and scene.role.startswith("ffn.experts.w") and window == WINDOW:
        cut = _few_experts(cut)
    columns = {
        name: _columns(each, untouched(cut)[name])
        for name, each in seen_tensors(cut).items()
        if name in untouched(cut) and each.ndim > 1 and each.shape[-1] > COLUMNS
    }
    chosen = {name: each for name, each in columns.items() if len(each)}
    rows = chosen.get("out") if len(extents(scene, cut)) == 1 else None
    return Sample(cut, chosen, whole, decoded_once(scene, cut), rows)


def _is_by_row(scene: ComponentContext, sight: CallRecord) -> bool:
    """Tell whether rows are independent and lead every tensor that has one for each token."""
    if sight.implied or any(each.via in _OUTSIDE for each in scene.component.inputs):
        return False
    counts = {each.shape[0] for each in _all(sight) if each.ndim}
    return len(counts) == 1


def _all(sight: CallRecord) -> list[Tensor]:
    return [*sight.inputs.values(), *sight.outputs.values(), *sight.expected.values()]


def _window(sight: CallRecord, size: int) -> CallRecord:
    first = next(each for each in _all(sight) if each.ndim)
    count = first.shape[0]
    if count <= size:
        return sight
    weight_T = torch.zeros(count)
    for name, each in sight.outputs.items():
        if not each.ndim:
            continue
        weight_T += _apart(each, sight.expected.get(name)).reshape(count, -1).sum(1)
    # Sum of differences per window of `size` rows.
    windows = torch.nn.functional.pad(weight_T, (0, -count % size)).reshape(-1, size).sum(1)
    begin = int(windows.argmax()) * size
    return rows_of(sight, slice(begin, min(begin + size, count)))


def _few_experts(sight: CallRecord) -> CallRecord:
    """Keep the slots of the experts that differ most, and of one that differs least."""
    experts = sight.inputs["experts"]
    if "out" not in sight.outputs or sight.outputs["out"].shape != sight.expected["out"].shape:
        return sight
    # [T, K] mean difference of each slot
    of_slot = _apart(sight.outputs["out"], sight.expected["out"]).mean(-1)
    held = experts[experts >= 0].unique().tolist()
    if len(held) <= _EXPERTS:
        return sight
    ranked = sorted(held, key=lambda number: -float(of_slot[experts == number].mean()))
    # The expert that differs least guards against variants that damage every expert.
    chosen = torch.tensor([*ranked[: _EXPERTS - 1], ranked[-1]])
    kept = torch.isin(experts, chosen)

    def masked(side: Tensors) -> dict[str, Tensor]:
        return {**side, "out": torch.where(kept[..., None], side["out"], 0)}

    inputs = {**sight.inputs, "experts": experts.where(kept, -1)}
    outputs, expected = masked(sight.outputs), masked(sight.expected)
    return replace(sight, inputs=inputs, outputs=outputs, expected=expected)


def together(scene: ComponentContext, sights: Sequence[CallRecord]) -> list[CallRecord]:
    """Concatenate calls with independent rows, so that one sight shows all experts."""
    first = sights[0]
    if len(sights) == 1 or not all(_is_by_row(scene, each) for each in sights):
        return list(sights)
    if any(_likeness(each) != _likeness(first) for each in sights):
        return list(sights)

    def joined(side: str) -> dict[str, Tensor]:
        parts = [getattr(each, side) for each in sights]
        return {
            name: torch.cat([each[name] for each in parts]) if tensor.ndim else tensor
            for name, tensor in parts[0].items()
        }

    rows = tuple(count for each in sights for count in (each.rows or (_height(each),)))
    owners = tuple(owner for each in sights for owner in each.owners)
    sides = (joined("inputs"), joined("outputs"), joined("expected"))
    return [
        replace(
            first, inputs=sides[0], outputs=sides[1], expected=sides[2], rows=rows, owners=owners
        )
    ]


def _likeness(sight: CallRecord) -> list[tuple[object, ...]]:
    """Return names, dtypes and extents; scalars that all rows share have to be equal."""
    sides = (sight.inputs, sight.outputs, sight.expected)
    return [
        (name, each.dtype, *(each.shape[1:] if each.ndim else (float(each),)))
        for side in sides
        for name, each in side.items()
    ]


def _height(sight: CallRecord) -> int:
    return next(each.shape[0] for each in _all(sight) if each.ndim)


def calls_in(sight: CallRecord) -> list[CallRecord]:
    """Split a sight into its calls, where several are concatenated."""
    if len(sight.rows) < 2:
        return [sight]
    begins = [sum(sight.rows[:at]) for at in range(len(sight.rows))]
    return [
        rows_of(sight, slice(begin, begin + count))
        for begin, count in zip(begins, sight.rows, strict=True)
    ]


def sequences_in(scene: ComponentContext, sight: CallRecord) -> list[CallRecord]:
    """Split one call by sequences; return it whole where they cannot be separated."""
    if _is_by_row(scene, sight):
        return _by_owner(sight)
    if sight.implied or "token_offsets" not in sight.inputs:
        return [sight]
    return list(alone(scene, sight)) or [sight]


def _by_owner(sight: CallRecord) -> list[CallRecord]:
    owners = sight.owners
    if len(owners) != _height(sight):
        return [sight]
    begins = [at for at in range(len(owners)) if not at or owners[at] != owners[at - 1]]
    ends = [*begins[1:], len(owners)]
    return [rows_of(sight, slice(a, b)) for a, b in zip(begins, ends, strict=True)]


def alone(scene: ComponentContext, sight: CallRecord) -> Iterator[CallRecord]:
    """Yield every sequence of a call whose tokens interact; nothing where they are ambiguous."""
    lines = rows_by_sequence(scene.component, scene.bound.config, sight.inputs)
    if lines is None:
        return
    for number in range(len(lines.spans)):
        counts = [span.count * (at == number) for at, span in enumerate(lines.spans)]
        sides = [lines.cut_side(side, counts) for side in _sides(sight)]
        if any(side is None for side in sides):
            return
        inputs, outputs, expected = (side or {} for side in sides)
        yield replace(sight, inputs=inputs, outputs=outputs, expected=expected, rows=(), owners=())


def _sides(sight: CallRecord) -> tuple[Tensors, Tensors, Tensors]:
    return sight.inputs, sight.outputs, sight.expected


def rows_of(sight: CallRecord, rows: slice) -> CallRecord:
    """Return some rows of a sight with independent rows."""

    def part(side: Tensors) -> dict[str, Tensor]:
        return {name: each[rows] if each.ndim else each for name, each in side.items()}

    inputs, outputs, expected = (part(side) for side in _sides(sight))
    owners = sight.owners[rows]
    return replace(sight, inputs=inputs, outputs=outputs, expected=expected, rows=(), owners=owners)


def _apart(c: Tensor, e: Tensor | None) -> Tensor:
    """Return a distance from 0 to 1 for each element, relative to both magnitudes."""
    if e is None or e.shape != c.shape:
        return torch.ones(c.shape)
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1:
        return (c != e).float()
    # Where terms cancel only roundings are left, which would outweigh a faint fault; so ignore
    # these elements, unless nothing else differs.
    beside = (c == e) | cancelled(c, e)
    alike = c == e if bool(beside.all()) else beside
    c, e = c.float(), e.float()
    apart = torch.where(alike, 0.0, (c - e).abs() / (c.abs() + e.abs() + 1e-30))
    return torch.nan_to_num(apart, 1.0, 1.0, 1.0)


def _columns(c: Tensor, e: Tensor) -> Tensor:
    if e.shape != c.shape:
        return torch.empty(0, dtype=torch.int64)
    weight_F = _apart(c, e).flatten(0, -2).sum(0)
    # Half of the columns by difference, half evenly spread.
    worst = weight_F.topk(COLUMNS // 2).indices
    step = -(-len(weight_F) // (COLUMNS // 2))
    spread = torch.arange(0, len(weight_F), step)
    chosen: Tensor = torch.cat((worst, spread)).unique()
    return chosen
