"""Identify the stored tensors that a loader reads, and apply the conversions of its map.

Identity is the parameter and its part. A converted module continues as new tensors, computed from
the parts that the map reads. A tensor that is stored fused counts as one source for each slot,
because engines cut such a tensor slot by slot.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import LayoutMismatch, Refused
from degarble.harness.checkpoint.audit.loader.maps import FP8, ONE_SCALE, compiled
from degarble.harness.checkpoint.audit.structure.inventory import stored_recipe
from degarble.harness.model.recipes import BF16
from degarble.harness.model.tensors import PartKind, slots
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from degarble.harness.checkpoint.audit.loader.maps import Convert, LoaderMap
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory, StoredParameter
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.modules import ModuleTable
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.tensors import Slot

_USUAL_BLOCK = (128, 128)
_WEIGHT_PARTS = frozenset(
    {PartKind.VALUE, PartKind.CODES, PartKind.BLOCK_SCALE, PartKind.TENSOR_SCALE}
)


class SourceTensor(NamedTuple):
    """A tensor that a loader reads. `parameter` None: the model has no such tensor.

    `made_from`: the stored tensors that a converted one was computed from. `inside`: for a slot of
    a fused tensor, its box in the stored tensor; `order`: its slot number there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parameter: Parameter | None
    part: PartKind | None
    made_from: tuple[str, ...] = ()
    inside: Box | None = None
    order: int = 0

    def stored(self, box: Box) -> Box:
        """Translate a box of this source into a box of the stored tensor."""
        if self.inside is None:
            return box
        lead = len(self.inside.ranges) - len(box.ranges)
        own = zip(self.inside.ranges[lead:], box.ranges, strict=True)
        moved = ((first + start, first + stop) for (first, _), (start, stop) in own)
        return Box((*self.inside.ranges[:lead], *moved))


class MatchedConversion(NamedTuple):
    """A module that a conversion rule matches, with the parts it has and those that are read."""

    rule: Convert
    parameter: StoredParameter
    has: frozenset[PartKind]
    reads: frozenset[PartKind]


def require_unfused(inventory: Inventory, engine: str = "") -> None:
    """Raise if parameters share tensors in the checkpoint, unless as in this engine's layout."""
    if inventory.fused and inventory.layout.name != engine:
        raise LayoutMismatch(
            "layout of the checkpoint",
            inventory.layout.name,
            "one tensor a part of each parameter",
            "It is fused for an engine already: prove the checkpoint that it was made from.",
        )


def identified(table: ModuleTable, inventory: Inventory | None) -> Iterator[SourceTensor]:
    """Yield every stored tensor with its identity; a fused one slot by slot."""
    by_module = (
        {}
        if inventory is None
        else {stored_parameter.module: stored_parameter for stored_parameter in inventory.stored}
    )
    fused = {} if inventory is None or not inventory.fused else _fused(inventory)
    for module in table.suffixes:
        parameter = by_module.get(module)
        try:
            parts = table.parts(module)
        except Refused:  # two tensors for one part: the structure audit reports it
            yield from (_source(entry, None, None) for entry in table.tensors(module))
            continue
        for part, entry in parts.items():
            slots_here = fused.get(entry.name, ())
            if slots_here and _extents(slots_here) == entry.shape:
                yield from (_slot_source(entry, *each) for each in slots_here)
            elif inventory is not None and module in inventory.fused:
                yield _source(entry, None, None)  # of other extents: the structure audit reports it
            else:
                yield _source(entry, part, parameter)


def _fused(inventory: Inventory) -> dict[str, list[tuple[Slot, int]]]:
    """Return the slots of every fused tensor, each with its number among the partners."""
    layout = inventory.layout.with_recipe(stored_recipe(inventory))
    orders = {row: i for fusion in layout.fusions for i, row in enumerate(fusion.members)}
    members = [parameter for group in inventory.fused.values() for parameter in group]
    found: dict[str, list[tuple[Slot, int]]] = defaultdict(list)
    for slot in slots(inventory.config, layout, members) if members else ():
        found[slot.tensor].append((slot, orders[slot.parameter.row.name]))
    return found


def _extents(found: Iterable[tuple[Slot, int]]) -> tuple[int, ...]:
    ranges = zip(*(slot.box.ranges for slot, _ in found), strict=True)
    return tuple(max(stop for _, stop in each) for each in ranges)


def _slot_source(entry: TensorEntry, slot: Slot, order: int) -> SourceTensor:
    return SourceTensor(
        entry.name, entry.dtype, slot.shape, slot.parameter, slot.part, (), slot.box, order
    )


def _source(
    entry: TensorEntry, part: PartKind | None, parameter: StoredParameter | None
) -> SourceTensor:
    if parameter is None:
        return SourceTensor(entry.name, entry.dtype, entry.shape, None, None)
    # A plain `.weight` has the suffix of codes: only the format tells them apart.
    plain = part is PartKind.CODES and parameter.weight == BF16
    known = PartKind.VALUE if plain else part
    return SourceTensor(entry.name, entry.dtype, entry.shape, parameter.parameter, known)


class Conversions:
    """The conversion rules of a map."""

    def __init__(self, loader_map: LoaderMap, table: ModuleTable) -> None:
        self._rules = [
            (compiled("convert", convert.match), convert) for convert in loader_map.convert
        ]
        self._table = table
        self.used: set[str] = set()

    def matching(self, parameter: StoredParameter) -> MatchedConversion | None:
        """Return the first conversion that matches a module which is not in its target format."""
        for pattern, rule in self._rules:
            if parameter.weight in (None, rule.to) or not pattern.search(parameter.module):
                continue
            self.used.add(rule.match)
            has = frozenset(self._parts(parameter))
            reads = has & _WEIGHT_PARTS if rule.reads is None else rule.reads
            return MatchedConversion(rule, parameter, has, reads)
        return None

    def _parts(self, parameter: StoredParameter) -> dict[PartKind, TensorEntry]:
        parts = self._table.parts(parameter.module)
        if parameter.weight == BF16:
            parts[PartKind.VALUE] = parts.pop(PartKind.CODES)
        return parts

    def outputs(self, conversion: MatchedConversion) -> Iterator[SourceTensor]:
        """Yield the tensors that a conversion makes."""
        rule, parameter = conversion.rule, conversion.parameter
        parts = self._parts(parameter)
        origins = tuple(entry.name for part, entry in parts.items() if part in conversion.reads)
        shape, name = parameter.parameter.shape, f"{parameter.module}.weight"
        if rule.to != FP8:
            yield SourceTensor(name, "BF16", shape, parameter.parameter, PartKind.VALUE, origins)
            return
        yield SourceTensor(name, "F8_E4M3", shape, parameter.parameter, PartKind.CODES, origins)
        scales: tuple[int, ...] = (1,)
        if rule.block != ONE_SCALE:
            # What is not stated has its own finding.
            blocks = rule.block if isinstance(rule.block, tuple) else _USUAL_BLOCK
            scales = tuple(-(-extent // block) for extent, block in zip(shape, blocks, strict=True))
        name = parameter.module + rule.suffix
        yield SourceTensor(
            name, str(rule.scale), scales, parameter.parameter, PartKind.BLOCK_SCALE, origins
        )

    def dead(self) -> list[tuple[str, str]]:
        """Return the rules that matched no module."""
        return [("convert", rule.match) for _, rule in self._rules if rule.match not in self.used]
