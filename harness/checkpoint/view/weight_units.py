"""List the units that the number audit walks: every stored number once, grouped into weights.

A unit is a parameter that the config names (also inside fused tensors), a member of a stack, or a
stored module that no config explains. Where the tensors of a module do not make a weight, each
tensor is a unit, so that damaged structure hides no number. A unit has its role (its name without
numbers), its layer, its expert, and the output that is its input. The bytes of all units are the
bytes of the files; tensors that cannot be read are listed in `unread`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from degarble.harness.base.errors import DtypeMismatch, Refused, ShapeMismatch
from degarble.harness.checkpoint.view.modules import NamingConvention, StoredForm
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES, StoredWeight, tensor_over
from degarble.harness.model.components import components
from degarble.harness.model.parameters import EXPERT
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter

_NUMBERS = re.compile(r"(?<![^.\[])\d+(?![^.\]])")  # of a layer or an expert; not the digit of `w1`
_EXPERT_NUMBER = re.compile(r"\bexperts\.(\d+)\b")
_LAYER_NUMBER = re.compile(r"\blayers\.(\d+)\b")
_NO_NUMBERS = frozenset({"F4", "C64"})  # codes in pairs, and pairs of numbers
_MOST_AXES = 3  # what a stack of matrices has
_MOST_MEMBERS = 1 << 14  # of a stack that is walked one by one; no model has as many experts


def layer_in(name: str) -> int | None:
    """Return the number after `layers.` in a stored or logical name."""
    found = _LAYER_NUMBER.search(name)
    return int(found[1]) if found else None


def without_numbers(name: str) -> str:
    """Return the role of a name: its numbers of layers and experts replaced by `*`."""
    return _NUMBERS.sub("*", name)


class WeightUnit(NamedTuple):
    """One weight of the walk.

    Units of one `place`, a block or an end of the model, are walked together. `member` is an index
    into a stack that no config explains. `feed` names the output that is the input of a linear.
    """

    name: str
    module: str
    role: str
    place: str
    layer: int | None
    expert: int | None
    kind: Kind | None
    feed: str
    component: str  # that reads it; empty where no config says
    member: int | None
    is_bare: bool  # one tensor by itself, because its module is no weight
    nbytes: int
    position: tuple[Path, int]  # file and first byte: the order of a sequential walk

    @property
    def is_linear(self) -> bool:
        """Whether it is a matrix that multiplies activations, as far as is known."""
        return self.kind is Kind.LINEAR


@dataclass
class WeightUnits:
    """All units, and the tensors that no unit could read, with the reason."""

    units: list[WeightUnit] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def units_of(checkpoint: Checkpoint) -> WeightUnits:
    """List the units of a checkpoint in the order of its files."""
    weight_units = WeightUnits()
    taken: set[str] = set()
    names = checkpoint.names
    if names is not None:
        feeds = feeds_of(names.config)
        for name, parameter in names.present.items():
            try:
                stored = checkpoint.stored(name)
            except Refused:
                continue  # its module is walked below, by itself
            weight_units.units.append(_named(stored, parameter, feeds, names.config))
            taken.add(stored.form.module)
    for module in checkpoint.table.suffixes:
        if module not in taken:
            _take_module(checkpoint, module, weight_units)
    weight_units.units.sort(key=lambda unit: unit.position)
    return weight_units


def stored_of(checkpoint: Checkpoint, unit: WeightUnit) -> StoredWeight:
    """Return the stored weight of a unit."""
    if unit.is_bare:
        return _bare(checkpoint, checkpoint.entries[unit.module])
    stored = checkpoint.stored(unit.name if unit.member is None else unit.module)
    return stored if unit.member is None else stored.member(unit.member)


def feeds_of(config: Config) -> Mapping[str, str]:
    """Return, for each component, the output that is its input `x`."""
    return {
        component.name: str(source.sources[0])
        for component in components(config)
        for source in component.inputs
        if source.name == "x" and len(source.sources) == 1
    }


def _named(
    stored: StoredWeight, parameter: Parameter, feeds: Mapping[str, str], config: Config
) -> WeightUnit:
    block = parameter.block
    layer = None
    if block is not None:
        # Blocks of the drafter are numbered after the decoder's layers.
        layer = block.index + (len(config.layers) if block.is_drafter else 0)
    row = parameter.row.name.replace(EXPERT, "*")
    return WeightUnit(
        name=parameter.name,
        module=stored.form.module,
        role=f"{block.scope}.*.{row}" if block else row,
        place=block.prefix if block else parameter.name,
        layer=layer,
        expert=parameter.expert,
        kind=parameter.kind,
        feed=feeds.get(parameter.component, "") if parameter.kind is Kind.LINEAR else "",
        component=parameter.component,
        member=None,
        is_bare=False,
        **_extent(stored),
    )


def _take_module(checkpoint: Checkpoint, module: str, weight_units: WeightUnits) -> None:
    """Add a module as it is stored: a stack by members, tensors alone where they make no weight."""
    try:
        stored = checkpoint.stored(module)
        _require_readable(stored)
        if len(stored.shape) == 3:
            members = [stored.member(index) for index in range(stored.shape[0])]
            weight_units.units += [_unnamed(member, module, i) for i, member in enumerate(members)]
        else:
            weight_units.units.append(_wired(checkpoint, _unnamed(stored, module, None)))
    except Refused:
        for entry in checkpoint.table.tensors(module):
            if entry.dtype in TORCH_DTYPES and entry.dtype not in _NO_NUMBERS:
                bare = _bare(checkpoint, entry)
                weight_units.units.append(_unnamed(bare, entry.name, None)._replace(is_bare=True))
            else:
                weight_units.unread[entry.name] = f"no numbers of dtype {entry.dtype} are read here"


def _require_readable(stored: StoredWeight) -> None:
    """Raise early for shapes and dtypes of parts that reading would reject."""
    if _is_no_stack(stored.shape):
        raise ShapeMismatch(stored.name, stored.shape, "a matrix or a stack", "See who wrote it.")
    for part, entry in stored.form.parts.items():
        if entry.dtype not in TORCH_DTYPES or entry.dtype == "C64":
            raise DtypeMismatch(entry.name, entry.dtype, "a dtype that torch holds", "Cast it.")
        if part in (PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE) and entry.elements not in (
            1,
            stored.shape[0] if len(stored.shape) == 3 else 1,
        ):
            raise ShapeMismatch(entry.name, entry.shape, "one number a matrix", "See who wrote it.")


def _is_no_stack(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is neither a matrix nor a stack whose members can be listed."""
    return len(shape) > _MOST_AXES or (len(shape) == _MOST_AXES and shape[0] > _MOST_MEMBERS)


