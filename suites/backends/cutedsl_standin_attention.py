"""Stand-ins for the compressor's, the indexer's and attention's kernels, from their contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.primitives.kv_problem import WIDTH
from degarble.kernels.runtime.operands import require_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Given = Mapping[str, Any]
    Made = tuple[Tensor, ...]

BF16, F32, U8, I64 = torch.bfloat16, torch.float32, torch.uint8, torch.int64


def compressor(p: Any, t: Given) -> Made:
    """Pool from the ring and this call, position by position; then keep the newest rows."""
    require_tensor("projected", t["projected"], F32, (p.tokens, 2 * p.columns), 16)
    require_tensor("ape", t["ape"], F32, (p.ratio, p.columns), 16)
    require_tensor("rings", t["rings"], F32, (p.rings, p.ring_rows, 2 * p.columns), 16)
    starts, offsets, ring_of = (t[name].tolist() for name in ("starts", "offsets", "ring_of"))
    closing, owners = t["closing"].tolist(), t["owners"].tolist()
    if p.alone:
        closing = owners = list(range(p.sequences))

    def row(b: int, position: int) -> Any:
        if position < starts[b]:
            assert ring_of[b] >= 0, "only a sequence that carries rows has earlier ones"
            return t["rings"][ring_of[b], position % p.ring_rows]
        made = t["projected"][offsets[b] + position - starts[b]].clone()
        made[p.columns :] += t["ape"][position % p.ratio]
        return made

    values = torch.full((p.windows, p.width), torch.nan, dtype=BF16)
    positions = torch.zeros(p.windows, dtype=I64)
    slots = torch.full((p.windows,), -1, dtype=I64)
    for n, (token, b) in enumerate(zip(closing, owners, strict=True)):
        last = starts[b] + token - offsets[b]
        if (last + 1) % p.ratio:
            continue
        first = last - p.ratio + 1
        found = [(row(b, first + i), p.width if p.overlap else 0) for i in range(p.ratio)]
        if p.overlap and first:
            found += [(row(b, first - p.ratio + i), 0) for i in range(p.ratio)]
        latent = torch.stack([each[at : at + p.width] for each, at in found])
        gate = torch.stack([each[p.columns + at :][: p.width] for each, at in found])
        values[n] = (gate.softmax(0) * latent).sum(0).to(BF16)
        positions[n] = first
        slots[n] = t["table"][b, min(last // p.ratio, t["table"].shape[1] - 1)]
    kept = [
        (ring_of[b], position, row(b, position))
        for b, start in enumerate(starts)
        for position in range(start, start + offsets[b + 1] - offsets[b])
        if ring_of[b] >= 0
    ]
    for ring, position, each in kept:
        t["rings"][ring, position % p.ring_rows] = each
    return values, positions, slots


def slots(p: Any, t: Given) -> Made:
    """Tell the slots of each token's window or entries, number by number."""
    require_tensor("positions", t["positions"], I64, (p.tokens,), 8)
    require_tensor("owners", t["owners"], torch.int32, (p.tokens,), 4)
    require_tensor("table of slots", t["table"], torch.int32, (p.sequences, p.columns), 4)
    made = torch.full((p.tokens, p.width), -1, dtype=torch.int32)
    own = torch.full((p.tokens,), -1, dtype=I64)
    for n in range(p.tokens):
        position, owner = int(t["positions"][n]), int(t["owners"][n])
        if owner < 0:
            continue
        row = t["table"][owner]
        if p.kind == "window":
            numbers = range(position - p.width + 1, position + 1)
            found = [row[number % p.columns] if number >= 0 else -1 for number in numbers]
            own[n] = row[position % p.columns]
        elif p.kind == "entries":
            seen = min(p.columns, (position + 1) // p.ratio)
            found = [row[each] if each < seen else -1 for each in range(p.width)]
        else:
            require_tensor("numbers", t["numbers"], torch.int32, (p.tokens, p.width), 4)
            found = [row[each] if each >= 0 else -1 for each in t["numbers"][n].tolist()]
        made[n] = torch.tensor([int(each) for each in found], dtype=torch.int32)
    return (made, own) if p.kind == "window" else (made,)


def operand(p: Any, t: Given) -> Made:
    """Norm, turn and transform the indexer's rows, stored in between."""
    require_tensor("rows", t["rows"], BF16, (p.tokens, p.heads, 128), 8)
    assert p.format == "exact", "the stand-in rounds nothing more"
    x = t["rows"].float()
    if p.normed:
        require_tensor("bias", t["bias"], F32, (128,), 16)
        x = torch.nn.functional.layer_norm(x, (128,), t["weight"], t["bias"], p.epsilon)
        x = x.to(BF16).float()
    if p.pairing != "none":
        require_tensor("turns", t["turns"], F32, (p.positions, 64), 16)
        turns = t["turns"][t["positions"]][:, None]
        cos, sin = turns[..., :32], turns[..., 32:]
        if p.pairing == "interleaved":
            even, odd = x[..., 64::2], x[..., 65::2]
            tail = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
            x = torch.cat((x[..., :64], tail), -1)
        else:
            one, two = x[..., :32], x[..., 32:64]
            x = torch.cat((one * cos - two * sin, one * sin + two * cos, x[..., 64:]), -1)
        x = x.to(BF16).float()
    if p.hadamard:
        step = 1
        while step < x.shape[-1]:
            pairs = x.reshape(*x.shape[:-1], 64 // step, 2, step)
            one, two = pairs[..., 0, :], pairs[..., 1, :]
            x = torch.stack((one + two, one - two), -2).flatten(-3)
            step *= 2
        x = (x * 128**-0.5).to(BF16).float()
    return (x.to(BF16),)


def scores(p: Any, t: Given) -> Made:
    """Score every entry of a token's sequence, -inf where it is not seen."""
    stored = p.arithmetic == "stored"
    require_tensor("queries", t["queries"], BF16, (p.tokens, p.heads, 128), 16)
    require_tensor("weights", t["weights"], BF16 if stored else F32, (p.tokens, p.heads), 2)
    require_tensor("sequences", t["sequences"], torch.int32, (p.tokens,), 4)
    require_tensor("table", t["table"], torch.int32, (p.sequences, p.pages_of_sequence), 4)
    require_tensor("pages", t["pages"], U8, (p.pages.count, p.pages.stride), 16)
    keys = t["pages"].view(BF16).reshape(p.pages.count, p.pages.entries, 128)
    own = keys[t["table"].long()].flatten(1, 2)[:, : p.entries].float()
    dots = torch.einsum("tni,twi->tnw", t["queries"].float(), own[t["sequences"].long()]).relu()
    if stored:
        made = (dots.to(BF16) * t["weights"][..., None]).float().sum(1).to(BF16).float()
    else:
        made = (dots * t["weights"][..., None]).sum(1)
    visible = (t["positions"] + 1) // p.ratio
    return (made.masked_fill(torch.arange(p.entries) >= visible[:, None], -torch.inf),)


def topk(p: Any, t: Given) -> Made:
    """Choose the largest scores, told in ascending order."""
    require_tensor("scores", t["scores"], F32, (p.rows, p.entries), 4)
    order = t["scores"].sort(dim=-1, descending=True, stable=True)
    lacking = order.values[:, : p.count] == -torch.inf
    chosen = order.indices[:, : p.count].masked_fill(lacking, p.entries).sort(dim=-1).values
    return (chosen.masked_fill(chosen == p.entries, -1).int(),)


def attention(p: Any, t: Given) -> Made:
    """Attend to listed slots and, in V4, a sink; weights are rounded to BF16."""
    width = p.family.key
    require_tensor("query heads", t["q"], BF16, (p.tokens, p.heads, width), 16)
    sink = t["sink"] if p.family.sinks else torch.full((p.heads,), -torch.inf)
    require_tensor("sinks", sink, F32, (p.heads,), 4)
    found, live = [], []
    for name, of in zip(("window", "entries"), p.lists, strict=False):
        slots, cache = t[f"{name}_slots"], t[f"{name}_cache"]
        require_tensor(f"slots of {name}", slots, torch.int32, (p.tokens, of.width), 4)
        require_tensor(f"cache of {name}", cache, U8, (of.pages.count, of.pages.stride), 16)
        rows = cache.view(BF16).view(-1, width).float()
        found.append(rows[slots.long().clamp(min=0)])
        live.append(slots >= 0)
    keys, seen = torch.cat(found, 1), torch.cat(live, 1)
    logit = torch.einsum("thl,tkl->thk", t["q"].float(), keys) * p.scale
    logit = logit.masked_fill(~seen[:, None], -torch.inf)
    peak = logit.amax(-1, keepdim=True).clamp(min=torch.finfo(F32).min)
    power = (logit - peak).exp()
    total = power.sum(-1) + (sink - peak[..., 0]).exp()
    values = keys[..., :WIDTH]
    out = torch.einsum("thk,tkl->thl", power.to(BF16).float(), values) / total[..., None]
    return out.to(BF16), torch.zeros(p.tokens, p.heads)
