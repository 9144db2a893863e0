"""mHC's projection in one pass over x: products[t] = fn . x[t], squares[t] = sum(x[t]**2).

One source for sm_90a and sm_100a. x [T, K = 4 D] in BF16; fn [24, K] (the head: [4, K]) as three
BF16 parts, whose products are exact, so the result is that of float32 sums. mhc_problem
defines the order of the sums: bits depend on a token's streams and the weight alone.

* project_kernel: a thread block has tokens and a piece, a group or a span of K. cp.async fills a
  ring of STAGES stages (64 values of K of its tokens, then of the weight's parts, swizzled chunks);
  ldmatrix; mma.sync m16n8k16. One barrier a stage: wait for the oldest copies, synchronise, request
  the stage STAGES - 1 ahead, multiply. K may be summed in any order within a stage, so the chunks
  serve as operands without rearrangement. Partial sums go to memory, a line a token.
* piece_kernel: the same where a warp has one step, without a ring; the weight is asked for before
  the launch in front has ended.
* add_kernel: adds the lines of a token in the stated order (PDL wait), a lane a column.

Never waits for the GPU, so it may be captured in a graph. Shape letters as in mhc_problem.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import computed_here, emit, numbers_of, vectors
from degarble.kernels.rows import mhc_problem as facts
from degarble.kernels.rows.mhc_problem import (
    BF16_PARTS,
    LINE,
    ROW_BYTES,
    ROWS_OF_TILE,
    SQUARES,
    STAGES,
    STEP,
    STREAMS,
    TILE,
    InnerCut,
    ProjectForm,
    ProjectProblem,
)
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.pdl import EARLY, follow, wait_then_let_follow

WORDS = 4  # of a lane's 16 bytes
QUAD = 4  # lanes that share a row
OF_TILE = 4  # sums of a lane in a tile of 16 x 8
EXTENTS = 7  # numbers that a launch is told
ADDING_WARPS = 4  # of a thread block, a token each
CHUNKS = ROW_BYTES // 16  # of a row of a stage


# ---- device --------------------------------------------------------------------------------------


class ProjectTensors(NamedTuple):
    """Kernels' tensors: bytes, pairs of float32, float32."""

    streams: Any  # BF16 [T, K]
    weight: Any  # BF16 [3, N padded, K]
    pairs: Any  # the partial sums, two at a time
    partials: Any  # float32 [T, lines, 32]
    products: Any  # float32 [T, 24 or 4]
    squares: Any  # float32 [T]


class ProjectionFeed(NamedTuple):
    """A thread's share of every stage: one chunk of every `rows_at_once`-th row.

    Addresses of its first row of streams and of the weight at step 0, bytes from row to row of
    either, its row and chunk, where that lies in shared memory, tokens left, chunks of a row.
    """

    streams: Any
    weight: Any
    to_next: Any
    row: Any
    chunk: Any
    shared: Any
    left: Any
    of_row: Any


