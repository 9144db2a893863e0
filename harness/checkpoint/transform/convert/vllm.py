"""Convert to vLLM's own parameters: all of them, or the fused compressor alone."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DtypeMismatch, LayoutMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.configs import StoredFormat, recipe_of, stored_formats
from degarble.harness.checkpoint.transform.convert.formats import recoding_unit
from degarble.harness.checkpoint.transform.convert.vllm_parameters import (
    BACKENDS,
    FusedParameter,
    FusionPlan,
)
from degarble.harness.checkpoint.transform.proof.layouts import check_fused
from degarble.harness.checkpoint.transform.source import chosen_linears, linears, require_model
from degarble.harness.checkpoint.transform.units import ConversionUnit
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import BF16
from degarble.harness.model.tensors import slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from degarble.harness.checkpoint.transform.units import ConversionOptions, TargetNames
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.tensors import Slot


# --------------------------------------------------------------------------------------------------
# Fuse the compressor's two projections into one BF16 tensor, kv above gate, as vLLM reads them.
#
# Joins `kv_proj` and `gate_proj` (DeepSeek: `wkv`, `wgate`) along rows, for the main compressor and
# for the indexer's, each from its own prefix. Trap: in small models both compressors have the same
# shape, so only the values reveal a mix-up; `prove` compares them. A checkpoint without
# compressors, or with one projection only, raises an error.
#
# Source: vLLM 0.33 models/deepseek_v4, packed_modules_mapping.

FUSED = "fused_wkv_wgate"
_FIRST, _SECOND = ".compressor.wkv", ".compressor.wgate"


def to_fused_compressor(
    checkpoint: Checkpoint, options: ConversionOptions, names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each compressor."""
    require_model(checkpoint, "fused-compressor")
    found = {linear.name: linear for linear in linears(checkpoint)}
    starts = [linear for linear in found.values() if linear.name.endswith(_FIRST)]
    gates = {name for name in found if name.endswith(_SECOND)}
    if not starts and not gates:
        raise LayoutMismatch(
            f"compressors of {shown(str(checkpoint.root))}",
            "none",
            "kv_proj and gate_proj of at least one layer",
            "Only V4 has compressors; one that is fused already needs no conversion.",
        )
    ends = {start.name.removesuffix(_FIRST) + _SECOND for start in starts}
    if ends != gates:
        raise LayoutMismatch(
            "compressor projection without its partner",
            sorted(ends ^ gates)[:3],
            "wkv and wgate for each compressor",
            "Look for a shard that is missing.",
        )
    for first in chosen_linears(starts, options.only):
        second = found[first.name.removesuffix(_FIRST) + _SECOND]
        yield recoding_unit(names, names.sibling(first.module, FUSED), [first, second], None)


# --------------------------------------------------------------------------------------------------
# Write vLLM's own parameters to disk: fused projections, stacked experts, a backend's order.
#
# Experts stay packed: w1 and w3 of all experts in one stack, in the order of the chosen backend.
# Outside the experts V4's classes support FP8 and BF16 only, so NVFP4 is decoded there and wo_a is
# converted to FP8. Partners of a fused tensor are decoded where their formats differ or where they
# would share a row of scales. Everything else keeps its bytes and gets vLLM's name.
#
# The source may not be fused or stacked already. w1 and w3 of an expert need equal tensor scales,
# because kernels use the first for both. Shuffled backends need NVFP4 experts. Sources: vLLM 0.33
# models/deepseek_v4, modelopt.py.

NVFP4, FP8 = "NVFP4", "FP8_128X128_UE8M0"


def to_vllm(
    checkpoint: Checkpoint, options: ConversionOptions, _: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each of vLLM's parameters, with all its parts."""
    model, names = require_model(checkpoint, "vllm")
    sources = {linear.name: linear for linear in linears(checkpoint)}
    before = stored_formats(names)
    layout = layout_named("vllm", model)
    after = formats_in_vllm(model, layout, before, names.present)
    backend = BACKENDS[options.backend]
    if options.backend != "loader":
        for name, stored in after.items():
            _require_nvfp4(names.present[name], stored, options.backend)
    groups: dict[str, dict[str, list[Slot]]] = defaultdict(lambda: defaultdict(list))
    fused = {member: each for each in layout.fusions for member in each.members}
    recipe = recipe_of(after, names)
    parameters = [
        parameter for parameter in names.present.values() if not layout.omits(parameter, model)
    ]
    for slot in slots(model, layout.with_recipe(recipe), parameters):
        fusion = fused.get(slot.parameter.row.name)
        path = layout.path_of(slot.parameter, model, fusion.target if fusion else "")
        groups[path][slot.tensor].append(slot)
    changed = {name for name, stored in after.items() if stored.weight != before[name].weight}
    plan = FusionPlan(checkpoint, sources, after, frozenset(changed), backend)
    for path, tensors in groups.items():
        yield FusedParameter(path, tensors, plan).unit(check_fused)
    omitted = [(parameter, layout.omits(parameter, model)) for parameter in names.present.values()]
    gone = tuple(
        (entry.name, reason)
        for parameter, reason in omitted
        if reason
        for entry in checkpoint.form(names.module_of(parameter)).parts.values()
    )
    if gone:
        yield ConversionUnit("left out", (), (), _nothing, _nothing, gone)


def _nothing(_: object) -> Iterator[Any]:
    return iter(())


def formats_in_vllm(
    model: Config,
    layout: Layout,
    before: Mapping[str, StoredFormat],
    present: Mapping[str, Parameter],
) -> dict[str, StoredFormat]:
    """Return the format of every linear in vLLM's memory."""
    after = {name: _format_of(model, present[name], stored) for name, stored in before.items()}
    fused = {member: fusion.target for fusion in layout.fusions for member in fusion.members}
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in after:
        parameter = present[name]
        if parameter.row.name in fused and parameter.expert is None:
            groups[parameter.block, fused[parameter.row.name]].append(name)
    place = {member: n for fusion in layout.fusions for n, member in enumerate(fusion.members)}
    for members in groups.values():
        members.sort(key=lambda name: place[present[name].row.name])
        several = len({after[name] for name in members}) > 1
        if several or _cuts_a_scale([present[name] for name in members], after[members[0]].weight):
            after |= dict.fromkeys(members, StoredFormat(BF16, scaled=False))
    return after


def _cuts_a_scale(members: list[Parameter], weight: str) -> bool:
    """Whether two partners would share a row of scales: only the last may end within a block."""
    rows = BLOCK_FORMATS[weight].block[0] if weight in BLOCK_FORMATS else 1
    return any(member.shape[0] % rows for member in members[:-1])


def _format_of(model: Config, parameter: Parameter, stored: StoredFormat) -> StoredFormat:
    weight = family_of(model).format_in_vllm(parameter, stored.weight)
    return stored if weight == stored.weight else StoredFormat(weight, scaled=False)


def _require_nvfp4(parameter: Parameter, stored: StoredFormat, backend: str) -> None:
    """Raise for experts in other formats; a drafter's keep their format and the loader's order."""
    drafts = parameter.block is not None and parameter.block.is_drafter
    if parameter.expert is not None and not drafts and stored.weight != NVFP4:
        raise DtypeMismatch(
            f"format of {parameter.name} for backend {backend}",
            stored.weight,
            "NVFP4",
            "Convert the experts with `--to nvfp4-lossless` first, or take backend loader.",
        )
