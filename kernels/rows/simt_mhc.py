"""mHC (hyper-connections) after its projection: gates, Sinkhorn, collapse of four streams, spread.

One source for sm_90a and sm_100a, a part of mhc_problem each:

* coefficients: pre, post [T, S] and mix [T, S, S] from products and squares. Four lanes a token, or
  two of many tokens, share its rows; every lane has all its powers, so no step of Sinkhorn waits.
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
from degarble.kernels.runtime.pdl import EARLY, fetch_line, follow, wait_then_let_follow

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
    logits: list[list[Any]], streams: list[Any], told: tuple[Any, Any], form: MhcMixForm
) -> list[list[Any]]:
    """Return a lane's rows of a token's mix from their logits; told: iterations, epsilon.

    Each lane has all powers of its token and divides all lines: no step waits for another lane.
    """
    iterations, epsilon = told
    own = [facts.softmax_row(of_stream, epsilon, PROCESSOR) for of_stream in logits]
    powers = of_token(own, cute.arch.lane_idx(), form.lanes)
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
    """Compute post and rows of mix of a lane's streams, and pre in the part `coefficients`.

    `place` is a token, the number of tokens, the first stream, and the token whose products are
    read.
    """
    wanted_token, tokens, first, token = place
    iterations, _, _, epsilon = numbers
    factor = factor_at(tensors, token, numbers)
    streams = [first + more for more in range(0, STREAMS, form.lanes)]
    scale = (factor, tensors.scale[2])
    logits = [
        logits_at(tensors, (token, 2 + stream), scale, facts.COEFFICIENTS) for stream in streams
    ]
    gates = [
        [
            facts.gate(own_logit(tensors, (token, group, stream), factor), PROCESSOR)
            for stream in streams
        ]
        for group in ((1, 0) if form.part == "coefficients" else (1,))
    ]
    posts = adjacent([ops.multiply_rn(gate, 2.0) for gate in gates[0]], first, form)
    pres = adjacent([ops.add_rn(gate, epsilon) for gate in gates[-1]], first, form)
    made = rows_of_mix(logits, streams, (iterations, epsilon), form)
    if wanted_token < tokens:
        for number in cutlass.range_constexpr(STREAMS // form.lanes):
            store_four(tensors.mix, wanted_token * STREAMS + streams[number], made[number])
        store_gates(tensors.post, (wanted_token, first), posts, form)
        if cutlass.const_expr(form.part == "coefficients"):
            store_gates(tensors.pre, (wanted_token, first), pres, form)


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
    if cutlass.const_expr(form.waits_first):
        wait_then_let_follow()
    else:
        follow()
    thread, block = Int32(thread), Int32(block)
    tokens, leading, groups, chunks = extents
    if cutlass.const_expr(form.makes_coefficients):  # noqa: SIM102  one is known in tracing
        if block < leading:
            lane = block * facts.MIX_THREADS + thread
            token = lane // form.lanes
            # Lanes without a token take part in shuffles.
            place = (token, tokens, lane % form.lanes, ops.minimum(token, tokens - 1))
            put_coefficients(tensors, place, numbers, form)
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
