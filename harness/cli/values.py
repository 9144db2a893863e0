"""Options that several commands share: their types, their checks, their environment variables."""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from degarble.harness.base.errors import (
    InvalidArgument,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.base.protocols import BACKEND_ENTRY_POINT_GROUP
from degarble.harness.report.files import is_stream, usable_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.cli.terminal import Terminal
    from degarble.kernels.runtime.compiling import CompileSettings


# --------------------------------------------------------------------------------------------------
# Option types that several commands share.

CheckpointPath = Annotated[
    Path, typer.Argument(metavar="CKPT", help="Checkpoint: a directory with safetensors files.")
]
CapturePath = Annotated[
    Path, typer.Argument(metavar="CAPTURE", help="Recorded tensors of one run.")
]
ReportFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write the checkpoint's page into DIR.")
]
Backend = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="torch, cutedsl, vllm, transformers, or your own module:factory.",
    ),
]
Partial = Annotated[
    bool,
    typer.Option("--partial", help="Judge the complete part of a capture whose run was killed."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse if torch would compute any component."),
]
Convention = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Arithmetic that the candidate follows, such as head_norm=once; may be repeated.",
    ),
]
Faults = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Search the adopted faults of this folder as well.",
        show_default="DEGARBLE_FAULTS, where it is set",
    ),
]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt itself.")]
Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file with one prompt a line.")
]


# --------------------------------------------------------------------------------------------------
# Check option values that several commands share, before any work starts.
#
# Covered are paths that must exist, names from a registry, options that exclude each other, ranges
# and backends.

BACKENDS = ("torch", "cutedsl", "vllm", "transformers")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def existing(name: str, path: Path | None) -> None:
    """Raise for a path that does not exist."""
    if path is None or path.exists():
        return
    if name in CHECKPOINTS and is_hub_id(str(path)):
        raise UnreadableFile(
            name,
            str(path),
            "a folder on this machine; this looks like an id of the Hugging Face hub",
            f"Download it first: {download_command(str(path))}",
        )
    raise UnreadableFile(
        name, str(path), "a file or directory that exists", "Check the path for a typo."
    )


# What takes a checkpoint, by the name of the argument or option.
CHECKPOINTS = ("TARGET", "CKPT", "SRC", "--reference", "--checkpoint", "--against", "--model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_id(text: str) -> bool:
    """Return whether a text that is no path here has the form of an id, as in org/model."""
    return bool(_HUB_ID.fullmatch(text)) and not Path(text).parent.exists()


def download_command(identity: str) -> str:
    """Return the whole command that downloads a model of the hub into a folder of its name."""
    return f"hf download {identity} --local-dir {identity.partition('/')[2]}"


def writable(name: str, file: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to take."""
    if file.is_dir():
        raise UnwritablePath(
            name, str(file), "the name of a file", "Add a file's name to this folder."
        )
    if is_stream(file):
        return
    if not file.parent.is_dir():
        raise UnwritablePath(
            name, str(file), "a file in a folder that exists", f"Make the folder {file.parent}."
        )
    usable_folder(name, file.parent)


def one_of(name: str, value: str | None, known: Iterable[str]) -> None:
    """Refuse a name that is not among `known`."""
    known = tuple(known)
    if value is not None and value not in known:
        raise UnknownName.among(name, value, known)


def named_or_file(name: str, value: str, known: Iterable[str], suffixes: tuple[str, ...]) -> None:
    """Accept one of the names, or a file by its suffix, which then must exist."""
    from pathlib import Path  # noqa: PLC0415  only here at run time

    if value.endswith(suffixes):
        existing(name, Path(value))
    else:
        one_of(name, value, known)


def exactly_one(**given: object) -> None:
    """Refuse none, and more than one, of options that exclude each other."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    present = [flag for flag, value in flags.items() if value not in (None, False)]
    if len(present) != 1:
        raise InvalidArgument(
            " and ".join(present) if present else "input",
            [str(flags[flag]) for flag in present],
            f"exactly one of {', '.join(flags)}",
            "Keep one of them." if present else "Add one of them.",
        )


def at_most_one(**given: object) -> None:
    """Refuse more than one of options that exclude each other."""
    if any(value not in (None, False) for value in given.values()):
        exactly_one(**given)


def within(name: str, value: float | None, low: float, high: float) -> None:
    """Refuse a number outside low..high; NaN is outside."""
    if value is not None and not low <= value <= high:
        upper = "" if high == float("inf") else f" and at most {high:g}"
        raise InvalidArgument(
            name, value, f"a number of at least {low:g}{upper}", f"Give {name} within its range."
        )


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kMGT]i?B)")
_THOUSANDS = "kMGT"


