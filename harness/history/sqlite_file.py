"""Open a SQLite file as a store, and check that the file is sound.

The file may come from anywhere. A view instead of a table can run for ever, a trigger runs when a
night is added, and a damaged index hides rows without an error.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import sqlalchemy as sql

from degarble.harness.base.errors import UnreadableFile

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

WRITES = "degarble_writes"  # execution option of a connection that will write
_WAIT = 30  # seconds that one writer waits for another
_LONGEST = 1 << 28  # bytes of one value that SQLite may make; a row of a history has some 20 kB


def sqlite_engine(path: Path) -> sql.Engine:
    """Return the engine for a file, which waits for another writer."""
    engine = sql.create_engine(
        sql.URL.create("sqlite", database=str(path)), connect_args={"timeout": _WAIT}
    )
    sql.event.listen(engine, "connect", _configure)
    sql.event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: sqlite3.Connection, _record: Any) -> None:
    # Only `_begin` may begin a transaction: Python's driver leaves tables out of one.
    connection.isolation_level = None
    # Trap: the driver's own decoder raises in the middle of a result, and one row hides the others.
    connection.text_factory = _text
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    # Code in the file's schema may call innocuous functions only (sqlite.org/pragma.html).
    connection.execute("PRAGMA trusted_schema = OFF")


def _text(found: bytes) -> str:
    return found.decode("utf-8", "surrogateescape")


def _begin(connection: sql.Connection) -> None:
    """Begin as a writer at once where one will write, so that two writers wait for each other."""
    writes = connection.get_execution_options().get(WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def require_sound(connection: sql.Connection, name: str, tables: Collection[str]) -> None:
    """Raise for a file that is damaged, or whose tables are something else."""
    for kind, table, definition in connection.exec_driver_sql(
        "SELECT type, tbl_name, sql FROM sqlite_master"
    ):
        if table not in tables or kind == "index":
            continue
        # Hidden columns are generated ones, or those of virtual tables.
        hidden = connection.exec_driver_sql(
            "SELECT max(hidden) FROM pragma_table_xinfo(?)", (table,)
        )
        plain = kind == "table" and str(definition).upper().startswith("CREATE TABLE")
        if not plain or hidden.scalar():
            raise UnreadableFile(
                f"{table} of {name}", kind, "an ordinary table, as degarble makes it",
                "Name a store that degarble made.",
            )  # fmt: skip
    found = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar()
    if found != "ok":
        raise UnreadableFile(
            f"history store {name}", " ".join(str(found).split()), "a SQLite file without damage",
            f"Restore a copy, or save what is left: sqlite3 {name} .recover | sqlite3 saved.sqlite",
        )  # fmt: skip
