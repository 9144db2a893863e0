"""The store of all runs: SQLite in a file by default, PostgreSQL for a team, through one library.

Owns four tables: what the store is, runs, layouts (the places that runs of one kind measure, each
list kept once) and the numbers, one row a run and layout: little-endian doubles in the order of the
places. So five years of 2,400 places are 1,800 rows, and adding a night is one transaction. A run
that is added twice is there once.

Refuses, by name: a file that is no such store, a store of another schema, a server that cannot be
reached; a password never appears. Two writers wait for each other.
Kept honest by suites/history/test_store.py, which runs on SQLite and on a real server.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import sqlalchemy as sql
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from degarble.harness.errors import InvalidArgument, UnknownName, UnreadableFile, UnwritablePath
from degarble.harness.history.addresses import WRITES, engine_of
from degarble.harness.record.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from degarble.harness.history.records import Run

STORE_SCHEMA = 1
_DOUBLES = np.dtype("<f8")
_LOCK = 0x6465_6761  # of all writers of one database: any number that nobody else takes
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


@dataclass(frozen=True)
class Stream:
    """What one history is about: a subject on a machine."""

    subject: str
    machine: str
    runs: int
    first: str
    last: str


@dataclass(frozen=True)
class Told:
    """A run as the store tells it, without its numbers."""

    id: str
    subject: str
    night: str
    started: str
    machine: str
    commit: str
    verdict: Verdict
    facts: dict[str, str]


@dataclass(frozen=True, eq=False)
class Nights:
    """One measure of one stream: the mean over each night's runs; NaN where it has no value."""

    nights: tuple[str, ...]
    places: tuple[str, ...]
    values: NDArray[np.float64]  # nights x places
    runs: tuple[tuple[Told, ...], ...]  # of each night


