"""A file that is damaged, or whose tables are something else, is refused by name and at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import Refused
from degarble.harness.history.store import HistoryStore
from degarble.suites.history.history_cases import run
from degarble.suites.history.hostile_stores import FILES, KINDS, SCHEMAS, sound_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "h.sqlite"
    sound_store(path)
    return path.read_bytes()


def _use(path: Path, *, create: bool) -> None:
    with HistoryStore(str(path), create=create) as store:
        store.runs()
        store.add(run(1000))


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("name", [*SCHEMAS, *KINDS])
def test_what_is_no_store_of_ours_is_refused(
    name: str, create: bool, sound: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    (SCHEMAS | KINDS)[name](path, random.Random(0))
    with pytest.raises(Refused):
        _use(path, create=create)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_or_its_answer_is_whole(
    name: str, sound: bytes, tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    with HistoryStore(str(path)) as store:
        wanted = [(each, store.numbers(each)) for each in store.runs()]
    for number in range(4):
        path.write_bytes(sound)
        FILES[name](path, random.Random(seed + number))
        try:
            with HistoryStore(str(path)) as store:
                found = [(each, store.numbers(each)) for each in store.runs()]
        except Refused:
            continue
        assert found == wanted or store.skipped
