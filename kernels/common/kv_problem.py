"""What writing into and reading from the paged latent cache is asked for, and what follows.

Owns the entry formats (bytes, which values are quantised, in what blocks), the address of each part
of an entry, the rules by which a block is scaled and coded, the problems, the choice of a form and
the grid. Addresses and rules are written once for ints, tensors and kernels.

A page holds the values of all its entries, then the scales of all its entries, then padding. The
formats are fp8 (584 bytes, FlashMLA), nvfp4 (384, FlashInfer), nvfp4-v41 (288, FlashInfer: pages of
64) and bf16; an indexer's keys have fp8-key (132, DeepGEMM: one float32 scale). V3.2's rows of 576
are fp8-v32 (656, FlashMLA: 512 codes, four float32 scales, the BF16 key, entry by entry),
fp8-v32-ue8m0 (scales are powers of two) or bf16. NVFP4 has no tensor scale and a smallest block
scale of 2**-9, as references have it. NaN: a block with one reads as NaN altogether (fp8: an
infinity too).

Refuses unknown names and extents that do not fit. Kept honest by
suites/kernels/common/test_kv_problem.py: rules equal to references.rounding for every BF16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.common import attention_rows as rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WARPS = 4  # entries that a thread block works on, one a warp
FEW_TOKENS = 2_112  # up to here latency counts: 16 warps for each of an H200's processors
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
    """How one row is kept."""

    name: str
    width: int
    quantised: int  # values, the leading ones; the others stay BF16
    block: int  # quantised values that share a scale
    code_bits: int
    scale_bytes: int  # of an entry, padding included
    page_step: int  # a page is padded to a multiple of so many bytes
    inside: bool = False  # float32 scales lie in an entry, between its codes and BF16 values
    powers: bool = True  # FP8 scales are powers of two
    numbers: bool = False  # scales are float32, not codes

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of an entry."""
        return self.quantised * self.code_bits // 8

    @property
    def value_bytes(self) -> int:
        """Bytes of codes and BF16 values of an entry, which lie together."""
        return self.code_bytes + 2 * (self.width - self.quantised)

    @property
    def entry_bytes(self) -> int:
        """All bytes of an entry."""
        return self.value_bytes + self.scale_bytes

    @property
    def rest_at(self) -> int:
        """Bytes of an entry before its BF16 values."""
        return self.code_bytes + self.inside * self.scale_bytes

    @property
    def step(self) -> int:
        """Bytes from values to values of neighbouring entries."""
        return self.value_bytes + self.inside * self.scale_bytes

    @property
    def scales(self) -> int:
        """Scales of an entry, padding not included."""
        return self.quantised // self.block if self.block else 0

    def page_bytes(self, entries: int) -> int:
        """Bytes of a page of so many entries."""
        size: int = round_up(entries * self.entry_bytes, self.page_step)
        return size


# Leading values that are quantised (0: the turned ones too), block, bits of a code.
_KINDS = {
    "fp8": (rows.ROTATED, 64, 8),
    "nvfp4": (rows.ROTATED, 16, 4),
    "nvfp4-v41": (0, 16, 4),
    "bf16": (None, 0, 0),
}
KEY, KEY_WIDTH = "fp8-key", 128  # of an indexer: all values share one scale
_KINDS_WITH_KEY = {"fp8-v32": False, "fp8-v32-ue8m0": True}  # of rows of 576; powers of two


@cache
def entry_format(name: str, width: int = rows.WIDTH) -> EntryFormat:
    """Return how an entry of a row of 512, 128 or 576 is kept; unknown names are refused."""
    if name in _KINDS_WITH_KEY:
        if width != rows.WITH_KEY:
            raise ShapeMismatch(
                f"width of a row of {name}", width, f"{rows.WITH_KEY}", "V4's rows have fp8."
            )
        powers = _KINDS_WITH_KEY[name]
        more = {"inside": True, "powers": powers, "numbers": True}
        return EntryFormat(name, width, rows.WIDTH, 128, 8, 16, VECTOR, **more)
    if name == KEY:
        if width != KEY_WIDTH:
            raise ShapeMismatch(f"width of a row of {name}", width, f"{KEY_WIDTH}", "Use fp8.")
        return EntryFormat(name, width, KEY_WIDTH, KEY_WIDTH, 8, 4, VECTOR, numbers=True)
    if name not in _KINDS:
        raise UnknownName.among("cache entry format", name, {**_KINDS, KEY: 0, **_KINDS_WITH_KEY})
    plain, block, bits = _KINDS[name]
    if plain is None:
        rows.cached_geometry(width)
    quantised = 0 if plain is None else rows.geometry(width).width - plain
    scales = width // block if block else 0  # those of values that stay BF16 are padding
    made = EntryFormat(name, width, quantised, block, bits, scales, VECTOR)
    # FlashMLA pads a page to a multiple of an entry's values.
    return replace(made, page_step=made.value_bytes) if name == "fp8" else made


FP8, NVFP4, NVFP4_V41, BF16 = (entry_format(name) for name in _KINDS)
ENTRIES: Mapping[str, EntryFormat] = MappingProxyType({name: entry_format(name) for name in _KINDS})


