"""List the stored tensors of a checkpoint or engine, their parts, and maps between layouts.

`slots` says for each part of every parameter which tensor holds it and which box of that tensor.
Names and shapes of tensors, name maps and the tensors of one rank (sharding.py) derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    PartnersMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.number_formats import block_format, codes_shape, scale_shape
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16, Formats
from degarble.harness.model.types import Box, Dtype, Kind, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Fusion, Layout
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# The parts of one matrix in a format: codes, block scales, tensor scales, and their names
#
# A part states its tensor's dtype and how many logical elements one of its elements stands for.
# Checkpoints name parts by suffixes. Extents come from the block formats. A matrix whose K is no
# multiple of the block cannot be stored, nor a part that the suffix table has no name for.
#
# Sources of the suffixes: DeepSeek-V4-Pro shard headers; ModelOpt's exports; compressed-tensors
# 0.20; vLLM 0.33 models/deepseek_v4.


class PartKind(StrEnum):
    """Kinds of stored tensor that a parameter may have."""

    VALUE = "value"  # unquantised
    CODES = "codes"
    BLOCK_SCALE = "block_scale"
    TENSOR_SCALE = "tensor_scale"
    INPUT_SCALE = "input_scale"
    ZERO_POINT = "zero_point"
    GROUP_INDEX = "group_index"
    LOGICAL_SHAPE = "logical_shape"
    CHANNEL_SCALE = "channel_scale"  # of activations, one a column


_PART_DTYPES = {"E2M1": Dtype.U8, "E4M3": Dtype.F8_E4M3, "UE8M0": Dtype.F8_E8M0, "FP32": Dtype.F32}


@dataclass(frozen=True)
class StoredPart:
    """One part of a stored parameter. `unit`: logical rows and columns of one of its elements."""

    part: PartKind
    shape: tuple[int, ...]
    dtype: Dtype
    unit: tuple[int, int]

    def box_of(self, logical: Box, name: str) -> Box:
        """Translate a box of the logical matrix; raise if it cuts through an element."""
        if not self.shape:
            return Box(())
        if self.part is PartKind.VALUE:
            return logical
        ranges = []
        for (start, stop), unit, extent in zip(logical.ranges, self.unit, self.shape, strict=True):
            last = -(-stop // unit)
            if start % unit or (stop % unit and last != extent):
                raise ShapeMismatch(
                    f"rows or columns {start}:{stop} of {name}",
                    f"{self.part} of {unit}",
                    f"a cut at a multiple of {unit}",
                    "Choose fewer ranks, or a format with smaller blocks.",
                )
            ranges.append((start // unit, last))
        return Box(tuple(ranges))


def parts_of(parameter: Parameter, formats: Formats) -> tuple[StoredPart, ...]:
    """Return the tensors that hold `parameter` in these formats."""
    if formats.weight == BF16 or parameter.kind is not Kind.LINEAR:
        return _plain_parts(parameter.shape, parameter.row.dtype)
    return _quantised_parts(parameter.shape, formats)


# Experts are alike: of the 145,116 tensors of V4-Pro, a few dozen differ in shape and format.
@lru_cache(maxsize=1024)
def _plain_parts(shape: tuple[int, ...], dtype: Dtype) -> tuple[StoredPart, ...]:
    return (StoredPart(PartKind.VALUE, shape, dtype, (1, 1)),)


@lru_cache(maxsize=1024)
def _quantised_parts(shape: tuple[int, ...], formats: Formats) -> tuple[StoredPart, ...]:
    name = formats.weight
    fmt = block_format(name)
    codes = StoredPart(
        PartKind.CODES,
        codes_shape(shape, fmt),
        _PART_DTYPES[fmt.element.name],
        (1, 2 if fmt.packed else 1),
    )
    scales = StoredPart(
        PartKind.BLOCK_SCALE, scale_shape(shape, fmt), _PART_DTYPES[fmt.scale.name], fmt.block
    )
    parts = [codes, scales]
    if fmt.tensor_scale:
        parts.append(StoredPart(PartKind.TENSOR_SCALE, (), Dtype.F32, (0, 0)))
        if formats.activation == name:  # weight-only checkpoints have no calibrated input
            parts.append(StoredPart(PartKind.INPUT_SCALE, (), Dtype.F32, (0, 0)))
    return tuple(parts)


@dataclass(frozen=True)
class Suffixes:
    """How one family of checkpoints names parts: by part, and by (part, format) where it differs.

    `dtypes` says where the same bytes are typed otherwise, by (part, format).
    """

    name: str
    by_part: Mapping[PartKind, str]
    by_format: Mapping[tuple[PartKind, str], str]
    dtypes: Mapping[tuple[PartKind, str], Dtype]

    def suffix(self, part: PartKind, weight_format: str) -> str:
        """Return the suffix, or refuse a part that these checkpoints never hold."""
        key = (part, weight_format)
        if key not in self.by_format and part not in self.by_part:
            raise LayoutMismatch(
                f"{part} of {weight_format}",
                self.name,
                "a format that these checkpoints can hold",
                "Convert the weight first, or choose another layout.",
            )
        return self.by_format.get(key) or self.by_part[part]

    def dtype(self, stored: StoredPart, weight_format: str) -> Dtype:
        """Return the dtype by which these checkpoints type the part's bytes."""
        return self.dtypes.get((stored.part, weight_format), stored.dtype)


