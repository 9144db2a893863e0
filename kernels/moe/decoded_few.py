"""Products of decoded rows for tiles of few rows on Hopper (sm_90a): up to 64 rows of an expert.

Rows come as numbers that sm90_moe_decoded's GATHER and FC1 made, so nobody decodes them here.
A tile is 256 rows of weights by the rows of one expert, eight at a time: it multiplies by an
instruction of as many columns as it needs (`WIDTHS`).
Roles: warp 0 issues TMA; four warpgroups decode 64 rows of weights each, multiply and write, each
  without a wait for another one. Of FC1 a warp has eight rows of gate and the same ones of up; of
  FC2 rows r and r + 32, whose scales lie side by side.
Pipeline: one ring of stages of 256 or 128 of K, in spans of 64: full is one arrival plus bytes
  (codes, scales and only the boxes of rows in use), empty is one arrival per warp that multiplies,
  after the wgmma that read the stage have ended.
A span: read codes and scales; wait for the wgmma of the last but one; decode into its registers;
  issue this span's wgmma. A stage is given back after the second wait of the next stage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import sm90_gemm_nvfp4 as coded
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.moe import decoded_rows, few_rows
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe.problem import GATE_AND_UP
from degarble.kernels.primitives import device_words as words
from degarble.kernels.primitives.e2m1 import HALF_VALUE_EXPONENT

SPAN = stages.STAGE_K
EIGHT = 8  # rows of a box, and of a step of the instruction's columns
CHUNK_WORDS = 4  # of 16 bytes
OF_ROW = 128  # bytes of a warpgroup's row of an outgoing tile: 64 numbers, or 32 of FC1
SCALE_TILE = gemm.SCALE_TILE_BYTES // 4  # words
# What sums are multiplied by: tokens are times 2**DECODED_EXPONENT, and weights as codes are.
RESTORE = 2.0 ** -(stages.DECODED_EXPONENT + HALF_VALUE_EXPONENT)


class FewLeaving(NamedTuple):
    """What a product writes, and what FC1's epilogue reads in addition to the sums."""

    words: Any  # of numbers, in FC1 one by one, in FC2 four at a time
    slots: Any  # of each row
    weights: Any = None  # of each slot
    hidden_scale: Any = None  # of each expert: decode scale of what is written


class FewMemory(NamedTuple):
    """Shared memory of a thread block."""

    written: tuple[Any, ...]  # boxes of tokens, codes, scales
    tokens: Any  # (rows of a tile, K of a stage, stages)
    weights: Any  # codes and scales as few_rows reads them
    leaving: Any  # (words of 16 bytes, places, warpgroups)


def spans_of(form: gemm.GemmForm) -> int:
    """Return the spans of 64 of K in a stage."""
    return form.tactic.inner // SPAN


def layouts_of(form: gemm.GemmForm) -> tuple[Any, ...]:
    """Return the layouts of what TMA writes: boxes of eight tokens, then codes and scales."""
    count, spans, tactic = facts.decoded_stages(form), spans_of(form), form.tactic
    eights = tactic.rows // EIGHT
    part, many = tactic.columns // form.parts, () if form.parts == 1 else (form.parts,)
    atom = warpgroup.make_smem_layout_atom(mainloop.Swizzle.K_SW128, Float16)
    tokens = cute.tile_to_shape(atom, (EIGHT, SPAN, spans, eights * count), (0, 1, 2, 3))
    codes = mainloop.staged_layout(
        Uint32, part, tactic.inner // 8, (*many, count), coded.SWIZZLES[tactic.inner]
    )
    tiles, wide = ceil_div(part, gemm.SCALE_TILE_ROWS), spans * SCALE_TILE
    strides = (tiles * wide, tiles * wide * form.parts)[-len(many) - 1 :]
    scales = cute.make_layout((tiles, wide, *many, count), stride=(wide, 1, *strides))
    return tokens, codes, scales


