"""Command lines of the golden set: run as the entry point runs them, one thread, no colours."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from degarble.harness.cli.main import main
from degarble.harness.inference.model import one_thread
from degarble.references import tiny

RELEASED = Path(tiny.__file__).parent / "v1"


def ran(*words: object, status: int = 0) -> dict[str, Any]:
    """Run `degarble --json` with these words and return the document."""
    out, err = StringIO(), StringIO()
    plain = {"NO_COLOR": "1", "COLUMNS": "100", "TERMINAL_WIDTH": "100"}
    line = ["--json", *map(str, words)]
    with (
        mock.patch.dict("os.environ", plain),
        one_thread(),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        got = main(line)
    assert got == status, f"degarble {' '.join(line)}: status {got}\n{err.getvalue()}"
    document: dict[str, Any] = json.loads(out.getvalue())
    return document
