"""A row that cannot be read is named and left out; the others are read as they were added."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from degarble.harness.history.store import HistoryStore
from degarble.suites.history.history_cases import run
from degarble.suites.history.hostile_stores import NIGHTS, ROWS, sound_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "h.sqlite"
    sound_store(path)
    return path.read_bytes()


def _answers(path: Path) -> tuple[HistoryStore, dict[str, tuple[object, object]]]:
    with HistoryStore(str(path)) as store:
        return store, {each.id: (each, store.numbers(each)) for each in store.runs()}


def test_a_sound_store_skips_nothing(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    store, answers = _answers(path)
    assert store.skipped == ()
    assert len(answers) == NIGHTS + 1
    assert all(numbers for _, numbers in answers.values())


@pytest.mark.parametrize("name", ROWS)
def test_one_bad_row_does_not_hide_the_others(name: str, sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    _, wanted = _answers(path)
    ROWS[name](path, random.Random(0))
    store, found = _answers(path)
    assert store.skipped, "a row was changed, and nothing said so"
    assert all(each.reason and each.table for each in store.skipped)
    assert all(each[0] == wanted[key][0] for key, each in found.items())
    whole = [key for key, each in found.items() if each == wanted[key]]
    layout_lost = any(each.table == "degarble_layouts" for each in store.skipped)
    assert len(whole) >= (1 if layout_lost or name == "layout is gone" else NIGHTS)


def test_a_store_from_before_checksums_is_read_and_gets_them(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE degarble_sums")
    store, found = _answers(path)
    assert (store.skipped, len(found)) == ((), NIGHTS + 1)
    with HistoryStore(str(path), create=True) as opened:
        opened.add(run(99))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE degarble_numbers SET doubles = zeroblob(length(doubles))")
        connection.commit()
    store, found = _answers(path)
    assert len(store.skipped) == 1
    assert len(found) == NIGHTS + 2