@dataclass(frozen=True)
class Pages:
    """A cache: pages of entries; slot s is entry s % entries of page s // entries."""

    entry: str
    entries: int  # of a page
    count: int
    page_bytes: int = 0  # 0: what the format needs; else a larger stride, as pools have it
    width: int = rows.WIDTH  # of a row

    def __post_init__(self) -> None:
        entry_format(self.entry, self.width)
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
        rows.require_extent(f"{VECTOR}-byte pieces of a cache", self.count * self.stride // VECTOR)

    @property
    def format(self) -> EntryFormat:
        """The record of the entry's format."""
        return entry_format(self.entry, self.width)

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
        read = 2 * self.pages.width + 8
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
        return self.count * (4 + entry.value_bytes + entry.scale_bytes + 2 * self.pages.width)


@dataclass(frozen=True)
class WriteForm:
    """What a writing kernel is compiled for; the extents come with the launch."""

    entry: str
    source: str
    weight: str
    duplicates: str
    few: bool  # everything is read at once, with registers for it
    target: str
    width: int = rows.WIDTH

    @property
    def format(self) -> EntryFormat:
        """The record of the entry's format."""
        return entry_format(self.entry, self.width)


@dataclass(frozen=True)
class ReadForm:
    """What a reading kernel is compiled for."""

    entry: str
    target: str
    width: int = rows.WIDTH

    @property
    def format(self) -> EntryFormat:
        """The record of the entry's format."""
        return entry_format(self.entry, self.width)


def choose_write_form(problem: WriteProblem, target: str) -> WriteForm:
    """Return the form that answers a problem: few and many tokens differ, other extents do not."""
    weight = problem.weight if problem.source == "latent" else rows.WEIGHTS[0]
    pages = problem.pages
    few = problem.tokens <= FEW_TOKENS or pages.width == rows.WITH_KEY  # which has one form
    return WriteForm(
        pages.entry, problem.source, weight, problem.duplicates, few, target, pages.width
    )


def choose_read_form(problem: ReadProblem, target: str) -> ReadForm:
    """Return the form that answers a problem."""
    return ReadForm(problem.pages.entry, target, problem.pages.width)


def normed_width(width: int) -> int:
    """Return how many values of a row are normed: all but V3.2's key."""
    return min(width, rows.WIDTH)


def normed_slots(form: WriteForm) -> int:
    """Return the slots of a row that are normed, the first ones."""
    return rows.geometry(normed_width(form.width)).slots


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


def bound_blocks(form: WriteForm) -> int:
    """Thread blocks a processor by which ptxas bounds registers: 32 a thread, or 0 for no bound.

    All threads that a processor can hold then have a token: 8,448 of them on an H200 at once.
    """
    return 0 if form.few else 16


# ---- addresses: ints, tensors, kernels -----------------------------------------------------------


def page_magic(entries: int) -> tuple[int, int]:
    """Return multiplier and shift by which a slot is divided by the entries of a page.

    With s = ceil(log2(entries)) the multiplier is 2**(31 + s) / entries, rounded up: below 2**32,
    and off by less than 2**s, which 31-bit slots do not notice.
    """
    shift = (entries - 1).bit_length()
    return ceil_div(1 << (31 + shift), entries), shift


def place_of(slot: Any, magic: tuple[Any, Any], entries: Any, high: Any) -> tuple[Any, Any]:
    """Return page and entry of a slot; `high` multiplies and keeps the upper 32 bits."""
    page = ops.shift_right(high(slot + slot, magic[0]), magic[1])
    return page, slot - page * entries


def value_piece(place: tuple[Any, Any], pieces: Any, entry: EntryFormat) -> Any:
    """Return which 16-byte piece of a cache an entry's values begin with; a page has `pieces`."""
    page, within = place
    return page * pieces + within * (entry.step // VECTOR)


def scale_within(within: Any, entries: Any, entry: EntryFormat) -> Any:
    """Return the byte of its page at which the scales of an entry begin."""
    if entry.inside:
        return within * entry.step + entry.code_bytes
    return entries * entry.value_bytes + within * entry.scale_bytes


# ---- rules: ints and float32, tensors, kernels ---------------------------------------------------


def fp8_scale_code(amax_bits: Any) -> Any:
    """Return the UE8M0 code of a block whose largest magnitude has these BF16 bits."""
    amax = ops.maximum(codecs.bf16_decode(amax_bits), FP8_SMALLEST_AMAX)
    bits = ops.bits_of(ops.multiply_rn(amax, LARGEST_E4M3_INVERSE))  # positive and normal
    return ops.select(amax_bits >= NAN_BF16, 255, ops.shift_right(bits + 0x7F_FFFF, 23))


def fp8_factor(scale_code: Any) -> Any:
    """Return what values are multiplied by before they are coded: a power of two, or NaN."""
    inverse = ops.shift_left(254 - ops.minimum(scale_code, 254), 23)
    return ops.number_of(ops.select(scale_code == 255, 0x7FC0_0000, inverse))


def fp32_scale_bits(amax_bits: Any, entry: EntryFormat) -> Any:
    """Return the bits of a block's float32 scale: a 448th, or fp8's power of two; or NaN."""
    if entry.powers:
        bits = ops.shift_left(fp8_scale_code(amax_bits), 23)
    else:
        amax = ops.maximum(codecs.bf16_decode(amax_bits), FP8_SMALLEST_AMAX)
        bits = ops.bits_of(ops.divide_rn(amax, codecs.E4M3_MAX))
    return ops.select(amax_bits >= NAN_BF16, 0x7FC0_0000, bits)


def nvfp4_scale_number(amax: Any, larger: Callable[[Any, Any], Any] = ops.maximum) -> Any:
    """Return a sixth of a block's largest magnitude, floored; coding it to E4M3 is the caller's.

    Of BF16 magnitudes the product with ONE_SIXTH codes as the true sixth does, ties included.
    """
    return ops.multiply_rn(larger(amax, NVFP4_SMALLEST_AMAX), codecs.ONE_SIXTH)


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
