"""Write the museum's results as JSON lines, one a task, so that an interrupted run keeps them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.report.page import to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.museum.museum import Done

    Ended = Callable[[Done], None]


@contextmanager
def lines_to(path: Path | None) -> Iterator[Ended]:
    """Return a function that appends a finished task to `path`; without a path it does nothing."""
    if path is None:
        yield lambda _done: None
        return
    try:
        file = path.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise UnwritablePath(
            str(path), error.strerror or str(error), "a file that can be written",
            "Name another file.",
        ) from error  # fmt: skip
    with file:

        def ended(done: Done) -> None:
            line = {"task": done.task.name, "seconds": done.seconds, "found": done.found}
            file.write(json.dumps(to_plain(line), allow_nan=False) + "\n")
            file.flush()

        yield ended
