"""Convert integers by group between dialects: AWQ, GPTQ, compressed-tensors. Every value is kept.

Codes, zero points and scales move, and nothing is rounded. What a dialect cannot hold is refused by
name: a scale that float16 does not have, columns in another order, factors of an input, and a zero
point of 0 in GPTQ, which stores it less 1. Shape letters as in view/schemes.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.proof.compare import EXACT
from degarble.harness.checkpoint.transform.source import linears
from degarble.harness.checkpoint.transform.units import ConversionUnit, TensorProof
from degarble.harness.checkpoint.view.schemes import AWQ, CT_PACKED, GPTQ, WORD
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.codec import unpack_nibbles
from degarble.harness.formats.number_formats import NibbleOrder
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.source import SourceLinear
    from degarble.harness.checkpoint.transform.units import ConversionOptions, TargetNames
    from degarble.harness.checkpoint.view.schemes import StorageScheme
    from degarble.harness.checkpoint.view.view import Checkpoint

SCHEMES = {"awq": AWQ, "gptq": GPTQ, "pack-quantized": CT_PACKED}
_DTYPES = {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.float32: "F32"}


class _Integers(NamedTuple):
    """A matrix of unsigned codes [N, K], zero points [N, G], scales [N, G], groups of columns."""

    codes: Tensor
    zero: Tensor
    scale: Tensor
    groups: Tensor | None
    bits: int


def to_scheme(
    to: str, checkpoint: Checkpoint, _options: ConversionOptions, _names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each module of integers that another dialect stores."""
    scheme = SCHEMES[to]
    for linear in linears(checkpoint):
        own = linear.weight.form.scheme
        if own is None:
            raise _refused(linear, to, linear.format, "integers by group", "--to bf16 decodes it.")
        if own.name != scheme.name:
            yield _unit(linear, to, scheme)


def _unit(linear: SourceLinear, to: str, scheme: StorageScheme) -> ConversionUnit:
    made = partial(_stored, linear, to, scheme)
    shapes = made()
    planned = tuple(
        PlannedTensor(name, _DTYPES[tensor.dtype], tuple(tensor.shape), linear.module)
        for name, tensor in shapes.items()
    )
    del shapes

    def make(tensor: PlannedTensor) -> Iterator[Tensor]:
        yield made()[tensor.name]

    def check(target: Checkpoint) -> Iterator[TensorProof]:
        here = target.stored(linear.module).values(torch.float64)
        there = linear.weight.values(torch.float64)
        off = int((here != there).sum()) if here.shape == there.shape else there.numel()
        yield TensorProof(linear.module, linear.tensors, there.numel(), off, off, EXACT)

    return ConversionUnit(linear.module, planned, linear.tensors, make, check)


def _refused(
    linear: SourceLinear, to: str, found: str, expected: str, remedy: str
) -> LayoutMismatch:
    return LayoutMismatch(f"{shown(linear.module)}, to {to}", found, expected, remedy)


def _read(linear: SourceLinear, to: str) -> _Integers:
    weight, form = linear.weight.weight(), linear.weight.format
    assert form is not None
    assert weight.codes is not None
    assert weight.block_scale is not None
    if weight.channel_scale is not None or weight.input_scale is not None:
        raise _refused(
            linear, to, "scales or factors of its input", "a weight alone",
            "Keep its dialect, or decode it: degarble convert SRC DST --to bf16.",
        )  # fmt: skip
    bits, codes = form.element.bits, weight.codes
    codes = unpack_nibbles(codes, NibbleOrder.LOW_EVEN) if form.packed else codes.view(torch.uint8)
    half = 1 << (bits - 1)
    zero = weight.zero_point
    if zero is None:  # two's complement
        codes, zero = codes ^ half, torch.full_like(weight.block_scale, half)
    return _Integers(codes, zero.to(torch.int64), weight.block_scale, weight.group_index, bits)


