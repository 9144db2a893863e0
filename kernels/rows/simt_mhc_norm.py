"""mHC for few tokens: add up the projection, mix, collapse, norm; quantise and decode the row.

One source for sm_90a and sm_100a. A token has a cluster of thread blocks, each with the columns of
one warp of RMSNorm's lanes; a thread has half a block of 16 values.
  1. Warps add up groups of the projection's partial sums, a thread block a span of four groups,
     and give it to all thread blocks (cluster_norm says how).
  2. When all spans have come every warp adds them to the whole, a lane a column, and knows the
     gates. One more warp of the first thread block computes mix meanwhile.
  3. Four streams are collapsed; sums of squares are folded as RMSNorm folds them, and exchanged.
  4. Each thread norms its values, and quantises and decodes them, as often as wanted, with a scale
     of its own each time.
Bits are those of simt_mhc_project, simt_mhc, simt_rmsnorm and simt_quantise_nvfp4 one by one.

Never waits for the GPU, so it may be captured in a graph. Shape letters as in mhc_few_problem.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import (
    block_amax,
    coded_scale,
    computed_here,
    decoding_of,
    inverse_rn,
    numbers_of,
    nvfp4_rounded,
    rounded_words,
    square_root,
    store,
    vectors,
    words_of,
)
from degarble.kernels.primitives.quantise_problem import BLOCK
from degarble.kernels.rows import cluster_norm, mhc_problem, simt_mhc
from degarble.kernels.rows import mhc_few_problem as facts
from degarble.kernels.rows import problem as norms
from degarble.kernels.rows.cluster_norm import address_of, awaited, clear, give
from degarble.kernels.rows.mhc_few_problem import (
    MOST_DECODED,
    MhcNormForm,
    MhcNormProblem,
)
from degarble.kernels.rows.mhc_problem import (
    CHUNK_VALUES,
    COEFFICIENTS,
    LINE,
    MOST_SPANS,
    SPAN,
    SQUARES,
    STREAMS,
)
from degarble.kernels.rows.simt_mhc_project import PartialLines, in_turn, lines_at, lines_of
from degarble.kernels.runtime.kernel import (
    Kernel,
    LaunchContext,
    Operand,
    Presence,
    Storage,
    as_vector,
)
from degarble.kernels.runtime.operands import DTYPES
from degarble.kernels.runtime.pdl import (
    EARLY,
    fetch_line,
    fetch_weights,
    let_follow,
    wait_for_front,
)

WORDS = CHUNK_VALUES // 2
GATES = 2  # groups of columns, pre and post; behind them the rows of mix


# ---- device --------------------------------------------------------------------------------------


class MhcNormTensors(NamedTuple):
    """Kernel's tensors: vectors of 16 bytes, or flat."""

    streams: Any  # BF16 [T, S, D]
    partials: Any  # float32 [T, pieces, 32]
    base: Any  # float32 [24], vectors of four
    scale: Any  # float32 [3]
    weight: Any  # BF16 or float32 [D]
    decode_scales: Any  # float32 [1] each
    post: Any  # float32 [T, S], vectors of four
    mix: Any  # float32 [T, S, S], vectors of four
    out: Any  # BF16 [T, D], collapsed
    normed: Any  # BF16 [T, D]
    decoded: Any  # BF16 [T, D] each


class NormShared(NamedTuple):
    """Shared memory of a thread block."""

    groups: Any  # float32 [turns, 32, 4], a column's sums of this thread block's groups
    spans: Any  # float32 [32, 4], a column's sums of the cluster's spans
    lanes: Any  # float32 [32, 8], sums of squares of lanes, of the cluster's thread blocks


def shared_memory(form: MhcNormForm) -> NormShared:
    """Allocate the shared memory, at the same places in every thread block."""
    memory = cutlass.memory.SmemAllocator()
    of_groups = cute.make_layout((SPAN, LINE, form.turns))
    groups = memory.allocate_tensor(Float32, of_groups, 128)
    spans = memory.allocate_tensor(Float32, cute.make_layout((MOST_SPANS, LINE)), 128)
    lanes = memory.allocate_tensor(Float32, cute.make_layout(cluster_norm.PLACES), 128)
    return NormShared(groups, spans, lanes)


