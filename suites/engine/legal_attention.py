"""Legal kernels of attention in float32, their faults, and calls to run them on.

A kernel here takes tiles of keys in some order next to a running, whole or lazy peak, in splits or
not, and rounds its shares or keeps them. Nothing is taken from the references. V3.2's calls go
through the absorbed or the naive form. Shape letters: T tokens, H heads, R rows, X key width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.formats.weight import Weight
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.references.attention import softmax_scale
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics, switches_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Exponential = Callable[[Tensor], Tensor]

LOG2E = 1.4426950408889634
START = 130  # V4: tokens before the call, more than a window
LAZY = 8.0  # octaves that a peak may be stale by


@dataclass(frozen=True)
class Kernel:
    """How one kernel works. `peak`: running, row, sink (counts as a key), lazy or power of 2."""

    name: str
    tile: int = 64
    backwards: bool = False
    splits: int = 1
    rounded: bool = True  # shares are BF16
    peak: str = "running"
    first_divided: bool = False  # shares are divided by their sum, then rounded
    sum_of_rounded: bool = False
    exponential: str = "exact"  # or 2 units off
    fused: bool = True  # scale and peak in one rounding


KERNELS = (
    Kernel("whole row", peak="row"),
    Kernel("tiles of 16", tile=16),
    Kernel("tiles of 64, ex2.approx", exponential="approximate"),
    Kernel("tiles of 128 backwards", tile=128, backwards=True),
    Kernel("two splits", splits=2),
    Kernel("nine splits, tiles of 16, backwards", tile=16, splits=9, backwards=True),
    Kernel("shares in float32", rounded=False),
    Kernel("the sink is a key", peak="sink"),
    Kernel("a peak that is stale by up to 8 octaves", tile=16, peak="lazy"),
    Kernel("peaks that are powers of 2", peak="power"),
    Kernel("divided, then rounded", first_divided=True, peak="row"),
    Kernel("divided by the sum of rounded shares", sum_of_rounded=True),
    Kernel("products apart", fused=False, exponential="approximate"),
)


def exponential(how: str) -> Exponential:
    """Return 2^x in float32; "approximate" is up to 2 units off, in no pattern."""
    if how == "exact":
        return torch.exp2
    assert how == "approximate", "there are two"

    def approximate(x: Tensor) -> Tensor:
        made = torch.exp2(x)
        units = torch.frac((x * 977.0).sin().abs() * 1e4) * 4 - 2
        return made * (1 + units * 2.0**-23)

    return approximate


def attended(
    logit: Tensor, values: Tensor, sink: Tensor | None, kernel: Kernel, faulty: Exponential | None
) -> Tensor:
    """Outputs [T, H, C] in float32 of logits [T, H, R] in octaves, -inf where hidden."""
    exp2 = faulty or exponential(kernel.exponential)
    if kernel.backwards:
        logit, values = logit.flip(-1), values.flip(-2)
    tail = None if sink is None else (sink * LOG2E)[:, None].expand(*logit.shape[:2], 1)
    parts = [
        _split(part, rows, tail, kernel, exp2)
        for part, rows in zip(
            logit.tensor_split(kernel.splits, -1), values.tensor_split(kernel.splits, -2),
            strict=True,
        )
        if part.shape[-1] or not logit.shape[-1]
    ]  # fmt: skip
    peak = torch.stack([part[0] for part in parts]).amax(0)
    fades = [torch.where(part[0].isinf(), 0.0, exp2(part[0] - peak)) for part in parts]
    total = sum((part[1] * fade for part, fade in zip(parts, fades, strict=True)), torch.zeros(()))
    out = sum((part[2] * fade for part, fade in zip(parts, fades, strict=True)), torch.zeros(()))
    if kernel.first_divided:
        return out
    if tail is not None:
        total = total + exp2((tail - peak).clamp(max=120.0))
    return torch.where(total > 0, out * (1 / total), 0.0)


def _split(
    logit: Tensor, values: Tensor, tail: Tensor | None, kernel: Kernel, exp2: Exponential
) -> tuple[Tensor, Tensor, Tensor]:
    """Peak, sum and output of some keys."""
    whole = logit.amax(-1, keepdim=True) if logit.shape[-1] else logit.sum(-1, keepdim=True) - 1e30
    peak = torch.full_like(whole, -torch.inf)
    if kernel.peak == "sink" and tail is not None:
        peak = tail.clone()
    total, out = torch.zeros_like(whole), torch.zeros(*logit.shape[:2], values.shape[-1])
    if kernel.peak == "row" or kernel.first_divided:
        peak = whole
    divisor = torch.ones_like(whole)
    if kernel.first_divided:
        known = torch.where(whole.isinf(), 0.0, whole)
        # Trap: an inexact 2^x of -inf may be NaN.
        divisor = torch.where(logit.isinf(), 0.0, exp2(logit - known)).sum(-1, keepdim=True)
        if tail is not None:
            divisor = divisor + exp2((tail - known).clamp(max=120.0))
        divisor = torch.where(divisor > 0, divisor, 1.0)
    for part, rows in zip(logit.split(kernel.tile, -1), values.split(kernel.tile, -2), strict=True):
        top = part.amax(-1, keepdim=True)
        if kernel.peak == "power":
            top = top.ceil()
        if kernel.peak == "lazy":
            top = torch.where((top - peak <= LAZY) & ~peak.isinf(), peak, top)
        higher = torch.maximum(peak, top)
        seen = ~part.isinf()
        share = torch.where(seen, exp2(part - torch.where(higher.isinf(), 0.0, higher)), 0.0)
        share = share / divisor
        fade = torch.where(peak.isinf(), 0.0, exp2(peak - torch.where(higher.isinf(), 0.0, higher)))
        kept = share.bfloat16().float() if kernel.rounded else share
        counted = kept if kernel.sum_of_rounded else share
        total = total * fade + counted.sum(-1, keepdim=True)
        out = out * fade + _product(kept, rows)
        peak = higher
    return peak, total, out


def _product(share: Tensor, values: Tensor) -> Tensor:
    """Rows [R, C] for all heads, or [H, R, C]."""
    if values.ndim == 2:
        return torch.matmul(share, values)
    return torch.matmul(share.transpose(0, 1), values).transpose(0, 1)


def logits(q: Tensor, keys: Tensor, scale: float, seen: Tensor, kernel: Kernel) -> Tensor:
    """Logits [T, H, R] in octaves, in float32."""
    products = _product(q.float(), keys.float().transpose(-1, -2))
    made = products * (scale * LOG2E) if kernel.fused else (products * scale) * LOG2E
    return made.masked_fill(~seen[:, None], -torch.inf)


INPUTS = (
    "gauss", "small", "steep", "heavy", "one key", "equal keys", "equal logits", "near-equal",
    "smooth", "huge sinks", "no sinks", "zeros", "first tokens", "positive values",
)  # fmt: skip


@dataclass(frozen=True)
class Extents:
    """Of a call: V4 attends to a window of at most 128 and `entries` more."""

    tokens: int = 24
    heads: int = 8
    width: int = 128
    entries: int = 1
    before: int = START


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _rows(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    made = _random(generator, *shape)
    if kind == "heavy":
        made = made * torch.exp(_random(generator, shape[0], 1))
        made[:, :2] *= 20
    if kind in ("equal keys", "smooth", "near-equal"):
        made = made[:1].expand(shape).clone()
    if kind == "smooth":
        made = made * torch.linspace(0.9, 1.0, shape[0])[:, None]
    if kind == "near-equal":
        made = made + 2e-3 * _random(generator, *shape)
    if kind == "positive values":
        made = made.abs()
    if kind == "zeros":
        made[torch.rand(shape[0], generator=generator) < 0.5] = 0
    return made.bfloat16()


_SIZES = {"small": 0.05, "steep": 6.0, "equal logits": 0.0, "one key": 20.0}


def call_v4(
    kind: str, extents: Extents, seed: int = 0, source: str = "official-v4"
) -> JudgeableCall:
    """A layer of V4 whose compressed entries are all visible."""
    generator = torch.Generator().manual_seed(seed)
    config = small_v4(
        num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), num_attention_heads=extents.heads,
        head_dim=extents.width, o_groups=1,
    )  # fmt: skip
    numerics = replace(Numerics.twin(switches_of(source)), work=torch.float64)
    twin = BoundModel(config, numerics, {})
    name = "layers.2.attn.attend"
    what, facts = twin.bound_to(name)
    (local,) = twin.weights_of(name)
    start = 0 if kind == "first tokens" else max(extents.before, 128 * extents.entries)
    entries, kept = start // 128, min(start, config.sliding_window - 1)
    rows = _rows(kind, (kept + extents.tokens + entries, extents.width), generator)
    size = _SIZES.get(kind, 1.0)
    sinks = _random(generator, extents.heads)
    if kind == "huge sinks":
        sinks = sinks + 30 * (sinks > 0)
    if kind == "no sinks":
        sinks = torch.full_like(sinks, -1e4)
    new = (start + extents.tokens) // 128 - entries
    q = _random(generator, extents.tokens, extents.heads, extents.width) * size
    inputs = {
        "q": q.bfloat16(),
        "state_window": rows[:kept],
        "window": rows[kept : kept + extents.tokens],
        "compressed": _rows("gauss", (new, extents.width), generator),
        "state_compressed": rows[kept + extents.tokens :],
        "positions": torch.arange(start, start + extents.tokens),
        "token_offsets": torch.tensor([0, extents.tokens]),
    }
    weights = {local: Weight(value=sinks.float())}
    outputs = twin.calls[name](inputs, weights)
    return JudgeableCall(what.role, inputs, outputs, weights, facts=facts)


def run_v4(call: JudgeableCall, kernel: Kernel, faulty: Exponential | None = None) -> Tensor:
    """What a kernel puts out before the last rounding [T, H, L]."""
    inputs, (sink,) = (
        call.inputs,
        (weight.values(torch.float32) for weight in call.weights.values()),
    )
    near = torch.cat((inputs["state_window"], inputs["window"]))
    far = torch.cat((inputs["state_compressed"], inputs["compressed"]))
    position, width = inputs["positions"][:, None], inputs["q"].shape[-1]
    own = torch.arange(len(near)) + int(position[0, 0]) - len(inputs["state_window"])
    in_window = (own <= position) & (own > position - 128)
    complete = torch.arange(len(far)) < (position + 1) // 128
    seen = torch.cat((in_window, complete), dim=1)
    rows = torch.cat((near, far))
    made = logits(inputs["q"], rows, width**-0.5, seen, kernel)
    return attended(made, rows.float(), sink, kernel, faulty)


def call_v32(
    kind: str, extents: Extents, seed: int = 0, source: str = "vllm", naive: bool = False
) -> JudgeableCall:
    """A layer of V3.2 with up to `entries` chosen rows a token."""
    generator = torch.Generator().manual_seed(seed)
    config = small_v32(
        num_hidden_layers=2, num_attention_heads=extents.heads, index_topk=extents.entries
    )
    numerics = replace(Numerics.twin(switches_of(source)), work=torch.float64)
    twin = BoundModel(config, numerics, {})
    name = "layers.1.attn.attend"
    what, facts = twin.bound_to(name)
    (local,) = twin.weights_of(name)
    wide = config.qk_nope_head_dim + config.v_head_dim
    wkv_b = (_random(generator, extents.heads * wide, config.kv_lora_rank) * 0.1).bfloat16()
    start = 0 if kind == "first tokens" else extents.before
    width = config.kv_lora_rank + config.qk_rope_head_dim
    rows = _rows(kind, (start + extents.tokens, width), generator)
    chosen = torch.full((extents.tokens, extents.entries), -1)
    for token in range(extents.tokens):
        pick = torch.randperm(start + token + 1, generator=generator)[: extents.entries]
        chosen[token, : len(pick)] = pick
    size = _SIZES.get(kind, 1.0)
    q = _random(generator, extents.tokens, extents.heads, config.qk_head_dim) * size
    inputs = {
        "q": q.bfloat16(),
        "state_rows": rows[:start],
        "rows": rows[start:],
        "chosen": chosen,
        "positions": torch.arange(start, start + extents.tokens),
        "token_offsets": torch.tensor([0, extents.tokens]),
    }
    if naive:
        both = (rows[:, : config.kv_lora_rank].float() @ wkv_b.float().T).bfloat16()
        inputs |= {"state_expanded": both[:start], "expanded": both[start:]}
    weights = {local: Weight(value=wkv_b)}
    outputs = twin.calls[name](inputs, weights)
    return JudgeableCall(what.role, inputs, outputs, weights, facts=facts)


def run_v32(call: JudgeableCall, kernel: Kernel, faulty: Exponential | None = None) -> Tensor:
    """What a kernel puts out before the last rounding [T, H, v]."""
    inputs, facts = call.inputs, call.facts
    assert facts is not None
    config: Any = facts.config
    rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
    (wkv_b,) = (weight.values(torch.float32) for weight in call.weights.values())
    per_head = wkv_b.reshape(config.num_attention_heads, -1, rank)
    key, value = per_head.split((nope, config.v_head_dim), 1)
    rows = torch.cat((inputs["state_rows"], inputs["rows"])).float()
    seen = torch.zeros(len(inputs["q"]), len(rows) + 1, dtype=torch.bool)
    seen = seen.scatter_(1, inputs["chosen"].where(inputs["chosen"] >= 0, len(rows)), value=True)
    q, scale = inputs["q"].float(), softmax_scale(config)
    if "expanded" in inputs:
        both = torch.cat((inputs["state_expanded"], inputs["expanded"])).float()
        both = both.unflatten(1, (config.num_attention_heads, -1)).transpose(0, 1)
        turned = rows[:, rank:].expand(len(both), -1, -1)
        keys = torch.cat((both[..., :nope], turned), -1)
        made = logits(q, keys, scale, seen[:, :-1], kernel)
        return attended(made, both[..., nope:], None, kernel, faulty)
    through = torch.einsum("thn,hnc->thc", q[..., :nope], key).bfloat16().float()
    query = torch.cat((through, q[..., nope:]), -1)
    made = logits(query, rows, scale, seen[:, :-1], kernel)
    mixed = attended(made, rows[:, :rank], None, kernel, faulty).bfloat16().float()
    return torch.einsum("thc,hvc->thv", mixed, value)


def ran(call: JudgeableCall, kernel: Kernel, faulty: Exponential | None = None) -> Tensor:
    """What a kernel puts out before the last rounding, in the output's shape."""
    run = run_v4 if "window" in call.inputs else run_v32
    return run(call, kernel, faulty).reshape(call.outputs["out"].shape)


