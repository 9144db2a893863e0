"""Attention rows and entries of the paged latent cache: layout, problems, forms, scales and codes.

Importable without the DSL; rules are written once for ints, tensors and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


# --------------------------------------------------------------------------------------------------
# How a warp holds attention rows of 512 or 128 values, the order of their sums, and RoPE.
#
# A lane holds two slots of 8 values: 8 lane to 8 lane + 7, and the same 256 further on. So 16-byte
# loads are adjacent, both halves of a 16-wide block are in neighbouring lanes, and the pairs that
# RoPE rotates are in one lane. Lanes 24 to 31 hold the last 64 values, the rotated ones, in their
# second slot. A row of 128 (small models, the indexer) has one slot in each of 16 lanes; the others
# hold zeros.
#
# The sum of squares has one order: a lane sums each slot from its first value on by fma, then both;
# lanes are folded by distance 16, 8, 4, 2, 1. So a row's bits depend on the row alone.
#
# A RoPE table is float32 [positions, 64]: 32 cosines, then 32 sines, as vLLM keeps it.

WIDTH = 512  # values of a row; DeepSeek-V4 config.json, head_dim
ROTATED = 64  # of them turned, the last ones; qk_rope_head_dim
PLAIN = WIDTH - ROTATED
WITH_KEY = WIDTH + ROTATED  # V3.2's cached row: the latent, then the rotated key
HALF = 8  # values of a lane's 16-byte load
LANES = 32
SLOTS = WIDTH // (LANES * HALF)
PAIRS_OF_LANE = HALF // 2
TABLE_WIDTH = ROTATED  # 32 cosines, 32 sines
LARGEST = 1 << 31
TOKENS_GUESSED = 4  # up to which turns are read by guesses of positions (runtime/pdl)
WEIGHTS = ("bf16", "fp32")  # dtypes of a norm's weight
MOST_HEADS = 1 << 16  # CUDA C++ Programming Guide 13.0: a grid has fewer thread blocks along y


def require_extent(name: str, extent: int, least: int = 0) -> None:
    """Raise on an extent that a kernel's 32-bit numbers do not hold."""
    if not least <= extent < LARGEST:
        raise ShapeMismatch(name, extent, f"from {least} to below 2**31", "Split the launch.")


def require_epsilon(epsilon: float) -> None:
    """Raise on an epsilon outside [0, 1)."""
    if not 0 <= epsilon < 1:
        raise InvalidArgument(
            "epsilon", epsilon, "a number from 0 up to 1", "Models have 1e-6 or 1e-20."
        )


@dataclass(frozen=True)
class Geometry:
    """How a warp holds a row of `width` values."""

    width: int

    @property
    def plain(self) -> int:
        """Return the number of values that are not rotated, the leading ones."""
        return self.width - ROTATED

    @property
    def chunks(self) -> int:
        """Return the number of 16-byte loads of a row."""
        return self.width // HALF

    @property
    def slots(self) -> int:
        """Return the number of slots of a lane, of eight values each."""
        held: int = ceil_div(self.chunks, LANES)
        return held

    @property
    def lanes(self) -> int:
        """Return the number of lanes that hold values."""
        return min(self.chunks, LANES)

    @property
    def first_turned_lane(self) -> int:
        """Return the lane that holds the first rotated values, in the last slot."""
        return self.lanes_of(self.slots - 1) - ROTATED // HALF

    def lanes_of(self, slot: int) -> int:
        """Return the number of lanes that hold values in a slot, the first ones."""
        return min(self.chunks - slot * LANES, LANES)


GEOMETRIES: Mapping[int, Geometry] = MappingProxyType(
    {width: Geometry(width) for width in (128, WIDTH)}
)


def geometry(width: int) -> Geometry:
    """Return how a row is held; raise on a width without a kernel."""
    if width not in GEOMETRIES:
        raise ShapeMismatch(
            "width of a row",
            width,
            " or ".join(map(str, GEOMETRIES)),
            "Heads, latents and index keys of the known models have these.",
        )
    return GEOMETRIES[width]


def cached_geometry(width: int) -> Geometry:
    """Return how a cached row is held; V3.2's key follows the latent."""
    return Geometry(width) if width == WITH_KEY else geometry(width)


