"""Keys of what a night and the history write for machines, and the columns of a store.

Values are other suites' concern, so small made-up runs are enough.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from degarble.harness.history.store import HistoryStore
from degarble.harness.nightly.pages import write_night
from degarble.suites.golden.commands import ran
from degarble.suites.history.history_cases import history
from degarble.suites.nightly.test_night import night_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NIGHTS, _MOVED = 48, 45


def data(folder: Path) -> dict[str, list[str]]:
    """Return the keys of each document by its name."""
    store = folder / "history.sqlite"
    with HistoryStore(str(store), create=True) as opened:
        for run in history(_NIGHTS, _MOVED, seed=1):
            opened.add(run)
    (folder / "night").mkdir()
    night = write_night(night_in(folder / "night"))
    first, second = (f"{number:08x}" for number in (_MOVED - 1, _MOVED))
    made = {
        "night": json.loads(night.document.read_text(encoding="utf-8")),
        "history runs": ran("history", "runs", "--store", store),
        "history trends": ran("history", "trends", "--store", store, "--report", folder),
        "history changes": ran("history", "changes", "--store", store, status=1),
        "history compare": ran("history", "compare", first, second, "--store", store, status=1),
    }
    found = {name: sorted(set(keys(document))) for name, document in made.items()}
    return found | {"history store": columns(store)}


def keys(value: Any, above: str = "") -> Iterator[str]:
    """Return the path of every key; lists are one place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{above}{key}"
            yield from keys(inner, f"{above}{key} > ")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, above)


def columns(store: Path) -> list[str]:
    """Return the columns of a store's tables."""
    with closing(sqlite3.connect(store)) as opened:
        tables = [
            name for (name,) in opened.execute("SELECT name FROM sqlite_schema ORDER BY name")
        ]
        return [
            f"{table}.{column[1]}"
            for table in tables
            for column in opened.execute(f"PRAGMA table_info({table})")
        ]
