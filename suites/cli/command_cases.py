"""Records of options for the suite of the command decorator; read at run time, as the real ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class PlainOptions:
    """A command with an argument and an option."""

    path: Annotated[Path, typer.Argument()]
    count: Annotated[int, typer.Option()] = 3


@dataclass(frozen=True)
class NoOptions:
    """A command that takes nothing of its own."""
