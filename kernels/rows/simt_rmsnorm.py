"""RMSNorm of BF16 rows, optionally with NVFP4 quantisation of the normed values, in one kernel.

out = x / sqrt(mean(x**2) + epsilon) * weight. Weight BF16 or float32; output BF16 values, or NVFP4
codes and scales of exactly those values, or both; or, for few rows, values and what their codes
would stand for (`decoded`, as in quantise_problem). A thread block walks down rows, a step of the
grid apart; where rows are at most 1,024 wide, each warp walks by itself. A lane has two blocks of
16 values, the same columns in every row, so BF16 weights stay in registers.

Rows of whole warps (1,024 columns each) have a kernel of their own, whose loads and stores are
whole lines: there a thread has four halves of blocks (whole_rows). The sums are the same. With
codes the next row and the weights are in shared memory there, not in registers.

One row: take the values from registers; load the next row; sum of squares by shuffles, then over
warps through shared memory (double-buffered, so one barrier a row); norm; store; block amax, scale
code, codes, scale bytes. The padding of the scales is walked as rows without values. The arithmetic
is that of rows/problem.py.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
Shape letters: M rows, K columns, P = K / 2 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import round_up
from degarble.kernels.primitives.device_words import (
    BLOCK_WORDS,
    BOUNDED,
    HIGH_HALF,
    PACKED,
    block_amax,
    code_words,
    emit,
    native_word,
    numbers_of,
    nvfp4_values,
    opaque,
    rounded_words,
    scale_code_of,
    scaling_of,
    smaller_magnitude,
    square_root,
    store,
    warp_folded,
    words_of,
)
from degarble.kernels.primitives.e2m1 import e2m1_word_by_products, largest_coded
from degarble.kernels.primitives.quantise_problem import BLOCK, LAYOUTS, SCALE_CODES
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows import whole_rows as whole
from degarble.kernels.rows.problem import LANES, MOST_WARPS, SLOTS_OF_LANE, NormForm, NormProblem
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
    follow,
    let_follow,
    wait_for_front,
)

# ---- device --------------------------------------------------------------------------------------


class NormTensors(NamedTuple):
    """Kernel's tensors, as blocks: [words of a block, blocks] or flat."""

    values: Any  # BF16 [M, K]
    weight: Any  # BF16 or float32 [K]
    decode_scale: Any  # float32 [1]
    normed: Any  # BF16 [M, K]
    codes: Any  # [M, P]
    scales: Any  # scale bytes in their layout
    decoded: Any = None  # BF16 [M, K]