def multiplied(sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    """Return a lane's four sums with the products of sixteen values of K added."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    made = cute.arch.inline_ptx(
        text, write_only_types=[Float32] * OF_TILE, read_only_args=[*a, *b, *sums]
    )
    return list(made)


def feed_of(
    tensors: Any, base: Any, numbers: tuple[Any, Any, Any], form: ProjectForm
) -> ProjectionFeed:
    """Return a thread's share; `numbers` is first token of the block, tokens, chunks of a row."""
    first, tokens, of_row = numbers
    thread, _, _ = cute.arch.thread_idx()
    row, chunk = Int32(thread) // CHUNKS, Int32(thread) % CHUNKS
    streams, weight = (each.iterator.toint() for each in (tensors.streams, tensors.weight))
    own, of_weight = (
        (Int64(each) * Int64(of_row) + Int64(chunk)) * 16 for each in (first + row, row)
    )
    at = base + row * ROW_BYTES + facts.chunk_place(row, chunk) * 16
    apart = Int64(of_row) * (16 * form.rows_at_once)
    return ProjectionFeed(
        streams + own, weight + of_weight, apart, row, chunk, at, tokens - first - row, of_row
    )


@cute.jit
def ask(feed: ProjectionFeed, place: tuple[Any, Any], form: cutlass.Constexpr) -> None:
    """Issue the copies of a stage; place is step and slot of the ring."""
    ask_tokens(feed, place, form)
    ask_weight(feed, place, form)


@cute.jit
def ask_tokens(feed: ProjectionFeed, place: tuple[Any, Any], form: cutlass.Constexpr) -> None:
    """Issue the copies of a stage's tokens, zeros past K and tokens.

    A chunk lies at the same place in all rows of a thread where they are eight apart; of rows four
    apart every other one has it 64 bytes from there.
    """
    step, slot = place
    other = 64 if form.rows_at_once % TILE else 0
    inside = step * CHUNKS + feed.chunk < feed.of_row
    to = feed.shared + slot * (form.stage_rows * ROW_BYTES)
    address = feed.streams + Int64(step) * ROW_BYTES
    for turn in cutlass.range_constexpr(form.tokens_of_block // form.rows_at_once):
        row = turn * form.rows_at_once
        fetch((to + row * ROW_BYTES) ^ (turn % 2 * other), address, inside & (feed.left > row))
        address = address + feed.to_next


@cute.jit
def ask_weight(feed: ProjectionFeed, place: tuple[Any, Any], form: cutlass.Constexpr) -> None:
    """Issue the copies of a stage's part of the weight, zeros past K."""
    step, slot = place
    other = 64 if form.rows_at_once % TILE else 0
    inside = step * CHUNKS + feed.chunk < feed.of_row
    to = feed.shared + (slot * form.stage_rows + form.tokens_of_block) * ROW_BYTES
    address = feed.weight + Int64(step) * ROW_BYTES
    rows = BF16_PARTS * form.tiles * TILE
    for turn in cutlass.range_constexpr(-(-rows // form.rows_at_once)):
        row = turn * form.rows_at_once
        if cutlass.const_expr(row + form.rows_at_once <= rows):  # noqa: SIM114  known in tracing
            fetch((to + row * ROW_BYTES) ^ (turn % 2 * other), address, inside)
        elif feed.row < rows - row:
            fetch((to + row * ROW_BYTES) ^ (turn % 2 * other), address, inside)
        address = address + feed.to_next


def fetch(to: Any, address: Any, wanted: Any) -> None:
    """Issue a 16-byte copy into shared memory, or zeros."""
    text = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};"
    size = ops.select(wanted, Int32(16), Int32(0))
    cute.arch.inline_ptx(text, read_only_args=[to, address, size])


def matrices(address: Any) -> list[Any]:
    """Read four matrices of eight rows of 16 bytes, a row a lane; a lane gets a word of each."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    made = cute.arch.inline_ptx(text, write_only_types=[Uint32] * WORDS, read_only_args=[address])
    return list(made)


def place_of_lane(row: Any, chunk: Any) -> Any:
    """Return where a lane's row of a matrix begins, in bytes."""
    return row * ROW_BYTES + facts.chunk_place(row, chunk) * 16


@cute.jit
def add_stage(base: Any, registers: tuple[Any, Any], form: cutlass.Constexpr) -> None:
    """Add the products and squares of a stage whose rows begin at `base`.

    Of streams four matrices are sixteen tokens by sixteen values of K, as an instruction has them;
    of the weight they are eight rows by 32 values.
    """
    rSums, rSquares = registers
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = Int32(thread) % 32, Int32(thread) // 32
    own = base + warp * (form.tokens_of_warp * ROW_BYTES)
    weights = base + form.tokens_of_block * ROW_BYTES
    for half in cutlass.range_constexpr(STEP // 32):
        of_weight = weights + place_of_lane(lane % TILE, half * QUAD + lane // TILE)
        streams: list[list[Any]] = []
        for quarter in cutlass.range_constexpr(2):
            chunk = half * QUAD + quarter * 2 + lane // ROWS_OF_TILE
            of_lane = own + place_of_lane(lane % ROWS_OF_TILE, chunk)
            tiles = range(form.tokens_of_warp // ROWS_OF_TILE)
            streams.append([matrices(of_lane + t * (ROWS_OF_TILE * ROW_BYTES)) for t in tiles])
        add_squares(streams, rSquares)
        for part in cutlass.range_constexpr(BF16_PARTS - 1, -1, -1):  # the smallest first
            add_part(of_weight, (rSums, streams), part, form)


@cute.jit
def add_squares(streams: list[list[Any]], rSquares: Any) -> None:
    """Add the squares of a lane's values: two tokens of every tile, two words of four each."""
    for each in cutlass.range_constexpr(cute.size(rSquares)):
        total = Float32(rSquares[each])
        for of_quarter in streams:
            for number in numbers_of(of_quarter[each // 2][each % 2 :: 2]):
                total = ops.fma_rn(number, number, total)
        rSquares[each] = total


@cute.jit
def add_part(
    of_weight: Any, operands: tuple[Any, Any], part: cutlass.Constexpr, form: cutlass.Constexpr
) -> None:
    """Add 32 values of K against one part of the weight.

    Consecutive instructions on one sum would wait for each other, so the sums alternate.
    """
    rSums, streams = operands
    first = part * form.tiles
    weights = [
        matrices(of_weight + (first + tile) * (TILE * ROW_BYTES)) for tile in range(form.tiles)
    ]
    for quarter in cutlass.range_constexpr(2):
        for tile in cutlass.range_constexpr(form.tiles):
            for high in cutlass.range_constexpr(form.tokens_of_warp // ROWS_OF_TILE):
                b = weights[tile][2 * quarter : 2 * quarter + 2]
                sums = [Float32(rSums[i, tile, high]) for i in range(OF_TILE)]
                sums = multiplied(sums, streams[quarter][high], b)
                for i in cutlass.range_constexpr(OF_TILE):
                    rSums[i, tile, high] = sums[i]


@cute.jit
def add_piece(whole: tuple[Any, Any], piece: tuple[Any, Any]) -> None:
    """Add a piece's sums and squares to the whole, and clear them."""
    for number, total in zip(piece[0:1], whole[0:1], strict=True):
        for i in cutlass.range_constexpr(cute.size(number)):
            total[i] = ops.add_rn(Float32(total[i]), Float32(number[i]))
        number.fill(0.0)
    for each in cutlass.range_constexpr(cute.size(piece[1])):
        found = Float32(piece[1][each])
        for distance in (1, 2):
            found = ops.add_rn(found, cute.arch.shuffle_sync_bfly(found, offset=distance))
        whole[1][each] = ops.add_rn(Float32(whole[1][each]), found)
    piece[1].fill(0.0)


@cute.jit
def add_group(span: tuple[Any, Any], group: tuple[Any, Any]) -> None:
    """Add a group's sums and squares to its span's, and clear them."""
    for whole, part in zip(span, group, strict=True):
        for i in cutlass.range_constexpr(cute.size(whole)):
            whole[i] = ops.add_rn(Float32(whole[i]), Float32(part[i]))
        part.fill(0.0)


@cute.kernel
def piece_kernel(
    tensors: ProjectTensors, extents: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Sum a piece of K that is one step, for a warp's tokens.

    The weight is on its way to shared memory while what is in front still runs: nothing writes it.
    """
    part, block, _ = cute.arch.block_idx()
    tokens, of_row, _, _, _, partials = extents
    part, first = Int32(part), Int32(block) * form.tokens_of_block
    memory = cutlass.memory.SmemAllocator()
    stage = memory.allocate_tensor(Uint32, cute.make_layout(form.shared_bytes // 4), 128)
    base = Int32(stage.iterator.toint())
    feed = feed_of(tensors, base, (first, tokens, of_row), form)
    ask_weight(feed, (part, Int32(0)), form)
    wait_then_let_follow()
    ask_tokens(feed, (part, Int32(0)), form)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    sums, whole = no_sums(form), no_sums(form)
    add_stage(base, sums, form)
    add_piece(whole, sums)
    store_sums(tensors, whole, (part, partials, tokens, first), form)


def no_sums(form: ProjectForm) -> tuple[Any, Any]:
    """Return registers for the sums and the squares of a warp's tokens, zeros."""
    shape = cute.make_layout((OF_TILE, form.tiles, form.tokens_of_warp // ROWS_OF_TILE))
    made = (
        cute.make_rmem_tensor(shape, Float32),
        cute.make_rmem_tensor(form.tokens_of_warp // 8, Float32),
    )
    for each in made:
        each.fill(0.0)
    return made


@cute.kernel
def project_kernel(
    tensors: ProjectTensors, extents: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Sum a piece of K, a group of pieces, or a span of groups for a thread block's tokens."""
    follow()
    part, block, _ = cute.arch.block_idx()
    tokens, of_row, steps, per_piece, per_group, partials = extents
    part = Int32(part)
    first = Int32(block) * form.tokens_of_block
    memory = cutlass.memory.SmemAllocator()
    ring = memory.allocate_tensor(Uint32, cute.make_layout(form.shared_bytes // 4), 128)
    base = Int32(ring.iterator.toint())
    feed = feed_of(tensors, base, (first, tokens, of_row), form)
    piece, group, span = (no_sums(form) for _ in range(3))
    of_group = per_piece * (1 if form.lines == "pieces" else per_group)
    of_part = of_group * (facts.SPAN if form.lines == "spans" else 1)
    begin = part * of_part
    count = ops.minimum(begin + of_part, steps) - begin
    piece_end, group_end = per_piece, of_group
    # Fill the ring; groups are committed even if empty, so that the count of waits holds.
    for ahead in cutlass.range_constexpr(STAGES - 1):
        if ahead < count:
            ask(feed, (begin + ahead, Int32(ahead)), form)
        cute.arch.cp_async_commit_group()
    for number in cutlass.range(count, unroll=1):
        # This stage has landed; the barrier shows it to all threads and frees the one before.
        cute.arch.cp_async_wait_group(STAGES - 2)
        cute.arch.sync_threads()
        following = number + STAGES - 1
        if following < count:
            ask(feed, (begin + following, following % STAGES), form)
        cute.arch.cp_async_commit_group()
        stage = base + number % STAGES * (form.stage_rows * ROW_BYTES)
        add_stage(stage, piece, form)
        if (number + 1 == piece_end) | (number + 1 == count):
            add_piece(group, piece)
            piece_end = piece_end + per_piece
        if cutlass.const_expr(form.lines == "spans"):  # noqa: SIM102  known in tracing
            if (number + 1 == group_end) | (number + 1 == count):
                add_group(span, group)
                group_end = group_end + of_group
    made = span if form.lines == "spans" else group
    store_sums(tensors, made, (part, partials, tokens, first), form)


@cute.jit
def store_sums(
    tensors: ProjectTensors,
    registers: tuple[Any, Any],
    place: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Write a warp's partial sums; place is part, parts, tokens, first token of the block."""
    rWhole, rSquares = registers
    part, partials, tokens, first = place
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = Int32(thread) % 32, Int32(thread) // 32
    of_lane, in_quad = lane // QUAD, lane % QUAD
    for each in cutlass.range_constexpr(form.tokens_of_warp // 8):
        token = first + warp * form.tokens_of_warp + of_lane + each * 8
        if token < tokens:
            line = Int64(token) * Int64(partials) + Int64(part)
            for tile in cutlass.range_constexpr(form.tiles):
                rPair = cute.make_rmem_tensor(2, Float32)
                for i in cutlass.range_constexpr(2):
                    rPair[i] = rWhole[each % 2 * 2 + i, tile, each // 2]
                at = line * (LINE // 2) + (tile * (TILE // 2) + in_quad)
                cute.autovec_copy(rPair, tensors.pairs[None, at])
            if in_quad == 0:
                tensors.partials[line * LINE + SQUARES] = rSquares[each]


@cute.kernel
def add_kernel(tensors: ProjectTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Add a token's partial sums, a lane a column; where they are pieces each group has a warp."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tokens, per_group, partials = extents
    lane, warp = Int32(thread) % 32, Int32(thread) // 32
    if cutlass.const_expr(form.lines == "pieces"):
        shared = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((LINE, facts.MOST_GROUPS)), 16
        )
        first = warp * per_group
        between = (first, ops.minimum(first + per_group, partials))
        lines = lines_at(tensors, (Int32(block), lane, partials), between)
        wait_then_let_follow()
        shared[lane, warp] = in_turn(lines_of(lines, facts.MOST_IN_GROUP))
        cute.arch.sync_threads()
        if warp == 0:
            groups = [Float32(shared[lane, group]) for group in range(facts.MOST_GROUPS)]
            store_whole(tensors, Int32(block), lane, in_spans(groups), form)
    else:
        token = Int32(block) * ADDING_WARPS + warp
        lines = lines_at(tensors, (token, lane, partials), (Int32(0), partials))
        follow()
        if token < tokens:
            most = facts.MOST_SPANS if form.lines == "spans" else facts.MOST_GROUPS
            parts = lines_of(lines, most)
            whole = in_turn(parts) if form.lines == "spans" else in_spans(parts)
            store_whole(tensors, token, lane, whole, form)


class PartialLines(NamedTuple):
    """A column of partial sums: its first address, and how many there are."""

    address: Any
    count: Any


def lines_at(tensors: Any, place: tuple[Any, Any, Any], between: tuple[Any, Any]) -> PartialLines:
    """Return where a lane's column of some partial sums of a token lies, computed here."""
    token, lane, partials = place
    first, end = between
    line = (Int64(token) * Int64(partials) + Int64(first)) * LINE + Int64(lane)
    return PartialLines(computed_here(tensors.partials.iterator.toint() + line * 4), end - first)


def lines_of(lines: PartialLines, most: int) -> list[Any]:
    """Return partial sums of a column, and zeros up to as many as there may be.

    A line lies at a constant from the first one, so that no load waits for an address of its own.
    """
    return [
        loaded_if(lines.address, lines.count > number, number * LINE * 4) for number in range(most)
    ]


def loaded_if(address: Any, wanted: Any, offset: int) -> Any:
    """Return a float32 so many bytes behind an address, or 0 where it is not wanted."""
    text = (
        "{ .reg .pred wanted; setp.ne.u32 wanted, {$r1}, 0; mov.b32 {$w0}, 0; "
        f"@wanted ld.global.f32 {{$w0}}, [{{$r0}} + {offset}]; }}"
    )
    flag = ops.select(wanted, Uint32(1), Uint32(0))
    return emit(text, Float32, address, flag)


def in_turn(numbers: list[Any]) -> Any:
    """Return the sum from zero on; the zeros of absent numbers change no bit of it."""
    whole = Float32(0.0)
    for number in numbers:
        whole = ops.add_rn(whole, number)
    return whole


def in_spans(groups: list[Any]) -> Any:
    """Return the sum of groups: each span in turn, then spans in turn."""
    spans = [groups[at : at + facts.SPAN] for at in range(0, len(groups), facts.SPAN)]
    return in_turn([in_turn(span) for span in spans])


@cute.jit
def store_whole(
    tensors: ProjectTensors, token: Any, lane: Any, whole: Any, form: cutlass.Constexpr
) -> None:
    """Write a column of a token: a product, or the sum of squares."""
    products = facts.WEIGHTS[form.kind]
    if lane < products:
        tensors.products[Int64(token) * products + Int64(lane)] = whole
    if lane == SQUARES:
        tensors.squares[token] = whole


@cute.jit
def launch_project(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch both kernels; extents are tokens, vectors, steps, per piece, per group, grid."""
    streams, weight, partials, products, squares = pointers
    sizes = (0, 0, 2, 0, 0, 0)
    views = zip((streams, weight, partials, partials, products, squares), sizes, strict=True)
    tensors = ProjectTensors(*(vectors(address, words) for address, words in views))
    tokens, of_row, steps, per_piece, per_group, parts, blocks = extents
    numbers = (tokens, of_row, steps, per_piece, per_group, parts)
    summing = piece_kernel if form.one_step else project_kernel
    summing(tensors, numbers, form).launch(
        grid=[parts, blocks, 1], block=[32 * form.warps, 1, 1], use_pdl=EARLY, stream=stream
    )
    by_piece = form.lines == "pieces"
    warps = facts.MOST_GROUPS if by_piece else ADDING_WARPS
    adding = tokens if by_piece else (tokens + (ADDING_WARPS - 1)) // ADDING_WARPS
    add_kernel(tensors, (tokens, per_group, parts), form).launch(
        grid=[adding, 1, 1], block=[32 * warps, 1, 1], use_pdl=True, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[ProjectProblem, ProjectForm]) -> tuple[Any, ...]:
    """Return tokens, vectors of a row, how K is cut, and the grid."""
    problem, cut = of.problem, InnerCut(of.problem.inner)
    numbers = (problem.tokens, problem.inner // 8, cut.steps, cut.per_piece, cut.per_group)
    return ((*numbers, *facts.project_grid(problem, of.form)),)


_Operand = Operand[ProjectProblem]
_VALUES, _SUMS = Storage(Uint32, torch.bfloat16, 16), Storage(Float32, torch.float32, 16)
KERNEL = Kernel[ProjectProblem, ProjectForm](
    entry=launch_project,
    operands=(
        _Operand("streams", _VALUES, lambda p: (p.tokens, STREAMS, p.width)),
        _Operand("split", _VALUES, lambda p: (BF16_PARTS, p.weight_rows, p.inner), label="weight"),
        _Operand(
            "partials",
            _SUMS,
            lambda p: (p.tokens, p.partials, LINE),
            output=True,
            scratch=True,
            label="partial sums",
        ),
        _Operand("products", _SUMS, lambda p: (p.tokens, p.products), output=True),
        _Operand("squares", Storage(Float32, torch.float32, 4), lambda p: (p.tokens,), output=True),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * EXTENTS,),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
