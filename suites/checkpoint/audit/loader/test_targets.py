"""What ranks hold: anatomy's own list of a rank, and where each element belongs."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.loader.maps import ListedParameter, LoaderMap
from degarble.harness.checkpoint.audit.loader.targets import (
    EngineTargets,
    cover,
    listed_targets,
    ranks_of,
)
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import LAYOUTS, layout_named
from degarble.harness.model.sharding import plan, rank_tensors
from degarble.suites.checkpoint.structure_cases import V4, V32

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.storage import Part
    from degarble.harness.model.types import Box

RANKS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1), (2, 4, 2), (2, 1, 3)]
ENGINES: list[tuple[Config, str]] = [
    (V4 if family == V4Config.family else V32, name) for family, name in LAYOUTS if name == "vllm"
]


@pytest.mark.parametrize(
    ("config", "name", "ranks"),
    [
        (config, name, ranks)
        for config, name in ENGINES
        for ranks in RANKS
        if ranks[2] <= config.num_hidden_layers
    ],
)
def test_a_rank_has_what_anatomy_lists(
    config: Config, name: str, ranks: tuple[int, int, int]
) -> None:
    layout, made = layout_named(name, config), plan(config, *ranks)
    found = EngineTargets(config, layout, made)(range(made.ranks))
    for held in found:
        listed = rank_tensors(made, layout, held.rank)
        assert sorted((each.name, str(each.dtype), each.shape) for each in listed) == sorted(
            (each.name, each.dtype, each.shape) for each in held.targets.values()
        )
        assert not any(any(each.cover_of_all) for each in held.targets.values())


@pytest.mark.parametrize("ranks", RANKS)
def test_truths_of_all_ranks_tile_every_part(ranks: tuple[int, int, int]) -> None:
    made = plan(V4, *ranks)
    boxes: dict[tuple[str, Part], set[Box]] = {}
    for held in EngineTargets(V4, layout_named("vllm", V4), made)(range(made.ranks)):
        for target in held.targets.values():
            for member in target.members.values():
                truth = held.truth(member)
                assert truth is not None
                assert truth.box.count == member.box.count
                boxes.setdefault((truth.parameter.name, truth.part), set()).add(truth.box)
    for key, found in boxes.items():
        ranges = zip(*(box.ranges for box in found), strict=True)
        ends = [max(stop for _, stop in each) for each in ranges]
        missing, twice = cover(tuple(ends), tuple(found))
        assert not missing, key
        assert not twice, key


def test_ranks_that_are_alike_share_their_targets() -> None:
    ranks = list(EngineTargets(V4, layout_named("vllm", V4), plan(V4, 1, 4))(range(4)))
    assert all(each.targets is ranks[0].targets for each in ranks)
    assert [each.first_expert for each in ranks] == [0, 1, 2, 3]
    stacks = [each for each in ranks[0].targets.values() if each.stacked]
    for held in ranks:
        for target in stacks:
            for member in target.members.values():
                truth = held.truth(member)
                assert truth is not None
                assert truth.parameter.expert == held.first_expert


def test_one_rank_can_be_asked_for_alone() -> None:
    assert ranks_of(LoaderMap("m", (ListedParameter("a", "U8", (1,)),), tp=2, ep=4, pp=3)) == range(
        12
    )
    one = LoaderMap("m", (ListedParameter("a", "U8", (1,)),), tp=2, ep=4, pp=3, rank=7)
    assert ranks_of(one) == range(7, 8)


def test_a_list_becomes_slots_and_experts() -> None:
    listed = (
        ListedParameter("stack", "U8", (2, 6, 5), (4, 2), experts=True),
        ListedParameter("fused", "BF16", (6, 5), (1, 5)),
        ListedParameter("plain", "BF16", (3,)),
        ListedParameter("scalar", "F32", ()),
        ListedParameter("scalars", "F32", (2,), experts=True),
    )
    made = LoaderMap("m", listed, tp=2, ep=4)
    ranks = list(listed_targets(made, ranks_of(made)))
    assert [(each.tp_rank, each.first_expert) for each in ranks] == [
        (0, 0),
        (1, 2),
        (0, 4),
        (1, 6),
    ]
    targets = ranks[0].targets
    stack = targets["stack"]
    assert {key: member.box.ranges for key, member in stack.members.items()} == {
        (0, 0): ((0, 1), (0, 4), (0, 5)),
        (0, 1): ((0, 1), (4, 6), (0, 5)),
        (1, 0): ((1, 2), (0, 4), (0, 5)),
        (1, 1): ((1, 2), (4, 6), (0, 5)),
    }
    assert [member.box.shape for member in targets["fused"].members.values()] == [(1, 5), (5, 5)]
    assert list(targets["scalar"].members) == [(None, 0)]
    assert list(targets["scalars"].members) == [(0, 0), (1, 0)]
    for each, target in zip(listed, targets.values(), strict=True):
        assert (target.name, target.dtype, target.shape) == (each.name, each.dtype, each.shape)
        assert sum(member.box.count for member in target.members.values()) == prod(each.shape)
        assert ranks[0].truth(next(iter(target.members.values()))) is None
