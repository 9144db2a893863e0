"""Products of up to 8 rows of heads, each head by a BF16 matrix of its own, on Hopper (sm_90a).

out[t, h] = x[t, h] W[h]^T: V3.2's absorbed keys and values (heads_problem).
A thread block has up to 256 rows of a head's matrix, whole along K, in shared memory: all boxes are
requested before the previous launch has ended, since nothing writes weights. After that wait it
requests its head's values of all tokens, and one warpgroup multiplies: rows of the matrix are
wgmma's 64 rows, tokens its 8 columns (zeros behind the last one).
Steps of K are taken in order, sixteen at a time, so every bit is that of sm90_gemm_grouped.
* keys (`turned`): the thread blocks of a head write its 512 sums, and the first one the 64 turned
  values behind them, as simt_latent_query does.
* `decoded`: a warp has 16 neighbouring sums of a token, a block of NVFP4, in eight lanes; they are
  quantised and decoded there, as simt_quantise_nvfp4 does.
* splits (`at_once`): x is not copied. After the wait each thread merges four values of a token, as
  simt_attention_merge does, and writes them in the swizzle that a copy would have.

The entry point allocates only its result and never synchronises, so it can be captured in a CUDA
graph. Shape letters: T tokens, H heads, N columns, K inner.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import heads_problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.attention.heads_problem import HeadsForm, HeadsProblem
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm.problem import TMA_ALIGNMENT, WHOLE_CARVEOUT
from degarble.kernels.gemm.w4a16_instructions import store_words
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    SLOT_WORDS,
    block_amax,
    coded_scale,
    correct_turn,
    decoding_of,
    guess_turn,
    numbers_of,
    nvfp4_rounded,
    put,
    registers_of,
    rounded_words,
    store,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.runtime.kernel import Kernel, Operand, Presence, Storage, as_vector
from degarble.kernels.runtime.pdl import EARLY, let_follow, wait_for_front
from degarble.kernels.runtime.targets import SM90A

CHUNK = 8  # values of 16 bytes
TURNED = rows.ROTATED // CHUNK  # chunks of a head's turned part
ROW = 2 * facts.STEP  # bytes of a row in a box


class HeadsTensors(NamedTuple):
    """Results one by one and by 16 bytes; what turns and what decodes, where there is any."""

    out: Any
    out_vectors: Any
    heads: Any  # x by 16 bytes
    turns: Any
    positions: Any
    decode_scale: Any
    merging: Any  # addresses of splits, where x is merged from them


# ---- device --------------------------------------------------------------------------------------


def layouts(form: HeadsForm) -> tuple[Any, Any]:
    """Return the layouts of the matrix and of the tokens in shared memory, box after box."""
    kind = mainloop.Swizzle.K_SW128
    return (
        mainloop.staged_layout(BFloat16, form.span, facts.STEP, form.steps, kind),
        mainloop.staged_layout(BFloat16, facts.MOST_TOKENS, facts.STEP, form.steps, kind),
    )


@cute.kernel
def heads_kernel(  # noqa: PLR0915  one thread block from its loads to its results
    feeds: tuple[mainloop.TmaFeed, ...],
    tensors: HeadsTensors,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Have a part of a head's matrix ready, then multiply all tokens' values of the head by it."""
    tokens, heads, width, out_width, positions, splits = extents
    thread, _, _ = cute.arch.thread_idx()
    part, head, _ = cute.arch.block_idx()
    parts, _, _ = cute.arch.grid_dim()
    memory = cutlass.memory.SmemAllocator()
    of_matrix, of_tokens = layouts(form)
    sW = mainloop.shared_of(memory, BFloat16, of_matrix)
    sX = mainloop.shared_of(memory, BFloat16, of_tokens)
    barriers = memory.allocate_array(Int64, form.steps)
    if thread == 0:
        for step in cutlass.range_constexpr(form.steps):
            cute.arch.mbarrier_init(barriers + step, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    let_follow()

    weights = mainloop.feeding(feeds[0], sW, (form.span, facts.STEP))
    values: Any = None
    if cutlass.const_expr(form.at_once == 0):
        values = mainloop.feeding(feeds[1], sX, (facts.MOST_TOKENS, facts.STEP))
    loads = cute.arch.warp_idx() == 0
    if loads:
        of_x = facts.MOST_TOKENS if form.at_once == 0 else 0
        size = (form.span + of_x) * facts.STEP * 2
        for step in cutlass.range_constexpr(form.steps):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + step, size)
            tile = Int32(head) * Int32(parts) + Int32(part)
            mainloop.issue(weights, (tile, step), step, barriers + step)
    decoding: Any = None
    if cutlass.const_expr(form.decoded):
        decoding = decoding_of(Float32(tensors.decode_scale[0]))
    rTurn, supposed = registers_of(rows.PAIRS_OF_LANE, 2), Int32(0)
    # Eight threads a token turn; the others repeat the last token and write nothing.
    token = ops.minimum(Int32(thread) // TURNED, tokens - 1)
    group = Int32(thread) % TURNED
    turns = (Int32(thread) < tokens * TURNED) & (Int32(part) == 0)
    if cutlass.const_expr(form.turned):
        supposed = guess_turn(
            tensors.turns, tensors.positions, rTurn, (token, group), (turns, positions)
        )
    base = Uint32(sX.iterator.toint())
    if cutlass.const_expr(form.at_once > 0):
        for each in cutlass.range_constexpr(form.steps * ROW * facts.MOST_TOKENS // 2048):
            store_words(base + Uint32(thread) * 16 + each * 2048, [Uint32(0)] * 4)
        cute.arch.sync_threads()
    wait_for_front()
    if cutlass.const_expr(form.at_once > 0):
        merge_rows(
            tensors.merging, base, (Int32(head), Int32(thread)), (tokens, heads, splits), form
        )
        # wgmma reads through another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
    if loads & (form.at_once == 0):
        for step in cutlass.range_constexpr(form.steps if form.at_once == 0 else 0):
            at = Int32(head) * (width // facts.STEP) + step
            mainloop.issue(values, (0, at), step, barriers + step)

    if cutlass.const_expr(form.turned):
        of_row = Int64(token) * Int64(heads) + Int64(head)
        turn_part(tensors, (of_row, group, width, out_width), (rTurn, supposed, token), (
            turns, positions,
        ))  # fmt: skip
    mma = mainloop.mma_of(BFloat16, facts.MOST_TOKENS)
    tiles = [
        mainloop.fragments_of(mma, sW, sX, each, facts.MOST_TOKENS)
        for each in range(form.span // facts.TILE)
    ]
    for step in cutlass.range_constexpr(form.steps):
        cute.arch.mbarrier_wait(barriers + step, 0)
        for each in cutlass.range_constexpr(form.span // facts.TILE):
            _, sums, a, b = tiles[each]
            mainloop.multiply_stage(mma, sums, *mainloop.stage_of(a, b, step), begins=step == 0)
    warpgroup.wait_group(0)

    for each in cutlass.range_constexpr(form.span // facts.TILE):
        column = Int32(part) * form.span + each * facts.TILE
        place = (Int32(head), column, Int32(thread))
        write(tensors.out, tiles[each][1], place, (tokens, heads, out_width), decoding)


@cute.jit
def merge_rows(
    addresses: merging.MergeAddresses,
    base: Any,
    place: tuple[Any, Any],
    extents: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Merge the splits of a head's tokens, each thread four values, in place of a copy of x."""
    (head, thread), (tokens, heads, splits) = place, extents
    values = merging.VALUES
    step, within = thread * values // facts.STEP, thread * values % facts.STEP
    for token in cutlass.range(Int32(0), tokens, unroll=1):
        places = merging.places_of(addresses, (heads, splits), (token, head, thread))
        words, _, _ = merging.merged(places, (heads, splits), (addresses.sink, head), form)
        # Chunks of 16 bytes are exchanged by the row's number.
        chunk = (within // CHUNK) ^ token
        row = (step * facts.MOST_TOKENS + token) * ROW
        store_words(base + Uint32(row + chunk * 16 + within % CHUNK * 2), words)


def write(
    out: Any, sums: Any, place: tuple[Any, Any, Any], extents: tuple[Any, Any, Any], decoding: Any
) -> None:
    """Round a thread's sums of a tile and write them: columns g and g + 8 of two tokens.

    `decoding`: they are quantised and decoded, 16 columns of a warp and token together.
    """
    (head, column, thread), (tokens, heads, width) = place, extents
    lane = thread % 32
    own = column + thread // 32 * 16 + lane // 4
    for each in range(2):
        token = lane % 4 * 2 + each
        words = rounded_words([Float32(sums[each]), Float32(sums[2 + each])])
        if decoding is not None:
            largest = block_amax(words)
            for distance in (4, 8, 16):
                other = cute.arch.shuffle_sync_bfly(largest, offset=distance)
                largest = ops.maximum(largest, Float32(other))
            code, factor = coded_scale(largest, decoding)
            words = nvfp4_rounded(words, factor, code)
        put_pair(out, words[0], (token, tokens), (head, heads, width, own))


@cute.jit
def put_pair(out: Any, word: Any, rows_: tuple[Any, Any], place: tuple[Any, Any, Any, Any]) -> None:
    """Write both halves of a word, eight columns apart, if the token is there."""
    (token, tokens), (head, heads, width, own) = rows_, place
    if token < tokens:
        at = (Int64(token) * Int64(heads) + Int64(head)) * Int64(width) + Int64(own)
        out[at] = Uint16(word & Uint32(0xFFFF))
        out[at + 8] = Uint16(ops.shift_right(word, 16))


@cute.jit
def turn_part(
    tensors: HeadsTensors,
    place: tuple[Any, Any, Any, Any],
    turn: tuple[Any, Any, Any],
    inside: tuple[Any, Any],
) -> None:
    """Turn eight of a head's last 64 values, and write them behind its sums."""
    (of_row, group, width, out_width), (rTurn, supposed, token) = place, turn
    turns, positions = inside
    if turns:
        rWords = registers_of(SLOT_WORDS, 1)
        last = of_row * Int64(width // CHUNK) + Int64(width // CHUNK - TURNED + group)
        cute.autovec_copy(tensors.heads[None, last], rWords[None, 0])
        position = Int64(tensors.positions[token])
        correct_turn(tensors.turns, rTurn, (position, group), (turns, positions), supposed)
        put(rWords, 0, turned_words(numbers_of(words_at(rWords, 0)), rTurn, back=False))
        to = of_row * Int64(out_width // CHUNK) + Int64(out_width // CHUNK - TURNED + group)
        store(tensors.out_vectors, to, words_at(rWords, 0))


@cute.jit
def launch_heads(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on nine extents.

    T, H, N, K, width, width of out, positions, thread blocks of a head, splits.
    """
    tokens, heads, columns, inner, width, out_width, positions, parts, splits = extents
    inner, width = (cute.assume(extent, divby=facts.STEP) for extent in (inner, width))
    x, heads_words, weight, out, out_words, *more = pointers
    wide = cute.assume(heads * width, divby=facts.STEP)
    mX = cute.make_tensor(x, cute.make_layout((tokens, wide), stride=(Int64(wide), 1)))
    mW = cute.make_tensor(
        weight, cute.make_layout((heads * columns, inner), stride=(Int64(inner), 1))
    )
    of_matrix, of_tokens = layouts(form)
    feeds: Any = (mainloop.feed_of(mW, of_matrix, (form.span, facts.STEP)),)
    if cutlass.const_expr(form.at_once == 0):
        feeds = (*feeds, mainloop.feed_of(mX, of_tokens, (facts.MOST_TOKENS, facts.STEP)))
    turns: Any = None
    of_rows: Any = None
    scale: Any = None
    if cutlass.const_expr(form.turned):
        turns, of_rows = vectors(more[0], rows.PAIRS_OF_LANE), vectors(more[1], 0)
        more = more[2:]
    if cutlass.const_expr(form.decoded):
        scale = vectors(more[0], 0)
        more = more[1:]
    merged: Any = None
    if cutlass.const_expr(form.at_once > 0):
        sums, stats = (Int64(pointer.toint()) for pointer in more)
        merged = merging.MergeAddresses(sums, stats, Int64(0), Int64(0), Int64(0))
    tensors = HeadsTensors(
        vectors(out, 0), vectors(out_words, SLOT_WORDS), vectors(heads_words, SLOT_WORDS),
        turns, of_rows, scale, merged,
    )  # fmt: skip
    numbers = (tokens, heads, width, out_width, positions, splits)
    heads_kernel(feeds, tensors, numbers, form).launch(
        grid=[parts, heads, 1],
        block=[facts.THREADS, 1, 1],
        min_blocks_per_mp=facts.BLOCKS,
        preferred_smem_carveout=WHOLE_CARVEOUT,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------

_Operand = Operand[HeadsProblem]
_TURNED = Presence[Any](
    lambda of: bool(of.turned if isinstance(of, HeadsForm) else of.positions),
    "Give it for keys, whose last values are turned.",
)
_DECODED = Presence[Any](lambda of: of.decoded, "Give it where values are quantised.")
_APART = Presence[Any](
    lambda of: bool(of.at_once if isinstance(of, HeadsForm) else of.splits),
    "Give them where splits are merged.",
)
_WHOLE = Presence[Any](
    lambda of: not (of.at_once if isinstance(of, HeadsForm) else of.splits),
    "Give it where nothing is merged.",
)
_SPLITS = Storage(Uint8, torch.float32, 16, assumed=4)
_MATRIX = Storage(BFloat16, torch.bfloat16, TMA_ALIGNMENT)
_VALUES = Storage(BFloat16, torch.bfloat16, TMA_ALIGNMENT, views=((Uint32, 16),))
_OUT = Storage(Uint16, torch.bfloat16, 16, views=((Uint32, 16),))
KERNEL = Kernel[HeadsProblem, HeadsForm](
    entry=launch_heads,
    operands=(
        _Operand("x", _VALUES, lambda p: (p.tokens, p.heads, p.width), _WHOLE, label="heads"),
        _Operand("weight", _MATRIX, lambda p: (p.heads * p.columns, p.inner)),
        _Operand("out", _OUT, lambda p: (p.tokens, p.heads, p.out_width), output=True),
        _Operand(
            "turns", Storage(Uint32, torch.float32, 16),
            lambda p: (p.positions, rows.TABLE_WIDTH), _TURNED, passed=False,
        ),
        _Operand(
            "positions", Storage(Int64, torch.int64, 8), lambda p: (p.tokens,), _TURNED,
            passed=False,
        ),
        _Operand(
            "decode_scale", Storage(Float32, torch.float32, 4), lambda _: (1,), _DECODED,
            passed=False, checked=as_vector,
        ),
        _Operand(
            "sums", _SPLITS, lambda p: (p.tokens, p.splits, p.heads, p.width), _APART,
            passed=False,
        ),
        _Operand(
            "stats", _SPLITS, lambda p: (p.tokens, p.splits, p.heads, 2), _APART, passed=False,
        ),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * 9,),
    numbers=lambda of: (
        (
            of.problem.tokens, of.problem.heads, of.problem.columns, of.problem.inner,
            of.problem.width, of.problem.out_width, of.problem.positions,
            facts.parts_of(of.problem), of.problem.splits,
        ),
    ),
    work=lambda problem: problem.tokens,
    target=SM90A,
)  # fmt: skip
compile_form = KERNEL.compile_form