def nbytes(name: str, text: str | None) -> int | None:
    """Read a size such as 10GB or 1.5TB; with an i, as in 10GiB, units are powers of 1024."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise InvalidArgument(
            name, text, "a size such as 500MB, 10GB or 10GiB", f"For example: {name} 10GB"
        )
    base = 1024 if "i" in match[2] else 1000
    return int(float(match[1]) * base ** (1 + _THOUSANDS.index(match[2][0])))


def strict(name: str, *, wanted: bool) -> None:
    """Refuse --strict without a backend that could leave something to torch."""
    if wanted and name == BACKENDS[0]:
        raise InvalidArgument(
            "--strict", f"--backend {name}", "a backend with kernels", "Name one, or leave it out."
        )


def backend(name: str, value: str | None) -> None:
    """Refuse what is no backend: built in, installed as an entry point, or `module:factory`."""
    if value is None or _FACTORY.fullmatch(value):
        return
    from importlib.metadata import entry_points  # noqa: PLC0415  start-up time

    installed = (point.name for point in entry_points(group=BACKEND_ENTRY_POINT_GROUP))
    if ":" in value:
        raise InvalidArgument(
            name,
            value,
            "module:factory, both importable names",
            "For example my_kernels:make_backend.",
        )
    one_of(name, value, {*BACKENDS, *installed})


FAULTS = "DEGARBLE_FAULTS"  # a folder of adopted faults


def faults_folder(given: Path | None) -> Path | None:
    """Return the folder of adopted faults: of the option, or of the environment."""
    stated = os.environ.get(FAULTS)
    return given if given is not None or not stated else Path(stated)


# --------------------------------------------------------------------------------------------------
# Choose workers for `--cluster`, from two environment variables.
#
# RAY_ADDRESS is the address of a cluster, or `auto` for the one that this machine belongs to; if it
# is unset, a cluster starts on this machine and ends with the run. DEGARBLE_WORKERS is the number
# of processes on this machine; if it is unset, as many as 1 GB of memory allows, and for the museum
# of faults one for each core. The cluster that was joined is printed on stderr.

MOST_PROCESSES = 1024
ADDRESS, WORKERS = "RAY_ADDRESS", "DEGARBLE_WORKERS"


@contextmanager
def spread(terminal: Terminal, processes: int | None = None) -> Iterator[Workers]:
    """Yield the workers that the options choose; `processes` go before the environment's."""
    # Imports torch by way of the runs, which --help and --version do without.
    from degarble.harness.inference.processes import workers_of  # noqa: PLC0415

    address = os.environ.get(ADDRESS) or None
    with workers_of(terminal.cluster, address, processes or requested_processes()) as workers:
        if not isinstance(workers, int) and not terminal.quiet:
            sys.stderr.write(f"degarble: {workers.description}\n")
        yield workers


def requested_processes() -> int | None:
    """Return the number of processes that the environment asks for; None where it asks for none."""
    text = os.environ.get(WORKERS, "")
    if not text:
        return None
    if not (
        text.isascii() and text.isdigit() and len(text) < 5 and 0 < int(text) <= MOST_PROCESSES
    ):
        raise InvalidArgument(
            WORKERS, text, f"a number from 1 to {MOST_PROCESSES}", "Unset it, or name a number."
        )
    return int(text)


# --------------------------------------------------------------------------------------------------
# Read the environment variables of kernel compilation, for all commands.


def settings_here() -> CompileSettings:
    """Read the settings of this process."""
    from degarble.kernels.runtime.compiling import read_settings  # noqa: PLC0415  only where used

    return read_settings(os.environ)
