"""Stand-ins for the steps of the grouped experts, from their contracts, in their own workspace.

Each reads and writes the workspace as the launch does: rows in the plan's order, every expert from
a tile on, scales in 128x4 order, what fills a tile up as zeros. What a launch does not write is
poisoned before, so that a step that reads what nobody wrote is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl import kernels as steps
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


def step(told: Any, t: Given) -> Made:
    """Compute one step."""
    p = told.problem
    computed = {
        steps.ORDER: _order, steps.GATHER: _gather, steps.SHOWN: _shown, steps.FIRST: _first,
        steps.SECOND: _second, steps.SUM: _sum, steps.TOTAL: _sum,
    }[told.name]  # fmt: skip
    return computed(p, t)


def _rows(p: Any) -> tuple[int, int]:
    """Rows of a tile, and rows at most."""
    cut = facts.choose_tactic(p, "sm_90a")
    return cut.rows, facts.most_rows(p, cut)


def _order(p: Any, t: Given) -> Made:
    require_tensor("experts", t["experts"], I32, (p.tokens, p.chosen), 4)
    require_tensor("local", t["local"], I32, (p.routed,), 4)
    tile, _ = _rows(p)
    here_S = t["local"].long()[t["experts"].flatten().long().clamp(min=0)]
    here_S[t["experts"].flatten() < 0] = -1
    t["slots"].fill_(-1)
    t["places"].fill_(-1)
    row = 0
    for expert in range(p.experts):
        slots = (here_S == expert).nonzero().flatten()
        count, tiles = len(slots), -(-len(slots) // tile)
        t["counts"][expert] = count
        t["slots"][row : row + count] = slots.int()
        t["places"][slots] = torch.arange(row, row + count, dtype=I32)
        t["tiles"][row // tile : row // tile + tiles] = expert
        row += tiles * tile
    t["rows"].fill_(row)
    return tuple(t[name] for name in steps.PLAN)


def _of_experts(p: Any, t: Given) -> Iterator[tuple[int, slice, Tensor]]:
    """Each expert with rows: where they lie, and the slots that they are."""
    tile, _ = _rows(p)
    row = 0
    for expert in range(p.experts):
        count = int(t["counts"][expert])
        if count:
            yield expert, slice(row, row + count), t["slots"][row : row + count].long()
        row += -(-count // tile) * tile


def _codes(p: Any, width: int) -> tuple[Tensor, Tensor]:
    _, most = _rows(p)
    codes = torch.full((most, width // 2), POISON, dtype=U8)
    return codes, torch.full((most, width // 16), 0x7F, dtype=U8)


def _write(t: Given, name: str, codes: Tensor, scales: Tensor) -> Made:
    t[f"{name}_codes"].copy_(codes)
    t[f"{name}_scales"].copy_(to_layout(scales, SWIZZLE_128X4))
    return t[f"{name}_codes"], t[f"{name}_scales"]


def _gather(p: Any, t: Given) -> Made:
    require_tensor("x", t["x"], BF16, (p.tokens, p.hidden), 32)
    require_tensor("input scales", t["input_scale"], F32, (p.experts,), 4)
    codes, scales = _codes(p, p.hidden)
    for expert, span, slots in _of_experts(p, t):
        x = t["x"][slots // p.chosen].float()
        made = quantise(x, NVFP4, CANONICAL, decode_scale=t["input_scale"][expert])
        codes[span], scales[span] = made.codes, made.block_scale
    return _write(t, "x", codes, scales)


def _values(codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    tensor = QuantisedTensor(
        codes, scales, scale.reshape(()), NVFP4, CANONICAL, LINEAR, ScaleDirection.DECODE,
        NibbleOrder.LOW_EVEN, (codes.shape[0], codes.shape[1] * 2),
    )  # fmt: skip
    return dequantise(tensor, F32)


def _activations(p: Any, t: Given, name: str, width: int) -> tuple[Tensor, Tensor]:
    _, most = _rows(p)
    require_tensor(f"codes of {name}", t[f"{name}_codes"], U8, (most, width // 2), 16)
    size = facts.scale_bytes(most, width)
    require_tensor(f"scales of {name}", t[f"{name}_scales"], U8, (size,), 16)
    scales = from_layout(t[f"{name}_scales"], SWIZZLE_128X4, most, width // 16)
    return t[f"{name}_codes"], scales


def _product(p: Any, t: Given, name: str, matrix: tuple[int, ...], span: slice) -> Tensor:
    """Rows by one matrix of an expert, rounded once."""
    n, k = (p.hidden, p.width) if name == "hidden" else (p.width, p.hidden)
    codes, scales = _activations(p, t, name, k)
    one, expert = torch.ones(()), matrix[0]
    weights = from_layout(t["scales"][matrix], SWIZZLE_128X4, n, k // 16)
    sums = _values(codes[span], scales[span], one) @ _values(t["codes"][matrix], weights, one).T
    made: Tensor = (sums * (t["input_scale"][expert] * t["decode"][matrix])).to(BF16)
    return made


def _require_weights(p: Any, t: Given, leading: tuple[int, ...], n: int, k: int) -> None:
    require_tensor("codes", t["codes"], U8, (*leading, n, k // 2), 16)
    require_tensor("scales", t["scales"], U8, (*leading, facts.scale_bytes(n, k)), 16)
    require_tensor("decode scales", t["decode"], F32, leading, 4)
    require_tensor("input scales", t["input_scale"], F32, (p.experts,), 4)


def _gate_and_up(p: Any, t: Given, expert: int, span: slice) -> Tensor:
    return torch.cat([_product(p, t, "x", (expert, part), span) for part in range(2)], dim=1)


def _shown(p: Any, t: Given) -> Made:
    _require_weights(p, t, (p.experts, 2), p.width, p.hidden)
    _, most = _rows(p)
    both = torch.full((most, 2 * p.width), torch.nan, dtype=BF16)
    for expert, span, _ in _of_experts(p, t):
        both[span] = _gate_and_up(p, t, expert, span)
    return (both,)


def _first(p: Any, t: Given) -> Made:
    _require_weights(p, t, (p.experts, 2), p.width, p.hidden)
    require_tensor("scales behind", t["hidden_scale"], F32, (p.experts,), 4)
    codes, scales = _codes(p, p.width)
    for expert, span, _ in _of_experts(p, t):
        gate, up = _gate_and_up(p, t, expert, span).float().chunk(2, -1)
        if p.limit is not None:
            gate, up = gate.clamp(max=p.limit), up.clamp(-p.limit, p.limit)
        x = (torch.nn.functional.silu(gate) * up).to(BF16).float()
        made = quantise(x, NVFP4, CANONICAL, decode_scale=t["hidden_scale"][expert])
        codes[span], scales[span] = made.codes, made.block_scale
    return _write(t, "hidden", codes, scales)


def _second(p: Any, t: Given) -> Made:
    _require_weights(p, t, (p.experts,), p.hidden, p.width)
    t["out"].fill_(torch.nan)
    for expert, span, _ in _of_experts(p, t):
        t["out"][span] = _product(p, t, "hidden", (expert,), span)
    return (t["out"],)


def _sum(p: Any, t: Given) -> Made:
    require_tensor("places", t["places"], I32, (p.slots,), 4)
    require_tensor("weights", t["weights"], F32, (p.tokens, p.chosen), 4)
    require_tensor("rows", t["rows"], BF16, tuple(t["rows"].shape), 16)
    rows = t["rows"][t["places"].long().clamp(min=0)].float()
    rows = rows.where(t["places"][:, None] >= 0, 0.0).reshape(p.tokens, p.chosen, -1)
    if p.weighting == facts.AFTER_W2:
        rows = rows * t["weights"][..., None]
    total = rows.sum(1)
    if "shared" not in t:
        return (total,)
    require_tensor("shared", t["shared"], BF16, (p.tokens, p.hidden), 16)
    return ((total + t["shared"].float()).to(BF16),)
