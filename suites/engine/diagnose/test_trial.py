"""Trials of one variant: its sample, its distance from the candidate, sums beyond float32."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose import trial
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.overflow import beyond_float32
from degarble.harness.engine.diagnose.trial import (
    CODES_UNLIKE,
    COLUMNS,
    WINDOW,
    _within_spacings,
    beginning,
    calls_in,
    distance,
    explained,
    few_rows_exclude,
    make,
    most_telling,
    only_roundings,
    proof,
    proposed,
    sampled,
    shape_distance,
    together,
)
from degarble.harness.engine.faults.model_faults import (
    CallRecord,
    FaultVariant,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.faults.weight_faults import numbers_of
from degarble.harness.formats.weight import Weight
from degarble.suites.engine.diagnosing import double
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.engine.diagnose.trial import VariantFit


PLACE = "layers.1.attn.wq_a"
TOPK = "layers.1.ffn.topk"
NOTHING = FaultVariant("nothing", lambda call: call)
MANY = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
ONE = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


@pytest.mark.parametrize(
    ("made", "least", "most"),
    [
        (ONE, 0, 0),
        (ONE * 1.001, 1e-4, 1e-3),
        (-ONE, 1, 1),
        (ONE * 1e6, 0.99, 1),
        (ONE.masked_fill(ONE > 0.9, torch.nan), 1 / 12, 1),
        (ONE[:2], 2, 2),
    ],
)
def test_distance_has_no_unit(made: torch.Tensor, least: float, most: float) -> None:
    assert least <= distance({"out": ONE}, {"out": made}) <= most


def test_equal_values_that_are_no_numbers_are_equal() -> None:
    odd = ONE.clone()
    odd[0, 0], odd[1, 1] = torch.nan, torch.inf
    assert distance({"out": odd}, {"out": odd.clone()}) == 0
    assert distance({"out": odd}, {"out": ONE}) > 0.1
    assert distance({"codes": torch.tensor([1, 2])}, {"codes": torch.tensor([1, 3])}) == 0.5


def test_choices_are_compared_as_sets() -> None:
    by_score = {"out": torch.tensor([[5, 2, 9, -1], [3, 1, 0, 7]])}
    by_number = {"out": torch.tensor([[2, 5, 9, -1], [0, 1, 3, 7]])}
    other = {"out": torch.tensor([[2, 5, 8, -1], [0, 1, 3, 7]])}
    assert distance(by_score, by_number) == 0
    assert distance(by_score, other) == pytest.approx(1 / 8)
    one, two = ({"out": each["out"][0]} for each in (by_score, by_number))
    assert distance(one, two) > 0, "a row by itself is codes"


def in_order_of_numbers(_inputs: Any, outputs: Mapping[str, torch.Tensor]) -> Any:
    return {**outputs, "out": outputs["out"].sort(dim=-1).values}


def test_a_choice_is_named_in_any_order() -> None:
    """The twin lists the smallest by score, a kernel by number."""
    model, name = double("v4", "nvfp4-full"), "layers.1.attn.indexer.topk"
    fault = MODEL_FAULTS["M31.members"]
    smallest = next(way for way in fault.variants(model.planting(name)) if "smallest" in way.words)
    listed = with_outputs(in_order_of_numbers)
    records = model.sights(name, FaultVariant("", lambda call: listed(smallest.apply(call))))
    (named,) = diagnose(model.naming(name), records).named
    assert (named.id, named.variant.words) == (fault.id, smallest.words)
    assert named.reproduced == 1.0 > named.as_stored


def rounded_otherwise(count: int, spacings: int = 1) -> dict[str, torch.Tensor]:
    """Numbers of BF16 of which some lie beside where they were."""
    codes = MANY.view(torch.int16).clone()
    codes[0, :count] += spacings
    return {"out": codes.view(torch.bfloat16)}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (rounded_otherwise(0), True),
        (rounded_otherwise(8), True),
        (rounded_otherwise(1, spacings=4), False),
        (rounded_otherwise(9), False),
        ({"out": MANY[:4]}, False),
        ({}, False),
    ],
)
def test_sums_in_another_order_round_otherwise_here_and_there(
    made: Mapping[str, torch.Tensor], expected: bool
) -> None:
    assert only_roundings({"out": MANY}, made) is expected


def test_of_codes_and_of_what_is_no_number_nothing_is_a_rounding() -> None:
    codes = torch.arange(4096).reshape(64, 64)
    other = codes.clone()
    other[0, 0] += 1
    assert only_roundings({"codes": codes}, {"codes": codes.clone()})
    assert not only_roundings({"codes": codes}, {"codes": other})
    nan = MANY.clone()
    nan[0, 0] = torch.nan
    assert only_roundings({"out": nan}, {"out": nan.clone()})
    assert not only_roundings({"out": nan}, {"out": MANY})


def test_gains_of_rows_or_columns_are_taken_out() -> None:
    noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gains = torch.linspace(0.1, 9, 8, dtype=torch.float64)
    assert shape_distance({"out": noise * gains}, {"out": noise}) < 1e-12
    assert distance({"out": noise * gains}, {"out": noise}) > 0.5
    assert shape_distance({"out": noise.T * gains[:, None]}, {"out": noise.T}) < 1e-12
    assert shape_distance({"out": noise.flip(0)}, {"out": noise}) > 0.5


def test_equal_zeros_are_no_spacing_apart() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 1.0]).bfloat16()
    others = torch.tensor([0.0, 1.0, 1.0, 1.5]).bfloat16()
    assert _within_spacings(values, others).tolist() == [True, True, False, False]


def test_a_healthy_candidate_is_within_and_a_changed_one_is_not() -> None:
    model = double("v4", "nvfp4-full")
    context, record = model.naming(PLACE), model.sights(PLACE, None)[0]
    nothing = make(context, record, FaultVariant("nothing", lambda call: call))
    assert nothing is not None
    fit = proof(context, record, nothing)
    assert fit.ratio <= 0.7
    assert fit.within == 1
    double_way = FaultVariant(
        "doubled", with_outputs(lambda _i, outputs: {"out": outputs["out"] * 1.05})
    )
    wrong = make(context, record, double_way)
    assert wrong is not None
    fit = proof(context, record, wrong)
    assert fit.ratio > 1
    assert fit.within < 0.5
    assert wrong.stretch["out"] == pytest.approx(1.05, rel=1e-3)


@pytest.mark.parametrize(
    ("every", "spacings", "within"), [(4096, 1, True), (64, 1, False), (4096, 4, False)]
)
def test_of_what_is_stored_on_the_way_few_roundings_may_be_others(
    every: int, spacings: int, within: bool
) -> None:
    both = double("v4", "nvfp4-full")
    name = "layers.1.attn.kv_norm_rope"
    context = both.naming(name)
    variant = next(
        fault_variant
        for fault_variant in MODEL_FAULTS["M24.epsilon"].variants(context)
        if "0.1" in fault_variant.words
    )
    record = both.sights(name, variant, 1)[0]
    plain = record.outputs["out"].flatten().view(torch.int16).clone()
    plain[::every] += spacings  # codes of BF16: neighbours of each other
    moved = plain.view(torch.bfloat16).reshape(record.outputs["out"].shape)
    changed = replace(record, outputs={"out": moved})
    variant_outputs = make(context, changed, variant)
    assert variant_outputs is not None
    assert (proof(context, changed, variant_outputs).ratio <= HEADROOM) is within


def test_a_way_that_cannot_be_made_makes_nothing() -> None:
    model = double("v4", "nvfp4-full")

    def broken(_inputs: object, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": outputs["out"] @ outputs["out"][:3]}

    variant = FaultVariant("broken", with_outputs(broken))
    assert make(model.naming(PLACE), model.sights(PLACE, None)[0], variant) is None


@pytest.mark.parametrize(
    ("share", "before", "within"),
    [
        (CODES_UNLIKE / 2, 1.0, True),
        (0.05, 1.0, False),
        (CODES_UNLIKE / 2, 0.03, False),  # more than a twentieth of those that differed
        (CODES_UNLIKE / 2, 0.0, False),  # nothing is explained
    ],
)
def test_codes_may_differ_as_producers_of_one_dialect_do(
    share: float, before: float, within: bool
) -> None:
    model = double("v4", "nvfp4-full")
    place = f"{PLACE}.act_quant"
    context, record = model.naming(place), model.sights(place, None)[0]
    shape = record.outputs["codes"].shape

    def flipped(_inputs: object, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codes = outputs["codes"].flatten().clone()
        codes[len(codes) - math.floor(before * len(codes)) :] ^= 64
        return {**outputs, "codes": codes.reshape(shape)}

    variant_outputs = make(context, record, FaultVariant("flipped", with_outputs(flipped)))
    assert variant_outputs is not None
    codes = variant_outputs.outputs["codes"].flatten().clone()
    codes[: math.ceil(share * codes.numel())] ^= 8
    record.outputs["codes"] = codes.reshape(shape)  # type: ignore[index]
    assert (proof(context, record, variant_outputs).ratio <= 0.7) is within


def test_weights_of_a_router_are_held_against_what_the_way_made() -> None:
    """A factor that is left out and weights that are made to add up to 1 are the same numbers."""
    stage = small_stage()
    context, inputs = stage.context(TOPK), stage.healthy.inputs(stage.first(TOPK))
    known = stage.healthy.outputs(stage.first(TOPK))
    shares = known["weights"] / known["weights"].sum(-1, keepdim=True)
    record = CallRecord(inputs, {**known, "weights": shares}, known)
    (variant,) = MODEL_FAULTS["M27.left_out"].variants(context)
    variant_outputs = make(context, record, variant)
    assert variant_outputs is not None
    assert not torch.equal(variant_outputs.outputs["weights"], shares), "else nothing is asked"
    assert proof(context, record, variant_outputs).ratio <= 0.7
    alone = CallRecord(inputs, {"weights": shares}, known)  # its choice was not captured
    assert proof(context, alone, variant_outputs).ratio > 1
    spoilt = CallRecord(inputs, {**known, "weights": shares * (1 + 1e-4)}, known)
    assert proof(context, spoilt, variant_outputs).ratio > 1


def test_weights_belong_to_their_experts() -> None:
    """Weights that stay while the experts of a row change places are others' weights."""
    stage = small_stage()
    context, inputs = stage.context(TOPK), stage.healthy.inputs(stage.first(TOPK))
    known = stage.healthy.outputs(stage.first(TOPK))
    turned = {name: output.flip(-1) for name, output in known.items()}
    assert explained(context, CallRecord(inputs, turned, known), NOTHING) is not None
    experts_alone = {**known, "experts": known["experts"].flip(-1)}
    assert explained(context, CallRecord(inputs, experts_alone, known), NOTHING) is None


