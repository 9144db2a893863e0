"""Convert FP8, NVFP4, MXFP4 and MXFP8 between the dialects of exporters. Codes and scales are kept.

compressed-tensors, ModelOpt and fine-grained FP8 (DeepSeek's and transformers' `fp8`) name and
shape the same tensors differently. Codes and block scales move byte by byte, and FP8 scales are at
most widened to float32. One thing is no copy: the tensor scale of NVFP4, and the scale of its
inputs. ModelOpt stores the factor s, compressed-tensors a divisor G, of which engines take the
float32 reciprocal when they load. G is exact where fl(1/G) == s. Of 24-bit mantissas 83 % have such
a G, found among the neighbours of fl(1/s); for the others the nearest is one ulp of s away, and has
to be asked for (`tensor_scales`). From G to s the factor is what engines compute with: exact.

What a dialect cannot state is refused by name: factors of inputs, formats of inputs, caches.

Sources: compressed-tensors 0.20 compressors/ and quantization/quant_config.py; nvidia-modelopt 0.47
torch/export; vLLM compressed_tensors_w4a4_nvfp4.py (process_weights_after_loading), modelopt.py.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.convert.dialect_configs import (
    CACHE_SCALES,
    COMPRESSED,
    FINE_GRAINED,
    MODELOPT,
    ModuleForm,
    cache_of,
    dialect_of,
    states,
)
from degarble.harness.checkpoint.transform.proof.bounds import FACTOR_BOUND, NO_BOUND
from degarble.harness.checkpoint.transform.proof.compare import (
    EXACT,
    by_reciprocal,
    compare_rows,
    rows_exactly,
)
from degarble.harness.checkpoint.transform.source import BLOCK_ROWS, linears
from degarble.harness.checkpoint.transform.units import (
    ONE_ULP,
    ConversionUnit,
    TensorProof,
)
from degarble.harness.checkpoint.view.modules import NamingConvention
from degarble.harness.checkpoint.view.quantisation_configs import InputFormats
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.transform.source import SourceLinear
    from degarble.harness.checkpoint.transform.units import Chunk, ConversionOptions, TargetNames
    from degarble.harness.checkpoint.view.view import Checkpoint

DIALECTS: Mapping[str, str] = {
    COMPRESSED: "FP8, NVFP4, MXFP4 and MXFP8 as compressed-tensors stores them",
    MODELOPT: "FP8, NVFP4, MXFP4 and MXFP8 as ModelOpt exports them",
    FINE_GRAINED: "FP8 in blocks of 128x128 as DeepSeek and transformers (quant_method fp8) do",
}
_NAMED = 3  # modules in a refusal
_REACH = 4  # neighbours on either side whose reciprocal could be the factor
_CODES, _BLOCK, _TENSOR, _INPUT = (
    PartKind.CODES, PartKind.BLOCK_SCALE, PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE,
)  # fmt: skip
_SUFFIXES = {
    COMPRESSED: {_CODES: ".weight", _BLOCK: ".weight_scale", _INPUT: ".input_scale"},
    MODELOPT: {_CODES: ".weight", _BLOCK: ".weight_scale", _TENSOR: ".weight_scale_2",
               _INPUT: ".input_scale"},
    FINE_GRAINED: {_CODES: ".weight", _BLOCK: ".weight_scale_inv"},
}  # fmt: skip
_PACKED = {
    _CODES: ".weight_packed", _BLOCK: ".weight_scale",
    _TENSOR: ".weight_global_scale", _INPUT: ".input_global_scale",
}  # fmt: skip
_FOUR_BITS = frozenset({"NVFP4", "MXFP4"})
_BYTES = {"MXFP4": "U8", "MXFP8": "U8"}  # the dtype of their scales in both dialects
_REASON = "scales inputs that the config leaves as they are"


class ConvertedModule(NamedTuple):
    """A module of the source, and what it is in the target."""

    linear: SourceLinear
    form: ModuleForm


class _Made(NamedTuple):
    tensor: PlannedTensor
    chunks: Callable[[], Iterator[Chunk]]


# --------------------------------------------------------------------------------------------------
# Units.


def to_dialect(
    to: str, checkpoint: Checkpoint, options: ConversionOptions, _names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each quantised module, and for each scale of a cache that is renamed."""
    yield from DialectPlan(checkpoint, to).units(options)


