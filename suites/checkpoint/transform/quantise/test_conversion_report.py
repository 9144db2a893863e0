"""The report: facts of shards in any order make the same bytes, and what matters stands on top."""

from __future__ import annotations

import json

import pytest

from degarble.harness.checkpoint.transform.nvfp4_scales import Errors, Exponents
from degarble.harness.checkpoint.transform.quantise.calibration import InputScale, ScaleOrigin
from degarble.harness.checkpoint.transform.quantise.conversion_report import (
    GroupScale,
    ShardFacts,
    report_bytes,
)


def facts() -> list[ShardFacts]:
    one, two = ShardFacts(), ShardFacts()
    exact = GroupScale(0.5, None, True, Exponents(0, 7), "")
    plain = GroupScale(0.25, 3.0, False, None, "exponents from 0 to 40")
    one.add_nvfp4("a", "MXFP4", 300, exact, Errors())
    one.add_nvfp4("b", "MXFP4", 100, plain, Errors(100.0, 1.0, 1.0, 0.25))
    two.add_nvfp4(
        "c", "BF16", 100, plain._replace(amax=0.0, why_not=""), Errors(4.0, 1.0, 2.0, 2.0)
    )
    two.add_input("c", InputScale(0.1, 268.8, 0, ScaleOrigin.UNREACHED))
    two.add_plain("norm", "copied", "F32", "BF16", 7)
    one.add_plain("embed", "copied", "BF16", "BF16", 0)
    return [one, two]


def test_the_report_says_what_happened() -> None:
    raw = json.loads(report_bytes({"recipe": "mine"}, facts()))
    assert raw["recipe"] == "mine"
    assert raw["counts"] == {
        "copied": 1,
        "copied: F32 to BF16": 1,
        "lossless: MXFP4 to NVFP4": 1,
        "quantised: BF16 to NVFP4": 1,
        "quantised: MXFP4 to NVFP4": 1,
    }
    assert raw["lossless"] == {"weights": 2, "exact": 1, "share_of_elements": 0.75}
    assert raw["flagged"] == {
        "unreached_experts": ["c"],
        "not_lossless": {"b": "exponents from 0 to 40"},
        "zero_weights": ["c"],
        "rounded_to_a_narrower_dtype": {"norm": 7},
    }
    assert raw["worst"] == [
        {"weight": "b", "over_floor": 2.0, "relative_error": 0.1},
        {"weight": "c", "over_floor": 1.0, "relative_error": 0.5},
    ]
    assert raw["weights"]["a"]["relative_error"] == 0.0


def test_order_and_travel_change_nothing() -> None:
    one, two = facts()
    travelled = [ShardFacts.from_bytes(each.to_bytes()) for each in (two, one)]
    assert None not in travelled
    assert report_bytes({}, filter(None, travelled)) == report_bytes({}, facts())


@pytest.mark.parametrize("swapped", [False, True])
def test_a_weight_and_its_input_scale_may_lie_in_two_shards(swapped: bool) -> None:
    one, two = ShardFacts(), ShardFacts()
    plain = GroupScale(0.25, 3.0, False, None, "")
    one.add_nvfp4("a", "BF16", 100, plain, Errors(100.0, 1.0, 1.0, 0.25))
    two.add_input("a", InputScale(0.1, 268.8, 7, ScaleOrigin.UNREACHED))
    raw = json.loads(report_bytes({}, (two, one) if swapped else (one, two)))
    assert raw["weights"]["a"]["action"] == "quantised"
    assert raw["weights"]["a"]["input_amax"] == 268.8
    assert raw["flagged"]["unreached_experts"] == ["a"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weights": {}}', '{"weights": {"a": 1}, "counts": {}, "rounded": {}}']
)
def test_facts_that_no_shard_left_are_none(text: str) -> None:
    assert ShardFacts.from_bytes(text.encode()) is None
