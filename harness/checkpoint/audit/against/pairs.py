"""Match each weight of a checkpoint with its counterpart in the reference.

If both have a known config, weights are matched by logical name, whatever the spelling, fusing and
stacking on either side; otherwise by the name of the stored module. A stack that a config knows as
one matrix (wo_a in three axes) is compared member by member with its rows. Weights without a
counterpart are listed with the reason. A reference of another family, or with no tensor in common,
is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import InvalidArgument, Refused, Undecided
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.convert.vllm_parameters import (
    is_arranged,
    stated_backend,
)
from degarble.harness.checkpoint.view.weight_units import stored_of, units_of

if TYPE_CHECKING:
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.view.weight_units import WeightUnit


class Pair(NamedTuple):
    """A weight on both sides; `there` is its name in the reference.

    `member`: its index in a stack there; `rows`: half-open row range, where it is part of a weight
    there.
    """

    unit: WeightUnit
    there: str
    member: int | None
    rows: tuple[int, int] | None
    nbytes: int  # of both sides


@dataclass
class Pairs:
    """All pairs, and unmatched weights with reasons. `unlike`: pairs of different shapes."""

    pairs: list[Pair] = field(default_factory=list)
    unlike: dict[str, str] = field(default_factory=dict)
    only_here: dict[str, str] = field(default_factory=dict)
    only_there: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that a comparison reads on both sides."""
        return sum(pair.nbytes for pair in self.pairs)


def pairs_of(checkpoint: Checkpoint, reference: Checkpoint) -> Pairs:
    """Match every weight of a checkpoint with its counterpart."""
    _require_one_family(checkpoint, reference)
    found, pairing = Pairs(), _Pairing(checkpoint, reference)
    for unit in units_of(checkpoint).units:
        if pairing.is_arranged(unit):
            found.only_here[unit.name] = "it is stored in the order of one backend's kernels"
            continue
        place = pairing.place_of(unit)
        if place is None:
            found.only_here[unit.name] = "the reference has nothing by its name"
            continue
        _take(pairing, unit, place, found)
    if not found.pairs:
        raise Undecided(
            "tensors that both checkpoints have",
            0,
            "at least one of one name and shape",
            "Name the checkpoint that this one was made from.",
        )
    _require_one_model(found)
    taken = {pair.there for pair in found.pairs} | found.unlike.keys()
    for name in pairing.names_there:
        if name not in taken:
            found.only_there[name] = "this checkpoint has nothing by its name"
    return found


def stored_there(reference: Checkpoint, pair: Pair) -> StoredWeight:
    """Return the reference's weight of a pair, whole even where `rows` selects a part."""
    stored = reference.stored(pair.there)
    return stored if pair.member is None else stored.member(pair.member)


def _take(pairing: _Pairing, unit: WeightUnit, place: _Place, found: Pairs) -> None:
    """Add a pair, if both sides can be read and have one shape."""
    try:
        here = stored_of(pairing.checkpoint, unit)
        there = pairing.reference.stored(place.name)
        there = there if place.member is None else there.member(place.member)
    except Refused as error:
        found.unlike[unit.name] = str(error)
        return
    height = there.shape[0] if there.shape else 1
    rows = place.rows(here.shape[0] if here.shape else 1)
    shape = there.shape if rows is None else (rows[1] - rows[0], *there.shape[1:])
    # A row range must begin and end at whole blocks of the reference's format.
    unit_rows = there.format.block[0] if there.format else 1
    is_cut = rows is not None and (
        rows[0] % unit_rows or (rows[1] % unit_rows and rows[1] < height)
    )
    if here.shape != shape or (rows and rows[1] > height) or is_cut:
        found.unlike[unit.name] = f"{list(here.shape)}, in the reference {list(there.shape)}"
        return
    size = sum(entry.nbytes for entry in there.form.parts.values())
    if there.boxes is not None or place.member is not None or rows is not None:
        size = _share(there, size, shape)
    found.pairs.append(Pair(unit, place.name, place.member, rows, unit.nbytes + size))


def _share(stored: StoredWeight, size: int, shape: tuple[int, ...]) -> int:
    """Return roughly how many bytes of a shared module belong to a weight."""
    whole = elements = 1
    for extent in stored.form.shape:
        whole *= extent
    for extent in shape:
        elements *= extent
    return size * elements // max(whole, 1)


class _Place(NamedTuple):
    """A weight's location in the reference; `part`: index of a member stored as rows there."""

    name: str
    member: int | None
    part: int | None

    def rows(self, height: int) -> tuple[int, int] | None:
        return None if self.part is None else (self.part * height, (self.part + 1) * height)


class _Pairing:
    """Both checkpoints, with their name tables."""

    def __init__(self, checkpoint: Checkpoint, reference: Checkpoint) -> None:
        self.checkpoint, self.reference = checkpoint, reference
        self._by_name = checkpoint.names is not None and reference.names is not None
        self._backend = stated_backend(checkpoint)

    def is_arranged(self, unit: WeightUnit) -> bool:
        return self._backend is not None and is_arranged(unit.module)

    def place_of(self, unit: WeightUnit) -> _Place | None:
        names = self.reference.names
        if unit.is_bare:
            return None
        if self._by_name and names is not None:
            if unit.member is None and unit.name in names.present:
                return _Place(unit.name, None, None)
            logical = self._logical_of.get(unit.module, "")
            if logical in names.present:
                return _Place(logical, None, unit.member)
        if unit.module in self.reference.table.suffixes:
            return _Place(unit.module, unit.member, None)
        return None

    @cached_property
    def names_there(self) -> list[str]:
        names = self.reference.names
        if self._by_name and names is not None:
            return list(names.present)
        return list(self.reference.table.suffixes)

    @cached_property
    def _logical_of(self) -> dict[str, str]:
        """Logical names by stored module, where a module holds one parameter."""
        names = self.checkpoint.names
        if names is None:
            return {}
        own = (each for each in names.present.values() if not names.is_fused(each))
        return {names.module_of(each): each.name for each in own}


def _require_one_family(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    """Raise for another family, unless more than half of the module names agree."""
    here, there = checkpoint.model, reference.model
    common = len(checkpoint.table.suffixes.keys() & reference.table.suffixes.keys())
    # Mostly equal names: a wrong family in the config is a finding, not another model.
    if common * 2 > len(checkpoint.table.suffixes):
        return
    if here is not None and there is not None and here.family != there.family:
        raise InvalidArgument(
            f"reference {shown(str(reference.root))}",
            there.family,
            f"a model of the family {here.family}",
            "Name the checkpoint that this one was made from.",
        )


def _require_one_model(found: Pairs) -> None:
    if len(found.unlike) > len(found.pairs):
        name, told = next(iter(found.unlike.items()))
        raise InvalidArgument(
            "reference",
            f"{len(found.unlike)} weights of other shapes, such as {shown(name)}: {told}",
            "the same model in another layout or format",
            "Name the checkpoint that this one was made from.",
        )
