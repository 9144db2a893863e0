"""Router: the top-k experts of every token and their weights from its logits.

One source for sm_90a and sm_100a. Scores are sqrt(softplus) or sigmoid; experts are chosen by score
plus bias, within the best groups where there are groups, or by a table of token ids; weights come
from the scores without bias. A token has a warp, or, where tokens are few, a thread block whose
warps share its scores and then each do the same. Lane l holds the keys of experts l, l + 32, ...

One token: scores to sortable integer keys; with groups, the sum of the two best of each group,
whose losers' experts get the lowest key; K rounds of a warp maximum (redux), ties to the lower id;
lane j then has the j-th expert, its weight, and the sum over lanes in order. Scores, order and tie
rule are those of router_problem, bit for bit.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
Shape letters: T tokens, E experts, K chosen, V table.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import emit, square_root
from degarble.kernels.rows import router_problem as facts
from degarble.kernels.rows.router_problem import LANES, WARPS, RouterForm, RouterProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.operands import DTYPES
from degarble.kernels.runtime.pdl import EARLY, fetch_line, follow

EVERY_LANE = 0xFFFF_FFFF


# ---- device --------------------------------------------------------------------------------------


class RouterTensors(NamedTuple):
    """Kernel's tensors, flat."""

    logits: Any  # [T, E]
    bias: Any  # float32 [E]
    ids: Any  # [T], of tokens
    table: Any  # [V, K], of experts
    experts: Any  # int32 [T, K]
    weights: Any  # float32 [T, K]


def warp_extreme(which: str, number: Any) -> Any:
    """Return the largest or smallest unsigned integer of a warp, in every lane."""
    return emit(f"redux.sync.{which}.u32 {{$w0}}, {{$r0}}, {{$r1}};", Uint32, number, EVERY_LANE)


def from_lane(number: Any, lane: int) -> Any:
    """Return a lane's number in every lane."""
    return cute.arch.shuffle_sync(number, offset=lane)


def best_of(key: Any, number: Any) -> Any:
    """Return the lowest number among the lanes of the highest key."""
    return warp_extreme("min", ops.select(key == warp_extreme("max", key), number, EVERY_LANE))


def biased_score(tensors: RouterTensors, at: Any, expert: Any, form: RouterForm) -> Any:
    """Return the score by which an expert is chosen."""
    score = facts.score_of(Float32(tensors.logits[at]), form.scoring, square_root)
    return ops.add_rn(score, Float32(tensors.bias[expert]))


def two_largest(pair: tuple[Any, Any], number: Any) -> tuple[Any, Any]:
    """Return the two largest of a pair (larger first) and one more number."""
    first, second = pair
    above, between = (facts.key_of(number) > facts.key_of(each) for each in pair)
    second = ops.select(above, first, ops.select(between, number, second))
    return ops.select(above, number, first), second


def chosen_by_key(rKeys: Any, lane: Any, form: RouterForm) -> Any:
    """Return to lane j the j-th expert by key, ties to the lower id; consumes the keys."""
    mine = Uint32(0)
    for place in range(form.chosen):
        best, expert = Uint32(rKeys[0]), lane
        for slot in range(1, form.slots):
            key = Uint32(rKeys[slot])
            better = key > best
            expert = ops.select(better, lane + slot * LANES, expert)
            best = ops.select(better, key, best)
        winner = best_of(best, expert)
        mine = ops.select(lane == place, winner, mine)
        for slot in range(form.slots):
            is_winner = lane + slot * LANES == winner
            rKeys[slot] = ops.select(is_winner, facts.TAKEN, Uint32(rKeys[slot]))
    return mine


