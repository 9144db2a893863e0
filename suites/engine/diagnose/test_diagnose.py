"""Causes by reproduction: named where a fault was planted, none where nothing explains all."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.diagnose import diagnose as diagnosing
from degarble.harness.engine.diagnose.diagnose import call_by_call, diagnose, with_earlier
from degarble.harness.engine.faults.model_faults import (
    CallRecord,
    FaultVariant,
    ModelFault,
    Reach,
    from_variants,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS, model_fault_named
from degarble.harness.engine.localise.localise import localise
from degarble.harness.museum.cases import equal
from degarble.suites.campaigns.hidden_faults import in_calls, on_sequence
from degarble.suites.engine import planting
from degarble.suites.engine.diagnosing import FAULTS, Double, double
from degarble.suites.engine.planting import has_effect, run, sights
from degarble.suites.museum.museum_stages import small_stage
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.diagnose.diagnose import Diagnosed, NamedFault
    from degarble.harness.engine.faults.model_faults import ComponentContext


# --------------------------------------------------------------------------------------------------
# Causes by reproduction: named where a fault was planted, and nothing where it is unknown.

ROLES = (
    "attn.wq_a", "attn.compressor.proj", "attn.wo_a", "ffn.gate", "ffn.experts.w13",
    "ffn.experts.w2", "ffn.shared.w13", "attn.wq_a.act_quant", "ffn.experts.act_quant",
    "attn.kv_write", "attn.norm",
)  # fmt: skip


def component(model: Double, role: str) -> str:
    """The second component of a role, or the only one."""
    found = [name for name in model.calls if model.naming(name).role == role]
    return found[min(1, len(found) - 1)]


def asked(
    model: Double, name: str, variant: FaultVariant, known: tuple[ModelFault, ...] = FAULTS
) -> Diagnosed | None:
    """What is said about a planted way; None where it has no effect."""
    records = model.sights(name, variant)
    return diagnose(model.naming(name), records, known) if model.differs(name, records) else None


def crossing(per_role: int) -> list[tuple[str, str]]:
    """Faults to plant in each role; all of them where a role has no more."""
    model, found = double("v4", "nvfp4-full"), []
    for role in ROLES:
        context = model.planting(component(model, role))
        sitting = [fault.id for fault in FAULTS if fault.applies_to(context)]
        chosen = random.Random(role).sample(sitting, min(per_role, len(sitting)))
        found += [(role, each) for each in chosen]
    return found


DEAR = {"M19.mxfp4", "M17.first_half", "O01.twos_complement"}


@pytest.mark.parametrize(
    ("role", "name"),
    [
        pytest.param(*case, marks=pytest.mark.slow if number % 2 or case[1] in DEAR else ())
        for number, case in enumerate(crossing(2))
    ],
)
def test_what_was_planted_is_named(role: str, name: str) -> None:
    model = double("v4", "nvfp4-full")
    place, fault = component(model, role), MODEL_FAULTS[name]
    variants = list(fault.variants(model.planting(place)))
    for variant in random.Random(name).sample(variants, min(2, len(variants))):
        found = asked(model, place, variant)
        if found is None:
            continue  # without effect here
        assert found.named, (variant.words, found.sentence)
        assert name in {found.named[0].id, *found.named[0].alternatives}, found.sentence
        assert found.named[0].reproduced > 0.99
        without = tuple(
            model_fault for model_fault in FAULTS if model_fault.family not in _families(found)
        )
        unknown = asked(model, place, variant, without)
        assert unknown is not None
        assert not unknown.named, (variant.words, unknown.sentence)
        assert "No known fault explains this" in unknown.sentence


def _families(found: Diagnosed) -> set[str]:
    """Every family that explains it: what one cannot tell apart is one cause."""
    return {fault.family for cause in found.named for fault in cause.faults}


@pytest.mark.slow  # every fault in every component of every recipe: half an hour
@pytest.mark.parametrize("recipe", ["nvfp4-full", "nvfp4-experts"])
@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("fault", [fault.id for fault in FAULTS])
def test_every_fault_is_named_wherever_it_has_an_effect(
    fault: str, family: str, recipe: str
) -> None:
    model = double(family, recipe)
    wrong = []
    for place in model.calls:
        if not MODEL_FAULTS[fault].applies_to(model.planting(place)):
            continue
        for variant in MODEL_FAULTS[fault].variants(model.planting(place)):
            if fault == "M13.slot_beside" and not any(
                record.outputs["out"].any() for record in model.sights(place, variant)
            ):
                continue  # an empty slot beside it is no evidence: see the test of zeros below
            found = asked(model, place, variant)
            known = found and found.named and {found.named[0].id, *found.named[0].alternatives}
            if found is not None and fault not in (known or ()):
                wrong.append(f"{place}: {variant.words}: {found.sentence}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("recipe", "place", "fault", "words"),
    [
        # Sums that cancel are all rounding: the sample was chosen by them, not by the fault.
        ("nvfp4-full", "layers.2.ffn.experts.w2", "O02.product_in_fp16", "2.w2, rows 64 to 127"),
        # Half of the outputs is nearly nothing: whoever has the other half right seemed as near.
        ("nvfp4-experts", "layers.0.attn.wo_a", "O08.scales_stale", "rows 128 to 255"),
        ("nvfp4-experts", "layers.0.attn.wo_a", "O09.byte", "rows 128 to 255"),
        # Where every expert is visited, the one visited before is the one before.
        ("nvfp4-full", "layers.0.ffn.experts.w13", "M12.visited_before", ""),
        # All blocks are clipped, so that the right scales are all the largest.
        ("nvfp4-full", "layers.0.ffn.shared.w2.act_quant", "M02.another", "0.01"),
        ("nvfp4-full", "layers.0.ffn.shared.w2.act_quant", "M02.another", "1.0"),
    ],
)
def test_what_is_small_is_named_as_well(recipe: str, place: str, fault: str, words: str) -> None:
    model = double("v4", recipe)
    variants = MODEL_FAULTS[fault].variants(model.planting(place))
    variant = next(fault_variant for fault_variant in variants if words in fault_variant.words)
    found = asked(model, place, variant)
    assert found is not None
    assert fault in {found.named[0].id, *found.named[0].alternatives}, found.sentence


def test_a_faint_fault_is_named_among_healthy_roundings() -> None:
    model, place = double("v4", "nvfp4-full"), "layers.2.ffn.experts.w13"
    fault = MODEL_FAULTS["O02.product_in_fp16"]
    variants = fault.variants(model.planting(place))
    variant = next(
        fault_variant for fault_variant in variants if "2.w1, rows 24 to 31" in fault_variant.words
    )
    (record,) = model.sights(place, variant, calls=1)
    codes = record.outputs["out"].view(torch.int16).clone()
    codes[::32, :, 100] += 1  # by one spacing
    rounded = replace(record, outputs={"out": codes.view(torch.bfloat16)})
    context = model.naming(place)
    assert diagnose(context, rounded, FAULTS).named[0].id == fault.id
    expected = codes.view(torch.bfloat16).where(
        torch.arange(codes.shape[-1]) == 100, record.expected["out"]
    )
    healthy = diagnose(context, replace(record, outputs={"out": expected}), FAULTS)
    assert not healthy.named, healthy.sentence


def test_a_gain_from_elsewhere_is_reported_to_the_bit_and_after_it() -> None:
    """A scale more in half of a weight's rows is a gain on a tile: the weight is told first."""
    model, place = double("v32", "nvfp4-full"), "layers.0.attn.wo"
    variants = MODEL_FAULTS["O10.multiplied"].variants(model.planting(place))
    variant = next(
        fault_variant for fault_variant in variants if "rows 64 to 127" in fault_variant.words
    )
    found = asked(model, place, variant, tuple(MODEL_FAULTS.values()))
    assert found is not None
    assert found.named[0].id == "O10.multiplied"
    assert "M43.one_tile" in found.named[0].alternatives
    records = model.sights(place, variant)
    gain = diagnose(model.naming(place), records, [MODEL_FAULTS["M43.one_tile"]]).named[0].variant
    for record in records:
        made = gain.apply(model.naming(place).call)(record.inputs, model.naming(place).weights)
        same = made["out"].to(record.outputs["out"].dtype) == record.outputs["out"]
        assert float(same.double().mean()) > 0.999


