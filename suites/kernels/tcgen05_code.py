"""Every tcgen05.mma in a PTX text, with the constants that it was written with, and when reads end.

Owns the reading: kind, instruction word, how far A and B lie behind the beginning of their operand
(in units of 16 bytes, as descriptors count), and whether the sums are new. What an instruction was
told at run time, such as a stage, is passed over. Reads of tensor memory are followed to the wait
behind which their numbers may be used.

Refuses text that it does not understand. Kept honest by
suites/kernels/gemm/test_tcgen05.py: text written by hand, and other numbers in
it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from degarble.suites.kernels.tcgen05_words import WrongWord, require

STEP = (1 << 14) - 1  # bits of an operand's descriptor that say where it begins
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
    words = defined(ptx, r"mov\.b32", r"%r\d+")
    steps = defined(ptx, r"(?:add\.s64|or\.b64)", r"%rd\d+")  # the same where no bits meet
    constants = defined(ptx, r"mov\.pred", r"%p\d+")
    found = []
    for match in _MMA.finditer(ptx):
        require(match["word"] in words, f"{match['word']} is no constant")
        adds = constants.get(match["adds"])
        found.append(
            Product(
                match["kind"],
                words[match["word"]],
                steps.get(match["a"], 0) & STEP,
                steps.get(match["b"], 0) & STEP,
                None if adds is None else bool(adds),
            )
        )
    require(len(found) == ptx.count("tcgen05.mma."), "an instruction that is not understood")
    return found


def defined(ptx: str, instruction: str, register: str) -> dict[str, int]:
    """Return the registers that an instruction makes of one constant, or of another and one."""
    text = rf"{instruction} \s*({register}), (?:{register}, )?(-?\d+);"
    made: dict[str, set[int]] = {}
    for name, number in re.findall(text, ptx):
        made.setdefault(name, set()).add(int(number))
    return {name: numbers.pop() for name, numbers in made.items() if len(numbers) == 1}


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