@cute.jit
def key_of_group(sBiased: Any, lane: Any, column: Any, of_group: Any, form: RouterForm) -> Any:
    """Return to lane g the key of group g: the sum of its two best, found by several lanes."""
    several = form.lanes_of_group
    group, part = lane // several, lane % several
    first = second = Float32(float("-inf"))
    if group < form.groups:
        for place in cutlass.range(part, of_group, several, unroll=1):
            number = Float32(sBiased[group * of_group + place, column])
            first, second = two_largest((first, second), number)
    for step in facts.halvings(several):
        others = [cute.arch.shuffle_sync_bfly(each, offset=step) for each in (first, second)]
        for number in others:
            first, second = two_largest((first, second), number)
    # A group of one expert counts that expert alone.
    if of_group == 1:
        second = Float32(0.0)
    key = facts.key_of(ops.add_rn(first, second))
    key = cute.arch.shuffle_sync(key, offset=lane * several % LANES)
    return ops.select(lane < form.groups, key, Uint32(facts.TAKEN))


def groups_kept(key: Any, lane: Any, form: RouterForm) -> Any:
    """Return the bits of the best groups by the keys of lanes."""
    kept = Uint32(0)
    for _ in range(form.groups_kept):
        winner = best_of(key, lane)
        kept = kept | ops.shift_left(Uint32(1), winner)
        key = ops.select(lane == winner, facts.TAKEN, key)
    return kept


def weight_of(score: Any, scale: Any, epsilon: Any, form: RouterForm) -> Any:
    """Return a lane's weight: its share of the scores of all chosen ones, times the scale."""
    if not form.normalises:
        return ops.multiply_rn(score, scale)
    total = from_lane(score, 0)
    # Serial, from the first chosen expert on: the order is part of the definition.
    for place in range(1, form.chosen):
        total = ops.add_rn(total, from_lane(score, place))
    return ops.multiply_rn(ops.divide_rn(score, ops.add_rn(total, epsilon)), scale)


