"""The store of all runs: its address, SQLite or PostgreSQL through SQLAlchemy, and its export."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, quote_plus

import numpy as np
import sqlalchemy as sql
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from degarble.harness.base.errors import (
    MASK,
    InvalidArgument,
    MissingDependency,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
    looks_like_address,
    masked,
)
from degarble.harness.history import records
from degarble.harness.history.records import DOUBLES, BadRowError, Skipped, StoredRun
from degarble.harness.report.files import whole_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from degarble.harness.history.records import HistoryRun


# --------------------------------------------------------------------------------------------------
# Open a SQLite file as a store, and check that the file is sound.
#
# The file may come from anywhere. A view instead of a table can run for ever, a trigger runs when a
# night is added, and a damaged index hides rows without an error.

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


# --------------------------------------------------------------------------------------------------
# Parse the address of a history store: a path for SQLite, or a URL for PostgreSQL.
#
# Text that looks like an address is never taken for a file: a mistyped URL would create a file
# whose name holds a password. Errors, and a driver's messages, never show a password.

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


# --------------------------------------------------------------------------------------------------
# The store of all runs: SQLite in a file by default, PostgreSQL for a team, through SQLAlchemy.
#
# Five tables: the store's schema version; runs; layouts (the places that runs of one kind measure,
# each list kept once); numbers, one row a run and layout (little-endian doubles in the order of the
# places); and the checksums of runs and numbers. So five years of 2,400 places are 1,800 rows, and
# adding a night is one transaction. Adding a run twice stores it once.
#
# A row that cannot be read is left out and listed in `skipped`, so that one bad row does not hide
# the others. Rows from before there were checksums are read without.

if TYPE_CHECKING:
    _Row = tuple[str, str, NDArray[np.float64]]  # run, layout, numbers

STORE_SCHEMA = 1
_LOCK = 0x6465_6761  # of all writers of one database: any number that nobody else takes
_SHOWN = 12  # characters of a digest that a message shows
_FEWEST = 4  # characters by which a run may be named

_tables = sql.MetaData()
_about = sql.Table(
    "degarble_store",
    _tables,
    sql.Column("key", sql.String(32), primary_key=True),
    sql.Column("value", sql.String(64), nullable=False),
)
_runs = sql.Table(
    "degarble_runs",
    _tables,
    sql.Column("id", sql.String(16), primary_key=True),
    sql.Column("subject", sql.String(500), nullable=False, index=True),
    sql.Column("night", sql.String(10), nullable=False),
    sql.Column("started", sql.String(40), nullable=False),
    sql.Column("machine", sql.String(500), nullable=False),
    sql.Column("commit_id", sql.String(64), nullable=False),
    sql.Column("verdict", sql.String(16), nullable=False),
    sql.Column("facts", sql.Text, nullable=False),
)
_layouts = sql.Table(
    "degarble_layouts",
    _tables,
    sql.Column("digest", sql.String(64), primary_key=True),
    sql.Column("measure", sql.String(32), nullable=False),
    sql.Column("places", sql.Text, nullable=False),
)
_numbers = sql.Table(
    "degarble_numbers",
    _tables,
    sql.Column("run", sql.String(16), sql.ForeignKey("degarble_runs.id"), primary_key=True),
    sql.Column(
        "layout", sql.String(64), sql.ForeignKey("degarble_layouts.digest"), primary_key=True
    ),
    sql.Column("doubles", sql.LargeBinary, nullable=False),
)
_sums = sql.Table(
    "degarble_sums",
    _tables,
    sql.Column("run", sql.String(16), primary_key=True),
    sql.Column("layout", sql.String(64), primary_key=True),  # _WHOLE: the run's own row
    sql.Column("sha256", sql.String(64), nullable=False),
)
_WHOLE = ""
# Trap: the library would make bytes of whatever it finds, of a number as many zeros.
_RAW_DOUBLES = sql.type_coerce(_numbers.c.doubles, sql.types.NullType())


@dataclass(frozen=True)
class Stream:
    """A subject on a machine: the unit of a history."""

    subject: str
    machine: str
    runs: int
    first: str
    last: str


@dataclass(frozen=True, eq=False)
class Nights:
    """One measure of one stream: the mean over each night's runs; NaN where it has no value."""

    nights: tuple[str, ...]
    places: tuple[str, ...]
    values: NDArray[np.float64]  # nights x places
    runs: tuple[tuple[StoredRun, ...], ...]  # of each night


