"""Export the whole store as one parquet table, one row a number, for custom queries.

It is written a run at a time, so that memory stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import MissingDependency
from degarble.harness.report.files import whole_file

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.history.rows import Told
    from degarble.harness.history.store import Store

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
