"""A stand-in for our kernels: each computed on the CPU from its own contract, under its own name.

Every tensor is checked as the kernel's entry point checks it (dtype, shape, strides, alignment), so
that what is handed over wrongly fails here as it would on a GPU. The arithmetic is written from the
contracts, not from the references: sums in float32 in torch's order, one rounding where the kernel
has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.kernels import (
    FC1,
    FC2,
    GATHER,
    ORDER,
    SUM,
    TACTICS,
    Kernels,
)
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, from_layout, to_layout
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise
from degarble.kernels.attention.problem import QueryProblem, choose_splits
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.moe.problem import CombineProblem
from degarble.kernels.primitives.kv_problem import WIDTH
from degarble.kernels.primitives.quantise_problem import Fp8Problem, QuantiseProblem
from degarble.kernels.rows.mhc_problem import MhcMixProblem
from degarble.kernels.rows.problem import InverseRopeProblem
from degarble.kernels.runtime.operands import require_tensor
from degarble.suites.backends import cutedsl_standin_attention as attention
from degarble.suites.backends import cutedsl_standin_layer as layer
from degarble.suites.backends import cutedsl_standin_moe as moe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Given = Mapping[str, Any]
    Made = tuple[Tensor, ...]

BF16, F32, U8, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int64


def _embed(p: Any, t: Given) -> Made:
    require_tensor("ids", t["ids"], I64, (p.tokens,), 8)
    require_tensor("table", t["table"], BF16, (p.vocabulary, p.columns), 16)
    return (t["table"][t["ids"]],)


def _rmsnorm(p: Any, t: Given) -> Made:
    require_tensor("values", t["values"], BF16, (p.rows, p.columns), 32)
    of_weight = {"bf16": BF16, "fp32": F32}[p.weight]
    require_tensor("weight", t["weight"], of_weight, (p.columns,), 16)
    x = t["values"].float()
    factor = 1.0 / (x.square().mean(-1, keepdim=True) + p.epsilon).sqrt()
    out = (t["weight"].float() * (x * factor)).to(BF16)
    return (out, _decoded_rows(out, t["decode_scale"])) if p.decoded else (out,)


def _residual_norm(p: Any, t: Given) -> Made:
    require_tensor("residual", t["residual"], BF16, (p.rows, p.columns), 32)
    require_tensor("values", t["values"], BF16, (p.rows, p.columns), 32)
    of_weight = {"bf16": BF16, "fp32": F32}[p.weight]
    require_tensor("weight", t["weight"], of_weight, (p.columns,), 32)
    total = t["values"].float() + t["residual"].float()
    x = total.to(BF16).float() if p.rounded else total
    factor = 1.0 / (x.square().mean(-1, keepdim=True) + p.epsilon).sqrt()
    return (t["weight"].float() * (x * factor)).to(BF16), total.to(BF16)


def _gemv(p: Any, t: Given) -> Made:
    require_tensor("activations", t["x"], BF16, (p.rows, p.groups * p.inner), 16)
    require_tensor("weight", t["weight"], BF16, (p.sums, p.inner), 16)
    x = t["x"]
    if p.turned:
        heads = InverseRopeProblem(p.rows, x.shape[1] // p.turned, p.positions, width=p.turned)
        x = _inverse_rope(heads, {**t, "heads": x.reshape(p.rows, -1, p.turned)})[0].flatten(1)
    pairs = zip(x.float().chunk(p.groups, 1), t["weight"].float().chunk(p.groups), strict=True)
    out = torch.cat([x @ weight.T for x, weight in pairs], 1)
    out = out.to(BF16 if p.out == "bf16" else F32)
    return (out, _decoded_rows(out, t["decode_scale"])) if p.decoded else (out,)


def _heads(p: Any, t: Given) -> Made:
    heads = _merged(p, t) if p.splits else t["x"]
    require_tensor("heads", heads, BF16, (p.tokens, p.heads, p.width), 16)
    plain = heads[..., : p.inner].flatten(1).contiguous()
    of = GroupedProblem(p.tokens, p.heads, p.columns, p.inner)
    (sums,) = layer.grouped(of, {"a": plain, "b": t["weight"]})
    if p.positions:
        query = QueryProblem(p.tokens, p.heads, p.width, p.positions)
        latent = sums.reshape(p.tokens, p.heads, p.columns)
        given = {name: t[name] for name in ("turns", "positions")}
        return layer.latent_query(query, {"latent": latent, "heads": t["x"], **given})
    out = _decoded_rows(sums, t["decode_scale"]) if p.decoded else sums
    return (out.reshape(p.tokens, p.heads, p.columns),)


def _splits(p: Any, t: Given) -> Made:
    """Leave all keys in the first split: others have none, and sums that nobody wrote."""
    sums, stats = t["sums"], t["stats"]
    require_tensor("sums", sums, F32, (p.tokens, choose_splits(p), p.heads, WIDTH), 16)
    require_tensor("peaks", stats, F32, (p.tokens, choose_splits(p), p.heads, 2), 16)
    given = {name: tensor for name, tensor in t.items() if name not in {"sums", "stats"}}
    made = attention.attention(p, given)
    sums.fill_(torch.nan)[:, 0] = made[0].float()
    stats[:] = torch.tensor([-torch.inf, 0.0])
    stats[:, 0] = torch.tensor([0.0, 1.0])
    return made


def _merged(p: Any, t: Given) -> torch.Tensor:
    """Merge splits of which each has all of a head's keys or none."""
    require_tensor("sums", t["sums"], F32, (p.tokens, p.splits, p.heads, p.width), 16)
    require_tensor("peaks", t["stats"], F32, (p.tokens, p.splits, p.heads, 2), 16)
    own = t["stats"][..., 1:] != 0
    return torch.where(own, t["sums"], 0.0).sum(1).to(BF16)


