"""M29: attention logits are multiplied by a wrong softmax scale.

YaRN's mscale squared is left out where it belongs (V3.2), or multiplied in where it does not (V4),
or a backend takes the width of another part of the head (onnx mobius issue 548, Primus issue 930).
Attention becomes too flat or too sharp; tokens with a single row are exact.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import ModelFault, Way, from_ways, with_inputs
from degarble.harness.engine.faults.rebinding import (
    has_facts,
    is_v4,
    unrounded,
    with_facts,
    with_switches,
)
from degarble.harness.model.config.config import V4Config
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

_STEP = 1e-2  # of the factor, for the slope of the outputs
_ROUNDS = 6  # Newton's steps


def sits(scene: Scene) -> bool:
    """Return whether the component has a softmax."""
    return scene.role == "attn.attend"


def mscale_squared(config: Any) -> float:
    """Return YaRN's factor of the logits, or what it would be in a model without one."""
    if config.yarn is None:
        return 1.0
    if has_mscale(config):
        return float(config.yarn.logit_scale)
    return float(config.yarn.amplitude(config.yarn.mscale or 1.0) ** 2)


def has_mscale(config: Any) -> bool:
    """Return whether YaRN scales the model's logits; it never does in V4."""
    return not isinstance(config, V4Config) and bool(config.yarn and config.yarn.mscale_all_dim)


def scaled(scene: Scene, words: str, factor: float, head: int | None = None) -> Way:
    """Return the way that multiplies the logits of all heads, or of one, by a factor."""
    yarn = scene.bound.config.yarn
    where: dict[str, Any] = {"factor": factor} | ({} if head is None else {"head": head})
    if head is None and not is_v4(scene) and yarn is not None and yarn.factor > 1:
        own = yarn.logit_scale
        mscale = (math.sqrt(own * factor) - 1) / (0.1 * math.log(yarn.factor))
        changed = replace(yarn, mscale=mscale or 1e-12, mscale_all_dim=mscale or 1e-12)
        return Way(words, with_facts(scene, lambda facts: _with_yarn(facts, changed)), where)

    def change(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        q = inputs["q"].double()
        if head is None:
            return {**inputs, "q": q * factor}
        there = (torch.arange(q.shape[1]) == head)[:, None]
        return {**inputs, "q": torch.where(there, q * factor, q)}

    return Way(words, with_inputs(change), where)


def _with_yarn(facts: Any, yarn: Any) -> Any:
    # A config checks that YaRN's fields are positive; a fault's need not be.
    made = object.__new__(type(facts.config))
    made.__dict__.update(facts.config.__dict__)
    object.__setattr__(made, "yarn", yarn)
    return replace(facts, config=made)


def _named(scene: Scene) -> Iterator[tuple[str, float]]:
    """Yield the factors that have a name."""
    config = scene.bound.config
    square = mscale_squared(config)
    if square != 1:
        if has_mscale(config):
            yield "logits without YaRN's mscale squared", 1 / square
            yield "logits with YaRN's mscale once", 1 / math.sqrt(square)
            yield "logits with YaRN's mscale squared twice", square
        else:
            yield "logits times YaRN's mscale squared", square
            yield "logits times YaRN's mscale", math.sqrt(square)
    if isinstance(config, V4Config):
        own, parts = config.head_dim, {config.nope_head_dim, config.qk_rope_head_dim}
    else:
        own = config.qk_head_dim
        parts = {config.qk_nope_head_dim, config.kv_lora_rank, config.v_head_dim}
        parts.add(config.kv_lora_rank + config.qk_rope_head_dim)
    for width in sorted(parts - {own}):
        yield f"logits scaled by {width}^-1/2", math.sqrt(own / width)
    yield "logits without a scale", math.sqrt(own)
    yield "logits scaled twice", 1 / math.sqrt(own)
    yield "logits in powers of 2", math.log(2)
    yield "logits times log2(e)", 1 / math.log(2)


def _ways(scene: Scene) -> Iterator[Way]:
    for words, factor in _named(scene):
        yield scaled(scene, words, factor)


def _odd_ways(scene: Scene) -> Iterator[Way]:
    for factor in (0.9, 1.25, 3.0):
        yield scaled(scene, f"logits times {number(factor)}", factor)
    for head in (0, scene.bound.config.num_attention_heads - 1):
        yield scaled(scene, f"logits of head {head} times {number(0.5)}", 0.5, head)


def _odd(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose the best-fitting factor, of all heads or of the only head that differs."""
    if not has_facts(scene) or sight.outputs["out"].shape != sight.expected["out"].shape:
        return
    heads = scene.bound.config.num_attention_heads
    c, e = (_by_head(each["out"], heads) for each in (sight.outputs, sight.expected))
    gaps = (c - e).square().sum((0, 2)) / e.square().sum((0, 2)).clamp(min=1e-30)
    if not bool(gaps.isfinite().all()):
        return
    head = int(gaps.argmax())
    alone = float(gaps[head]) > 20 * float(gaps.sum() - gaps[head])
    factor = _fitted(scene, sight, head if alone and heads > 1 else None)
    if not math.isfinite(factor):
        return
    short = [round(factor * 20) / 20, round(factor * 16) / 16]
    short += [float(f"{factor:.{digits}g}") for digits in (2, 3)]
    for value in dict.fromkeys((*short, factor)):
        if alone and heads > 1:
            yield scaled(scene, f"logits of head {head} times {number(value)}", value, head)
        else:
            yield scaled(scene, f"logits times {number(value)}", value)


def _by_head(out: Tensor, heads: int) -> Tensor:
    return out.double().reshape(len(out), heads, -1)


def _fitted(scene: Scene, sight: Sight, head: int | None) -> float:
    """Fit the logarithm of the factor by least squares with Newton's method."""
    candidate, factor = sight.outputs["out"].double(), 1.0
    # Trap: logits that are stored round by steps in which a small change of the factor is lost.
    smooth = with_facts(scene, _smooth)(scene.call)
    for _ in range(_ROUNDS):
        here, there = (
            scaled(scene, "", each, head).apply(smooth)(sight.inputs, scene.weights)["out"].double()
            for each in (factor, factor * (1 + _STEP))
        )
        slope = (there - here) / math.log1p(_STEP)
        energy = float(slope.square().sum())
        if not energy:
            break
        step = float((slope * (candidate - here)).sum()) / energy
        factor *= math.exp(max(-1.0, min(1.0, step)))
    return factor


def _smooth(facts: Any) -> Any:
    return unrounded(with_switches(facts, attention_in_storage_dtype=False))


MODEL_FAULTS = (
    ModelFault(
        id="M29.scale",
        title="Attention's logits are scaled by another known number",
        effect="attention is too flat or too sharp, the more the longer the context",
        remedy="V4: head_dim^-1/2 alone. V3.2: qk_head_dim^-1/2 times mscale squared.",
        sits=sits,
        ways=_ways,
        signature=from_ways(_ways),
    ),
    ModelFault(
        id="M29.other_scale",
        title="Attention's logits are scaled by another number",
        effect="attention is too flat or too sharp, of all heads or of one",
        remedy="Look for a scale of q or of the cache that reaches the keys alone.",
        sits=sits,
        ways=_odd_ways,
        signature=_odd,
    ),
)