@dataclass(frozen=True)
class DialectPlan:
    """What a checkpoint becomes in a dialect; its modules and scales are looked at once."""

    checkpoint: Checkpoint
    to: str

    @cached_property
    def chosen(self) -> list[ConvertedModule]:
        """Return the quantised modules."""
        return chosen_modules(self.checkpoint, self.to)

    @cached_property
    def moved(self) -> dict[str, float]:
        """Return the scales without an exact divisor."""
        return moved_scales(self.checkpoint, self.to, self.chosen)

    def units(self, options: ConversionOptions) -> Iterator[ConversionUnit]:
        """List one unit for each quantised module, and for each scale that is renamed."""
        if dialect_of(self.checkpoint.quantisation) == self.to:
            return
        nearest = options.tensor_scales == "nearest"
        _require_reciprocals(self, nearest=nearest)
        for module in self.chosen:
            yield _unit(self.checkpoint, self.to, module, nearest=nearest)
        yield from _cache_units(self.checkpoint, self.to)


def chosen_modules(checkpoint: Checkpoint, to: str) -> list[ConvertedModule]:
    """Return every quantised module with its form in the target; raise for what it cannot state."""
    if checkpoint.names is not None:
        assert checkpoint.model is not None
        raise LayoutMismatch(
            f"source of {to}", f"{shown(str(checkpoint.root))}, a {checkpoint.model.family} model",
            "a model that has no tables here",
            "Its conversions are bf16, fp8-block, nvfp4, nvfp4-lossless and vllm.",
        )  # fmt: skip
    stated = InputFormats(checkpoint.quantisation.values())
    found = list(linears(checkpoint))
    in_blocks = any(linear.format.startswith("FP8_128X128") for linear in found)
    chosen = [ConvertedModule(each, _form(each, stated, in_blocks=in_blocks)) for each in found]
    refused = [module for module in chosen if states(to, module.form) is None]
    if refused:
        names = ", ".join(shown(module.linear.module) for module in refused[:_NAMED])
        raise LayoutMismatch(
            f"{len(refused)} of {len(chosen)} modules, to {to}",
            f"{refused[0].form.text} in {names}" + (", ..." if len(refused) > _NAMED else ""),
            f"formats that {to} states, of weights and of inputs",
            _other_dialect(checkpoint, to, [module.form for module in refused]),
        )  # fmt: skip
    cache_of(checkpoint.quantisation, to)
    return chosen


def _other_dialect(checkpoint: Checkpoint, to: str, forms: list[ModuleForm]) -> str:
    """Name a dialect that states all of these forms, or the way to decode them."""
    for other in DIALECTS:
        if other != to and all(states(other, form) for form in forms):
            if other == dialect_of(checkpoint.quantisation):
                return f"Keep it as it is: {other} states this."
            return f"degarble convert {_quoted(checkpoint)} DST --to {other}"
    if to == COMPRESSED and all(form.scheme and not form.factors for form in forms):
        return f"degarble convert {_quoted(checkpoint)} DST --to pack-quantized"
    if to != FINE_GRAINED and all(form.format == "FP8_128X128_UE8M0" for form in forms):
        return f"degarble convert {_quoted(checkpoint)} DST --to {FINE_GRAINED}"
    return f"Decode it: degarble convert {_quoted(checkpoint)} DST --to bf16"


def _quoted(checkpoint: Checkpoint) -> str:
    return shlex.quote(str(checkpoint.root))


def _form(linear: SourceLinear, stated: InputFormats, *, in_blocks: bool) -> ModuleForm:
    """Return what a module holds, and what is stated about its inputs."""
    parts, fmt, scheme = linear.weight.form.parts, linear.format, linear.weight.form.scheme
    factors = PartKind.CHANNEL_SCALE in parts
    if fmt == "FP8_TENSOR" and in_blocks and max(linear.weight.shape) <= BLOCK_ROWS:
        fmt = "FP8_128X128_F32"  # one block, whose scale looks like that of a whole matrix
    if fmt == "FP8_1X128_F32" and linear.weight.shape[1] <= BLOCK_ROWS:
        fmt = "FP8_ROW"  # one scale a row
    inputs = stated.of(linear.module, fmt)
    scaled = _INPUT in parts
    if inputs == "NVFP4" and not scaled:
        inputs = None  # without calibrated scales, weights alone
    static = scaled and inputs is not None
    return ModuleForm(fmt, inputs, static, factors, "" if scheme is None else scheme.name)


def _unit(
    checkpoint: Checkpoint, to: str, module: ConvertedModule, *, nearest: bool
) -> ConversionUnit:
    linear, form = module
    made = {each.tensor.name: each for each in _made(checkpoint, to, module)}
    own = linear.weight.form.parts.get(_INPUT)
    left = ((own.name, _REASON),) if own is not None and not form.static else ()

    def check(target: Checkpoint) -> Iterator[TensorProof]:
        output = target.stored(linear.module)
        moved = nearest and to == COMPRESSED and form.format == "NVFP4"
        rows = ((values, steps) for _, values, steps in rows_exactly(output, by_reciprocal))
        source = (values for _, values, _ in rows_exactly(linear.weight, by_reciprocal))
        bound, words = (FACTOR_BOUND, ONE_ULP) if moved else (NO_BOUND, EXACT)
        comparison, faults = compare_rows(source, rows, bound)
        if form.static:
            ours, theirs = linear.weight.weight().input_scale, output.weight().input_scale
            faults += _scale_faults(ours, theirs, moved=moved)
        yield comparison.proof(linear.module, linear.tensors, words, faults)

    return ConversionUnit(
        key=linear.module,
        tensors=tuple(each.tensor for each in made.values()),
        sources=linear.tensors,
        make=lambda tensor: made[tensor.name].chunks(),
        check=check,
        left_out=left,
    )


