"""Faults of traced components by kind: attention, rotation, routers, experts, sums.

A component of a traced family has no role, so that these faults ask for its kind alone. Each is the
component with other facts, weights, inputs or outputs.

Shape letters: T tokens, S tokens that are attended to, H query heads, G heads of keys, D width.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from degarble.harness.engine.faults.gain_fit import fitted, gain_text
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    with_facts,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.traced.operations import (
    apart,
    distance_of,
    fitted_number,
    of_kinds,
    others_of,
    side_by_side,
    steps_of,
    traced_facts,
    variant_of,
    with_operation,
)
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number
from degarble.references.traced.attention import admitted_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import (
        CallRecord,
        ComponentContext,
        FaultVariant,
    )

    Tensors = Mapping[str, Tensor]

_TINY = 1e-30


# --------------------------------------------------------------------------------------------------
# Attention

_PROBED = 2048  # tokens of the probe that finds how far a mask sees


def _with(context: ComponentContext, **changes: Any) -> Any:
    """Run attention with other facts than the model gives it."""

    def change(facts: Any) -> Any:
        traced = replace(facts.traced, facts={**facts.traced.facts, **changes})
        return replace(facts, traced=traced)

    return with_facts(context, change)


def _scale(context: ComponentContext, width: int) -> float:
    own: Any = traced_facts(context).traced.facts.get("scaling")
    return width**-0.5 if own is None else float(own)


def _width(context: ComponentContext) -> int:
    facts = traced_facts(context)
    return int(facts.graph.trace.tensors[facts.traced.inputs["query"].number].shape[-1])


def _scaled(context: ComponentContext, value: float, own: float) -> FaultVariant:
    words = f"logits times {number(value, 4)}, not {number(own, 4)},"
    return variant_of(context, words, _with(context, scaling=value), scale=value)


def _scale_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    width = _width(context)
    own = _scale(context, width)
    others = (1.0, width**-0.5, 1 / width, (2 * width) ** -0.5, (width / 2) ** -0.5, own * 1.03)
    for value in dict.fromkeys(others):
        if abs(value - own) > own * 1e-6:
            yield _scaled(context, value, own)


def _scales_fitted(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    yield from _scale_variants(context)
    own = _scale(context, _width(context))

    def left(value: float) -> float:
        return distance_of(context, record, _scaled(context, value, own))

    for value in fitted_number(left, own):
        yield _scaled(context, value, own)


def _extra_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield attention without its cap or its sinks."""
    facts: Mapping[str, Any] = traced_facts(context).traced.facts
    cap = facts.get("softcap")
    if cap:
        yield variant_of(context, "no soft cap", _with(context, softcap=None))
    else:
        yield variant_of(context, "a soft cap of 50", _with(context, softcap=50.0))
    if facts.get("s_aux") is not None:
        yield variant_of(context, "no sinks", _with(context, s_aux=None))
        yield variant_of(context, "sinks that weigh nothing", with_weights(_lowered))
        yield variant_of(context, "sinks of the next head", with_weights(_turned))
        yield variant_of(context, "sinks with the other sign", with_weights(_negated))


def _lowered(_name: str, weight: Weight) -> Weight:
    return Weight(value=torch.full_like(weight.values(torch.float64), -1e4))


def _turned(_name: str, weight: Weight) -> Weight:
    return Weight(value=weight.values(torch.float64).roll(1, 0))


def _negated(_name: str, weight: Weight) -> Weight:
    return Weight(value=-weight.values(torch.float64))


def _within(window: int, ahead: int = 0) -> Callable[..., Tensor]:
    def admits(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + ahead) & (key > query - window)

    return admits


