"""Check that source and target are separate folders, and neither lies inside the other.

A target inside its source would be read as part of it, and a target around its source would write
over what is read. The check runs before any long read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from pathlib import Path


def require_apart(source: Path, target: Path) -> None:
    """Raise for a target that is, contains, or lies inside the source; links are followed."""
    read, written = source.resolve(), target.resolve()
    if read.is_dir() and written.is_relative_to(read):
        where = "outside the source"
    elif read.is_relative_to(written):
        where = "that does not contain the source"
    else:
        return
    raise InvalidArgument(
        "target",
        shown(str(target)),
        f"a folder {where}, {shown(str(source))}",
        "Choose another target: a checkpoint inside another one is taken for a part of it.",
    )
