"""mHC for few tokens: add up the projection, mix, collapse, norm; quantise and decode the row.

One source for sm_90a and sm_100a. A token has a cluster of thread blocks, each with the columns of
one warp of RMSNorm's lanes; a thread has half a block of 16 values.
  1. Warps add up groups of the projection's partial sums, and give each to all thread blocks.
  2. After a barrier of the cluster every warp adds groups to the whole, a lane a column, and knows
     the gates. One more warp of the first thread block computes post and mix meanwhile.
  3. Four streams are collapsed; sums of squares are folded as RMSNorm folds them, and exchanged.
  4. After the second barrier each thread norms its values, and quantises and decodes them, as often
     as wanted, with a scale of its own each time.
Bits are those of simt_mhc_project, simt_mhc, simt_rmsnorm and simt_quantise_nvfp4 one by one.

Never waits for the GPU, so it may be captured in a graph. Shape letters as in mhc_few_problem.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import (
    Scaling,
    block_amax,
    half_code_word,
    numbers_of,
    nvfp4_values,
    rounded_words,
    scale_code_of,
    scaling_of,
    square_root,
    store,
    vectors,
    words_of,
)
from degarble.kernels.primitives.quantise_problem import BLOCK
from degarble.kernels.rows import cluster_norm, mhc_problem, simt_mhc
from degarble.kernels.rows import mhc_few_problem as facts
from degarble.kernels.rows import problem as norms
from degarble.kernels.rows.cluster_norm import address_of, give
from degarble.kernels.rows.mhc_few_problem import (
    MOST_DECODED,
    MhcNormForm,
    MhcNormProblem,
)
from degarble.kernels.rows.mhc_problem import (
    CHUNK_VALUES,
    COEFFICIENTS,
    LINE,
    MOST_GROUPS,
    SQUARES,
    STREAMS,
)
from degarble.kernels.rows.simt_mhc_project import in_spans, in_turn, lines_of
from degarble.kernels.runtime.kernel import (
    Kernel,
    LaunchContext,
    Operand,
    Presence,
    Storage,
    as_vector,
)
from degarble.kernels.runtime.operands import DTYPES
from degarble.kernels.runtime.pdl import EARLY, fetch_line, fetch_weights, follow

WORDS = CHUNK_VALUES // 2
SCALES = 3  # of pre, post and mix


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


class CoefficientTensors(NamedTuple):
    """What simt_mhc's coefficients read, from shared memory, and write."""

    products: Any
    squares: Any
    base: Any
    scale: Any
    post: Any
    mix: Any


class NormShared(NamedTuple):
    """Shared memory of a thread block."""

    groups: Any  # float32 [16, 32], of the cluster
    lanes: Any  # float32 [32], sums of squares of this thread block's lanes
    totals: Any  # float32 [16], of the cluster's thread blocks; absent ones stay 0
    whole: Any  # float32 [32], products and squares
    told: Any  # float32 [32], base and behind it scale, of the warp that mixes


def shared_memory() -> NormShared:
    """Allocate the shared memory, at the same places in every thread block."""
    memory = cutlass.memory.SmemAllocator()
    groups = memory.allocate_tensor(Float32, cute.make_layout((LINE, MOST_GROUPS)), 128)
    lanes = memory.allocate_tensor(Float32, cute.make_layout(norms.LANES), 128)
    totals = memory.allocate_tensor(Float32, cute.make_layout(norms.MOST_WARPS), 128)
    whole, told = (memory.allocate_tensor(Float32, cute.make_layout(LINE), 128) for _ in range(2))
    return NormShared(groups, lanes, totals, whole, told)


@cute.jit
def add_groups(
    tensors: MhcNormTensors,
    shared: NormShared,
    place: tuple[Any, Any, Any],
    pieces: Any,
    form: cutlass.Constexpr,
) -> None:
    """Add up a warp's groups of partial sums, a lane a column, and give them to the cluster."""
    token, rank, (warp, lane) = place
    for turn in cutlass.range_constexpr(form.turns):
        group = (turn * form.cluster + rank) * cluster_norm.WARPS + warp
        if group < MOST_GROUPS:
            first = group * form.in_group
            between = (first, ops.minimum(first + form.in_group, pieces))
            total = in_turn(lines_of(tensors, (token, lane, pieces), between, form.in_group))
            address = address_of(shared.groups, group * LINE + lane)
            for other in cutlass.range_constexpr(form.cluster):
                give(address, total, other)


def column_sum(shared: NormShared, lane: Any) -> Any:
    """Return a lane's column of the projection: a product, or in lane SQUARES the squares."""
    return in_spans([Float32(shared.groups[lane, group]) for group in range(MOST_GROUPS)])


def gates_of(whole: Any, told: tuple[Any, Any], numbers: tuple[Any, ...]) -> list[Any]:
    """Return the weights of the streams in the collapse, from the columns of a warp's lanes.

    `told` has the base of a lane's stream, and the scale of the gates.
    """
    (base, scale), (_, share, norm_epsilon, epsilon) = told, numbers
    squares = Float32(cute.arch.shuffle_sync(whole, offset=SQUARES))
    primitives = simt_mhc.PROCESSOR
    factor = mhc_problem.norm_factor(squares, share, norm_epsilon, primitives)
    logit = mhc_problem.logit(whole, factor, scale, base)
    own = ops.add_rn(mhc_problem.gate(logit, primitives), epsilon)
    return [Float32(cute.arch.shuffle_sync(own, offset=other)) for other in range(STREAMS)]