def _stored(linear: SourceLinear, to: str, scheme: StorageScheme) -> dict[str, Tensor]:
    """Return the tensors of a module in a dialect."""
    own = _read(linear, to)
    rows, columns = own.codes.shape
    width = -(-columns // own.scale.shape[1])
    usual = torch.arange(columns, dtype=torch.int32) // width
    index = None if own.groups is None or torch.equal(own.groups, usual) else own.groups
    scale = own.scale.half()
    if not torch.equal(scale.float(), own.scale):
        if scheme is not CT_PACKED:
            raise _refused(linear, to, "scales that float16 does not hold", "scales in float16",
                           "Convert it to pack-quantized, which holds float32.")  # fmt: skip
        scale = own.scale
    count = WORD // own.bits
    if scheme is AWQ and (own.bits != WORD // 8 or index is not None or rows % count):
        raise _refused(linear, to, f"{own.bits} bits, {rows} rows"
                       + (", columns in another order" if index is not None else ""),
                       "4 bits, rows in whole words, columns in order",
                       "Convert it to pack-quantized.")  # fmt: skip
    if scheme is GPTQ and (bool((own.zero < 1).any()) or rows % count or columns % count):
        raise _refused(linear, to, "a zero point of 0, or extents of no whole word",
                       "zero points from 1, extents in whole words of codes",
                       "Convert it to awq or pack-quantized.")  # fmt: skip
    return {f"{linear.module}{scheme.suffixes[part]}": tensor.contiguous()
            for part, tensor in _parts(own, scheme, index, scale)}  # fmt: skip


def _parts(
    own: _Integers, scheme: StorageScheme, index: Tensor | None, scale: Tensor
) -> Iterator[tuple[PartKind, Tensor]]:
    rows, columns = own.codes.shape
    if scheme is CT_PACKED:
        yield PartKind.CODES, _words(own.codes, own.bits)
        yield PartKind.BLOCK_SCALE, scale
        if bool((own.zero != 1 << (own.bits - 1)).any()):
            yield PartKind.ZERO_POINT, _words(own.zero.T, own.bits).T
        if index is not None:
            yield PartKind.GROUP_INDEX, index
        yield PartKind.LOGICAL_SHAPE, torch.tensor([rows, columns])
        return
    zero = own.zero.T - scheme.zero_added
    if scheme is AWQ:
        yield PartKind.CODES, _words(own.codes.T, own.bits, scheme.order)
    else:
        yield PartKind.CODES, _words(own.codes, own.bits).T
        groups = own.scale.shape[1]
        usual = torch.arange(columns, dtype=torch.int32) // -(-columns // groups)
        yield PartKind.GROUP_INDEX, usual if index is None else index
    yield PartKind.ZERO_POINT, _words(zero, own.bits, scheme.order)
    yield PartKind.BLOCK_SCALE, scale.T


def _words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return int32 words of codes that follow each other along the last axis, filled with 0."""
    count = WORD // bits
    missing = -numbers.shape[-1] % count
    whole = torch.nn.functional.pad(numbers.to(torch.int64), (0, missing))
    groups = whole.unflatten(-1, (-1, count))
    places = range(count) if order is None else order
    total = sum(groups[..., place] << (at * bits) for at, place in enumerate(places))
    assert isinstance(total, torch.Tensor)
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32)


def stated_integers(checkpoint: Checkpoint, to: str) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint in a dialect; raise where modules differ."""
    forms, ordered = set(), False
    modules = []
    for linear in linears(checkpoint):
        own = _read(linear, to)
        fmt = linear.weight.format
        assert fmt is not None
        half = 1 << (own.bits - 1)
        forms.add((own.bits, fmt.block[1] or -1, bool((own.zero == half).all())))
        ordered = ordered or own.groups is not None
        modules.append(linear.module)
    if len({form[:2] for form in forms}) != 1:
        raise LayoutMismatch(
            f"modules of {shown(str(checkpoint.root))}", f"{len(forms)} kinds of integers",
            "one number of bits and one group size",
            "Convert it to BF16, and quantise it anew.",
        )  # fmt: skip
    bits, group = next(iter(forms))[:2]
    symmetric = all(form[2] for form in forms)
    plain = [name.removesuffix(".weight") for name, entry in checkpoint.entries.items()
             if name.endswith(".weight") and len(entry.shape) > 1]  # fmt: skip
    left = sorted(set(plain) - set(modules))
    if to == "awq":
        return {"quant_method": "awq", "version": "gemm", "bits": bits, "group_size": group,
                "zero_point": True, "modules_to_not_convert": left}  # fmt: skip
    if to == "gptq":
        return {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": bits,
                "group_size": group, "sym": symmetric, "desc_act": ordered,
                "lm_head": "lm_head" in modules, "modules_to_not_convert": left}  # fmt: skip
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
               "strategy": "channel" if group < 0 else "group",
               "group_size": None if group < 0 else group,
               "actorder": "group" if ordered else None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": to, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": left,
    }  # fmt: skip