def tensors_of(pointers: tuple[Any, ...], form: NormForm) -> NormTensors:
    """View six or seven pointers; bounds are checked by row and block, not by these layouts."""
    of_weight = BLOCK if form.weight == "fp32" else BLOCK_WORDS
    shapes = (BLOCK_WORDS, of_weight, 0, BLOCK_WORDS, BLOCK_WORDS // 4, 0, BLOCK_WORDS)
    flat = 1 << 30
    views = []
    for address, words in zip(pointers, shapes[: len(pointers)], strict=True):
        layout = cute.make_layout((words, flat), stride=(1, words)) if words else None
        views.append(cute.make_tensor(address, layout or cute.make_layout(flat)))
    return NormTensors(*views)


def weights_of(registers: Any, slot: int, form: NormForm) -> list[Any]:
    """Return the float32 weights of a block."""
    words = words_of(registers[None, slot])
    words = words if form.weight == "fp32" or form.roomy else again(words)
    return [ops.number_of(word) for word in words] if form.weight == "fp32" else numbers_of(words)


def again(words: list[Any]) -> list[Any]:
    """Return words opaque to the compiler, so that it unpacks them twice instead of keeping them.

    Unpacked numbers take twice the registers, which a walk of many warps does not have.
    """
    return [emit("mov.b32 {$w0}, {$r0};", Uint32, word) for word in words]


def kept_words(words: list[Any], form: NormForm) -> list[Any]:
    """Return the words of a block to keep while its row is summed."""
    return again(words) if form.unpacks_twice else words


def lane_sum(words: list[list[Any]]) -> Any:
    """Return the sum of squares of a lane's blocks."""
    return ops.add_rn(*(facts.sum_of_squares(numbers_of(of_slot)) for of_slot in words))


def warps_folded(number: Any) -> Any:
    """Sum over each half of a warp, where the sums of sixteen warps stand, twice."""
    for distance in (8, 4, 2, 1):
        number = ops.add_rn(number, cute.arch.shuffle_sync_bfly(number, offset=distance))
    return number


def slots_of(registers: Any) -> list[list[Any]]:
    """Return the words of each slot."""
    return [words_of(registers[None, slot]) for slot in range(SLOTS_OF_LANE)]


def normed_words(numbers: list[Any], weights: list[Any], factor: Any) -> list[Any]:
    """Return the normed values of numbers, rounded to BF16."""
    pairs = zip(numbers, weights, strict=True)
    return rounded_words([facts.normed(number, weight, factor) for number, weight in pairs])


def decoded_words(words: list[Any], scaling: Any, form: NormForm) -> list[Any]:
    """Quantise a block to NVFP4; return what its codes stand for."""
    code = scale_code_of(block_amax(words), scaling.share)
    factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
    halves = [nvfp4_values(half, code) for half in code_words(words, factor, form.target)]
    return halves[0] + halves[1]


@cute.kernel
def rmsnorm_kernel(  # noqa: PLR0915  one walk: what a lane holds would have to be handed on
    tensors: NormTensors,
    extents: tuple[Int32, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Walk down the rows: read, sum, norm, write the requested outputs."""
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    rows, blocks, padded_rows, lanes, threads = extents
    let_follow()
    rows, blocks, lanes, thread = Uint32(rows), Uint32(blocks), Uint32(lanes), Uint32(thread)
    lane, warp = thread % LANES, thread // LANES
    layout = LAYOUTS[form.layout_walked]
    lane_block = lane if cutlass.const_expr(form.narrow) else thread
    first, step = Int32(first), Int32(step)
    if cutlass.const_expr(form.layout is not None or form.decoded):  # noqa: SIM102  traced
        if Int32(thread) + first == 0:
            fetch_line(tensors.decode_scale.iterator.toint())
    if cutlass.const_expr(form.narrow):
        first = first * facts.NARROW_WARPS + Int32(warp)
        step = step * facts.NARROW_WARPS

    allocator = cutlass.memory.SmemAllocator()
    # Of two turns, so that one barrier a turn is enough; absent warps stay 0.
    sSums = allocator.allocate_tensor(Float32, cute.make_layout((MOST_WARPS, 2)), 16)
    sFactors = allocator.allocate_tensor(Float32, cute.make_layout(SCALE_CODES), 16)
    scaling: Any = None
    if cutlass.const_expr(not form.narrow):  # noqa: SIM102  the first is settled when traced
        if thread < 2 * MOST_WARPS:
            sSums[thread] = Float32(0.0)
    of_weight = BLOCK if form.weight == "fp32" else BLOCK_WORDS
    rWeight = cute.make_rmem_tensor(cute.make_layout((of_weight, SLOTS_OF_LANE)), Uint32)
    rWeight.fill(0)
    for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
        block = lane_block + slot * lanes
        if block < blocks:
            cute.autovec_copy(tensors.weight[None, block], rWeight[None, slot])
    if cutlass.const_expr(form.layout is None):
        cute.arch.sync_threads()
    wait_for_front()
    if cutlass.const_expr(form.layout is not None):
        scaling = scaling_of(tensors.decode_scale[0], sFactors)
        for code in cutlass.range(Int32(thread), SCALE_CODES, Int32(threads), unroll=1):
            sFactors[code] = codecs.nvfp4_block_encode_scale(Uint32(code), scaling.encode)
        cute.arch.sync_threads()

    rAhead = cute.make_rmem_tensor(cute.make_layout((BLOCK_WORDS, SLOTS_OF_LANE)), Uint32)
    rAhead.fill(0)
    for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
        block = lane_block + slot * lanes
        if (block < blocks) & (Uint32(first) < rows):
            place = Int64(first) * Int64(blocks) + Int64(block)
            cute.autovec_copy(tensors.values[None, place], rAhead[None, slot])

    if cutlass.const_expr(form.decoded):
        scaling = scaling_of(tensors.decode_scale[0], None)  # read beside the first row
    turn = Uint32(0)
    for row in cutlass.range(first, Int32(padded_rows), step, unroll=1):
        start = Int64(row) * Int64(blocks) + Int64(lane_block)
        # Take this row, then load the next one: its latency overlaps the work below.
        words = slots_of(rAhead)
        rAhead.fill(0)
        for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
            if (Uint32(row + step) < rows) & (lane_block + slot * lanes < blocks):
                place = start + Int64(step) * Int64(blocks) + Int64(slot * lanes)
                cute.autovec_copy(tensors.values[None, place], rAhead[None, slot])

        total = warp_folded(lane_sum(words))
        if cutlass.const_expr(not form.narrow):
            if lane == 0:
                sSums[warp, turn] = total
            cute.arch.sync_threads()
            # Every warp folds all sums itself, in one order.
            total = warps_folded(Float32(sSums[lane % MOST_WARPS, turn]))
            turn = 1 - turn
        columns = Float32(Int32(blocks * BLOCK))
        factor = facts.factor_of(total, columns, epsilon, square_root)

        for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
            block, place = lane_block + slot * lanes, start + Int64(slot * lanes)
            weights = weights_of(rWeight, slot, form)
            made = normed_words(numbers_of(kept_words(words[slot], form)), weights, factor)
            exists = (Uint32(row) < rows) & (block < blocks)
            if cutlass.const_expr(form.writes_values):  # noqa: SIM102  as above
                if exists:
                    store(tensors.normed, place, made)
            if cutlass.const_expr(form.decoded):
                values = decoded_words(made, scaling, form)
                if exists:
                    store(tensors.decoded, place, values)
            if cutlass.const_expr(form.layout is not None):
                scale_code = scale_code_of(block_amax(made), scaling.share)
                codes = code_words(made, sFactors[scale_code & 0x7F], form.target)
                if exists:
                    store(tensors.codes, place, codes)
                if block < round_up(blocks, layout.column_tile):
                    if not exists:
                        # Padding of the scales is written as zeros.
                        scale_code = Uint32(0)
                    at = layout.offset_of(Uint32(row), block, rows, blocks)
                    tensors.scales[at] = Uint8(scale_code)


# ---- rows of whole lines -------------------------------------------------------------------------


def larger_halves(words: list[Any]) -> Any:
    """Return a word of the largest magnitudes in both halves of words; signs mean nothing."""
    largest = words[0]
    for word in words[1:]:
        text = "max.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};"
        largest = emit(text, Uint32, largest, word)
    return largest


def pair_code(words: list[list[Any]], odd: Any, share: Any) -> Any:
    """Return the scale code of one of two blocks, of which neighbouring threads have a half each.

    `words` are those of both halves of a thread; an odd thread scales the second block.
    """
    first, second = (larger_halves(of_half) for of_half in words)
    own, sent = ops.select(odd, second, first), ops.select(odd, first, second)
    other = Uint32(cute.arch.shuffle_sync_bfly(sent, offset=1))
    return scale_code_of(block_amax([own, other]), share)


class Unpacking(NamedTuple):
    """Constants of numbers_apart, in registers: ptxas would take them apart again."""

    move: Any  # 2**16
    one: Any  # a word of 1 above and 0 below
    none: Any  # a word of -0 above and +0 below


def unpacking(rows: Any) -> Unpacking:
    """Return the constants, with the sign of a number that has none, as no compiler knows."""
    nothing = emit("shr.u32 {$w0}, {$r0}, 31;", Uint32, rows)
    return Unpacking(*(nothing + Uint32(word) for word in (0x1_0000, 0x3F80_0000, 0x8000_0000)))


def numbers_apart(words: list[Any], by: Unpacking | None, *, finite: bool = False) -> list[Any]:
    """Return numbers_of words, by products: shifts and masks are on the pipe that codes fill.

    The upper numbers are products only of `finite` words: an infinity below would leave a NaN.
    """
    if by is None:
        return numbers_of(words)
    found = []
    for word in words:
        low = emit("mul.lo.u32 {$w0}, {$r0}, {$r1};", Uint32, word, by.move)
        high = PACKED.fused(word, by.one, by.none) if finite else word & Uint32(HIGH_HALF)
        found += [ops.number_of(low), ops.number_of(high)]
    return found


def bounded_factor(factor: Any) -> tuple[Any, Any]:
    """Return a block's factor, and a word that has the bound of its values twice."""
    bound = largest_coded(factor)
    return factor, ops.number_of(rounded_words([bound, bound])[0])


def pair_words(
    words: list[list[Any]],
    table: Any,
    told: tuple[Any, Any],
    form: NormForm,
    by: Unpacking | None,
) -> list[Any]:
    """Return the codes of a thread's halves of two blocks.

    `told` is the scale code of its own block, and whether that is the second of both.
    """
    code, odd = told
    other = Uint32(cute.arch.shuffle_sync_bfly(code, offset=1))
    codes = ops.select(odd, other, code), ops.select(odd, code, other)
    made = []
    for of_half, block_code in zip(words, codes, strict=True):
        of_block = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(table[None, block_code & 0x7F], of_block)
        factor, bound = Float32(of_block[0]), ops.bits_of(Float32(of_block[1]))
        if form.converts:
            made.append(native_word([ops.multiply_rn(n, factor) for n in numbers_of(of_half)]))
        else:
            bounded = [smaller_magnitude(word, bound) for word in of_half]
            # Together with others a row has no registers for products of the upper halves.
            numbers = numbers_apart(bounded, by, finite=form.together == 1)
            scaled = [ops.multiply_rn(number, factor) for number in numbers]
            made.append(e2m1_word_by_products(scaled, BOUNDED, PACKED))
    return made


@cute.kernel
def whole_kernel(  # noqa: PLR0915  one walk: what a thread holds would have to be handed on
    tensors: NormTensors, extents: tuple[Int32, ...], epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Walk down rows of whole lines: read, sum, norm, write the requested outputs."""
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    rows, padded_rows = extents
    thread, first, step = Int32(thread), Int32(first), Int32(step)
    group = Int32(0)
    if cutlass.const_expr(form.together > 1):
        # Rows of a thread block are a grid apart, so that all of them end about together.
        group = cute.arch.make_warp_uniform(thread // (form.warps * LANES))
        thread = opaque(thread - group * (form.warps * LANES))
        first, step = first + group * step, opaque(step * form.together)
    lane, warp, odd = thread % LANES, thread // LANES, thread % 2 == 1
    layout, blocks = LAYOUTS[form.layout_walked], Uint32(form.warps * facts.BLOCKS_OF_WHOLE_WARP)
    of_row, places = whole.row_bytes(form.warps), whole.places_of(form.warps)
    fetch_constants(tensors, thread + first, Int32(blocks), form)
    follow()
    allocator = cutlass.memory.SmemAllocator()
    # Of two turns, so that one barrier a turn is enough.
    sSums = allocator.allocate_tensor(
        Float32, cute.make_layout((MOST_WARPS, 2, form.together)), 16
    )[None, None, group]
    # A block's factor and bound, by the code of its scale.
    sFactors = allocator.allocate_tensor(Float32, cute.make_layout((2, SCALE_CODES)), 16)
    chunk = whole.first_chunk(thread)
    values, normed, weight = (
        whole.address_of(tensor, chunk * whole.CHUNK_BYTES * times)
        for tensor, times in (
            (tensors.values, 1), (tensors.normed, 1),
            (tensors.weight, 2 if form.weight == "fp32" else 1),
        )
    )  # fmt: skip
    codes = whole.address_of(tensors.codes, chunk * (whole.CHUNK_BYTES // 4))
    rRow, sRow, sWeight = whole.row_registers(), Int32(0), None
    if cutlass.const_expr(form.ahead):
        sRow = whole.row_apart(allocator, thread, form.warps, form.together) + group * of_row
        first_row = values + Int64(ops.minimum(first, rows - 1)) * of_row
        whole.ask_for_row(sRow, first_row, form.warps)
    rWeight = whole.row_registers(2 * whole.WORDS if form.weight == "fp32" else whole.WORDS)
    whole.read_weights(rWeight, weight, form.warps)
    if cutlass.const_expr(form.ahead):
        sWeight = whole.weights_apart(allocator, form.warps)
        if group == 0:
            whole.keep_weights(sWeight, rWeight, (thread, form.warps))
    scaling: Any = None
    scales: Any = None
    if cutlass.const_expr(form.layout is not None):
        scaling = scaling_of(tensors.decode_scale[0], sFactors)
        of_block = thread + group * (form.warps * LANES)
        for code in cutlass.range(
            of_block, SCALE_CODES, form.together * form.warps * LANES, unroll=1
        ):
            factor = codecs.nvfp4_block_encode_scale(Uint32(code), scaling.encode)
            sFactors[0, code], sFactors[1, code] = bounded_factor(factor)
        # The offset of a scale is that of its row and that of its column, in whole tiles.
        block = Uint32(warp * LANES + lane % 2 * (LANES // 2) + lane // 2)
        scales = whole.address_of(
            tensors.scales, layout.offset_of(Uint32(0), block, Uint32(rows), blocks)
        )
        cute.arch.sync_threads()

    turn, by = Uint32(0), None
    if cutlass.const_expr(form.coded_lines and not form.converts):
        by = unpacking(rows)
    row, begin, end, stride = first, first, padded_rows, step
    if cutlass.const_expr(form.together > 1):
        # Counted, or its turns would look at the sign of the step.
        begin, end, stride = Int32(0), (padded_rows - first + step - 1) // step, Int32(1)
    for _ in cutlass.range(begin, end, stride, unroll=1):
        words: Any = None
        if cutlass.const_expr(form.ahead):
            words = whole.asked_row(sRow, form.warps)
            # The next row's latency overlaps the work below; the last row is read again.
            next_row = values + Int64(ops.minimum(row + step, rows - 1)) * of_row
            whole.ask_for_row(sRow, next_row, form.warps)
        else:
            own_row = values + Int64(ops.minimum(row, rows - 1)) * of_row
            whole.read_row(rRow, own_row, form.warps)
            words = whole.chunks_of(rRow)
        numbers, halves = [], []
        for of_half in words:
            numbers.append(numbers_apart(of_half, by))
            halves.append(facts.half_sum(numbers[-1]))
        total = whole.warp_sum(halves)
        total = whole.row_total(
            sSums, total, (lane, warp, turn), (group, form.together), form.warps
        )
        turn = 1 - turn
        factor = Float32(0.0)
        if cutlass.const_expr(form.coded_lines):
            factor = whole.brief_factor_of(total, epsilon, form.warps)
        else:
            factor = facts.factor_of(total, form.warps * facts.OF_WHOLE_WARP, epsilon, square_root)
        made = []
        for number, of_half in enumerate(words):
            kept = again(of_half) if form.unpacks_twice else of_half
            if cutlass.const_expr(form.ahead):
                weights = whole.kept_weights(sWeight, number, (thread, form.warps))
            else:
                of_weight = whole.chunks_of(rWeight)[number]
                fp32 = form.weight == "fp32"
                weights = whole.weight_numbers(of_weight if fp32 else again(of_weight))
            of_row_half = numbers[number] if form.coded_lines else numbers_of(kept)
            made.append(normed_words(of_row_half, weights, factor))
        exists = row < rows
        out = normed + Int64(row) * of_row
        if cutlass.const_expr(form.layout is None):
            for place, of_half in zip(places, made, strict=True):
                whole.write_words(out, place, of_half)
        else:
            pairs = [made[2 * slot : 2 * slot + 2] for slot in range(SLOTS_OF_LANE)]
            coded: list[Any] = []
            of_slots = [pair_code(pair, odd, scaling.share) for pair in pairs]
            for pair, code in zip(pairs, of_slots, strict=True):
                coded += pair_words(pair, sFactors, (code, odd), form, by)
            if exists:
                of_codes = codes + Int64(row) * (of_row // 4)
                for number, place in enumerate(places):
                    whole.write_words(of_codes, place // 4, [coded[number]])
                    if cutlass.const_expr(form.keeps_values):
                        whole.write_words(out, place, made[number])
            behind = Int64(layout.offset_of(Uint32(row), Uint32(0), Uint32(rows), blocks))
            apart = layout.offset_of(
                0, form.warps * LANES, 1, form.warps * facts.BLOCKS_OF_WHOLE_WARP
            )
            for slot, code in enumerate(of_slots):
                # Padding of the scales is written as zeros.
                made_code = ops.select(exists, code, Uint32(0))
                whole.write_byte(scales + behind, slot * apart, made_code)
        row += step


@cute.jit
def fetch_constants(tensors: NormTensors, place: Any, blocks: Any, form: cutlass.Constexpr) -> None:
    """Ask L2 for the weight and the tensor's scale by the launch's first thread."""
    if place == 0:
        size = BLOCK * (4 if form.weight == "fp32" else 2)
        fetch_weights(tensors.weight.iterator.toint(), Uint32(blocks * size))
        if cutlass.const_expr(form.layout is not None or form.decoded):
            fetch_line(tensors.decode_scale.iterator.toint())


@cute.jit
def launch_rmsnorm(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form: rows, blocks, rows with padding, lanes of a row, threads, thread blocks."""
    rows, blocks, padded_rows, lanes, threads, walkers = extents
    tensors, declared = tensors_of(pointers, form), facts.norm_threads_declared(form)
    if cutlass.const_expr(form.warps):
        whole_kernel(tensors, (rows, padded_rows), epsilon, form).launch(
            grid=[-(-walkers // form.together), 1, 1],
            block=[form.together * form.warps * LANES, 1, 1],
            max_number_threads=[declared, 1, 1],
            use_pdl=EARLY,
            stream=stream,
        )
    else:
        within = (rows, blocks, padded_rows, lanes, threads)
        rmsnorm_kernel(tensors, within, epsilon, form).launch(
            grid=[walkers, 1, 1],
            block=[threads, 1, 1],
            max_number_threads=[declared, 1, 1],
            use_pdl=EARLY,
            stream=stream,
        )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[NormProblem, NormForm]) -> tuple[Any, ...]:
    """Return rows, blocks, rows with padding, lanes of a row, threads, thread blocks; epsilon."""
    problem = of.problem
    threads, lanes = facts.norm_threads(problem), facts.lanes_of_row(problem.columns)
    walkers = facts.norm_grid(problem, of.tactic, of.processors)
    extents = (problem.rows, problem.blocks, problem.padded_rows, lanes, threads, walkers)
    return extents, problem.epsilon


_Operand = Operand[NormProblem]
_REMEDY = "Allocate with KERNEL.allocate(problem, device); a layout goes with a decode scale."
_QUANTISES = Presence[NormProblem](lambda of: of.layout is not None, _REMEDY)
_SCALED = Presence[NormProblem](lambda of: of.layout is not None or of.decoded, _REMEDY)
_DECODED = Presence[NormProblem](lambda of: of.decoded, _REMEDY)
_KEEPS_VALUES = Presence[NormProblem](lambda of: of.writes_values, _REMEDY)
_VALUES = Storage(Uint32, torch.bfloat16, 32)
_SCALE = Storage(Float32, torch.float32, 4)
_CODES, _SCALES = Storage(Uint32, torch.uint8, 8), Storage(Uint8, torch.uint8, 1)


def _weight(of: NormProblem | NormForm) -> Storage:
    return Storage(Uint32, DTYPES[of.weight], 32)


def _shape(problem: NormProblem) -> tuple[int, int]:
    return problem.rows, problem.columns


KERNEL = Kernel[NormProblem, NormForm](
    entry=launch_rmsnorm,
    operands=(
        _Operand("values", _VALUES, _shape),
        _Operand("weight", _weight, lambda p: (p.columns,)),
        _Operand("decode_scale", _SCALE, lambda _: (1,), _SCALED, checked=as_vector),
        _Operand("normed", _VALUES, _shape, _KEEPS_VALUES, output=True, label="normed values"),
        _Operand("codes", _CODES, lambda p: (p.rows, p.columns // 2), _QUANTISES, output=True),
        _Operand("scales", _SCALES, lambda p: (p.scale_bytes,), _QUANTISES, output=True),
        _Operand("decoded", _VALUES, _shape, _DECODED, output=True, passed=False),
    ),
    choose_form=facts.choose_norm_form,
    choose_tactic=facts.choose_norm_tactic,
    kinds=((Int32,) * 6, Float32),
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
