"""Every stored tensor of a checkpoint or an engine, with name, shape and dtype.

`slots` says for each part of every parameter which tensor holds it and which box of that tensor.
Names and shapes of tensors, name maps (names.py) and the tensors of one rank (sharding.py) derive
from it. Fused tensors need partners of one format, no cut through a scale block, and a format
that the layout has a name for.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import InvalidArgument, PartnersMismatch
from degarble.harness.model.parameters import parameters
from degarble.harness.model.storage import Part, parts_of, suffixes_named
from degarble.harness.model.types import Box, Dtype, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Fusion, Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Formats
    from degarble.harness.model.storage import StoredPart


class Slot(NamedTuple):
    """One part of one parameter, and the box of the tensor that stores it."""

    parameter: Parameter
    part: Part
    tensor: str
    box: Box
    shape: tuple[int, ...]  # of the part itself; the box may have leading ones before it
    dtype: Dtype

    @property
    def key(self) -> tuple[str, Part]:
        """Return parameter and part, whatever the layout."""
        return self.parameter.name, self.part


def slots(
    config: Config, layout: Layout, only: Iterable[Parameter] | None = None
) -> Iterator[Slot]:
    """Place every part of every parameter, or of `only` those, that the layout stores."""
    if layout.family != config.family:
        raise InvalidArgument(
            f"layout {layout.name}",
            layout.family,
            f"a layout of {config.family}",
            "Look it up with layout_named(name, config).",
        )
    chosen = parameters(config) if only is None else tuple(only)
    placer = _Placer(config, layout, chosen)
    for parameter in chosen:
        if not layout.omits(parameter, config):
            yield from placer.place(parameter)


class _Placer:
    """Places parameters of one layout, and remembers what fused partners must agree on."""

    def __init__(self, config: Config, layout: Layout, chosen: tuple[Parameter, ...]) -> None:
        self._config = config
        self._layout = layout
        self._recipe = layout.recipe_for(config)
        self._suffixes = suffixes_named(layout.suffixes)
        self._fusions = {member: each for each in layout.fusions for member in each.members}
        self._rows = {
            (parameter.block, parameter.row.name): parameter.shape[0]
            for parameter in chosen
            if parameter.row.name in self._fusions
        }
        self._formats: dict[str, tuple[str, Formats]] = {}

    def place(self, parameter: Parameter) -> Iterator[Slot]:
        """Yield one slot a part."""
        formats = self._recipe.format_of(parameter)
        fusion = self._fusions.get(parameter.row.name)
        path = self._layout.path_of(parameter, self._config, fusion.target if fusion else "")
        if fusion:
            self._require_alike(path, parameter, formats)
        for stored in parts_of(parameter, formats):
            dtype, suffix = self._named(parameter, stored, formats.weight)
            if fusion and fusion.bare and stored.part is not Part.VALUE:
                raise PartnersMismatch(
                    f"format of {parameter.name}",
                    formats.weight,
                    f"BF16: layout {self._layout.name} stacks experts unquantised",
                    "Convert the experts to BF16 first, or choose a layout with one tensor each.",
                )
            if fusion:
                name, box = fusion.tensor(path, suffix), self._box(fusion, parameter, stored)
            else:
                name, box = path + suffix, Box.whole(stored.shape)
            yield Slot(parameter, stored.part, name, box, stored.shape, dtype)

    def _named(self, parameter: Parameter, stored: StoredPart, weight: str) -> tuple[Dtype, str]:
        """Return dtype and suffix; what is plain is stored under its own name."""
        if stored.part is not Part.VALUE:
            dtype = self._suffixes.dtype(stored, weight)
            return dtype, self._suffixes.suffix(stored.part, weight)
        dtype = self._layout.dtype_of(parameter)
        has_suffix = parameter.kind.has_suffix
        return dtype, self._suffixes.suffix(Part.VALUE, weight) if has_suffix else ""

    def _require_alike(self, path: str, parameter: Parameter, formats: Formats) -> None:
        """Refuse a fused tensor whose members differ in format."""
        first, expected = self._formats.setdefault(path, (parameter.name, formats))
        if formats != expected:
            raise PartnersMismatch(
                f"format of {parameter.name}",
                formats,
                f"{expected}, as {first} has: both lie in {path}",
                "Convert one of them, or choose a layout that keeps them apart.",
            )

    def _box(self, fusion: Fusion, parameter: Parameter, stored: StoredPart) -> Box:
        """Place a member's part: an index an expert, then the member's rows."""
        order = fusion.members.index(parameter.row.name)
        expert = parameter.expert
        lead = ((expert, expert + 1),) if fusion.stacked and expert is not None else ()
        if not stored.shape:
            # A scalar of an expert: [experts], or [experts, members] where several are fused.
            alone = lead and len(fusion.members) == 1
            return Box(lead if alone else (*lead, (order, order + 1)))
        # Rows of the partners in front; `unit` rows of them are one row of this part.
        before = sum(self._rows[parameter.block, name] for name in fusion.members[:order])
        unit = stored.unit[0]
        if before % unit:
            raise PartnersMismatch(
                f"rows in front of {parameter.name}",
                before,
                f"a multiple of {unit}, one row of its scales",
                "Convert to BF16 first, or choose a layout that keeps the partners apart.",
            )
        first = before // unit
        rows, *columns = stored.shape
        return Box((*lead, (first, first + rows), *((0, extent) for extent in columns)))


def tensors_of(
    config: Config, layout: Layout, only: Iterable[Parameter] | None = None
) -> tuple[StoredTensor, ...]:
    """List the tensors that a layout stores, in the order of the parameters."""
    stops: dict[str, tuple[int, ...]] = {}
    filled: dict[str, int] = {}
    dtypes: dict[str, Dtype] = {}
    for slot in slots(config, layout, only):
        ends = tuple(stop for _, stop in slot.box.ranges)
        known = stops.get(slot.tensor)
        stops[slot.tensor] = ends if known is None else tuple(map(max, known, ends))
        filled[slot.tensor] = filled.get(slot.tensor, 0) + slot.box.count
        dtypes[slot.tensor] = slot.dtype
    assert all(filled[name] == prod(shape) for name, shape in stops.items()), "boxes must tile"
    return tuple(StoredTensor(name, shape, dtypes[name]) for name, shape in stops.items())