def _everything(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (query == query) & (key == key)  # noqa: PLR0124  all of them


def _window(context: ComponentContext) -> int:
    """Return how many tokens a query sees; _PROBED where nothing limits it."""
    mask = traced_facts(context).traced.facts.get("mask")
    return int(admitted_keys(mask, 1, _PROBED).sum())


def _mask_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if any(each.name == "mask" for each in context.component.inputs):
        return  # one that the model computes
    own = _window(context)
    limited = own < _PROBED
    ways: list[tuple[str, Any]] = [
        ("keys of later tokens seen", _everything),
        ("the next token's key seen", _within(own if limited else 1 << 40, 1)),
    ]
    if limited:
        ways.append(("no window", None))
    others = (own - 1, own + 1, own // 2, 2 * own) if limited else _windows(context)
    ways += [(f"a window of {each} tokens", _within(each)) for each in others if each > 0]
    for words, mask in ways:
        yield variant_of(context, words, _with(context, mask=mask))


def _windows(context: ComponentContext) -> tuple[int, ...]:
    """Return the windows of this model's other layers, and usual ones."""
    found = dict.fromkeys(
        _window(other) for other in others_of(context) if other.component.kind == "traced.attention"
    )
    return (*(window for window in found if window < _PROBED), 4, 8, 16, 128, 512)


def _grouped(order: Callable[[int, int], list[int]]) -> Any:
    """Give every query head the head of keys that a rule names; one each afterwards."""

    def change(inputs: Tensors) -> Tensors:
        heads, groups = inputs["query"].shape[1], inputs["key"].shape[1]
        index = torch.tensor(order(heads, groups))
        return {**inputs, "key": inputs["key"][:, index], "value": inputs["value"][:, index]}

    return with_inputs(change)


def _head_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    facts = traced_facts(context)
    tensors, inputs = facts.graph.trace.tensors, facts.traced.inputs
    (query, key, value) = (tensors[inputs[n].number].shape for n in ("query", "key", "value"))
    heads, groups = query[1], key[1]
    if 1 < groups < heads:
        yield variant_of(
            context,
            "heads of keys counted in turn",
            _grouped(lambda h, g: [n % g for n in range(h)]),
        )
    if groups > 1:
        yield variant_of(context, "the first head of keys for all", _grouped(lambda h, _g: [0] * h))
        yield variant_of(
            context, "heads of keys in reverse",
            _grouped(lambda h, g: [g - 1 - n * g // h for n in range(h)]),
        )  # fmt: skip
    if key == value:
        yield variant_of(
            context, "keys and values exchanged", with_inputs(_exchanged("key", "value"))
        )
    yield variant_of(context, "heads in reverse", with_outputs(_reversed_heads))


def _exchanged(first: str, second: str) -> Any:
    def change(inputs: Tensors) -> Tensors:
        return {**inputs, first: inputs[second], second: inputs[first]}

    return change


def _reversed_heads(_inputs: Tensors, outputs: Tensors) -> Tensors:
    return {"out": outputs["out"].flip(1)}


# --------------------------------------------------------------------------------------------------
# Cosines and sines, and the rotation by them

_BASES = (10000.0, 50000.0, 150000.0, 500000.0, 1000000.0, 5000000.0, 10000000.0)


def _frequencies(context: ComponentContext) -> tuple[str, Tensor] | None:
    facts = traced_facts(context)
    for name in facts.traced.parameters:
        if name.endswith("inv_freq") and name in facts.graph.trace.buffers:
            return name, facts.graph.trace.buffers[name].double()
    return None


def _with_frequencies(context: ComponentContext, name: str, values: Tensor) -> Any:
    def change(facts: Any) -> Any:
        trace = facts.graph.trace
        buffers = {**trace.buffers, name: values.to(trace.buffers[name].dtype)}
        return replace(facts, graph=replace(facts.graph, trace=replace(trace, buffers=buffers)))

    return with_facts(context, change)


def _frequency_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    found = _frequencies(context)
    if found is None:
        return
    name, own = found
    count = len(own)
    for base in _BASES:
        plain = base ** -(torch.arange(count, dtype=torch.float64) / count)
        if not torch.allclose(plain, own, rtol=1e-4):
            apply = _with_frequencies(context, name, plain)
            yield variant_of(context, f"plain angles of base {base:,.0f}", apply, base=base)
    for factor in (1.01, 0.5, 2.0, 0.25, 4.0, 0.125, 8.0):
        apply = _with_frequencies(context, name, own * factor)
        yield variant_of(context, f"angles times {number(factor)}", apply, factor=factor)
    apply = _with_frequencies(context, name, own.flip(0))
    yield variant_of(context, "frequencies in reverse", apply)


def _frequencies_fitted(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    yield from _frequency_variants(context)
    found, measured = _frequencies(context), None
    if found is not None:
        measured = _measured(record, len(found[1]))
    if found is None or measured is None:
        return
    name, own = found
    factor = float((measured / own).median())
    for digits in (2, 3, 4, 6):
        value = float(f"{factor:.{digits}g}")
        if value != 1:
            apply = _with_frequencies(context, name, own * value)
            yield variant_of(context, f"angles times {number(value, 6)}", apply, factor=value)
    slope = float(measured[-1].log() / ((len(own) - 1) / len(own))) if len(own) > 1 else 0.0
    base = math.exp(-slope)
    for digits in (1, 2, 3, 6):
        value = float(f"{base:.{digits}g}")
        plain = value ** -(torch.arange(len(own), dtype=torch.float64) / len(own))
        apply = _with_frequencies(context, name, plain)
        yield variant_of(context, f"plain angles of base {value:,.0f}", apply, base=value)


def _factors_fitted(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield cosines and sines that are both multiplied, as by another attention factor."""
    cos, own = record.outputs.get("cos"), record.expected.get("cos")
    factor = None if cos is None or own is None else fitted(cos, own)
    if factor is None:
        return
    for digits in (1, 2, 3, 4, 6):
        value = float(f"{factor:.{digits}g}")
        words = f"cosines and sines times {number(value, 4)}"
        yield variant_of(context, words, _with_factor(context, value), factor=value)


def _factor_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for value in (0.8, 1.2):
        words = f"cosines and sines times {value}"
        yield variant_of(context, words, _with_factor(context, value), factor=value)


def _with_factor(context: ComponentContext, value: float) -> Any:
    """Multiply the constant by which both cosines and sines are multiplied."""

    def change(facts: Any) -> Any:
        for at, operation in steps_of(context):
            first, *rest = operation.arguments
            if operation.name == "mul" and rest and isinstance(rest[0], float):
                other = replace(operation, arguments=(first, rest[0] * value))
                facts = with_operation(facts, at, other)
        return facts

    return with_facts(context, change)


def _measured(record: CallRecord, count: int) -> Tensor | None:
    """Return the frequencies that the candidate's cosines and sines of early positions show."""
    positions, cos, sin = (
        record.inputs.get("positions"),
        *(record.outputs.get(name) for name in ("cos", "sin")),
    )
    if positions is None or cos is None or sin is None or cos.shape[-1] < count:
        return None
    rows = (positions.flatten() == 1).nonzero().flatten()
    if not len(rows):
        return None
    row = int(rows[0])
    angle = torch.atan2(sin[row, :count].double(), cos[row, :count].double())
    # Late positions measure low frequencies better, as long as the angle is known to a turn.
    last = int(positions.argmax())
    late = torch.atan2(sin[last, :count].double(), cos[last, :count].double())
    far = float(positions.flatten()[last])
    turns = ((angle * far - late) / (2 * math.pi)).round()
    return ((late + turns * 2 * math.pi) / far).clamp(min=_TINY)


def _position_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in (
        ("positions one too many", lambda positions: positions + 1),
        ("positions one too few", lambda positions: positions - 1),
        ("positions that begin again in every call", lambda positions: positions - positions.min()),
        ("all positions 0", torch.zeros_like),
    ):
        yield variant_of(context, words, with_inputs(partial(_positions, change)))


def _positions(change: Callable[[Tensor], Tensor], inputs: Tensors) -> Tensors:
    return {**inputs, "positions": change(inputs["positions"])}


def _rotation_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    def given(words: str, change: Callable[[Tensors], Tensors]) -> FaultVariant:
        return variant_of(context, words, with_inputs(change))

    yield given("rotated the other way", lambda x: {**x, "sin": -x["sin"]})
    yield given("no rotation", lambda x: {
        **x, "cos": torch.ones_like(x["cos"]), "sin": torch.zeros_like(x["sin"])
    })  # fmt: skip
    yield given("cosine and sine exchanged", _exchanged("cos", "sin"))
    for words, steps in (("before", 1), ("after", -1)):
        yield given(f"the angles of the token {words}", partial(_rolled, steps))
    width = _turned_width(context)
    for words, before, after in (
        ("pairs taken for halves", apart, side_by_side),
        ("halves taken for pairs", side_by_side, apart),
        ("pairs put apart first", apart, None),
        ("halves interleaved first", side_by_side, None),
        ("pairs put apart afterwards", None, apart),
        ("halves interleaved afterwards", None, side_by_side),
    ):
        yield variant_of(context, words, partial(_repaired, width, before, after))


def _rolled(steps: int, inputs: Tensors) -> Tensors:
    return {**inputs, **{name: inputs[name].roll(steps, 0) for name in ("cos", "sin")}}


def _turned_width(context: ComponentContext) -> tuple[int, int]:
    """Return the width of a head, and how many of its last dims are rotated."""
    facts = traced_facts(context)
    tensors = facts.graph.trace.tensors
    wide = int(tensors[facts.traced.outputs["out"].number].shape[-1])
    angles = int(tensors[facts.traced.inputs["cos"].number].shape[-1])
    # Cosines are given once for a pair, or once for each of its dims.
    turned = 2 * angles if 2 * angles == wide else angles
    return wide, min(turned, wide)


def _repaired(width: tuple[int, int], before: Any, after: Any, call: Any) -> Any:
    """Rotate with other pairs: their dims are moved before, after, or both."""
    wide, turned = width

    def moved(x: Tensor, change: Any, own: int) -> Tensor:
        heads = x.unflatten(-1, (-1, own))
        kept, part = heads[..., : own - turned], heads[..., own - turned :]
        return torch.cat((kept, change(part)), -1).flatten(-2)

    def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
        given = dict(inputs)
        if before is not None:
            own = wide if not given["x"].shape[-1] % wide else given["x"].shape[-1]
            given["x"] = moved(given["x"], before, own)
        made = dict(call(given, weights))
        if after is not None:
            made["out"] = moved(made["out"], after, wide)
        return made

    return faulty


# --------------------------------------------------------------------------------------------------
# Routers: what becomes of logits and choices


def _routed(
    change: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Tensors, outputs: Tensors
) -> Tensors:
    given = {**inputs, **outputs}
    logits, weights, experts = (given[name] for name in ("logits", "weights", "experts"))
    made = change(logits.double(), weights.double(), experts.long())
    return {**outputs, "weights": made.to(weights.dtype)}


_WEIGHTS: tuple[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]], ...] = (
    ("weights that are renormalised", lambda _x, w, _e: w / w.sum(-1, keepdim=True)),
    ("a softmax over all experts", lambda x, _w, e: x.softmax(-1).gather(-1, e)),
    ("a softmax over the chosen experts", lambda x, _w, e: x.gather(-1, e).softmax(-1)),
    ("a sigmoid of each logit", lambda x, _w, e: x.gather(-1, e).sigmoid()),
    ("equal weights", lambda _x, w, _e: w.mean(-1, keepdim=True).expand(w.shape)),
    ("all weights 1", lambda _x, w, _e: torch.ones_like(w)),
    ("weights in reverse", lambda _x, w, _e: w.flip(-1)),
    ("squared weights", lambda _x, w, _e: w * w),
)  # fmt: skip


def _is_choice(context: ComponentContext) -> bool:
    given = {each.name for each in context.component.inputs}
    return {"logits", "weights", "experts"} <= {*given, *context.component.outputs}


def _router_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in _WEIGHTS:
        yield variant_of(context, words, with_outputs(partial(_routed, change)))


def _router_fitted(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    yield from _router_variants(context)
    seen, made = record.outputs.get("weights"), record.expected.get("weights")
    if seen is None or made is None or seen.shape != made.shape or not bool(made.abs().sum() > 0):
        return
    factor = float((seen.double() * made.double()).sum() / made.double().square().sum())
    for digits in (1, 2, 3, 4):
        value = float(f"{factor:.{digits}g}")
        if value not in (0.0, 1.0):
            yield variant_of(
                context, f"weights times {number(value, 4)}",
                with_outputs(partial(_routed, partial(_factor, value))), factor=value,
            )  # fmt: skip


def _factor(value: float, _logits: Tensor, weights: Tensor, _experts: Tensor) -> Tensor:
    return weights * value


# --------------------------------------------------------------------------------------------------
# Experts

_WRONG = (0.02, 0.005, 0.001)  # of a token's output: differences that roundings do not make
_NOTHING = 0.02  # of what an expert adds: hardly more than roundings
_SUSPECTS = 4  # experts that may be wrong alone or in pairs
_GATE_UP = ("gate_up_proj", "gate_up_proj_bias")
_DOWN_BIAS = "down_proj_bias"


def _module(context: ComponentContext) -> Any:
    return traced_facts(context).traced.facts["module"]


_GATE_UP_ORDERS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("gate and up exchanged by halves", lambda x: x.roll(x.shape[-1] // 2, -1)),
    ("gate and up exchanged in pairs", lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    ("interleaved gate and up read as halves", apart),
    ("halves of gate and up read as interleaved", side_by_side),
)


def _in_gate_up(
    context: ComponentContext, change: Callable[[Tensor], Tensor], expert: int | None = None
) -> Any:
    """Reorder the outputs of the first product, in weight and bias, of one expert or of all."""
    transposed = _module(context).is_transposed

    def changed(name: str, weight: Weight) -> Weight:
        if not name.endswith(_GATE_UP):
            return weight
        value = weight.values(torch.float64)
        turned = value.ndim == 3 and not transposed
        made = change(value.transpose(-1, -2)).transpose(-1, -2) if turned else change(value)
        if expert is not None:
            own = (torch.arange(len(value)) == expert).reshape(-1, *[1] * (value.ndim - 1))
            made = torch.where(own, made, value)
        return Weight(value=made.contiguous())

    return with_weights(changed)


def _expert_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if _module(context).has_gate:
        for words, change in _GATE_UP_ORDERS:
            yield variant_of(context, words, _in_gate_up(context, change))
    for bias in (name for name in context.weights if name.endswith(_DOWN_BIAS)):
        words = "the bias of the second product added without routing weights"
        yield variant_of(context, words, partial(_bias_unweighted, bias))
    for words, order in (("the next expert's weights", -1), ("the expert before's weights", 1)):
        yield variant_of(context, words, with_weights(partial(_turned_experts, order)))
    for words, name, change in (
        ("no routing weights", "weights", torch.ones_like),
        ("routing weights applied twice", "weights", torch.square),
        ("routing weights in reverse", "weights", lambda x: x.flip(-1)),
        ("the routing weights of the token before", "weights", lambda x: x.roll(1, 0)),
        ("the next expert's number", "experts", lambda x: x + 1),
    ):
        yield variant_of(context, words, with_inputs(partial(_given, name, change)))
    for words, module in _gates(_module(context)):
        yield variant_of(context, words, _with(context, module=module))


def _bias_unweighted(bias: str, call: ComponentCall) -> ComponentCall:
    """Return a call that adds the bias of each expert as it is."""

    def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        outputs, chosen = dict(call(inputs, weights)), inputs["experts"]
        own = weights[bias].values(torch.float64)[chosen.clamp(min=0)]
        more = torch.where(chosen >= 0, 1 - inputs["weights"].double(), 0.0)
        return {**outputs, "out": outputs["out"].double() + (more[..., None] * own).sum(1)}

    return faulty


def _turned_experts(order: int, _name: str, weight: Weight) -> Weight:
    return Weight(value=weight.values(torch.float64).roll(order, 0))


def _given(name: str, change: Callable[[Tensor], Tensor], inputs: Tensors) -> Tensors:
    return {**inputs, name: change(inputs[name])}


class _QuickGelu(nn.Module):
    """GELU by a sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        made: Tensor = x * torch.sigmoid(1.702 * x)
        return made


def _gates(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the module with another activation, or with other constants of its gate."""
    if "act_fn" in module._modules:  # noqa: SLF001
        for words, function in (
            ("SiLU", nn.SiLU()), ("GELU", nn.GELU()), ("GELU by tanh", nn.GELU(approximate="tanh")),
            ("quick GELU", _QuickGelu()), ("ReLU", nn.ReLU()), ("no activation", nn.Identity()),
        ):  # fmt: skip
            made = copy.copy(module)
            made._modules = {**module._modules, "act_fn": function}  # noqa: SLF001
            yield f"{words} in the gate", made
    for name, values in (("limit", (math.inf, 1.0, 10.0)), ("alpha", (1.0, 1.5))):
        own = getattr(module, name, None)
        if not isinstance(own, float | int):
            continue
        for value in values:
            if value != own:
                made = copy.copy(module)
                setattr(made, name, value)
                yield f"a {name} of {number(value)} in the gate", made


def _experts_fitted(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    yield from _expert_variants(context)
    wrong = _wrong_experts(record)[:_SUSPECTS]
    count = context.weights[next(iter(context.weights))].shape[0]
    for first, second in combinations(wrong, 2):
        for what, names in _parts_of_experts(context):
            change = partial(_moved_expert, names, (first, second), (second, first))
            words = f"{what}experts {first} and {second} exchanged"
            yield variant_of(context, words, with_weights(change))
    for expert in wrong:
        yield from _one_expert(context, record, expert, count)


def _one_expert(
    context: ComponentContext, record: CallRecord, expert: int, count: int
) -> Iterator[FaultVariant]:
    for what, names in _parts_of_experts(context):
        for other in range(count):
            if other != expert:
                words = f"{what or 'the weights of '}expert {other} for expert {expert}"
                moved = with_weights(partial(_moved_expert, names, (expert,), (other,)))
                yield variant_of(context, words, moved)
    if _module(context).has_gate:
        for words, order in _GATE_UP_ORDERS:
            own = _in_gate_up(context, order, expert)
            yield variant_of(context, f"{words} in expert {expert}", own, expert=expert)
    chosen = record.inputs["experts"]
    alone = {**record.inputs, "experts": torch.where(chosen == expert, chosen, -1)}
    part = context.call(alone, context.weights)["out"].double()
    gap = record.outputs["out"].double() - record.expected["out"].double()
    energy = float(part.square().sum())
    if not energy:
        return
    gain = 1 + float((gap * part).sum()) / energy
    shown = [float(f"{gain:.{digits}g}") for digits in (1, 2, 3, 4)]
    for value in (*((0.0,) if abs(gain) < _NOTHING else ()), *shown):
        if value != 1:
            change = partial(_times_expert, expert, value)
            words = f"{gain_text(value)} on expert {expert}"
            yield variant_of(context, words, with_inputs(change), expert=expert, gain=value)


def _times_expert(expert: int, gain: float, inputs: Tensors) -> Tensors:
    weights = inputs["weights"]
    made = torch.where(inputs["experts"] == expert, weights.double() * gain, weights.double())
    return {**inputs, "weights": made}


def _parts_of_experts(context: ComponentContext) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield all weights of experts, then each with its bias; words for what is not all of them."""
    names = list(context.weights)
    yield "", frozenset(names)
    products = [name for name in names if not name.endswith("_bias")]
    for product in products if len(products) > 1 else ():
        own = frozenset(name for name in names if name in {product, f"{product}_bias"})
        yield f"{product.rpartition('.')[2]} of ", own


def _moved_expert(
    names: frozenset[str], places: tuple[int, ...], sources: tuple[int, ...], name: str,
    weight: Weight,
) -> Weight:  # fmt: skip
    if name not in names:
        return weight
    value = weight.values(torch.float64)
    taken = dict(zip(places, sources, strict=True))
    # One copy, since no budget follows what is written in place.
    return Weight(value=value[torch.tensor([taken.get(n, n) for n in range(len(value))])])


def _wrong_experts(record: CallRecord) -> list[int]:
    """Return the experts of which every token is wrong, and without which none is.

    Tokens that give a wrong expert little weight are hardly wrong, so lower limits are tried.
    """
    c, e = record.outputs["out"], record.expected["out"]
    if c.shape != e.shape:
        return []
    gap = (c.double() - e.double()).norm(dim=-1)
    size = torch.maximum(c.double().norm(dim=-1), e.double().norm(dim=-1))
    experts = record.inputs["experts"]
    for limit in _WRONG:
        wrong = gap > limit * size
        found: list[int] = [
            number_
            for number_ in experts[experts >= 0].unique().tolist()
            if bool(wrong[(experts == number_).any(-1)].all())
        ]
        explained = torch.isin(experts, torch.tensor(found, dtype=experts.dtype)).any(-1)
        if found and bool((~wrong | explained).all()):
            return found
    return []


# --------------------------------------------------------------------------------------------------
# Sums


def _sum_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    names = [each.name for each in context.component.inputs]
    for name in names:
        for words, factor in (("left out", 0.0), ("counted twice", 2.0), ("subtracted", -1.0)):
            change = partial(_given, name, partial(torch.mul, other=factor))
            yield variant_of(context, f"{name} {words}", with_inputs(change))


_SAME = "Compare this module with the model's definition in transformers."
_ATTENDS = of_kinds("traced.attention")

TRACED_COMPONENT_FAULTS = (
    ModelFault(
        "M29.other_scale", "Attention multiplies its logits by another number",
        "attention is too sharp or too even", "Take the scale from the model's config.",
        _ATTENDS, _scale_variants, _scales_fitted,
    ),
    ModelFault(
        "M29.cap_or_sinks", "Attention's soft cap or sinks are left out, or others",
        "weights of attention add up to another sum", _SAME, _ATTENDS, _extra_variants,
    ),
    ModelFault(
        "M29.mask", "Attention sees other tokens than it should",
        "later tokens, or those beyond the window, are mixed in", _SAME,
        _ATTENDS, _mask_variants,
    ),
    ModelFault(
        "M29.heads", "Query heads meet other heads of keys and values",
        "fluent at first, then lost: heads read what others wrote",
        "Head h of H reads head h // (H / G) of G.", _ATTENDS, _head_variants,
    ),
    ModelFault(
        "M28.frequencies", "RoPE turns by other angles", "long contexts fall apart first",
        "Take base and scaling of the angles from the model's config.",
        of_kinds("traced.rotary"), _frequency_variants, _frequencies_fitted,
    ),
    ModelFault(
        "M28.factor", "RoPE's cosines and sines have another factor",
        "logits grow or shrink by its square", "Take the factor from the scaling of the angles.",
        of_kinds("traced.rotary"), _factor_variants, _factors_fitted,
    ),
    ModelFault(
        "M28.positions", "RoPE turns by the angles of other positions", "tokens lose their order",
        "Number the tokens of every sequence from 0, across calls.",
        of_kinds("traced.rotary"), _position_variants,
    ),
    ModelFault(
        "M28.pairing", "RoPE turns other pairs, another way, or not at all",
        "attention by content works, by position does not", _SAME,
        of_kinds("traced.rotation"), _rotation_variants,
    ),
    ModelFault(
        "M26.weights", "The router weighs its experts by another rule",
        "the right experts with the wrong shares", _SAME,
        _is_choice,
        _router_variants, _router_fitted,
    ),
    ModelFault(
        "M14.experts", "Experts compute in another order, or with another gate",
        "tokens get what other experts or other halves say", _SAME,
        of_kinds("traced.experts"), _expert_variants, _experts_fitted,
    ),
    ModelFault(
        "M23.summand", "A summand is left out, doubled or subtracted", "a branch goes missing",
        "Add the branch to the residual stream once.",
        of_kinds("traced.residual"), _sum_variants,
    ),
)  # fmt: skip
