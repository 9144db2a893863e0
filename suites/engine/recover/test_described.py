"""What a component really computed with is recovered from its wrong outputs, or nothing is said."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.trial import most_telling, together
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.recover import edits
from degarble.harness.engine.recover.described import Described, describe, in_some_rows
from degarble.harness.engine.recover.maps import Sides, maps_of, moved
from degarble.suites.campaigns.causes.recovered_weights import edited, recovered
from degarble.suites.engine.diagnosing import Double, double
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight

    Edit = Callable[[Tensor, Tensor], None]  # of one code an element, and of block scales

LINEARS = (
    "layers.1.attn.wq_a", "layers.1.attn.wq_b", "layers.1.attn.wkv", "layers.1.attn.wo_b",
    "layers.1.ffn.shared.w13", "layers.1.ffn.shared.w2", "layers.1.attn.compressor.proj",
    "layers.1.ffn.experts.w13", "layers.1.ffn.experts.w2",
)  # fmt: skip


def model() -> Double:
    return double("v4", "nvfp4-full")


def of_weight(name: str, edit: Edit) -> FaultVariant:
    """A way of which no known fault knows."""
    return FaultVariant(
        "an edit", with_weights(lambda each, own: edited(own, edit) if each == name else own)
    )


def told(name: str, variant: FaultVariant, rows: int | None = None) -> Described | None:
    """Describe a planted way; at most so many rows of it."""
    records = model().sights(name, variant)
    assert model().differs(name, records)
    context = model().naming(name)
    if rows is not None:
        first, cut = records[0], slice(rows)
        records = [
            replace(
                first, inputs=some(first.inputs, cut), outputs=some(first.outputs, cut),
                expected=some(first.expected, cut),
            )
        ]  # fmt: skip
    calls = together(context, records)
    return describe(context, sorted(calls, key=lambda call: call is not most_telling(calls)))


def some(side: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: tensor[rows] if tensor.ndim else tensor for name, tensor in side.items()}


def first_weight(name: str) -> str:
    return next(iter(model().planting(name).weights))


@pytest.mark.parametrize("name", thinned(LINEARS))
def test_one_flipped_bit_is_told_as_row_column_code_and_bit(name: str) -> None:
    weight = first_weight(name)
    rows, columns = model().planting(name).weights[weight].shape
    drawn = random.Random(name)
    found = tries = 0
    while tries < 6:
        row, column, bit = drawn.randrange(rows), drawn.randrange(columns), drawn.randrange(4)

        def flip(codes: Tensor, _scales: Tensor, at: Any = (row, column, bit)) -> None:
            codes[at[0], at[1]] ^= 1 << at[2]

        variant = of_weight(weight, flip)
        if not model().differs(name, model().sights(name, variant)):
            continue  # the sign of a zero, or an element that no input reaches
        tries += 1
        description = told(name, variant)
        if description is not None:
            said = description.sentence
            assert f"row {row} of" in said, said
            assert f"in column {column} " in said, said
            assert f"bit {bit})" in said, said
            found += 1
    assert found >= 5, f"{found} of {tries}"


@pytest.mark.parametrize("name", LINEARS[:4])
def test_eight_rows_are_enough_for_one_bit(name: str) -> None:
    weight = first_weight(name)
    codes = model().planting(name).weights[weight].quantised().element_codes()
    row, column = 5, int((codes[5] % 8 == 7).nonzero()[0])  # a large number: 6 times its scale

    def flip(codes: Tensor, _scales: Tensor) -> None:
        codes[row, column] ^= 8

    description = told(name, of_weight(weight, flip), rows=8)
    if description is not None:  # its inputs may be 0 in most of these rows
        assert f"row {row} of" in description.sentence
        assert f"in column {column} " in description.sentence


def test_a_block_scale_is_told_by_its_codes() -> None:
    def other(_codes: Tensor, scales: Tensor) -> None:
        scales[7, 2] ^= 1 << 3

    description = told("layers.1.attn.wq_a", of_weight("attn.wq_a", other))
    assert description is not None
    assert "row 7 of layers.1.attn.wq_a has " in description.sentence
    assert "times its scale in columns 32 to 47 (code " in description.sentence


def test_rows_of_another_place_are_found_by_their_numbers() -> None:
    def copied(codes: Tensor, scales: Tensor) -> None:
        codes[16:24], scales[16:24] = codes[40:48].clone(), scales[40:48].clone()

    description = told("layers.1.attn.wq_a", of_weight("attn.wq_a", copied))
    assert description is not None
    assert "rows 16 to 23 of layers.1.attn.wq_a hold the numbers of rows 40 to 47" in (
        description.sentence
    )


def test_rows_of_another_layer_are_found() -> None:
    other = model().planting("layers.2.attn.wq_a").weights["attn.wq_a"]

    def loaded(name: str, own: Weight) -> Weight:
        return other if name == "attn.wq_a" else own

    description = told("layers.1.attn.wq_a", FaultVariant("loaded", with_weights(loaded)))
    assert description is not None
    assert "hold the numbers of rows 0 to 127 of layers.2.attn.wq_a" in description.sentence


def test_two_elements_of_one_row_are_told_apart() -> None:
    def signs(codes: Tensor, _scales: Tensor) -> None:
        for column in (3, 90):
            codes[11, column] = (codes[11, column] | 6) ^ 8  # 4 or 6 times its scale, turned

    description = told("layers.1.attn.wq_a", of_weight("attn.wq_a", signs))
    assert description is not None
    assert "in column 3 " in description.sentence
    assert "in column 90 " in description.sentence


def test_a_value_that_is_no_code_is_told_to_what_it_is_known() -> None:
    name = "layers.1.ffn.gate"  # plain BF16: a number that no flipped bit gives

    def scaled(each: str, own: Weight) -> Weight:
        assert own.value is not None, each
        value = own.value.clone()
        value[2, 17] = 1.7
        return replace(own, value=value, _decoded={})

    description = told(name, FaultVariant("an edit", with_weights(scaled)))
    assert description is not None
    assert "row 2 of layers.1.ffn.gate has about 1.7" in description.sentence
    assert "in column 17" in description.sentence


@pytest.mark.slow
def test_random_codes_are_not_described() -> None:
    noise = torch.Generator().manual_seed(3)

    def random_rows(codes: Tensor, _scales: Tensor) -> None:
        codes[20:60] = torch.randint(0, 16, codes[20:60].shape, generator=noise).to(torch.uint8)

    assert told("layers.1.attn.wq_a", of_weight("attn.wq_a", random_rows)) is None


def test_noise_is_not_described() -> None:
    noise = torch.Generator().manual_seed(3)

    def noisy(_inputs: Any, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        out = outputs["out"]
        return {"out": out * (1 + 0.2 * torch.randn(out.shape, generator=noise)).to(out.dtype)}

    assert told("layers.1.attn.norm", FaultVariant("noise", with_outputs(noisy))) is None


@pytest.mark.parametrize(
    "name",
    [
        *(LINEARS[0], LINEARS[-1], "layers.1.attn.norm"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in LINEARS[1:-1]),
    ],
)
def test_a_healthy_component_has_nothing_to_describe(name: str) -> None:
    context = model().naming(name)
    assert describe(context, together(context, model().sights(name, None))) is None


@pytest.mark.parametrize("seed", range(5))
def test_random_edits_are_described_as_they_are(seed: int) -> None:
    found = recovered(seed)  # one of each kind
    assert found.outcome == "ok", found


# ---- maps of outputs -----------------------------------------------------------------------------


def of_outputs(change: Callable[[Tensor], Tensor]) -> FaultVariant:
    return FaultVariant("a map", with_outputs(lambda _, made: {**made, "out": change(made["out"])}))


def rotated(x: Tensor) -> Tensor:
    return x.roll(3, -1)


def unwritten(x: Tensor) -> Tensor:
    return torch.cat((x[:, :32], x[:, 32:64] * 0, x[:, 64:]), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.abs(), "signs are lost"),
        (lambda x: x.clamp(max=0.25), "numbers are not above 0.25"),
        (rotated, "columns are rotated by 125"),
        (lambda x: x * 1.25, "all numbers are multiplied by 1.25"),
        (unwritten, "columns 32 to 63 hold 0"),
    ],
    ids=["abs", "clamp", "rotated", "gain", "unwritten"],
)  # fmt: skip
def test_a_map_of_a_norms_outputs_is_read_off(
    change: Callable[[Tensor], Tensor], words: str
) -> None:
    description = told("layers.1.attn.norm", of_outputs(change))
    assert description is not None
    assert words in description.sentence


def test_a_map_that_misses_one_number_is_none() -> None:
    right = torch.randn(12, 32, generator=torch.Generator().manual_seed(1)).double()
    seen = right.abs()
    allowed = torch.full_like(right, 1e-6)
    assert [found.words for found in maps_of(Sides("out", seen, right, allowed))]
    seen[2, 5] = -7.0
    assert not list(maps_of(Sides("out", seen, right, allowed)))


def test_a_number_that_a_column_has_may_have_been_copied() -> None:
    right = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).double()
    seen, allowed = right.clone(), torch.full_like(right, 1e-6)
    seen[2, 1:] = right[2, 0]
    (found,) = [each.words for each in maps_of(Sides("out", seen, right, allowed))]
    assert found.startswith("row 2, columns 1 to 31 hold")
    assert found.endswith("(or the number of column 0: these explain it as well)")
    seen[2, 1:] = 0.3
    (found,) = [each.words for each in maps_of(Sides("out", seen, right, allowed))]
    assert found == "row 2, columns 1 to 31 hold 0.3000"


def test_a_sign_that_is_lost_is_no_factor_of_the_negative_columns() -> None:
    right = torch.randn(3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    allowed = torch.full_like(right, 1e-9)
    one_row = Sides("out", right[:1].abs(), right[:1], allowed[:1])
    words = [found.words for found in maps_of(one_row)]
    assert "signs are lost" in words
    assert not any("multiplied" in each for each in words)
    turned = torch.where(torch.arange(24) < 7, -right, right)
    words = [found.words for found in maps_of(Sides("out", turned, right, allowed))]
    assert words == ["columns 0 to 6 are multiplied by -1.000"]


def test_a_table_of_places_is_no_rule() -> None:
    own = torch.arange(16)
    assert moved(own.roll(3), "row") == "rows are rotated by 13"
    apart = own.clone()
    apart[[0, 8]] = torch.tensor([8, 0])  # the others stay where they are
    assert moved(apart, "row") == "rows 0, 8 are exchanged with those 8 beside them"
    assert moved(own.flip(0), "row") == "all rows are reversed"
    shuffled = own[torch.randperm(16, generator=torch.Generator().manual_seed(2))]
    assert moved(shuffled, "row") == ""


def test_outputs_of_other_rows_than_each_other_have_no_rows_of_tokens() -> None:
    """A compressor returns an entry for several tokens, and its state for the next call."""
    name = "layers.1.attn.compressor.pool"
    variant = FaultVariant(
        "doubled", with_outputs(lambda _, made: {n: t * 2 for n, t in made.items()})
    )
    records = model().sights(name, variant)
    assert len({len(tensor) for tensor in records[0].outputs.values()}) > 1
    assert in_some_rows(model().naming(name), records) is None


def test_a_call_that_puts_out_no_entry_has_nothing_to_describe() -> None:
    """Tokens that fill no block of a compressor leave its first output without rows."""
    name = "layers.2.attn.compressor.pool"
    noise = torch.Generator().manual_seed(5)
    _, empty = model().sights(name, None)
    assert not len(empty.expected["out"])
    state = empty.outputs["state_gate"]
    wrong = state + torch.randn(state.shape, generator=noise).to(state.dtype)
    record = replace(empty, outputs={**empty.outputs, "state_gate": wrong})
    assert describe(model().naming(name), [record]) is None


# ---- where the search for known faults ends ------------------------------------------------------


def test_weights_that_are_solved_for_are_not_edited_as_well() -> None:
    name = "layers.1.ffn.gate"  # plain BF16
    doubled = FaultVariant(
        "doubled", with_outputs(lambda _, made: {n: t * 2 for n, t in made.items()})
    )
    context = model().naming(name)
    for variant in (None, doubled):
        (record,) = together(context, model().sights(name, variant))
        tried = [each.words for each in edits._of_weights(context, record)]
        edited = any(words.startswith("every number of layers.1.ffn.gate is") for words in tried)
        assert edited is (variant is None)


def test_a_diagnosis_describes_where_no_fault_is_named() -> None:
    def flip(codes: Tensor, _scales: Tensor) -> None:
        codes[9, 30] = (codes[9, 30] | 6) ^ 8

    name = "layers.1.attn.wq_a"
    records = model().sights(name, of_weight("attn.wq_a", flip))
    found = diagnose(model().naming(name), records)
    assert not found.named
    assert found.described is not None
    assert found.sentence.startswith("The outputs follow if row 9 of layers.1.attn.wq_a has ")
    assert "No known fault explains this" in found.sentence
