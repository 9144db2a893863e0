"""Digests of PTX in which no name of ours counts: a kernel that was moved or renamed stays equal.

Our names occur in the names of entries alone, so each is replaced by its number; comments hold the
compiler's version and are left out. A digest says nothing under another compiler: the set tells for
which one it was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any
from unittest import mock

from degarble.kernels.runtime.compiling import CompiledKernel
from degarble.suites.golden.store import FOLDER, write
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

KEPT = FOLDER / "data" / "ptx.json"
NEW = ROOT / "out" / "golden" / "ptx.txt"
_COMMENT = re.compile(r"(?m)^\s*//.*\n")
_COMPILER = re.compile(r"(?m)^// Cuda compilation tools, (.*)$")
_ENTRY = re.compile(r"\.entry ([\w$]+)")


def compiler_of(ptx: str) -> str:
    """Return the compiler's release, as PTX states it."""
    found = _COMPILER.search(ptx)
    return found[1] if found else "unknown"


def plain(ptx: str) -> str:
    """Return PTX without comments and without our names."""
    names = sorted(enumerate(_ENTRY.findall(ptx)), key=lambda named: -len(named[1]))
    text = _COMMENT.sub("", ptx)
    for number, name in names:
        text = text.replace(name, f"KERNEL{number}")
    return text


def digest(ptx: str) -> str:
    """Return the digest of what a kernel does."""
    return hashlib.sha256(plain(ptx).encode()).hexdigest()[:16]


@contextmanager
def compiled_kernels() -> Iterator[list[CompiledKernel]]:
    """Collect every kernel that is compiled, or taken from the cache, within the block."""
    kernels: list[CompiledKernel] = []
    true = CompiledKernel.__init__

    @wraps(true)
    def collecting(self: CompiledKernel, *given: Any, **named: Any) -> None:
        true(self, *given, **named)
        # A suite damages copies on purpose: dataclasses.replace keeps what the first one owns.
        if all(self._owner is not known._owner for known in kernels):
            kernels.append(self)

    with mock.patch.object(CompiledKernel, "__init__", collecting):
        yield kernels


@cache
def kept() -> dict[str, Any]:
    """Return the set: its compiler, and by target each digest with what it was called then."""
    if not KEPT.exists():
        return {"compiler": None, "digests": {}}
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


def unknown(kernels: Iterable[CompiledKernel]) -> list[str]:
    """Return a line for each kernel that is not in the set, where the compiler is the set's."""
    lines = []
    for kernel in kernels:
        compiler, key, target = compiler_of(kernel.ptx), digest(kernel.ptx), kernel.target.name
        known = kept()["digests"].get(target, {})
        if kept()["compiler"] in (None, compiler) and key not in known:
            lines.append(f"{target} {key} {kernel.name} {compiler}")
    return lines


def require_known(kernels: Iterable[CompiledKernel], where: str) -> None:
    """Raise where a kernel is not in the set; out/golden/ptx.txt keeps what `write` then adds."""
    lines = unknown(kernels)
    if not lines:
        return
    NEW.parent.mkdir(parents=True, exist_ok=True)
    with NEW.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))  # at once: other workers append too
    listed = "\n  ".join(lines)
    raise AssertionError(
        f"{where} compiled kernels that are not in suites/golden/data/ptx.json; if they are meant "
        f"to be others, run python -m degarble.suites.golden.write ptx\n  {listed}"
    )


def with_found(before: Mapping[str, Any], lines: Iterable[str]) -> dict[str, Any]:
    """Return a set with the lines of `unknown` added."""
    compiler = before["compiler"]
    digests = {target: dict(known) for target, known in before["digests"].items()}
    for line in lines:
        target, key, name, compiler = line.split(" ", 3)
        digests.setdefault(target, {})[key] = name
    by_name = {
        target: dict(sorted(known.items(), key=lambda one: (one[1], one[0])))
        for target, known in sorted(digests.items())
    }
    return {"compiler": compiler, "digests": by_name}


def add_found() -> None:
    """Add to the set what the suites of kernels found since the last time."""
    if NEW.exists():
        lines = NEW.read_text(encoding="utf-8").splitlines()
        write(f"data/{KEPT.name}", with_found(kept(), lines))
        NEW.unlink()
