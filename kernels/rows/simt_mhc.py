"""mHC (hyper-connections) after its projection: gates, Sinkhorn, collapse of four streams, spread.

One source for sm_90a and sm_100a, a part of mhc_problem each:

* coefficients: pre, post [T, S] and mix [T, S, S] from products and squares. Four lanes a token, or
  two of many tokens, share its rows; every lane has all its powers. Four lanes read weights before
  the wait, and divide a column each.
* collapse, head: out[t] = sum_s pre[t, s] * streams[t, s]; a thread has a chunk of every stream.
* all: both in one launch. The first `leading` thread blocks compute coefficients, the others
  collapse and compute the gates that they need themselves, so no block waits for another. The bits
  are those of the separate parts.
* spreading: out[t, s] = sum_r mix[t, r, s] * streams[t, r] + post[t, s] * layer[t].

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
Shape letters: T tokens, S streams, D width.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import (
    FLAT,
    computed_here,
    emit,
    exponential,
    inverse_root,
    numbers_of,
    reciprocal,
    registers_of,
    rounded_words,
    store,
    vectors,
    words_at,
)
from degarble.kernels.rows import mhc_problem as facts
from degarble.kernels.rows.mhc_problem import CHUNK_VALUES, STREAMS, MhcMixForm, MhcMixProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import (
    EARLY,
    fetch_line,
    follow,
    let_follow,
    wait_for_front,
    wait_then_let_follow,
)

WORDS = CHUNK_VALUES // 2  # of two BF16 in a chunk


# ---- device --------------------------------------------------------------------------------------


class MixTensors(NamedTuple):
    """Kernels' tensors; which ones are present depends on the part, see `wanted`."""

    streams: Any  # BF16 [T, S, D]
    products: Any  # float32 [T, 24], of the head [T, 4]
    squares: Any  # float32 [T]
    base: Any  # float32 [24], of the head [4]
    scale: Any  # float32 [3], of the head [1]
    pre: Any  # float32 [T, S]
    post: Any  # float32 [T, S]
    mix: Any  # float32 [T, S, S]
    layer: Any  # BF16 [T, D], a sublayer's output
    out: Any  # BF16 [T, D], of post [T, S, D]


PROCESSOR = facts.MhcMixPrimitives(exponential, reciprocal, inverse_root)


def loaded_numbers(tensor: Any, index: Any) -> list[Any]:
    """Read a vector of float32."""
    registers = cute.make_rmem_tensor(tensor.shape[0], Float32)
    cute.autovec_copy(tensor[None, index], registers)
    return [Float32(registers[i]) for i in range(tensor.shape[0])]


def factor_at(tensors: Any, token: Any, numbers: tuple[Any, ...]) -> Any:
    """Return a token's norm factor."""
    _, share, norm_epsilon, _ = numbers
    return facts.norm_factor(tensors.squares[token], share, norm_epsilon, PROCESSOR)


