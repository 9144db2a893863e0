"""mHC for few tokens: spread a sublayer's output over the streams, and project the new streams.

One source for sm_90a and sm_100a. A warp is a thread block and has 64 columns of one stream, a
piece of the projection's K. Its part of the weight is on its way to shared memory before the
previous launch has ended; then its lanes compute the new values of those columns from all four
streams and what the sublayer made, which is a row, or the sum of the rows of a token's experts. The
values go to memory and, as the tokens of a stage, to shared memory. The sums of the piece are those
of simt_mhc_project, the values those of simt_mhc and of moe's combine.

Never waits for the GPU, so it may be captured in a graph. Shape letters as in mhc_few_problem.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.primitives.device_words import (
    FLAT,
    computed_here,
    emit,
    fill,
    numbers_of,
    rounded_words,
    store,
    vectors,
)
from degarble.kernels.rows import mhc_few_problem as facts
from degarble.kernels.rows import simt_mhc_project as projection
from degarble.kernels.rows.mhc_few_problem import ROWS, OnwardForm, OnwardProblem
from degarble.kernels.rows.mhc_problem import (
    BF16_PARTS,
    LINE,
    ROW_BYTES,
    STEP,
    STREAMS,
    InnerCut,
    chunk_place,
    weighted,
)
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY, fetch_line, let_follow, wait_for_front

LANES = 32


# ---- device --------------------------------------------------------------------------------------


class OnwardTensors(NamedTuple):
    """Kernel's tensors; words of streams and rows are viewed as vectors of the form's words."""

    streams: Any  # BF16 [T, S, D]
    made: Any  # BF16 [T, D], a sublayer's output, or rows of experts [R, D]
    post: Any  # float32 [T, S]
    mix: Any  # float32 [T, S, S]
    weight: Any  # BF16 [3, 24, S D]
    places: Any  # int32 [T, K], the rows of a token's experts
    weights: Any  # float32 [T, K]
    shared: Any  # BF16 [T, D]
    out: Any  # BF16 [T, S, D]
    pairs: Any  # the partial sums, two at a time
    partials: Any  # float32 [T, pieces, 32]
    summed: Any  # BF16 [T, D]


class Asked(NamedTuple):
    """Where a lane's operands lie, computed before the wait."""

    streams: Any  # of each stream
    made: Any  # the output, or the shared expert's
    mix: Any  # of each stream
    post: Any
    rows: Any  # of the first expert's row
    weights: Any  # of the first expert's weight


def places_of(tensors: OnwardTensors, place: tuple[Any, Any, Any], of_row: Any, form: Any) -> Asked:
    """Return where a lane's operands lie; `place` is token, stream and vector, `of_row` vectors."""
    token, stream, vector = place
    size = 4 * form.words
    own = Int64(token) * Int64(of_row) + Int64(vector)
    first = tensors.streams.iterator.toint() + (own + Int64(token) * (3 * Int64(of_row))) * size
    made = tensors.shared if form.source == ROWS else tensors.made
    mix = tensors.mix.iterator.toint() + Int64(token * (STREAMS * STREAMS) + stream) * 4
    of_chosen = Int64(token * form.chosen) * 4
    return Asked(
        [computed_here(first + Int64(row) * (Int64(of_row) * size)) for row in range(STREAMS)],
        computed_here(made.iterator.toint() + own * size),
        computed_here(mix),
        computed_here(tensors.post.iterator.toint() + Int64(token * STREAMS + stream) * 4),
        computed_here(tensors.places.iterator.toint() + of_chosen),
        computed_here(tensors.weights.iterator.toint() + of_chosen),
    )


def words_from(address: Any, count: int) -> list[Any]:
    """Read one or four words; the request is made where this stands.

    The compiler would put off loads until what stands in front of their first use has arrived.
    """
    return [ptx.global_word(address)] if count == 1 else ptx.global_words(address, count)


def words_apart(address: Any, apart: int, count: int) -> list[Any]:
    """Read words that lie so many bytes apart."""
    return [
        emit(f"ld.global.b32 {{$w0}}, [{{$r0}} + {i * apart}];", Uint32, address)
        for i in range(count)
    ]


def numbers_apart(address: Any, apart: int, count: int) -> list[Any]:
    """Read float32 numbers that lie so many bytes apart."""
    return [ops.number_of(word) for word in words_apart(address, apart, count)]


