"""The place of a process among ranks."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference.processes import (
    RankInfo,
    environment_of_child,
    free_port,
    process_group,
    read_rank_info,
)


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
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in told.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="MASTER_ADDR"), process_group():
        pass


def test_a_child_has_a_meeting_point_of_its_own() -> None:
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1", "RANK": "1"}
    port = free_port()
    assert environment_of_child(told, port) == {"RANK": "1", "MASTER_PORT": str(port)}