def _scale_faults(ours: Tensor | None, theirs: Tensor | None, *, moved: bool) -> list[str]:
    assert ours is not None, "a form with a stored scale"
    if theirs is None:
        return ["the input scale is lost"]
    gap = abs(float(ours.double()) - float(theirs.double()))
    if gap > (abs(float(ours)) * 2.0**-23 if moved else 0):
        return [f"input scale {float(theirs)!r}, source {float(ours)!r}"]
    return []


def _made(checkpoint: Checkpoint, to: str, module: ConvertedModule) -> Iterator[_Made]:
    """Yield the tensors of a module in a dialect."""
    linear, form = module
    parts, name = linear.weight.form.parts, linear.module
    packs = to == COMPRESSED and form.format in _FOUR_BITS
    suffixes = _PACKED if packs else _SUFFIXES[to]

    def copied(part: PartKind, dtype: str | None = None) -> _Made:
        entry = parts[part]
        planned = PlannedTensor(name + suffixes[part], dtype or entry.dtype, entry.shape, name)
        return _Made(planned, partial(checkpoint.chunks, entry.name))

    def one(part: PartKind, value: Tensor, dtype: str = "F32") -> _Made:
        planned = PlannedTensor(name + suffixes[part], dtype, tuple(value.shape), name)
        return _Made(planned, lambda: iter((value,)))

    yield copied(_CODES, "U8" if form.format in _FOUR_BITS else None)
    if form.format in {"NVFP4", *_BYTES}:
        yield copied(_BLOCK, _BYTES.get(form.format))
    else:
        scale = checkpoint.tensor(parts[_BLOCK].name)
        dtype = parts[_BLOCK].dtype
        if to == MODELOPT:
            scale, dtype = scale.float(), "F32"
        yield one(_BLOCK, _shaped(scale, to, module), dtype)
    extents = (1,) if to == COMPRESSED else ()
    for part in (_TENSOR, _INPUT):
        if part not in parts or (part is _INPUT and not form.static):
            continue
        value = checkpoint.tensor(parts[part].name).float().reshape(())
        if form.format == "NVFP4":
            value = _turned(linear, value, to)
        yield one(part, value.reshape(extents).clone())


