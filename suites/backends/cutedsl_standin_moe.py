"""Stand-ins for the kernels of the grouped experts, from their contracts.

Each reads and writes as the launch does: rows in the plan's order, every expert from a tile on,
scales in 128x4 order, what fills a tile up as zeros. What a launch does not write is poison, so
that a kernel that reads what nobody wrote is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, from_layout, to_layout
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise
from degarble.kernels.moe import problem as facts
from degarble.kernels.runtime.operands import require_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    Given = Mapping[str, Any]
    Made = tuple[Tensor, ...]

BF16, F32, U8, I32 = torch.bfloat16, torch.float32, torch.uint8, torch.int32
POISON = 0xFF


def order(p: Any, t: Given) -> Made:
    """Order slots by expert."""
    moe, tile = p.moe, p.tactic.rows
    require_tensor("experts", t["experts"], I32, (moe.tokens, moe.chosen), 4)
    require_tensor("local", t["local"], I32, (moe.routed,), 4)
    here_S = t["local"].long()[t["experts"].flatten().long().clamp(min=0)]
    here_S[t["experts"].flatten() < 0] = -1
    rows, counts, tiles, slots_R, places = (torch.full((n,), -1, dtype=I32) for n in p.sizes)
    row = 0
    for expert in range(moe.experts):
        slots = (here_S == expert).nonzero().flatten()
        count, own = len(slots), -(-len(slots) // tile)
        counts[expert] = count
        slots_R[row : row + count] = slots.int()
        places[slots] = torch.arange(row, row + count, dtype=I32)
        tiles[row // tile : row // tile + own] = expert
        row += own * tile
    return rows.fill_(row), counts, tiles, slots_R, places


def _of_experts(p: Any, t: Given) -> Iterator[tuple[int, slice, Tensor]]:
    """Each expert with rows: where they lie, and the slots that they are."""
    tile = p.tactic.rows
    require_tensor("rows", t["rows"], I32, (1,), 4)
    require_tensor("tiles", t["tiles"], I32, (p.sizes[2],), 4)
    require_tensor("slots", t["slots"], I32, (p.rows,), 4)
    own = t["tiles"][: int(t["rows"]) // tile].long().repeat_interleave(tile)
    used = t["slots"][: len(own)] >= 0
    for expert in own[used].unique().tolist():
        rows = (used & (own == expert)).nonzero().flatten()
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        yield expert, span, t["slots"][span].long()


def _codes(p: Any, width: int) -> tuple[Tensor, Tensor]:
    codes = torch.full((p.rows, width // 2), POISON, dtype=U8)
    return codes, torch.full((p.rows, width // 16), 0x7F, dtype=U8)


def gather(p: Any, t: Given) -> Made:
    """Quantise the rows."""
    moe = p.moe
    require_tensor("x", t["x"], BF16, (moe.tokens, moe.hidden), 32)
    require_tensor("input scales", t["w13_input_scale"], F32, (moe.experts,), 4)
    codes, scales = _codes(p, moe.hidden)
    for expert, span, slots in _of_experts(p, t):
        x = t["x"][slots // moe.chosen].float()
        made = quantise(x, NVFP4, CANONICAL, decode_scale=t["w13_input_scale"][expert])
        codes[span], scales[span] = made.codes, made.block_scale
    return codes, to_layout(scales, SWIZZLE_128X4)


def _values(codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    tensor = QuantisedTensor(
        codes, scales, scale.reshape(()), NVFP4, CANONICAL, LINEAR, ScaleDirection.DECODE,
        NibbleOrder.LOW_EVEN, (codes.shape[0], codes.shape[1] * 2),
    )  # fmt: skip
    return dequantise(tensor, F32)


def _activations(p: Any, t: Given, name: str, width: int) -> tuple[Tensor, Tensor]:
    most = p.rows
    require_tensor(f"codes of {name}", t[f"{name}_codes"], U8, (most, width // 2), 16)
    size = facts.scale_bytes(most, width)
    require_tensor(f"scales of {name}", t[f"{name}_scales"], U8, (size,), 16)
    scales = from_layout(t[f"{name}_scales"], SWIZZLE_128X4, most, width // 16)
    return t[f"{name}_codes"], scales


def _product(p: Any, t: Given, name: str, matrix: tuple[int, ...], span: slice) -> Tensor:
    """Rows by one matrix of an expert, rounded once."""
    side, sides = ("hidden", (p.moe.hidden, p.moe.width)) if name == "w2" else ("x", _sides(p))
    n, k = sides
    codes, scales = _activations(p, t, side, k)
    one, expert = torch.ones(()), matrix[0]
    weights = _values(
        t[f"{name}_codes"][matrix],
        from_layout(t[f"{name}_scales"][matrix], SWIZZLE_128X4, n, k // 16), one,
    )  # fmt: skip
    sums = _values(codes[span], scales[span], one) @ weights.T
    scale = t[f"{name}_input_scale"][expert] * t[f"{name}_decode_scale"][matrix]
    made: Tensor = (sums * scale).to(BF16)
    return made


def _sides(p: Any) -> tuple[int, int]:
    return p.moe.width, p.moe.hidden


def _require_weights(t: Given, name: str, leading: tuple[int, ...], n: int, k: int) -> None:
    of = (
        t[f"{name}_codes"],
        t[f"{name}_scales"],
        t[f"{name}_decode_scale"],
        t[f"{name}_input_scale"],
    )
    require_tensor("codes", of[0], U8, (*leading, n, k // 2), 16)
    require_tensor("scales", of[1], U8, (*leading, facts.scale_bytes(n, k)), 16)
    require_tensor("decode scales", of[2], F32, leading, 4)
    require_tensor("input scales", of[3], F32, leading[:1], 4)


def first(p: Any, t: Given) -> Made:
    """Multiply by gate and up, apply SwiGLU, quantise; show gate and up where asked."""
    moe = p.moe
    _require_weights(t, "w13", (moe.experts, 2), *_sides(p))
    require_tensor("scales behind", t["w2_input_scale"], F32, (moe.experts,), 4)
    require_tensor("weights", t["weights"], F32, (moe.tokens, moe.chosen), 4)
    codes, scales = _codes(p, moe.width)
    both = torch.full((p.rows, 2 * moe.width), torch.nan, dtype=BF16)
    for expert, span, _ in _of_experts(p, t):
        both[span] = torch.cat(
            [_product(p, t, "w13", (expert, part), span) for part in range(2)], dim=1
        )
        gate, up = both[span].float().chunk(2, -1)
        if moe.limit is not None:
            gate, up = gate.clamp(max=moe.limit), up.clamp(-moe.limit, moe.limit)
        x = (torch.nn.functional.silu(gate) * up).to(BF16).float()
        made = quantise(x, NVFP4, CANONICAL, decode_scale=t["w2_input_scale"][expert])
        codes[span], scales[span] = made.codes, made.block_scale
    hidden = codes, to_layout(scales, SWIZZLE_128X4)
    return (*hidden, both) if p.shown else hidden


def second(p: Any, t: Given) -> Made:
    """Multiply by w2."""
    _require_weights(t, "w2", (p.moe.experts,), p.moe.hidden, p.moe.width)
    out = torch.full((p.rows, p.moe.hidden), torch.nan, dtype=BF16)
    for expert, span, _ in _of_experts(p, t):
        out[span] = _product(p, t, "w2", (expert,), span)
    return (out,)


def combine(p: Any, t: Given) -> Made:
    """Sum a token's slots, and the shared expert's output where it is given."""
    slots = p.tokens * p.chosen
    require_tensor("places", t["places"], I32, (slots,), 4)
    require_tensor("weights", t["weights"], F32, (p.tokens, p.chosen), 4)
    require_tensor("products", t["products"], BF16, (p.rows, p.hidden), 16)
    rows = t["products"][t["places"].long().clamp(min=0)].float()
    rows = rows.where(t["places"][:, None] >= 0, 0.0).reshape(p.tokens, p.chosen, -1)
    if p.weighted:
        rows = rows * t["weights"][..., None]
    total = rows.sum(1)
    if not p.shared:
        return (total,)
    require_tensor("shared", t["shared"], BF16, (p.tokens, p.hidden), 16)
    return ((total + t["shared"].float()).to(BF16),)
