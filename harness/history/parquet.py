"""The whole store as one parquet table: one row a number, for anybody's own questions.

Owns the columns: run, subject, machine, night, started, commit, verdict, measure, place, value.
Written a run at a time, so that memory stays small; there is a whole file or none.
Refuses where pyarrow is missing. Kept honest by suites/history/test_parquet.py.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from degarble.harness.errors import MissingDependency, UnwritablePath

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.history.store import Store, Told

COLUMNS = ("run", "subject", "machine", "night", "started", "commit", "verdict", "measure",
           "place", "value")  # fmt: skip


def write_parquet(store: Store, path: Path) -> int:
    """Write every number of the store; return how many."""
    try:
        import pyarrow as pa  # noqa: PLC0415  an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency(
            "pyarrow", str(error), "the writer of parquet files",
            'Install it with: pip install "degarble[parquet]"',
        ) from error  # fmt: skip
    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([(name, pa.float64() if name == "value" else text) for name in COLUMNS])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    rows = 0
    try:
        with parquet.ParquetWriter(temporary, schema) as writer:
            for run in store.runs():
                table = _table(run, store.numbers(run))
                rows += len(table["value"])
                writer.write_table(pa.table(table, schema=schema))
        temporary.replace(path)
    except OSError as error:
        raise UnwritablePath(
            str(path), str(error), "a file that can be written", "Choose another place."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return rows


def _table(run: Told, numbers: dict[str, dict[str, float]]) -> dict[str, list[Any]]:
    flat = [(m, place, value) for m, each in numbers.items() for place, value in each.items()]
    told = {
        "run": run.id,
        "subject": run.subject,
        "machine": run.machine,
        "night": run.night,
        "started": run.started,
        "commit": run.commit,
        "verdict": str(run.verdict),
    }
    columns: dict[str, list[Any]] = {name: [text] * len(flat) for name, text in told.items()}
    for place, name in enumerate(("measure", "place", "value")):
        columns[name] = [each[place] for each in flat]
    return columns
