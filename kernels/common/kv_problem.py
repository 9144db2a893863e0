"""What writing into and reading from the paged latent cache is asked for, and what follows.

Owns the entry formats (bytes, which values are quantised, in what blocks), the address of each part
of an entry, the rules by which a block is scaled and coded, the problems, the choice of a form and
the grid. Addresses and rules are written once for ints, tensors and kernels.

A page holds the values of all its entries, then the scales of all its entries, then padding. The
formats are fp8 (584 bytes, FlashMLA), nvfp4 (384, FlashInfer), nvfp4-v41 (288, FlashInfer: pages of
64) and bf16. NVFP4 has no tensor scale and a smallest block scale of 2**-9, as references have it.
NaN: a block that holds one reads as NaN altogether (fp8: an infinity too, as in the reference).

Refuses unknown names and extents that do not fit. Kept honest by
suites/kernels/common/test_kv_problem.py: rules equal to references.rounding for every BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.common import attention_rows as rows

if TYPE_CHECKING:
    from collections.abc import Mapping

WARPS = 4  # entries that a thread block works on, one a warp
VECTOR = 16  # bytes of the widest store; a page starts at a multiple of it
NAN_BF16 = 0x7F80  # a magnitude above it
FP8_SMALLEST_AMAX = 1e-4  # DeepSeek-V4 inference/kernel.py, act_quant
LARGEST_E4M3_INVERSE = 1.0 / codecs.E4M3_MAX
NVFP4_SMALLEST_AMAX = codecs.E2M1_MAX * 2.0**-9  # FlashInfer, deepseek_v41/cache.py
NVFP4_LARGEST = codecs.E2M1_MAX * codecs.E4M3_MAX  # beyond it a value saturates in every block
ESTIMATE_LOWERED = 1 - 2.0**-20
NO_CLAIM = -1
SOURCES = ("latent", "row")  # norm and turn first, or rows that are both already
DUPLICATES = ("absent", "last")  # of slots: promised not to occur, or the last token's entry stays


@dataclass(frozen=True)
class EntryFormat:
    """How one row of 512 values is kept."""

    name: str
    quantised: int  # values, the leading ones; the others stay BF16
    block: int  # quantised values that share a scale
    code_bits: int
    scale_bytes: int  # of an entry, padding included
    page_step: int  # a page is padded to a multiple of so many bytes

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of an entry."""
        return self.quantised * self.code_bits // 8

    @property
    def value_bytes(self) -> int:
        """Bytes of codes and BF16 values of an entry, which lie together."""
        return self.code_bytes + 2 * (rows.WIDTH - self.quantised)

    @property
    def entry_bytes(self) -> int:
        """All bytes of an entry."""
        return self.value_bytes + self.scale_bytes

    @property
    def scales(self) -> int:
        """Scales of an entry, padding not included."""
        return self.quantised // self.block if self.block else 0

    def page_bytes(self, entries: int) -> int:
        """Bytes of a page of so many entries."""
        size: int = round_up(entries * self.entry_bytes, self.page_step)
        return size


FP8 = EntryFormat("fp8", rows.PLAIN, 64, 8, scale_bytes=8, page_step=576)
NVFP4 = EntryFormat("nvfp4", rows.PLAIN, 16, 4, scale_bytes=32, page_step=VECTOR)
NVFP4_V41 = EntryFormat("nvfp4-v41", rows.WIDTH, 16, 4, scale_bytes=32, page_step=VECTOR)
BF16 = EntryFormat("bf16", 0, 0, 0, scale_bytes=0, page_step=VECTOR)
ENTRIES: Mapping[str, EntryFormat] = MappingProxyType(
    {entry.name: entry for entry in (FP8, NVFP4, NVFP4_V41, BF16)}
)


@dataclass(frozen=True)
class Pages:
    """A cache: pages of entries; slot s is entry s % entries of page s // entries."""

    entry: str
    entries: int  # of a page
    count: int
    page_bytes: int = 0  # 0: what the format needs; else a larger stride, as pools have it

    def __post_init__(self) -> None:
        if self.entry not in ENTRIES:
            raise UnknownName.among("cache entry format", self.entry, ENTRIES)
        rows.require_extent("entries of a page", self.entries, 1)
        rows.require_extent("slots of a cache", self.entries * self.count)
        needed = self.format.page_bytes(self.entries)
        if self.page_bytes and (self.page_bytes < needed or self.page_bytes % VECTOR):
            raise ShapeMismatch(
                "bytes of a page",
                self.page_bytes,
                f"a multiple of {VECTOR} and at least {needed} for {self.entries} entries",
                "Leave it out for the format's own size.",
            )
        rows.require_extent("bytes of a page", self.stride)

    @property
    def format(self) -> EntryFormat:
        """The record of the entry's format."""
        return ENTRIES[self.entry]

    @property
    def slots(self) -> int:
        """Entries of all pages."""
        return self.entries * self.count

    @property
    def stride(self) -> int:
        """Bytes from page to page."""
        return self.page_bytes or self.format.page_bytes(self.entries)