def logits_at(tensors: Any, place: tuple[Any, Any], scale: Any, products: int) -> list[Any]:
    """Return four logits of a token: group 0 is pre, 1 is post, 2 to 5 are the rows of mix.

    `scale` is the norm's factor and that of the group.
    """
    token, group = place
    found = loaded_numbers(tensors.products, token * (products // STREAMS) + group)
    base = loaded_numbers(tensors.base, group)
    factor, of_group = scale
    return [facts.logit(m, factor, of_group, b) for m, b in zip(found, base, strict=True)]


def gates_at(tensors: Any, token: Any, numbers: tuple[Any, ...], products: int) -> list[Any]:
    """Return the weights of a token's streams in the collapse."""
    scale = (factor_at(tensors, token, numbers), tensors.scale[0])
    logits = logits_at(tensors, (token, 0), scale, products)
    return [ops.add_rn(facts.gate(number, PROCESSOR), numbers[3]) for number in logits]


def own_logit(tensors: Any, place: tuple[Any, int, Any], factor: Any) -> Any:
    """Return the logit of a lane's stream in group 0 or 1."""
    token, group, stream = place
    at = token * (facts.COEFFICIENTS // STREAMS) + group
    product, base = Float32(tensors.products[stream, at]), Float32(tensors.base[stream, group])
    return facts.logit(product, factor, tensors.scale[group], base)


def of_token(rows: list[list[Any]], lane: Any, lanes: int) -> list[list[Any]]:
    """Return all rows of a token; the first of a lane is its own number, the next `lanes` more."""
    first = lane & ~(lanes - 1)
    return [
        [
            Float32(cute.arch.shuffle_sync(number, offset=first + row % lanes))
            for number in rows[row // lanes]
        ]
        for row in range(STREAMS)
    ]


def own_of(numbers: list[Any], stream: Any) -> Any:
    """Return the number of a lane's own stream."""
    found = numbers[0]
    for other in range(1, STREAMS):
        found = ops.select(stream == other, numbers[other], found)
    return found


def put(registers: Any, numbers: list[Any]) -> None:
    """Put four numbers into registers."""
    for place, number in enumerate(numbers):
        registers[place] = number


def four(registers: Any) -> list[Any]:
    """Return the numbers of four registers."""
    return [Float32(registers[place]) for place in range(STREAMS)]


def held(registers: tuple[Any, ...]) -> facts.SinkhornState:
    """Return the state of Sinkhorn that registers hold."""
    *lines, scale = registers
    of_rows, shares, of_columns, factors = map(four, lines)
    told = (Float32(scale[0]), Float32(scale[1]))
    return facts.SinkhornState(of_rows, shares, of_columns, factors, *told)


def hold(registers: tuple[Any, ...], state: facts.SinkhornState) -> None:
    """Put a state of Sinkhorn into registers."""
    *lines, scale = registers
    for line, numbers in zip(
        lines, (state.of_rows, state.shares, state.of_columns, state.factors), strict=True
    ):
        put(line, list(numbers))
    scale[0], scale[1] = state.scale, state.inverse


def bits_changed(before: facts.SinkhornState, after: facts.SinkhornState) -> Any:
    """Return the bits in which states differ; factors follow from divisors and scale."""
    found = Uint32(0)
    for state in ("of_rows", "of_columns"):
        for old, new in zip(getattr(before, state), getattr(after, state), strict=True):
            found = found | (Uint32(ops.bits_of(old)) ^ Uint32(ops.bits_of(new)))
    return found


@cute.jit
def line_factors(
    powers: list[list[Any]], iterations: Any, epsilon: Any, form: cutlass.Constexpr
) -> tuple[Any, Any]:
    """Return the factors of rows and of columns that Sinkhorn's iterations leave, in registers."""
    columns = [list(column) for column in zip(*powers, strict=True)]
    state = tuple(cute.make_rmem_tensor(count, Float32) for count in (*[STREAMS] * 4, 2))
    hold(state, facts.sinkhorn_begun(columns, epsilon, PROCESSOR))
    if cutlass.const_expr(form.ends_early):
        # Once two iterations leave every bit as it was, further pairs do so too.
        number, changed = Int32(1), Uint32(1)
        if iterations % 2 == 0:
            hold(state, facts.sinkhorn_step((powers, columns), held(state), epsilon, PROCESSOR))
            number += 1
        while (number < iterations) & (changed != 0):
            before = held(state)
            between = facts.sinkhorn_step((powers, columns), before, epsilon, PROCESSOR)
            hold(state, facts.sinkhorn_step((powers, columns), between, epsilon, PROCESSOR))
            changed = bits_changed(before, held(state))
            number += 2
    else:
        for _ in cutlass.range(1, iterations, unroll=1):
            hold(state, facts.sinkhorn_step((powers, columns), held(state), epsilon, PROCESSOR))
    return state[1], state[3]


@cute.jit
def shared_factors(powers: list[list[Any]], numbers: tuple[Any, Any], lane: Any) -> tuple[Any, Any]:
    """Return what line_factors returns; each of a token's four lanes divides a column.

    `numbers` is iterations and epsilon. Lanes exchange their factors times the scale.
    """
    iterations, epsilon = numbers
    stream = lane % STREAMS
    first = lane - stream
    column = [own_of(row, stream) for row in powers]
    rRows, rShares, rFactors = (cute.make_rmem_tensor(STREAMS, Float32) for _ in range(3))
    rOwn = cute.make_rmem_tensor(4, Float32)  # divisor, factor, scale, inverse
    (begun,) = facts.columns_at_first([column], epsilon)
    for place in range(STREAMS):
        rRows[place] = Float32(1.0)
        rShares[place] = Float32(1.0)
    rOwn[0], rOwn[1], rOwn[2], rOwn[3] = begun, PROCESSOR.reciprocal(begun), 1.0, 1.0
    for _ in cutlass.range(1, iterations, unroll=1):
        divisor, factor, scale, inverse = four(rOwn)
        kept = ops.multiply_rn(divisor, ops.multiply_rn(epsilon, inverse))
        scaled = from_lanes(ops.multiply_rn(factor, scale), first)
        of_rows, shares, scale = facts.rows_divided(powers, (scaled, four(rRows), epsilon))
        (divisor,), (factor,) = facts.columns_divided([column], (shares, [kept], scale), PROCESSOR)
        put(rRows, of_rows)
        put(rShares, shares)
        put(rOwn, [divisor, factor, scale, PROCESSOR.reciprocal(scale)])
    put(rFactors, from_lanes(Float32(rOwn[1]), first))
    return rShares, rFactors


def from_lanes(number: Any, first: Any) -> list[Any]:
    """Return the numbers of four lanes."""
    return [
        Float32(cute.arch.shuffle_sync(number, offset=first + other)) for other in range(STREAMS)
    ]


def store_four(tensor: Any, index: Any, numbers: list[Any]) -> None:
    """Write four numbers."""
    registers = cute.make_rmem_tensor(STREAMS, Float32)
    put(registers, numbers)
    cute.autovec_copy(registers, tensor[None, index])


def adjacent(numbers: list[Any], lane: Any, form: MhcMixForm) -> list[Any]:
    """Return the numbers that a lane of a token writes: of two lanes its half of the streams.

    Of two lanes each computes every second one, and an instruction that writes part of 32 bytes has
    the rest fetched from memory.
    """
    if form.lanes == STREAMS:
        return numbers
    low, high = numbers
    odd = lane == 1
    other = Float32(cute.arch.shuffle_sync_bfly(ops.select(odd, low, high), offset=1))
    return [ops.select(odd, other, low), ops.select(odd, high, other)]


def store_gates(tensor: Any, place: tuple[Any, Any], numbers: list[Any], form: MhcMixForm) -> None:
    """Write a lane's adjacent gates of a token; `place` is the token and the lane."""
    token, lane = place
    layout = cute.make_layout((len(numbers), FLAT), stride=(1, len(numbers)))
    view = cute.make_tensor(tensor.iterator, layout)
    registers = cute.make_rmem_tensor(len(numbers), Float32)
    put(registers, numbers)
    cute.autovec_copy(registers, view[None, token * form.lanes + lane])


def rows_of_mix(
    logits: list[list[Any]], streams: list[Any], numbers: tuple[Any, Any], form: MhcMixForm
) -> list[list[Any]]:
    """Return a lane's rows of a token's mix from their logits; `numbers`: iterations, epsilon.

    Each lane has all powers of its token. It divides all rows, whose divisors need no reciprocal,
    and of four lanes one column, of two lanes all.
    """
    iterations, epsilon = numbers
    own = [facts.softmax_row(of_stream, epsilon, PROCESSOR) for of_stream in logits]
    powers = of_token(own, cute.arch.lane_idx(), form.lanes)
    if cutlass.const_expr(form.lanes == STREAMS and not form.ends_early):
        rShares, rFactors = shared_factors(powers, numbers, cute.arch.lane_idx())
    else:
        rShares, rFactors = line_factors(powers, iterations, epsilon, form)
    return [
        facts.scaled_row(row, own_of(four(rShares), stream), four(rFactors))
        for row, stream in zip(own, streams, strict=True)
    ]


@cute.jit
def put_coefficients(
    tensors: Any,
    place: tuple[Any, Any, Any, Any],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Compute what store_coefficients writes, of two lanes; all is read here.

    `place` is a token, the number of tokens, the first stream, and the token whose products are
    read.
    """
    wanted_token, tokens, first, token = place
    factor = factor_at(tensors, token, numbers)
    streams = streams_of_lane(first, form)
    scale = (factor, tensors.scale[2])
    logits = [
        logits_at(tensors, (token, 2 + stream), scale, facts.COEFFICIENTS) for stream in streams
    ]
    gates = [
        [
            facts.gate(own_logit(tensors, (token, group, stream), factor), PROCESSOR)
            for stream in streams
        ]
        for group in form.gates
    ]
    store_coefficients(tensors, (wanted_token, tokens, first), (logits, gates), numbers, form)


@cute.jit
def store_coefficients(
    tensors: Any,
    place: tuple[Any, Any, Any],
    made: tuple[list[list[Any]], list[list[Any]]],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Write post and rows of mix of a lane's streams, and pre in the part `coefficients`.

    `place` is a token, the number of tokens, the first stream; `made` logits of mix, and gates.
    """
    token, tokens, first = place
    logits, gates = made
    iterations, _, _, epsilon = numbers
    streams = streams_of_lane(first, form)
    posts = adjacent([ops.multiply_rn(gate, 2.0) for gate in gates[0]], first, form)
    pres = adjacent([ops.add_rn(gate, epsilon) for gate in gates[-1]], first, form)
    rows = rows_of_mix(logits, streams, (iterations, epsilon), form)
    if token < tokens:
        for number in cutlass.range_constexpr(STREAMS // form.lanes):
            store_four(tensors.mix, token * STREAMS + streams[number], rows[number])
        store_gates(tensors.post, (token, first), posts, form)
        if cutlass.const_expr(form.part == "coefficients"):
            store_gates(tensors.pre, (token, first), pres, form)


def streams_of_lane(first: Any, form: MhcMixForm) -> list[Any]:
    """Return the streams of a lane, one or two apart."""
    return [first + more for more in range(0, STREAMS, form.lanes)]


class LaneOfToken(NamedTuple):
    """What one of four lanes has before the launch in front has ended: weights, and addresses."""

    squares: Any
    row: Any  # of the products of its row of mix
    own: Any  # of its product of pre; that of post lies four further on
    of_mix: list[Any]  # base
    of_gates: list[Any]  # base of each of form.gates
    scale: list[Any]  # of those and of mix


def lane_of_token(tensors: Any, place: tuple[Any, Any], form: MhcMixForm) -> LaneOfToken:
    """Read the weights of a lane, and compute the addresses of its numbers; place: token, lane."""
    token, stream = place
    products = tensors.products.iterator.toint() + Int64(token) * (4 * facts.COEFFICIENTS)
    squares = tensors.squares.iterator.toint() + Int64(token) * 4
    row = products + Int64(stream) * (4 * STREAMS) + 4 * 2 * STREAMS
    return LaneOfToken(
        computed_here(squares),
        computed_here(row),
        computed_here(products + Int64(stream) * 4),
        loaded_numbers(tensors.base, 2 + stream),
        [Float32(tensors.base[stream, group]) for group in form.gates],
        [Float32(tensors.scale[group]) for group in (*form.gates, 2)],
    )


def float_at(address: Any, offset: int = 0) -> Any:
    """Read a float32 so many bytes behind an address."""
    return emit(f"ld.global.f32 {{$w0}}, [{{$r0}} + {offset}];", Float32, address)


def four_at(address: Any) -> list[Any]:
    """Read four float32."""
    text = "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    types = [Float32] * STREAMS
    return list(cute.arch.inline_ptx(text, write_only_types=types, read_only_args=[address]))


@cute.jit
def put_read_early(
    tensors: Any,
    place: tuple[Any, Any, Any],
    numbers: tuple[Any, ...],
    lane: LaneOfToken,
    form: cutlass.Constexpr,
) -> None:
    """Compute what store_coefficients writes, of four lanes, from what a lane knows already."""
    _, share, norm_epsilon, _ = numbers
    squares, row = float_at(lane.squares), four_at(lane.row)
    own = [float_at(lane.own, 4 * STREAMS * group) for group in form.gates]
    cute.arch.sync_warp()  # no load is put off until another one has come
    factor = facts.norm_factor(squares, share, norm_epsilon, PROCESSOR)
    logits = [
        facts.logit(product, factor, lane.scale[-1], base)
        for product, base in zip(row, lane.of_mix, strict=True)
    ]
    gates = [
        [facts.gate(facts.logit(product, factor, scale, base), PROCESSOR)]
        for product, scale, base in zip(own, lane.scale[:-1], lane.of_gates, strict=True)
    ]
    store_coefficients(tensors, place, ([logits], gates), numbers, form)


def read_streams(tensors: Any, first: Any, chunks: Any) -> list[list[Any]]:
    """Read a chunk of each stream; `first` is that of stream 0."""
    rWords = registers_of(WORDS, STREAMS)
    for stream in range(STREAMS):
        place = first + Int64(stream) * Int64(chunks)
        cute.autovec_copy(tensors.streams[None, place], rWords[None, stream])
    return [words_at(rWords, stream) for stream in range(STREAMS)]


def collapsed(words: list[list[Any]], gates: list[Any]) -> list[Any]:
    """Return the words of the weighted sum of four chunks, rounded once."""
    numbers = [numbers_of(word) for word in words]
    return rounded_words([facts.weighted(gates, list(each)) for each in zip(*numbers, strict=True)])


def spread_out(tensors: Any, place: tuple[Any, Any], chunk: Any, chunks: Any) -> None:
    """Write a chunk of every new stream of a token; place is (token, chunk of stream 0)."""
    token, first = place
    words = read_streams(tensors, first, chunks)
    rLayer = registers_of(WORDS, 1)
    own = Int64(token) * Int64(chunks) + Int64(chunk)
    cute.autovec_copy(tensors.layer[None, own], rLayer[None, 0])
    post = loaded_numbers(tensors.post, token)
    mix = [loaded_numbers(tensors.mix, token * STREAMS + row) for row in range(STREAMS)]
    numbers = [numbers_of(each) for each in (*words, words_at(rLayer, 0))]
    for stream in range(STREAMS):
        weights = [*(mix[row][stream] for row in range(STREAMS)), post[stream]]
        made = [facts.weighted(weights, list(each)) for each in zip(*numbers, strict=True)]
        store(tensors.out, first + Int64(stream) * Int64(chunks), rounded_words(made))


@cute.jit
def ask_for_products(
    tensors: Any, lane: Any, extents: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Ask L2 for a token's products and squares: 64 bytes a lane, of two lanes.

    Directly after the projection they are in L2 already; after any other launch they may not be.
    """
    token = lane // form.lanes
    if token < extents[0]:
        products = tensors.products.iterator.toint() + Int64(token) * (4 * facts.COEFFICIENTS)
        fetch_line(products + Int64(lane % form.lanes) * 64)
        fetch_line(tensors.squares.iterator.toint() + Int64(token) * 4)


@cute.kernel
def mhc_kernel(
    tensors: Any,
    extents: tuple[Any, ...],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Compute coefficients in the first thread blocks, process the streams in the others."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(form.part in {"all", "coefficients", "head"}):  # noqa: SIM102  traced
        if thread + block == 0:
            for each in (tensors.base, tensors.scale):
                fetch_line(each.iterator.toint())
    if cutlass.const_expr(form.lanes < STREAMS and form.part == "coefficients"):
        ask_for_products(tensors, Int32(block) * facts.MIX_THREADS + Int32(thread), extents, form)
    thread, block = Int32(thread), Int32(block)
    tokens, leading, groups, chunks = extents
    lane = block * facts.MIX_THREADS + thread
    token = lane // form.lanes
    # Lanes without a token take part in shuffles.
    read_token = ops.minimum(token, tokens - 1)
    stream = lane % form.lanes
    if cutlass.const_expr(form.reads_early):
        if cutlass.const_expr(not form.waits_first):
            let_follow()
        early = lane_of_token(tensors, (read_token, stream), form)
        wait_for_front()
        if cutlass.const_expr(form.waits_first):
            let_follow()
    elif cutlass.const_expr(form.waits_first):
        wait_then_let_follow()
    else:
        follow()
    if cutlass.const_expr(form.makes_coefficients):  # noqa: SIM102  one is known in tracing
        if block < leading:
            if cutlass.const_expr(form.reads_early):
                put_read_early(tensors, (token, tokens, stream), numbers, early, form)
            else:
                put_coefficients(tensors, (token, tokens, stream, read_token), numbers, form)
    if cutlass.const_expr(form.touches_streams):
        turn = Uint32(block - leading)
        of_token = Int32(turn // Uint32(groups))
        chunk = Int32(turn % Uint32(groups)) * facts.MIX_THREADS + thread
        if (block >= leading) & (chunk < chunks):
            first = Int64(of_token) * STREAMS * Int64(chunks) + Int64(chunk)
            if cutlass.const_expr(form.part == facts.SPREADS_OUT):
                spread_out(tensors, (of_token, first), chunk, chunks)
            else:
                words = read_streams(tensors, first, chunks)
                if cutlass.const_expr(form.part == "collapse"):
                    gates = loaded_numbers(tensors.pre, of_token)
                else:
                    products = STREAMS if form.part == "head" else facts.COEFFICIENTS
                    gates = gates_at(tensors, of_token, numbers, products)
                own = Int64(of_token) * Int64(chunks) + Int64(chunk)
                store(tensors.out, own, collapsed(words, gates))


@cute.jit
def launch_mhc(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a part: tokens, blocks of coefficients, groups, chunks, iterations, thread blocks."""
    sizes = (WORDS, STREAMS, 0, STREAMS, 0, STREAMS, STREAMS, STREAMS, WORDS, WORDS)
    views = zip(pointers, sizes, strict=True)
    tensors = MixTensors(*(vectors(address, words) for address, words in views))
    tokens, leading, groups, chunks, iterations, blocks = extents
    scalars = (iterations, *numbers)
    mhc_kernel(tensors, (tokens, leading, groups, chunks), scalars, form).launch(
        grid=[blocks, 1, 1], block=[facts.MIX_THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


_PROJECTED = ("products", "squares", "base", "scale")
TENSORS_OF_PART = {
    "all": ("streams", *_PROJECTED, "post", "mix", "out"),
    "coefficients": (*_PROJECTED, "pre", "post", "mix"),
    "collapse": ("streams", "pre", "out"),
    "head": ("streams", *_PROJECTED, "out"),
    facts.SPREADS_OUT: ("streams", "post", "mix", "layer", "out"),
}


@lru_cache(maxsize=64)
def wanted(problem: MhcMixProblem) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a part."""
    tokens, width, products = problem.tokens, problem.width, problem.products
    scales = 1 if problem.part == "head" else 3
    known = {
        "streams": (torch.bfloat16, (tokens, STREAMS, width)),
        "products": (torch.float32, (tokens, products)),
        "squares": (torch.float32, (tokens,)),
        "base": (torch.float32, (products,)),
        "scale": (torch.float32, (scales,)),
        "pre": (torch.float32, (tokens, STREAMS)),
        "post": (torch.float32, (tokens, STREAMS)),
        "mix": (torch.float32, (tokens, STREAMS, STREAMS)),
        "layer": (torch.bfloat16, (tokens, width)),
        "out": (torch.bfloat16, (tokens, width)),
    }
    if problem.part == facts.SPREADS_OUT:
        known["out"] = known["streams"]
    return {name: known[name] for name in TENSORS_OF_PART[problem.part]}


def _numbers(of: LaunchContext[MhcMixProblem, MhcMixForm]) -> tuple[Any, ...]:
    problem = of.problem
    extents = (
        problem.tokens,
        facts.leading_blocks(problem),
        facts.groups_of_chunks(problem),
        problem.width // CHUNK_VALUES,
        problem.iterations,
        facts.mix_grid(problem),
    )
    share = 1.0 / (STREAMS * problem.width)
    return extents, (share, problem.norm_epsilon, problem.epsilon)


def _operand(name: str) -> Operand[MhcMixProblem]:
    """Return an operand; which ones a part reads and writes is its own."""
    alignment = 4 if name in {"squares", "scale"} else 16
    values = Storage(Uint32, torch.bfloat16, alignment)
    plain = Storage(Float32, torch.float32, alignment)
    written = {"coefficients": ("pre", "post", "mix"), "all": ("post", "mix", "out")}
    return Operand[MhcMixProblem](
        name,
        values if name in {"streams", "layer", "out"} else plain,
        lambda p: wanted(p)[name][1],
        Presence[MhcMixProblem](
            lambda p: name in TENSORS_OF_PART[p.part],
            lambda p: f"The part {p.part!r} has {', '.join(TENSORS_OF_PART[p.part])}.",
        ),
        output=lambda p: name in written.get(p.part, ("out",)),
    )


KERNEL = Kernel[MhcMixProblem, MhcMixForm](
    entry=launch_mhc,
    operands=tuple(_operand(name) for name in MixTensors._fields),
    choose_form=facts.choose_mix_form,
    kinds=((Int32,) * 6, (Float32,) * 3),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