_MODELOPT = {
    PartKind.VALUE: ".weight",
    PartKind.CODES: ".weight",
    PartKind.TENSOR_SCALE: ".weight_scale_2",
    PartKind.INPUT_SCALE: ".input_scale",
}
_FP8 = ("FP8_128X128_UE8M0", "FP8_128X128_F32")
_NVFP4_SCALE = {(PartKind.BLOCK_SCALE, "NVFP4"): ".weight_scale"}
_OFFICIAL_SCALES = {(PartKind.BLOCK_SCALE, name): ".scale" for name in (*_FP8, "MXFP4")}
_HF_SCALES = {(PartKind.BLOCK_SCALE, name): ".weight_scale_inv" for name in _FP8}
_BYTES = {(PartKind.CODES, "MXFP4"): Dtype.U8, (PartKind.BLOCK_SCALE, "MXFP4"): Dtype.U8}

SUFFIXES: Mapping[str, Suffixes] = MappingProxyType(
    {
        table.name: table
        for table in (
            Suffixes(
                "deepseek",
                _MODELOPT,
                _NVFP4_SCALE | _OFFICIAL_SCALES,
                {(PartKind.CODES, "MXFP4"): Dtype.I8},
            ),
            Suffixes("huggingface", _MODELOPT, _NVFP4_SCALE | _HF_SCALES, {}),
            Suffixes(
                "vllm",
                _MODELOPT,
                _NVFP4_SCALE | _HF_SCALES | {(PartKind.BLOCK_SCALE, "MXFP4"): ".weight_scale"},
                _BYTES,
            ),
            # Both global scales are divisors here: ScaleDirection.ENCODE.
            Suffixes(
                "compressed-tensors",
                {PartKind.VALUE: ".weight"},
                {
                    (PartKind.CODES, "NVFP4"): ".weight_packed",
                    (PartKind.BLOCK_SCALE, "NVFP4"): ".weight_scale",
                    (PartKind.TENSOR_SCALE, "NVFP4"): ".weight_global_scale",
                    (PartKind.INPUT_SCALE, "NVFP4"): ".input_global_scale",
                },
                {},
            ),
        )
    }
)


def suffixes_named(name: str) -> Suffixes:
    """Look a suffix table up."""
    if name not in SUFFIXES:
        raise UnknownName.among("suffixes", name, SUFFIXES)
    return SUFFIXES[name]


# --------------------------------------------------------------------------------------------------
# Every tensor, with name, shape and dtype
#
# Fused tensors need partners of one format, no cut through a scale block, and a format that the
# layout has a name for.


class Slot(NamedTuple):
    """One part of one parameter, and the box of the tensor that stores it."""

    parameter: Parameter
    part: PartKind
    tensor: str
    box: Box
    shape: tuple[int, ...]  # of the part itself; the box may have leading ones before it
    dtype: Dtype

    @property
    def key(self) -> tuple[str, PartKind]:
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
        self._fusions = {member: fusion for fusion in layout.fusions for member in fusion.members}
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
            if fusion and fusion.bare and stored.part is not PartKind.VALUE:
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
        if stored.part is not PartKind.VALUE:
            dtype = self._suffixes.dtype(stored, weight)
            return dtype, self._suffixes.suffix(stored.part, weight)
        dtype = self._layout.dtype_of(parameter)
        has_suffix = parameter.kind.has_suffix
        return dtype, self._suffixes.suffix(PartKind.VALUE, weight) if has_suffix else ""

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