COARSE = ("wave", "arch", "random", "cut")


def coarse(how: str, size: float = 2.0**-8) -> Exponential:
    """Return a 2^x whose relative error is up to `size`."""

    def exp2(x: Tensor) -> Tensor:
        made, part = torch.exp2(x), x - x.floor()
        if how == "wave":
            off = torch.sin(2 * torch.pi * part)
        elif how == "arch":  # a polynomial of low degree, exact at whole octaves
            off = 4 * part * (1 - part)
        elif how == "random":
            off = torch.frac((x * 977.0).sin().abs() * 1e4) * 2 - 1
        else:
            assert how == "cut", "there are four"
            whole = torch.exp2(part)
            return (whole / (2 * size)).floor() * (2 * size) * torch.exp2(x.floor())
        return made * (1 + size * off)

    return exp2


def run_packed_v32(
    twin: BoundModel,
    name: str,
    kernel: Kernel,
    change: Callable[[Tensor], Tensor] = lambda out: out,
    behind: bool = False,
) -> Callable[[Mapping[str, Tensor], Mapping[str, Weight]], dict[str, Tensor]]:
    """Return a component's call by a kernel, over sequences that lie in one call.

    `change` is a fault of its output, in front of the rounding or behind it.
    """
    what, facts = twin.bound_to(name)
    config: Any = facts.config

    def run(inputs: Mapping[str, Tensor], weights: Mapping[str, Weight]) -> dict[str, Tensor]:
        offsets, old, made = inputs["token_offsets"].tolist(), 0, []
        for begin, end in pairwise(offsets):
            start = int(inputs["positions"][begin])
            own = {name: x[begin:end] for name, x in inputs.items() if len(x) == offsets[-1]}
            for state, new in (("state_rows", "rows"), ("state_expanded", "expanded")):
                if new in inputs:
                    before = inputs.get(state, inputs[new][:0])
                    own[state] = before[old : old + start]
            old += start
            width = config.num_attention_heads * config.v_head_dim
            shape = {"out": torch.empty(end - begin, width)}
            part = JudgeableCall(what.role, own, shape, weights, facts=facts)
            made.append(ran(part, kernel))
        out = torch.cat(made)
        return {"out": change(out.bfloat16()) if behind else change(out).bfloat16()}

    return run
