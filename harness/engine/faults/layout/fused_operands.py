"""M24: a fused operation takes another operand or epsilon, or skips an intermediate rounding.

A fusion matches a graph whose norm weight has another dtype or meaning (vllm issue 48330), drops an
operand (pytorch issue 174049), or keeps in registers a value that was stored, and so rounded,
before (TensorRT-LLM issue 17409).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import is_named, shared
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Way,
    from_ways,
    with_weights,
)
from degarble.harness.engine.faults.rebinding import (
    facts_at,
    unrounded,
    with_epsilon,
    with_facts,
    with_function,
    with_numerics,
    with_switches,
)
from degarble.harness.engine.faults.rope_variants import HIDDEN
from degarble.harness.formats.weight import Weight
from degarble.references.facts import V32Facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

_NORMS = {
    "attn.norm": "ffn.norm", "ffn.norm": "attn.norm", "attn.q_norm": "", "attn.kv_norm": "",
    "attn.kv_norm_rope": "", "norm": "", "enorm": "hnorm", "hnorm": "enorm",
}  # fmt: skip
_SUMMING = ("attn.norm", "ffn.norm")  # in V3.2 these add the residual
_FORMED = ("attn.norm", "ffn.norm", "attn.q_norm", "attn.kv_norm")
_ROOTED = (
    *_NORMS, "attn.q_head_norm_rope", "attn.compressor.pool", "attn.indexer.compressor.pool",
)  # fmt: skip
_RUNS = (8, 16)  # numbers of a thread
EPSILONS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_FIRST, _TURNS, _MOST = 1e-3, 4, 1e3  # of the search for another one
_CLOSER, _APART = 2, 0.01  # times that it is narrowed down, by a slope over so much of it
_STORING = (
    "attn.norm", "ffn.norm", "ffn.experts.act_quant", "attn.kv_norm_rope", "attn.q_head_norm_rope",
    "attn.compressor.pool", "attn.indexer.q",
)  # fmt: skip


def _gamma(change: Callable[[Tensor], Tensor]) -> Any:
    """Change the weight of a norm, or of a component that contains one."""

    def changed(_name: str, weight: Weight) -> Weight:
        return Weight(value=change(weight.values(torch.float32)))

    return with_weights(changed)


def _as_bf16(value: Tensor) -> Tensor:
    """Read fp32 bytes as BF16: two numbers where there was one."""
    return value.contiguous().view(torch.bfloat16)[: len(value)].float()


def _as_fp32(value: Tensor) -> Tensor:
    """Read BF16 bytes as fp32: one number where there were two, repeated to the length."""
    whole = value[: len(value) // 2 * 2]
    pairs = whole.to(torch.bfloat16).contiguous().view(torch.float32)
    return pairs.repeat(2)[: len(value)] if len(pairs) * 2 >= len(value) else value


def _reversed_runs(run: int, value: Tensor) -> Tensor:
    """Reverse each run of the weight that one thread holds."""
    return value if len(value) % run else value.unflatten(0, (-1, run)).flip(1).flatten()


def _gamma_ways(scene: Scene) -> Iterator[Way]:
    yield Way("the norm's weight as fp32 bytes read as BF16", _gamma(_as_bf16))
    yield Way("the norm's weight as BF16 bytes read as fp32", _gamma(_as_fp32))
    yield Way("the norm's weight plus 1", _gamma(lambda value: value + 1))
    yield Way("a norm without weight", _gamma(torch.ones_like))
    yield Way("the norm's weight applied twice", _gamma(lambda value: value * value))
    for run in _RUNS:
        words = f"the norm's weight reversed in runs of {run}"
        yield Way(words, _gamma(partial(_reversed_runs, run)))
    yield from _other_gammas(scene)


def _other_gammas(scene: Scene) -> Iterator[Way]:
    """Yield other norm weights of the same width, of this block or the next."""
    block = scene.component.block
    if block is None:
        return
    other = f"{block.prefix}.{_NORMS[scene.role]}" if _NORMS[scene.role] else ""
    next_one = f"{block.scope}.{block.index + 1}.{scene.role}"
    last_one = f"{block.scope}.{block.index - 1}.{scene.role}"
    for name in (other, next_one, last_one):
        found = scene.sibling(name) if name else None
        if found is None:
            continue
        (weight,) = found.weights.values()
        yield Way(f"the weight of {name}", with_weights(_given(weight)), {"taken": name})


def _given(weight: Weight) -> Any:
    return lambda _name, _own: weight


def _form_ways(scene: Scene) -> Iterator[Way]:
    """Yield ways that compute something other than RMSNorm on the same input."""
    for words, form in (
        ("no norm: the input passes", lambda x, _w: x),
        ("no norm: the weight alone", lambda x, w: x * w),
        ("a norm with the mean taken away", _centred),
        ("a norm by the sum of squares", lambda x, w: w * x / x.norm(dim=-1, keepdim=True)),
        ("a norm over the first half", _half),
    ):
        yield Way(words, with_function(scene, partial(_formed, scene.role, form)))


def _formed(
    role: str, form: Any, facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
) -> Any:
    work, (weight,) = facts.numerics.work, weights.values()
    total = inputs["x"].to(work)
    made: dict[str, Tensor] = {}
    if "residual" in inputs:
        total = total + inputs["residual"].to(work)
    if isinstance(facts, V32Facts) and role in _SUMMING:
        made["residual"] = total.to(facts.numerics.store)
    return {"out": form(total, weight.values(work)).to(facts.numerics.store), **made}


def _rms(x: Tensor, weight: Tensor, epsilon: float = 0.0) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon))


def _centred(x: Tensor, weight: Tensor) -> Tensor:
    return _rms(x - x.mean(-1, keepdim=True), weight)


def _half(x: Tensor, weight: Tensor) -> Tensor:
    first = x[..., : x.shape[-1] // 2]
    return weight * (x * torch.rsqrt(first.square().mean(-1, keepdim=True)))


def _epsilon_ways(scene: Scene) -> Iterator[Way]:
    for epsilon in EPSILONS:
        if epsilon != own_epsilon(scene):
            yield epsilon_way(scene, epsilon)


def own_epsilon(scene: Scene) -> float:
    """Return the epsilon of the healthy component."""
    return float(facts_at(scene).norm_epsilon(scene.role))


def epsilon_way(scene: Scene, epsilon: float, *, fitted: bool = False) -> Way:
    """Return the way with another epsilon under the root."""
    return Way(
        f"{epsilon:.3g} under the root",
        with_facts(scene, partial(with_epsilon, epsilon)),
        {"epsilon": epsilon} if fitted else {},
    )


def _epsilons(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Yield the known epsilons, and the one fitted to the size of the outputs."""
    yield from _epsilon_ways(scene)
    own = own_epsilon(scene)
    wanted = _beside(sight.outputs, sight.expected)
    if math.isnan(wanted) or wanted >= 0:
        return  # a larger one makes outputs smaller; a smaller one than usual changes nothing
    more = _FIRST
    for _ in range(_TURNS):
        call = with_facts(scene, partial(_fine, own + more))(scene.call)
        made = _beside(call(sight.inputs, scene.weights), sight.expected)
        if not made < 0:
            return
        more *= min(_MOST, max(1 / _MOST, wanted / made))
    value = own + more
    least = most = value
    for _ in range(_CLOSER):
        least, most = _narrowed(scene, sight, value)
        if not 0 < least <= most:
            return
        value = (least + most) / 2
    short = [float(f"{value:.{digits}g}") for digits in (1, 2, 3)]
    short += [own + float(f"{value - own:.{digits}g}") for digits in (1, 2)]  # added to the model's
    fitting = [each for each in short if least <= each <= most or is_named(value, each)]
    for each in dict.fromkeys((*fitting, *short[:2], value)):
        yield epsilon_way(scene, each, fitted=True)