class HistoryStore:
    """An open store: use it as a context."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        self._address = address_of(url, create=create)
        self.name, self._engine = self._address.name, self._address.engine
        self._create = create
        self._trial: sql.Connection | None = None
        self._has_sums = False
        self._known_layouts: dict[str, tuple[str, list[str]]] = {}  # digest to measure and places
        self._skipped: dict[tuple[str, str], Skipped] = {}

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The rows that reads have skipped so far."""
        return tuple(self._skipped.values())

    def __enter__(self) -> Self:
        try:
            with self._translated_errors():
                self._open()
        except BaseException:
            self._engine.dispose()
            raise
        return self

    def _open(self) -> None:
        if self._engine.dialect.name == "sqlite":
            with self._engine.connect() as connection:
                require_sound(connection, self.name, _tables.tables)
        known = set(sql.inspect(self._engine).get_table_names())
        if _about.name not in known and not self._create:
            raise UnreadableFile(
                "history store", self.name, "a store of runs",
                "Name another store, or add a first run to this one.",
            )  # fmt: skip
        if _about.name not in known:
            self._make()
        with self._engine.connect() as connection:
            schema = connection.execute(
                sql.select(_about.c.value).where(_about.c.key == "schema")
            ).scalar()
        if schema != str(STORE_SCHEMA):
            raise UnreadableFile(
                f"schema of {self.name}", schema, str(STORE_SCHEMA),
                "Open it with the version of degarble that wrote it.",
            )  # fmt: skip
        self._has_sums = not known or _sums.name in known or self._add_sums()

    def _add_sums(self) -> bool:
        """Add the table of checksums to an older store; return False where that is forbidden."""
        if not self._create:
            return False
        try:
            with self._writing() as connection:
                _sums.create(connection, checkfirst=True)
        except DBAPIError:
            return False  # a user who may only insert goes on without
        return True

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()

    def _make(self) -> None:
        with self._writing() as connection:
            _tables.create_all(connection)
            row = connection.execute(sql.select(_about.c.value)).first()
            if row is None:
                connection.execute(_about.insert().values(key="schema", value=str(STORE_SCHEMA)))

    @contextmanager
    def _writing(self) -> Iterator[sql.Connection]:
        """Yield a transaction of the only writer."""
        with self._engine.execution_options(**{WRITES: True}).begin() as connection:
            # Trap: without it two first writers of one list of places meet at its key.
            if connection.dialect.name == "postgresql":
                connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_LOCK)))
            yield connection

    def add(self, run: HistoryRun) -> bool:
        """Add a run, whole or not at all; False where the store has it already."""
        with self._translated_errors(writes=True), self._writing() as connection:
            return self._insert(connection, run)

    @contextmanager
    def trying(self, run: HistoryRun) -> Iterator[None]:
        """Answer queries as if a run were added, then roll back."""
        with self._translated_errors(writes=True), self._writing() as connection:
            self._insert(connection, run)
            self._trial = connection
            try:
                yield
            finally:
                self._trial = None
                connection.rollback()

    @contextmanager
    def _reading(self) -> Iterator[sql.Connection]:
        if self._trial is not None:
            yield self._trial
            return
        with self._engine.connect() as connection:
            yield connection

    def _insert(self, connection: sql.Connection, run: HistoryRun) -> bool:
        if connection.execute(sql.select(_runs.c.id).where(_runs.c.id == run.id)).first():
            return False
        connection.execute(
            _runs.insert().values(
                id=run.id,
                subject=run.subject,
                night=run.night,
                started=run.started,
                machine=run.machine,
                commit_id=run.commit,
                verdict=str(run.verdict),
                facts=json.dumps(dict(run.facts), sort_keys=True),
            )
        )
        digests = [
            self._add_numbers(connection, run.id, measure, values)
            for measure, values in run.values.items()
            if values
        ]
        if self._has_sums:
            row = connection.execute(sql.select(_runs).where(_runs.c.id == run.id)).one()
            whole = {"run": run.id, "layout": _WHOLE, "sha256": records.run_sum(row, digests)}
            connection.execute(_sums.insert().values(whole))
        return True

    def _add_numbers(self, connection: sql.Connection, run: str, measure: str, values: Any) -> str:
        places = sorted(values)
        text = json.dumps(places)
        digest = records.layout_digest(measure, text)
        known = sql.select(_layouts.c.digest).where(_layouts.c.digest == digest)
        if connection.execute(known).first() is None:
            connection.execute(
                _layouts.insert().values(digest=digest, measure=measure, places=text)
            )
        doubles = np.array([values[place] for place in places], DOUBLES).tobytes()
        connection.execute(_numbers.insert().values(run=run, layout=digest, doubles=doubles))
        if self._has_sums:
            total = {
                "run": run,
                "layout": digest,
                "sha256": records.numbers_sum(run, digest, doubles),
            }
            connection.execute(_sums.insert().values(total))
        return digest

    def streams(self) -> tuple[Stream, ...]:
        """Return every subject on every machine, the latest first."""
        nights: dict[tuple[str, str], list[str]] = {}
        for run in self.runs():
            nights.setdefault((run.subject, run.machine), []).append(run.night)
        streams = [
            Stream(subject, machine, len(every), every[0], every[-1])
            for (subject, machine), every in sorted(nights.items())
        ]
        return tuple(sorted(streams, key=lambda stream: stream.last, reverse=True))

    def runs(self, stream: Stream | None = None) -> tuple[StoredRun, ...]:
        """Return every run of a stream, or of all, ordered by night."""
        with self._translated_errors(), self._reading() as connection:
            runs = list(connection.execute(sql.select(_runs)))
            digests = {row.digest for row in connection.execute(sql.select(_layouts.c.digest))}
            layouts: dict[Any, list[Any]] = {}
            for run, layout in connection.execute(sql.select(_numbers.c.run, _numbers.c.layout)):
                layouts.setdefault(run, []).append(layout)
                if layout not in digests:
                    self._skip(_numbers, _key(run, layout), "its list of places is not there")
            sums = self._sums(connection)
        for run in {*layouts, *(run for run, _ in sums)} - {row.id for row in runs}:
            self._skip(_numbers, run, "its run is not there")
        found = [
            stored_run
            for row in runs
            if (stored_run := self._stored_run(row, layouts, sums)) is not None
        ]
        if stream is not None:
            wanted = stream.subject, stream.machine
            found = [each for each in found if (each.subject, each.machine) == wanted]
        return tuple(sorted(found, key=lambda each: (each.night, each.started, each.id)))

    def _sums(
        self, connection: sql.Connection, runs: Collection[str] = ()
    ) -> dict[tuple[Any, Any], Any]:
        """Return the checksums by run and list of places."""
        if not self._has_sums:
            return {}
        query = sql.select(_sums.c.run, _sums.c.layout, _sums.c.sha256)
        if len(runs) == 1:
            query = query.where(_sums.c.run == min(runs))
        return {(run, layout): total for run, layout, total in connection.execute(query)}

    def _stored_run(
        self, row: Any, layouts: Any, sums: dict[tuple[Any, Any], Any]
    ) -> StoredRun | None:
        try:
            run = records.stored_run(row)
            mine = layouts.get(run.id, [])
            records.require_numbers(mine)
            records.require_sum(sums.get((run.id, _WHOLE)), records.run_sum(row, mine))
        except BadRowError as reason:
            self._skip(_runs, row.id, reason)
            return None
        return run

    def _skip(self, table: sql.Table, key: object, reason: object) -> None:
        found = Skipped(table.name, str(key), str(reason))
        self._skipped.setdefault((found.table, found.key), found)

    def run(self, name: str) -> StoredRun:
        """Return the run of an id or a commit, whole or by its first characters."""
        runs = [
            run
            for run in self.runs()
            if len(name) >= _FEWEST and (run.id.startswith(name) or run.commit.startswith(name))
        ]
        if not runs:
            raise UnknownName.among("run", name, [run.id for run in self.runs()[-_FEWEST:]])
        if len({run.id for run in runs}) > 1:
            raise InvalidArgument(
                "run", name, f"one run; {len(runs)} begin so: {runs[0].id}, {runs[-1].id}",
                "Give the id of one, with more of its characters.",
            )  # fmt: skip
        return runs[0]

    def numbers(self, run: StoredRun) -> dict[str, dict[str, float]]:
        """Return the numbers of a run: measure, then place, then number."""
        found: dict[str, dict[str, float]] = {}
        for _, layout, values in self._numbers_of({run.id}):
            measure, places = self._known_layouts[layout]
            found.setdefault(measure, {}).update(zip(places, values.tolist(), strict=True))
        return found

    def nights(self, stream: Stream, measure: str) -> Nights:
        """Return the history of one measure."""
        runs = self.runs(stream)
        found = self._numbers_of({run.id for run in runs}, measure)
        return _joined(runs, found, {key: layout[1] for key, layout in self._known_layouts.items()})

    def _numbers_of(self, runs: set[str], measure: str | None = None) -> list[_Row]:
        """Return the rows of numbers of some runs, of one measure or of all."""
        query = sql.select(_numbers.c.run, _numbers.c.layout, _RAW_DOUBLES)
        if len(runs) == 1:
            query = query.where(_numbers.c.run == min(runs))
        with self._translated_errors(), self._reading() as connection:
            layouts = self._layouts(connection, measure)
            query = query.where(_numbers.c.layout.in_(layouts))
            found = [tuple(row) for row in connection.execute(query) if row.run in runs]
            sums = self._sums(connection, runs)
        kept = []
        for run, layout, data in found:
            try:
                values = records.doubles(data, len(self._known_layouts[layout][1]))
                records.require_sum(sums.get((run, layout)), records.numbers_sum(run, layout, data))
            except BadRowError as reason:
                self._skip(_numbers, _key(run, layout), reason)
                continue
            kept.append((run, layout, values))
        return kept

    def _layouts(self, connection: sql.Connection, measure: str | None) -> list[str]:
        """Return the digests of a measure's lists of places; every list is checked once."""
        query = sql.select(_layouts.c.digest, _layouts.c.measure, _layouts.c.places)
        digests = [row.digest for row in connection.execute(sql.select(_layouts.c.digest))]
        new = [digest for digest in digests if digest not in self._known_layouts]
        if new:
            for row in connection.execute(query):
                try:
                    self._known_layouts[row.digest] = row.measure, records.places(*row)
                except BadRowError as reason:
                    self._skip(_layouts, row.digest, reason)
        return [
            digest
            for digest in digests
            if digest in self._known_layouts and measure in (None, self._known_layouts[digest][0])
        ]

    @contextmanager
    def _translated_errors(self, *, writes: bool = False) -> Iterator[None]:
        """Convert errors of the database library to ours, without a password."""
        try:
            yield
        # Trap: the driver decodes a damaged file's own names, and then raises no error of its own.
        except (SQLAlchemyError, UnicodeError, OverflowError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            line = self._address.without_secrets(line)
            kind = UnwritablePath if writes else UnreadableFile
            raise kind(
                "history store", f"{self.name}: {line}", "a store that answers",
                "Check the file, or that the server runs and lets you in.",
            ) from None  # fmt: skip


def _key(run: object, layout: object) -> str:
    return f"{run}, {str(layout)[:_SHOWN]}"


def _joined(
    runs: Sequence[StoredRun], found: Sequence[_Row], layouts: dict[str, list[str]]
) -> Nights:
    """Arrange the rows of all runs as nights by places."""
    used = {layout for _, layout, _ in found}
    places = sorted({place for layout in used for place in layouts[layout]})
    at = {place: number for number, place in enumerate(places)}
    columns = {each: np.array([at[place] for place in layouts[each]], np.intp) for each in used}
    measured = {key for key, _, _ in found}
    kept = [run for run in runs if run.id in measured]
    nights = sorted({run.night for run in kept})
    row_of = {night: number for number, night in enumerate(nights)}
    places_of = {run.id: row_of[run.night] for run in kept}
    sums = np.zeros((len(nights), len(places)))
    counts = np.zeros(sums.shape, np.int32)
    for key, layout, numbers in found:
        sums[places_of[key], columns[layout]] += numbers
        counts[places_of[key], columns[layout]] += 1
    values = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    of_night: list[list[StoredRun]] = [[] for _ in nights]
    for run in kept:
        of_night[row_of[run.night]].append(run)
    return Nights(tuple(nights), tuple(places), values, tuple(map(tuple, of_night)))


# --------------------------------------------------------------------------------------------------
# Export the whole store as one parquet table, one row a number, for custom queries.
#
# It is written a run at a time, so that memory stays small.

COLUMNS = ("run", "subject", "machine", "night", "started", "commit", "verdict", "measure",
           "place", "value")  # fmt: skip


def write_parquet(store: HistoryStore, path: Path) -> int:
    """Write every number of the store; return how many."""
    try:
        import pyarrow as pa  # noqa: PLC0415  an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency(
            "pyarrow", str(error), "the writer of parquet files",
            'Install it with: pip install "degarble[parquet]"',
        ) from error  # fmt: skip
    # Names repeat in every row: store each one once.
    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([(name, pa.float64() if name == "value" else text) for name in COLUMNS])
    rows = 0
    with whole_file(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for run in store.runs():
            table = _table(run, store.numbers(run))
            rows += len(table["value"])
            writer.write_table(pa.table(table, schema=schema))
    return rows


def _table(run: StoredRun, numbers: dict[str, dict[str, float]]) -> dict[str, list[Any]]:
    flat = [(m, place, value) for m, number in numbers.items() for place, value in number.items()]
    fields = {
        "run": run.id,
        "subject": run.subject,
        "machine": run.machine,
        "night": run.night,
        "started": run.started,
        "commit": run.commit,
        "verdict": str(run.verdict),
    }
    columns: dict[str, list[Any]] = {name: [text] * len(flat) for name, text in fields.items()}
    for place, name in enumerate(("measure", "place", "value")):
        columns[name] = [each[place] for each in flat]
    return columns
