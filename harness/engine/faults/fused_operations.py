"""Faults of activations and fused operations: M24 operand, epsilon or rounding; M25 SwiGLU."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import is_named, shared
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    block_function,
    facts_at,
    from_variants,
    has_clamp,
    unrounded,
    with_config,
    with_epsilon,
    with_facts,
    with_function,
    with_numerics,
    with_switches,
    with_weights,
)
from degarble.harness.engine.faults.rope import HIDDEN
from degarble.harness.formats.weight import Weight
from degarble.harness.model.family import family_of
from degarble.references import elementary
from degarble.references.linears import activation_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Gate = Callable[[Tensor, Tensor, float | None], Tensor]


# --------------------------------------------------------------------------------------------------
# M24: a fused operation takes another operand or epsilon, or skips an intermediate rounding.
#
# A fusion matches a graph whose norm weight has another dtype or meaning (vllm issue 48330), drops
# an operand (pytorch issue 174049), or keeps in registers a value that was stored, and so rounded,
# before (TensorRT-LLM issue 17409).

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


def _gamma_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    yield FaultVariant("the norm's weight as fp32 bytes read as BF16", _gamma(_as_bf16))
    yield FaultVariant("the norm's weight as BF16 bytes read as fp32", _gamma(_as_fp32))
    yield FaultVariant("the norm's weight plus 1", _gamma(lambda value: value + 1))
    yield FaultVariant("a norm without weight", _gamma(torch.ones_like))
    yield FaultVariant("the norm's weight applied twice", _gamma(lambda value: value * value))
    for run in _RUNS:
        words = f"the norm's weight reversed in runs of {run}"
        yield FaultVariant(words, _gamma(partial(_reversed_runs, run)))
    yield from _other_gammas(context)


def _other_gammas(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield other norm weights of the same width, of this block or the next."""
    block = context.component.block
    if block is None:
        return
    other = f"{block.prefix}.{_NORMS[context.role]}" if _NORMS[context.role] else ""
    next_one = f"{block.scope}.{block.index + 1}.{context.role}"
    last_one = f"{block.scope}.{block.index - 1}.{context.role}"
    for name in (other, next_one, last_one):
        component_context = context.sibling(name) if name else None
        if component_context is None:
            continue
        (weight,) = component_context.weights.values()
        yield FaultVariant(f"the weight of {name}", with_weights(_given(weight)), {"taken": name})


def _given(weight: Weight) -> Any:
    return lambda _name, _own: weight


def _form_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants that compute something other than RMSNorm on the same input."""
    for words, form in (
        ("no norm: the input passes", lambda x, _w: x),
        ("no norm: the weight alone", lambda x, w: x * w),
        ("a norm with the mean taken away", _centred),
        ("a norm by the sum of squares", lambda x, w: w * x / x.norm(dim=-1, keepdim=True)),
        ("a norm over the first half", _half),
    ):
        yield FaultVariant(words, with_function(context, partial(_formed, context.role, form)))


def _formed(
    role: str, form: Any, facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
) -> Any:
    work, (weight,) = facts.numerics.work, weights.values()
    total = inputs["x"].to(work)
    made: dict[str, Tensor] = {}
    if "residual" in inputs:
        total = total + inputs["residual"].to(work)
    if role in _SUMMING and family_of(facts.config).norms_add_residual:
        made["residual"] = total.to(facts.numerics.store)
    return {"out": form(total, weight.values(work)).to(facts.numerics.store), **made}


def _rms(x: Tensor, weight: Tensor, epsilon: float = 0.0) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon))


def _centred(x: Tensor, weight: Tensor) -> Tensor:
    return _rms(x - x.mean(-1, keepdim=True), weight)


def _half(x: Tensor, weight: Tensor) -> Tensor:
    first = x[..., : x.shape[-1] // 2]
    return weight * (x * torch.rsqrt(first.square().mean(-1, keepdim=True)))


def _epsilon_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for epsilon in EPSILONS:
        if epsilon != own_epsilon(context):
            yield epsilon_variant(context, epsilon)


def own_epsilon(context: ComponentContext) -> float:
    """Return the epsilon of the healthy component."""
    return float(facts_at(context).norm_epsilon(context.role))


def epsilon_variant(
    context: ComponentContext, epsilon: float, *, fitted: bool = False
) -> FaultVariant:
    """Return the variant with another epsilon under the root."""
    return FaultVariant(
        f"{epsilon:.3g} under the root",
        with_facts(context, partial(with_epsilon, epsilon)),
        {"epsilon": epsilon} if fitted else {},
    )


def _epsilons(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield the known epsilons, and the one fitted to the size of the outputs."""
    yield from _epsilon_variants(context)
    own = own_epsilon(context)
    wanted = _beside(record.outputs, record.expected)
    if math.isnan(wanted) or wanted >= 0:
        return  # a larger one makes outputs smaller; a smaller one than usual changes nothing
    more = _FIRST
    for _ in range(_TURNS):
        call = with_facts(context, partial(_fine, own + more))(context.call)
        made = _beside(call(record.inputs, context.weights), record.expected)
        if not made < 0:
            return
        more *= min(_MOST, max(1 / _MOST, wanted / made))
    value = own + more
    least = most = value
    for _ in range(_CLOSER):
        least, most = _narrowed(context, record, value)
        if not 0 < least <= most:
            return
        value = (least + most) / 2
    short = [float(f"{value:.{digits}g}") for digits in (1, 2, 3)]
    short += [own + float(f"{value - own:.{digits}g}") for digits in (1, 2)]  # added to the model's
    fitting = [each for each in short if least <= each <= most or is_named(value, each)]
    for each in dict.fromkeys((*fitting, *short[:2], value)):
        yield epsilon_variant(context, each, fitted=True)


