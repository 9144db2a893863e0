"""The warps that bring keys: slots to addresses, entries to BF16 rows of a tile in shared memory.

Owns the way of a tile of 64 keys from the paged cache to shared memory as wgmma reads it (K along
rows, 128-byte swizzle). A warp brings 16 rows. What is BF16 in the cache goes by asynchronous
copies; codes go through registers, 16 bytes a lane at once, and are decoded as kv_read decodes
them. A slot that is -1, or behind the length of its list, brings zeros and a bit in a mask; one
beyond the cache brings zeros and a bit in another mask, by which its logit becomes NaN.

The lines of the next tile are asked for before there is space for them. Refuses nothing: a kernel
cannot. Kept honest by suites/kernels/test_sm90_sparse_attention.py.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels import sm90_attention_instructions as ptx
from degarble.kernels import sm90_w4a16_instructions as shared
from degarble.kernels.common import attention_rows as rows
from degarble.kernels.common import kv_problem as entries_of
from degarble.kernels.common import sparse_attention_problem as facts
from degarble.kernels.common.kv_problem import ENTRIES, EntryFormat
from degarble.kernels.common.latent_words import fp8_values, nvfp4_values

WARP_ROWS = facts.TILE // (facts.WARPGROUP // rows.LANES)
CHUNK = 16  # bytes
CHUNKS = 2 * rows.WIDTH // CHUNK  # of a row
LINE = 128  # bytes that a prefetch brings
UNIT = 8  # bytes in which offsets of scales are counted; values lie at pieces of 16
AT_ONCE = {8: 7, 4: 4}  # by the bits of a code: loads of a lane that are under way together


class List(NamedTuple):
    """One list of slots and its cache, as addresses and extents."""

    indices: Any  # address of the token's first slot
    width: Any  # slots that count
    cache: Any  # address
    entries: Any  # of a page
    stride: Any  # bytes of a page
    capacity: Any  # slots of the cache


class Rows(NamedTuple):
    """What a lane knows of the tile's row that is its own (lanes 0 to 15 of each warp)."""

    cache: Any  # address
    values: Any  # offset in pieces
    scales: Any  # offset in units
    present: Any  # masks of the warp's rows
    beyond: Any


def address_in_tile(row: Any, chunk: Any) -> Any:
    """Return the byte of a row's 16 bytes `chunk` in a tile: 64 columns, then the next 64."""
    return chunk // 8 * (facts.TILE * 128) + row * 128 + (chunk % 8 ^ row % 8) * CHUNK