def folded(numbers: Sequence[Any]) -> Any:
    """Add number i and number i + n / 2 until one is left; n is a power of two."""
    while len(numbers) > 1:
        middle = len(numbers) // 2
        pairs = zip(numbers[:middle], numbers[middle:], strict=True)
        numbers = [ops.add_rn(first, second) for first, second in pairs]
    return numbers[0]


def lane_sum(halves: Sequence[Sequence[Any]]) -> Any:
    """Return the sum of squares of a lane's values, in the stated order."""
    sums = []
    for numbers in halves:
        total = ops.multiply_rn(numbers[0], numbers[0])
        for number in numbers[1:]:
            total = ops.fma_rn(number, number, total)
        sums.append(total)
    return folded(sums)


def row_factor(
    lanes: Sequence[Any], epsilon: Any, root: Callable[[Any], Any], width: int = WIDTH
) -> Any:
    """Return a row's norm factor from the sums of its lanes; each step is rounded once."""
    mean = ops.multiply_rn(folded(lanes), 1.0 / width)
    return ops.divide_rn(1.0, root(ops.add_rn(mean, epsilon)))


def normed(number: Any, weight: Any, factor: Any) -> Any:
    """Return a normed value in float32; the caller rounds it to BF16."""
    return ops.multiply_rn(weight, ops.multiply_rn(number, factor))