def test_two_faults_of_the_same_numbers_are_reported_together() -> None:
    """The scale of activations once more is a factor; roundings alone tell which side it was on."""
    model = double("v4", "nvfp4-full")
    place = "layers.0.attn.wo_b"
    for name, also in (
        ("M02.activation_twice", "O10.multiplied"),
        ("O10.multiplied", "M02.activation_twice"),
    ):
        variant = next(MODEL_FAULTS[name].variants(model.planting(place)))
        found = asked(model, place, variant)
        assert found is not None
        assert {name, also} <= {found.named[0].id, *found.named[0].alternatives}, found.sentence


@pytest.mark.parametrize("whole", [True, False])
def test_a_way_that_needs_the_whole_call_is_tried_on_it(whole: bool) -> None:
    """Who visits whom is another question where experts are left out of a sample."""
    model = double("v4", "nvfp4-experts")
    place, fault = "layers.0.ffn.experts.w13", MODEL_FAULTS["M12.visited_before"]

    def ways(context: ComponentContext, _record: CallRecord) -> Iterator[FaultVariant]:
        return (replace(variant, needs_whole_call=whole) for variant in fault.variants(context))

    known = (MODEL_FAULTS["M12.previous_expert"], replace(fault, signature=ways))
    before = next(fault.variants(model.planting(place)))
    found = diagnose(model.naming(place), model.sights(place, before, calls=1), known)
    told = {found.named[0].id, *found.named[0].alternatives}
    assert told == {"M12.previous_expert", *([fault.id] if whole else [])}


