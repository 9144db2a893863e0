"""Records of options for the suite of the command decorator; read at run time, as the real ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.cli.options import JsonFile


@dataclass(frozen=True)
class PlainOptions:
    """A command that takes no file for its JSON."""

    path: Annotated[Path, typer.Argument()]
    count: Annotated[int, typer.Option()] = 3


@dataclass(frozen=True)
class WithFileOptions:
    """A command that takes one."""

    json: JsonFile = None
