"""Faults of precision: M40 accumulator or output format and rounding, M43 small systematic gain."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import (
    FAINT,
    RoundingSide,
    both_gains,
    faint,
    fitted,
    gain_text,
    is_named,
    of_record,
    planted_gain,
    sharpened,
)
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    decoded,
    facts_of,
    unrounded,
    unrounded_output,
    with_facts,
)
from degarble.harness.engine.faults.regions import differing, flat, length_of_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.gain_fit import Region
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]
    Round = Callable[[Tensor], Tensor]


# --------------------------------------------------------------------------------------------------
# M40: an accumulator or an output has too small a format, or is rounded by another rule.
#
# Partial sums are stored in FP16 before the scale (vllm issue 37135: infinite), partial sums over K
# are kept in BF16, an output passes through E4M3, or is truncated instead of rounded. Each of these
# alone looks like noise; sums over rows and tiles show that it is too large.


_LINEARS = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wkv_a", "attn.wkv_b", "attn.wo", "attn.wo_a",
    "attn.wo_b", "attn.indexer.wq_b", "attn.indexer.wk", "ffn.shared.w13", "ffn.shared.w2",
    "ffn.w13", "ffn.w2", "ffn.experts.w13", "ffn.experts.w2", "traced.linear",
)  # fmt: skip
_ROUNDED = (*_LINEARS, "attn.attend", "attn.norm", "attn.q_norm", "ffn.norm", "ffn.moe_sum")
_BLOCK = 64  # of K
_STEPS = (16, 32, 64, 128, 256)  # of K that are summed before a sum is stored
_MOST_PARTS = 32  # that a sum is cut into, or a diagnosis would take minutes


def _finer(context: ComponentContext, change: Round) -> Any:
    """Apply `change` to the unrounded output, then store it."""
    fine = with_facts(context, unrounded_output)

    def apply(call: Any) -> Any:
        exact = fine(call)

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            known = call(inputs, weights)
            made = change(exact(inputs, weights)["out"].double())
            return {**known, "out": made.to(known["out"].dtype)}

        return faulty

    return apply


def _cut(x: Tensor) -> Tensor:
    """Truncate to BF16, towards zero."""
    codes = x.float().contiguous().view(torch.int32) & -65536
    return codes.view(torch.float32).double()


def _up(x: Tensor) -> Tensor:
    """Round up to the next BF16; half away from zero instead of half to even has no effect."""
    codes = (x.float().contiguous().view(torch.int32) + 65535) & -65536
    return codes.view(torch.float32).double()


def _through(dtype: torch.dtype, scale: float, x: Tensor) -> Tensor:
    if dtype is torch.float8_e4m3fn:
        return (x / scale).clamp(-448, 448).to(dtype).double() * scale
    return (x / scale).to(dtype).double() * scale


def _coarse_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in (
        ("an output that was E4M3 on its way", partial(_through, torch.float8_e4m3fn, 1.0)),
        ("an output that was E5M2 on its way", partial(_through, torch.float8_e5m2, 1.0)),
        ("an output cut off towards zero", _cut),
        ("an output rounded away from zero", _up),
    ):
        yield FaultVariant(words, _finer(context, change))


def _small_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield sums kept in FP16 before the scales are multiplied."""
    for words, power in (
        ("sums in FP16 in front of a scale of 2^-20", 2.0**-20),
        ("sums in FP16 in front of a scale of 2^-14", 2.0**-14),
        ("outputs below 2^-10 lost in FP16 after a scale of 2^14", 2.0**14),
    ):
        yield FaultVariant(words, _finer(context, partial(_through, torch.float16, power)))
    yield FaultVariant("sums in FP16 in front of the tensor scale", _before_the_scale(context))


def _before_the_scale(context: ComponentContext) -> Any:
    """Round the sum as it is before its tensor scales are multiplied."""
    fine = with_facts(context, unrounded)

    def apply(call: Any) -> Any:
        exact = fine(call)

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            known = call(inputs, weights)
            scale = _tensor_scales(inputs, weights)
            made = _through(torch.float16, scale, exact(inputs, weights)["out"].double())
            return {**known, "out": made.to(known["out"].dtype)}

        return faulty

    return apply


def _tensor_scales(inputs: Tensors, weights: Mapping[str, Any]) -> float:
    """Return the product of the tensor scales of both operands."""
    scale = 1.0
    for weight in weights.values():
        if weight.tensor_scale is not None:
            scale = float(weight.tensor_scale.double().abs().max())
    given = inputs.get("tensor_scale")
    return scale if given is None else scale * float(given.double().abs().max())


