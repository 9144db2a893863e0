"""Stand-ins for the kernels that a whole layer has beside those of single components."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, from_layout
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise
from degarble.kernels.runtime.operands import require_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Given = Mapping[str, Any]
    Made = tuple[Tensor, ...]

BF16, F32, U8, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int64


def grouped(p: Any, t: Given) -> Made:
    """Multiply group by group, heads turned back and rounded before."""
    require_tensor("A", t["a"], BF16, (p.tokens, p.groups * p.inner), 16)
    require_tensor("B", t["b"], BF16, (p.groups * p.columns, p.inner), 16)
    a = t["a"]
    if p.turned:
        require_tensor("turns", t["turns"], F32, (p.positions, 64), 16)
        require_tensor("positions", t["positions"], I64, (p.tokens,), 8)
        heads = a.reshape(p.tokens, -1, p.turned).float()
        turns = t["turns"][t["positions"]][:, None]
        cos, sin, even, odd = (
            turns[..., :32],
            -turns[..., 32:],
            heads[..., -64::2],
            heads[..., -63::2],
        )
        tail = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        a = torch.cat((heads[..., :-64], tail), -1).to(BF16).flatten(1)
    parts = a.float().reshape(p.tokens, p.groups, p.inner)
    weight = t["b"].float().reshape(p.groups, p.columns, p.inner)
    made = torch.einsum("tgk,gnk->tgn", parts, weight).flatten(1)
    return (made if p.out == "fp32" else made.to(BF16),)


def scale(p: Any, t: Given) -> Made:
    """Multiply by a factor, rounded once."""
    kinds = {"bf16": BF16, "fp32": F32}
    require_tensor("values", t["values"].reshape(-1), kinds[p.source], (p.count,), 2)
    return ((t["values"].float() * torch.tensor(p.factor)).to(kinds[p.out]),)


def latent_query(p: Any, t: Given) -> Made:
    """Put a head's turned part beside its latent one."""
    require_tensor("latent part", t["latent"], BF16, (p.tokens, p.heads, 512), 16)
    require_tensor("query heads", t["heads"], BF16, (p.tokens, p.heads, p.width), 16)
    require_tensor("turns", t["turns"], F32, (p.positions, 64), 16)
    require_tensor("positions", t["positions"], I64, (p.tokens,), 8)
    turns, tail = t["turns"][t["positions"]][:, None], t["heads"][..., -64:].float()
    cos, sin, even, odd = turns[..., :32], turns[..., 32:], tail[..., ::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return (torch.cat((t["latent"], turned.to(BF16)), -1),)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    made = quantise(x.float(), NVFP4, CANONICAL, decode_scale=scale)
    return dequantise(made, F32)


def _matrix(codes: Tensor, scales: Tensor, decode: Tensor) -> Tensor:
    rows, inner = codes.shape[0], codes.shape[1] * 2
    tensor = QuantisedTensor(
        codes, from_layout(scales, SWIZZLE_128X4, rows, inner // 16), decode, NVFP4, CANONICAL,
        LINEAR, ScaleDirection.DECODE, NibbleOrder.LOW_EVEN, (rows, inner),
    )  # fmt: skip
    return dequantise(tensor, F32)


def _expert(p: Any, t: Given, number: int, x: Tensor) -> Tensor:
    """Run one expert's tokens: BF16 before SwiGLU is never stored, as in the kernel's epilogue."""
    parts = t["w13_codes"][number], t["w13_scales"][number], t["w13_decode_scale"][number]
    given = _rounded(x, t["w13_input_scale"][number])
    gate, up = (
        (given @ _matrix(*(part[half] for part in parts)).T).to(BF16).float() for half in (0, 1)
    )
    if p.limit is not None:
        gate, up = gate.clamp(max=p.limit), up.clamp(-p.limit, p.limit)
    act = (torch.nn.functional.silu(gate) * up).to(BF16)
    down = _matrix(*(t[f"w2_{part}"][number] for part in ("codes", "scales", "decode_scale")))
    return (_rounded(act, t["w2_input_scale"][number]) @ down.T).to(BF16)


def experts(p: Any, t: Given) -> Made:
    """Sum a token's experts by their weights, and the shared one where it is given."""
    require_tensor("x", t["x"], BF16, (p.tokens, p.hidden), 32)
    require_tensor("experts of tokens", t["experts"], torch.int32, (p.tokens, p.chosen), 4)
    require_tensor("routing weights", t["weights"], F32, (p.tokens, p.chosen), 4)
    assert p.weighting == "after w2", "the stand-in has this side alone"
    total = summed(products_of(p, t), t["weights"])
    if "shared" not in t:
        return (total,)
    require_tensor("shared expert's output", t["shared"], BF16, (p.tokens, p.hidden), 16)
    return ((total + t["shared"].float()).to(BF16),)


def products_of(p: Any, t: Given) -> Tensor:
    """Return the products of every slot, expert by expert."""
    made = torch.zeros(p.tokens, p.chosen, p.hidden, dtype=BF16)
    for number in t["experts"].unique().tolist():
        tokens, slot = (t["experts"] == number).nonzero(as_tuple=True)
        made[tokens, slot] = _expert(p, t, number, t["x"][tokens])
    return made


def summed(products: Tensor, weights: Tensor) -> Tensor:
    """Add up a token's slots in their order, by their weights."""
    total = torch.zeros(products.shape[0], products.shape[2])
    for slot in range(products.shape[1]):
        total = total + products[:, slot].float() * weights[:, slot, None]
    return total


def experts_by_row(p: Any, t: Given) -> Made:
    """Sum as above; the shared expert, the last one stacked, takes part where none is given."""
    assert len(t["w13_codes"]) == p.experts, "all experts are stacked"
    if not p.shared:
        return experts(p.moe, t)
    assert "shared" not in t, "its matrices are here"
    return experts(p.moe, {**t, "shared": _expert(p.moe, t, p.moe.experts, t["x"])})


def rows_by_row(p: Any, t: Given) -> Made:
    """Return every row's product, those of the shared expert first, and the rows of slots."""
    moe = p.moe
    require_tensor("x", t["x"], BF16, (moe.tokens, moe.hidden), 32)
    rows = products_of(moe, t).flatten(0, 1)
    if p.shared:
        rows = torch.cat((_expert(moe, t, moe.experts, t["x"]), rows))
    return rows, torch.arange(moe.slots, dtype=torch.int32) + p.shared_rows


def sum_by_row(p: Any, t: Given) -> Made:
    """Add up rows of experts."""
    chosen = t["products"][t["places"].long()].reshape(p.tokens, p.chosen, p.hidden)
    shared = t.get("shared", t["products"][: p.tokens])
    return ((summed(chosen, t["weights"]) + shared.float()).to(BF16),)


def shared_expert(p: Any, t: Given) -> Made:
    """Run the one expert that every token visits."""
    assert (p.experts, p.chosen) == (1, 1), "a shared expert is alone"
    assert not t["experts"].any(), "and has number 0"
    assert bool((t["weights"] == 1).all()), "and counts once"
    return (_expert(p, t, 0, t["x"]),)