@dataclass(frozen=True)
class WriteProblem:
    """T tokens' rows go to their slots."""

    tokens: int
    pages: Pages
    positions: int = 0  # rows of the table of turns; 0 where rows come normed and turned
    epsilon: float = 1e-6
    weight: str = "bf16"
    source: str = "latent"
    duplicates: str = "absent"

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("positions of the table of turns", self.positions)
        rows.require_epsilon(self.epsilon)
        for name, value, known in (
            ("source of cache rows", self.source, SOURCES),
            ("dtype of a norm's weight", self.weight, rows.WEIGHTS),
            ("rule for duplicate slots", self.duplicates, DUPLICATES),
        ):
            if value not in known:
                raise UnknownName.among(name, value, known)
        if (self.positions > 0) != (self.source == "latent"):
            raise InvalidArgument(
                "positions of the table of turns",
                self.positions,
                "a table for latents, none for rows that are turned already",
                f"The problem says source={self.source!r}.",
            )

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that have to be read and written: every input and output once."""
        entry = self.pages.format
        read = 2 * rows.WIDTH + 8
        if self.source == "latent":
            read += 8 + 4 * rows.TABLE_WIDTH
        return self.tokens * (read + entry.value_bytes + entry.scale_bytes)


@dataclass(frozen=True)
class ReadProblem:
    """N entries are gathered and decoded to BF16 rows."""

    count: int
    pages: Pages

    def __post_init__(self) -> None:
        rows.require_extent("entries to read", self.count)

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that have to be read and written."""
        entry = self.pages.format
        return self.count * (4 + entry.value_bytes + entry.scale_bytes + 2 * rows.WIDTH)


@dataclass(frozen=True)
class WriteForm:
    """What a writing kernel is compiled for; the extents come with the launch."""

    entry: str
    source: str
    weight: str
    duplicates: str
    target: str


@dataclass(frozen=True)
class ReadForm:
    """What a reading kernel is compiled for."""

    entry: str
    target: str


def choose_write_form(problem: WriteProblem, target: str) -> WriteForm:
    """Return the form that answers a problem: extents are no part of it."""
    weight = problem.weight if problem.source == "latent" else rows.WEIGHTS[0]
    return WriteForm(problem.pages.entry, problem.source, weight, problem.duplicates, target)


def choose_read_form(problem: ReadProblem, target: str) -> ReadForm:
    """Return the form that answers a problem."""
    return ReadForm(problem.pages.entry, target)


def coded_at_all(entry: EntryFormat, slot: int) -> bool:
    """Whether a lane may hold quantised values in a slot."""
    return entry.quantised > slot * rows.LANES * rows.HALF


def coded_only(entry: EntryFormat, slot: int) -> bool:
    """Whether every lane holds quantised values in a slot."""
    return entry.quantised >= (slot + 1) * rows.LANES * rows.HALF


def grid(count: int) -> int:
    """Thread blocks for so many entries."""
    blocks: int = ceil_div(count, WARPS)
    return blocks


# ---- addresses: ints, tensors, kernels -----------------------------------------------------------


def value_offset(page: Any, within: Any, stride: Any, entry: EntryFormat) -> Any:
    """Return the byte at which the values of an entry begin."""
    return page * stride + within * entry.value_bytes


def scale_offset(place: tuple[Any, Any], stride: Any, entries: Any, entry: EntryFormat) -> Any:
    """Return the byte at which the scales of an entry, (page, within), begin."""
    page, within = place
    return page * stride + entries * entry.value_bytes + within * entry.scale_bytes


# ---- rules: ints and float32, tensors, kernels ---------------------------------------------------


def fp8_scale_code(amax_bits: Any) -> Any:
    """Return the UE8M0 code of a block whose largest magnitude has these BF16 bits."""
    amax = ops.maximum(codecs.bf16_decode(amax_bits), FP8_SMALLEST_AMAX)
    code = codecs.ue8m0_encode(ops.multiply_rn(amax, LARGEST_E4M3_INVERSE))
    return ops.select(amax_bits >= NAN_BF16, 255, code)


def fp8_factor(scale_code: Any) -> Any:
    """Return what values are multiplied by before they are coded: a power of two, or NaN."""
    inverse = ops.shift_left(254 - ops.minimum(scale_code, 254), 23)
    return ops.number_of(ops.select(scale_code == 255, 0x7FC0_0000, inverse))


def nvfp4_scale_number(amax_bits: Any) -> Any:
    """Return a sixth of a block's largest magnitude, floored; coding it to E4M3 is the caller's.

    Of BF16 magnitudes the product with ONE_SIXTH codes as the true sixth does, ties included.
    """
    amax = ops.maximum(codecs.bf16_decode(amax_bits), NVFP4_SMALLEST_AMAX)
    return ops.multiply_rn(amax, codecs.ONE_SIXTH)


def nvfp4_inverse(scale: Any, estimate: Any) -> tuple[Any, Any]:
    """Return 1 / scale as a sum of two numbers, from any estimate that is good to 21 bits.

    Both are positive, or a zero would lose its sign: the first is made too small.
    """
    estimate = ops.multiply_rn(estimate, ESTIMATE_LOWERED)
    error = ops.fma_rn(ops.multiply_rn(scale, -1.0), estimate, 1.0)
    return estimate, ops.multiply_rn(estimate, error)


def nvfp4_quotient(number: Any, inverse: tuple[Any, Any]) -> Any:
    """Return a BF16 number divided by a scale, so near that E2M1 ties stay ties.

    A boundary times a scale has 7 bits, the number 8: what is no tie is 2**-16 from it at least.
    """
    return ops.fma_rn(number, inverse[0], ops.multiply_rn(number, inverse[1]))


def e2m1_numbers(word: Any, scale: Any) -> list[Any]:
    """Return the eight numbers of a word of codes times a scale, exactly.

    The three bits of a magnitude, moved to exponent and mantissa, are 2**-126 times its number.
    """
    made = []
    of_scale = ops.multiply_rn(scale, 2.0**26)
    for place in range(8):
        nibble = ops.shift_right(word, 4 * place) & 0xF
        bits = ops.shift_left(nibble & 7, 22) + ops.shift_left(nibble & 8, 28)
        made.append(ops.multiply_rn(ops.multiply_rn(ops.number_of(bits), 2.0**100), of_scale))
    return made
