"""Producer warps of sparse attention: paged cache entries to tiles of 64 BF16 rows.

A tile lies in shared memory as wgmma reads it: K along rows, 128-byte swizzle, blocks of 64
columns. A warp brings 16 rows, or 8 where entries hold codes (eight warps then). BF16 values go by
cp.async. E2M1 codes of the next tile wait in shared memory, each thread reading back only its own,
or in registers, and E4M3 codes in registers alone; they are decoded on the way.

One tile: read its slots two tiles ahead; its addresses, codes and scales one tile ahead; wait for
the stage to be empty; issue cp.async of BF16 values and attach an arrival of every thread; decode
and store, requesting the next tile's codes meanwhile; write masks; one arrival of every warp.

A slot of -1, or beyond its list's length, becomes zeros and a cleared bit of the mask `present`. A
slot beyond the cache becomes zeros and a set bit of `beyond`, which makes its logit NaN.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import instructions as ptx
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import GatherPlan
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.primitives import kv_problem as entries_of
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import EntryFormat

# --------------------------------------------------------------------------------------------------
# Decode E4M3 and E2M1 cache codes to pairs of BF16 by packed conversions and products (sm_90a).
#
# A code is exact in BF16. Its product with the scale is exact too, except below BF16's normal range
# or where the scale is no power of two (V3.2); there it is rounded as kv_read rounds it. A NaN code
# or scale stays NaN.

# A BF16 NaN.
NAN = 0x7FFF
# 2**8 as a pair of BF16: undoes the 2**-8 of w4a16_instructions.decoded.
POWER_8 = ((127 + 8) << 7) * 0x1_0001


def factors_of(scale: Any, entry: EntryFormat) -> list[Any]:
    """Return the scales of 16 bytes of codes, each as a pair of BF16."""
    if entry.code_bits == 4:
        return list(shared.block_scales(scale, False))
    # A UE8M0 code is BF16's exponent; code 0 means half of the smallest normal number.
    bits = ops.select(scale == 0, Uint32(0x40), ops.shift_left(scale, 7))
    return [ops.select(scale == 255, Uint32(NAN), bits) * 0x1_0001]


def decoded(words: list[Any], factor: Any, entry: EntryFormat) -> list[Any]:
    """Return the four words of eight BF16 values (8 bytes of E4M3, or 4 of E2M1)."""
    if entry.code_bits == 8:
        return [pair for word in words for pair in e4m3_pairs(word, factor)]
    return e2m1_pairs(words[0], factor)


def e4m3_pairs(word: Any, factor: Any) -> list[Any]:
    """Return four E4M3 codes as BF16, times a BF16 factor."""
    # Moving bits would be fewer instructions, but of a pipe that is half as wide.
    text = """{
    .reg .b16 p0, p1, h0, h1, h2, h3; .reg .b32 d0, d1; .reg .f32 f0, f1, f2, f3;
    mov.b32 {p0, p1}, {$r0};
    cvt.rn.f16x2.e4m3x2 d0, p0; cvt.rn.f16x2.e4m3x2 d1, p1;
    mov.b32 {h0, h1}, d0; mov.b32 {h2, h3}, d1;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 d0, f1, f0; cvt.rn.bf16x2.f32 d1, f3, f2;
    mul.rn.bf16x2 {$w0}, d0, {$r1}; mul.rn.bf16x2 {$w1}, d1, {$r1};
    }"""
    return list(shared.emit(text, [Uint32, Uint32], word, factor))


def e4m3_scaled(words: list[Any], scale: Any) -> list[Any]:
    """Return the four words of eight E4M3 codes times a float32 scale, rounded once."""
    text = """{
    .reg .b16 p0, p1, h0, h1, h2, h3; .reg .b32 d0, d1; .reg .f32 f0, f1, f2, f3, s;
    mov.b32 {p0, p1}, {$r0}; mov.b32 s, {$r1};
    cvt.rn.f16x2.e4m3x2 d0, p0; cvt.rn.f16x2.e4m3x2 d1, p1;
    mov.b32 {h0, h1}, d0; mov.b32 {h2, h3}, d1;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    mul.rn.f32 f0, f0, s; mul.rn.f32 f1, f1, s; mul.rn.f32 f2, f2, s; mul.rn.f32 f3, f3, s;
    cvt.rn.bf16x2.f32 {$w0}, f1, f0; cvt.rn.bf16x2.f32 {$w1}, f3, f2;
    }"""
    return [pair for word in words for pair in shared.emit(text, [Uint32, Uint32], word, scale)]


def e2m1_pairs(word: Any, factor: Any) -> list[Any]:
    """Return eight E2M1 codes as BF16, in their order, times a factor that is 2**118 too large."""
    spread = shared.decoded(word, factor, False)  # codes j and j + 4, times 2**-8
    text = f"""{{
    .reg .b32 a, b, at; mov.b32 at, {POWER_8};
    prmt.b32 a, {{$r0}}, {{$r1}}, 0x5410; prmt.b32 b, {{$r0}}, {{$r1}}, 0x7632;
    mul.rn.bf16x2 {{$w0}}, a, at; mul.rn.bf16x2 {{$w1}}, b, at;
    }}"""
    low, high = (shared.emit(text, [Uint32, Uint32], spread[i], spread[i + 1]) for i in (0, 2))
    return [low[0], high[0], low[1], high[1]]


# --------------------------------------------------------------------------------------------------
# Producer warps of sparse attention: paged cache entries to tiles of 64 BF16 rows.

CHUNK = 16  # bytes
CHUNKS = 2 * rows.WIDTH // CHUNK  # of an output row, and of V4's keys
NO_TILE = 1 << 24  # beyond every list
UNIT = 8  # bytes in which offsets of scales are counted; values lie at pieces of 16
ROWS_OF_CODES = rows.LANES // UNIT  # rows of which a warp's lanes have the codes of eight scales
QUARTER = 8  # lanes whose 16 bytes meet shared memory's banks together


class List(NamedTuple):
    """One list of slots and its cache, as addresses and extents."""

    indices: Any  # address of the token's first slot
    width: Any  # slots that count
    cache: Any  # address
    entries: Any  # of a page; a constant where it is the usual one: no division then
    stride: Any  # bytes of a page
    capacity: Any  # slots of the cache


class GatheredRows(NamedTuple):
    """Addresses and masks of a warp's rows of a tile (lanes 0 to 15 own a row each)."""

    cache: Any  # address
    values: Any  # offset in pieces
    scales: Any  # offset in units
    codes: Any  # E4M3's scales, a lane one of every fourth row of eight, or eighth row of four
    present: Any  # masks of the warp's rows
    beyond: Any


