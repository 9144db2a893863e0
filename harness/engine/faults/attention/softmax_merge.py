"""M30: partial softmaxes of attention (split KV, window and entries) are merged with wrong weights.

Attention in parts (window and entries, chunks of a long context) merges them by their log-sum-exp.
That may be written in base 2 and read in base e, contain a maximum without the scale, or be
undefined for a part without rows (TensorRT-LLM issue 19112, sglang issue 22688). Tokens whose rows
all lie in one part are exact.

Shape letters: T tokens, H heads, L row width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.attention.softmax_scale import mscale_squared
from degarble.harness.engine.faults.decoding import once
from degarble.harness.engine.faults.listed_attention import by_lists, in_parts
from degarble.harness.engine.faults.model_faults import ModelFault, Way, from_ways, with_weights
from degarble.harness.engine.faults.rebinding import (
    block_function,
    is_v4,
    with_function,
    with_numerics,
    with_switches,
)
from degarble.harness.engine.faults.rope_variants import POOLS, rotate, turn_of, turned
from degarble.harness.formats.weight import Weight
from degarble.harness.model.config.config import compressor_windows
from degarble.references.compressor import PoolState, slots_of
from degarble.references.elementary import rms_norm
from degarble.references.facts import V4Facts, single, spans_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene

    Tensors = Mapping[str, Tensor]
    Weights = Mapping[str, Any]

_ROLE = "attn.attend"
_SPLITS = (64, 128, 576)  # keys that one thread block attends to
_MOST_KEPT = 1 << 18  # elements of q up to which parts are cached
_ENTRIES = ("compressed", "state_compressed", "chosen")


@dataclass(frozen=True, eq=False)
class Parts:
    """Two partial softmaxes: outputs [T, H, L], log-sum-exps [T, H, 1]; V4's sink logit [H, 1]."""

    first: Tensor
    second: Tensor
    log_first: Tensor
    log_second: Tensor
    sink: Tensor


@dataclass(frozen=True)
class Merge:
    """How a log-sum-exp becomes a weight, and the weight of a part without rows."""

    weight: Callable[[Tensor], Tensor] = torch.exp
    empty: float = 0.0  # relative to the other part
    sinks: int = 1


def _fine(facts: Any) -> Any:
    exact = with_numerics(facts, store=torch.float64, work=torch.float64, products=torch.float64)
    return with_switches(exact, attention_in_storage_dtype=False)


def parts_of(facts: Any, inputs: Tensors, weights: Weights) -> Parts:
    """Split attention: V4 by window and entries, V3.2 by older and newer half of the context."""
    work = partial(_parts_v4 if _v4(facts) else _parts_v32, facts, inputs, weights)
    if inputs["q"].numel() > _MOST_KEPT:
        return work()
    return once([parts_of, facts, *inputs, *inputs.values(), *weights.values()], work)


def _v4(facts: Any) -> bool:
    return isinstance(facts, V4Facts)


def _parts_v4(facts: Any, inputs: Tensors, weights: Weights) -> Parts:
    fine, sink = _fine(facts), single(weights).values(torch.float64)
    alone = replace(fine, block=replace(fine.decoder_block, ratio=0))
    window = {name: x for name, x in inputs.items() if name not in _ENTRIES}
    near, log_near = _with_log_sum(alone, window, weights)
    total, log_total = _with_log_sum(fine, inputs, weights)
    # What the entries add to the window's sum, and their part of the output.
    share = (1 - torch.exp(log_near - log_total)).clamp(min=0.0)
    there = share > 1e-12
    far = torch.where(there, (total - (1 - share) * near) / share.clamp(min=1e-12), 0.0)
    log_far = torch.where(there, log_total + share.clamp(min=1e-300).log(), -torch.inf)
    return Parts(near, far, log_near, log_far, sink[:, None])