def test_a_call_of_a_rank_that_holds_none_of_its_experts_hides_no_cause() -> None:
    model = double("v4", "nvfp4-full")
    place = "layers.1.ffn.experts.w13"
    (record,) = model.sights(place, None, calls=1)
    experts = record.inputs["experts"].clone()
    experts[-1] = -1
    inputs, gain = {**record.inputs, "experts": experts}, 1.5
    planted, twin = model.planting(place), model.naming(place)
    outputs = {"out": planted.call(inputs, planted.weights)["out"] * gain}
    rows = (len(experts) - 1, 1)
    expected = dict(twin.call(inputs, twin.weights))
    known = [fault for fault in MODEL_FAULTS.values() if fault.family in {"M16", "M43"}]
    found = diagnose(twin, [CallRecord(inputs, outputs, expected, rows=rows)], known)
    assert found.named[0].id == "M43.whole", found.sentence


@pytest.mark.parametrize("role", ["head", "attn.compressor.proj", "ffn.experts.w13"])
@pytest.mark.parametrize("lacks", ["row", "column", "all"])
def test_outputs_of_other_extents_have_no_known_cause(role: str, lacks: str) -> None:
    """Many faults look where an output differs, and there is no such place in these."""
    model = double("v4", "nvfp4-full")
    place = component(model, role)
    (record,) = model.sights(place, None, calls=1)
    cut = {"row": lambda x: x[:-1], "column": lambda x: x[..., :-1]}
    outputs = {n: cut[lacks](x) for n, x in record.outputs.items() if lacks in cut}
    found = diagnose(model.naming(place), [replace(record, outputs=outputs)])
    assert not found.named
    assert "No known fault explains this" in found.sentence