@cute.jit
def keep_told(tensors: MhcNormTensors, shared: NormShared, lane: Any) -> None:
    """Read base and scale by a lane each, so that they are there when the columns are."""
    if lane < SQUARES:
        shared.told[lane] = tensors.base[lane % STREAMS, lane // STREAMS]
    elif lane < SQUARES + SCALES:
        shared.told[lane] = tensors.scale[lane - SQUARES]


@cute.jit
def mixed(
    tensors: MhcNormTensors,
    shared: NormShared,
    place: tuple[Any, Any],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Compute post and mix of a token by one warp, whose first four lanes write them."""
    token, lane = place
    shared.whole[lane] = column_sum(shared, lane)
    cute.arch.sync_warp()
    of_four = cute.make_layout((STREAMS, LINE // STREAMS), stride=(1, STREAMS))
    of_columns, of_told = shared.whole.iterator, shared.told.iterator
    told = CoefficientTensors(
        products=cute.make_tensor(of_columns, of_four),
        squares=cute.make_tensor(of_columns + SQUARES, cute.make_layout(1)),
        base=cute.make_tensor(of_told, of_four),
        scale=cute.make_tensor(of_told + SQUARES, cute.make_layout(SCALES)),
        post=tensors.post,
        mix=tensors.mix,
    )
    # Further lanes take part in shuffles, and write nothing.
    wanted = token + ops.select(lane < STREAMS, Int32(0), Int32(1 << 30))
    own = (wanted, Int32(1 << 30), lane % STREAMS, Int32(0))
    simt_mhc.put_coefficients(told, own, numbers, form.mixing)


def weights_of(registers: Any, form: MhcNormForm) -> list[Any]:
    """Return the norm's float32 weights of a chunk."""
    words = words_of(registers)
    return [ops.number_of(word) for word in words] if form.weight == "fp32" else numbers_of(words)


def decoded_words(words: list[Any], scaling: Scaling, form: MhcNormForm) -> list[Any]:
    """Quantise half a block to NVFP4 with its neighbour's half; return what its codes stand for."""
    largest = block_amax(words)
    largest = ops.maximum(largest, Float32(cute.arch.shuffle_sync_bfly(largest, offset=1)))
    code = scale_code_of(largest, scaling.share)
    factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
    return nvfp4_values(half_code_word(words, factor, form.target), code)


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
    shared = shared_memory()
    if thread < norms.MOST_WARPS:
        shared.totals[thread] = Float32(0.0)
    if (thread == 0) & (rank == 0):
        size = CHUNK_VALUES * (4 if form.weight == "fp32" else 2)
        fetch_weights(tensors.weight.iterator.toint(), Uint32(chunks * size))
        for each in (tensors.base, tensors.scale, *tensors.decode_scales):
            fetch_line(each.iterator.toint())
    # Others may write here once all have begun.
    cute.arch.cluster_arrive()
    follow()
    if warp < cluster_norm.WARPS:
        chunk = 2 * cluster_norm.block_of(thread, rank, lanes) + thread % 2
        exists = chunk < chunks
        rStreams = cute.make_rmem_tensor(cute.make_layout((WORDS, STREAMS)), Uint32)
        rStreams.fill(0)
        of_weight = CHUNK_VALUES if form.weight == "fp32" else WORDS
        rWeight = cute.make_rmem_tensor(of_weight, Uint32)
        rWeight.fill(0)
        first = Int64(token) * STREAMS * Int64(chunks) + Int64(chunk)
        if exists:
            for stream in cutlass.range_constexpr(STREAMS):
                at = first + Int64(stream * chunks)
                cute.autovec_copy(tensors.streams[None, at], rStreams[None, stream])
            cute.autovec_copy(tensors.weight[None, chunk], rWeight)
        # Read before the first barrier, so that nothing is waited for behind it.
        told = Float32(tensors.base[lane % STREAMS, 0]), Float32(tensors.scale[0])
        scalings = [scaling_of(Float32(scale[0]), None) for scale in tensors.decode_scales]
        cute.arch.cluster_wait()
        add_groups(tensors, shared, (token, rank, (warp, lane)), pieces, form)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        gates = gates_of(column_sum(shared, lane), told, numbers)
        read = [words_of(rStreams[None, stream]) for stream in range(STREAMS)]
        words = simt_mhc.collapsed(read, gates)
        total = norms.half_sum(numbers_of(words))
        of_sums = (shared.lanes, shared.totals)
        total = cluster_norm.total_of(total, (thread, rank), of_sums, form.cluster)
        columns = Float32(Int32(chunks * CHUNK_VALUES))
        factor = norms.factor_of(total, columns, numbers[2], square_root)
        own = Int64(token) * Int64(chunks) + Int64(chunk)
        pairs = zip(numbers_of(words), weights_of(rWeight, form), strict=True)
        made = rounded_words([norms.normed(x, weight, factor) for x, weight in pairs])
        for scaling, decoded in zip(scalings, tensors.decoded, strict=True):
            values = decoded_words(made, scaling, form)
            if exists:
                store(decoded, own, values)
        if exists:
            store(tensors.out, own, words)
            store(tensors.normed, own, made)
    else:
        if rank == 0:
            keep_told(tensors, shared, lane)
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive()
        if rank == 0:
            mixed(tensors, shared, (token, lane), numbers, form)
        cute.arch.cluster_wait()


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
