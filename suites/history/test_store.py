"""Stores on SQLite and PostgreSQL: addresses, damaged files and rows, and the export."""

from __future__ import annotations

import math
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    Refused,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.history.store import COLUMNS, HistoryStore, address_of, write_parquet
from degarble.harness.plugins.presence import find_programs
from degarble.harness.report.verdict import Verdict
from degarble.suites.base.test_masking import SPELLINGS
from degarble.suites.history.history_cases import PLACES, W2, budget, history, night, run
from degarble.suites.history.hostile_stores import FILES, NIGHTS, ROWS, SCHEMAS, sound_store
from degarble.suites.history.hostile_stores import KINDS as HOSTILE_STORES_KINDS
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Iterator

# --------------------------------------------------------------------------------------------------
# The store on SQLite and on a real PostgreSQL server: the same suite for both.

KINDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Start a server of our own on a socket in a folder of its own, and end it."""
    pg_ctl = find_programs("postgres")[0]
    assert pg_ctl is not None
    folder = Path(tempfile.mkdtemp(prefix="degarble-pg-"))
    # A server refuses to run as root; Debian's packages bring a user for it.
    user = "postgres" if os.geteuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    data = str(folder / "data")

    def do(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, user=user, cwd=folder)

    do(pg_ctl, "initdb", "-D", data, "-o", "--auth=trust --username=degarble --no-sync")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    do(pg_ctl, "start", "-D", data, "-w", "-l", str(folder / "log"), "-o", options)
    try:
        yield f"postgresql://degarble@/postgres?host={folder}"
    finally:
        do(pg_ctl, "stop", "-D", data, "-m", "immediate")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "history.sqlite")
    address: str = request.getfixturevalue("server")
    import sqlalchemy as sql  # noqa: PLC0415

    engine = sql.create_engine(address.replace("postgresql:", "postgresql+psycopg:", 1))
    with engine.begin() as connection:
        tables = ("sums", "numbers", "layouts", "runs", "store")
        for table in tables:
            connection.execute(sql.text(f"DROP TABLE IF EXISTS degarble_{table}"))
    engine.dispose()
    return address


def test_what_was_added_is_read_back(url: str, seed: int) -> None:
    runs = history(5, 3, seed)
    with HistoryStore(url, create=True) as store:
        assert [store.add(history_run) for history_run in runs] == [True] * 5
        assert store.add(runs[2]) is False
    with HistoryStore(url) as store:
        [stream] = store.streams()
        assert (stream.subject, stream.runs, stream.first, stream.last) == (
            "tiny", 5, night(0), night(4),
        )  # fmt: skip
        told = store.runs(stream)
        assert [stored_run.id for stored_run in told] == [history_run.id for history_run in runs]
        assert told[0].verdict is Verdict.AGREES
        assert told[4].facts == {"checkpoint": "c0ffee", "torch": "2.14.0"}
        assert store.numbers(told[4]) == {"budgets": dict(runs[4].values["budgets"])}
        found = store.nights(stream, "budgets")
        assert found.places == tuple(sorted(PLACES))
        column = found.places.index(W2)
        assert found.values[:, column].tolist() == [e.values["budgets"][W2] for e in runs]
        assert store.nights(stream, "speed").values.shape == (0, 0)


def test_a_run_that_is_tried_is_answered_and_leaves_nothing(url: str, seed: int) -> None:
    runs = history(4, 3, seed)
    with HistoryStore(url, create=True) as store:
        for history_run in runs[:3]:
            store.add(history_run)
        [stream] = store.streams()
        with store.trying(runs[3]):
            assert [stored_run.id for stored_run in store.runs(stream)] == [
                each.id for each in runs
            ]
            assert len(store.nights(stream, "budgets").nights) == 4
        assert store.streams()[0].runs == 3
        with pytest.raises(UnknownName), store.trying(runs[3]):
            store.run("beef")
        assert store.streams()[0].runs == 3
        assert store.add(runs[3]) is True
    with HistoryStore(url) as store:
        assert store.streams()[0].runs == 4


def test_runs_of_one_night_are_averaged_and_missing_places_stay_open(url: str) -> None:
    with HistoryStore(url, create=True) as store:
        store.add(run(0, {"head": 0.1}, started="a"))
        store.add(run(0, {"head": 0.3}, started="b"))
        store.add(run(1, {W2: 0.5}))
        [stream] = store.streams()
        found = store.nights(stream, "budgets")
    assert found.nights == (night(0), night(1))
    assert [len(each) for each in found.runs] == [2, 1]
    values = dict(zip(found.places, found.values.T.tolist(), strict=True))
    assert values["head"][0] == pytest.approx(0.2)
    assert math.isnan(values["head"][1])
    assert math.isnan(values[W2][0])
    assert values[W2][1] == 0.5


def test_machines_and_subjects_are_apart(url: str) -> None:
    with HistoryStore(url, create=True) as store:
        for history_run in (run(0), run(1, machine="B200"), run(2, subject="V4-Pro")):
            store.add(history_run)
        assert [(s.subject, s.machine, s.runs) for s in store.streams()] == [
            ("V4-Pro", "CPU: a processor", 1),
            ("tiny", "B200", 1),
            ("tiny", "CPU: a processor", 1),
        ]


def test_a_run_is_found_by_the_beginning_of_its_id_or_commit(url: str) -> None:
    runs = [run(0), run(1), run(0x10)]
    with HistoryStore(url, create=True) as store:
        for history_run in runs:
            store.add(history_run)
        assert store.run(runs[1].id[:8]).id == runs[1].id
        assert store.run("00000010").id == runs[2].id
        with pytest.raises(InvalidArgument, match="2 begin so"):
            store.run("0000000")
        with pytest.raises(UnknownName):
            store.run("beef")
        with pytest.raises(UnknownName):
            store.run("")


def _add(url: str, number: int) -> None:
    with HistoryStore(url, create=True) as store:
        for step in range(10):
            store.add(run(step, {f"p{number}": float(step)}, started=str(number)))


def test_writers_wait_for_each_other(url: str) -> None:
    with HistoryStore(url, create=True) as store:
        store.add(run(99))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: _add(url, number), range(2)))
    with HistoryStore(url) as store:
        assert len(store.runs()) == 21


def _tried(url: str, number: int) -> int:
    with HistoryStore(url) as store, store.trying(run(number)):
        return store.streams()[0].runs


def test_a_trial_waits_for_a_writer_of_the_same_places(url: str) -> None:
    with HistoryStore(url, create=True) as store, ThreadPoolExecutor(1) as pool:
        with store._writing() as connection:
            store._insert(connection, run(0))  # its list of places is the first of its kind
            waiting = pool.submit(_tried, url, 1)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.5)
        assert waiting.result() == 2
        assert store.streams()[0].runs == 1


def test_first_writers_wait_for_each_other(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: _add(url, number), range(4)))
    with HistoryStore(url) as store:
        assert len(store.runs()) == 40


def test_a_store_is_there_whole_or_not_at_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    # Between the tables and the row that names their schema.
    monkeypatch.setattr("degarble.harness.history.store.STORE_SCHEMA", Killed())
    with pytest.raises(KeyboardInterrupt), HistoryStore(url, create=True):
        pass
    monkeypatch.undo()
    with HistoryStore(url, create=True) as store:
        assert store.add(run(0))


def test_a_run_that_cannot_be_added_leaves_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HistoryStore(url, create=True) as store:
        store.add(run(0))
        broken = run(1)
        monkeypatch.setitem(broken.values["budgets"], "head", "no number")
        with pytest.raises(ValueError, match="could not convert"):
            store.add(broken)
        assert [stored_run.id for stored_run in store.runs()] == [run(0).id]


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"\7" * 4096])
def test_a_file_that_is_no_store_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile), HistoryStore(str(path)):
        pass
    assert path.read_bytes() == content


def test_a_store_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with HistoryStore(str(path), create=True) as store:
        store.add(run(0))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE degarble_store SET value = '2'")
    connection.close()
    with pytest.raises(UnreadableFile, match="schema"), HistoryStore(str(path)):
        pass


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("missing.sqlite", UnreadableFile),
        ("mysql://me:secret@host/db", InvalidArgument),
        ("what://ever", InvalidArgument),
        ("postgresql://me:secret@127.0.0.1:9/db?connect_timeout=2", UnreadableFile),
        ("postgresql://me:secret@[bad/db", InvalidArgument),
        ("postgresql://me:secret@host:abc/db", InvalidArgument),
        ("postgresql://me:se@secret@host/db", InvalidArgument),
        ("sqlite:///missing.sqlite", UnreadableFile),
    ],
)
def test_an_address_without_a_store_is_refused_without_its_password(
    address: str, kind: type[Refused], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as refusal, HistoryStore(address):
        pass
    assert "secret" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritablePath):
        HistoryStore(str(tmp_path / "no" / "h.sqlite"), create=True)


def test_numbers_keep_every_bit(url: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = {f"p{n}": float(v) for n, v in enumerate(rng.standard_normal(50) * 1e-300)}
    kept = run(0, values)
    with HistoryStore(url, create=True) as store:
        store.add(kept)
        assert store.numbers(store.runs()[0])["budgets"] == values


# --------------------------------------------------------------------------------------------------
# What may name a store: no address becomes a file, and no refusal shows a password.

OTHERS = (
    "me:secret@host", "me/secret@host/db", "secret@host", "host=db password=secret",
    "sqlite://me:secret@host/db", "sqlite:///me:secret@host/db", "postgresql:///me:secret@host/db",
    "postgresql://host/db:secret", "mysql://me:secret@host/db", "secret://me:secret@host",
    "me:secret@host://db", "postgresql;//me:secret@host/db", "host=db",
)  # fmt: skip


def _said_of(text: str, *, create: bool) -> str:
    try:
        address = address_of(text, create=create)
    except Refused as error:
        return str(error)
    assert address.engine.dialect.name == "postgresql"  # what can be read as an address is one
    return address.name


@pytest.mark.parametrize("create", [False, True])
def test_an_address_is_never_a_file_and_never_shown(
    create: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (*SPELLINGS, *OTHERS):
        assert "cret" not in _said_of(text, create=create), text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("password", ["secret", "se:cret", "se/cret", "se%40cret", "se%2Fcr%25et"])
def test_what_a_driver_says_has_no_password(password: str) -> None:
    url = f"postgresql://me:{password}@host/db?options=-cx%3Dhidden"
    address = address_of(url, create=False)
    plain = unquote(password)
    for said in (url, f"no entry for {plain}", f"{plain!r} and {password}", "hidden -cx=hidden"):
        shown = address.without_secrets(f"connection failed: {said}")
        assert shown.startswith("connection failed")
        assert not any(each in shown for each in (password, plain, "-cx=hidden"))
    assert "me" not in address.name


@pytest.mark.parametrize("name", ["h.sqlite", "a b.db", "me@work.sqlite", "x:y.sqlite", "run=3"])
def test_ordinary_names_are_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "me@work").mkdir()
    assert address_of(str(tmp_path / name), create=True).engine.dialect.name == "sqlite"
    assert address_of(str(tmp_path / "me@work" / "h"), create=True).name == "h"


def test_a_short_password_hides_the_whole_line() -> None:
    address = address_of("postgresql://me:ab@host/db", create=False)
    assert address.without_secrets("a cable broke") == "an address that is not shown"
    assert address.without_secrets("no route") == "no route"


# --------------------------------------------------------------------------------------------------
# A damaged file, or one with unexpected tables, is refused by name and at once.


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
@pytest.mark.parametrize("name", [*SCHEMAS, *HOSTILE_STORES_KINDS])
def test_what_is_no_store_of_ours_is_refused(
    name: str, create: bool, sound: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    (SCHEMAS | HOSTILE_STORES_KINDS)[name](path, random.Random(0))
    with pytest.raises(Refused):
        _use(path, create=create)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_or_its_answer_is_whole(
    name: str, sound: bytes, tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    with HistoryStore(str(path)) as store:
        wanted = [(stored_run, store.numbers(stored_run)) for stored_run in store.runs()]
    for number in range(4):
        path.write_bytes(sound)
        FILES[name](path, random.Random(seed + number))
        try:
            with HistoryStore(str(path)) as store:
                found = [(stored_run, store.numbers(stored_run)) for stored_run in store.runs()]
        except Refused:
            continue
        assert found == wanted or store.skipped


# --------------------------------------------------------------------------------------------------
# A row that cannot be read is named and left out; the others are read as they were added.


def _answers(path: Path) -> tuple[HistoryStore, dict[str, tuple[object, object]]]:
    with HistoryStore(str(path)) as store:
        return store, {
            stored_run.id: (stored_run, store.numbers(stored_run)) for stored_run in store.runs()
        }


def test_a_sound_store_skips_nothing(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    store, answers = _answers(path)
    assert store.skipped == ()
    assert len(answers) == NIGHTS + 1
    assert all(numbers for _, numbers in answers.values())


@pytest.mark.parametrize("name", thinned(ROWS))
def test_one_bad_row_does_not_hide_the_others(name: str, sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(sound)
    _, wanted = _answers(path)
    ROWS[name](path, random.Random(0))
    store, found = _answers(path)
    assert store.skipped, "a row was changed, and nothing said so"
    assert all(skipped.reason and skipped.table for skipped in store.skipped)
    assert all(each[0] == wanted[key][0] for key, each in found.items())
    whole = [key for key, each in found.items() if each == wanted[key]]
    layout_lost = any(skipped.table == "degarble_layouts" for skipped in store.skipped)
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


# --------------------------------------------------------------------------------------------------
# The export: every number of the store, and no half file.


@pytest.mark.needs("pyarrow")
def test_every_number_is_a_row(tmp_path: Path, seed: int) -> None:
    import pandas as pd  # noqa: PLC0415

    runs = history(4, 2, seed)
    path = tmp_path / "h.parquet"
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for history_run in runs:
            store.add(history_run)
        assert write_parquet(store, path) == 12
    found = pd.read_parquet(path)
    assert tuple(found.columns) == COLUMNS
    kept = found[found.place == W2].sort_values("night")
    assert kept["value"].tolist() == [budget(each) for each in runs]
    assert kept.run.tolist() == [each.id for each in runs]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["h.parquet", "h.sqlite"]


@pytest.mark.needs("pyarrow")
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, seed: int) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        store.add(history(1, 1, seed)[0])
        (tmp_path / "h.parquet").mkdir()
        with pytest.raises(UnwritablePath):
            write_parquet(store, tmp_path / "h.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h.parquet", "h.sqlite"]
