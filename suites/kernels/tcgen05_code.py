"""Every tcgen05.mma in a PTX text, with the constants that it was written with, and when reads end.

Owns the reading: kind, instruction word, how far A and B lie behind the beginning of their operand
(in units of 16 bytes, as descriptors count), and whether the sums are new. What an instruction was
told at run time, such as a stage, is passed over. Reads of tensor memory are followed to the wait
behind which their numbers may be used.

Refuses text that it does not understand. Kept honest by
suites/kernels/common/test_tcgen05_code.py: text written by hand, and other numbers in it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from degarble.suites.kernels.tcgen05_words import WrongWord, require

WORD_BITS = 46  # of an operand's descriptor; its version lies above
_MMA = re.compile(
    r"tcgen05\.mma\.cta_group::1\.(?P<kind>kind::\w+)\S*\s+\[(?P<d>%r\d+)(?:\+(?P<more>\d+))?\], "
    r"(?P<a>%rd\d+), (?P<b>%rd\d+), (?P<word>%r\d+), \{[^}]*\}, (?P<adds>%p\d+);"
)
_LOADED = re.compile(r"tcgen05\.ld\.sync\.aligned\.(\S+?)\.b32 \s*\{([^}]*)\}, \[")
_RENAMED = re.compile(r"^\s*mov\.b64 \s*(\{[^}]*\}|%rd\d+), (\{%r\d+, %r\d+\}|%rd\d+);")
_WAITED = re.compile(r"tcgen05\.wait::ld\.sync\.aligned;")


class Product(NamedTuple):
    """One instruction: kind, word, where A and B begin, whether it adds (None: known later)."""

    kind: str
    word: int
    a: int
    b: int
    adds: bool | None


def products(ptx: str) -> list[Product]:
    """Return the matrix instructions in the order of the text."""
    found = []
    for match in _MMA.finditer(ptx):
        before = ptx[: match.start()]
        constants = re.findall(rf"mov\.pred \s*{match['adds']}, (-?\d+);", before)
        found.append(
            Product(
                match["kind"],
                word_of(before, match["word"]),
                step_of(before, match["a"]),
                step_of(before, match["b"]),
                bool(int(constants[-1])) if constants else None,
            )
        )
    require(len(found) == ptx.count("tcgen05.mma."), "an instruction that is not understood")
    return found


def word_of(before: str, register: str) -> int:
    """Return a constant that was moved to a register."""
    moved = re.findall(rf"mov\.b32 \s*{register}, (\d+);", before)
    require(bool(moved), f"{register} is no constant")
    return int(moved[-1])


def step_of(before: str, register: str) -> int:
    """Return how far a descriptor lies behind another one; 0 where it is not made of one."""
    added = re.findall(rf"add\.s64 \s*{register}, %rd\d+, (\d+);", before)
    return int(added[-1]) & (1 << 14) - 1 if added else 0


def operand_words(ptx: str) -> set[int]:
    """Return the descriptors' constants, without what says where an operand lies."""
    constants = re.findall(r"(?:or\.b64|add\.s64) \s*%rd\d+, %rd\d+, (\d+);", ptx)
    return {int(word) >> 14 << 14 for word in constants if int(word) >> WORD_BITS}


class Read(NamedTuple):
    """One read of tensor memory: its shape, and the lines to the wait and to the first use."""

    shape: str
    waited: int
    used: int


def reads(ptx: str) -> list[Read]:
    """Return reads of tensor memory, and whether what they read is used behind a wait alone."""
    lines, found = ptx.splitlines(), []
    for i, line in enumerate(lines):
        match = _LOADED.search(line)
        if not match:
            continue
        waited = next((j for j in range(i + 1, len(lines)) if _WAITED.search(lines[j])), -1)
        used = first_use(lines, i + 1, names(match[2]))
        if waited < 0 or used < 0:
            raise WrongWord(f"line {i}: a read that nobody waits for, or uses")
        found.append(Read(match[1], waited - i, used - i))
    return found


def first_use(lines: list[str], begin: int, registers: set[str]) -> int:
    """Return the first line that computes with registers, or -1; pairing them computes nothing.

    A text pairs what was read at once, which gives registers another name.
    """
    for i in range(begin, len(lines)):
        renamed = _RENAMED.match(lines[i])
        if renamed and registers & names(renamed[2]):
            registers = registers | names(renamed[1])
        elif registers & names(lines[i]):
            return i
    return -1


def names(text: str) -> set[str]:
    """Return the registers of a text."""
    return set(re.findall(r"%rd?\d+", text))


def early_uses(ptx: str) -> list[Read]:
    """Return reads whose numbers are used before the wait."""
    return [read for read in reads(ptx) if read.used < read.waited]
