from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from degarble.harness.commands.check.output_statistics import Looker
from degarble.harness.engine.budget.budget import Budget, judge
from degarble.harness.engine.budget.judging import OutputResult, ResultBasis
from degarble.harness.engine.localise.replay import Batch, Replay
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.model.components import component_named
from degarble.harness.model.presets import small_v4
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.report.replay_record import AxisProfile, CloseLook

CONFIG = small_v4()


@dataclass(frozen=True)
class Pair:
    """A candidate and its twin at a component."""

    name: str
    candidate: Tensor
    twin: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    positions: tuple[int, ...] = ()


def looked(*pairs: Pair) -> CloseLook:
    looker = Looker(CONFIG)
    for pair in pairs:
        count = len(pair.twin)
        positions = torch.tensor(pair.positions or range(count))
        component = component_named(CONFIG, pair.name)
        batch = Batch(
            component, cast("Any", (None,)), pair.inputs, {"out": pair.candidate},
            torch.zeros(count), positions, (slice(0, count),),
        )  # fmt: skip
        looker(Replay(batch, {"out": pair.twin}), {"out": _judged(pair)})
    return looker.look(pairs[0].name, "out")


def _judged(pair: Pair) -> OutputResult:
    if pair.candidate.dtype not in FORMAT_OF_DTYPE or pair.candidate.shape != pair.twin.shape:
        return OutputResult("out", Verdict.DIFFERS)
    budget = Budget(FORMAT_OF_DTYPE[pair.twin.dtype], torch.full((1,), 1e-6), ("because",))
    found = judge(pair.candidate, pair.twin, budget)
    return OutputResult("out", found.verdict, found.findings, reasons=lambda: ResultBasis.of(found))


def along(look: CloseLook, name: str) -> AxisProfile:
    return next(each for each in look.along if each.name == name)


def test_positions_heads_and_experts_are_told_apart() -> None:
    twin = torch.ones(4, 3, 2)
    candidate = twin.clone()
    candidate[2, 1] += 0.5
    look = looked(Pair("layers.0.attn.q_head_norm_rope", candidate, twin, positions=(7, 8, 9, 12)))
    assert along(look, "position").labels == ("7", "8", "9", "12")
    assert along(look, "position").values == pytest.approx((0.0, 0.0, math.sqrt(0.5 / 6), 0.0))
    assert along(look, "head").values == pytest.approx((0.0, math.sqrt(0.5 / 8), 0.0))
    experts = torch.tensor([[0, 2, 4], [2, 4, 5], [5, 2, 0], [1, 0, 2]])
    routed = looked(Pair("layers.0.ffn.experts.w2", candidate, twin, {"experts": experts}))
    by_expert = along(routed, "expert")
    struck = dict(zip(by_expert.labels, by_expert.values, strict=True))
    assert [name for name, value in struck.items() if value] == ["2"]


def test_calls_add_up_and_the_worst_element_has_its_codes() -> None:
    twin = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    near, far = twin.clone(), twin.clone()
    near[0, 0] = torch.nextafter(twin[0, 0], torch.tensor(9.0))
    far[1, 1] = -4.0
    name = "layers.0.attn.wq_a"
    look = looked(Pair(name, near, twin), Pair(name, far, twin), Pair(name, twin, twin))
    assert look.worst is not None
    assert (look.worst.place, look.worst.candidate_code) == ("row 1, column 1", "0xc0800000")
    assert (look.worst.twin_code, look.worst.candidate, look.worst.twin) == ("0x40800000", -4, 4)
    assert look.worst.steps == 2 * 0x40800000
    assert look.histogram is not None
    assert dict(zip(look.histogram.labels, look.histogram.counts, strict=True)) == {
        "0": 10, "1": 1, "2": 0, "3-4": 0, "5-8": 0, "9-16": 0, "17-64": 0, "65-256": 0,
        "257-4096": 0, "> 4096": 1,
    }  # fmt: skip
    assert look.places[0].level == "element"
    assert look.derivation == ("because",)


def test_values_that_are_not_finite_are_counted_and_left_out_of_sums() -> None:
    twin = torch.ones(2, 2)
    candidate = twin.clone()
    candidate[1, 0] = math.nan
    look = looked(Pair("layers.0.attn.wq_a", candidate, twin))
    assert look.histogram is not None
    assert (look.histogram.labels[-1], look.histogram.counts[-1]) == ("not finite", 1)
    assert along(look, "position").values == (0.0, 0.0)


def test_choices_and_codes_are_compared_one_by_one() -> None:
    twin = torch.tensor([[0, 1], [2, 3]])
    candidate = torch.tensor([[0, 1], [2, 7]])
    look = looked(Pair("layers.1.ffn.topk", candidate, twin))
    assert look.histogram is not None
    assert look.histogram.unit == "codes that differ"
    assert (look.histogram.labels, look.histogram.counts) == (("equal", "other"), (3, 1))
    codes = torch.zeros(2, 4, dtype=torch.uint8)
    assert looked(Pair("layers.0.attn.wq_a", codes, codes)).histogram is not None


def test_tiles_are_shown_where_there_are_several() -> None:
    twin = torch.ones(130, 256)
    candidate = twin.clone()
    candidate[129, 200] = 3.0
    look = looked(Pair("layers.0.attn.wq_a", candidate, twin))
    tiles = along(look, "tile (its first row and column)")
    assert tiles.labels == ("0, 0", "0, 128", "128, 0", "128, 128")
    assert [bool(value) for value in tiles.values] == [False, False, False, True]


def test_long_profiles_are_joined_and_forms_are_left_alone() -> None:
    twin = torch.ones(1000, 2)
    look = looked(Pair("layers.0.attn.wq_a", twin * 2, twin))
    profile = along(look, "position")
    assert len(profile.values) <= 192
    assert profile.labels[0] == "0-5"
    assert profile.values[0] == 1.0
    broken = looked(Pair("layers.0.attn.wq_a", torch.ones(2, 3), torch.ones(2, 4)))
    assert broken.histogram is None
    assert broken.along == ()
    assert Looker(CONFIG).look("layers.0.attn.wq_a", "out").places == ()
