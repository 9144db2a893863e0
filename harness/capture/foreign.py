"""Convert errors of a captured run to our own, and leave no half-written capture.

A checkpoint may be rejected at its last weight, after parts were written. A foreign kernel or patch
may return tensors that the next component cannot take, so torch raises anything; that becomes an
error of ours. Without foreign code such an exception is our bug and passes through.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnwritablePath
from degarble.harness.capture.files.types import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@contextmanager
def foreign_code(folder: Path, whose: Sequence[str]) -> Iterator[None]:
    """Run a capture, with foreign code by its options; what a refusal leaves is removed.

    Where the disk takes no more, the parts stay: they are whole, and the run cannot be repeated.
    """
    there = folder.exists()
    try:
        yield
    except UnwritablePath:
        if whose:
            _remove(folder, keep=there)
        raise
    except DegarbleError:
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
