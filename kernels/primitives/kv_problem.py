"""Entry formats, addresses, problems and forms of the paged latent cache.

A page holds the values of all its entries, then the scales of all its entries, then padding.
Formats: fp8 (584 bytes, FlashMLA), nvfp4 (384, FlashInfer), nvfp4-v41 (288, FlashInfer: pages of
64), bf16; fp8-key for an indexer's keys (132, DeepGEMM: one float32 scale). V3.2's rows of 576 are
fp8-v32 (656, FlashMLA: 512 codes, four float32 scales, the BF16 key, entry by entry), fp8-v32-ue8m0
(scales are powers of two) or bf16. How a block is scaled and coded is in kv_rules.

Importable without the DSL; addresses are written once, for ints and kernels. Every byte of a page
belongs to one entry or to the padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives import attention_rows as rows

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "fp8": (rows.ROTATED, 64, 8),
    "nvfp4": (rows.ROTATED, 16, 4),
    "nvfp4-v41": (0, 16, 4),
    "bf16": (None, 0, 0),
}
KEY, KEY_WIDTH = "fp8-key", 128  # of an indexer: all values share one scale
_KINDS_WITH_KEY = {"fp8-v32": False, "fp8-v32-ue8m0": True}  # of rows of 576; powers of two


@cache
def entry_format(name: str, width: int = rows.WIDTH) -> EntryFormat:
    """Return the layout of an entry of a row of 512, 128 or 576; raise on unknown names."""
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
        """Return the fewest bytes that have to be read and written: every input and output once."""
        entry = self.pages.format
        read = 2 * self.pages.width + 8
        if self.source == "latent":
            read += 8 + 4 * rows.TABLE_WIDTH
        return self.tokens * (read + entry.value_bytes + entry.scale_bytes)


@dataclass(frozen=True)
class ReadProblem:
    """Gather N entries and decode them to BF16 rows."""

    count: int
    pages: Pages

    def __post_init__(self) -> None:
        rows.require_extent("entries to read", self.count)

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
    width: int = rows.WIDTH

    @property
    def format(self) -> EntryFormat:
        """Return the record of the entry's format."""
        return entry_format(self.entry, self.width)


@dataclass(frozen=True)
class ReadForm:
    """Compile-time parameters of a reading kernel."""

    entry: str
    target: str
    width: int = rows.WIDTH

    @property
    def format(self) -> EntryFormat:
        """Return the record of the entry's format."""
        return entry_format(self.entry, self.width)


def choose_write_form(problem: WriteProblem, target: str) -> WriteForm:
    """Return the form for a problem: few and many tokens differ, other extents do not."""
    weight = problem.weight if problem.source == "latent" else rows.WEIGHTS[0]
    pages = problem.pages
    few = problem.tokens <= FEW_TOKENS or pages.width == rows.WITH_KEY  # which has one form
    return WriteForm(
        pages.entry, problem.source, weight, problem.duplicates, few, target, pages.width
    )


def choose_read_form(problem: ReadProblem, target: str) -> ReadForm:
    """Return the form for a problem."""
    return ReadForm(problem.pages.entry, target, problem.pages.width)


def normed_width(width: int) -> int:
    """Return how many values of a row are normed: all but V3.2's key."""
    return min(width, rows.WIDTH)


def normed_slots(form: WriteForm) -> int:
    """Return the number of slots of a row that are normed, the first ones."""
    return rows.geometry(normed_width(form.width)).slots


def coded_at_all(entry: EntryFormat, slot: int) -> bool:
    """Return whether a lane may hold quantised values in a slot."""
    return entry.quantised > slot * rows.LANES * rows.HALF


def coded_only(entry: EntryFormat, slot: int) -> bool:
    """Return whether every lane holds quantised values in a slot."""
    return entry.quantised >= (slot + 1) * rows.LANES * rows.HALF


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
