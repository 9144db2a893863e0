"""Check option values that several commands share, before any work starts.

Covered are paths that must exist, names from a registry, options that exclude each other, ranges
and backends.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from degarble.harness.base.errors import (
    InvalidArgument,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.base.protocols import BACKEND_ENTRY_POINT_GROUP
from degarble.harness.report.files import is_stream, usable_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BACKENDS = ("torch", "cutedsl", "vllm")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def existing(name: str, path: Path | None) -> None:
    """Raise for a path that does not exist."""
    if path is not None and not path.exists():
        raise UnreadableFile(
            name, str(path), "a file or directory that exists", "Check the path for a typo."
        )


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
    installed = (point.name for point in entry_points(group=BACKEND_ENTRY_POINT_GROUP))
    if ":" in value:
        raise InvalidArgument(
            name,
            value,
            "module:factory, both importable names",
            "For example my_kernels:make_backend.",
        )
    one_of(name, value, {*BACKENDS, *installed})