@cute.kernel
def router_kernel(  # noqa: PLR0915  one token: what a lane holds would have to be handed on
    tensors: RouterTensors,
    extents: tuple[Int32, ...],
    factors: tuple[Float32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Choose a token's experts and compute their weights."""
    tokens, experts, vocabulary = extents
    scale, epsilon = factors
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(not form.by_table):  # noqa: SIM102  known in tracing
        if (block == 0) & (thread % LANES == 0) & (thread < experts):  # 32 numbers a line
            fetch_line(tensors.bias.iterator.toint() + Int64(thread) * 4)
    follow()
    lane, warp = Uint32(thread) % LANES, Uint32(thread) // LANES
    own = Int32(block) * form.tokens
    column = Uint32(0)  # of shared memory
    if cutlass.const_expr(not form.few):
        own, column = own + Int32(warp), warp
    token = ops.minimum(own, tokens - 1)  # a warp too many repeats the last one, and writes nothing
    start = Int64(token) * Int64(experts)

    mine = Int32(facts.NONE)
    if cutlass.const_expr(form.by_table):
        row = Int64(tensors.ids[token])
        if (lane < form.chosen) & (row >= 0) & (row < Int64(vocabulary)):
            named = Int64(tensors.table[row * form.chosen + Int64(lane)])
            if (named >= 0) & (named < Int64(experts)):
                mine = Int32(named)
    else:
        rKeys = cute.make_rmem_tensor(form.slots, Uint32)
        rKeys.fill(facts.TAKEN)
        allocator = cutlass.memory.SmemAllocator()
        held = facts.MOST_EXPERTS if form.groups > 1 or form.few else 1
        sBiased = allocator.allocate_tensor(Float32, cute.make_layout((held, form.tokens)), 16)
        if cutlass.const_expr(form.few):
            for expert in cutlass.range(Uint32(thread), Uint32(experts), WARPS * LANES, unroll=1):
                at = start + Int64(expert)
                sBiased[expert, column] = biased_score(tensors, at, expert, form)
            cute.arch.sync_threads()
        for slot in cutlass.range_constexpr(form.slots):
            expert = lane + slot * LANES
            if expert < Uint32(experts):
                if cutlass.const_expr(form.few):
                    rKeys[slot] = facts.key_of(Float32(sBiased[expert, column]))
                else:
                    biased = biased_score(tensors, start + Int64(expert), expert, form)
                    rKeys[slot] = facts.key_of(biased)
                    if cutlass.const_expr(form.groups > 1):
                        sBiased[expert, column] = biased
        if cutlass.const_expr(form.groups > 1):
            cute.arch.sync_warp()
            of_group = Uint32(experts) // form.groups
            key = key_of_group(sBiased, lane, column, of_group, form)
            kept = groups_kept(key, lane, form)
            for slot in cutlass.range_constexpr(form.slots):
                expert = lane + slot * LANES
                is_open = ops.shift_right(kept, expert // of_group % LANES) & 1
                if (expert < Uint32(experts)) & (is_open == 0):
                    # Not TAKEN: experts of lost groups still come before absent ones.
                    rKeys[slot] = Uint32(facts.LOWEST_KEY)
        mine = Int32(chosen_by_key(rKeys, lane, form))

    score = Float32(0.0)
    if (lane < form.chosen) & (mine >= 0):
        logit = Float32(tensors.logits[start + Int64(mine)])
        score = facts.score_of(logit, form.scoring, square_root)
    weight = weight_of(score, scale, epsilon, form)
    if cutlass.const_expr(form.few):
        own = ops.select(warp == 0, own, tokens)  # the other warps have found the same
    if (lane < form.chosen) & (own < tokens):
        at = Int64(token) * form.chosen + Int64(lane)
        tensors.experts[at] = mine
        if mine < 0:
            weight = Float32(0.0)
        tensors.weights[at] = weight


@cute.jit
def launch_router(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    factors: tuple[Float32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form; extents are tokens, experts, table rows, thread blocks."""
    tokens, experts, vocabulary, blocks = extents
    flat = cute.make_layout(1 << 30)
    tensors = RouterTensors(*(cute.make_tensor(address, flat) for address in pointers))
    router_kernel(tensors, (tokens, experts, vocabulary), factors, form).launch(
        grid=[blocks, 1, 1], block=[WARPS * LANES, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[RouterProblem, RouterForm]) -> tuple[Any, ...]:
    problem = of.problem
    extents = (problem.tokens, problem.experts, problem.vocabulary, facts.grid(problem, of.form))
    return extents, (problem.scale, problem.epsilon)


def _ids(of: RouterProblem | RouterForm) -> Storage:
    element = Int64 if of.ids == "int64" else Int32
    return Storage(element, DTYPES[of.ids], DTYPES[of.ids].itemsize)


def _where(operand: str, *, by_table: bool) -> Presence[RouterProblem]:
    expected = f"{operand} exactly where {'a table chooses' if by_table else 'scores choose'}"
    return Presence(
        lambda p: (p.vocabulary > 0) == by_table,
        lambda p: f"The problem says vocabulary={p.vocabulary}.",
        expected,
        expected,
    )


_Operand = Operand[RouterProblem]
_NUMBERS, _CHOICES = Storage(Float32, torch.float32, 4), Storage(Int32, torch.int32, 4)
KERNEL = Kernel[RouterProblem, RouterForm](
    entry=launch_router,
    operands=(
        _Operand("logits", _NUMBERS, lambda p: (p.tokens, p.experts)),
        _Operand("bias", _NUMBERS, lambda p: (p.experts,), _where("a bias", by_table=False)),
        _Operand(
            "ids",
            _ids,
            lambda p: (p.tokens,),
            _where("token ids", by_table=True),
            label="token ids",
        ),
        _Operand(
            "table", _ids, lambda p: (p.vocabulary, p.chosen), _where("a table", by_table=True)
        ),
        _Operand("experts", _CHOICES, lambda p: (p.tokens, p.chosen), output=True),
        _Operand("weights", _NUMBERS, lambda p: (p.tokens, p.chosen), output=True),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * 4, (Float32,) * 2),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