def test_a_fault_that_breaks_on_what_it_could_look_at_is_our_mistake() -> None:
    model = double("v4", "nvfp4-full")
    place = component(model, "attn.wq_a")
    fault = MODEL_FAULTS["M41.tile_of_k"]

    def broken(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        raise KeyError(context.name + str(record.step))

    variant = next(iter(fault.variants(model.planting(place))))
    with pytest.raises(KeyError):
        asked(model, place, variant, (replace(fault, signature=broken),))


def test_a_cause_quotes_its_figures() -> None:
    model = double("v4", "nvfp4-full")
    place = component(model, "ffn.experts.w2")
    variant = next(MODEL_FAULTS["M10.nibble_order"].variants(model.planting(place)))
    found = asked(model, place, variant)
    assert found is not None
    assert found.named[0].id == "M10.nibble_order"
    assert f"a nibble swap on {place}" in found.sentence
    assert "reproduces 100.0 % of outputs within budget" in found.sentence
    assert found.named[0].as_stored < 0.2
    assert found.tried > 50
    left = [excluded.left for excluded in found.excluded]
    assert left == sorted(left)
    assert all(excluded.fault != "M10.nibble_order" for excluded in found.excluded)


def _noise(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out = outputs["out"]
    sign = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).sign()
    return {"out": (out * (1 + 0.2 * sign)).to(out.dtype)}


def _shifted(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"out": outputs["out"] + outputs["out"].roll(3, -1) / 3}


def _clipped(_inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out = outputs["out"]
    return {"out": out.clamp(min=-float(out.float().std()))}


@pytest.mark.parametrize(
    ("role", "damage"),
    [
        pytest.param(role, damage, marks=() if n == m else pytest.mark.slow)
        for n, role in enumerate(("attn.wq_a", "ffn.experts.w2", "attn.norm"))
        for m, damage in enumerate((_shifted, _clipped, _noise))
    ],
)
def test_unknown_damage_has_no_name(role: str, damage: Any) -> None:
    model = double("v4", "nvfp4-full")
    place = component(model, role)
    found = asked(model, place, FaultVariant("from outside", with_outputs(damage)), FAULTS)
    assert found is not None
    assert not found.named, found.sentence
    assert "No known fault explains this: " in found.sentence
    assert "of the difference" in found.sentence


def test_pairs_count_among_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = double("v4", "nvfp4-full"), list[Any]()
    real = diagnosing._pairs
    damage = FaultVariant("from outside", with_outputs(_noise))

    def kept(*given: Any) -> list[Any]:
        pairs.extend(real(*given))
        return pairs

    with monkeypatch.context() as patch:
        patch.setattr(diagnosing, "_pairs", kept)
        both = asked(model, component(model, "attn.wq_a"), damage, FAULTS)
    monkeypatch.setattr(diagnosing, "_pairs", lambda *_given: ())
    single = asked(model, component(model, "attn.wq_a"), damage, FAULTS)
    assert both is not None
    assert single is not None
    assert both.tried - single.tried == len(pairs) > 0
    assert f"{both.tried} " in both.sentence


@pytest.mark.parametrize(
    ("role", "first", "second"),
    [
        ("attn.wq_a", "M10.nibble_order", "M01.inverse"),
        ("attn.wq_a", "M11.transposed", "M02.activation_missing"),
        ("ffn.experts.w2", "O01.magnitudes", "M02.missing"),
    ],
)
def test_two_faults_at_once(role: str, first: str, second: str) -> None:
    model = double("v4", "nvfp4-full")
    place = component(model, role)
    a, b = (next(MODEL_FAULTS[name].variants(model.planting(place))) for name in (first, second))
    found = asked(model, place, FaultVariant("both", lambda call: b.apply(a.apply(call))))
    assert found is not None
    assert len(found.named[0].faults) == 2, found.sentence
    names = {found.named[0].id, *found.named[0].alternatives}
    assert names & {f"{first} + {second}", f"{second} + {first}"}, found.sentence


def test_a_way_has_to_explain_every_call() -> None:
    """The other call healthy: the answer says so. Damaged in another way: there is no answer."""
    model = double("v4", "nvfp4-full")
    place = component(model, "attn.wq_a")
    variant = next(MODEL_FAULTS["M10.nibble_order"].variants(model.planting(place)))
    damaged, healthy = model.sights(place, variant)[0], model.sights(place, None)[1]
    assert diagnose(model.naming(place), [damaged], FAULTS).named
    found = diagnose(model.naming(place), [damaged, healthy], FAULTS)
    assert found.named[0].id == "M10.nibble_order"
    assert found.named[0].evidence.endswith("in 1 of 2 calls, the others are healthy")
    out = healthy.outputs["out"]
    odd = replace(healthy, outputs={"out": out.roll(1, -1)})
    found = diagnose(model.naming(place), [damaged, odd], FAULTS)
    assert not found.named, found.sentence


def test_what_the_last_row_of_a_tile_reads_may_be_anything() -> None:
    """It reads the next stage, which may not have arrived: no two runs need agree there."""
    model = double("v4", "nvfp4-full")
    place = component(model, "attn.wq_b")
    variants = MODEL_FAULTS["M12.chunk_behind"].variants(model.planting(place))
    (record,) = model.sights(place, next(variants), calls=1)
    out = record.outputs["out"].clone()
    assert out.shape[-1] > 64
    out[:, 63::64] = out[:, 63::64].roll(1, 0) + 1
    found = diagnose(model.naming(place), replace(record, outputs={"out": out}), FAULTS)
    assert found.named, found.sentence
    assert found.named[0].id == "M12.chunk_behind"
    out[:, 62::64] += 1
    found = diagnose(model.naming(place), replace(record, outputs={"out": out}), FAULTS)
    assert not found.named, found.sentence


QUICK = {"attn.wq_a", "ffn.gate", "ffn.experts.act_quant", "attn.kv_write", "attn.norm"}


@pytest.mark.parametrize(
    "role",
    [pytest.param(role, marks=() if role in QUICK else pytest.mark.slow) for role in ROLES],
)
def test_a_healthy_sight_has_no_cause(role: str) -> None:
    model = double("v4", "nvfp4-full")
    place = component(model, role)
    found = diagnose(model.naming(place), model.sights(place, None), FAULTS)
    assert not found.named, (role, found.sentence)


def _edge(words: str, change: Any) -> ModelFault:
    def ways(_context: ComponentContext) -> Iterator[FaultVariant]:
        yield FaultVariant(words, with_inputs(change))

    title = "An input is another one"
    return ModelFault(
        f"M99.{words}", title, "", "", lambda _context: True, ways, from_variants(ways), Reach.EDGE
    )


def test_on_an_edge_what_arrives_is_reproduced() -> None:
    model = double("v4", "nvfp4-full")
    place = component(model, "attn.norm")
    halved = _edge("halved", lambda inputs: {**inputs, "x": inputs["x"] / 2})
    turned = _edge("turned", lambda inputs: {**inputs, "x": inputs["x"].roll(1, 0)})
    context = model.naming(place)
    healthy = model.sights(place, None)[0]
    received = dict(next(halved.variants(context)).passed_on(healthy.inputs, context.weights))
    record = CallRecord(received, healthy.outputs, healthy.expected, healthy.inputs)
    found = diagnose(context, record, (turned, halved, *FAULTS))
    assert [fault.id for fault in found.named] == ["M99.halved"]
    assert found.named[0].reproduced == 1
    assert not diagnose(context, record, (turned, *FAULTS)).named


# --------------------------------------------------------------------------------------------------
# Faults of behaviour among all others: named first, or as one that explains equally well.
#
# What two faults do to the data may be the same: a cache's value scale and a gain of attention, a
# sum taken twice and a gain of 2. Then both are named. A cause that is not the planted one and is
# not named together with it is wrong.

MINE = {
    "M21", "M23", "M24", "M25", "M26", "M27", "M28", "M29", "M30", "M31", "M32", "M34", "M35",
    "M36", "M37", "M40", "M41", "M43", "O20", "O21", "O22", "O23",
}  # fmt: skip
DIAGNOSE_BEHAVIOUR_FAULTS = [fault for fault in MODEL_FAULTS.values() if fault.family in MINE]
FIRST = [
    next(f for f in DIAGNOSE_BEHAVIOUR_FAULTS if f.family == family) for family in sorted(MINE)
]
ASKED = 0.95  # of what is planted at every place: told, first or beside


def told(fault_id: str, family: str, few: int) -> list[tuple[bool, bool, str]]:
    """For each planted way: whether it is named first, whether it is told at all, and words."""
    fault, made = MODEL_FAULTS[fault_id], planting.run(family)
    found = []
    with torch.inference_mode():
        for number, name in enumerate(planting._spread(made.sitting(fault), few)):
            variants = list(fault.variants(made.scene(name, twin=False)))
            variant = variants[(number * 3 + 1) % len(variants)]
            twin = made.scene(name, twin=True)
            seen = [
                record
                for record in planting.sights(fault, made, name, variant)
                if planting.has_effect(twin, record)
            ]
            if not seen:
                continue
            named = diagnose(twin, seen).named
            ids = [named_fault.id for named_fault in named]
            beside = {other for named_fault in named for other in named_fault.alternatives}
            words = f"{fault.id} at {name}, {variant.words}: {ids}"
            found.append((ids[:1] == [fault.id], fault.id in {*ids, *beside}, words))
    return found


@pytest.mark.parametrize("fault", thinned(FIRST), ids=lambda each: each.id)
def test_one_fault_of_each_family_is_reported(fault: ModelFault) -> None:
    family = next(f for f in planting.CONFIGS if planting.run(f).sitting(fault))
    found = told(fault.id, family, few=1)
    assert found, "it has an effect"
    assert all(known for _, known, _ in found), found


@pytest.mark.slow
def test_planted_faults_are_named_at_nearly_every_place() -> None:
    found = [
        each
        for fault in DIAGNOSE_BEHAVIOUR_FAULTS
        for family in planting.CONFIGS
        for each in told(fault.id, family, 2)
    ]
    missed = [words for _, known, words in found if not known]
    assert len(missed) <= (1 - ASKED) * len(found), "\n".join(missed)
    first = sum(each[0] for each in found)
    assert first >= 0.9 * len(found), f"{first} of {len(found)} named first"


def test_a_row_of_zeros_is_no_evidence_of_a_shift_by_one_slot() -> None:
    made = planting.run("v4")
    fault, name = MODEL_FAULTS["M13.slot_beside"], "layers.2.attn.compressor.write"
    context = made.scene(name, twin=True)

    def lost(call: Any) -> Any:
        return lambda inputs, weights: {"out": torch.zeros_like(call(inputs, weights)["out"])}

    with torch.inference_mode():
        assert fault.applies_to(context)
        seen = planting.sights(fault, made, name, FaultVariant("zeros", lost))
        records = [record for record in seen if planting.has_effect(context, record)]
        assert records, "rows were written"
        assert not any(list(fault.signature(context, record)) for record in records)


# --------------------------------------------------------------------------------------------------
# A known fault that acts in one phase, call or sequence is named, and `where` says which.

if TYPE_CHECKING:
    Where = Mapping[str, str | int | float]

SCALING, GAIN, LOGITS = (
    ("M27.left_out", "ffn.experts.combine"),
    ("M43.whole", "attn.wq_b"),
    ("M29.scale", "attn.attend"),
)
SLOW = pytest.mark.slow


def answer(fault: str, place: str, part: str) -> tuple[Where, tuple[NamedFault, ...]]:
    """Plant the first way of a fault in a part of a run; where it is found, and its causes."""
    stage, name = small_stage(), f"layers.1.{place}"
    (variant, *_) = MODEL_FAULTS[fault].variants(stage.context(name, stage.candidate()))
    first, second = (stage.healthy.inputs(call) for call in stage.calls[name][:2])

    def in_prefill(inputs: Mapping[str, Tensor]) -> bool:
        return equal(inputs, first)

    hidden: FaultVariant = {
        "prefill": lambda: in_calls(variant, in_prefill),
        "decode": lambda: in_calls(variant, lambda inputs: not in_prefill(inputs)),
        "step": lambda: in_calls(variant, lambda inputs: equal(inputs, second)),
        "sequence": lambda: on_sequence(variant, 1, stage.case.lengths),
    }[part]()
    candidate = stage.taped()
    candidate.calls[name] = hidden.apply(stage.candidate().calls[name])
    (origin,) = localise(
        stage.twin, stage.model.recipe, stage.rest(stage.run(candidate))
    ).origins  # fmt: skip
    assert origin.component == name
    assert origin.record is not None
    return origin.where, diagnose(origin.context, (origin.record, *origin.more)).named


@pytest.mark.parametrize(
    ("planted", "part"),
    [
        (SCALING, "prefill"),
        (LOGITS, "decode"),
        pytest.param(GAIN, "prefill", marks=SLOW),
        pytest.param(GAIN, "decode", marks=SLOW),
    ],
)
def test_a_fault_of_one_phase_is_named(planted: tuple[str, str], part: str) -> None:
    where, named = answer(*planted, part)
    assert where["phase"] == part
    assert named[0].id == planted[0]


@pytest.mark.parametrize("planted", [GAIN, pytest.param(LOGITS, marks=SLOW)])
def test_a_fault_of_one_sequence_is_named(planted: tuple[str, str]) -> None:
    where, named = answer(*planted, "sequence")
    assert where["sequence"] == "1"
    assert named[0].id == planted[0]
    assert "only on sequence 1 (or only on sequences of up to 9 tokens" in named[0].evidence


@pytest.mark.parametrize("planted", [SCALING, pytest.param(LOGITS, marks=SLOW)])
def test_a_fault_of_one_step_is_named(planted: tuple[str, str]) -> None:
    where, named = answer(*planted, "step")
    assert where["step"] == 1
    assert named[0].id == planted[0]


# --------------------------------------------------------------------------------------------------
# Damage that is another one in every call is named call by call; one call unexplained is none.

NAME = "layers.1.attn.wo_b"


def spoilt(fault_id: str, way: int, name: str = NAME) -> list[CallRecord]:
    """The calls of a run with one way of a fault in which it has an effect."""
    made, fault = run("v4"), model_fault_named(fault_id)
    context = made.scene(name, twin=False)
    with torch.inference_mode():
        records = sights(fault, made, name, list(fault.variants(context))[way])
        return [record for record in records if has_effect(made.scene(name, twin=True), record)]


@pytest.mark.parametrize(
    ("fault_id", "way"), [("M37.tile", 1), ("M37.tile", 4), ("M36.workspace", 0)]
)
def test_a_race_is_named_though_every_call_has_another_tile(fault_id: str, way: int) -> None:
    records = spoilt(fault_id, way)
    assert len(records) > 1
    context = run("v4").scene(NAME, twin=True)
    named = diagnose(context, records).named
    assert named[0].id == fault_id
    assert "each by itself" in named[0].evidence


def test_one_call_that_is_not_explained_leaves_none() -> None:
    records = spoilt("M37.tile", 1)
    last = records[-1].outputs["out"]
    odd = last + torch.randn(last.shape, generator=torch.Generator().manual_seed(1)) * last.std()
    other = replace(records[-1], outputs={"out": odd.to(last.dtype)})
    context = run("v4").scene(NAME, twin=True)
    with torch.inference_mode():
        assert list(call_by_call(context, records, MODEL_FAULTS.values()))
        assert not list(call_by_call(context, [*records[:-1], other], MODEL_FAULTS.values()))


def test_healthy_calls_and_whole_run_faults_are_not_searched_call_by_call() -> None:
    made = run("v4")
    fault, context = model_fault_named("M37.tile"), made.scene(NAME, twin=True)
    with torch.inference_mode():
        healthy = sights(fault, made, NAME, None)
        assert not list(call_by_call(context, healthy, MODEL_FAULTS.values()))
        plain = [model_fault for model_fault in MODEL_FAULTS.values() if not model_fault.per_call]
        assert not list(call_by_call(context, spoilt("M37.tile", 1), plain))


def test_calls_know_those_before_them() -> None:
    known = [CallRecord({}, {"out": torch.zeros(1)}, {}, step=step) for step in (3, 1, 2)]
    ordered = with_earlier(known)
    assert [record.step for record in ordered] == [1, 2, 3]
    assert [[other.step for other in record.earlier] for record in ordered] == [[], [1], [1, 2]]