def slot_address(index: Any, of: List, entry: EntryFormat) -> tuple[Any, Any]:
    """Return the piece of the cache with which a slot's values begin, the unit of its scales."""
    place = index // Uint32(of.entries), index % Uint32(of.entries)
    pieces = Uint32(of.stride) // CHUNK
    values = entries_of.value_piece(place, pieces, entry)
    scales = entries_of.scale_within(place[1], Uint32(of.entries), entry) // UNIT
    return values, place[0] * pieces * (CHUNK // UNIT) + scales


def counts(index: Any, capacity: Any) -> tuple[Any, Any]:
    """Return whether a slot is in the cache, and whether it lies beyond it; -1 is neither."""
    return (index >= 0) & (index < capacity), index >= capacity


def within(key: Any, width: Any) -> Any:
    """Return whether a place of a list counts."""
    return key < width


def rows_of(lists: tuple[List, List], tile: Any, widths: tuple[Any, Any], entry: Any) -> Rows:
    """Read the slots of a warp's rows of a tile, and say where their entries are."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % rows.LANES, thread % facts.WARPGROUP // rows.LANES
    far = tile >= widths[0]
    of = List(*(ops.select(far, b, a) for a, b in zip(*lists, strict=True)))
    key = ops.select(far, tile - widths[0], tile) * facts.TILE + warp * WARP_ROWS + lane
    wanted = (lane < WARP_ROWS) & within(key, of.width)
    address = of.indices + Int64(key) * 4
    index = Int32(ptx.index_if(address, ops.select(wanted, Uint32(1), Uint32(0))))
    inside, outside = counts(index, of.capacity)
    present = Uint32(cute.arch.vote_ballot_sync(inside))
    beyond = Uint32(cute.arch.vote_ballot_sync(outside))
    values, scales = slot_address(Uint32(ops.select(inside, index, Int32(0))), of, entry)
    return Rows(of.cache, values, scales, present, beyond)


def bit(mask: Any, place: Any) -> Any:
    """Return a bit of a mask."""
    return ops.shift_right(mask, Uint32(place)) & 1


def ask_for_lines(found: Rows, entry: EntryFormat) -> None:
    """Prefetch the lines of a warp's rows; a line that two entries share is asked for twice."""
    thread, _, _ = cute.arch.thread_idx()
    there = bit(found.present, thread % rows.LANES)
    start = found.cache + Int64(found.values) * CHUNK
    for line in range(-(-entry.value_bytes // LINE)):
        ptx.prefetch_if(start + line * LINE, there)
    if entry.scale_bytes:
        ptx.prefetch_if(found.cache + Int64(found.scales) * UNIT, there)


def of_row(words: Any, row: Any) -> Any:
    """Return what the lane that owns a row knows of it."""
    return Uint32(cute.arch.shuffle_sync(words, row))


def copy_values(found: Rows, tile_at: Any, entry: EntryFormat) -> None:
    """Copy what the cache has as BF16."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = Uint32(thread % rows.LANES), Uint32(thread % facts.WARPGROUP // rows.LANES)
    first = entry.quantised // rows.HALF
    count = CHUNKS - first
    for turn in range(count * WARP_ROWS // rows.LANES):
        item = lane + turn * rows.LANES
        row, chunk = item // count, item % count
        source = found.cache + Int64(of_row(found.values, row)) * CHUNK
        source = source + entry.code_bytes + Int64(chunk) * CHUNK
        target = tile_at + address_in_tile(warp * WARP_ROWS + row, chunk + first)
        ptx.copy_16(target, source, bit(found.present, row) * CHUNK)


def decoded(words: list[Any], scale: Any, part: int, entry: EntryFormat) -> list[Any]:
    """Return the BF16 words of eight values of 16 bytes of codes; `scale` has the scales' codes."""
    if entry.code_bits == 8:
        return fp8_values(words[2 * part : 2 * part + 2], scale)
    return nvfp4_values(words[part], ops.shift_right(scale, 8 * (part // 2)) & 0xFF)


def decode_codes(found: Rows, tile_at: Any, entry: EntryFormat) -> None:
    """Decode what the cache has as codes."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = Uint32(thread % rows.LANES), Uint32(thread % facts.WARPGROUP // rows.LANES)
    of_codes = entry.code_bytes // CHUNK  # chunks of a row
    values = CHUNK * 8 // entry.code_bits  # of a chunk
    scale_size = max(1, values // entry.block)
    turns = of_codes * WARP_ROWS // rows.LANES
    at_once = AT_ONCE[entry.code_bits]
    for begin in range(0, turns, at_once):
        loaded = []
        for turn in range(begin, min(begin + at_once, turns)):
            item = lane + turn * rows.LANES
            row, chunk = item // of_codes, item % of_codes
            there = bit(found.present, row)
            source = found.cache + Int64(of_row(found.values, row)) * CHUNK + Int64(chunk) * CHUNK
            of_scale = found.cache + Int64(of_row(found.scales, row)) * UNIT
            of_scale = of_scale + Int64(scale_of_chunk(chunk, values, entry.block))
            words = ptx.words_if(source, there, 4)
            loaded.append((row, chunk, words, ptx.scale_if(of_scale, there, scale_size)))
        for row, chunk, words, scale in loaded:
            for part in range(values // rows.HALF):
                place = chunk * (values // rows.HALF) + part
                target = tile_at + address_in_tile(warp * WARP_ROWS + row, place)
                shared.store_words(target, decoded(words, scale, part, entry))


def scale_of_chunk(chunk: Any, values: int, block: int) -> Any:
    """Return the first byte of scales of a chunk of so many values."""
    return chunk * (values // block) if values >= block else chunk // (block // values)


class Places(NamedTuple):
    """Shared addresses."""

    tiles: Any
    full: Any  # barriers, one a stage; those that say empty lie behind them
    masks: Any


@cute.jit
def produce(
    lists: tuple[List, List],
    widths: tuple[Any, Any],
    walk: tuple[Any, Any, Any],
    places: Places,
    form: cutlass.Constexpr,
) -> None:
    """Bring every tile of a split, one after the other, as soon as there is space."""
    thread, _, _ = cute.arch.thread_idx()
    warp = thread % facts.WARPGROUP // rows.LANES
    steps = walk[2]
    entry = ENTRIES[form.entry]
    found = rows_of(lists, tile_of_step(Int32(0), walk, widths), widths, entry)
    stage, phase = Uint32(0), Uint32(1)
    for step in cutlass.range(Int32(0), steps, unroll=1):
        following = rows_of(lists, tile_of_step(step + 1, walk, widths), widths, entry)
        ask_for_lines(following, entry)
        empty = places.full + facts.STAGES * 8 + stage * 8
        shared.await_phase(empty, phase)
        tile_at = places.tiles + stage * (facts.TILE * rows.WIDTH * 2)
        if cutlass.const_expr(entry.quantised < rows.WIDTH):
            copy_values(found, tile_at, entry)
        if cutlass.const_expr(entry.quantised > 0):
            decode_codes(found, tile_at, entry)
        mask_at = places.masks + (stage * (facts.WARPGROUP // rows.LANES) + warp) * 8
        if thread % rows.LANES == 0:
            ptx.store_word(mask_at, found.present)
            ptx.store_word(mask_at + 4, found.beyond)
        full = places.full + stage * 8
        ptx.arrive_behind_copies(full)
        ptx.arrive(full)
        found = following
        stage, phase = shared_next(stage, phase)


def tile_of_step(step: Any, walk: tuple[Any, Any, Any], widths: tuple[Any, Any]) -> Any:
    """Return the number of a step's tile: the window's, then those of the entries."""
    first, near, _ = walk
    begin = ops.maximum(first, widths[0])
    return ops.select(step < near, first + step, begin + step - near)


def shared_next(stage: Any, phase: Any) -> tuple[Any, Any]:
    """Return the next stage, and the parity of the phase that is waited for."""
    wraps = stage + 1 == facts.STAGES
    return ops.select(wraps, Uint32(0), stage + 1), ops.select(wraps, phase ^ 1, phase)
