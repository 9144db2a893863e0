"""Compile inner loops with numba, and cache them in a folder that nobody else can write.

A cached loop is unpickled and run, so whoever can write the cache runs code as the user who loads
it. Numba accepts any folder that it can write. Ours is private, and its content is checked before
numba reads it. Only modules of loops import this, and they are imported inside functions, because
numba is slow to import.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba

from degarble.harness.base.files import (
    CODE_OF_LOOPS,
    cache_folder,
    make_private,
    require_private_tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_CONFIG: Any = numba.config  # made of variables at run time, so unknown to type checkers


def compiled(function: F) -> F:
    """Compile a loop at its first use, without fast-math; it releases the GIL."""
    return compiled_with()(function)


def compiled_with(**options: Any) -> Callable[[F], F]:
    """Compile as `compiled` does, with further options of numba."""

    def decorate(function: F) -> F:
        folder = _usable_folder(_CONFIG.CACHE_DIR)
        if folder is not None:
            cached = _cached_in(folder / _source_digest(function), function, options)
            if cached is not None:
                return cast("F", cached)
        return cast("F", numba.njit(nogil=True, **options)(function))  # anew in every process

    return decorate


def _cached_in(folder: Path, function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Compile with a cache below `folder`; None where numba cannot write there."""
    before = _CONFIG.CACHE_DIR
    _CONFIG.CACHE_DIR = str(folder)  # read when the cache is made, and only then
    try:
        loop = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        return None
    finally:
        _CONFIG.CACHE_DIR = before
    # Trap: where this folder cannot be written, numba takes another one.
    return loop if Path(loop.stats.cache_path).is_relative_to(folder) else None


def _source_digest(function: Callable[..., Any]) -> str:
    """Return a short digest of the text of a loop's module, and of the numbers that it imports.

    Trap: numba unpickles the index of a cache before it compares the source's stamp. An index that
    names a class which has been renamed since would end the process, so every text of a module
    has a folder of its own. Numbers of other modules are compiled in, and numba's stamp does not
    cover them.
    """
    digest = hashlib.sha256(_text_of(function.__code__.co_filename))
    known = function.__globals__
    numbers = sorted((name, known[name]) for name in known if isinstance(known[name], int | float))
    digest.update(repr(numbers).encode())
    return digest.hexdigest()[:16]


@cache
def _text_of(path: str) -> bytes:
    """Return a module's text, read once for all its loops."""
    return Path(path).read_bytes()


@cache
def _usable_folder(named: str) -> Path | None:
    """Return the private folder of our loops, checked once a process; None where there can be none.

    `named` is NUMBA_CACHE_DIR; of that folder we use a subfolder, which can be private.
    """
    try:
        folder = Path(named) / "degarble" if named else cache_folder(os.environ) / "loops"
        make_private(folder)
        require_private_tree(folder, CODE_OF_LOOPS)
    except (OSError, RuntimeError):  # nothing can be written there, or there is no home
        return None
    return folder