@cute.jit
def begin(shared: NormShared, thread: Any) -> None:
    """Clear what the cluster will give, and meet its thread blocks, which may give it then."""
    if thread < MOST_SPANS * LINE:
        clear(address_of(shared.spans, thread))
        for first in cutlass.range_constexpr(0, cluster_norm.PLACES, MOST_SPANS * LINE):
            clear(address_of(shared.lanes, first + thread))
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def group_lines(
    tensors: MhcNormTensors, place: tuple[Any, Any, Any], pieces: Any, form: MhcNormForm
) -> list[PartialLines]:
    """Return where a warp's groups of partial sums lie, a lane a column; none without a span."""
    token, rank, (warp, lane) = place
    found = []
    for turn in range(form.turns):
        first = ((turn * form.cluster + rank) * SPAN + warp) * form.in_group
        between = (first, ops.minimum(first + form.in_group, pieces))
        found.append(lines_at(tensors, (token, lane, pieces), between))
    return found


@cute.jit
def give_spans(
    shared: NormShared,
    lines: list[list[Any]],
    place: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Add up a thread block's groups, a warp each, and then their spans; give those to all."""
    rank, warp, lane = place
    for turn in cutlass.range_constexpr(form.turns):
        shared.groups[warp, lane, turn] = in_turn(lines[turn])
    cute.arch.barrier(barrier_id=cluster_norm.BARRIER, number_of_threads=cluster_norm.THREADS)
    for turn in cutlass.range_constexpr(form.turns):
        span = turn * form.cluster + rank
        if span < MOST_SPANS:
            rGroups = cute.make_rmem_tensor(SPAN, Float32)
            cute.autovec_copy(shared.groups[None, lane, turn], rGroups)
            total = in_turn([Float32(rGroups[group]) for group in range(SPAN)])
            address = address_of(shared.spans, lane * MOST_SPANS + span)
            for number in cutlass.range_constexpr(-(-form.cluster // cluster_norm.WARPS)):
                other = number * cluster_norm.WARPS + warp
                if other < form.cluster:
                    give(address, total, other)


def column_sum(shared: NormShared, lane: Any) -> Any:
    """Return a lane's column of the projection: a product, or in lane SQUARES the squares."""
    return in_turn(awaited(address_of(shared.spans, lane * MOST_SPANS), MOST_SPANS))


def gates_of(whole: Any, told: tuple[Any, Any], numbers: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Return the weights of the streams in the collapse, and the gate of a lane's column.

    `told` has the base of a lane's column, and the scale of its group: pre, and behind it post.
    """
    (base, scale), (_, share, norm_epsilon, epsilon) = told, numbers
    squares = Float32(cute.arch.shuffle_sync(whole, offset=SQUARES))
    primitives = simt_mhc.PROCESSOR
    factor = mhc_problem.norm_factor(squares, share, norm_epsilon, primitives)
    logit = mhc_problem.logit(whole, factor, scale, base)
    gate = mhc_problem.gate(logit, primitives)
    own = ops.add_rn(gate, epsilon)
    weights = [Float32(cute.arch.shuffle_sync(own, offset=other)) for other in range(STREAMS)]
    return weights, gate


@cute.jit
def mixed(
    tensors: MhcNormTensors,
    shared: NormShared,
    place: tuple[Any, Any],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Compute mix of a token by one warp; four lanes share it, and the first four write it."""
    token, lane = place
    iterations, share, norm_epsilon, epsilon = numbers
    stream, primitives = lane % STREAMS, simt_mhc.PROCESSOR
    # Read before the columns are awaited.
    base = simt_mhc.loaded_numbers(tensors.base, GATES + stream)
    scale = Float32(tensors.scale[GATES])
    whole = column_sum(shared, lane)
    squares = Float32(cute.arch.shuffle_sync(whole, offset=SQUARES))
    factor = mhc_problem.norm_factor(squares, share, norm_epsilon, primitives)
    first = (GATES + stream) * STREAMS
    logits = [
        mhc_problem.logit(
            Float32(cute.arch.shuffle_sync(whole, offset=first + number)), factor, scale, of_base
        )
        for number, of_base in enumerate(base)
    ]
    told = (iterations, epsilon)
    made = simt_mhc.rows_of_mix([logits], [stream], told, form.mixing)
    if lane < STREAMS:
        simt_mhc.store_four(tensors.mix, token * STREAMS + stream, made[0])


def weights_of(registers: Any, form: MhcNormForm) -> list[Any]:
    """Return the norm's float32 weights of a chunk."""
    words = words_of(registers)
    return [ops.number_of(word) for word in words] if form.weight == "fp32" else numbers_of(words)


@cute.kernel
def norm_kernel(  # noqa: PLR0915  one token: what a thread holds would have to be handed on
    tensors: MhcNormTensors,
    extents: tuple[Int32, ...],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Add up, mix and norm a token in a cluster of thread blocks."""
    thread, _, _ = cute.arch.thread_idx()
    rank, token, _ = cute.arch.block_idx()
    thread, rank, token = Int32(thread), Int32(rank), Int32(token)
    lane, warp = thread % 32, thread // 32
    chunks, pieces, lanes = extents
    shared = shared_memory(form)
    let_follow()
    if (thread == 0) & (rank == 0):
        size = CHUNK_VALUES * (4 if form.weight == "fp32" else 2)
        fetch_weights(tensors.weight.iterator.toint(), Uint32(chunks * size))
        for each in (tensors.base, tensors.scale, *tensors.decode_scales):
            fetch_line(each.iterator.toint())
    begin(shared, thread)
    groups = group_lines(tensors, (token, rank, (warp, lane)), pieces, form)
    chunk = 2 * cluster_norm.block_of(thread, rank, lanes) + thread % 2
    own = computed_here(Int64(token) * Int64(chunks) + Int64(chunk))
    first = computed_here(Int64(token) * STREAMS * Int64(chunks) + Int64(chunk))
    wait_for_front()
    if warp < cluster_norm.WARPS:
        # First what sums wait for.
        lines = [lines_of(each, form.in_group) for each in groups]
        exists, group = chunk < chunks, lane // STREAMS % GATES
        rStreams = cute.make_rmem_tensor(cute.make_layout((WORDS, STREAMS)), Uint32)
        rStreams.fill(0)
        of_weight = CHUNK_VALUES if form.weight == "fp32" else WORDS
        rWeight = cute.make_rmem_tensor(of_weight, Uint32)
        rWeight.fill(0)
        if exists:
            for stream in cutlass.range_constexpr(STREAMS):
                at = first + Int64(stream * chunks)
                cute.autovec_copy(tensors.streams[None, at], rStreams[None, stream])
            cute.autovec_copy(tensors.weight[None, chunk], rWeight)
        # Read before sums are awaited, so that nothing else is waited for behind that.
        told = Float32(tensors.base[lane % STREAMS, group]), Float32(tensors.scale[group])
        scales = [Float32(scale[0]) for scale in tensors.decode_scales]
        give_spans(shared, lines, (rank, warp, lane), form)
        gates, of_column = gates_of(column_sum(shared, lane), told, numbers)
        if (thread // STREAMS == 1) & (rank == 0):
            tensors.post[lane % STREAMS, token] = ops.multiply_rn(of_column, 2.0)
        read = [words_of(rStreams[None, stream]) for stream in range(STREAMS)]
        words = simt_mhc.collapsed(read, gates)
        if exists:
            store(tensors.out, own, words)
        squares = norms.half_sum(numbers_of(words))
        cluster_norm.give_lane(squares, (thread, rank), shared.lanes, form.cluster)
        # Divided here, while sums of squares are on their way.
        decodings = [decoding_of(scale, inverse_rn) for scale in scales]
        total = cluster_norm.total_of(lane, shared.lanes, form.cluster)
        columns = Float32(Int32(chunks * CHUNK_VALUES))
        # The inverse is the rounded quotient of norms.factor_of.
        mean = norms.mean_of(total, columns)
        factor = inverse_rn(square_root(ops.add_rn(mean, numbers[2])))
        pairs = zip(numbers_of(words), weights_of(rWeight, form), strict=True)
        made = rounded_words([norms.normed(x, weight, factor) for x, weight in pairs])
        if exists:
            store(tensors.normed, own, made)
        if cutlass.const_expr(form.decoded > 0):
            largest = block_amax(made)  # of half a block; a neighbour has the other half
            other = Float32(cute.arch.shuffle_sync_bfly(largest, offset=1))
            largest = ops.maximum(largest, other)
            coded = [coded_scale(largest, decoding) for decoding in decodings]
            for (code, of_block), decoded in zip(coded, tensors.decoded, strict=True):
                values = nvfp4_rounded(made, of_block, code)
                if exists:
                    store(decoded, own, values)
    elif rank == 0:
        mixed(tensors, shared, (token, lane), numbers, form)


@cute.jit
def launch_norm(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on tokens, chunks of a row, partial sums of a token, lanes of the norm, iterations."""
    streams, partials, base, scale, weight, *scales, post, mix, out, normed = pointers[
        : 9 + form.decoded
    ]
    decoded = pointers[9 + form.decoded :]
    of_weight = CHUNK_VALUES if form.weight == "fp32" else WORDS
    tensors = MhcNormTensors(
        vectors(streams, WORDS), vectors(partials, 0), vectors(base, STREAMS), vectors(scale, 0),
        vectors(weight, of_weight), tuple(vectors(each, 0) for each in scales),
        vectors(post, STREAMS), vectors(mix, STREAMS), vectors(out, WORDS), vectors(normed, WORDS),
        tuple(vectors(each, WORDS) for each in decoded),
    )  # fmt: skip
    tokens, chunks, pieces, lanes, iterations = extents
    norm_kernel(tensors, (chunks, pieces, lanes), (iterations, *numbers), form).launch(
        grid=[form.cluster, tokens, 1],
        block=[cluster_norm.THREADS + facts.MIXING_THREADS, 1, 1],
        cluster=[form.cluster, 1, 1],
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[MhcNormProblem, MhcNormForm]) -> tuple[Any, ...]:
    problem = of.problem
    extents = (
        problem.tokens,
        problem.width // CHUNK_VALUES,
        problem.pieces,
        norms.lanes_of_row(problem.width),
        problem.iterations,
    )
    share = 1.0 / (STREAMS * problem.width)
    return extents, (share, problem.norm_epsilon, problem.epsilon)


_Operand = Operand[MhcNormProblem]
_VALUES, _NUMBERS = Storage(Uint32, torch.bfloat16, 16), Storage(Float32, torch.float32, 16)
_SCALE = Storage(Float32, torch.float32, 4)


def _weight(of: MhcNormProblem | MhcNormForm) -> Storage:
    return Storage(Uint32, DTYPES[of.weight], 32)


def _decoding(number: int) -> Presence[Any]:
    return Presence(lambda of: of.decoded > number, "The problem says how many rows are decoded.")


def _shape(problem: MhcNormProblem) -> tuple[int, int]:
    return problem.tokens, problem.width


KERNEL = Kernel[MhcNormProblem, MhcNormForm](
    entry=launch_norm,
    operands=(
        _Operand("streams", _VALUES, lambda p: (p.tokens, STREAMS, p.width)),
        _Operand(
            "partials",
            _NUMBERS,
            lambda p: (p.tokens, p.pieces, LINE),
            label="partial sums",
        ),
        _Operand("base", _NUMBERS, lambda _: (COEFFICIENTS,)),
        _Operand("scale", _SCALE, lambda _: (3,)),
        _Operand("weight", _weight, lambda p: (p.width,)),
        *(
            _Operand(
                f"decode_scale{number}",
                _SCALE,
                lambda _: (1,),
                _decoding(number),
                passed=False,
                checked=as_vector,
            )
            for number in range(MOST_DECODED)
        ),
        _Operand("post", _NUMBERS, lambda p: (p.tokens, STREAMS), output=True),
        _Operand("mix", _NUMBERS, lambda p: (p.tokens, STREAMS, STREAMS), output=True),
        _Operand("out", _VALUES, _shape, output=True, label="collapsed values"),
        _Operand("normed", _VALUES, _shape, output=True, label="normed values"),
        *(
            _Operand(
                f"decoded{number}",
                _VALUES,
                _shape,
                _decoding(number),
                output=True,
                passed=False,
                label="decoded values",
            )
            for number in range(MOST_DECODED)
        ),
    ),
    choose_form=facts.choose_mhc_norm_form,
    kinds=((Int32,) * 5, (Float32,) * 3),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form

assert BLOCK == 4 * WORDS, "half a block is a thread's"
