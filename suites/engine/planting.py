"""Two small models that were run once, and the proof that every family of running models owes.

A fault is planted into one component by its way, on the inputs that the healthy run gave it: what
comes out must differ, and some way that its signature proposes must make the twin give the same,
within the budget of a correct kernel. On an edge the twin must pass on what the consumer got. A
healthy sight must be explained by no way that changes anything.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext, Reach
from degarble.harness.engine.faults.regions import apart
from degarble.harness.model.components import component_named
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32
from degarble.references.model import Sequence as Remembered
from degarble.references.numerics import Numerics, switches_of
from degarble.references.weights import quantised_weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe

V4 = small_v4(
    num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), num_hash_layers=1, hidden_size=128,
    moe_intermediate_size=128, n_routed_experts=4, num_attention_heads=4, o_groups=2,
    vocab_size=128, sliding_window=12, index_topk=5, swiglu_limit=0.5,
)  # fmt: skip
V32 = small_v32(
    num_hidden_layers=2, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
    n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, vocab_size=128,
    index_topk=12,
)  # fmt: skip
CONFIGS: dict[str, Config] = {"v4": V4, "v32": V32}
PROMPTS = ((torch.arange(262) * 37 + 5) % 60, (torch.arange(19) * 11 + 3) % 60)
FIRST = slice(0, 1)
STEPS = 3  # decoded behind the prompts; the first prompt then has 265 tokens


@dataclass(frozen=True, eq=False)
class Seen:
    """One call of the healthy run."""

    step: int
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Run:
    """A healthy candidate, its twin, and every call."""

    candidate: BoundModel
    twin: BoundModel
    recipe: Recipe
    calls: Mapping[str, tuple[Seen, ...]]

    def scene(self, name: str, *, twin: bool) -> ComponentContext:
        bound = self.twin if twin else self.candidate
        return ComponentContext(
            bound, component_named(bound.config, name, self.recipe), self.recipe
        )

    @cache  # noqa: B019  a run lives as long as its process
    def expected(self, name: str, number: int) -> Mapping[str, Tensor]:
        """What the twin makes of a call of the healthy run."""
        twin = self.scene(name, twin=True)
        return twin.call(self.calls[name][number].inputs, twin.weights)

    @cache  # noqa: B019  a run lives as long as its process
    def differs(self, name: str) -> bool:
        """Whether the first call of a healthy component differs from the twin's."""
        context, seen = self.scene(name, twin=False), self.calls[name][0]
        outputs = context.call(seen.inputs, context.weights)
        record = CallRecord(seen.inputs, outputs, self.expected(name, 0), step=seen.step)
        return has_effect(self.scene(name, twin=True), record)

    def sitting(self, fault: ModelFault) -> list[str]:
        """Components where a fault can be: one of each role in each type of layer."""
        found: dict[tuple[object, ...], str] = {}
        for name in self.calls:
            context = self.scene(name, twin=False)
            block = context.component.block
            if fault.applies_to(context):
                attends = context.role.startswith("attn")
                kind = block and (block.layer_type if attends else block.mlp_type)
                found.setdefault((context.role, kind), name)
        return list(found.values())