class Store:
    """An open store: use it as a context."""

    def __init__(self, url: str, *, create: bool = False) -> None:
        self.name, self._engine = engine_of(url, create=create)
        self._create = create
        self._trial: sql.Connection | None = None

    def __enter__(self) -> Self:
        try:
            with self._asked():
                self._open()
        except BaseException:
            self._engine.dispose()
            raise
        return self

    def _open(self) -> None:
        known = sql.inspect(self._engine).has_table(_about.name)
        if not known and not self._create:
            raise UnreadableFile(
                "history store", self.name, "a store of runs",
                "Name another store, or add a first run to this one.",
            )  # fmt: skip
        if not known:
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
        """One transaction of the only writer."""
        with self._engine.execution_options(**{WRITES: True}).begin() as connection:
            # Trap: without it two first writers of one list of places meet at its key.
            if connection.dialect.name == "postgresql":
                connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_LOCK)))
            yield connection

    def add(self, run: Run) -> bool:
        """Add a run, whole or not at all; False where the store has it already."""
        with self._asked(writes=True), self._writing() as connection:
            return self._insert(connection, run)

    @contextmanager
    def trying(self, run: Run) -> Iterator[None]:
        """Let the store answer as if a run were added; nothing of it stays."""
        with self._asked(writes=True), self._writing() as connection:
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

    def _insert(self, connection: sql.Connection, run: Run) -> bool:
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
        for measure, values in run.values.items():
            if values:
                self._add_numbers(connection, run.id, measure, values)
        return True

    def _add_numbers(self, connection: sql.Connection, run: str, measure: str, values: Any) -> None:
        places = sorted(values)
        text = json.dumps(places)
        digest = hashlib.sha256(f"{measure}\n{text}".encode()).hexdigest()
        known = sql.select(_layouts.c.digest).where(_layouts.c.digest == digest)
        if connection.execute(known).first() is None:
            connection.execute(
                _layouts.insert().values(digest=digest, measure=measure, places=text)
            )
        doubles = np.array([values[place] for place in places], _DOUBLES).tobytes()
        connection.execute(_numbers.insert().values(run=run, layout=digest, doubles=doubles))

    def streams(self) -> tuple[Stream, ...]:
        """Every subject on every machine, the latest first."""
        counted = sql.func.count(_runs.c.id)
        first, last = sql.func.min(_runs.c.night), sql.func.max(_runs.c.night)
        query = (
            sql.select(_runs.c.subject, _runs.c.machine, counted, first, last)
            .group_by(_runs.c.subject, _runs.c.machine)
            .order_by(last.desc(), _runs.c.subject, _runs.c.machine)
        )
        with self._asked(), self._reading() as connection:
            return tuple(Stream(*row) for row in connection.execute(query))

    def runs(self, stream: Stream | None = None) -> tuple[Told, ...]:
        """Every run of a stream, or of all, in the order of their nights."""
        query = sql.select(_runs).order_by(_runs.c.night, _runs.c.started, _runs.c.id)
        if stream is not None:
            query = query.where(
                _runs.c.subject == stream.subject, _runs.c.machine == stream.machine
            )
        with self._asked(), self._reading() as connection:
            return tuple(_told(row) for row in connection.execute(query))

    def run(self, name: str) -> Told:
        """Return the run of an id or a commit, whole or by its first characters."""
        found = [
            each
            for each in self.runs()
            if len(name) >= _FEWEST and (each.id.startswith(name) or each.commit.startswith(name))
        ]
        if not found:
            raise UnknownName.among("run", name, [each.id for each in self.runs()[-_FEWEST:]])
        if len({each.id for each in found}) > 1:
            raise InvalidArgument(
                "run", name, f"one run; {len(found)} begin so: {found[0].id}, {found[-1].id}",
                "Give the id of one, with more of its characters.",
            )  # fmt: skip
        return found[0]

    def numbers(self, run: Told) -> dict[str, dict[str, float]]:
        """Return what a run measured: measure, then place, then number."""
        query = (
            sql.select(_layouts.c.measure, _layouts.c.places, _numbers.c.doubles)
            .join_from(_numbers, _layouts)
            .where(_numbers.c.run == run.id)
        )
        with self._asked(), self._reading() as connection:
            return {
                measure: dict(zip(json.loads(places), _doubles(found).tolist(), strict=True))
                for measure, places, found in connection.execute(query)
            }

    def nights(self, stream: Stream, measure: str) -> Nights:
        """Return the history of one measure."""
        runs = self.runs(stream)
        query = (
            sql.select(_numbers.c.run, _numbers.c.layout, _numbers.c.doubles)
            .join_from(_numbers, _runs, _numbers.c.run == _runs.c.id)
            .where(_runs.c.subject == stream.subject, _runs.c.machine == stream.machine)
            .where(_numbers.c.layout.in_(self._layouts_of(measure)))
        )
        with self._asked(), self._reading() as connection:
            found = [tuple(row) for row in connection.execute(query)]
        return _joined(runs, found, self._layouts_of(measure))

    def _layouts_of(self, measure: str) -> dict[str, list[str]]:
        query = sql.select(_layouts.c.digest, _layouts.c.places).where(
            _layouts.c.measure == measure
        )
        with self._asked(), self._reading() as connection:
            return {digest: json.loads(places) for digest, places in connection.execute(query)}

    @contextmanager
    def _asked(self, *, writes: bool = False) -> Iterator[None]:
        """Tell the library's complaints in our words, without a password."""
        try:
            yield
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            kind = UnwritablePath if writes else UnreadableFile
            raise kind(
                "history store", f"{self.name}: {line}", "a store that answers",
                "Check the file, or that the server runs and lets you in.",
            ) from None  # fmt: skip


def _told(row: Any) -> Told:
    return Told(
        id=row.id,
        subject=row.subject,
        night=row.night,
        started=row.started,
        machine=row.machine,
        commit=row.commit_id,
        verdict=Verdict(row.verdict),
        facts=json.loads(row.facts),
    )


def _doubles(found: bytes) -> NDArray[np.float64]:
    return np.frombuffer(found, _DOUBLES).astype(np.float64, copy=False)


def _joined(
    runs: Sequence[Told], found: Sequence[tuple[str, str, bytes]], layouts: dict[str, list[str]]
) -> Nights:
    """Put the rows of all runs into nights by places."""
    used = {layout for _, layout, _ in found}
    places = sorted({place for layout in used for place in layouts[layout]})
    at = {place: number for number, place in enumerate(places)}
    columns = {each: np.array([at[place] for place in layouts[each]], np.intp) for each in used}
    measured = {key for key, _, _ in found}
    kept = [run for run in runs if run.id in measured]
    nights = sorted({run.night for run in kept})
    row_of = {night: number for number, night in enumerate(nights)}
    rows = {run.id: row_of[run.night] for run in kept}
    sums = np.zeros((len(nights), len(places)))
    counts = np.zeros(sums.shape, np.int32)
    for key, layout, doubles in found:
        sums[rows[key], columns[layout]] += _doubles(doubles)
        counts[rows[key], columns[layout]] += 1
    values = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    of_night: list[list[Told]] = [[] for _ in nights]
    for run in kept:
        of_night[row_of[run.night]].append(run)
    return Nights(tuple(nights), tuple(places), values, tuple(map(tuple, of_night)))
