"""M25: SwiGLU loses its clamp, clamps elsewhere or at another limit, or is another function.

A limit arrives as None and is silently skipped (vllm issue 45836); a fused quantiser takes a cheap
sigmoid (vllm issue 24833). Rows without large values are exact.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import ModelFault, Way, from_ways
from degarble.harness.engine.faults.rebinding import (
    block_function,
    facts_at,
    is_v4,
    with_config,
    with_facts,
    with_function,
)
from degarble.references import elementary
from degarble.references.linears import activation_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Gate = Callable[[Tensor, Tensor, float | None], Tensor]

_ROUTED, _PLAIN = "ffn.experts.act_quant", ("ffn.shared.act", "ffn.act")
_HALVINGS = 40
_SURELY = 1.25  # times a limit: whatever is larger was cut
LIMITS = (7.0, 10.0, 20.0)  # of released models, and twice V4's


def sits(scene: Scene) -> bool:
    """Return whether the component contains SwiGLU."""
    return scene.role == _ROUTED or scene.role in _PLAIN


def _limit(scene: Scene) -> float | None:
    facts = facts_at(scene)
    found: float | None = facts.limit if scene.role == _ROUTED else facts.shared_limit
    return found


def gated(scene: Scene, words: str, gate: Gate, **where: Any) -> Way:
    """Replace SwiGLU by another activation; later weights and quantisation stay."""
    role = scene.role

    def function(facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
        work = facts.numerics.work
        limit = facts.limit if role == _ROUTED else facts.shared_limit
        first, second = inputs["x"].to(work).chunk(2, -1)
        made = gate(first, second, limit)
        # What follows is the component's own code, on a gate that is the identity.
        plain = with_config(facts, swiglu_limit=0.0) if limit is not None else facts
        return block_function(facts, role)(plain, {**inputs, "x": _opened(made)}, weights)

    return Way(words, with_function(scene, function), where)


_OPEN = 64.0  # silu(64) is 64 in float32 and in float64


def _opened(made: Tensor) -> Tensor:
    """Return a gate so large that SiLU is the identity, and the wanted result divided by it."""
    return torch.cat((torch.full_like(made, _OPEN), made / _OPEN), dim=-1)


def _limit_ways(scene: Scene) -> Iterator[Way]:
    own = _limit(scene)
    if own is not None:
        yield _with_limit(scene, None)
        yield _with_limit(scene, own / 2)
        yield _with_limit(scene, own * 2)
    for limit in LIMITS:
        if limit != own:
            yield _with_limit(scene, limit)
    if own is None and not is_v4(scene):
        yield _with_limit(scene, 0.5)


def _with_limit(scene: Scene, limit: float | None) -> Way:
    words = "no clamp of gate and up" if limit is None else f"gate and up clamped at {limit:g}"
    if is_v4(scene):
        change = partial(with_config, swiglu_limit=float(limit or 0.0))
        return Way(words, with_facts(scene, change), {"limit": limit or 0.0})

    def clamped(gate: Tensor, up: Tensor, _limit: float | None) -> Tensor:
        return elementary.swiglu(gate, up, limit)

    return gated(scene, words, clamped, limit=limit or 0.0)


def _limits(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose the known limits, and those fitted to the largest `up` that passes."""
    yield from _limit_ways(scene)
    x, made = sight.inputs["x"].double(), _values(scene, sight)
    if made is None:
        return
    gate, up = x.chunk(2, -1)
    weights = sight.inputs.get("weights")
    if weights is not None and facts_at(scene).weight_before_w2:
        made = made / weights.double()[..., None]
    through = (made / torch.nn.functional.silu(gate)).abs()
    sure = gate.abs() > 0.1 * gate.abs().max()
    beyond = sure & (up.abs() > 1.05 * through) & (gate > 0)
    if int(beyond.sum()) > 8:
        found = float(through[beyond].median())
        yield _with_limit(scene, float(f"{found:.2g}"))
    yield from (_with_limit(scene, limit) for limit in _of_cut(gate, up, made))


