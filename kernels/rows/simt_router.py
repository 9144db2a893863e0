"""Router: the top-k experts of every token and their weights from its logits.

One source for sm_90a and sm_100a. Scores are sqrt(softplus) or sigmoid; experts are chosen by score
plus bias, within the best groups where there are groups, or by a table of token ids; weights come
from the scores without bias. A token has a warp, or, where tokens are few, a thread block whose
warps share its scores, of which one chooses. Lane l holds the keys of experts l, l + 32, ...

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
AT_ONCE = 8  # keys of a group that a lane loads before it compares them


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


def biased_score(tensors: RouterTensors, score: Any, expert: Any) -> Any:
    """Return the score by which an expert is chosen."""
    return ops.add_rn(score, Float32(tensors.bias[expert]))


def scores_of(tensors: RouterTensors, at: Any, expert: Any, form: RouterForm) -> tuple[Any, Any]:
    """Return an expert's score, and the key by which it is chosen."""
    score = facts.score_of(Float32(tensors.logits[at]), form.scoring, square_root)
    return score, facts.key_of(biased_score(tensors, score, expert))


def best_slot(rKeys: Any, lane: Any, form: RouterForm) -> tuple[Any, Any]:
    """Return the highest of a lane's keys and its expert, of equal ones the lower; by halves."""
    found = [(Uint32(rKeys[slot]), lane + slot * LANES) for slot in range(form.slots)]
    while len(found) > 1:
        pairs = zip(found[0::2], found[1::2], strict=False)
        kept = []
        for (key, expert), (other, behind) in pairs:
            better = other > key
            kept.append((ops.select(better, other, key), ops.select(better, behind, expert)))
        found = kept + ([found[-1]] if len(found) % 2 else [])
    return found[0]


def chosen_by_key(rKeys: Any, lane: Any, form: RouterForm) -> Any:
    """Return to lane j the j-th expert by key, ties to the lower id; consumes the keys."""
    mine = Uint32(0)
    for place in range(form.chosen):
        winner = best_of(*best_slot(rKeys, lane, form))
        mine = ops.select(lane == place, winner, mine)
        for slot in range(form.slots):
            is_winner = lane + slot * LANES == winner
            rKeys[slot] = ops.select(is_winner, facts.TAKEN, Uint32(rKeys[slot]))
    return mine