def _shaped(scale: Tensor, to: str, module: ConvertedModule) -> Tensor:
    """Return the scales of FP8 with the axes of a dialect."""
    (rows, columns), form = module.linear.weight.shape, module.form
    if form.format == "FP8_TENSOR":
        if to == MODELOPT and not form.static:  # it states inputs by token for scales by row alone
            return scale.reshape(1).expand(rows).contiguous()
        return scale.reshape((1,) if to == COMPRESSED else ()).clone()
    if form.format == "FP8_ROW":
        return scale.reshape((rows, 1) if to == COMPRESSED else (rows,)).clone()
    high, wide = -(-rows // BLOCK_ROWS), -(-columns // BLOCK_ROWS)
    return scale.reshape((high, 1, wide, 1) if to == MODELOPT else (high, wide)).clone()


# --------------------------------------------------------------------------------------------------
# Factors and divisors.


class Divisor(NamedTuple):
    """A divisor in float32, and the factor that its reciprocal gives."""

    divisor: float
    factor: float


def divisor_of(factor: float) -> Divisor:
    """Return the divisor whose float32 reciprocal is a factor, or the nearest to it.

    Of several the one with most trailing zeros: exporters compute divisors in the weight's dtype,
    so that one that was rounded to bfloat16 comes back as it was.
    """
    wanted = np.float32(factor)
    with np.errstate(all="ignore"):
        middle = np.float32(1) / wanted
        near = [middle]
        for towards in (np.float32(0), np.float32(np.inf)):
            step = middle
            for _ in range(_REACH):
                step = np.nextafter(step, towards)
                near.append(step)
        known = [(number, np.float32(1) / number) for number in near if 0 < number < np.inf]
    if not known:
        return Divisor(float(middle), 0.0)
    best = min(
        known,
        key=lambda pair: (
            abs(float(pair[1]) - float(wanted)),
            -_trailing_zeros(pair[0]),
            abs(1 / float(wanted) - float(pair[0])),
        ),
    )
    return Divisor(float(best[0]), float(best[1]))


def _trailing_zeros(number: np.float32) -> int:
    bits = int(number.view(np.uint32))
    return (bits & -bits).bit_length() if bits else 32


def _turned(linear: SourceLinear, value: Tensor, to: str) -> Tensor:
    """Return a stored scale of NVFP4 in the direction of a dialect."""
    divides = linear.weight.form.convention is NamingConvention.COMPRESSED_TENSORS
    if divides == (to == COMPRESSED):
        return value
    if divides:
        return value.reciprocal()
    return torch.tensor(divisor_of(float(value)).divisor, dtype=torch.float32)


def moved_scales(
    checkpoint: Checkpoint, to: str, chosen: list[ConvertedModule]
) -> dict[str, float]:
    """Map each scale without an exact divisor to its distance from the nearest, in ulp."""
    found: dict[str, float] = {}
    if to != COMPRESSED:
        return found
    for linear, form in chosen:
        divides = linear.weight.form.convention is NamingConvention.COMPRESSED_TENSORS
        if form.format != "NVFP4" or divides:
            continue
        for part in (_TENSOR, _INPUT) if form.static else (_TENSOR,):
            entry = linear.weight.form.parts[part]
            value = float(checkpoint.tensor(entry.name).float())
            gap = abs(divisor_of(value).factor - value) if 0 < value < np.inf else np.inf
            if gap:
                found[entry.name] = gap / float(np.spacing(np.float32(value)))
    return found


def _require_reciprocals(plan: DialectPlan, *, nearest: bool) -> None:
    """Raise for scales that have no divisor, and, unless asked otherwise, no exact one."""
    _require_finite(plan.checkpoint, plan.chosen)
    checkpoint, to, moved = plan.checkpoint, plan.to, plan.moved
    if not moved or nearest:
        return
    names = ", ".join(shown(name) for name in list(moved)[:_NAMED])
    raise LayoutMismatch(
        f"{len(moved)} scales of NVFP4, to {to}",
        f"no float32 number has exactly such a reciprocal: {names}"
        + (", ..." if len(moved) > _NAMED else ""),
        "scales that a divisor states exactly",
        f"Accept the nearest divisors, whose reciprocals are one unit in the last place of float32"
        f" away (1.2e-7): degarble convert {_quoted(checkpoint)} DST --to {to} --tensor-scales"
        " nearest",
    )


def _require_finite(checkpoint: Checkpoint, chosen: list[ConvertedModule]) -> None:
    for linear, form in chosen:
        for part in (_TENSOR, _INPUT):
            entry = linear.weight.form.parts.get(part)
            if entry is None or form.format != "NVFP4":
                continue
            value = checkpoint.tensor(entry.name).float()
            turned = value.reciprocal()
            if not bool(((value > 0) & (turned > 0) & turned.isfinite()).all()):
                raise InvalidArgument(
                    shown(entry.name), value.flatten().tolist()[:1], "a positive number that has a"
                    " reciprocal in float32",
                    f"Find out what went wrong in the export: degarble audit {_quoted(checkpoint)}",
                )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Scales of a cache: of the projections in ModelOpt, of attention in compressed-tensors.


def _cache_units(checkpoint: Checkpoint, to: str) -> Iterator[ConversionUnit]:
    for name, entry in checkpoint.entries.items():
        parent, _, leaf = name.rpartition(".")
        projection = CACHE_SCALES.get(leaf)
        if projection is None or entry.dtype not in {"F32", "BF16", "F16"}:
            continue
        owner = parent.removesuffix(f".{projection}")
        weights = {f"{owner}.{projection}{end}" for end in (".weight", ".weight_packed")}
        if to == FINE_GRAINED or not weights & checkpoint.entries.keys():
            continue  # of a module without such a projection: it keeps its name
        target = f"{owner}.{projection}.{leaf}" if to == MODELOPT else f"{owner}.{leaf}"
        if target == name:
            continue
        yield _cache_unit(checkpoint, name, target, to)


def _cache_unit(checkpoint: Checkpoint, name: str, target: str, to: str) -> ConversionUnit:
    entry = checkpoint.entry(name)
    if entry.elements != 1:
        raise LayoutMismatch(
            f"{shown(name)}, to {to}", f"{entry.elements} scales", "one scale a layer",
            f"Keep its dialect, or decode it: degarble convert {_quoted(checkpoint)} DST --to bf16",
        )  # fmt: skip
    shape = () if to == MODELOPT else (1,)
    planned = PlannedTensor(target, entry.dtype, shape, target)

    def check(output: Checkpoint) -> Iterator[TensorProof]:
        off = int(bytes(output.raw(target)) != bytes(checkpoint.raw(name)))
        yield TensorProof(target, (name,), 1, off, off, EXACT)

    return ConversionUnit(target, (planned,), (name,), lambda _: checkpoint.chunks(name), check)