@cache
def run(family: str) -> Run:
    """The healthy run: prompts side by side, then tokens one by one."""
    config = CONFIGS[family]
    recipe = recipe_named("nvfp4-full", config)
    weights = quantised_weights(random_weights(config, 3), config, recipe)
    switches = switches_of(f"official-{family}")
    calls: dict[str, list[Seen]] = defaultdict(list)
    number = 0

    def seen(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        calls[component].append(Seen(number, dict(inputs), dict(outputs)))

    numerics = Numerics.twin(switches, products=torch.float32)
    candidate = BoundModel(config, numerics, weights, recipe, observer=seen)
    sequences, tokens = [Remembered() for _ in PROMPTS], list(PROMPTS)
    with torch.inference_mode():
        for number in range(STEPS + 1):  # noqa: B007  the observer reads it
            # All rows: a fault that counts rows needs them behind the layers as well.
            logits = _model(candidate).forward(sequences, tokens)
            ends = torch.tensor([len(token) for token in tokens]).cumsum(0) - 1
            tokens = list(logits[ends].argmax(-1, keepdim=True))
    candidate.observer = None
    twin = BoundModel(config, Numerics.twin(switches), weights, recipe)
    return Run(candidate, twin, recipe, {name: tuple(call) for name, call in calls.items()})


def _model(bound: BoundModel) -> ModelV4 | ModelV32:
    return ModelV4(bound, V4) if bound.config is V4 else ModelV32(bound, V32)


def sights(
    fault: ModelFault, run: Run, name: str, variant: FaultVariant | None, calls: slice = slice(None)
) -> list[CallRecord]:
    """What a candidate with a way (or a healthy one) does there in some calls."""
    context, twin = run.scene(name, twin=False), run.scene(name, twin=True)
    records: list[CallRecord] = []
    on_edge = fault.reach is Reach.EDGE
    passing = variant.apply(lambda given, _weights: given) if variant and on_edge else None
    call = variant.apply(context.call) if variant and not on_edge else context.call
    spies = {
        other: wrap(run.scene(other, twin=False).call)
        for other, wrap in (variant.companions if variant else {}).items()
    }
    for number in range(len(run.calls[name]))[calls]:
        seen = run.calls[name][number]
        for other, spy in spies.items():
            for each in run.calls[other]:
                if each.step == seen.step:
                    spy(each.inputs, run.scene(other, twin=False).weights)
        inputs = passing(seen.inputs, context.weights) if passing else seen.inputs
        outputs = call(inputs, context.weights)
        expected = twin.call(inputs, twin.weights) if passing else run.expected(name, number)
        implied = dict(seen.inputs) if on_edge else {}
        others = elsewhere(run, context, seen.step) if on_edge else {}
        record = CallRecord(
            inputs, outputs, expected, implied, seen.step, tuple(records), elsewhere=others
        )
        records.append(record)
    return records


def elsewhere(run: Run, context: ComponentContext, step: int) -> dict[int, Mapping[str, Tensor]]:
    """What the same component of other layers was given in a step."""
    found: dict[int, Mapping[str, Tensor]] = {}
    for name, calls in run.calls.items():
        other, layer = run.scene(name, twin=False).component, context.component.layer
        if other.role == context.role and other.layer is not None and other.layer != layer:
            found[other.layer] = next(call.inputs for call in calls if call.step == step)
    return found


def reproduces(context: ComponentContext, variant: FaultVariant, record: CallRecord) -> bool:
    """Whether the twin with a way gives what the candidate gave."""
    if record.implied:
        passed = variant.passed_on(record.implied, context.weights)
        return set(passed) == set(record.inputs) and all(
            same(passed[name], tensor) for name, tensor in record.inputs.items()
        )
    made = _made(context, variant, record)
    # A way may make sums larger than those that its budget is derived from here.
    return made is not None and (_equals(record, made) or within(context, record, made))


def _made(
    context: ComponentContext, variant: FaultVariant, record: CallRecord
) -> Mapping[str, Tensor] | None:
    """What the twin with a way makes, if it has the names and shapes of the candidate's outputs."""
    made = dict(variant.apply(context.call)(record.inputs, context.weights))
    shapes = {name: tensor.shape for name, tensor in made.items()}
    return made if shapes == {n: output.shape for n, output in record.outputs.items()} else None


def _equals(record: CallRecord, made: Mapping[str, Tensor]) -> bool:
    """Whether no number is apart; far cheaper than a judgement."""
    return not any(bool(apart(record.outputs[n], tensor).any()) for n, tensor in made.items())


def same(left: Tensor, right: Tensor) -> bool:
    """Equal shapes and values; a NaN equals itself."""
    return left.shape == right.shape and bool(
        torch.equal(torch.nan_to_num(left.double()), torch.nan_to_num(right.double()))
        and torch.equal(left.isnan(), right.isnan())
    )


def within(context: ComponentContext, record: CallRecord, made: Mapping[str, Tensor]) -> bool:
    """Within the budget of a correct kernel, where there is one; else no more than roundings."""
    made = {name: tensor.to(record.outputs[name].dtype) for name, tensor in made.items()}
    call = JudgeableCall.from_twin(context.bound, context.name, record.inputs, made)
    try:
        judged = judge_outputs(call, record.outputs)
    except InvalidArgument:  # what a way makes is beyond float32
        return all(few_apart(record.outputs[name], tensor) for name, tensor in made.items())
    return all(
        few_apart(record.outputs[name], made[name])
        if result.verdict is Verdict.UNDECIDED
        else result.verdict is Verdict.AGREES
        for name, result in judged.items()
    )


def few_apart(candidate: Tensor, expected: Tensor) -> bool:
    """No more than one number in 200 apart, as codes on the edge of rounding are."""
    if candidate.is_floating_point() and candidate.dtype.itemsize > 1:
        kinds = [
            (tensor.isnan(), tensor.isposinf(), tensor.isneginf())
            for tensor in (candidate, expected)
        ]
        if not all(torch.equal(*pair) for pair in zip(*kinds, strict=True)):
            return False
    return candidate.numel() == 0 or float(apart(candidate, expected).double().mean()) <= 0.005


def has_effect(context: ComponentContext, record: CallRecord) -> bool:
    """Whether a candidate is not healthy: an input is another one, or outputs are."""
    if record.implied:
        return any(not same(record.implied[n], tensor) for n, tensor in record.inputs.items())
    if any(output.shape != record.expected[n].shape for n, output in record.outputs.items()):
        return True
    return not within(context, record, record.expected)


def explains_all(context: ComponentContext, variant: FaultVariant, record: CallRecord) -> bool:
    """As reproduces; and no number is apart, for choices and codes are judged by their inputs."""
    if record.implied:
        return reproduces(context, variant, record)
    made = _made(context, variant, record)
    return made is not None and _equals(record, made) and within(context, record, made)


@dataclass(frozen=True)
class Outcome:
    """One way at one place: on how many calls it had an effect, on how many it was explained."""

    name: str
    words: str
    effects: int
    explained: int


def outcomes(
    fault: ModelFault, run: Run, name: str, variants: Sequence[FaultVariant], most: int
) -> Iterator[Outcome]:
    """Plant ways of a fault at one component, and ask its signature about each."""
    twin = run.scene(name, twin=True)
    for variant in variants:
        # Tokens that are decoded are the cheaper ones; the prompt is asked where they say nothing.
        for calls in (slice(-2, None), slice(None)):
            records = sights(fault, run, name, variant, calls)
            told = list(islice((s for s in reversed(records) if has_effect(twin, s)), most))
            if len(told) == most:
                break
        explained = [any(reproduces(twin, w, s) for w in fault.signature(twin, s)) for s in told]
        yield Outcome(name, variant.words, len(told), sum(explained))


def shown(fault: ModelFault, family: str, most: int = 1, few: int | None = None) -> list[Outcome]:
    """Every way at one component of each role, or `few` ways at `few` components."""
    made, found = run(family), []
    names = made.sitting(fault)
    with torch.inference_mode():
        for number, name in enumerate(_spread(names, few)):
            variants = list(fault.variants(made.scene(name, twin=False)))
            turned = variants[number:] + variants[:number]  # other places, other ways first
            found += list(outcomes(fault, made, name, _spread(turned, few), most))
    return found


def _spread(items: list[Any], few: int | None) -> list[Any]:
    """Some of many, over their whole length."""
    if few is None or len(items) <= few:
        return items
    return [items[number * len(items) // few] for number in range(few)]


def prove(fault: ModelFault, family: str, most: int = 1, few: int | None = None) -> None:
    """Every way that has an effect is explained wherever it has one; each place knows one."""
    found = shown(fault, family, most, few)
    missed = [outcome for outcome in found if outcome.explained < outcome.effects]
    assert not missed, "\n".join(map(str, missed))
    silent = {outcome.name for outcome in found} - {
        outcome.name for outcome in found if outcome.effects
    }
    assert not silent or (few and len(silent) < len({outcome.name for outcome in found})), (
        f"no way of {fault.id} has an effect at {silent}"
    )


def cases(faults: Sequence[ModelFault]) -> list[Any]:
    """Each fault with each family in which it can be."""
    return [
        pytest.param(fault, family, id=f"{fault.id} {family}")
        for fault in faults
        for family in CONFIGS
        if any(fault.applies_to(context) for context in _all_scenes(family))
    ]


@cache
def _all_scenes(family: str) -> tuple[ComponentContext, ...]:
    """Every scene of a model without weights: enough to say where a fault can be."""
    config = CONFIGS[family]
    recipe = recipe_named("nvfp4-full", config)
    bound = BoundModel(config, Numerics.twin(switches_of(f"official-{family}")), {}, recipe)
    return tuple(
        ComponentContext(bound, component_named(config, name, recipe), recipe)
        for name in bound.calls
    )


def alarms(fault: ModelFault, family: str, few: int | None = None) -> list[str]:
    """Proposals of a signature about healthy calls that differ from the twin and yet explain."""
    made, found = run(family), []
    with torch.inference_mode():
        for name in _spread(made.sitting(fault), few):
            twin, record = made.scene(name, twin=True), sights(fault, made, name, None, FIRST)[0]
            assert not (has_effect(twin, record) if record.implied else made.differs(name)), name
            for way in _spread(list(fault.signature(twin, record)), few):
                planted = sights(fault, made, name, way, FIRST)[0]
                if explains_all(twin, way, record) and has_effect(twin, planted):
                    found.append(f"{name}: {way.words}")
    return found
