from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.checkpoint.read.safetensors_files import read_header
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.suites.support.synthetic.checkpoints import shard_bytes_for

if TYPE_CHECKING:
    from pathlib import Path


def planned(sizes: list[int], keys: list[str] | None = None) -> list[PlannedTensor]:
    named = keys or [""] * len(sizes)
    return [
        PlannedTensor(f"t{i}", "U8", (size,), key)
        for i, (size, key) in enumerate(zip(sizes, named, strict=True))
    ]


def sizes_of(plan: WritePlan) -> list[list[int]]:
    return [[tensor.nbytes for tensor in shard.tensors] for shard in plan.shards]


def test_shards_are_filled_in_order() -> None:
    plan = WritePlan.from_tensors(planned([4, 4, 3, 9, 1, 12, 0, 2]), shard_bytes=10)
    assert sizes_of(plan) == [[4, 4], [3], [9, 1], [12], [0, 2]]
    assert plan.shards[0].file == "model-00001-of-00005.safetensors"
    assert (plan.tensors, plan.data_bytes) == (8, 35)


def test_neighbours_with_one_key_stay_together() -> None:
    plan = WritePlan.from_tensors(
        planned([4, 4, 4, 9, 9], ["a", "b", "b", "c", "c"]), shard_bytes=10
    )
    assert sizes_of(plan) == [[4], [4, 4], [9, 9]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 20))
def test_the_smallest_size_for_a_number_of_shards(sizes: list[int], shards: int) -> None:
    tensors = planned(sizes)
    size = shard_bytes_for(tensors, shards)
    plan = WritePlan.from_tensors(tensors, shard_bytes=size)
    assert len(plan.shards) <= shards
    assert [tensor for shard in plan.shards for tensor in shard.tensors] == tensors
    assert all(shard.tensors for shard in plan.shards)
    if size > 1:
        assert len(WritePlan.from_tensors(tensors, shard_bytes=size - 1).shards) > shards
    if size > max(sizes):  # greedy: what begins a shard had no room in the one before
        for before, after in pairwise(plan.shards):
            assert before.data_bytes + after.tensors[0].nbytes > size


def test_heads_are_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = [
        PlannedTensor('odd "name"\\ é', "BF16", (3, 5)),
        PlannedTensor("scalar", "F32", ()),
        PlannedTensor("none", "I64", (0, 7)),
        PlannedTensor("codes", "U8", (7,)),
    ]
    (shard,) = WritePlan.from_tensors(tensors, metadata={"format": "pt", "note": "ü"}).shards
    path = tmp_path / shard.file
    path.write_bytes(shard.head() + bytes(shard.data_bytes))
    assert len(shard.head()) % 8 == 0
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "ü"}
        found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  no mapping
    assert found == {tensor.name: tensor.shape for tensor in tensors}
    ours = read_header(path).entries.values()
    assert [(entry.name, entry.dtype, entry.shape) for entry in ours] == [
        tensor[:3] for tensor in tensors
    ]


def test_every_fact_changes_the_hash() -> None:
    tensors = [PlannedTensor("a", "U8", (2, 3), "k"), PlannedTensor("b", "U8", (1,))]
    changed = [
        [tensors[0]._replace(name="c"), tensors[1]],
        [tensors[0]._replace(dtype="I8"), tensors[1]],
        [tensors[0]._replace(shape=(3, 2)), tensors[1]],
        [tensors[0]._replace(key="l"), tensors[1]],
        tensors[::-1],
    ]
    plans = [WritePlan.from_tensors(each) for each in (tensors, *changed)]
    plans.append(WritePlan.from_tensors(tensors, shard_bytes=6))
    plans.append(WritePlan.from_tensors(tensors, metadata={}))
    plans.append(WritePlan.from_tensors(tensors, sources={"seed": "1"}))
    assert len({plan.hash for plan in plans}) == len(plans)
    assert WritePlan.from_tensors(tensors).hash == plans[0].hash
    # The short form tells apart whatever the hash does, so a difference has a name.
    lines = [json.dumps(plan.facts() | {"plan": ""}, sort_keys=True) for plan in plans]
    assert len(set(lines)) == len(plans) - 1, "only the producer's key is in the hash alone"


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (PlannedTensor("", "U8", ()), "a name"),
        (PlannedTensor("__metadata__", "U8", ()), "a name"),
        (PlannedTensor("\ud800", "U8", ()), "a name"),
        (PlannedTensor("x" * 5000, "U8", ()), "a name"),
        (PlannedTensor("x", "U8", (-1,)), "counts"),
        (PlannedTensor("x", "U8", (2.0,)), "counts"),  # type: ignore[arg-type]
        (PlannedTensor("x", "U8", (1 << 40, 1 << 40)), "counts"),
        (PlannedTensor("x", "U8", (1,) * 65), "counts"),
        (PlannedTensor("x", "F4", (3,)), "whole bytes"),
        (PlannedTensor("x", "fp8", (3,)), "known names"),
    ],
)
def test_unusable_tensors_are_refused(tensor: PlannedTensor, told: str) -> None:
    with pytest.raises((InvalidArgument, UnknownName), match=told):
        WritePlan.from_tensors([tensor])


def test_unusable_plans_are_refused() -> None:
    one = PlannedTensor("x", "U8", (3,))
    with pytest.raises(InvalidArgument, match="each name once"):
        WritePlan.from_tensors([one, one])
    with pytest.raises(InvalidArgument, match="1 to"):
        WritePlan.from_tensors([])
    with pytest.raises(InvalidArgument, match="at least 1"):
        WritePlan.from_tensors([one], shard_bytes=0)
    with pytest.raises(InvalidArgument, match="metadata"):
        WritePlan.from_tensors([one], metadata={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="texts"):
        WritePlan.from_tensors([one], sources={"a": "\ud800"})
    with pytest.raises(InvalidArgument, match="at most 99999 shards"):
        WritePlan.from_tensors(planned([1] * 100_001), shard_bytes=1)


def test_a_head_that_no_reader_accepts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("degarble.harness.checkpoint.write.plan.LARGEST_HEADER", 200)
    tensors = planned([1] * 4)
    assert len(WritePlan.from_tensors(tensors, shard_bytes=2).shards) == 2
    with pytest.raises(InvalidArgument, match="smaller shard_bytes"):
        WritePlan.from_tensors(tensors)


def test_a_planted_cut_through_a_group_changes_the_plan() -> None:
    """The hash covers the boundaries themselves, not only what led to them."""
    plan = WritePlan.from_tensors(planned([4, 4], ["a", "a"]), shard_bytes=4)
    assert len(plan.shards) == 1
    loose = WritePlan.from_tensors(
        [replace_key(tensor) for tensor in plan.shards[0].tensors], shard_bytes=4
    )
    assert len(loose.shards) == 2
    assert loose.hash != plan.hash
    assert replace(plan.shards[0], number=2).file == "model-00002-of-00001.safetensors"


def replace_key(tensor: PlannedTensor) -> PlannedTensor:
    return tensor._replace(key="")