# --------------------------------------------------------------------------------------------------
# Maps: which box of which source tensor becomes which box of which target tensor
#
# A map connects two layouts of a model that hold the same recipe: DeepSeek's own names,
# transformers', ModelOpt's and vLLM's fused parameters. It is a list of moves. Every move states
# source, target, and what happens to the elements' type: nothing, a view of the same bytes, or a
# cast. The inverse is the same list read backwards, so a map loses only what it lists as unmapped,
# with the reason. Between different recipes values change; that is a conversion and needs more than
# a map.


class TypeChange(StrEnum):
    """What happens to the type of the elements in a move."""

    SAME = "same"
    VIEW = "view"  # the same bytes under another name: uint8 for E8M0, U8 for I8
    CAST = "cast"  # values kept, bytes not: bf16 norms held in fp32, int64 ids in int32


class TensorBox(NamedTuple):
    """One side of a move."""

    tensor: str
    box: Box
    dtype: Dtype


class Move(NamedTuple):
    """One part of one parameter, from its place in the source to its place in the target."""

    parameter: str
    part: PartKind
    shape: tuple[int, ...]
    source: TensorBox
    target: TensorBox

    @property
    def typing(self) -> TypeChange:
        """Return how the elements' type changes."""
        if self.source.dtype == self.target.dtype:
            return TypeChange.SAME
        floats = {self.source.dtype, self.target.dtype} <= {"BF16", "F32"}
        integers = {self.source.dtype, self.target.dtype} <= {"I32", "I64"}
        return TypeChange.CAST if floats or integers else TypeChange.VIEW


@dataclass(frozen=True)
class NameMap:
    """All moves between two layouts, and what has a place on one side only."""

    source: Layout
    target: Layout
    moves: tuple[Move, ...]
    unmapped: tuple[tuple[str, str], ...]  # (parameter, reason)

    def inverse(self) -> NameMap:
        """Return the map that goes back."""
        back = tuple(move._replace(source=move.target, target=move.source) for move in self.moves)
        return NameMap(self.target, self.source, back, self.unmapped)

    @cached_property
    def by_target(self) -> Mapping[str, tuple[Move, ...]]:
        """Return the moves that fill each target tensor, in row order."""
        groups: dict[str, list[Move]] = {}
        for move in self.moves:
            groups.setdefault(move.target.tensor, []).append(move)
        return {
            tensor: tuple(sorted(group, key=lambda move: move.target.box.ranges))
            for tensor, group in groups.items()
        }

    def filling(self, tensor: str) -> tuple[Move, ...]:
        """Return what fills one target tensor; an unknown one is refused."""
        if tensor not in self.by_target:
            raise UnknownName.among("target tensor", tensor, self.by_target)
        return self.by_target[tensor]


def name_map(config: Config, source: Layout, target: Layout) -> NameMap:
    """Map the tensors of `source` to those of `target`; both must hold one recipe."""
    recipes = source.recipe_for(config), target.recipe_for(config)
    if recipes[0].rules != recipes[1].rules:
        raise LayoutMismatch(
            f"recipe of layout {target.name}",
            recipes[1].name,
            f"{recipes[0].name}, which layout {source.name} holds",
            "Give both one recipe by Layout.with_recipe; convert the values beforehand.",
        )
    places = {slot.key: slot for slot in slots(config, target)}
    moves = []
    for slot in slots(config, source):
        place = places.get(slot.key)
        if place is not None:
            ends = (TensorBox(each.tensor, each.box, each.dtype) for each in (slot, place))
            moves.append(Move(*slot.key, slot.shape, *ends))
    unmapped = []
    for parameter in parameters(config):
        reason = source.omits(parameter, config) or target.omits(parameter, config)
        if reason:
            unmapped.append((parameter.name, reason))
    return NameMap(source, target, tuple(moves), tuple(unmapped))
