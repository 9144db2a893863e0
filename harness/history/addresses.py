"""Parse the address of a history store: a path for SQLite, or a URL for PostgreSQL.

Text that looks like an address is never taken for a file: a mistyped URL would create a file whose
name holds a password. Errors, and a driver's messages, never show a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, quote_plus

import sqlalchemy as sql
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

from degarble.harness.base.errors import (
    InvalidArgument,
    MissingDependency,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.base.masking import MASK, looks_like_address, masked
from degarble.harness.history.sqlite_file import sqlite_engine

_SUFFIXES = {".sqlite", ".sqlite3", ".db", ".db3"}
_HOST = re.compile(r"[\w.-]*|[\da-f:.]+", re.IGNORECASE)  # a name, or IPv6 without its brackets
_KNOWN = {"postgresql", "postgres", "sqlite", "mysql", "mariadb", "oracle", "mssql"}
_HIDDEN = "an address that is not shown"
_SHORT = 3  # characters: what is shorter stands in many words by chance


@dataclass(frozen=True)
class Address:
    """A store that may be opened: its name for messages, its engine, and the secrets to mask."""

    name: str
    engine: sql.Engine
    secrets: tuple[str, ...] = ()

    def without_secrets(self, line: str) -> str:
        """Return a driver's message without the password."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            if len(secret) < _SHORT and secret in line:
                return _HIDDEN
            line = line.replace(secret, MASK)
        return masked(line)


def address_of(url: str, *, create: bool) -> Address:
    """Return the store of a path or URL."""
    if "://" not in url:
        if _is_no_path(url):
            raise _no_url(_HIDDEN)
        return _file(url, create=create)
    try:
        address = sql.make_url(url)
    except (SQLAlchemyError, ValueError):
        raise _no_url(_HIDDEN) from None
    kind = address.get_backend_name()
    if kind == "sqlite" and not (address.host or address.username or _is_no_path(url[9:])):
        return _file(address.database or "", create=create)
    # Trap: of a password with a bare @ or /, a part would be read as the host or the database.
    known = _HOST.fullmatch(address.host or "") and not set("@:/") & set(address.database or "")
    if kind != "postgresql" or not known:
        raise _no_url(kind if kind in _KNOWN else _HIDDEN)
    try:
        engine = sql.create_engine(address.set(drivername="postgresql+psycopg"))
    except (ImportError, NoSuchModuleError) as error:
        raise MissingDependency(
            "psycopg", str(error), "the driver of PostgreSQL",
            'Install it with: pip install "degarble[postgres]"',
        ) from error  # fmt: skip
    return Address(_named(address), engine, _secrets(url, address))


def _is_no_path(url: str) -> bool:
    """Return whether a text is an address rather than a path, even without scheme or colon."""
    if looks_like_address(url):
        return True
    path = Path(url)
    in_name = "@" in path.name and path.suffix.lower() not in _SUFFIXES
    return in_name or ("@" in url and not path.parent.is_dir())


def _file(url: str, *, create: bool) -> Address:
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
    if path.exists() and not path.is_file():  # a pipe would be waited for, a device be written to
        raise UnwritablePath("--store", url, "an ordinary file", "Name another file.")
    return Address(path.name, sqlite_engine(path))


def _named(address: sql.URL) -> str:
    """Return a store's name without user and password."""
    host = f"{address.host or 'local'}{f':{address.port}' if address.port else ''}"
    return f"{address.get_backend_name()} {address.database or ''} on {host}"


def _secrets(url: str, address: sql.URL) -> tuple[str, ...]:
    """Return the secrets to mask, as they were written and as a driver may write them."""
    hidden = [url, str(address.password or "")]
    for name, given in address.query.items():
        told = [given] if isinstance(given, str) else given
        if name not in ("host", "port", "dbname"):
            hidden += [each for each in told if len(each) >= _SHORT or "pass" in name]
    written = {form for each in hidden for form in (each, quote(each), quote_plus(each))}
    return tuple(each for each in written if each)


def _no_url(scheme: str) -> InvalidArgument:
    return InvalidArgument(
        "--store", scheme, "the path of a SQLite file or a postgresql:// URL",
        "Write --store history.sqlite, or --store postgresql://USER:PASSWORD@HOST/DATABASE"
        " with @, : and / of the password as %40, %3A and %2F.",
    )  # fmt: skip
