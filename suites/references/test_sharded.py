"""Tensor, expert and pipeline parallel runs equal one rank: exactly, and within rounding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch import distributed

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.sharding import plan
from degarble.harness.model.types import Box
from degarble.references.sharded import RankWeights, Teams, sliced
from degarble.references.weights import random_weights
from degarble.suites.museum.torchrun import run_module
from degarble.suites.references.sharded_ranks import CASES, EXACT
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    target = tmp_path_factory.mktemp("sharded") / "results.json"
    run_module("degarble.suites.references.sharded_ranks", str(target))
    found: dict[str, dict[str, float]] = json.loads(target.read_text("utf-8"))
    return found


EXACT_CASES = [name for name, case in CASES.items() if case[1] is EXACT and name != "planted"]
ROUNDED_CASES = [name for name, case in CASES.items() if case[1] is not EXACT]


@pytest.mark.parametrize("name", thinned(EXACT_CASES, 3))
def test_ranks_equal_one_in_the_definition(results: dict[str, dict[str, float]], name: str) -> None:
    assert results[name]["largest"] <= 1e-12
    keywords = CASES[name][2]
    size = max(keywords.get("tp", 1), keywords.get("ep", 1)) * keywords.get("pp", 1)
    assert results[name]["ranks"] == size > 1


@pytest.mark.parametrize("name", ROUNDED_CASES)
def test_ranks_stay_within_rounding_elsewhere(
    results: dict[str, dict[str, float]], name: str
) -> None:
    # Three layers, two sums each: every partial output is rounded to BF16 (2^-9) once more. Where
    # experts quantise their input, such a difference can turn an FP4 code, whose steps are 1/4.
    # Experts alone are summed in float32, so the largest scale of all ranks must give the same.
    bound = {"twin": 0.25, "shared": 1e-3}.get(name.rpartition(" ")[2], 6 * 2**-8)
    assert results[name]["relative"] <= bound


def test_the_order_of_rounding_in_a_sum_is_a_switch(results: dict[str, dict[str, float]]) -> None:
    official, stepwise = results["v4 tp4 bf16"], results["v4 tp4 stepwise"]
    assert official["checksum"] != stepwise["checksum"]


def test_a_lost_sum_is_detected(results: dict[str, dict[str, float]]) -> None:
    assert results["planted"]["relative"] > 0.01


def test_a_world_too_small_is_refused(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        with pytest.raises(InvalidArgument, match="ranks = 1: expected 2 at least, for tp 2"):
            Teams.from_plan(plan(small_v4(), tp=2))
        teams = Teams.from_plan(plan(small_v4()))
        assert teams is not None
        assert teams.attention.ranks == (0,)
        x = torch.ones(3, dtype=torch.bfloat16)
        assert teams.experts.gather(x)[0] is x
    finally:
        distributed.destroy_process_group()


def test_tensor_parallelism_must_divide_the_output_groups() -> None:
    with pytest.raises(InvalidArgument, match="divisor of 4 output groups"):
        plan(small_v4(), tp=3)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "MXFP8", "FP8_128X128_UE8M0"])
def test_codes_are_cut_together_with_their_scales(name: str, seed: int) -> None:
    values = torch.randn(384, 256, generator=torch.Generator().manual_seed(seed))
    made = quantise(values, BLOCK_FORMATS[name])
    if name == "NVFP4":
        made = made.with_layout(SWIZZLE_128X4)
    weight = Weight.of(made, torch.tensor(0.5))
    for box in (Box(((128, 256), (0, 256))), Box(((0, 384), (128, 256)))):
        (r0, r1), (c0, c1) = box.ranges
        piece = sliced(weight, box, "w")
        assert piece.shape == box.shape
        assert torch.equal(piece.values(torch.float64), weight.values(torch.float64)[r0:r1, c0:c1])
        assert piece.input_scale is weight.input_scale
    assert sliced(weight, Box.whole((384, 256)), "w") is weight
    with pytest.raises(ShapeMismatch, match="cut of w"):
        sliced(weight, Box(((0, 384), (0, 136 if name != "FP8_128X128_UE8M0" else 64))), "w")


def test_a_rank_holds_its_part_and_the_input_scales_of_all_experts() -> None:
    config = small_v4()
    whole = random_weights(config, 1)
    for name, weight in whole.items():
        if ".experts." in name:
            weight.input_scale = torch.tensor(0.25)
    held = RankWeights(whole, plan(config, tp=2, ep=2, pp=2), rank=3)
    assert "layers.0.attn.wq_b" not in held
    name = "layers.4.attn.wq_b"
    value = whole[name].value
    assert value is not None
    assert torch.equal(held[name].values(torch.bfloat16), value[len(value) // 2 :])
    elsewhere, here = (held[f"layers.4.ffn.experts.{n}.w1"] for n in (0, 7))
    assert elsewhere.value is None
    assert float(elsewhere.input_scale or 0) == 0.25
    assert here.value is not None
    assert set(held) < set(whole)
    assert len(list(held)) == len(held)
