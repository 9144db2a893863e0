"""Where a history lies: the path of a SQLite file, or the URL of a PostgreSQL server.

Owns what an address may be, the engine for it, and how SQLite begins a transaction: a writer at
once, so that two of them wait for each other. Refuses any other scheme, a file that is not there, a
folder that is not there, a URL that cannot be read, a driver that is not installed; no password is
ever told. Kept honest by suites/history/test_store.py, on SQLite and on a real server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

from degarble.harness.errors import (
    InvalidArgument,
    MissingDependency,
    UnreadableFile,
    UnwritablePath,
)

WRITES = "degarble_writes"  # what a connection is asked for
_WAIT = 30  # seconds that one writer waits for another


def engine_of(url: str, *, create: bool) -> tuple[str, sql.Engine]:
    """Return what the store may be called, and the library's engine."""
    if "://" not in url:
        path = Path(url)
        if not create and not path.is_file():
            raise UnreadableFile(
                "--store", url, "a store of runs",
                "Name the file of an existing store, or add a first run to it.",
            )  # fmt: skip
        if create and not path.parent.is_dir():
            raise UnwritablePath(
                "--store", url, "a file in a folder that exists", f"Make {path.parent}."
            )
        address = sql.URL.create("sqlite", database=str(path))
        engine = sql.create_engine(address, connect_args={"timeout": _WAIT})
        sql.event.listen(engine, "connect", _by_hand)
        sql.event.listen(engine, "begin", _begin)
        return path.name, engine
    try:
        address = sql.make_url(url)
    except (SQLAlchemyError, ValueError):
        raise _no_url(url.partition("://")[0]) from None
    # Trap: of a password with a bare @, a part would be read as the host, and be told.
    if set("[@") & set(address.host or ""):
        raise _no_url(address.drivername)
    if address.get_backend_name() not in {"postgresql", "sqlite"}:
        raise _no_url(address.drivername)
    if address.get_backend_name() == "sqlite":
        return engine_of(address.database or "", create=create)
    if address.get_backend_name() == "postgresql":
        address = address.set(drivername="postgresql+psycopg")
    try:
        return _named(address), sql.create_engine(address)
    except (ImportError, NoSuchModuleError) as error:
        raise MissingDependency(
            "psycopg", str(error), "the driver of PostgreSQL",
            'Install it with: pip install "degarble[postgres]"',
        ) from error  # fmt: skip


def _by_hand(connection: Any, _record: Any) -> None:
    """Let nobody but `_begin` begin a transaction: Python's driver leaves tables out of one."""
    connection.isolation_level = None


def _begin(connection: sql.Connection) -> None:
    """Begin as a writer at once where one will write: two of them wait and never meet halfway."""
    writes = connection.get_execution_options().get(WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _named(address: sql.URL) -> str:
    """Name a store without user and password."""
    host = f"{address.host or 'local'}{f':{address.port}' if address.port else ''}"
    return f"{address.get_backend_name()} {address.database or ''} on {host}"


def _no_url(scheme: str) -> InvalidArgument:
    return InvalidArgument(
        "--store", scheme, "the path of a SQLite file or a postgresql:// URL", "Name one of them."
    )