def _narrowed(scene: Scene, sight: Sight, epsilon: float) -> tuple[float, float]:
    """Narrow an epsilon to the interval in which most outputs round to the observed ones."""
    stored = sight.outputs["out"]
    here, beside = (
        with_facts(scene, partial(_fine, each))(scene.call)(sight.inputs, scene.weights)["out"]
        for each in (epsilon, epsilon * (1 + _APART))
    )
    # Numerical derivative of each output with respect to epsilon.
    slope = (beside.double() - here.double()) / (epsilon * _APART)
    known = (slope != 0) & stored.isfinite()
    c, near, slope = stored.double()[known], here.double()[known], slope[known]
    half = torch.exp2(torch.frexp(c).exponent - 2.0) * torch.finfo(stored.dtype).eps
    ends = torch.stack([epsilon + (c + side * half - near) / slope for side in (-1, 1)])
    return shared(ends.amin(0), ends.amax(0)) if len(c) else (epsilon, epsilon)


def _fine(epsilon: float, facts: Any) -> Any:
    return unrounded(with_epsilon(epsilon, facts))


def _beside(outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the mean relative excess over the expected outputs; NaN if undefined."""
    c, e = outputs.get("out"), expected.get("out")
    if c is None or e is None or c.shape != e.shape:
        return math.nan
    known = (e != 0) & c.isfinite() & e.isfinite()
    c, e = c[known].double(), e[known].double()
    return float(((c - e) / e).mean()) if len(e) else math.nan


def _kept_ways(scene: Scene) -> Iterator[Way]:
    """Yield ways without rounding of intermediates; the output is rounded."""
    yield Way("values that are not rounded between the fused steps", _kept(scene, torch.float32))
    yield Way("values rounded to FP16 between the fused steps", _kept(scene, torch.float16))
    yield Way("truncation between the fused steps", _kept(scene, torch.float32, _truncated))


def _truncated(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def _kept(
    scene: Scene, store: torch.dtype, change: Callable[[Tensor], Tensor] = lambda x: x
) -> Any:
    other = with_facts(scene, lambda facts: with_numerics(facts, store=store))

    def apply(call: Any) -> Any:
        changed = other(call)

        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            made = changed(inputs, weights)
            stored = {n: change(x) if x.dtype is torch.float32 else x for n, x in made.items()}
            known = call(inputs, weights)
            return {name: x.to(known[name].dtype) for name, x in stored.items()}

        return faulty

    return apply


def _transform_ways(scene: Scene) -> Iterator[Way]:
    facts = facts_at(scene)
    has = facts.numerics.switches.indexer_hadamard
    if not facts.numerics.with_switches(indexer_hadamard=True).transforms(
        facts.config.index_head_dim
    ):
        return  # such a width has no transform
    words = "no Hadamard transform" if has else "a Hadamard transform in front of the rounding"
    change = partial(with_switches, indexer_hadamard=not has)
    yield Way(words, with_facts(scene, change))


def _fault(name: str, title: str, effect: str, remedy: str, signature: Any = None) -> ModelFault:
    roles, ways = _TABLE[name]
    return ModelFault(
        id=f"M24.{name}",
        title=title,
        effect=effect,
        remedy=remedy,
        sits=lambda scene: scene.role in roles,
        ways=ways,
        signature=signature or from_ways(ways),
    )


_TABLE: dict[str, tuple[Any, Callable[[Scene], Iterator[Way]]]] = {
    "norm_weight": (_NORMS, _gamma_ways),
    "norm_form": (_FORMED, _form_ways),
    "epsilon": (_ROOTED, _epsilon_ways),
    "rounding": (_STORING, _kept_ways),
    "transform": (HIDDEN, _transform_ways),
}

MODEL_FAULTS = (
    _fault(
        "norm_weight",
        "A fused norm takes another weight, or misreads its own",
        "features are scaled by numbers that belong elsewhere",
        "Compare the fused and the separate operation for every fusion that fired.",
    ),
    _fault(
        "norm_form",
        "A fused norm computes something else",
        "rows have another length, or features are centred",
        "Compare the fused and the separate operation for every fusion that fired.",
    ),
    _fault(
        "epsilon",
        "A norm has another epsilon",
        "rows of small values are too small, those of large ones hardly",
        "Pass the config's rms_norm_eps on; a fused norm's default is another one.",
        _epsilons,
    ),
    _fault(
        "rounding",
        "A fusion does not round where the separate steps store",
        "codes on the edge of a step fall on its other side",
        "Round to the stored dtype between the steps, or derive the budget without it.",
    ),
    _fault(
        "transform",
        "The indexer's operand lacks its Hadamard transform, or has one too many",
        "scores are as before where both operands lack it; else tokens attend to other rows",
        "Transform queries and keys alike, or neither; the checkpoint's code says which.",
    ),
)