@pytest.mark.parametrize("place", [PLACE, "layers.1.ffn.experts.w2", "layers.1.attn.hc_post"])
def test_few_rows_exclude_what_all_rows_exclude(place: str) -> None:
    model, excluded = double("v4", "nvfp4-full"), 0
    context = model.naming(place)
    (record,) = model.sights(place, None, calls=1)
    for factor in (1.0, 1.0001, 1.004, 1.02, 1.5, -1.0):
        variant = FaultVariant("", with_outputs(partial(times_all, factor)))
        made = make(context, record, variant)
        assert made is not None
        few, worst = few_rows_exclude(context, record, made), proof(context, record, made).ratio
        assert not few or worst > HEADROOM
        assert (explained(context, record, variant) is None) == (worst > HEADROOM)
        excluded += few
    assert excluded >= 2


def times_all(
    factor: float, _inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in outputs.items()}


@pytest.mark.parametrize("place", [PLACE, "layers.1.attn.attend", "layers.1.ffn.experts.w2"])
@pytest.mark.parametrize("side", ["outputs", "expected"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_fault_fits_a_number_to_what_is_none(place: str, side: str, value: float) -> None:
    model = double("v4", "nvfp4-full")
    (record,) = model.sights(place, None, calls=1)
    out = (record.outputs if side == "outputs" else record.expected)["out"].clone()
    out[0] = value
    context, made = model.naming(place), {"out": out}
    odd = replace(record, outputs=made) if side == "outputs" else replace(record, expected=made)
    for fault in MODEL_FAULTS.values():
        if fault.applies_to(context) and not fault.per_call:
            for variant in islice(proposed(fault, context, odd), 24):
                numbers = [each for each in variant.where.values() if isinstance(each, float)]
                assert all(map(math.isfinite, numbers))


def test_a_choice_may_be_held_in_int32() -> None:
    model = double("v4", "nvfp4-full")
    (record,) = model.sights(TOPK, None, calls=1)
    narrow = {name: output.int() if name == "experts" else output for name, output in
              record.outputs.items()}  # fmt: skip
    variant_outputs = make(model.naming(TOPK), replace(record, outputs=narrow), NOTHING)
    assert variant_outputs is not None
    assert (
        proof(model.naming(TOPK), replace(record, outputs=narrow), variant_outputs).ratio
        <= HEADROOM
    )


def test_the_window_holds_the_rows_that_differ() -> None:
    model = double("v4", "nvfp4-full")

    def late(_inputs: object, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = outputs["out"].clone()
        made[100:110] *= 2
        return {"out": made}

    record = model.sights(PLACE, FaultVariant("late", with_outputs(late)))[0]
    sample = sampled(model.naming(PLACE), record)
    assert not sample.whole
    begin = WINDOW * (100 // WINDOW)
    assert torch.equal(sample.record.outputs["out"], record.outputs["out"][begin : begin + WINDOW])
    assert sample.record.inputs["codes"].shape[0] == WINDOW
    assert sample.record.inputs["tensor_scale"].ndim == 0
    assert sample.before(distance) > 0.01


def test_calls_with_sequences_are_not_cut() -> None:
    model = double("v4", "nvfp4-full")
    place = "layers.1.attn.compressor.pool"
    record = model.sights(place, None)[0]
    assert sampled(model.naming(place), record).record is record


def _from_row(row: int, _inputs: object, outputs: Mapping[str, torch.Tensor]) -> Any:
    made = outputs["out"].clone()
    made[row:] *= 2
    return {"out": made}


@pytest.mark.parametrize(
    ("family", "place"), [("v4", f"layers.{n}.attn.attend") for n in range(3)]
    + [("v32", "layers.1.attn.attend")],
)  # fmt: skip
def test_the_first_tokens_stand_for_a_call_whose_tokens_see_earlier_ones(
    family: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_BEGINNING", 16)
    model = double(family, "bf16")
    context = model.naming(place)
    for call in range(2):
        early = FaultVariant("early", with_outputs(partial(_from_row, 2)))
        record = model.sights(place, early)[call]
        cut = beginning(context, record)
        if call:  # one token of each sequence
            assert cut is record
            continue
        count = WINDOW + 2
        offsets = cut.inputs["token_offsets"]
        assert (offsets.tolist(), len(cut.outputs["out"])) == ([0, count], count)
        made = context.call(cut.inputs, context.weights)["out"]
        assert torch.allclose(made.double(), record.expected["out"][:count].double(), atol=1e-6)
        assert torch.equal(cut.expected["out"], record.expected["out"][:count])
    late = FaultVariant("late", with_outputs(partial(_from_row, 100)))
    record = model.sights(place, late)[0]
    assert beginning(context, record) is record, "no row that differs would be left"


def test_faults_are_tried_on_the_first_tokens_of_a_long_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "_BEGINNING", 16)
    model = double("v4", "bf16")
    place = "layers.1.attn.attend"
    record = model.sights(place, FaultVariant("early", with_outputs(partial(_from_row, 2))))[0]
    for longest, count in ((1024, len(record.outputs["out"])), (100, WINDOW + 2)):
        monkeypatch.setattr(trial, "_LONG", longest)
        sample = sampled(model.naming(place), record)
        assert (len(sample.record.outputs["out"]), sample.whole) == (count, True)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("fault", ["M34.visible", "M35.first_slot"])
def test_faults_of_lists_are_named_in_long_calls(
    fault: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are cut with their tokens; what the longest list decides is tried on all of them."""
    monkeypatch.setattr(trial, "_BEGINNING", 16)
    monkeypatch.setattr(trial, "_LONG", 100)
    model = double("v4", "bf16")
    place = f"layers.{layer}.attn.attend"
    healthy = model.sights(place, None)[0]
    with torch.inference_mode():
        variant = list(proposed(MODEL_FAULTS[fault], model.planting(place), healthy))[-1]
    records = model.sights(place, variant)[:1]
    assert model.differs(place, records)
    found = diagnose(model.naming(place), records)
    assert [each.id for named in found.named for each in named.faults] == [fault]


def test_calls_whose_outputs_are_as_wide_as_a_sequence_keep_all_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "_BEGINNING", 16)
    model = double("v4", "bf16")
    place = "layers.1.attn.indexer.scores"
    early = FaultVariant("early", with_outputs(partial(_from_row, 2)))
    record = model.sights(place, early)[0]
    assert beginning(model.naming(place), record) is record


def test_wide_outputs_are_looked_at_in_few_columns() -> None:
    model = double("v4", "nvfp4-full")

    def one_column(_inputs: object, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = outputs["out"].clone()
        made[:, 77] += 1
        return {"out": made}

    place = "layers.1.attn.wq_b"
    record = model.sights(place, FaultVariant("one column", with_outputs(one_column)))[0]
    assert record.outputs["out"].shape[1] > COLUMNS
    sample = sampled(model.naming(place), record)
    assert 77 in sample.columns["out"]
    assert sample.candidate["out"].shape[1] <= COLUMNS
    narrow = {"out": record.outputs["out"][:, :8]}
    assert sample.looked_at(narrow)["out"].shape[1] == 8


def test_decoded_inputs_give_the_same_outputs() -> None:
    model = double("v4", "nvfp4-full")
    for place in (PLACE, "layers.1.ffn.experts.w13", "layers.2.ffn.experts.w2"):
        context = model.naming(place)
        sample = sampled(context, model.sights(place, None)[0])
        assert sample.plain is not None
        assert "codes" not in sample.plain
        direct = context.call(sample.record.inputs, context.weights)["out"]
        assert torch.equal(context.call(sample.plain, context.weights)["out"], direct)


def test_the_most_telling_call_is_the_one_that_is_farthest_off() -> None:
    one = torch.ones(2, 4)
    near = CallRecord({}, {"out": one * 1.01}, {"out": one})
    far = CallRecord({}, {"out": one * 3}, {"out": one})
    assert most_telling([near, far, near]) is far


def test_calls_are_put_together_and_taken_apart_again() -> None:
    model = double("v4", "nvfp4-full")
    for place in (PLACE, "layers.1.ffn.experts.w13", f"{PLACE}.act_quant"):
        records = model.sights(place, None)
        (joined,) = together(model.naming(place), records)
        assert joined.rows == tuple(
            len(next(iter(call_record.inputs.values()))) for call_record in records
        )
        for call, record in zip(calls_in(joined), records, strict=True):
            for name, output in record.outputs.items():
                assert torch.equal(call.outputs[name], output)


def test_calls_with_sequences_stay_apart() -> None:
    model = double("v4", "nvfp4-full")
    place = "layers.1.attn.compressor.pool"
    records = model.sights(place, None)
    assert together(model.naming(place), records) == records


def test_where_nothing_but_what_cancels_differs_it_is_looked_at() -> None:
    """A difference that is nothing beside its row is still the only one."""
    model = double("v4", "nvfp4-full")
    record = model.sights(PLACE, None)[0]
    right = record.expected["out"].float()
    made = right.clone()
    made[100, 0] += float(right[100].abs().max()) * 2.0**-20
    record = replace(record, expected={"out": right}, outputs={"out": made})
    sample = sampled(model.naming(PLACE), record)
    begin = WINDOW * (100 // WINDOW)
    assert torch.equal(sample.record.outputs["out"], made[begin : begin + WINDOW])


# --------------------------------------------------------------------------------------------------
# Sums that pass float32: which kind of no number stands where is no evidence; numbers are.

PLACES = (
    "layers.1.attn.wq_a",
    "layers.1.attn.wo_a",
    "layers.1.ffn.experts.w13",
    "layers.1.ffn.shared.w13",
)
LARGE = 1e39


def times(factor: float, small: float = 1.0) -> FaultVariant:
    """Weights times a number, in float64; `small` are the rows of the second half."""

    def change(_name: str, weight: Weight) -> Weight:
        value = numbers_of(weight) * factor
        value[len(value) // 2 :] *= small
        return Weight(value=value, input_scale=weight.input_scale)

    return FaultVariant(f"times {factor}", with_weights(change))


def planted(place: str, variant: FaultVariant) -> CallRecord:
    return double("v4", "nvfp4-full").sights(place, variant, calls=1)[0]


def judged(place: str, record: CallRecord, variant: FaultVariant) -> VariantFit:
    context = double("v4", "nvfp4-full").naming(place)
    variant_outputs = make(context, record, variant)
    assert variant_outputs is not None
    return proof(context, record, variant_outputs)


def altered(record: CallRecord, row: int, column: int, factor: float) -> CallRecord:
    out = record.outputs["out"].clone()
    out.reshape(-1, out.shape[-1])[row, column] *= factor
    return replace(record, outputs={"out": out})


@pytest.mark.parametrize("place", PLACES)
def test_whose_sums_overflow_is_explained_by_the_numbers_that_remain(place: str) -> None:
    variant = times(LARGE, small=1e-39)
    record = planted(place, variant)
    out = record.outputs["out"]
    row, column = out.reshape(-1, out.shape[-1]).isfinite().nonzero()[0].tolist()
    variant_outputs = make(double("v4", "nvfp4-full").naming(place), record, variant)
    assert variant_outputs is not None
    kinds = out.isfinite() != variant_outputs.outputs["out"].isfinite()
    assert kinds.any() or (out.isnan() != variant_outputs.outputs["out"].isnan()).any(), (
        "else nothing is asked"
    )
    fit = judged(place, record, variant)
    assert fit.ratio <= 0.7, fit.worst
    assert fit.within == 1
    assert judged(place, altered(record, row, column, 1.1), variant).ratio > 1
    assert judged(place, record, times(LARGE, small=1.1e-39)).ratio > 1


def test_what_is_no_number_from_the_start_has_to_be_the_same() -> None:
    place = PLACES[0]
    variant = next(
        MODEL_FAULTS["M04.infinite"].variants(double("v4", "nvfp4-full").planting(place))
    )
    record = planted(place, variant)
    assert judged(place, record, variant).ratio == 0
    out = record.outputs["out"].clone()
    out[0, 0] = 1.0 if out[0, 0].isnan() else torch.nan
    assert judged(place, replace(record, outputs={"out": out}), variant).ratio > 1


def test_where_nothing_may_overflow_no_budget_is_another_one() -> None:
    model = double("v4", "nvfp4-full")
    place = PLACES[0]
    record = planted(place, times(1.0))
    context = model.naming(place)
    call = JudgeableCall.from_twin(context.bound, place, record.inputs)
    assert beyond_float32(context, call, record.outputs) == {}