def _narrowed(context: ComponentContext, record: CallRecord, epsilon: float) -> tuple[float, float]:
    """Narrow an epsilon to the interval in which most outputs round to the observed ones."""
    stored = record.outputs["out"]
    here, beside = (
        with_facts(context, partial(_fine, each))(context.call)(record.inputs, context.weights)[
            "out"
        ]
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


def _kept_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants without rounding of intermediates; the output is rounded."""
    yield FaultVariant(
        "values that are not rounded between the fused steps", _kept(context, torch.float32)
    )
    yield FaultVariant(
        "values rounded to FP16 between the fused steps", _kept(context, torch.float16)
    )
    yield FaultVariant(
        "truncation between the fused steps", _kept(context, torch.float32, _truncated)
    )


def _truncated(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def _kept(
    context: ComponentContext, store: torch.dtype, change: Callable[[Tensor], Tensor] = lambda x: x
) -> Any:
    other = with_facts(context, lambda facts: with_numerics(facts, store=store))

    def apply(call: Any) -> Any:
        changed = other(call)

        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            made = changed(inputs, weights)
            stored = {n: change(x) if x.dtype is torch.float32 else x for n, x in made.items()}
            known = call(inputs, weights)
            return {name: x.to(known[name].dtype) for name, x in stored.items()}

        return faulty

    return apply


def _transform_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    facts = facts_at(context)
    has = facts.numerics.switches.indexer_hadamard
    if not facts.numerics.with_switches(indexer_hadamard=True).transforms(
        facts.config.index_head_dim
    ):
        return  # such a width has no transform
    words = "no Hadamard transform" if has else "a Hadamard transform in front of the rounding"
    change = partial(with_switches, indexer_hadamard=not has)
    yield FaultVariant(words, with_facts(context, change))


def _fault(name: str, title: str, effect: str, remedy: str, signature: Any = None) -> ModelFault:
    roles, variants = _TABLE[name]
    return ModelFault(
        id=f"M24.{name}",
        title=title,
        effect=effect,
        remedy=remedy,
        applies_to=lambda context: context.role in roles,
        variants=variants,
        signature=signature or from_variants(variants),
    )


_TABLE: dict[str, tuple[Any, Callable[[ComponentContext], Iterator[FaultVariant]]]] = {
    "norm_weight": (_NORMS, _gamma_variants),
    "norm_form": (_FORMED, _form_variants),
    "epsilon": (_ROOTED, _epsilon_variants),
    "rounding": (_STORING, _kept_variants),
    "transform": (HIDDEN, _transform_variants),
}

FUSED_OPERANDS_FAULTS = (
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


# --------------------------------------------------------------------------------------------------
# M25: SwiGLU loses its clamp, clamps elsewhere or at another limit, or is another function.
#
# A limit arrives as None and is silently skipped (vllm issue 45836); a fused quantiser takes a
# cheap sigmoid (vllm issue 24833). Rows without large values are exact.


_ROUTED, _PLAIN = "ffn.experts.act_quant", ("ffn.shared.act", "ffn.act")
_HALVINGS = 40
_SURELY = 1.25  # times a limit: whatever is larger was cut
LIMITS = (7.0, 10.0, 20.0)  # of released models, and twice V4's


def sits(context: ComponentContext) -> bool:
    """Return whether the component contains SwiGLU."""
    return context.role == _ROUTED or context.role in _PLAIN


def _limit(context: ComponentContext) -> float | None:
    facts = facts_at(context)
    found: float | None = facts.limit if context.role == _ROUTED else facts.shared_limit
    return found


def gated(context: ComponentContext, words: str, gate: Gate, **where: Any) -> FaultVariant:
    """Replace SwiGLU by another activation; later weights and quantisation stay."""
    role = context.role

    def function(facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
        work = facts.numerics.work
        limit = facts.limit if role == _ROUTED else facts.shared_limit
        first, second = inputs["x"].to(work).chunk(2, -1)
        made = gate(first, second, limit)
        # What follows is the component's own code, on a gate that is the identity.
        plain = with_config(facts, swiglu_limit=0.0) if limit is not None else facts
        return block_function(facts, role)(plain, {**inputs, "x": _opened(made)}, weights)

    return FaultVariant(words, with_function(context, function), where)


_OPEN = 64.0  # silu(64) is 64 in float32 and in float64


def _opened(made: Tensor) -> Tensor:
    """Return a gate so large that SiLU is the identity, and the wanted result divided by it."""
    return torch.cat((torch.full_like(made, _OPEN), made / _OPEN), dim=-1)


def _limit_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    own = _limit(context)
    if own is not None:
        yield _with_limit(context, None)
        yield _with_limit(context, own / 2)
        yield _with_limit(context, own * 2)
    for limit in LIMITS:
        if limit != own:
            yield _with_limit(context, limit)
    if own is None and not has_clamp(context):
        yield _with_limit(context, 0.5)


def _with_limit(context: ComponentContext, limit: float | None) -> FaultVariant:
    words = "no clamp of gate and up" if limit is None else f"gate and up clamped at {limit:g}"
    if has_clamp(context):
        change = partial(with_config, swiglu_limit=float(limit or 0.0))
        return FaultVariant(words, with_facts(context, change), {"limit": limit or 0.0})

    def clamped(gate: Tensor, up: Tensor, _limit: float | None) -> Tensor:
        return elementary.swiglu(gate, up, limit)

    return gated(context, words, clamped, limit=limit or 0.0)


def _limits(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose the known limits, and those fitted to the largest `up` that passes."""
    yield from _limit_variants(context)
    x, made = record.inputs["x"].double(), _values(context, record)
    if made is None:
        return
    gate, up = x.chunk(2, -1)
    weights = record.inputs.get("weights")
    if weights is not None and facts_at(context).weight_before_w2:
        made = made / weights.double()[..., None]
    through = (made / torch.nn.functional.silu(gate)).abs()
    sure = gate.abs() > 0.1 * gate.abs().max()
    beyond = sure & (up.abs() > 1.05 * through) & (gate > 0)
    if int(beyond.sum()) > 8:
        found = float(through[beyond].median())
        yield _with_limit(context, float(f"{found:.2g}"))
    yield from (_with_limit(context, limit) for limit in _of_cut(gate, up, made))


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


def _values(context: ComponentContext, record: CallRecord) -> Tensor | None:
    """Return the output as numbers; None if it cannot be decoded."""
    out = record.outputs.get("out")
    if out is not None:
        return out.double()
    form = facts_at(context).activation("ffn.experts.0.w2")
    return None if form is None else activation_values(record.outputs, form, torch.float64)


def _place_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if _limit(context) is None:
        return
    yield gated(context, "the clamp after the product", _behind)
    yield gated(context, "up not clamped", _gate_only)
    yield gated(context, "gate not clamped", _up_only)
    yield gated(context, "gate clamped from below as well", _both_sides)
    yield gated(context, "up clamped from above only", _up_above)


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


def _function_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, function in (
        ("GELU in the place of SiLU", torch.nn.functional.gelu),
        ("ReLU in the place of SiLU", torch.relu),
        ("a sigmoid without its factor", torch.sigmoid),
        ("a hard sigmoid", torch.nn.functional.hardswish),
        ("a sigmoid by a tanh of third order", _cubic),
        ("SiLU of 1.702 x", lambda x: x * torch.sigmoid(1.702 * x)),
    ):
        yield gated(context, words, partial(_through, function))


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


ACTIVATION_CONSTANT_FAULTS = (
    ModelFault(
        id="M25.limit",
        title="The clamp of SwiGLU is lost, or at another value",
        effect="large activations pass, or small ones are cut; other rows are exact",
        remedy="Pass the config's swiglu_limit on to the backend that runs.",
        applies_to=sits,
        variants=_limit_variants,
        signature=_limits,
    ),
    ModelFault(
        id="M25.place",
        title="SwiGLU clamps in another place",
        effect="rows with large activations are wrong",
        remedy="Clamp gate from above and up on both sides, in front of SiLU and product.",
        applies_to=lambda context: sits(context) and has_clamp(context),
        variants=_place_variants,
    ),
    ModelFault(
        id="M25.function",
        title="Another function is in the place of SiLU",
        effect="every activation is off, small ones as well",
        remedy="Use x * sigmoid(x); approximate it to the accuracy of the stored dtype.",
        applies_to=sits,
        variants=_function_variants,
    ),
)