def _kept(
    context: ComponentContext, dtype: torch.dtype, block: int | None, *, scaled: bool = True
) -> Any:
    """Add partial sums over blocks of K to a sum that is stored in `dtype`.

    It is stored with its scales, or before tensor scales are multiplied.
    """
    fine = with_facts(context, unrounded)

    def apply(call: Any) -> Any:
        exact = fine(call)

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            known = call(inputs, weights)
            total = torch.zeros(known["out"].shape, dtype=torch.float64)
            facts = facts_of(exact)
            width = max(weight.shape[1] for weight in weights.values())
            size = max(block or -(-width // 2), -(-width // _MOST_PARTS))
            unit = 1.0 if scaled else _tensor_scales(inputs, weights)
            for begin in range(0, width, size):
                some = decoded(facts, inputs, weights, partial(_alone, begin, begin + size))
                total = total + exact(some, weights)["out"].double()
                total = (total / unit).to(dtype).double() * unit
            return {**known, "out": total.to(known["out"].dtype)}

        return faulty

    return apply


def _alone(begin: int, end: int, x: Tensor) -> Tensor:
    """Return the input with all but some columns set to zero."""
    made = torch.zeros_like(x)
    made[..., begin:end] = x[..., begin:end]
    return made


def _sum_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if context.component.kind:
        yield from _sums_in_steps(context)
        return
    for block in (_BLOCK, _BLOCK // 2):
        words = f"sums kept in BF16 from one {block} of K to the next"
        yield FaultVariant(words, _kept(context, torch.bfloat16, block), {"k": block})
    yield FaultVariant(
        "the two halves of K stored in BF16 and added", _kept(context, torch.bfloat16, None)
    )


def _sums_in_steps(context: ComponentContext) -> Iterator[FaultVariant]:
    width = max(weight.shape[-1] for weight in context.weights.values())
    scaled = [True, False] if any(w.is_quantised for w in context.weights.values()) else [True]
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "FP16")):
        for block in _STEPS:
            for with_scales in scaled if block < width else ():
                place = "" if with_scales else ", in front of the tensor scales"
                yield FaultVariant(
                    f"sums kept in {name} after every {block} of K{place}",
                    _kept(context, dtype, block, scaled=with_scales), {"k": block},
                    stores_within=True,
                )  # fmt: skip


def _if_near(
    variants: Callable[[ComponentContext], Iterator[FaultVariant]], most: float
) -> Callable[[ComponentContext, CallRecord], Iterator[FaultVariant]]:
    """Propose only if the difference is at most `most`, as rounding is; partial sums are costly."""

    def signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        if length_of_difference(record) <= most:
            yield from variants(context)

    return signature


OUTPUT_PRECISION_FAULTS = (
    ModelFault(
        id="M40.coarse_output",
        title="An output passes through a coarser format, or is cut off",
        effect="noise beyond one rounding; small values, or all of them, lean to one side",
        remedy="Round once, to nearest even, to the dtype that is stored.",
        applies_to=lambda context: context.role in _ROUNDED,
        variants=_coarse_variants,
        signature=_if_near(_coarse_variants, 0.5),
    ),
    ModelFault(
        id="M40.small_accumulator",
        title="A sum is stored in FP16 in front of its scale",
        effect="large sums become infinite, or small ones vanish",
        remedy="Multiply by the scales in fp32 and convert last.",
        applies_to=lambda context: context.role in _LINEARS,
        variants=_small_variants,
    ),
    ModelFault(
        id="M40.short_sums",
        title="Partial sums over K are stored in 16 bits",
        effect="noise that grows with K",
        remedy="Keep accumulators and split-K workspaces in fp32.",
        applies_to=lambda context: context.role in _LINEARS,
        variants=_sum_variants,
        signature=_if_near(_sum_variants, 0.3),
    ),
)


# --------------------------------------------------------------------------------------------------
# M43: an output, or one head, expert or tile of it, has a small systematic gain.
#
# One backend shifts the distribution silently (flashinfer issue 3589), or leaves out a constant of
# the model (sglang issue 26791). The gain is fitted by least squares, place by place. It is
# reported as a number; its origin is left to the reader.

PLANTED = (0.97, 1.03, 0.9)
TILE = 64  # columns of a tile
_WHOLE = {
    "attn.attend", "attn.compressor.pool", "attn.hc_post", "attn.hc_pre",
    "attn.indexer.weights_proj", "attn.inverse_rope", "attn.kv_norm", "attn.kv_norm_rope",
    "attn.kv_write", "attn.norm", "attn.q_head_norm_rope", "attn.q_norm", "attn.wkv", "attn.wkv_a",
    "attn.wo", "attn.wo_a", "attn.wo_b", "attn.wq_a", "attn.wq_b", "embed", "ffn.act",
    "ffn.experts.combine", "ffn.experts.w13", "ffn.experts.w2", "ffn.gate", "ffn.hc_post",
    "ffn.hc_pre", "ffn.moe_sum", "ffn.norm", "ffn.shared.act", "ffn.shared.w13", "ffn.shared.w2",
    "ffn.w13", "ffn.w2", "hc_head", "head", "norm",
}  # fmt: skip
_TILED = {
    "attn.wq_a", "attn.wq_b", "attn.wo_b", "attn.wo", "ffn.shared.w13", "ffn.shared.w2", "ffn.w13",
    "ffn.w2", "head",
}  # fmt: skip


def _whole_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for gain in PLANTED:
        yield planted_gain(
            context, f"{gain_text(gain)} on the whole output", gain, places={"gain": gain}
        )


def _whole(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    gain = of_record(record)
    c, e = record.outputs.get("out"), record.expected.get("out")
    if gain is None and c is not None and e is not None and c.shape == e.shape:
        gain = faint(c, e)
    if gain is not None:
        for value, side in _sharp(context, record, gain):
            words = f"{gain_text(value)} on the whole output"
            yield from both_gains(context, words, value, places={"gain": value}, sides=(side,))


def _sharp(
    context: ComponentContext, record: CallRecord, gain: float, mask: Tensor | None = None
) -> Iterator[tuple[float, RoundingSide]]:
    """Yield the gains that a fitted one may be, each with its side of the rounding.

    A healthy kernel's own roundings may blur what `sharpened` counts; then the fit itself is right.
    """
    for side in RoundingSide:
        sharp = sharpened(context, record, gain, mask, side)
        for value in dict.fromkeys((*_rounded(sharp), *_rounded(gain))):
            yield value, side


def _rounded(gain: float) -> Iterator[float]:
    """Yield the gain with few digits if a fit cannot tell them apart, then the gain itself."""
    if not math.isfinite(gain):
        return  # a twin that is not finite has no gain
    exact = math.copysign(2.0 ** round(math.log2(abs(gain))), gain) if gain else 0.0
    if is_named(gain, exact) and exact != 1:
        yield exact  # a fit's last digits are noise beside an exact number
        return
    if abs(gain - 1) <= FAINT:
        beside = dict.fromkeys(float(f"{gain - 1:.{digits}g}") for digits in (1, 2))
        yield from (1 + value for value in beside if value)
        yield gain
        return
    short = {float(f"{gain:.{digits}g}"): None for digits in (2, 3)}
    yield from (value for value in short if value != 1 and is_named(gain, value))
    yield gain


def _heads(context: ComponentContext) -> int:
    return int(context.bound.config.num_attention_heads)


def _head_region(head: int, heads: int) -> Region:
    def region(_inputs: Mapping[str, Tensor], out: Tensor) -> Tensor:
        if out.ndim == 3:
            return (torch.arange(out.shape[1]) == head)[:, None].expand(out.shape)
        return (torch.arange(out.shape[-1]) // (out.shape[-1] // heads) == head).expand(out.shape)

    return region


def _planted_heads(context: ComponentContext) -> Iterator[FaultVariant]:
    for head in (0, _heads(context) - 1):
        yield next(head_variants(context, head, 0.97))


def head_variants(
    context: ComponentContext,
    head: int,
    gain: float,
    sides: Collection[RoundingSide] = tuple(RoundingSide),
) -> Iterator[FaultVariant]:
    """Yield a gain on one head, before the rounding and after it."""
    region, places = _head_region(head, _heads(context)), {"head": head, "gain": gain}
    yield from both_gains(context, f"{gain_text(gain)} on head {head}", gain, region, places, sides)


def _of_places(
    context: ComponentContext, record: CallRecord, masks: Iterator[tuple[int, Tensor]]
) -> Iterator[tuple[int, float, RoundingSide]]:
    """Yield places that differ by a gain; none if the whole output has one."""
    c, e = record.outputs["out"], record.expected["out"]
    if of_record(record) is not None or c.shape != e.shape:
        return
    for number, mask in masks:
        gain = fitted(c[mask], e[mask]) or faint(c[mask], e[mask])
        if gain is not None:
            for value, side in _sharp(context, record, gain, mask):
                yield number, value, side


def _head(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    heads, out = _heads(context), record.expected["out"]
    masks = ((h, _head_region(h, heads)(record.inputs, out)) for h in range(heads))
    found = ((h, mask) for h, mask in masks if mask is not None)
    for head, gain, side in _of_places(context, record, found):
        yield from head_variants(context, head, gain, (side,))


def _expert_region(expert: int) -> Region:
    def region(inputs: Mapping[str, Tensor], out: Tensor) -> Tensor:
        return (inputs["experts"] == expert)[..., None].expand(out.shape)

    return region


def expert_variants(
    context: ComponentContext,
    expert: int,
    gain: float,
    sides: Collection[RoundingSide] = tuple(RoundingSide),
) -> Iterator[FaultVariant]:
    """Yield a gain on one expert, before the rounding and after it."""
    region, places = _expert_region(expert), {"expert": expert, "gain": gain}
    yield from both_gains(
        context, f"{gain_text(gain)} on expert {expert}", gain, region, places, sides
    )


def _planted_experts(context: ComponentContext) -> Iterator[FaultVariant]:
    for expert in (0, context.bound.config.n_routed_experts - 1):
        yield next(expert_variants(context, expert, 0.97))


def _expert(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    experts, out = record.inputs["experts"], record.expected["out"]
    masks = (
        (number, (experts == number)[..., None].expand(out.shape))
        for number in experts.unique().tolist()
        if number >= 0
    )
    for expert, gain, side in _of_places(context, record, masks):
        yield from expert_variants(context, expert, gain, (side,))


def _tile_region(tile: int) -> Region:
    def region(_inputs: Mapping[str, Tensor], out: Tensor) -> Tensor:
        return (torch.arange(out.shape[-1]) // TILE == tile).expand(out.shape)

    return region


def tile_variants(
    context: ComponentContext,
    tile: int,
    gain: float,
    sides: Collection[RoundingSide] = tuple(RoundingSide),
) -> Iterator[FaultVariant]:
    """Yield a gain on one tile of columns, before the rounding and after it."""
    begin = tile * TILE
    words = f"{gain_text(gain)} on columns {begin} to {begin + TILE - 1}"
    places = {"column": begin, "gain": gain}
    yield from both_gains(context, words, gain, _tile_region(tile), places, sides)


def _planted_tiles(context: ComponentContext) -> Iterator[FaultVariant]:
    for gain in (0.97, 0.5):
        yield next(tile_variants(context, 0, gain))
    yield next(tile_variants(context, 1, 0.97))


def _tile(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    mask = differing(record)
    out = record.expected["out"]
    if out.shape[-1] <= TILE:
        return
    columns = range(out.shape[-1]) if mask is None else mask.any(0).nonzero().flatten().tolist()
    found = sorted({c // TILE for c in columns})
    if mask is not None and len(found) * TILE >= flat(out).shape[1]:
        return
    masks = ((tile, _tile_region(tile)(record.inputs, out)) for tile in found)
    for tile, gain, side in _of_places(
        context, record, ((t, m) for t, m in masks if m is not None)
    ):
        yield from tile_variants(context, tile, gain, (side,))


def _sits_whole(context: ComponentContext) -> bool:
    return context.role in _WHOLE


def _sits_head(context: ComponentContext) -> bool:
    return context.role in {
        "attn.attend",
        "attn.wq_b",
        "attn.q_head_norm_rope",
        "attn.inverse_rope",
    }


def _sits_expert(context: ComponentContext) -> bool:
    return context.role in {"ffn.experts.w13", "ffn.experts.w2"}


def _sits_tile(context: ComponentContext) -> bool:
    return context.role in _TILED


_REMEDY = "Look for a constant that this backend leaves out, or a scale that it rounds."

SMALL_GAIN_FAULTS = (
    ModelFault(
        id="M43.whole",
        title="A systematic gain on all of an output",
        effect="proportions stay, so a cosine sees nothing; distributions shift",
        remedy=_REMEDY,
        applies_to=_sits_whole,
        variants=_whole_variants,
        signature=_whole,
    ),
    ModelFault(
        id="M43.one_head",
        title="A systematic gain on one head",
        effect="one head pulls more or less than it should",
        remedy=_REMEDY,
        applies_to=_sits_head,
        variants=_planted_heads,
        signature=_head,
    ),
    ModelFault(
        id="M43.one_expert",
        title="A systematic gain on one expert",
        effect="tokens that visit this expert are off by its factor, or have its sign turned",
        remedy=_REMEDY,
        applies_to=_sits_expert,
        variants=_planted_experts,
        signature=_expert,
    ),
    ModelFault(
        id="M43.one_tile",
        title="A systematic gain on one tile of columns",
        effect="64 columns of a product are off",
        remedy=_REMEDY,
        applies_to=_sits_tile,
        variants=_planted_tiles,
        signature=_tile,
    ),
)
