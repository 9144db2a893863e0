"""A capture of code that is not ours: what fails is refused by name, and nothing half-written.

Owns the boundary around a run with a backend or a patch. A kernel may return tensors that the
components behind it cannot take; torch then raises anything. Without foreign code such an error is
ours, and stays what it is. Refuses nothing else. Kept honest by suites/runs/test_patching.py.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from degarble.harness.errors import DegarbleError, InvalidArgument
from degarble.harness.record.capture_types import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@contextmanager
def foreign_code(folder: Path, whose: Sequence[str]) -> Iterator[None]:
    """Run foreign code, by its options; what was written goes away when it is refused."""
    there = folder.exists()
    try:
        yield
    except DegarbleError:
        if whose:
            _remove(folder, keep=there)
        raise
    except Exception as error:
        if not whose:
            raise
        _remove(folder, keep=there)
        raise InvalidArgument(
            " and ".join(whose), f"{type(error).__name__}: {error}",
            "outputs and weights that the components behind can take",
            "Look at shapes and dtypes of what was replaced.",
        ) from error  # fmt: skip


def _remove(folder: Path, *, keep: bool) -> None:
    """Take the parts of a refused capture away; a folder that was there before stays."""
    for file in (*folder.glob("part-*.safetensors*"), folder / MANIFEST):
        with suppress(OSError):
            file.unlink()
    if not keep:
        with suppress(OSError):
            folder.rmdir()
