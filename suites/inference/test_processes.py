"""Processes of a run: ranks, workers, and progress over finished shards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.write.writer import begin, write, write_shard
from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import spread
from degarble.harness.inference import processes
from degarble.harness.inference.processes import (
    RankInfo,
    counting,
    environment_of_child,
    free_port,
    process_group,
    read_rank_info,
    usable_workers,
    workers_for,
    workers_of,
)
from degarble.harness.report.progress import Progress
from degarble.suites.checkpoint.writing_cases import ENDING, produce, small_plan
from degarble.suites.commands.cluster_cases import PlayedCluster, played_cluster

if TYPE_CHECKING:
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# The place of a process among ranks.


def test_a_process_alone_leads() -> None:
    for environment in ({}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}):
        place = read_rank_info(environment)
        assert place.alone
        assert place.leads


def test_a_rank_of_several_is_one_of_them() -> None:
    assert read_rank_info({"RANK": "3", "WORLD_SIZE": "8"}) == RankInfo(3, 8)
    assert not RankInfo(3, 8).leads
    assert RankInfo(0, 8).leads
    assert not RankInfo(0, 8).alone


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "2"},
        {"WORLD_SIZE": "two", "RANK": "0"},
        {"WORLD_SIZE": "0", "RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "-1"},
    ],
)
def test_no_place_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="RANK of WORLD_SIZE"):
        read_rank_info(environment)


@pytest.mark.parametrize(("address", "port"), [(None, None), ("127.0.0.1", "none")])
def test_ranks_without_a_place_to_meet_are_refused(
    address: str | None, port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in fields.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="MASTER_ADDR"), process_group():
        pass


def test_a_child_has_a_meeting_point_of_its_own() -> None:
    fields = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1", "RANK": "1"}
    port = free_port()
    assert environment_of_child(fields, port) == {"RANK": "1", "MASTER_PORT": str(port)}


# --------------------------------------------------------------------------------------------------
# The workers of a run, and how far a run is: finished shards are no speed.

PLAN = small_plan()


def test_there_is_one_worker_a_core_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert usable_workers() == 1
    monkeypatch.setattr(os, "cpu_count", lambda: 500)
    assert usable_workers() == processes.MOST_WORKERS
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    with workers_of(None) as local:
        assert local == 1


def test_a_cluster_is_joined_at_the_given_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = played_cluster(monkeypatch)
    with workers_of("ray", "here:1") as joined:
        assert isinstance(joined, PlayedCluster)
    assert asked == ["here:1"]


def test_shards_of_an_earlier_run_are_done_but_no_speed(tmp_path: Path) -> None:
    begin(tmp_path / "target", PLAN)
    for shard in PLAN.shards[:4]:
        write_shard(tmp_path / "target", shard, produce)
    steps: list[str] = []
    now = [0.0]
    progress = Progress("write", PLAN.data_bytes, lambda p: steps.append(p.step), lambda: now[0])
    heard = counting(progress, tmp_path / "target", PLAN)
    now[0] = 2.0
    write(tmp_path / "target", PLAN, produce, ENDING, progress=heard)
    pace = progress.pace
    assert pace.done == pace.total
    assert pace.rate == sum(shard.data_bytes for shard in PLAN.shards[4:]) / 2
    assert steps == [shard.file for shard in PLAN.shards[4:]]


def test_a_new_target_has_no_earlier_run(tmp_path: Path) -> None:
    progress = Progress("write", PLAN.data_bytes)
    write(
        tmp_path / "new", PLAN, produce, ENDING, progress=counting(progress, tmp_path / "new", PLAN)
    )
    assert progress.pace.done == PLAN.data_bytes


def test_more_workers_can_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEGARBLE_WORKERS", "7")
    with spread(Terminal()) as asked:
        assert asked == 7
    monkeypatch.delenv("DEGARBLE_WORKERS")
    with spread(Terminal()) as usual:
        assert usual == usable_workers()


@pytest.mark.parametrize("told", ["0", "-1", "many", "1025", "9" * 50, "²"])
def test_a_number_of_workers_that_is_none_is_refused(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEGARBLE_WORKERS", told)
    with pytest.raises(InvalidArgument, match="DEGARBLE_WORKERS"), spread(Terminal()):
        pass


def test_each_core_has_a_worker_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(32)), raising=False)
    monkeypatch.setattr(processes, "_free_bytes", lambda: 100 << 30)
    assert workers_for(1 << 30) == 32
    assert workers_for(10 << 30) == 10
    assert workers_for(1 << 50) == 1
    monkeypatch.undo()
    assert workers_for(1) >= 1
