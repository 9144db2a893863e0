"""Stores that are damaged, or that somebody else wrote into; a campaign makes hundreds of them."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from degarble.harness.history.store import HistoryStore
from degarble.suites.history.history_cases import history, run

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

NIGHTS, MOVED = 30, 27
PAGE = 4096


def sound_store(path: Path, seed: int = 0) -> None:
    """Write a store of two machines, in which one component moved."""
    with HistoryStore(str(path), create=True) as store:
        for history_run in history(NIGHTS, MOVED, seed):
            store.add(history_run)
        store.add(run(3, {"head": 0.5}, machine="another"))


def _row(statement: str) -> Callable[[Path, random.Random], None]:
    """Change the store by SQL; :run and :layout are one of its runs and layouts."""

    def change(path: Path, rng: random.Random) -> None:
        with closing(sqlite3.connect(path)) as connection:
            runs = [row[0] for row in connection.execute("SELECT id FROM degarble_runs")]
            layouts = [row[0] for row in connection.execute("SELECT digest FROM degarble_layouts")]
            given = {"run": rng.choice(runs), "layout": rng.choice(layouts)}
            used = {name: value for name, value in given.items() if f":{name}" in statement}
            connection.execute(statement, used)
            connection.commit()

    return change


_OF_A_RUN = {
    "unknown verdict": "verdict = 'MAYBE'",
    "another verdict": "verdict = 'UNSTABLE'",
    "verdict is a number": "verdict = 7",
    "facts are no JSON": "facts = '{'",
    "facts are a list": "facts = '[1]'",
    "facts are numbers": """facts = '{"a": 1}'""",
    "facts are bytes": "facts = x'ff00'",
    "facts are deep": f"facts = '{'[' * 100_000}'",
    "facts are another text": """facts = '{"torch": "9"}'""",
    "subject is empty": "subject = ''",
    "subject is no UTF-8": "subject = CAST(x'ff80' AS TEXT)",
    "subject is another": "subject = 'Tiny'",
    "machine has controls": "machine = 'a' || char(27) || '[2J'",
    "night is no date": "night = 'yesterday'",
    "night is a number": "night = 20260101",
    "started is bytes": "started = x'00'",
    "commit is long": f"commit_id = '{'a' * 300}'",
    "commit is another": "commit_id = 'beef'",
    "id is no UTF-8": "id = CAST(x'ff80ff80' AS TEXT)",
    "id is a number": "id = 5",
    "id is another": "id = '0123456789abcdef'",
}
_OF_NUMBERS = {
    "bytes are no multiple of 8": "doubles = substr(doubles, 1, length(doubles) - 3)",
    "fewer numbers than places": "doubles = substr(doubles, 9)",
    "more numbers than places": "doubles = doubles || x'0000000000000000'",
    "numbers are NaN": "doubles = zeroblob(length(doubles) - 2) || x'f87f'",
    "numbers are a text": "doubles = 'hello'",
    "numbers are a number": "doubles = 1000000000000",
    "numbers are others": "doubles = zeroblob(length(doubles))",
    "run of the numbers is not there": "run = 'feedfeedfeedfeed'",
    "layout of the numbers is not there": "layout = 'no such layout'",
}
_OF_A_LAYOUT = {
    "places are no JSON": "places = '['",
    "places are an object": "places = '{}'",
    "places are numbers": "places = '[1, 2, 3]'",
    "places are others": """places = '["a", "b", "c"]'""",
    "places are no UTF-8": "places = CAST(x'5b22ff225d' AS TEXT)",
    "measure is another": "measure = 'speed'",
    "digest is no UTF-8": "digest = CAST(x'ff' AS TEXT)",
}
ROWS: dict[str, Callable[[Path, random.Random], None]] = (
    {
        name: _row(f"UPDATE degarble_runs SET {change} WHERE id = :run")
        for name, change in _OF_A_RUN.items()
    }
    | {
        name: _row(f"UPDATE degarble_numbers SET {change} WHERE run = :run")
        for name, change in _OF_NUMBERS.items()
    }
    | {
        name: _row(f"UPDATE degarble_layouts SET {change} WHERE digest = :layout")
        for name, change in _OF_A_LAYOUT.items()
    }
    | {
        "numbers are gone": _row("DELETE FROM degarble_numbers WHERE run = :run"),
        "run is gone": _row("DELETE FROM degarble_runs WHERE id = :run"),
        "layout is gone": _row("DELETE FROM degarble_layouts WHERE digest = :layout"),
        "checksum is another": _row("UPDATE degarble_sums SET sha256 = 'x' WHERE run = :run"),
        "checksum is a number": _row("UPDATE degarble_sums SET sha256 = 1 WHERE run = :run"),
    }
)


def _script(text: str) -> Callable[[Path, random.Random], None]:
    def change(path: Path, _rng: random.Random) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(text)

    return change


_ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t)"
_COLUMNS = "'0123456789abcdef' id, 'a' subject, '2026-01-01' night, '' started, 'b' machine, "
_COLUMNS += "'' commit_id, 'AGREES' verdict, '{}' facts"
_COMPUTED = "x TEXT AS (upper(id)) VIRTUAL"
SCHEMAS: dict[str, Callable[[Path, random.Random], None]] = {
    "runs are an endless view": _script(
        "DROP TABLE degarble_runs; "
        f"CREATE VIEW degarble_runs AS {_ENDLESS} SELECT {_COLUMNS} FROM t"
    ),
    "the store is a view": _script(
        "DROP TABLE degarble_store; CREATE VIEW degarble_store AS SELECT 'schema' key, '1' value"
    ),
    "a trigger": _script(
        "CREATE TRIGGER t AFTER INSERT ON degarble_runs BEGIN DELETE FROM degarble_numbers; END"
    ),
    "a virtual table": _script(
        "DROP TABLE degarble_layouts; CREATE VIRTUAL TABLE degarble_layouts USING "
        "fts5(digest, measure, places)"
    ),
    "a computed column": _script(f"ALTER TABLE degarble_runs ADD COLUMN {_COMPUTED}"),
    "no runs": _script("DROP TABLE degarble_runs"),
    "a column is missing": _script("ALTER TABLE degarble_runs RENAME COLUMN facts TO fact"),
    "another schema": _script("UPDATE degarble_store SET value = '2'"),
    "schema is bytes": _script("UPDATE degarble_store SET value = x'31'"),
    "no schema": _script("DELETE FROM degarble_store"),
}


def _bytes(path: Path, change: Callable[[bytearray], bytearray | None]) -> None:
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data) or data)


def _flip(path: Path, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        for _ in range(rng.choice((1, 1, 3, 20))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    _bytes(path, change)


def _random_range(path: Path, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.choice((8, 100, 3000)))
        data[begin:end] = rng.randbytes(end - begin)

    _bytes(path, change)


def _zeros(path: Path, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.choice((8, 100, PAGE)))
        data[begin:end] = bytes(end - begin)

    _bytes(path, change)


def _cut(path: Path, rng: random.Random) -> None:
    _bytes(path, lambda data: data[: rng.randrange(len(data))] or bytearray(1))


def _cut_pages(path: Path, rng: random.Random) -> None:
    _bytes(path, lambda data: data[: PAGE * rng.randrange(1, len(data) // PAGE)])


def _swap(path: Path, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        one, two = (PAGE * rng.randrange(len(data) // PAGE) for _ in range(2))
        data[one : one + PAGE], data[two : two + PAGE] = (
            data[two : two + PAGE],
            data[one : one + PAGE],
        )

    _bytes(path, change)


def _copy(path: Path, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        one, two = (PAGE * rng.randrange(1, len(data) // PAGE) for _ in range(2))
        data[one : one + PAGE] = data[two : two + PAGE]

    _bytes(path, change)


def _head(path: Path, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        data[rng.randrange(16, 100)] = rng.randrange(256)

    _bytes(path, change)


def _schema_text(path: Path, rng: random.Random) -> None:
    def change(data: bytearray) -> None:
        at = data.find(b"CREATE TABLE") + rng.randrange(200)
        data[at] = rng.choice((0xFF, 0x80, 0x22, 0x28, 0x00))

    _bytes(path, change)


def _fifo(path: Path, _rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


def _device(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


FILES: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped bits": _flip,
    "random bytes": _random_range,
    "zeros": _zeros,
    "cut": _cut,
    "cut at a page": _cut_pages,
    "pages swapped": _swap,
    "page copied": _copy,
    "head": _head,
    "schema text": _schema_text,
}
KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "a pipe": _fifo, "a folder": _folder, "a link to itself": _loop, "a device": _device
}  # fmt: skip