def summed(tensors: Any, chosen: tuple[Any, Any], place: tuple[Any, Any], words: int) -> list[Any]:
    """Return the weighted sum of experts' rows in their order, in float32.

    `chosen` has rows and weights; `place` is the vector of a row, and the vectors of a row.
    """
    vector, of_row = place
    start = tensors.made.iterator.toint()
    rows = [
        words_from(
            start + (Int64(cutlass.max(row, 0)) * Int64(of_row) + vector) * (4 * words), words
        )
        for row in chosen[0]
    ]
    sums = [Float32(0.0)] * (2 * words)
    for row, weight, read in zip(*chosen, rows, strict=True):
        numbers = [ops.multiply_rn(number, weight) for number in numbers_of(read)]
        # What lies in the first row is read where a slot has none, and left out.
        sums = [
            ops.select(row >= 0, ops.add_rn(total, number), total)
            for total, number in zip(sums, numbers, strict=True)
        ]
    return sums


def spread_words(weights: list[Any], read: list[list[Any]]) -> list[Any]:
    """Return a stream's new words from those of all streams and of the output."""
    numbers = [numbers_of(words) for words in read]
    return rounded_words([weighted(weights, list(each)) for each in zip(*numbers, strict=True)])


@cute.jit
def fetch_streams(
    tensors: OnwardTensors, place: tuple[Any, Any, Any], of_row: Any, tokens: Any
) -> None:
    """Ask L2 for what earlier launches than the last one made; `place` is piece, of a stream, lane.

    A lane has a stream of a token, a line of it each; the next lanes have post and mix.
    """
    piece, per_stream, lane = place
    if lane < tokens * STREAMS:
        start = tensors.streams.iterator.toint() + Int64(piece % per_stream) * ROW_BYTES
        fetch_line(start + Int64(lane) * (Int64(of_row) * (16 // STREAMS)))
    token = lane - tokens * STREAMS
    if (token >= 0) & (token < tokens):
        fetch_line(tensors.mix.iterator.toint() + Int64(token) * (4 * STREAMS * STREAMS))
        fetch_line(tensors.post.iterator.toint() + Int64(token) * (4 * STREAMS))


@cute.kernel
def onward_kernel(
    tensors: OnwardTensors, extents: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Compute the new values of 64 columns of a stream, and their partial sums."""
    thread, _, _ = cute.arch.thread_idx()
    piece, _, _ = cute.arch.block_idx()
    lane, piece = Int32(thread), Int32(piece)
    tokens, of_row, per_stream = extents  # chunks of a row of the weight, pieces of a stream
    let_follow()
    project = form.project
    memory = cutlass.memory.SmemAllocator()
    stage = memory.allocate_tensor(
        Uint32, cute.make_layout(project.stage_rows * ROW_BYTES // 4), 128
    )
    base = Int32(stage.iterator.toint())
    feed = projection.feed_of(tensors, base, (Int32(0), Int32(0), of_row), project)
    # No token is copied, so their rows are zeros until they are computed.
    projection.ask(feed, (piece, Int32(0)), project)
    cute.arch.cp_async_commit_group()
    fetch_streams(tensors, (piece, per_stream, lane), of_row, tokens)
    stream, token = piece // per_stream, lane // form.lanes
    vectors_of_row = per_stream * form.lanes
    vector = piece % per_stream * form.lanes + lane % form.lanes
    places = places_of(tensors, (token, stream, vector), vectors_of_row, form)
    rOwn = cute.make_rmem_tensor(form.words, Uint32)
    rOwn.fill(0)
    wait_for_front()
    if token < tokens:
        # All loads are issued before the first result is needed, those that name rows first.
        chosen = (
            [Int32(word) for word in words_apart(places.rows, 4, form.chosen)],
            numbers_apart(places.weights, 4, form.chosen),
        )
        read = [words_from(each, form.words) for each in (places.made, *places.streams)]
        weights = numbers_apart(places.mix, 4 * STREAMS, STREAMS)
        weights += numbers_apart(places.post, 4, 1)
        own = Int64(token) * Int64(vectors_of_row) + Int64(vector)
        made, *of_streams = read
        if cutlass.const_expr(form.source == ROWS):
            sums = summed(tensors, chosen, (Int64(vector), vectors_of_row), form.words)
            both = zip(sums, numbers_of(made), strict=True)
            made = rounded_words([ops.add_rn(total, number) for total, number in both])
            if stream == 0:
                store(tensors.summed, own, made)
        first = own + Int64(token) * (3 * Int64(vectors_of_row))
        new = spread_words(weights, [*of_streams, made])
        store(tensors.out, first + Int64(stream) * Int64(vectors_of_row), new)
        fill(rOwn, new)
    # Zeros have landed where tokens go now.
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    layout = cute.make_layout((form.words, FLAT), stride=(1, form.words))
    in_vectors = cute.make_tensor(stage.iterator, layout)
    if token < tokens:
        cute.autovec_copy(rOwn, in_vectors[None, row_place(token, lane % form.lanes, form)])
    cute.arch.sync_threads()

    of_piece, group = projection.no_sums(project), projection.no_sums(project)
    projection.add_stage(base, of_piece, project)
    projection.add_piece(group, of_piece)
    pieces = per_stream * STREAMS
    projection.store_sums(tensors, group, (piece, pieces, tokens, Int32(0)), project)


def row_place(token: Any, part: Any, form: OnwardForm) -> Any:
    """Return where a lane's words of a token lie in the stage, in vectors of its words."""
    vectors_of_chunk = 4 // form.words
    chunk = chunk_place(token, part // vectors_of_chunk)
    return token * form.lanes + chunk * vectors_of_chunk + part % vectors_of_chunk


@cute.jit
def launch_onward(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on tokens, chunks of a row of the weight, pieces of a stream, pieces."""
    streams, made, post, mix, weight, places, weights, shared, out, partials, summed = pointers
    words = form.words
    tensors = OnwardTensors(
        vectors(streams, words), vectors(made, words), vectors(post, 0), vectors(mix, 0),
        vectors(weight, 0), vectors(places, 0), vectors(weights, 0), vectors(shared, words),
        vectors(out, words), vectors(partials, 2), vectors(partials, 0), vectors(summed, words),
    )  # fmt: skip
    tokens, of_row, per_stream, pieces = extents
    onward_kernel(tensors, (tokens, of_row, per_stream), form).launch(
        grid=[pieces, 1, 1], block=[LANES, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[OnwardProblem, OnwardForm]) -> tuple[Any, ...]:
    problem = of.problem
    inner = problem.project.inner
    return ((problem.tokens, inner // 8, problem.width // STEP, InnerCut(inner).pieces),)


_Operand = Operand[OnwardProblem]
_VALUES, _NUMBERS = Storage(Uint32, torch.bfloat16, 16), Storage(Float32, torch.float32, 16)
_OF_ROWS = Presence[Any](
    lambda of: of.source == ROWS, "Give it where the output is a sum of experts' rows."
)
_APART = Presence[Any](
    lambda p: p.source == ROWS and not p.rides,
    "Give it where the shared expert's rows are not among the experts'.",
)
KERNEL = Kernel[OnwardProblem, OnwardForm](
    entry=launch_onward,
    operands=(
        _Operand("streams", _VALUES, lambda p: (p.tokens, STREAMS, p.width)),
        _Operand(
            "made",
            _VALUES,
            lambda p: (p.rows if p.source == ROWS else p.tokens, p.width),
            label="output of a sublayer",
        ),
        _Operand("post", _NUMBERS, lambda p: (p.tokens, STREAMS)),
        _Operand("mix", _NUMBERS, lambda p: (p.tokens, STREAMS, STREAMS)),
        _Operand(
            "split",
            _VALUES,
            lambda p: (BF16_PARTS, p.project.weight_rows, p.project.inner),
            label="weight",
        ),
        _Operand(
            "places",
            Storage(Int32, torch.int32, 4),
            lambda p: (p.tokens * p.chosen,),
            _OF_ROWS,
        ),
        _Operand(
            "weights",
            Storage(Float32, torch.float32, 4),
            lambda p: (p.tokens, p.chosen),
            _OF_ROWS,
            label="routing weights",
        ),
        _Operand(
            "shared",
            _VALUES,
            lambda p: (p.tokens, p.width),
            _APART,
            label="shared expert's output",
            address_of="made",
        ),
        _Operand("out", _VALUES, lambda p: (p.tokens, STREAMS, p.width), output=True),
        _Operand(
            "partials",
            _NUMBERS,
            lambda p: (p.tokens, InnerCut(p.project.inner).pieces, LINE),
            output=True,
            label="partial sums",
        ),
        _Operand(
            "summed",
            _VALUES,
            lambda p: (p.tokens, p.width),
            _OF_ROWS,
            output=True,
            label="sum of experts' rows",
        ),
    ),
    choose_form=facts.choose_onward_form,
    kinds=((Int32,) * 4,),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