def turned(
    numbers: Sequence[Any], cos: Sequence[Any], sin: Sequence[Any], *, back: bool
) -> list[Any]:
    """Rotate adjacent pairs, or rotate them back; each product and sum is rounded."""
    made: list[Any] = []
    for pair in range(len(numbers) // 2):
        even, odd = numbers[2 * pair], numbers[2 * pair + 1]
        of_sine = ops.multiply_rn(sin[pair], -1.0) if back else sin[pair]
        made += codecs.rope_rotate(even, odd, cos[pair], of_sine)
    return made


# --------------------------------------------------------------------------------------------------
# Entry formats, addresses, problems and forms of the paged latent cache.
#
# A page holds the values of all its entries, then the scales of all its entries, then padding.
# Formats: fp8 (584 bytes, FlashMLA), nvfp4 (384, FlashInfer), nvfp4-v41 (288, FlashInfer: pages of
# 64), bf16; fp8-key for an indexer's keys (132, DeepGEMM: one float32 scale). V3.2's rows of 576
# are fp8-v32 (656, FlashMLA: 512 codes, four float32 scales, the BF16 key, entry by entry),
# fp8-v32-ue8m0 (scales are powers of two) or bf16. How a block is scaled and coded is below.
#
# Addresses are written once, for ints and kernels. Every byte of a page
# belongs to one entry or to the padding.

WARPS = 4  # entries that a thread block works on, one a warp
FEW_TOKENS = 2_112  # up to here latency counts: 16 warps for each of an H200's processors
VECTOR = 16  # bytes of the widest store; a page starts at a multiple of it
NO_CLAIM = -1
SOURCES = ("latent", "row")  # norm and turn first, or rows that are both already
DUPLICATES = ("absent", "last")  # of slots: promised not to occur, or the last token's entry stays


@dataclass(frozen=True)
class EntryFormat:
    """Layout of one cached row."""

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
        """Return the bytes of the codes of an entry."""
        return self.quantised * self.code_bits // 8

    @property
    def value_bytes(self) -> int:
        """Return the bytes of codes and BF16 values of an entry, which lie together."""
        return self.code_bytes + 2 * (self.width - self.quantised)

    @property
    def entry_bytes(self) -> int:
        """Return all bytes of an entry."""
        return self.value_bytes + self.scale_bytes

    @property
    def rest_at(self) -> int:
        """Return the bytes of an entry before its BF16 values."""
        return self.code_bytes + self.inside * self.scale_bytes

    @property
    def step(self) -> int:
        """Return the bytes between the values of neighbouring entries."""
        return self.value_bytes + self.inside * self.scale_bytes

    @property
    def scales(self) -> int:
        """Return the number of scales of an entry, padding not included."""
        return self.quantised // self.block if self.block else 0

    def page_bytes(self, entries: int) -> int:
        """Return the bytes of a page of so many entries."""
        size: int = round_up(entries * self.entry_bytes, self.page_step)
        return size


# Leading values that are quantised (0: the turned ones too), block, bits of a code.
_KINDS = {
    "fp8": (ROTATED, 64, 8),
    "nvfp4": (ROTATED, 16, 4),
    "nvfp4-v41": (0, 16, 4),
    "bf16": (None, 0, 0),
}
KEY, KEY_WIDTH = "fp8-key", 128  # of an indexer: all values share one scale
_KINDS_WITH_KEY = {"fp8-v32": False, "fp8-v32-ue8m0": True}  # of rows of 576; powers of two


@cache
def entry_format(name: str, width: int = WIDTH) -> EntryFormat:
    """Return the layout of an entry of a row of 512, 128 or 576; raise on unknown names."""
    if name in _KINDS_WITH_KEY:
        if width != WITH_KEY:
            raise ShapeMismatch(
                f"width of a row of {name}", width, f"{WITH_KEY}", "V4's rows have fp8."
            )
        powers = _KINDS_WITH_KEY[name]
        more = {"inside": True, "powers": powers, "numbers": True}
        return EntryFormat(name, width, WIDTH, 128, 8, 16, VECTOR, **more)
    if name == KEY:
        if width != KEY_WIDTH:
            raise ShapeMismatch(f"width of a row of {name}", width, f"{KEY_WIDTH}", "Use fp8.")
        return EntryFormat(name, width, KEY_WIDTH, KEY_WIDTH, 8, 4, VECTOR, numbers=True)
    if name not in _KINDS:
        raise UnknownName.among("cache entry format", name, {**_KINDS, KEY: 0, **_KINDS_WITH_KEY})
    plain, block, bits = _KINDS[name]
    if plain is None:
        cached_geometry(width)
    quantised = 0 if plain is None else geometry(width).width - plain
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
    width: int = WIDTH  # of a row

    def __post_init__(self) -> None:
        entry_format(self.entry, self.width)
        require_extent("entries of a page", self.entries, 1)
        require_extent("slots of a cache", self.entries * self.count)
        needed = self.format.page_bytes(self.entries)
        if self.page_bytes and (self.page_bytes < needed or self.page_bytes % VECTOR):
            raise ShapeMismatch(
                "bytes of a page",
                self.page_bytes,
                f"a multiple of {VECTOR} and at least {needed} for {self.entries} entries",
                "Leave it out for the format's own size.",
            )
        require_extent("bytes of a page", self.stride)
        require_extent(f"{VECTOR}-byte pieces of a cache", self.count * self.stride // VECTOR)

    @property
    def format(self) -> EntryFormat:
        """Return the record of the entry's format."""
        return entry_format(self.entry, self.width)

    @property
    def slots(self) -> int:
        """Return the number of entries of all pages."""
        return self.entries * self.count

    @property
    def stride(self) -> int:
        """Return the bytes from page to page."""
        return self.page_bytes or self.format.page_bytes(self.entries)


@dataclass(frozen=True)
class WriteProblem:
    """Write T tokens' rows to their slots."""

    tokens: int
    pages: Pages
    positions: int = 0  # rows of the table of turns; 0 where rows come normed and turned
    epsilon: float = 1e-6
    weight: str = "bf16"
    source: str = "latent"
    duplicates: str = "absent"

    def __post_init__(self) -> None:
        require_extent("tokens", self.tokens)
        require_extent("positions of the table of turns", self.positions)
        require_epsilon(self.epsilon)
        for name, value, known in (
            ("source of cache rows", self.source, SOURCES),
            ("dtype of a norm's weight", self.weight, WEIGHTS),
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
        """Return the fewest bytes that have to be read and written: every input and output once."""
        entry = self.pages.format
        read = 2 * self.pages.width + 8
        if self.source == "latent":
            read += 8 + 4 * TABLE_WIDTH
        return self.tokens * (read + entry.value_bytes + entry.scale_bytes)


@dataclass(frozen=True)
class ReadProblem:
    """Gather N entries and decode them to BF16 rows."""

    count: int
    pages: Pages

    def __post_init__(self) -> None:
        require_extent("entries to read", self.count)

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written."""
        entry = self.pages.format
        return self.count * (4 + entry.value_bytes + entry.scale_bytes + 2 * self.pages.width)


@dataclass(frozen=True)
class WriteForm:
    """Compile-time parameters of a writing kernel; extents come with the launch."""

    entry: str
    source: str
    weight: str
    duplicates: str
    few: bool  # everything is read at once, with registers for it
    target: str
    width: int = WIDTH

    @property
    def format(self) -> EntryFormat:
        """Return the record of the entry's format."""
        return entry_format(self.entry, self.width)


@dataclass(frozen=True)
class ReadForm:
    """Compile-time parameters of a reading kernel."""

    entry: str
    target: str
    width: int = WIDTH

    @property
    def format(self) -> EntryFormat:
        """Return the record of the entry's format."""
        return entry_format(self.entry, self.width)


def choose_write_form(problem: WriteProblem, target: str) -> WriteForm:
    """Return the form for a problem: few and many tokens differ, other extents do not."""
    weight = problem.weight if problem.source == "latent" else WEIGHTS[0]
    pages = problem.pages
    few = problem.tokens <= FEW_TOKENS or pages.width == WITH_KEY  # which has one form
    return WriteForm(
        pages.entry, problem.source, weight, problem.duplicates, few, target, pages.width
    )


def choose_read_form(problem: ReadProblem, target: str) -> ReadForm:
    """Return the form for a problem."""
    return ReadForm(problem.pages.entry, target, problem.pages.width)


def normed_width(width: int) -> int:
    """Return how many values of a row are normed: all but V3.2's key."""
    return min(width, WIDTH)


def normed_slots(form: WriteForm) -> int:
    """Return the number of slots of a row that are normed, the first ones."""
    return geometry(normed_width(form.width)).slots


def coded_at_all(entry: EntryFormat, slot: int) -> bool:
    """Return whether a lane may hold quantised values in a slot."""
    return entry.quantised > slot * LANES * HALF


def coded_only(entry: EntryFormat, slot: int) -> bool:
    """Return whether every lane holds quantised values in a slot."""
    return entry.quantised >= (slot + 1) * LANES * HALF


def grid(count: int) -> int:
    """Return the number of thread blocks for so many entries."""
    blocks: int = ceil_div(count, WARPS)
    return blocks


def bound_blocks(form: WriteForm) -> int:
    """Return thread blocks a processor by which ptxas bounds registers: 32 a thread; 0: no bound.

    All threads that a processor can hold then have a token: 8,448 at once on an H200.
    """
    return 0 if form.few else 16


# ---- addresses: ints, tensors, kernels -----------------------------------------------------------


def page_magic(entries: int) -> tuple[int, int]:
    """Return multiplier and shift that divide a slot by the entries of a page.

    With s = ceil(log2(entries)) the multiplier is 2**(31 + s) / entries, rounded up: below 2**32,
    and off by less than 2**s, which does not affect 31-bit slots.
    """
    shift = (entries - 1).bit_length()
    return ceil_div(1 << (31 + shift), entries), shift


def place_of(slot: Any, magic: tuple[Any, Any], entries: Any, high: Any) -> tuple[Any, Any]:
    """Return page and entry of a slot; `high` multiplies and keeps the upper 32 bits."""
    page = ops.shift_right(high(slot + slot, magic[0]), magic[1])
    return page, slot - page * entries


def value_piece(place: tuple[Any, Any], pieces: Any, entry: EntryFormat) -> Any:
    """Return the 16-byte piece of a cache where an entry's values begin; a page has `pieces`."""
    page, within = place
    return page * pieces + within * (entry.step // VECTOR)


def scale_within(within: Any, entries: Any, entry: EntryFormat) -> Any:
    """Return the byte of its page at which the scales of an entry begin."""
    if entry.inside:
        return within * entry.step + entry.code_bytes
    return entries * entry.value_bytes + within * entry.scale_bytes


# --------------------------------------------------------------------------------------------------
# Scale and code a block of a cache entry; written once for ints, tensors and kernels.
#
# FP8 entries have UE8M0 or float32 scales. NVFP4 entries have no tensor scale and a smallest block
# scale of 2**-9, as the references do. A block that holds a NaN reads back as NaN altogether (fp8:
# an infinity as well).

NAN_BF16 = 0x7F80  # a magnitude above it
FP8_SMALLEST_AMAX = 1e-4  # DeepSeek-V4 inference/kernel.py, act_quant
LARGEST_E4M3_INVERSE = 1.0 / codecs.E4M3_MAX
NVFP4_SMALLEST_AMAX = codecs.E2M1_MAX * 2.0**-9  # FlashInfer, deepseek_v41/cache.py
ESTIMATE_LOWERED = 1 - 2.0**-20


def fp8_scale_code(amax_bits: Any) -> Any:
    """Return the UE8M0 code of a block whose largest magnitude has these BF16 bits."""
    amax = ops.maximum(codecs.bf16_decode(amax_bits), FP8_SMALLEST_AMAX)
    bits = ops.bits_of(ops.multiply_rn(amax, LARGEST_E4M3_INVERSE))  # positive and normal
    # Adding the mantissa's ones rounds the exponent up: the next power of two. 255 is UE8M0's NaN.
    return ops.select(amax_bits >= NAN_BF16, 255, ops.shift_right(bits + 0x7F_FFFF, 23))


def fp8_factor(scale_code: Any) -> Any:
    """Return the factor of values before they are coded: a power of two, or NaN."""
    inverse = ops.shift_left(254 - ops.minimum(scale_code, 254), 23)
    return ops.number_of(ops.select(scale_code == 255, 0x7FC0_0000, inverse))


def fp32_scale_bits(amax_bits: Any, entry: EntryFormat) -> Any:
    """Return the bits of a block's float32 scale: amax / 448, or fp8's power of two; or NaN."""
    if entry.powers:
        bits = ops.shift_left(fp8_scale_code(amax_bits), 23)
    else:
        amax = ops.maximum(codecs.bf16_decode(amax_bits), FP8_SMALLEST_AMAX)
        bits = ops.bits_of(ops.divide_rn(amax, codecs.E4M3_MAX))
    return ops.select(amax_bits >= NAN_BF16, 0x7FC0_0000, bits)


def nvfp4_scale_number(amax: Any, larger: Callable[[Any, Any], Any] = ops.maximum) -> Any:
    """Return a sixth of a block's largest magnitude, floored; the caller codes it to E4M3.

    For BF16 magnitudes the product with ONE_SIXTH has the code of the true sixth, ties included.
    """
    return ops.multiply_rn(larger(amax, NVFP4_SMALLEST_AMAX), codecs.ONE_SIXTH)


def nvfp4_inverse(scale: Any, estimate: Any) -> tuple[Any, Any]:
    """Return 1 / scale as a sum of two numbers, from any estimate that is good to 21 bits.

    Both are positive, or a zero would lose its sign: hence the first is made too small.
    """
    estimate = ops.multiply_rn(estimate, ESTIMATE_LOWERED)
    error = ops.fma_rn(ops.multiply_rn(scale, -1.0), estimate, 1.0)
    return estimate, ops.multiply_rn(estimate, error)


def nvfp4_quotient(number: Any, inverse: tuple[Any, Any]) -> Any:
    """Return a BF16 number divided by a scale, exactly enough that E2M1 ties stay ties.

    A boundary times a scale has 7 bits, the number 8: what is no tie differs by at least 2**-16.
    """
    return ops.fma_rn(number, inverse[0], ops.multiply_rn(number, inverse[1]))


def e2m1_numbers(word: Any, scale: Any) -> list[Any]:
    """Return the eight numbers of a word of codes times a scale, exactly.

    The three bits of a magnitude, moved to exponent and mantissa, are the value times 2**-126.
    """
    made = []
    # 2**126 is split into 2**26 and 2**100.
    of_scale = ops.multiply_rn(scale, 2.0**26)
    for place in range(8):
        nibble = ops.shift_right(word, 4 * place) & 0xF
        bits = ops.shift_left(nibble & 7, 22) + ops.shift_left(nibble & 8, 28)
        made.append(ops.multiply_rn(ops.multiply_rn(ops.number_of(bits), 2.0**100), of_scale))
    return made