def with_two(pair: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the two highest of two pairs of keys, the higher one of each first."""
    lower = ops.maximum(ops.minimum(pair[0], other[0]), ops.maximum(pair[1], other[1]))
    return ops.maximum(pair[0], other[0]), lower


@cute.jit
def key_of_group(sKeys: Any, lane: Any, column: Any, of_group: Any, form: RouterForm) -> Any:
    """Return to lane g the key of group g: the sum of its two best, found by several lanes."""
    several = form.lanes_of_group
    group, part = lane // several, lane % several
    lowest = Uint32(facts.LOWEST_KEY)
    first = second = lowest
    if group < form.groups:
        for begin in cutlass.range(part, of_group, several * AT_ONCE, unroll=1):
            for step in cutlass.range_constexpr(AT_ONCE):  # so many loads under way
                place, key = begin + step * several, lowest
                if place < of_group:
                    key = Uint32(sKeys[group * of_group + place, column])
                first, second = with_two((first, second), (key, lowest))
    for step in facts.halvings(several):
        pair = first, second
        others = [Uint32(cute.arch.shuffle_sync_bfly(each, offset=step)) for each in pair]
        first, second = with_two(pair, (others[0], others[1]))
    numbers = facts.number_of_key(first), facts.number_of_key(second)
    # A group of one expert counts that expert alone.
    least = ops.select(of_group == 1, Float32(0.0), numbers[1])
    key = facts.key_of(ops.add_rn(numbers[0], least))
    key = cute.arch.shuffle_sync(key, offset=lane * several % LANES)
    return ops.select(lane < form.groups, key, Uint32(facts.TAKEN))


def groups_kept(key: Any, lane: Any, form: RouterForm) -> Any:
    """Return the bits of the best groups by the keys of lanes: few others come before them."""
    before = Uint32(0)
    for group in range(form.groups):
        other = Uint32(from_lane(key, group))
        comes = (other > key) | ((other == key) & (lane > group))
        before = before + ops.select(comes, Uint32(1), Uint32(0))
    kept = (lane < form.groups) & (before < form.groups_kept)
    return Uint32(cute.arch.vote_ballot_sync(kept))


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
def router_kernel(
    tensors: RouterTensors,
    extents: tuple[Int32, ...],
    factors: tuple[Float32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Choose a token's experts and compute their weights."""
    tokens, experts, vocabulary = extents
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

    mine, score = Int32(facts.NONE), Float32(0.0)
    if cutlass.const_expr(form.by_table):
        row = Int64(tensors.ids[token])
        if (lane < form.chosen) & (row >= 0) & (row < Int64(vocabulary)):
            named = Int64(tensors.table[row * form.chosen + Int64(lane)])
            if (named >= 0) & (named < Int64(experts)):
                mine = Int32(named)
        if mine >= 0:
            logit = Float32(tensors.logits[start + Int64(mine)])
            score = facts.score_of(logit, form.scoring, square_root)
        write_choice(tensors, (own, tokens, lane), (mine, score), factors, form)
    else:
        allocator = cutlass.memory.SmemAllocator()
        held = facts.MOST_EXPERTS if form.groups > 1 or form.few else 1
        layout = cute.make_layout((held, form.tokens))
        sKeys = allocator.allocate_tensor(Uint32, layout, 16)
        sScores = allocator.allocate_tensor(
            Float32, layout if form.few else cute.make_layout(1), 16
        )
        if cutlass.const_expr(form.few):
            for expert in cutlass.range(Uint32(thread), Uint32(experts), WARPS * LANES, unroll=1):
                made = scores_of(tensors, start + Int64(expert), expert, form)
                sScores[expert, column], sKeys[expert, column] = made
            cute.arch.sync_threads()
        place, numbers = (own, tokens, lane, column), (experts, start)
        if cutlass.const_expr(form.few):
            if warp == 0:  # one warp chooses
                choose(tensors, (sKeys, sScores), place, numbers, factors, form)
        else:
            choose(tensors, (sKeys, sScores), place, numbers, factors, form)


@cute.jit
def choose(
    tensors: RouterTensors,
    shared: tuple[Any, Any],
    place: tuple[Any, ...],
    numbers: tuple[Any, Any],
    factors: tuple[Float32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Choose a token's experts by a warp; `place` is token, tokens, lane, column of shared memory.

    `numbers` are the experts, and the token's first logit.
    """
    sKeys, sScores = shared
    own, tokens, lane, column = place
    experts, start = numbers
    rKeys = cute.make_rmem_tensor(form.slots, Uint32)
    rKeys.fill(facts.TAKEN)
    for slot in cutlass.range_constexpr(form.slots):
        expert = lane + slot * LANES
        if expert < Uint32(experts):
            if cutlass.const_expr(form.few):
                rKeys[slot] = Uint32(sKeys[expert, column])
            else:
                _, key = scores_of(tensors, start + Int64(expert), expert, form)
                rKeys[slot] = key
                if cutlass.const_expr(form.groups > 1):
                    sKeys[expert, column] = key
    if cutlass.const_expr(form.groups > 1):
        cute.arch.sync_warp()
        of_group = Uint32(experts) // form.groups
        key = key_of_group(sKeys, lane, column, of_group, form)
        kept = groups_kept(key, lane, form)
        for slot in cutlass.range_constexpr(form.slots):
            expert = lane + slot * LANES
            is_open = ops.shift_right(kept, expert // of_group % LANES) & 1
            if (expert < Uint32(experts)) & (is_open == 0):
                # Not TAKEN: experts of lost groups still come before absent ones.
                rKeys[slot] = Uint32(facts.LOWEST_KEY)
    mine, score = Int32(chosen_by_key(rKeys, lane, form)), Float32(0.0)
    if lane < form.chosen:
        if cutlass.const_expr(form.few):
            score = Float32(sScores[mine, column])
        else:
            logit = Float32(tensors.logits[start + Int64(mine)])
            score = facts.score_of(logit, form.scoring, square_root)
    write_choice(tensors, (own, tokens, lane), (mine, score), factors, form)


@cute.jit
def write_choice(
    tensors: RouterTensors,
    place: tuple[Any, Any, Any],
    chosen: tuple[Any, Any],
    factors: tuple[Float32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Write a lane's expert and its weight; `place` is token, tokens, lane."""
    own, tokens, lane = place
    mine, score = chosen
    scale, epsilon = factors
    weight = weight_of(score, scale, epsilon, form)
    if (lane < form.chosen) & (own < tokens):
        at = Int64(own) * form.chosen + Int64(lane)
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