# What reads and makes what in a layer of Llama's kind, by transformers' names; models with further
# norms in a layer are wired otherwise.
_ATTENTION = re.compile(r"(.*\.layers\.\d+)\.self_attn\.(q|k|v)_proj$")
_MLP = re.compile(
    r"(.*\.layers\.\d+)\.(mlp|block_sparse_moe)(\.experts\.\d+)?\.(gate_proj|up_proj|down_proj|w1|w2|w3)$"
)
_LAYER_NORM = re.compile(r"(.*\.layers\.\d+)\.(input|post_attention)_layernorm(\.weight)?$")
_OTHER_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def _wired(checkpoint: Checkpoint, unit: WeightUnit) -> WeightUnit:
    """Return a unit with the site that feeds it, and its component, where its name tells them."""
    found = next((p.match(unit.module) for p in (_ATTENTION, _MLP, _LAYER_NORM)
                  if p.match(unit.module)), None)  # fmt: skip
    if found is None:
        return unit
    layer = found[1]
    if any(f"{layer}.{norm}.weight" in checkpoint.entries for norm in _OTHER_NORMS):
        return unit
    if found.re is _LAYER_NORM:
        return unit._replace(component=f"{layer}.{found[2]}_layernorm")
    if found.re is _ATTENTION:
        feed, component = f"{layer}.input_layernorm.out", f"{layer}.self_attn.qkv"
    elif found[4] in {"down_proj", "w2"}:
        feed, component = f"{layer}.up.out", f"{layer}.down"
    else:
        leaf = "up" if found[4] in {"up_proj", "w3"} else "gate"
        feed, component = f"{layer}.post_attention_layernorm.out", f"{layer}.{leaf}"
    return unit._replace(feed=feed if unit.is_linear else "", component=component)


def _unnamed(stored: StoredWeight, module: str, member: int | None) -> WeightUnit:
    expert, layer = _EXPERT_NUMBER.search(stored.name), _LAYER_NUMBER.search(module)
    quantised = stored.format is not None
    return WeightUnit(
        name=stored.name,
        module=module,
        role=_NUMBERS.sub("*", stored.name),
        place=module[: layer.end()] if layer else module,
        layer=int(layer[1]) if layer else None,
        expert=member if expert is None else int(expert[1]),
        kind=Kind.LINEAR if quantised else None,
        feed="",
        component="",
        member=member,
        is_bare=False,
        **_extent(stored),
    )


class _Extent(TypedDict):
    nbytes: int
    position: tuple[Path, int]


def _extent(stored: StoredWeight) -> _Extent:
    # The first byte of the largest part places a unit in the walk.
    largest = max(stored.form.parts.items(), key=lambda item: item[1].nbytes)
    begin = largest[1].begin
    nbytes = 0
    for part, entry in stored.form.parts.items():
        box = stored.box(part)
        if entry.elements:
            nbytes += entry.nbytes * box.count // entry.elements
        if part is largest[0]:
            begin += _offset(box.ranges, entry)
    return {"nbytes": nbytes, "position": (largest[1].file, begin)}


def _offset(ranges: tuple[tuple[int, int], ...], entry: TensorEntry) -> int:
    """Return the first byte of a box in its tensor."""
    first = 0
    for (start, _), extent in zip(ranges, entry.shape, strict=True):
        first = first * extent + start
    return first * entry.nbytes // max(entry.elements, 1)


def _bare(checkpoint: Checkpoint, entry: TensorEntry) -> StoredWeight:
    """Return one tensor as plain values, whatever its module; leading axes count as rows."""
    if _is_no_stack(entry.shape):
        entry = entry._replace(shape=(prod(entry.shape[:-1]), entry.shape[-1]))
    form = StoredForm(
        entry.name,
        NamingConvention.PLAIN,
        MappingProxyType({PartKind.VALUE: entry}),
        format=None,
        dialect=None,
        direction=None,
        nibble_order=None,
        shape=entry.shape,
        block=None,
    )
    files = checkpoint.files
    return StoredWeight(
        entry.name,
        form,
        entry.shape,
        None,
        lambda part: tensor_over(part, files.raw(part)),
        files.release,
    )