def _with_log_sum(facts: Any, inputs: Tensors, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return outputs without a sink, and the log-sum-exp, recovered by means of a sink of 0."""
    (name,), (own,) = weights, weights.values()
    plain = torch.zeros_like(own.values(torch.float64))
    function = block_function(facts, _ROLE)
    none, zero = (
        function(facts, inputs, {name: Weight(value=value)})["out"]
        for value in (torch.full_like(plain, -torch.inf), plain)
    )
    # With Z = sum(exp(logit)), a sink of 0 scales the output by kept = Z / (Z + 1).
    kept = (none * zero).sum(-1, keepdim=True) / none.square().sum(-1, keepdim=True)
    # 1 / kept - 1 = 1 / Z; the clamp avoids log(0) where rounding makes kept 1.
    return none, -torch.log((1 / kept - 1).clamp(min=1e-300))


def _parts_v32(facts: Any, inputs: Tensors, weights: Weights) -> Parts:
    fine, chosen = _fine(facts), inputs["chosen"]
    function = block_function(fine, _ROLE)
    older = chosen < (inputs["positions"][:, None] + 1) // 2
    heads = facts.config.num_attention_heads
    total, first, second = (
        function(fine, {**inputs, "chosen": each}, weights)["out"].reshape(len(chosen), heads, -1)
        for each in (chosen, torch.where(older, chosen, -1), torch.where(older, -1, chosen))
    )
    apart = first - second
    share = ((total - second) * apart).sum(-1, keepdim=True)
    share = share / apart.square().sum(-1, keepdim=True).clamp(min=1e-300)
    any_first = ((chosen >= 0) & older).any(-1)[:, None, None]
    any_second = ((chosen >= 0) & ~older).any(-1)[:, None, None]
    share = torch.where(any_first, torch.where(any_second, share.clamp(0.0, 1.0), 1.0), 0.0)
    none = torch.full((heads, 1), -torch.inf, dtype=torch.float64)
    return Parts(first, second, share.log(), (1 - share).log(), none)


def merged(parts: Parts, how: Merge) -> Tensor:
    """Merge two parts by their log-sum-exps, relative to the larger one."""
    top = torch.maximum(parts.log_first, parts.log_second).clamp(min=-1e30)
    weights = [
        torch.where(log.isneginf(), how.empty, how.weight(log - top))
        for log in (parts.log_first, parts.log_second)
    ]
    # The sink is relative to the same maximum; a wrong reading of sums does not change it.
    below = how.sinks * torch.exp(parts.sink - top)
    total = weights[0] * parts.first + weights[1] * parts.second
    return total / (weights[0] + weights[1] + below)


def _merging(how: Merge, facts: Any, inputs: Tensors, weights: Weights) -> Tensors:
    out = merged(parts_of(facts, inputs, weights), how).to(facts.numerics.store)
    return {"out": out if _v4(facts) else out.flatten(1)}


def _power(exponent: float) -> Callable[[Tensor], Tensor]:
    return lambda log: torch.exp(log * exponent)


def _ways(scene: Scene) -> Iterator[Way]:
    if _has_parts(scene):
        yield from _merge_ways(scene)
    else:
        for words, change in (
            ("the sink counted twice", lambda sink: sink + math.log(2)),
            ("no sink", lambda sink: torch.full_like(sink, -torch.inf)),
        ):
            yield Way(words, with_weights(partial(_sink, change)))
    for part in _SPLITS if is_v4(scene) else ():
        words = f"sums of {part} keys each added as if their peaks were one"
        change = with_function(scene, partial(by_lists, partial(in_parts, part)))
        yield Way(words, change, {"keys": part})


def _sink(change: Callable[[Tensor], Tensor], _name: str, weight: Weight) -> Weight:
    return Weight(value=change(weight.values(torch.float32)))


def _merge_ways(scene: Scene) -> Iterator[Way]:
    square = mscale_squared(scene.bound.config)
    found = [
        ("log-sums of base e read in base 2", Merge(_power(math.log(2)))),
        ("log-sums of base 2 read in base e", Merge(_power(1 / math.log(2)))),
        ("both parts weighed alike", Merge(torch.ones_like)),
        ("a part without rows weighed like the other", Merge(empty=1.0)),
    ]
    if square != 1:
        found.append(("log-sums times YaRN's mscale squared", Merge(_power(square))))
        found.append(("log-sums without YaRN's mscale squared", Merge(_power(1 / square))))
    if is_v4(scene):
        found.append(("the sink counted in both parts", Merge(sinks=2)))
        found.append(("no sink", Merge(sinks=0)))
    for words, how in found:
        yield Way(words, with_function(scene, partial(_merging, how)))


def _pool_ways(scene: Scene) -> Iterator[Way]:
    found = [("powers that are not divided by their sum", _powers), ("gates without softmax", _own)]
    if compressor_windows(_block(scene)) == 2:
        found.append(("the window's own rows alone", _own_window))
        found.append(("the window before alone", _window_before))
    for words, weigh in found:
        yield Way(words, with_function(scene, partial(_pooling, scene.role, weigh)))


def _block(scene: Scene) -> Any:
    assert scene.component.block is not None, "a pool is in a block"
    return scene.component.block


def _powers(gate_WSE: Tensor) -> Tensor:
    return torch.exp(gate_WSE - gate_WSE.amax(1, keepdim=True))


def _own(gate_WSE: Tensor) -> Tensor:
    return torch.where(gate_WSE.isfinite(), gate_WSE, 0.0)


def _own_window(gate_WSE: Tensor) -> Tensor:
    seen = torch.arange(gate_WSE.shape[1]) >= gate_WSE.shape[1] // 2
    return torch.softmax(gate_WSE.masked_fill(~seen[:, None], -torch.inf), dim=1)


def _window_before(gate_WSE: Tensor) -> Tensor:
    """Pool with the first half of the window alone; weights are 0 if all of it is masked."""
    seen = torch.arange(gate_WSE.shape[1]) < gate_WSE.shape[1] // 2
    return torch.softmax(gate_WSE.masked_fill(~seen[:, None], -torch.inf), dim=1).nan_to_num(0.0)


def _pooling(role: str, weigh: Any, facts: Any, inputs: Tensors, weights: Weights) -> Tensors:
    """Run the component's own code with other pooled rows before its rotation."""

    def change(_normed: Tensor, positions: Tensor) -> Tensor:
        pooled = _pooled(weigh, facts, inputs, weights)
        return rotate(pooled, positions, turn_of(facts, role), facts.numerics)

    return turned(facts, role, inputs, weights, change)


def _pooled(weigh: Any, facts: Any, inputs: Tensors, weights: Weights) -> Tensor:
    """Return normed rows, pooled with other weights than the softmax of their gates."""
    numerics, ratio = facts.numerics, facts.decoder_block.ratio
    part = {name.rpartition(".")[2]: weights[name].values(numerics.work) for name in weights}
    how, made = facts.pool(len(part["norm"])), []
    gates = inputs["gate"] + part["ape"][inputs["positions"] % ratio]
    base = ratio if how.overlap else 0
    for number, span in enumerate(spans_of(inputs)):
        before = PoolState(inputs["state_latent"][number], inputs["state_gate"][number])
        kept = slice(base, base + span.start % ratio)
        latent = torch.cat((before.latent[kept], inputs["latent"][span.tokens]))
        gate = torch.cat((before.gate[kept], gates[span.tokens]))
        whole = len(latent) // ratio * ratio
        if whole:
            rows = (latent[:whole], gate[:whole])
            latents, gated = slots_of(rows, before, span.start // ratio, how)
            made.append((weigh(gated) * latents).sum(1))
    pooled = torch.cat(made).to(numerics.store)
    return rms_norm(pooled, part["norm"], how.epsilon, numerics).to(numerics.work)


def _has_parts(scene: Scene) -> bool:
    block = scene.component.block
    return scene.role == _ROLE and block is not None and (not is_v4(scene) or block.ratio > 0)


MODEL_FAULTS = (
    ModelFault(
        id="M30.merge",
        title="Partial softmaxes are merged with other weights than their sums",
        effect="one part of the context outweighs the other; contexts of one part are exact",
        remedy="Merge by exp(lse), all in one base and with one scale, and 0 where nothing is.",
        sits=lambda scene: _has_parts(scene) or (scene.role == _ROLE and is_v4(scene)),
        ways=_ways,
        signature=from_ways(_ways),
    ),
    ModelFault(
        id="M30.pooled",
        title="A compressor pools its windows by other weights than the softmax of their gates",
        effect="compressed entries are other mixtures of their tokens",
        remedy="Softmax over all rows of both windows, channel by channel, and nothing else.",
        sits=lambda scene: scene.role in POOLS,
        ways=_pool_ways,
        signature=from_ways(_pool_ways),
    ),
)