def _of_cut(gate: Tensor, up: Tensor, made: Tensor) -> Iterator[float]:
    """Fit a low limit: where gate and up both exceed it, the output is silu(limit) * limit.

    Gates below 0 are not clamped. A 4-bit code errs by up to a quarter, the mean of many hardly.
    """
    size, least = made.abs(), torch.minimum(gate, up.abs())
    most = float(size[gate > 0].max()) if bool((gate > 0).any()) else 0.0
    limit = _limit_of(most, float(least.max()))
    cut = least > _SURELY * limit
    if not 0 < limit < float(least.max()) / 2 or int(cut.sum()) <= 8:
        return
    limit = _limit_of(float(size[cut].mean()), limit)
    short = (2.0 ** round(math.log2(limit)), *(float(f"{limit:.{n}g}") for n in (1, 2)))
    yield from (each for each in dict.fromkeys(short) if abs(each - limit) < limit / 16)


def _limit_of(made: float, most: float) -> float:
    """Find the limit with this output by bisection, at most `most`."""
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        # Bisection works because silu(limit) * limit increases with the limit.
        middle = (low + high) / 2
        low, high = (middle, high) if _passed(middle) < made else (low, middle)
    return high


def _passed(limit: float) -> float:
    """Return SwiGLU with gate and up both at the limit."""
    return limit * limit / (1 + math.exp(-min(limit, _OPEN))) if limit > 0 else 0.0


def _values(scene: Scene, sight: Sight) -> Tensor | None:
    """Return the output as numbers; None if it cannot be decoded."""
    out = sight.outputs.get("out")
    if out is not None:
        return out.double()
    form = facts_at(scene).activation("ffn.experts.0.w2")
    return None if form is None else activation_values(sight.outputs, form, torch.float64)


def _place_ways(scene: Scene) -> Iterator[Way]:
    if _limit(scene) is None:
        return
    yield gated(scene, "the clamp behind the product", _behind)
    yield gated(scene, "up not clamped", _gate_only)
    yield gated(scene, "gate not clamped", _up_only)
    yield gated(scene, "gate clamped from below as well", _both_sides)
    yield gated(scene, "up clamped from above only", _up_above)


def _behind(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    most = limit or torch.inf
    return (torch.nn.functional.silu(gate) * up).clamp(-most, most)


def _gate_only(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up


def _up_only(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    most = limit or torch.inf
    return torch.nn.functional.silu(gate) * up.clamp(-most, most)


def _both_sides(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    most = limit or torch.inf
    return torch.nn.functional.silu(gate.clamp(-most, most)) * up.clamp(-most, most)


def _up_above(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(max=limit)


def _function_ways(scene: Scene) -> Iterator[Way]:
    for words, function in (
        ("GELU in the place of SiLU", torch.nn.functional.gelu),
        ("ReLU in the place of SiLU", torch.relu),
        ("a sigmoid without its factor", torch.sigmoid),
        ("a hard sigmoid", torch.nn.functional.hardswish),
        ("a sigmoid by a tanh of third order", _cubic),
        ("SiLU of 1.702 x", lambda x: x * torch.sigmoid(1.702 * x)),
    ):
        yield gated(scene, words, partial(_through, function))


def _through(
    function: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, limit: float | None
) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return function(gate) * up


def _cubic(x: Tensor) -> Tensor:
    """Approximate tanh(y) by y - y^3 / 3, clamped to [-1, 1]."""
    half = (x / 2).clamp(-1.0, 1.0)
    return x * (0.5 * (half - half * half * half / 3) + 0.5)


MODEL_FAULTS = (
    ModelFault(
        id="M25.limit",
        title="The clamp of SwiGLU is lost, or at another value",
        effect="large activations pass, or small ones are cut; other rows are exact",
        remedy="Pass the config's swiglu_limit on to the backend that runs.",
        sits=sits,
        ways=_limit_ways,
        signature=_limits,
    ),
    ModelFault(
        id="M25.place",
        title="SwiGLU clamps in another place",
        effect="rows with large activations are wrong",
        remedy="Clamp gate from above and up on both sides, in front of SiLU and product.",
        sits=lambda scene: sits(scene) and is_v4(scene),
        ways=_place_ways,
        signature=from_ways(_place_ways),
    ),
    ModelFault(
        id="M25.function",
        title="Another function stands in the place of SiLU",
        effect="every activation is off, small ones as well",
        remedy="Use x * sigmoid(x); approximate it to the accuracy of the stored dtype.",
        sits=sits,
        ways=_function_ways,
        signature=from_ways(_function_ways),
    ),
)