def _gemm_bf16(p: Any, t: Given) -> Made:
    require_tensor("A", t["a"], BF16, (p.rows, p.inner), 16)
    require_tensor("B", t["b"], BF16, (p.columns, p.inner), 16)
    return ((t["a"].float() @ t["b"].float().T).to(BF16),)


def _alone(p: Any, t: Given) -> Made:
    assert not t["number"].any(), "the only matrix has number 0"
    one = W4A16Problem(1, p.moe.hidden, p.moe.width, SWIZZLE_128X4.name)
    (codes,), (scales,) = t["codes"], t["scales"]
    factor = t["input_scale"] * t["decode_scale"]
    return _w4a16(one, {"x": t["x"], "codes": codes, "scales": scales, "decode_scale": factor})


def _nvfp4_values(rows: int, inner: int, side: str, t: Given) -> Tensor:
    size = SWIZZLE_128X4.storage_size(rows, inner // 16)
    require_tensor(f"codes of {side}", t[side], U8, (rows, inner // 2), 16)
    require_tensor(f"scales of {side}", t[f"{side}_scales"], U8, (size,), 16)
    require_tensor(f"decode scale of {side}", t[f"{side}_decode_scale"], F32, (1,), 4)
    scales = from_layout(t[f"{side}_scales"], SWIZZLE_128X4, rows, inner // 16)
    return _decoded(t[side], scales, torch.ones(()))


def _decoded(codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    shape = (codes.shape[0], codes.shape[1] * 2)
    tensor = QuantisedTensor(
        codes, scales, scale, NVFP4, CANONICAL, LINEAR, ScaleDirection.DECODE,
        NibbleOrder.LOW_EVEN, shape,
    )  # fmt: skip
    return dequantise(tensor, F32)


def _gemm_nvfp4(p: Any, t: Given) -> Made:
    a = _nvfp4_values(p.rows, p.inner, "a", t)
    b = _nvfp4_values(p.columns, p.inner, "b", t)
    return (((a @ b.T) * (t["a_decode_scale"] * t["b_decode_scale"])).to(BF16),)


def _w4a16(p: Any, t: Given) -> Made:
    require_tensor("activations", t["x"], BF16, (p.rows, p.columns), 16)
    require_tensor("codes", t["codes"], U8, (p.outputs, p.columns // 2), 16)
    scales = t["scales"]
    if p.layout == LINEAR.name:
        require_tensor("scales", scales, U8, (p.outputs, p.columns // 16), 16)
    else:
        require_tensor("scales", scales, U8, (p.scale_bytes,), 16)
        scales = from_layout(scales, SWIZZLE_128X4, p.outputs, p.columns // 16)
    require_tensor("decode scale", t["decode_scale"], F32, (1,), 4)
    weight = _decoded(t["codes"], scales, torch.ones(()))
    return (((t["x"].float() @ weight.T) * t["decode_scale"]).to(BF16),)


def _gemm_fp8(p: Any, t: Given) -> Made:
    e4m3, groups, blocks = torch.float8_e4m3fn, -(-p.inner // 128), -(-p.columns // 128)
    of_scale = {"ue8m0": U8, "float32": F32}[p.scales]
    require_tensor("A", t["a"], e4m3, (p.rows, p.inner), 16)
    require_tensor("B", t["b"], e4m3, (p.columns, p.inner), 16)
    require_tensor("scales of A", t["a_scales"], of_scale, (p.rows, groups), 1)
    require_tensor("scales of B", t["b_scales"], of_scale, (blocks, groups), 1)
    a_scales, b_scales = (
        torch.exp2(each.float() - 127) if p.scales == "ue8m0" else each
        for each in (t["a_scales"], t["b_scales"])
    )
    b_rows = b_scales.repeat_interleave(128, 0)[: p.columns]
    total = torch.zeros(p.rows, p.columns)
    for group in range(groups):
        k = slice(128 * group, 128 * (group + 1))
        part = t["a"][:, k].float() @ t["b"][:, k].float().T
        total += part * (a_scales[:, group, None] * b_rows[None, :, group])
    return (total.to(BF16),)


def _quantise(p: Any, t: Given) -> Made:
    require_tensor("values", t["values"], BF16, (p.rows, p.input_columns), 32)
    require_tensor("decode_scale", t["decode_scale"], F32, (max(1, p.experts),), 4)
    x = t["values"]
    if p.source == "swiglu":
        gate, up = x.float().chunk(2, -1)
        if p.limit is not None:
            gate, up = gate.clamp(max=p.limit), up.clamp(-p.limit, p.limit)
        x = (torch.nn.functional.silu(gate) * up).to(BF16)
    codes = torch.zeros(p.rows, p.columns // 2, dtype=U8)
    scales = torch.zeros(p.rows, p.blocks, dtype=U8)
    bounds = [0, p.rows]
    if p.experts:
        require_tensor("offsets", t["offsets"], torch.int32, (p.experts + 1,), 4)
        bounds = t["offsets"].tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            scale = t["decode_scale"][number]
            made = quantise(x[begin:end].float(), NVFP4, CANONICAL, decode_scale=scale)
            codes[begin:end], scales[begin:end] = made.codes, made.block_scale
    if p.decoded:
        return (_decoded(codes, scales, torch.ones(())).to(BF16),)
    if p.layout != LINEAR.name:
        scales = to_layout(scales, SWIZZLE_128X4)
    return codes, scales.flatten(), *([x] if p.keeps_values else [])


def _quantise_fp8(p: Any, t: Given) -> Made:
    require_tensor("values", t["values"], BF16, (p.rows, p.columns), 32)
    values = t["values"]
    if p.turned:
        heads = values.reshape(p.rows, -1, p.turned)
        back = InverseRopeProblem(p.rows, heads.shape[1], p.positions, width=p.turned)
        values = _inverse_rope(back, {**t, "heads": heads})[0]
    blocks = values.float().reshape(p.rows, -1, 128)
    amax = blocks.abs().amax(-1).clamp(min=1e-4)
    if p.scales == "float32":
        scale = amax / 448.0
        codes = (blocks / scale[..., None]).clamp(-448, 448)
        return codes.flatten(1).to(torch.float8_e4m3fn), scale
    mantissa, exponent = torch.frexp(amax * torch.tensor(1.0 / 448.0))
    power = exponent - (mantissa == 0.5).int()
    codes = (blocks * torch.exp2(-power.float())[..., None]).clamp(-448, 448)
    return codes.flatten(1).to(torch.float8_e4m3fn), (power + 127).to(U8)


def _turned(x: Tensor, turns: Tensor, sign: float) -> Tensor:
    """Turn pairs of the last values by [T, 64] of cosines and sines; x is [T, H, L]."""
    cos, sin, plain = turns[:, None, :32], sign * turns[:, None, 32:], x.shape[-1] - 64
    even, odd = x[..., plain::2], x[..., plain + 1 :: 2]
    tail = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :plain], tail), dim=-1)


def _require_heads(p: Any, t: Given) -> None:
    require_tensor("heads", t["heads"], BF16, (p.tokens, p.heads, WIDTH), 16)
    require_tensor("turns", t["turns"], F32, (p.positions, 64), 16)
    require_tensor("positions", t["positions"], I64, (p.tokens,), 8)


def _qnorm_rope(p: Any, t: Given) -> Made:
    _require_heads(p, t)
    x = t["heads"].float()
    x = x * (1.0 / (x.square().mean(-1, keepdim=True) + p.epsilon).sqrt())
    return (_turned(x, t["turns"][t["positions"]], 1.0).to(BF16),)


def _inverse_rope(p: Any, t: Given) -> Made:
    _require_heads(p, t)
    return (_turned(t["heads"].float(), t["turns"][t["positions"]], -1.0).to(BF16),)


def _grouped_fp8(p: Any, t: Given) -> Made:
    """The pieces one after the other: heads turned back, codes, a product a group."""
    given = dict(t)
    if p.turned:
        require_tensor("A", t["a"], BF16, (p.tokens, p.groups * p.inner), 16)
        wide = p.groups * p.inner
        fp8_problem = Fp8Problem(p.tokens, wide, p.scales, turned=p.turned, positions=p.positions)
        given["a"], given["a_scales"] = _quantise_fp8(fp8_problem, {**t, "values": t["a"]})
    require_tensor("B", t["b"], torch.float8_e4m3fn, (p.groups * p.columns, p.inner), 16)
    problem, made = replace(p.gemm, columns=p.columns), list[Any]()
    for group in range(p.groups):
        of_k = slice(group * p.inner, (group + 1) * p.inner)
        blocks = slice(group * p.blocks, (group + 1) * p.blocks)
        rows = slice(group * p.columns, (group + 1) * p.columns)
        tiles = slice(rows.start // 128, -(-rows.stop // 128))
        parts = (given["a"][:, of_k], given["a_scales"][:, blocks], t["b"][rows])
        names = ("a", "a_scales", "b", "b_scales")
        own = (each.contiguous() for each in (*parts, t["b_scales"][tiles]))
        made += _gemm_fp8(problem, dict(zip(names, own, strict=True)))
    return (torch.cat(made, 1),)


def _kv_write(p: Any, t: Given) -> Made:
    assert p.pages.entry == "bf16", "the stand-in has pages of BF16 alone"
    require_tensor("values", t["values"], BF16, (p.tokens, p.pages.width), 16)
    require_tensor("slots", t["slots"], I64, (p.tokens,), 8)
    require_tensor("cache", t["cache"], U8, (p.pages.count, p.pages.stride), 16)
    row = t["values"]
    if p.source == "latent":
        require_tensor("turns", t["turns"], F32, (p.positions, 64), 16)
        x, beside = row[:, :WIDTH].float(), row[:, WIDTH:].float()  # V3.2's key is not normed
        factor = 1.0 / (x.square().mean(-1, keepdim=True) + p.epsilon).sqrt()
        normed = (t["weight"].float() * (x * factor)).to(BF16).float()
        whole = torch.cat((normed, beside), 1)[:, None]
        row = _turned(whole, t["turns"][t["positions"]], 1.0)[:, 0].to(BF16)
    told = t["slots"] >= 0
    t["cache"].view(BF16).view(-1, p.pages.width)[t["slots"][told]] = row[told]
    return (t["cache"],)


def _kv_read(p: Any, t: Given) -> Made:
    require_tensor("indices", t["indices"], torch.int32, (p.count,), 4)
    return (t["cache"].view(BF16).view(-1, p.pages.width)[t["indices"].long()],)


def _router(p: Any, t: Given) -> Made:
    require_tensor("logits", t["logits"], F32, (p.tokens, p.experts), 4)
    sigmoid = p.scoring == "sigmoid"
    score = t["logits"].sigmoid() if sigmoid else torch.nn.functional.softplus(t["logits"]).sqrt()
    if p.vocabulary:
        require_tensor("table", t["table"], I64, (p.vocabulary, p.chosen), 8)
        experts = t["table"][t["ids"]]
    else:
        require_tensor("bias", t["bias"], F32, (p.experts,), 4)
        biased = score + t["bias"]
        by_group = biased.reshape(p.tokens, p.groups, -1)
        if p.groups > 1:
            worth = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
            kept = worth.topk(p.groups_kept, -1).indices
            mask = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, kept, value=True)
            biased = by_group.masked_fill(~mask[..., None], -torch.inf).flatten(1)
        experts = biased.sort(dim=-1, descending=True, stable=True).indices[:, : p.chosen]
    chosen = score.gather(1, experts)
    return experts.int(), chosen / (chosen.sum(-1, keepdim=True) + p.epsilon) * p.scale


def _mhc_project(p: Any, t: Given) -> Made:
    shape = (3, p.weight_rows, p.inner)
    require_tensor("streams", t["streams"], BF16, (p.tokens, 4, p.width), 16)
    require_tensor("weight", t["split"], BF16, shape, 16)
    x = t["streams"].float().flatten(1)
    weight = t["split"].float().sum(0)[: p.products]
    return x @ weight.T, x.square().sum(1)


def _mhc(p: Any, t: Given) -> Made:
    if p.part == "post":
        return _mhc_post(p, t)
    count = 4 if p.part == "head" else 24
    require_tensor("streams", t["streams"], BF16, (p.tokens, 4, p.width), 16)
    require_tensor("products", t["products"], F32, (p.tokens, count), 16)
    require_tensor("squares", t["squares"], F32, (p.tokens,), 4)
    require_tensor("base", t["base"], F32, (count,), 16)
    require_tensor("scale", t["scale"], F32, (1 if p.part == "head" else 3,), 4)
    rho = (t["squares"] / (4 * p.width) + p.norm_epsilon).rsqrt()
    scale = (
        t["scale"] if p.part == "head" else t["scale"].repeat_interleave(torch.tensor([4, 4, 16]))
    )
    m = t["products"] * rho[:, None] * scale + t["base"]
    gates = m[:, :4].sigmoid() + p.epsilon
    out = torch.einsum("ts,tsd->td", gates, t["streams"].float()).to(BF16)
    if p.part == "head":
        return (out,)
    mix = m[:, 8:].reshape(-1, 4, 4).softmax(-1) + p.epsilon
    mix = mix / (mix.sum(-2, keepdim=True) + p.epsilon)
    for _ in range(p.iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + p.epsilon)
        mix = mix / (mix.sum(-2, keepdim=True) + p.epsilon)
    return 2 * m[:, 4:8].sigmoid(), mix, out


def _mhc_post(p: Any, t: Given) -> Made:
    require_tensor("streams", t["streams"], BF16, (p.tokens, 4, p.width), 16)
    require_tensor("layer", t["layer"], BF16, (p.tokens, p.width), 16)
    require_tensor("post", t["post"], F32, (p.tokens, 4), 16)
    require_tensor("mix", t["mix"], F32, (p.tokens, 4, 4), 16)
    mixed = torch.einsum("tjk,tjd->tkd", t["mix"], t["streams"].float())
    return ((mixed + t["post"][:, :, None] * t["layer"].float()[:, None]).to(BF16),)


def _mhc_onward(p: Any, t: Given) -> Made:
    """Spread; in place of partial sums, a whole one and zeros."""
    given, made = dict(t), []
    if p.source == "rows":
        problem = CombineProblem(p.tokens, p.width, p.chosen, p.rows, True, True)
        given["products"] = t["made"]
        made = [*layer.sum_by_row(problem, given)]
        given["made"] = made[0]
    mixing = MhcMixProblem(p.tokens, p.width, "post")
    (out,) = _mhc_post(mixing, {**given, "layer": given["made"]})
    products, squares = _mhc_project(p.project, {"streams": out, "split": t["split"]})
    partials = torch.zeros(p.tokens, p.project.partials, 32)
    partials[:, -1, :24], partials[:, -1, 24] = products, squares
    return (out, partials, *made)


def _mhc_norm(p: Any, t: Given) -> Made:
    partials = t["partials"]
    require_tensor("partials", partials, F32, (p.tokens, p.pieces, 32), 16)
    projected = {
        "products": partials[..., :24].sum(1).contiguous(), "squares": partials[..., 24].sum(1)
    }  # fmt: skip
    post, mix, out = _mhc(p.mix, {**t, **projected})
    (normed,) = _rmsnorm(p.norm, {"values": out, "weight": t["weight"]})
    made = [_decoded_rows(normed, t[f"decode_scale{number}"]) for number in range(p.decoded)]
    return (post, mix, out, normed, *made)


def _decoded_rows(values: Tensor, scale: Tensor) -> Tensor:
    rows, columns = values.shape
    problem = QuantiseProblem(rows, columns, LINEAR.name, decoded=True)
    return _quantise(problem, {"values": values, "decode_scale": scale})[0]


STAND_INS: Mapping[str, Callable[[Any, Given], Made]] = {
    "simt_embed": _embed,
    "simt_rmsnorm": _rmsnorm,
    "simt_residual_norm": _residual_norm,
    "simt_scale": layer.scale,
    "simt_latent_query": layer.latent_query,
    "simt_gemv_bf16": _gemv,
    "sm90_gemm_bf16": _gemm_bf16,
    "sm90_gemm_nvfp4": _gemm_nvfp4,
    "sm90_gemm_fp8_block": _gemm_fp8,
    "sm90_gemm_w4a16": _w4a16,
    "sm90_gemm_w4a16_wgmma": _w4a16,
    "sm90_moe_by_row.ALONE": _alone,
    "simt_quantise_nvfp4": _quantise,
    "simt_quantise_fp8": _quantise_fp8,
    "simt_qnorm_rope": _qnorm_rope,
    "simt_inverse_rope": _inverse_rope,
    "simt_kv_write": _kv_write,
    "simt_kv_read": _kv_read,
    "simt_router": _router,
    "simt_mhc": _mhc,
    "simt_mhc_project": _mhc_project,
    "simt_mhc_onward": _mhc_onward,
    "simt_mhc_norm": _mhc_norm,
    "simt_compressor": attention.compressor,
    "simt_indexer_operand": attention.operand,
    "sm90_indexer_scores": attention.scores,
    "simt_indexer_topk": attention.topk,
    "sm90_sparse_attention": attention.attention,
    ORDER: moe.order,
    GATHER: moe.gather,
    FC1: moe.first,
    FC2: moe.second,
    SUM: moe.combine,
    "simt_slots": attention.slots,
    "sm90_sparse_attention.SPLITS": _splits,
    "sm90_latent_heads": _heads,
    "sm90_gemm_grouped": layer.grouped,
    "sm90_gemm_grouped_fp8": _grouped_fp8,
    "sm90_moe_nvfp4": layer.experts,
    "sm90_moe_by_row": layer.experts_by_row,
    "sm90_moe_by_row.PRODUCTS": layer.rows_by_row,
    "sm90_moe_by_row.SUM": layer.sum_by_row,
    "sm90_shared_expert": layer.shared_expert,
}
assert STAND_INS.keys() == TACTICS.keys(), "every kernel has a stand-in"


Seen = Callable[[str, Any, dict[str, Any]], None]


class StandIn(Kernels):
    """The kernels on the CPU. `seen` is asked before each launch, and may change what is told."""

    def __init__(self, seen: Seen | None = None) -> None:
        super().__init__("sm_90a", torch.device("cpu"))
        self._seen = seen

    def _run(self, kernel: str, problem: Any, tensors: Given) -> Made:
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if self._seen is not None:
            self._seen(kernel, problem, given)
        return STAND_INS[kernel](problem, given)