def address_in_tile(row: Any, chunk: Any) -> Any:
    """Return the byte of 16-byte chunk `chunk` of a row in a tile (128-byte swizzle)."""
    return chunk // 8 * (facts.TILE * 128) + row * 128 + (chunk % 8 ^ row % 8) * CHUNK


def slot_address(index: Any, of: List, entry: EntryFormat) -> tuple[Any, Any]:
    """Return where a slot's values begin, in 16-byte pieces, and its scales, in units of 8."""
    place = index // of.entries, index % of.entries
    pieces = Uint32(of.stride) // CHUNK
    values = entries_of.value_piece(place, pieces, entry)
    scales = entries_of.scale_within(place[1], of.entries, entry) // UNIT
    return values, place[0] * pieces * (CHUNK // UNIT) + scales


def counts(index: Any, capacity: Any) -> tuple[Any, Any]:
    """Return whether a slot is in the cache, and whether it lies beyond it; -1 is neither."""
    return (index >= 0) & (index < capacity), index >= capacity


def within(key: Any, width: Any) -> Any:
    """Return whether a position of a list counts."""
    return key < width


def standpoint(plan: GatherPlan) -> tuple[Any, Any]:
    """Return the lane, and the warp's number among the producers."""
    thread, _, _ = cute.arch.thread_idx()
    return Uint32(thread % rows.LANES), Uint32(thread % plan.threads // rows.LANES)


def slot_of(lists: tuple[List, List], tile: Any, widths: tuple[Any, Any], plan: GatherPlan) -> Any:
    """Issue the read of the slot of a lane's row of a tile; -1 where none counts."""
    lane, warp = (Int32(each) for each in standpoint(plan))
    far, of = list_of(lists, tile, widths)
    key = ops.select(far, tile - widths[0], tile) * facts.TILE + warp * plan.rows_of_warp + lane
    wanted = (lane < plan.rows_of_warp) & within(key, of.width)
    address = of.indices + Int64(key) * 4
    return Int32(ptx.index_if(address, ops.select(wanted, Uint32(1), Uint32(0))))


def list_of(lists: tuple[List, List], tile: Any, widths: tuple[Any, Any]) -> tuple[Any, List]:
    """Return whether a tile belongs to the second list, and its list."""
    far = tile >= widths[0]
    return far, List(*(chosen(far, b, a) for a, b in zip(*lists, strict=True)))


def chosen(far: Any, there: Any, here: Any) -> Any:
    """Return one of two numbers; a constant is that of both lists."""
    return here if isinstance(here, int) else ops.select(far, there, here)


def rows_of(
    slot: Any, lists: tuple[List, List], tile: Any, widths: tuple[Any, Any], plan: GatherPlan
) -> GatheredRows:
    """Return the addresses of a warp's rows of a tile, and issue the reads of E4M3's scales."""
    _, of = list_of(lists, tile, widths)
    inside, outside = counts(slot, of.capacity)
    present = Uint32(cute.arch.vote_ballot_sync(inside))
    beyond = Uint32(cute.arch.vote_ballot_sync(outside))
    # An absent row has the address of slot 0 and is never read (size 0 or predicate).
    values, scales = slot_address(Uint32(ops.select(inside, slot, Int32(0))), of, plan.entry)
    codes: tuple[Any, ...] = ()
    if plan.entry.scale_bytes == UNIT:
        lane, _ = standpoint(plan)
        for first in range(0, plan.rows_of_warp, ROWS_OF_CODES):
            row = lane // UNIT + first
            start = of.cache + Int64(of_row(scales, row)) * UNIT + Int64(lane % UNIT)
            codes += (ptx.scale_if(start, bit(present, row), 1),)
    found = GatheredRows(of.cache, values, scales, codes, present, beyond)
    return with_scales(found, plan) if plan.entry.inside else found


def bit(mask: Any, place: Any) -> Any:
    """Return a bit of a mask."""
    return ops.shift_right(mask, Uint32(place)) & 1


def of_row(words: Any, row: Any) -> Any:
    """Return the value that the lane owning a row has."""
    return Uint32(cute.arch.shuffle_sync(words, row))


def copy_values(gathered_rows: GatheredRows, tile_at: Any, plan: GatherPlan) -> None:
    """Issue cp.async of the values that the cache holds as BF16."""
    lane, warp = standpoint(plan)
    first = plan.entry.quantised // rows.HALF
    count = plan.entry.width // rows.HALF - first
    for turn in range(count * plan.rows_of_warp // rows.LANES):
        item = lane + turn * rows.LANES
        row, chunk = item // count, item % count
        source = gathered_rows.cache + Int64(of_row(gathered_rows.values, row)) * CHUNK
        source = source + plan.entry.rest_at + Int64(chunk) * CHUNK
        target = tile_at + address_in_tile(warp * plan.rows_of_warp + row, chunk + first)
        ptx.copy_16(target, source, bit(gathered_rows.present, row) * CHUNK)


class LaneCodes(NamedTuple):
    """16 bytes of codes of a row that a lane takes, and their places in a tile."""

    active: Any
    chunk: Any
    upper: Any  # of the rows that a warp takes at once
    order: Any  # the part with which the lane begins: neighbours read and write other banks
    targets: list[Any]  # of parts, in that order, for the warp's first row
    waits_at: Any  # where the codes of the first turn wait


def parts_of(entry: EntryFormat) -> int:
    """Return how many 16-byte chunks of BF16 come from 16 bytes of codes."""
    return 16 // entry.code_bits


def standing_of(codes_at: Any, plan: GatherPlan) -> Any:
    """Return the positions of a lane, the same in every turn; None where there are no codes."""
    if not plan.entry.code_bytes:
        return None
    lane, warp = standpoint(plan)
    chunks, parts = plan.entry.code_bytes // CHUNK, parts_of(plan.entry)
    chunk, upper = lane % chunks, lane // chunks
    # Rotates the parts by lane, so that a quarter warp meets all banks once.
    order = (lane // (QUARTER // parts) + lane // QUARTER) % parts
    row = warp * plan.rows_of_warp + upper
    targets = [address_in_tile(row, chunk * parts + (order ^ part)) for part in range(parts)]
    taking = chunks * plan.rows_at_once
    # Trap: lanes that take no part read all the same, and must not read beyond shared memory.
    waits_at = codes_at + (warp * taking + ops.minimum(lane, taking - 1)) * CHUNK
    return LaneCodes(lane < taking, chunk, upper, order, targets, waits_at)


class PendingCodes(NamedTuple):
    """Registers with codes and scales of the next tile that do not wait in shared memory."""

    scales: Any  # of E2M1 codes
    words: Any  # of turns for which there is no space


def ask_ahead(
    gathered_rows: GatheredRows,
    turn: int,
    stands: LaneCodes,
    waiting: PendingCodes,
    plan: GatherPlan,
) -> None:
    """Issue the reads of a lane's codes of one turn, and of their scales."""
    row = stands.upper + turn * plan.rows_at_once
    # Absent rows become zeros; surplus lanes issue nothing.
    there = bit(gathered_rows.present, row) & ops.select(stands.active, Uint32(1), Uint32(0))
    values = gathered_rows.cache + Int64(of_row(gathered_rows.values, row)) * CHUNK
    source = values + Int64(stands.chunk) * CHUNK
    of_scale = gathered_rows.cache + Int64(of_row(gathered_rows.scales, row)) * UNIT
    of_scale = of_scale + Int64(scale_of_chunk(stands.chunk, plan.entry))
    waiting.scales[turn] = ptx.scale_if(of_scale, there, 2)
    if turn < plan.turns_ahead:
        target = stands.waits_at + turn * plan.turn_bytes
        ptx.copy_16_if(target, source, there * CHUNK, stands.active)
    else:
        first = (turn - plan.turns_ahead) * 4
        for i, word in enumerate(ptx.words_if(source, there, 4)):
            waiting.words[first + i] = word


def words_of_turn(
    turn: int, stands: LaneCodes, waiting: PendingCodes, plan: GatherPlan
) -> list[list[Any]]:
    """Read a lane's waiting codes of one turn, part by part in the lane's own order."""
    parts = parts_of(plan.entry)
    count = 4 // parts
    own = [stands.order ^ part for part in range(parts)]
    if turn < plan.turns_ahead:
        start = stands.waits_at + turn * plan.turn_bytes
        return [shared.shared_words(start + each * (CHUNK // parts), count) for each in own]
    first = (turn - plan.turns_ahead) * 4
    words = [Uint32(waiting.words[first + i]) for i in range(4)]
    return [chosen_part(words, each, count) for each in own]


def decoded_turn(
    words: list[list[Any]], factors: list[Any], turn: int, stands: LaneCodes, plan: GatherPlan
) -> list[tuple[Any, list[Any]]]:
    """Return a lane's values of one turn: their places in a tile, and words."""
    parts, row = parts_of(plan.entry), turn * plan.rows_at_once
    made = []
    for part in range(parts):
        target = (stands.targets[part] ^ row % 8 * CHUNK) + row * 128
        upper = (stands.order ^ part) >= parts // 2
        factor = ops.select(upper, factors[1], factors[0])
        made.append((target, decoded(words[part], factor, plan.entry)))
    return made


def store_turns(made: list[tuple[Any, list[Any]]], tile_at: Any, stands: LaneCodes) -> None:
    """Write decoded values to a tile."""
    for target, words in made:
        ptx.store_16_shared_if(tile_at + target, words, stands.active)


def chosen_part(words: list[Any], part: Any, count: int) -> list[Any]:
    """Return part `part` of words; `part` is known at run time only, so by selects."""
    made = words[:count]
    for i in range(1, len(words) // count):
        other = words[i * count : (i + 1) * count]
        made = [ops.select(part == i, b, a) for a, b in zip(made, other, strict=True)]
    return made


def scale_of_chunk(chunk: Any, entry: EntryFormat) -> Any:
    """Return the first byte of the scales of a 16-byte chunk of codes."""
    values = CHUNK * 8 // entry.code_bits
    each = entry.block
    return chunk * (values // each) if values >= each else chunk // (each // values)


class TileAddresses(NamedTuple):
    """Shared addresses of tiles, barriers, masks and waiting codes."""

    tiles: Any
    full: Any  # full barriers, one a stage; the empty ones follow them
    masks: Any
    codes: Any  # of the next tile


class NextQueries(NamedTuple):
    """Queries of the next token or group of heads: where they are, and whether there is room."""

    q: Any  # address
    place: Any  # token and heads
    queries_at: Any
    full: Any  # barriers: every thread's copies; the warps that multiply
    empty: Any
    phase: Any  # of the empty one


LANES_OF_ROW = 8  # lanes that bring 128 bytes of a row
ROWS_OF_COPY = rows.LANES // LANES_OF_ROW
BLOCK_BYTES = facts.TILE * 128


def targets_of_rows(tiles_at: Any, lane: Any, warp: Any, how: Any) -> tuple[Any, Any]:
    """Return where a lane's chunk lies in its first row, and in the row four further on."""
    first = warp * how.rows_of_warp + lane // LANES_OF_ROW
    chunk = lane % LANES_OF_ROW
    upper, lower = (tiles_at + address_in_tile(row, chunk) for row in (first, first + ROWS_OF_COPY))
    return upper, lower


@cute.jit
def bring_queries(of: NextQueries, how: cutlass.Constexpr) -> None:
    """Copy 64 heads as soon as the last ones are done with; rows without a head become zeros."""
    lane, warp = standpoint(how)
    targets = targets_of_rows(of.queries_at, lane, warp, how)
    place, width = of.place, how.entry.width
    first = Int64(place.token) * Int64(place.heads) + Int64(place.head)
    of_lane = lane % LANES_OF_ROW * CHUNK
    shared.await_phase(of.empty, of.phase)
    begin = of.q + first * (2 * width)
    for turn in cutlass.range_constexpr(how.rows_of_warp // ROWS_OF_COPY):
        row = warp * how.rows_of_warp + lane // LANES_OF_ROW + turn * ROWS_OF_COPY
        exists = place.head + Int32(row) < place.end
        source = begin + Int64(ops.select(exists, row * (2 * width) + of_lane, of_lane))
        size = ops.select(exists, Uint32(CHUNK), Uint32(0))
        # Rows eight apart have the same swizzle.
        for block in cutlass.range_constexpr(width // 64):
            to = targets[turn % 2], turn // 2 * 1024 + block * BLOCK_BYTES
            ptx.copy_16_at(to, (source, block * 128), size)
    ptx.arrive_behind_copies(of.full)


def prepared_turns(
    following: GatheredRows,
    begin: int,
    lane: tuple[LaneCodes, PendingCodes],
    plan: GatherPlan,
) -> list[tuple[Any, list[Any]]]:
    """Decode some turns of a tile, and request those of the next one.

    All reads precede all writes: no compiler moves a read across a write.
    """
    some = range(begin, min(begin + facts.BATCH, plan.turns))
    words = [words_of_turn(turn, *lane, plan) for turn in some]
    of_turns = [factors_of(Uint32(lane[1].scales[turn]), plan.entry) for turn in some]
    for turn in some:
        ask_ahead(following, turn, *lane, plan)
    made = []
    for i, turn in enumerate(some):
        made += decoded_turn(words[i], of_turns[i], turn, lane[0], plan)
    return made


def await_stage(places: TileAddresses, at: tuple[Any, Any], plan: GatherPlan) -> None:
    """Wait until all parts of a stage are empty."""
    stage, phase = at
    empty = places.full + facts.STAGES * plan.parts * 8 + stage * (8 * plan.parts)
    for part in range(plan.parts):
        shared.await_phase(empty + part * 8 if part else empty, phase)


def arrive_behind_copies(full: Any, plan: GatherPlan) -> None:
    """Arrive at a stage's full barriers as soon as this thread's copies so far have landed."""
    for part in range(plan.parts):
        ptx.arrive_behind_copies(full + part * 8 if part else full)


def arrive_for_warp(full: Any, lane: Any, plan: GatherPlan) -> None:
    """Arrive at a stage's full barriers for a warp, behind what its lanes wrote."""
    cute.arch.sync_warp()  # what all lanes wrote comes before what the first one says
    for part in range(plan.parts):
        shared.arrive(full + part * 8 if part else full, lane == 0)


@cute.jit
def produce(
    lists: tuple[List, List],
    widths: tuple[Any, Any],
    walk: tuple[Any, Any, Any],
    places: TileAddresses,
    how: cutlass.Constexpr,
    begin: tuple[Any, Any],
) -> Any:
    """Bring every tile of a split, each as soon as its stage is empty.

    Begins with a stage and its phase; returns those of the next split.
    """
    entry, steps = how.entry, walk[2]
    lane, warp = standpoint(how)
    turns = how.turns
    stands = standing_of(places.codes, how)
    waiting = PendingCodes(
        cute.make_rmem_tensor(max(1, turns), Uint32),
        cute.make_rmem_tensor(max(1, 4 * (turns - how.turns_ahead)), Uint32),
    )
    waiting.scales.fill(0)
    waiting.words.fill(0)
    tile = tile_of_step(Int32(0), walk, widths)
    gathered_rows = rows_of(slot_of(lists, tile, widths, how), lists, tile, widths, how)
    slot = slot_of(lists, tile_of_step(Int32(1), walk, widths), widths, how)
    for turn in cutlass.range_constexpr(turns):
        ask_ahead(gathered_rows, turn, stands, waiting, how)
    stage, phase = begin
    for step in cutlass.range(Int32(0), steps, unroll=1):
        tile = tile_of_step(step + 1, walk, widths)
        # Slots are read two tiles ahead, entries one: each load has a tile's time to arrive.
        following = rows_of(slot, lists, tile, widths, how)
        slot = slot_of(lists, tile_of_step(step + 2, walk, widths), widths, how)
        if cutlass.const_expr(entry.quantised > 0):
            ptx.end_of_copies()  # only this thread reads these codes: no barrier needed
        await_stage(places, (stage, phase), how)
        tile_at = places.tiles + stage * (facts.TILE * entry.width * 2)
        full = places.full + stage * (8 * how.parts)
        if cutlass.const_expr(entry.quantised < entry.width):
            copy_values(gathered_rows, tile_at, how)
        arrive_behind_copies(full, how)
        for number in cutlass.range_constexpr(0, turns, facts.BATCH):
            made = prepared_turns(following, number, (stands, waiting), how)
            store_turns(made, tile_at, stands)
        if lane == 0:
            leave_masks(gathered_rows, places.masks, (stage, warp), how)
        arrive_for_warp(full, lane, how)
        gathered_rows = following
        stage, phase = shared_next(stage, phase)
    ptx.end_of_copies()
    return stage, phase


def leave_masks(
    gathered_rows: GatheredRows, masks: Any, at: tuple[Any, Any], plan: GatherPlan
) -> None:
    """Write a warp's bits of a stage: `present` of all keys, then `beyond` of all keys."""
    stage, warp = at
    of_tile = facts.TILE // 8
    place = masks + stage * (2 * of_tile) + warp * (plan.rows_of_warp // 8)
    ptx.store_bits(place, gathered_rows.present, plan.rows_of_warp)
    ptx.store_bits(place + of_tile, gathered_rows.beyond, plan.rows_of_warp)


def tile_of_step(step: Any, walk: tuple[Any, ...], widths: tuple[Any, Any]) -> Any:
    """Return the number of a step's tile: the window's come first, then the second list's."""
    # Steps 0 to near - 1 are of the window, then the second list's tiles follow.
    first, near, _, *more = walk
    begin = ops.maximum(first, widths[0])
    tile = ops.select(step < near, first + step, begin + step - near)
    # Where tiles come in pairs, the last one may not be there: it lies beyond every list.
    return ops.select(step < more[0], tile, Int32(NO_TILE)) if more else tile


def shared_next(stage: Any, phase: Any) -> tuple[Any, Any]:
    """Return the next stage, and the parity to wait for."""
    wraps = stage + 1 == facts.STAGES
    return ops.select(wraps, Uint32(0), stage + 1), ops.select(wraps, phase ^ 1, phase)


# --------------------------------------------------------------------------------------------------
# Producer warps where codes are E4M3: V4's entries of 448 of them, V3.2's of 512.
#
# V4's scales lie behind a page's entries, an entry's 64 turned BF16 values behind its codes. V3.2's
# entry holds 512 codes, four float32 scales, 64 BF16 values. A warp takes a row a turn, a lane its
# codes 8 l to 8 l + 7 and those 256 further on: two pieces of 16 bytes that meet all banks without
# selects. Codes of four rows wait in registers; each decoded row makes room for one of four later.
# All of a tile's bytes are prefetched to L2 a tile ahead. A warp's scales lie in a register of its
# lanes for four or eight rows: of eight scales r, b in lane 8 (r % 4) + b, of four in lane
# 4 (r % 8) + b. One row is decoded while the stage is awaited.
#
# Trap: a number that is converted where it was read is waited for there. Scales are.

WORDS = 4  # of a lane's 16 bytes of codes
BLOCKS = 4  # scales of V3.2's entry
ROWS_OF_REGISTER = rows.LANES // BLOCKS
CODES = 8  # of a lane, side by side
SECOND_CODES = rows.LANES * CODES  # codes to a lane's second eight
SECOND_BYTES = SECOND_CODES // 64 * BLOCK_BYTES  # and bytes of a tile to their values


def with_scales(gathered_rows: GatheredRows, plan: GatherPlan) -> GatheredRows:
    """Issue the reads of the warp's scales: one a lane for eight rows, zeros for absent rows."""
    lane, _ = standpoint(plan)
    scales = []
    for first in range(0, plan.rows_of_warp, ROWS_OF_REGISTER):
        row = lane // BLOCKS + first
        start = gathered_rows.cache + Int64(of_row(gathered_rows.values, row)) * CHUNK
        start = start + plan.entry.code_bytes + Int64(lane % BLOCKS) * 4
        scales.append(Uint32(ptx.word_if(start, bit(gathered_rows.present, row))))
    return gathered_rows._replace(codes=tuple(scales))


def fetch_rows(gathered_rows: GatheredRows, plan: GatherPlan) -> None:
    """Ask for all bytes of a warp's rows in L2: registers have the codes of ROWS_AHEAD rows.

    Without, a tile of eight rows a warp took two latencies of memory.
    """
    if plan.warpgroups == 1:
        return
    lane, _ = standpoint(plan)
    lanes = rows.LANES // plan.rows_of_warp  # of a row
    row = lane // lanes
    start = gathered_rows.cache + Int64(of_row(gathered_rows.values, row)) * CHUNK
    there = bit(gathered_rows.present, row)
    for first in range(0, facts.lines(plan.entry), lanes):
        offset = facts.byte_of_line(lane % lanes + first, plan.entry)
        ptx.fetch_line_if(start + Int64(offset), there)


def scales_of_rows(gathered_rows: GatheredRows, entry: EntryFormat) -> list[Any]:
    """Return a warp's scales: float32 bits, or UE8M0 as BF16 pairs."""
    if entry.inside:
        return list(gathered_rows.codes)
    return [factors_of(Uint32(code), entry)[0] for code in gathered_rows.codes]


def block_of_codes(lane: Any, part: int, entry: EntryFormat) -> Any:
    """Return the index of the scale of a lane's first or second eight codes of a row."""
    return lane // (entry.block // CODES) + part * (SECOND_CODES // entry.block)


def scale_of_turn(scales: list[Any], turn: int, block: Any, entry: EntryFormat) -> Any:
    """Return a scale of a turn's row."""
    count = BLOCKS if entry.inside else UNIT
    at_once = rows.LANES // count
    return of_row(scales[turn // at_once], turn % at_once * count + block)


def ask(gathered_rows: GatheredRows, turn: int, lane: Any, words: Any, place: int) -> None:
    """Issue the reads of a lane's codes of one row; zeros for an absent row."""
    source = gathered_rows.cache + Int64(of_row(gathered_rows.values, Uint32(turn))) * CHUNK
    source = source + Int64(lane) * CODES
    there = bit(gathered_rows.present, turn)
    for i, word in enumerate(ptx.eight_bytes_twice_if(source, SECOND_CODES, there)):
        words[place * WORDS + i] = word


def values_of_turn(
    words: Any, scales: list[Any], turn: int, lane: Any, entry: EntryFormat
) -> list[list[Any]]:
    """Decode a lane's waiting codes of one row: the words of its first and second eight values."""
    first = turn * WORDS % cute.size(words)
    made = []
    for part in range(2):
        codes = [Uint32(words[first + 2 * part + i]) for i in range(2)]
        scale = scale_of_turn(scales, turn, block_of_codes(lane, part, entry), entry)
        made.append(e4m3_scaled(codes, scale) if entry.inside else decoded(codes, scale, entry))
    return made


def store_turn(
    target: Any, turn: int, lane: Any, made: list[list[Any]], entry: EntryFormat
) -> None:
    """Write a lane's values of one row to the tile; V4's row has no codes for the last lanes."""
    to = (target ^ turn % 8 * CHUNK) + turn * 128
    shared.store_words(to, made[0])
    if entry.quantised < rows.WIDTH:
        taken = lane < (entry.quantised - SECOND_CODES) // CODES
        ptx.store_16_shared_if(to + SECOND_BYTES, made[1], taken)
    else:
        shared.store_words(to + SECOND_BYTES, made[1])


@cute.jit
def produce_codes(
    lists: tuple[List, List],
    widths: tuple[Any, Any],
    walk: tuple[Any, Any, Any],
    places: TileAddresses,
    how: cutlass.Constexpr,
    begin: tuple[Any, Any],
) -> Any:
    """Bring every tile of a split as `produce` does, of E4M3 codes."""
    entry = how.entry
    lane, warp = standpoint(how)
    turns, ahead = how.rows_of_warp, how.ahead
    words = cute.make_rmem_tensor(ahead * WORDS, Uint32)
    words.fill(0)
    tile = tile_of_step(Int32(0), walk, widths)
    slot = slot_of(lists, tile, widths, how)
    gathered_rows = rows_of(slot, lists, tile, widths, how)
    slot = slot_of(lists, tile_of_step(Int32(1), walk, widths), widths, how)
    for turn in cutlass.range_constexpr(ahead):
        ask(gathered_rows, turn, lane, words, turn)
    fetch_rows(gathered_rows, how)
    stage, phase = begin
    within = address_in_tile(warp * how.rows_of_warp, lane)
    for step in cutlass.range(Int32(0), walk[2], unroll=1):
        tile = tile_of_step(step + 1, walk, widths)
        following = rows_of(slot, lists, tile, widths, how)
        fetch_rows(following, how)
        following_tile = tile_of_step(step + 2, walk, widths)
        slot = slot_of(lists, following_tile, widths, how)
        scales = scales_of_rows(gathered_rows, entry)
        tile_at = places.tiles + stage * (facts.TILE * entry.width * 2)
        full = places.full + stage * (8 * how.parts)
        for turn in cutlass.range_constexpr(turns):
            made = values_of_turn(words, scales, turn, lane, entry)
            if cutlass.const_expr(turn > 0):
                store_turn(tile_at + within, turn, lane, made, entry)
            # The registers just decoded are free: refill them for ROWS_AHEAD rows later.
            later = turn + ahead
            if cutlass.const_expr(later < turns):
                ask(gathered_rows, later, lane, words, later % ahead)
            else:
                ask(following, later - turns, lane, words, later % ahead)
            if cutlass.const_expr(turn == 0):
                await_stage(places, (stage, phase), how)
                copy_values(gathered_rows, tile_at, how)
                arrive_behind_copies(full, how)
                store_turn(tile_at + within, turn, lane, made, entry)
        if lane == 0:
            leave_masks(gathered_rows, places.masks, (stage, warp), how)
        arrive_for_warp(full, lane, how)
        gathered_rows = following
        stage, phase = shared_next(stage, phase)
    ptx.end_of_copies()
    return stage, phase


def producer_of(entry: EntryFormat) -> Any:
    """Return what brings the tiles of a split: by the width of the codes."""
    return produce_codes if entry.code_bits == facts.E4M3_BITS else produce


def first_stage() -> tuple[Any, Any]:
    """Return the stage and the phase of a thread block's first tile.

    Parity 1: the first wait for an empty stage returns at once.
    """
    return Uint32(0), Uint32(1)