def boxes_of(form: gemm.GemmForm) -> tuple[tuple[int, ...], ...]:
    """Return the boxes, in the extents of what is loaded."""
    spans, many = spans_of(form), () if form.parts == 1 else (form.parts,)
    part = form.tactic.columns // form.parts
    tiles = ceil_div(part, gemm.SCALE_TILE_ROWS)
    codes, scales = (part, form.tactic.inner // 8, *many), (tiles, spans * SCALE_TILE, *many)
    return (EIGHT, SPAN, spans), codes, scales


def shared_memory(memory: Any, form: gemm.GemmForm) -> FewMemory:
    """Allocate stages, and an outgoing tile of each warpgroup."""
    count, tactic = facts.decoded_stages(form), form.tactic
    of_tokens, of_codes, of_scales = layouts_of(form)
    sizes = [tactic.rows * tactic.inner // 2 * count]
    sizes += [cute.cosize(of_codes), cute.cosize(of_scales)]
    sizes += [gemm.consumers(form) * tactic.rows * OF_ROW // 4]
    tokens, codes, scales, leaving = (
        memory.allocate_array(Uint32, size, byte_alignment=gemm.ALIGNMENT) for size in sizes
    )
    atom = warpgroup.make_smem_layout_atom(mainloop.Swizzle.K_SW128, Float16)
    # Eight rows with all of their spans, then the next eight: so a box is in one place.
    whole = cute.tile_to_shape(atom, (tactic.rows, tactic.inner, count), (1, 0, 2))
    view = coded.side_by_side
    of_weights = view(codes, stages.WORDS, sizes[1] // count, count)
    weights = coded.Nvfp4SharedViews(
        of_weights, view(scales, 1, sizes[2] // count, count), None, None, None
    )
    return FewMemory(
        (
            decoded_rows.swizzled(tokens, of_tokens, Float16),
            decoded_rows.swizzled(codes, of_codes, Uint32),
            cute.make_tensor(scales, of_scales),
        ),
        decoded_rows.swizzled(tokens, whole, Float16),
        weights,
        view(leaving, CHUNK_WORDS, tactic.rows * OF_ROW // 4, gemm.consumers(form)),
    )


@cute.kernel
def decoded_few_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    leaving: FewLeaving,
    groups: decoded_rows.Groups,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp and warpgroup."""
    tactic = form.gemm.tactic
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // gemm.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    held = shared_memory(memory, form.gemm)
    ring = decoded_rows.ring_of(memory, form.gemm)
    mainloop.begin(tactic)

    walk = mainloop.walk_of((Int32(groups.rows[0]), extents[0]), tactic, groups.experts)
    steps = ceil_div(extents[1], tactic.inner)
    loading, multiplying = facts.decoded_registers(form.gemm)
    if group == 0:
        cute.arch.setmaxregister_decrease(loading)
        if cute.arch.warp_idx() == 0:
            feedings = tuple(map(mainloop.feeding, feeds, held.written, boxes_of(form.gemm)))
            load((ring, feedings, groups.slots), walk, steps, form.gemm)
    else:
        cute.arch.setmaxregister_increase(multiplying)
        consume(ring, (held, group - 1), leaving, (groups, walk, (*extents, steps)), form)


@cute.jit
def load(loading: Any, walk: Any, steps: Any, form: cutlass.Constexpr) -> None:
    """Load all tiles of this thread block: the boxes of rows in use, and the weights."""
    ring, feedings, slots = loading
    tokens, codes, scales = feedings
    state = mainloop.producer_state(ring.num_stages)
    eights = form.tactic.rows // EIGHT
    of_part = form.tactic.columns // form.parts
    tiles = ceil_div(of_part, gemm.SCALE_TILE_ROWS)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = mainloop.tile_at(walk, number)
        boxes = decoded_rows.width_of(slots, row, form.tactic.rows) // EIGHT
        size = boxes * (EIGHT * form.tactic.inner * 2) + facts.decoded_weight_bytes(form)
        of_scales = column * of_part // gemm.SCALE_TILE_ROWS // tiles
        for step in cutlass.range(steps, unroll=1):
            ring.sync_object_empty.wait(state.index, state.phase)
            barrier = ring.producer_get_barrier(state)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            mainloop.issue(codes, (column, step, expert), state.index, barrier)
            mainloop.issue(scales, (of_scales, step, expert), state.index, barrier)
            for box in cutlass.range(boxes, unroll=1):
                place = (row * eights + box, 0, step)
                mainloop.issue(tokens, place, state.index * eights + box, barrier)
            state.advance()
    ring.producer_tail(state)


@cute.jit
def consume(ring: Any, own: Any, leaving: Any, given: Any, form: cutlass.Constexpr) -> None:
    """Multiply and write all tiles of this thread block, each by the form of its width."""
    held, mine = own
    groups, walk, (columns, _, steps) = given
    state = mainloop.consumer_state(ring.num_stages)
    widths = cutlass.const_expr(facts.WIDTHS[form.gemm.tactic.rows])
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % gemm.WARPGROUP
    at = addressed(place_of_weights(within, mine, form.gemm), held)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, _, _ = mainloop.tile_at(walk, number)
        width = decoded_rows.width_of(groups.slots, row, form.gemm.tactic.rows)
        for i in cutlass.range_constexpr(len(widths)):
            if width == widths[i]:
                state, sums = multiply(ring, state, (held, at, steps), widths[i], form.gemm)
                tile = mainloop.tile_at(walk, number)
                if cutlass.const_expr(form.gemm.parts == GATE_AND_UP):
                    write_gated(leaving, (held, mine), sums, (groups, tile, columns), form)
                else:
                    write_products(leaving, (held, mine), sums, (groups, tile, columns), form)


class FewPlace(NamedTuple):
    """Where a thread reads its block of two rows of weights in a stage, in bytes."""

    codes: list[Any]  # in the first stage, span by span
    scales: Any  # the same, of the first span
    below: tuple[int, int]  # from the first row's codes and scales to those of the second one
    block: Any


def place_of_weights(within: Any, mine: Any, form: gemm.GemmForm) -> FewPlace:
    """Return the place of a warpgroup's thread in the weights of a stage.

    A warp's 16 rows of wgmma are eight rows of gate and those of up, or rows r and r + 32.
    """
    warp, g, block = within // gemm.WARP, within % gemm.WARP // 4, within % 4
    spans, part = spans_of(form), form.tactic.columns // form.parts
    of_warpgroup, away, scales_away = gemm.PIECE_ROWS, 32, 1
    if form.parts == GATE_AND_UP:
        of_warpgroup, away, scales_away = gemm.PIECE_ROWS // 2, part, spans * SCALE_TILE
    row = mine * of_warpgroup + warp * EIGHT + g
    codes = []
    for span in range(spans):
        chunk = few_rows.chunk_of_codes(row, few_rows.CHUNKS * span + block // 2, spans)
        codes.append(chunk * 16 + block % 2 * 8)
    scales = few_rows.word_of_scales(row, 0, spans) * 4
    return FewPlace(codes, scales, (away * spans * 32, scales_away * 4), block)


def addressed(place: FewPlace, held: FewMemory) -> FewPlace:
    """Return a place with addresses."""
    first, scales = (each.iterator.toint() for each in (held.weights.a, held.weights.a_scales))
    return place._replace(
        codes=[first + each for each in place.codes], scales=scales + place.scales
    )


@cute.jit
def multiply(
    ring: Any, state: Any, work: Any, width: cutlass.Constexpr, form: cutlass.Constexpr
) -> Any:
    """Sum up one tile, stage by stage; the first one has no products to wait for."""
    held, at, steps = work
    mma = mainloop.mma_of(Float16, width, warpgroup.OperandSource.RMEM)
    sums = mainloop.sums_of(mma, width)
    a = mma.make_fragment_A(mma.partition_shape_A((gemm.PIECE_ROWS, 2 * SPAN)))
    shape = (width, form.tactic.inner, facts.decoded_stages(form))
    b = mma.make_fragment_B(
        mma.get_slice(0).partition_B(cute.local_tile(held.tokens, shape, (0, 0, 0)))
    )
    fragments, own = (mma, sums, a, b), (at, form)
    states = state, state.clone()
    states = add_stage(ring, states, fragments, own, begins=True)
    for _ in cutlass.range(steps - 1, unroll=1):
        states = add_stage(ring, states, fragments, own, begins=False)
    state, before = states
    warpgroup.wait_group(0)
    ring.consumer_release(before)
    return state, sums


def add_stage(ring: Any, states: Any, fragments: Any, own: Any, *, begins: bool) -> tuple[Any, Any]:
    """Add a stage span by span; two sets of registers alternate."""
    state, before = states
    at, form = own
    spans = spans_of(form)
    size = form.tactic.columns * form.tactic.inner // 2
    of_codes, of_scales = (
        state.index * size,
        at.scales + state.index * (facts.decoded_weight_bytes(form) - size),
    )
    ring.consumer_wait(state)
    for span in range(spans):
        where = at.codes[span] + of_codes
        codes = [shared_words_at(where, away, stages.WORDS) for away in (0, at.below[0])]
        bits = [
            shared_words_at(of_scales, span * SCALE_TILE * 4 + away, 1)[0]
            for away in (0, at.below[1])
        ]
        if not begins or span >= 2:
            warpgroup.wait_group(1)
        if not begins and span == 1:
            ring.consumer_release(before)
            before.advance()
        registers = cute.recast_tensor(fragments[2], Uint32)
        decode_span((codes, bits), registers, at.block, span % 2)
        few_rows.add_span(fragments, span, state.index, begins=begins and span == 0)
    state.advance()
    return state, before


def shared_words_at(address: Any, away: int, count: int) -> list[Any]:
    """Read adjacent words of shared memory, a constant number of bytes behind an address."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    if count == 1:
        return [ptx.emit(f"ld.shared.b32 {names}, [{{$r0}}+{away}];", [Uint32], address)]
    text = f"ld.shared.v{count}.b32 {{{names}}}, [{{$r0}}+{away}];"
    return list(ptx.emit(text, [Uint32] * count, address))


def decode_span(read: Any, registers: Any, block: Any, place: int) -> None:
    """Decode a span into wgmma's registers as few_rows.decode_rows does, but times 2**-14.

    Codes are multiples of 1/2 times that and scales of 2**-9, so all products are numbers of FP16.
    """
    codes, (row, below) = read
    kept = ptx.chosen_bytes(row, below, stages.bytes_of_rows(block)) & Uint32(stages.SCALE_BITS)
    text = """{
    .reg .b16 codes, none;
    mov.b32 {codes, none}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, codes;
    }"""
    both = ptx.emit(text, [Uint32], kept)
    for i in range(2):
        pairs = stages.decoded_halves(codes[i], ptx.twice(both, i))
        for step in range(stages.BLOCKS):
            at = few_rows.FRAGMENT_WORDS * place + 4 * step + i
            registers[at] = pairs[2 * step]
            registers[at + 2] = pairs[2 * step + 1]


def scales_of(groups: decoded_rows.Groups, matrix: Any, expert: Any) -> tuple[Any, Any]:
    """Return the factors of a matrix's sums, the exact power of two first."""
    _, factor = few_rows.scales_of(groups, matrix, expert)
    return RESTORE, factor


# ---- what leaves ---------------------------------------------------------------------------------


def alone(mine: Any) -> None:
    """Synchronise a warpgroup."""
    cute.arch.barrier(barrier_id=mainloop.FIRST_BARRIER + mine, number_of_threads=gemm.WARPGROUP)


def address_of(held: FewMemory, mine: Any, chunk: Any, form: gemm.GemmForm) -> Any:
    """Return the address of chunk `chunk` in a lane's row of the warpgroup's outgoing tile."""
    thread, _, _ = cute.arch.thread_idx()
    size = form.tactic.rows * OF_ROW
    at = stages.chunk_of_numbers(Int32(thread) % EIGHT, chunk) * 16
    return held.leaving.iterator.toint() + mine * size + at


def word_of_pair(column: Any, mine: Any, block: Any) -> Any:
    """Return where in a row of FC1's output a warpgroup's block begins, in words.

    64 outputs are four blocks, two of a warpgroup; their pairs of a chunk are side by side.
    """
    return (column * 2 + mine // 2) * (SPAN // 2) + mine % 2 * 2 + block


@cute.jit
def write_gated(
    leaving: FewLeaving, own: Any, sums: Any, given: Any, form: cutlass.Constexpr
) -> None:
    """Write SwiGLU of a warpgroup's 32 outputs as the numbers that its NVFP4 codes stand for."""
    held, mine = own
    groups, (row, column, expert), columns = given
    width = cutlass.const_expr(cute.size(sums) * 2)
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % gemm.WARPGROUP
    scales = [scales_of(groups, expert * GATE_AND_UP + part, expert) for part in range(2)]
    first = row * form.gemm.tactic.rows
    address = address_of(held, mine, within // gemm.WARP, form.gemm)
    for i in cutlass.range_constexpr(width // EIGHT):
        token = first + i * EIGHT + within % 4 * 2
        made = output_of(leaving, sums, (i, token, scales), form)
        decoded_rows.transposed(address + i * EIGHT * OF_ROW, [made])
    alone(mine)
    blocks = 2  # of a warpgroup
    for turn in cutlass.range_constexpr(ceil_div(width * blocks, gemm.WARPGROUP)):
        item = within + turn * gemm.WARPGROUP
        token, block = item // blocks, item % blocks
        if item < width * blocks:
            scaling = words.scaling_of(Float32(leaving.hidden_scale[expert]), None)
            read: Any = read_block(held.leaving, (token, block), mine)
            pairs = decoded_rows.decoded_block(read, scaling, form.gemm.target)
            wide = Int64(columns // GATE_AND_UP // 2)  # words of a row
            start = Int64(first + token) * wide + Int64(word_of_pair(column, mine, block))
            for chunk in cutlass.range_constexpr(8):
                leaving.words[start + chunk * CHUNK_WORDS] = pairs[chunk]
    alone(mine)


def output_of(leaving: FewLeaving, sums: Any, at: Any, form: Any) -> Any:
    """Return the word of an output of two tokens, from two sums of gate and two of up."""
    eight, token, scales = at
    gate, up = (
        words.rounded_words(
            [mainloop.scaled(sums[4 * eight + 2 * part + i], scales[part]) for i in range(2)]
        )
        for part in range(GATE_AND_UP)
    )
    made = words.swiglu_numbers(gate, up, form.limit)
    if form.weighted:
        weights = [few_rows.weight_of(leaving, token + i) for i in range(2)]
        made = [codecs.multiply_rn(n, each) for n, each in zip(made, weights, strict=True)]
    return words.rounded_words(made)[0]


def read_block(tile: Any, place: tuple[Any, Any], mine: Any) -> list[Any]:
    """Read the words of a block of a token."""
    token, block = place
    read = []
    for half in range(2):
        read += stages.words_at(
            tile, stages.chunk_of_numbers(token, 2 * block + half), mine, CHUNK_WORDS
        )
    return read


@cute.jit
def write_products(
    leaving: FewLeaving, own: Any, sums: Any, given: Any, form: cutlass.Constexpr
) -> None:
    """Scale, round and write a warpgroup's 64 columns."""
    held, mine = own
    groups, (row, column, expert), columns = given
    width = cutlass.const_expr(cute.size(sums) * 2)
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % gemm.WARPGROUP
    scales = scales_of(groups, expert, expert)
    for half in cutlass.range_constexpr(2):
        chunk = within // gemm.WARP + half * 4  # rows r, then r + 32
        address = address_of(held, mine, chunk, form.gemm)
        for i in cutlass.range_constexpr(width // EIGHT):
            pair = [mainloop.scaled(sums[4 * i + 2 * half + k], scales) for k in range(2)]
            decoded_rows.transposed(address + i * EIGHT * OF_ROW, words.rounded_words(pair))
    alone(mine)
    for turn in cutlass.range_constexpr(ceil_div(width * EIGHT, gemm.WARPGROUP)):
        item = within + turn * gemm.WARPGROUP
        token, chunk = item // EIGHT, item % EIGHT
        if item < width * EIGHT:
            at = stages.chunk_of_numbers(token, chunk)
            read: Any = stages.words_at(held.leaving, at, mine, CHUNK_WORDS)
            first = column * form.gemm.tactic.columns + mine * gemm.PIECE_ROWS
            if first < columns:
                index = Int64(row * form.gemm.tactic.rows + token) * Int64(columns // EIGHT)
                words.store(leaving.words, index + Int64(first // EIGHT + chunk), read)
    alone(mine)


# ---- launch --------------------------------------------------------------------------------------


def launched(pointers: Any, extents: Any, form: Any, stream: Any, use_pdl: bool) -> None:
    """Launch on the extents rows at most, N, K, experts, thread blocks."""
    m, n, k, experts, blocks = extents
    of_gemm = form.gemm
    numbers, codes, scales, *known = pointers
    out, *epilogue = known[5:]
    groups = decoded_rows.Groups(*rows.flat(known[:5]))
    parts, k = of_gemm.parts, cute.assume(k, divby=gemm.SCALE_TILE_ROWS)
    part = n // parts
    layout = cute.make_layout((m, SPAN, k // SPAN), stride=(Int64(k), 1, SPAN))
    matrices = [cute.make_tensor(numbers, layout)]
    for pointer, count, row_words in (
        (codes, part, k // 8),
        (scales, part // gemm.SCALE_TILE_ROWS, k // SPAN * SCALE_TILE),
    ):
        wide = Int64(row_words)
        layout = cute.make_layout(
            (count, row_words, experts * parts), stride=(wide, 1, wide * Int64(count))
        )
        matrices.append(cute.make_tensor(pointer, layout))
    feeds = tuple(map(mainloop.feed_of, matrices, layouts_of(of_gemm), boxes_of(of_gemm)))
    out = cute.recast_ptr(out, dtype=Uint32)
    if parts == GATE_AND_UP:
        hidden_scale, weights = rows.flat(epilogue)
        (flat,) = rows.flat((out,))
        leaving = FewLeaving(flat, groups.slots, weights, hidden_scale)
    else:
        leaving = FewLeaving(rows.in_words(out, CHUNK_WORDS), groups.slots)
    decoded_few_kernel(feeds, leaving, groups, (n, k), form).launch(
        grid=[1, 1, blocks],
        block=[gemm.WARPGROUP * (1 + gemm.consumers(of_gemm)), 1, 1],
        min_blocks_per_mp=1,
        use_pdl=use_pdl,
        stream=stream,
    )
