"""The words that tcgen05 instructions take, and how a PTX text is read for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

# --------------------------------------------------------------------------------------------------
# Encode and decode the words that tcgen05 instructions take: instruction and operand descriptors.
#
# Fields as PTX ISA 9.1 lays them out (tcgen05, matrix descriptor, instruction descriptor for
# mxf4nvf4 and for f16, tensor memory addresses), and where a byte lies that a descriptor describes.
# The DSL makes the kernels' words; these are a second opinion on them.
#
# Fails on reserved bits that are set and on layouts that the kernels do not use.

SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}  # layout type to bytes; 1 is 128 with atoms of 32 bytes
ATOM = 16  # bytes that a swizzle moves as one
ROWS_OF_CORE = 8
E2M1_OF_MXF4, BF16_OF_F16, E4M3_OF_F8F6F4 = 1, 1, 0  # code of an operand's format, by kind


class WrongWord(AssertionError):
    """A word that no kernel of ours may hand to the hardware."""


def field(word: int, first: int, bits: int) -> int:
    """Return bits of a word."""
    return word >> first & (1 << bits) - 1


def require(condition: bool, text: str) -> None:
    """Refuse a word by name."""
    if not condition:
        raise WrongWord(text)


@dataclass(frozen=True)
class Instruction:
    """An instruction descriptor: extents, formats, and which bytes of a scale word are taken."""

    rows: int
    columns: int
    a_format: int
    b_format: int
    a_scale_id: int = 0
    b_scale_id: int = 0


def block_scaled(word: int) -> Instruction:
    """Read the descriptor of kind mxf4nvf4: PTX ISA 9.1, instruction descriptor, table of mxf4."""
    unused = {"sparsity": (0, 3), "bit 3": (3, 1), "bit 6": (6, 1), "negate": (13, 2)}
    unused |= {"major": (15, 2), "format of scales, E4M3": (23, 1), "K of 96": (31, 1)}
    for name, place in unused.items():
        require(field(word, *place) == 0, f"instruction {word:#010x}: {name} is set")
    return Instruction(
        rows=field(word, 24, 5) << 4,
        columns=field(word, 17, 6) << 3,
        a_format=field(word, 7, 3),
        b_format=field(word, 10, 3),
        a_scale_id=field(word, 29, 2),
        b_scale_id=field(word, 4, 2),
    )


def dense(word: int) -> Instruction:
    """Read the descriptor of kind f16 with float32 sums: PTX ISA 9.1, instruction descriptor."""
    unused = {"sparsity": (0, 3), "saturation": (3, 1), "bit 6": (6, 1), "negate": (13, 2)}
    unused |= {"major": (15, 2), "bit 23": (23, 1), "bit 29": (29, 1), "shift": (30, 2)}
    for name, place in unused.items():
        require(field(word, *place) == 0, f"instruction {word:#010x}: {name} is set")
    require(field(word, 4, 2) == 1, f"instruction {word:#010x}: sums are not float32")
    return Instruction(
        rows=field(word, 24, 5) << 4,
        columns=field(word, 17, 6) << 3,
        a_format=field(word, 7, 3),
        b_format=field(word, 10, 3),
    )


def block_scaled_word(rows: int, columns: int) -> int:
    """Make the descriptor of kind mxf4nvf4 for E2M1 and E4M3 scales, all four bytes of a word."""
    return rows >> 4 << 24 | columns >> 3 << 17 | E2M1_OF_MXF4 << 10 | E2M1_OF_MXF4 << 7


def dense_word(rows: int, columns: int, code: int = BF16_OF_F16) -> int:
    """Make the descriptor of kind f16 or f8f6f4 with float32 sums; both operands are alike."""
    formats = code << 10 | code << 7 | 1 << 4
    return rows >> 4 << 24 | columns >> 3 << 17 | formats


@dataclass(frozen=True)
class Operand:
    """A descriptor of shared memory: where it begins, bytes between cores, bytes of a swizzle."""

    start: int
    leading: int
    stride: int
    swizzle: int

    def byte(self, row: int, column: int) -> int:
        """Return the address of a byte of a row; a row is no longer than the swizzle, or a core."""
        width = self.swizzle or ATOM
        at = self.start + row // ROWS_OF_CORE * self.stride + row % ROWS_OF_CORE * width + column
        # The exclusive or is that of address bits: atoms of 16 bytes by rows of 128.
        return at ^ (at >> 3 & (self.swizzle - 1 & ~(ATOM - 1))) if self.swizzle else at


def operand(word: int) -> Operand:
    """Read a shared memory descriptor: PTX ISA 9.1, tcgen05 matrix descriptor."""
    require(field(word, 46, 2) == 1, f"operand {word:#018x}: version is not that of tcgen05")
    unused = {"bits 14, 15": (14, 2), "bits 30, 31": (30, 2), "bit 48": (48, 1)}
    unused |= {"base offset": (49, 3), "leading mode": (52, 1), "bits 53 to 60": (53, 8)}
    for name, place in unused.items():
        require(field(word, *place) == 0, f"operand {word:#018x}: {name} is set")
    layout = field(word, 61, 3)
    require(layout in SWIZZLES, f"operand {word:#018x}: layout {layout}")
    return Operand(
        start=field(word, 0, 14) * ATOM,
        leading=field(word, 16, 14) * ATOM,
        stride=field(word, 32, 14) * ATOM,
        swizzle=SWIZZLES[layout],
    )


def operand_word(start: int, stride: int, swizzle: int) -> int:
    """Make a shared memory descriptor of operands that are one core, or one swizzle, wide.

    The leading distance says nothing there; it is 1, as the DSL writes it.
    """
    (layout,) = (code for code, size in SWIZZLES.items() if size == swizzle)
    return layout << 61 | 1 << 46 | stride // ATOM << 32 | 1 << 16 | start // ATOM


@dataclass(frozen=True)
class Place:
    """An address in tensor memory."""

    lane: int
    column: int


def place(word: int) -> Place:
    """Read an address in tensor memory: lane above, column below; bits on top name a byte."""
    require(field(word, 30, 2) == 0, f"tensor memory {word:#010x}: names a byte of a word")
    return Place(lane=field(word, 16, 14), column=field(word, 0, 16))


# --------------------------------------------------------------------------------------------------
# Find every tcgen05.mma in a PTX text, with its constants, and where reads end.
#
# Reads kind, instruction word, how far A and B lie from the beginning of their operand (in units of
# 16 bytes, as descriptors count), and whether the sums are new. What an instruction takes at run
# time, such as a stage, is skipped. Reads of tensor memory are followed to the wait after which
# their numbers may be used. Fails on text that it does not understand.

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
