from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.audit.numbers.numbers import judge_numbers, measure_numbers
from degarble.harness.checkpoint.audit.numbers.table import NAMES
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.spread import WalkPiece, measured, pieces
from degarble.suites.commands.audit.audit_cases import healthy_checkpoint, sick_checkpoint
from degarble.suites.commands.calls import call
from degarble.suites.commands.cluster_cases import PlayedCluster, played_cluster

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sick_checkpoint(tmp_path_factory)


def test_joined_tables_are_the_table_of_one_walk(sick: Path) -> None:
    asked: list[str | None] = []
    counted: list[int] = []
    with Checkpoint.survey(sick) as checkpoint:
        alone = measure_numbers(checkpoint)
        joined = measured(checkpoint, sick, PlayedCluster(asked), counted.append)
        assert joined.units == alone.units
        assert len(asked) > 1
        assert sum(counted) == alone["nbytes"].sum()
        for name in NAMES:
            assert np.array_equal(
                joined[name], alone[name], equal_nan=alone[name].dtype.kind == "f"
            ), name
        assert judge_numbers(checkpoint, joined) == judge_numbers(checkpoint, alone)


def test_the_command_is_spread_over_a_cluster(
    sick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = call(capsys, "--json", "audit", sick).document
    asked = played_cluster(monkeypatch)
    there = call(capsys, "--json", "audit", sick, "--cluster", "ray").document
    assert len(asked) > 1
    assert there["findings"] == here["findings"]
    assert there["numbers"] == here["numbers"]


def test_places_are_cut_into_pieces_of_about_one_size() -> None:
    cut = pieces([("a", 4), ("b", 10), ("a", 6), ("c", 500), ("d", 10), ("e", 10)], 4)
    assert cut == [WalkPiece(("a", "b", "c"), 520), WalkPiece(("d", "e"), 20)]
    many = pieces(((str(i), 1) for i in range(1000)), 8)
    assert len(many) <= 8
    assert [name for piece in many for name in piece.places] == [str(i) for i in range(1000)]


def test_a_thread_that_fails_ends_the_walk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Otherwise Ctrl-C and a full disk would be answered when 881 GB have been read."""
    calls: list[int] = []
    lock = threading.Lock()

    def refuse(nbytes: int) -> None:
        with lock:
            calls.append(nbytes)
        raise InvalidArgument("progress", nbytes, "nothing", "Planted.")

    folder = healthy_checkpoint(tmp_path_factory)
    with Checkpoint.survey(folder) as opened, pytest.raises(InvalidArgument, match="Planted"):
        measure_numbers(opened, workers=2, progress=refuse)
    assert 1 <= len(calls) <= 2  # each thread at its first unit at most


def test_an_interrupted_walk_ends_soon(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def interrupted(_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "degarble.harness.checkpoint.audit.numbers.numbers.as_completed", interrupted
    )
    folder = healthy_checkpoint(tmp_path_factory)
    with Checkpoint.survey(folder) as opened, pytest.raises(KeyboardInterrupt):
        measure_numbers(opened, workers=2, progress=done.append)
    assert sum(done) < sum(entry.nbytes for entry in opened.entries.values()) / 2
