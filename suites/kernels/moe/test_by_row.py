"""Experts of very few tokens: arithmetic, refusals, and on an H200 bits, company, forms, races."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.gemm import w4a16_problem as w4a16
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.gemm.w4a16_walk_problem import W4A16WalkForm
from degarble.kernels.moe import by_row_problem as facts
from degarble.kernels.moe.by_row_problem import ByRowProblem, DecodeProblem
from degarble.kernels.moe.problem import BEFORE_W2, GATE_AND_UP, MoeProblem
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels.gemm import w4a16_checks
from degarble.suites.kernels.moe import by_row_checks as checks
from degarble.suites.kernels.moe.by_row_checks import Case
from degarble.suites.kernels.moe.contract import BY_ROW_TACTICS
from degarble.suites.kernels.moe.moe_faults import as_they_are, not_clamped
from degarble.suites.support.pretended_gpu import META, pretended_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from degarble.kernels.gemm.w4a16_problem import W4A16ByRowForm, W4A16Tactic

pytestmark = pytest.mark.needs("cutlass")

SMALL = MoeProblem(5, 352, 416, 8, 3, 8, 2.0)
WHOLE = MoeProblem(5, 2560, 512, 8, 3, 8, 2.0)  # whole lines and rows: such matrices are walked


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_the_shared_expert_come_first_and_everybody_has_one(shared: bool) -> None:
    problem = ByRowProblem(SMALL, shared)
    assert problem.rows == 15 + 5 * shared
    assert problem.experts == 8 + shared
    assert DecodeProblem(problem, "values").grid == (1, problem.rows)
    assert DecodeProblem(problem, "values").input_shape == (5, 352)
    assert DecodeProblem(problem, "swiglu").input_shape == (problem.rows, 2 * 416)
    summed = facts.summed(problem, shared=False)
    assert (summed.rows, summed.shared, summed.rides) == (problem.rows, shared, shared)
    assert facts.summed(ByRowProblem(SMALL), shared=True).shared


@pytest.mark.parametrize("shared", [0, 5])
def test_a_row_has_the_expert_that_its_slot_chose(shared: int) -> None:
    """Absent ones get a number behind the last, whose matrices are not there."""
    routed = 8
    experts = routed + bool(shared)
    chosen = [3, 7, routed, (1 << 32) - 1, 0, 1 << 30]
    slots = [w4a16.slot_of(row, shared) for row in range(shared + len(chosen))]
    assert slots == [0] * shared + list(range(len(chosen)))
    found = [
        w4a16.expert_of(row, chosen[slot], (shared, routed, experts))
        for row, slot in enumerate(slots)
    ]
    assert found == [routed] * shared + [3, 7, experts, experts, 0, experts]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [*checks.MODELS.values(), (352, 416, 3), (32, 32, 1)])
def test_two_thread_blocks_share_a_processor_and_cover_the_outputs(
    target: str, sizes: tuple[int, int, int]
) -> None:
    hidden, width, chosen = sizes
    problem = ByRowProblem(MoeProblem(16, hidden, width, 256, chosen, 256), shared=True)
    for products, turns in product((GATE_AND_UP, 1), (1, 2, 7)):
        form = facts.form_of(problem, products, target)
        division = facts.by_turns(problem, form, turns)
        extents = facts.extents_of(problem, form, division)
        rows, n, k, experts, shared, kept, blocks, size, *shares = extents
        assert (rows, experts, shared) == (16 * (chosen + 1), 257, 16)
        assert (n, k) == ((width, hidden) if products == GATE_AND_UP else (hidden, width))
        # CUDA C++ Programming Guide 13.0: 228 KB a processor, 1 KB of which each block reserves.
        assert form.resident * (size + w4a16.RESERVED_BYTES) <= 228 * 1024
        assert form.resident * form.threads <= 2048
        sums_at = w4a16.BARRIER_BYTES + form.ring_bytes + kept * form.kept_bytes
        assert sums_at % w4a16.SLOT_BYTES == 0
        assert sums_at + 2 * form.run_bytes + w4a16.SCALE_SLOTS * w4a16.SLOT_BYTES == size
        # No round waits for activations of the one before: there is room until its stages are free.
        rounds = turns * -(-k // w4a16.ROUND)
        assert turns == 1 or kept == rounds or (kept - 1) * form.tiles >= form.stages
        assert turns > 1 or kept in {
            rounds,
            w4a16.rounds_kept(facts.matrix_problem(problem, products), form, 1),
        }
        walks = [walked(block, rows * products, shares, form.tiles) for block in range(blocks)]
        assert max(len(walk) for walk in walks) <= turns
        tiles = [first + tile for walk in walks for first, count in walk for tile in range(count)]
        assert tiles == list(range(shares[0] * rows * products))
        found = {
            w4a16.row_of(tile, place, form.layout)
            for tile, place in product(range(shares[0]), range(w4a16.TILE))
        }
        assert set(range(n)) <= found


def walked(block: int, matrices: int, shares: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the runs of a thread block, by first tile and tiles; shares are of `extents_of`."""
    of_matrix, *units = shares
    tile, end = w4a16.share_of(block, of_matrix * matrices, units)
    runs = []
    while tile < end:
        runs.append((tile, w4a16.run_length(tile, end, of_matrix, most)))
        tile += runs[-1][1]
    return runs


def test_every_tile_of_every_row_has_one_place_on_one_walk() -> None:
    for of_matrix, matrices, most in ((128, 14, 4), (8, 9, 3), (448, 9, 4), (8, 2, 1)):
        every = of_matrix * matrices
        for blocks, unit in product((1, 5, every // 9 + 1, every, every + 3), (1, 2, 3, 4)):
            least, more = divmod(-(-every // unit), blocks)
            shares = (of_matrix, least, more, unit)
            runs = [run for block in range(blocks) for run in walked(block, matrices, shares, most)]
            tiles = [first + tile for first, count in runs for tile in range(count)]
            assert tiles == list(range(every)), (blocks, unit)
            assert all(0 < count <= most for _, count in runs)
            assert all(first // of_matrix == (first + n - 1) // of_matrix for first, n in runs)
    places = [w4a16.tile_place(tile, 8, 2) for tile in range(8 * 3 * 2)]
    assert sorted(places) == list(product(range(8), range(3), range(2)))


@pytest.mark.parametrize("tokens", [1, 4, 64])
@pytest.mark.parametrize("products", [GATE_AND_UP, 1])
def test_thread_blocks_that_are_there_at_once_have_equal_shares(tokens: int, products: int) -> None:
    hidden, width, chosen = checks.MODELS["v4-flash"]
    problem = ByRowProblem(MoeProblem(tokens, hidden, width, 256, chosen, 256), shared=True)
    form = facts.form_of(problem, products, "sm_90a")
    division = facts.choose_division(problem, form, 132)
    assert division == facts.Division(264, 1)
    *_, kept, blocks, size, of_matrix, least, more, unit = facts.extents_of(problem, form, division)
    assert form.resident * (size + w4a16.RESERVED_BYTES) <= 228 * 1024
    assert (kept - 1) * form.tiles >= form.stages
    assert least * blocks + more == of_matrix * products * problem.rows
    assert unit == 1
    # Where stages leave less room, activations of fewer rounds are kept.
    deeper = facts.form_of(problem, products, "sm_90a", replace(facts.WIDE, stages=5))
    *_, fewer, _, size, _, _, _, _ = facts.extents_of(problem, deeper, division)
    assert fewer == min(kept, 3)
    assert deeper.resident * (size + w4a16.RESERVED_BYTES) <= 228 * 1024
    # Few tiles: a run each, as many thread blocks as that takes.
    assert facts.choose_division(problem, form, 100_000) == facts.by_turns(problem, form, 1)


def test_sums_of_a_run_have_places_of_their_own_and_meet_in_no_bank() -> None:
    """Lanes of a warp write, and threads read, adjacent words."""
    places = {w4a16.run_sum_offset(part, output, 64) for part in range(16) for output in range(64)}
    assert places == set(range(0, 16 * 64 * 4, 4))
    for first in range(0, 64, 32):
        banks = {w4a16.run_sum_offset(3, first + lane, 64) // 4 % 32 for lane in range(32)}
        assert len(banks) == 32


def test_refuses_by_name() -> None:
    with pytest.raises(ShapeMismatch, match=r"tokens whose rows .*= 65: expected at most 64"):
        ByRowProblem(replace(SMALL, tokens=65))
    with pytest.raises(InvalidArgument, match="experts held here = 7: expected all 8"):
        ByRowProblem(replace(SMALL, experts=7))
    with pytest.raises(InvalidArgument, match="weighting = 'before w2'"):
        ByRowProblem(replace(SMALL, weighting=BEFORE_W2))


def test_the_output_of_a_shared_expert_that_takes_part_is_refused() -> None:
    case = Case(ByRowProblem(SMALL, shared=True))
    given = checks.given_of(case, "cpu")
    with pytest.raises(InvalidArgument, match="shared expert's output"):
        kernel_named("sm90_moe_by_row").run(
            case.problem, checks.SETTINGS, None, **given, shared=given["x"]
        )


# ---- walks ---------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: so many arrivals end a phase."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.ended = 0

    def arrive(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.missing, self.ended = self.arrivals, self.ended + 1

    def has_ended(self, parity: int) -> bool:
        return self.ended % 2 != parity


class WalkModel:
    """The order of a thread block's waits, arrivals, copies and sums, in any interleaving.

    Each warp is a generator that yields what it waits for. A copy lands whenever it likes.
    """

    def __init__(
        self, form: W4A16ByRowForm, rounds: int, kept: int, buffers: int, slots: int
    ) -> None:
        self.form, self.rounds, self.kept = form, rounds, kept
        self.sums = [[-1] * 3 for _ in range(buffers)]  # the run whose sums a warp left
        self.scales = [-1] * slots
        self.rings = [
            ([Barrier(1) for _ in range(size)], [Barrier(3) for _ in range(size)])
            for size in (form.stages, kept)
        ]
        self.held = [[-1] * form.stages, [-1] * kept]
        self.readers: list[list[set[int]]] = [[set() for _ in held] for held in self.held]
        self.copies: list[tuple[int, int, int]] = []
        self.met = 0

    def asked(self, ring: int, number: int) -> Iterator[Callable[[], bool]]:
        """Wait for space and ask for the copy of that number."""
        size = len(self.held[ring])
        full, empty = self.rings[ring]
        at, parity = number % size, 1 - number // size % 2
        yield lambda: empty[at].has_ended(parity)
        last = number % (self.rounds * self.form.tiles) == self.rounds * self.form.tiles - 1
        if ring == 0 and last:
            run = number // (self.rounds * self.form.tiles)
            self.scales[run % len(self.scales)] = run
        self.copies.append((ring, at, number))
        assert full[at].missing == 1

    def loading(self, runs: int) -> Iterator[Callable[[], bool]]:
        for round_ in range(runs * self.rounds):
            yield from self.asked(1, round_)
            for tile in range(self.form.tiles):
                yield from self.asked(0, round_ * self.form.tiles + tile)

    def land(self, which: int) -> None:
        ring, at, number = self.copies.pop(which)
        assert not self.readers[ring][at], "a copy overwrites what a warp still reads"
        self.held[ring][at] = number
        self.rings[ring][0][at].arrive()

    def taken(self, warp: int, ring: int, number: int) -> Iterator[Callable[[], bool]]:
        """Wait for a copy, and begin to read it."""
        size = len(self.held[ring])
        at, parity = number % size, number // size % 2
        yield lambda: self.rings[ring][0][at].has_ended(parity)
        assert self.held[ring][at] == number, "another copy than the one that a warp waited for"
        self.readers[ring][at].add(warp)

    def given_back(self, warp: int, ring: int, number: int) -> None:
        at = number % len(self.held[ring])
        self.readers[ring][at].remove(warp)
        self.rings[ring][1][at].arrive()

    def multiplying(self, warp: int, runs: int) -> Iterator[Callable[[], bool]]:
        for run in range(runs):
            for round_ in range(run * self.rounds, (run + 1) * self.rounds):
                yield from self.taken(warp, 1, round_)
                for tile in range(self.form.tiles):
                    number = round_ * self.form.tiles + tile
                    yield from self.taken(warp, 0, number)
                    yield lambda: True
                    self.given_back(warp, 0, number)
                self.given_back(warp, 1, round_)
            self.sums[run % len(self.sums)][warp] = run
            self.met += 1
            wanted = 3 * (run + 1)
            yield lambda wanted=wanted: self.met >= wanted  # type: ignore[misc]
            if warp == 0:
                yield lambda: True
                assert self.sums[run % len(self.sums)] == [run] * 3, "sums of another run"
                assert self.scales[run % len(self.scales)] == run, "the scale of another run"

    def walk(self, runs: int, drawn: random.Random) -> None:
        """Interleave all warps and copies at random; each warp is slow or quick for a while."""
        warps = [self.loading(runs), *(self.multiplying(warp, runs) for warp in range(3))]
        waits = {warp: next(warp) for warp in warps}
        weights = [1.0] * 5
        while waits:
            if drawn.random() < 0.02:
                weights = [drawn.choice((0.01, 1.0, 30.0)) for _ in weights]
            able = [n for n, warp in enumerate(warps) if warp in waits and waits[warp]()]
            able += [4] * bool(self.copies)
            assert able, "all wait for each other"
            (chosen,) = drawn.choices(able, [weights[n] for n in able])
            if chosen == 4:
                self.land(drawn.randrange(len(self.copies)))
            elif (wait := next(warps[chosen], None)) is None:
                del waits[warps[chosen]]
            else:
                waits[warps[chosen]] = wait


def _walked(tactic: W4A16Tactic, columns: int, buffers: int, slots: int) -> None:
    problem = ByRowProblem(MoeProblem(1, columns, 2048, 8, 6, 8, 10.0), shared=True)
    form = facts.form_of(problem, GATE_AND_UP, "sm_90a", tactic)
    one, turns = facts.matrix_problem(problem, GATE_AND_UP), 40
    kept = w4a16.rounds_kept(one, form, turns)
    for seed in range(20):
        model = WalkModel(form, one.rounds, kept, buffers, slots)
        model.walk(turns, random.Random(f"{tactic} {columns} {seed}"))


SHORT = replace(facts.NARROW, tiles=1, stages=10, resident=1)  # many stages, few of them in a run
each_walk = pytest.mark.parametrize("columns", [512, 4096, 7168])


@each_walk
@pytest.mark.parametrize("tactic", [*BY_ROW_TACTICS, SHORT])
def test_a_walk_ends_and_nothing_is_overwritten_before_it_is_read(
    tactic: W4A16Tactic, columns: int
) -> None:
    _walked(tactic, columns, w4a16.SUM_BUFFERS, w4a16.SCALE_SLOTS)


def test_a_walk_with_one_buffer_or_few_slots_overwrites() -> None:
    with pytest.raises(AssertionError, match="sums of another run"):
        _walked(facts.WIDE, 512, 1, w4a16.SCALE_SLOTS)
    with pytest.raises(AssertionError, match="the scale of another run"):
        _walked(SHORT, 512, w4a16.SUM_BUFFERS, 4)


# ---- planted faults ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A function of a module, and what stands in its place; it is given the true one first."""

    name: str
    module: str
    function: str
    instead: Callable[..., Any]
    moe: MoeProblem = SMALL

    @property
    def case(self) -> Case:
        """The call by which it is judged."""
        return Case(ByRowProblem(self.moe, shared=True), "even", 3)


def _expert_before(true: Any, *given: Any) -> Any:
    place, *others = true(*given)
    (matrix,) = place.matrix
    return place._replace(matrix=(matrix - given[3].products,)), *others


def _gate_for_up(true: Any, *given: Any) -> Any:
    (place, *others), products = true(*given), given[3].products
    (matrix,) = place.matrix
    return place._replace(matrix=(matrix // products * products,)), *others


def _first_row(true: Any, *given: Any) -> Any:
    place, *others = true(*given)
    return place._replace(row=0), *others


def _scale_of_one(true: Any, address: Any, factors: Any, known: Any) -> Any:
    true(address, [factor * 0.0 + 1.0 for factor in factors], known)


def _scale_of_the_next(true: Any, *given: Any) -> Any:
    expert, own, *others = given
    return true(expert, others[-1].products - 1 - own, *others)


def _tile_before(true: Any, tile: Any, *given: Any) -> Any:
    return true(tile // 64 * 64, *given)


def _one_more(true: Any, *given: Any) -> Any:
    return true(*given) + 1


def _nothing(_true: Any, *given: Any) -> Any:
    return given[-2] * 0  # of a place and a lane, or of a part and a place


def _first_part(true: Any, part: Any, *given: Any) -> Any:
    return true(part * 0, *given)


def _row_before(true: Any, row: Any, *given: Any) -> Any:
    return true(row // 2 * 2, *given)


def _half_of_parts(true: Any, start: Any, form: Any) -> Any:
    return true(start, replace(form, parts=form.parts // 2))


_PRODUCT = "degarble.kernels.moe.w4a16_by_row"
_WALK = "degarble.kernels.gemm.w4a16_walk"
_PLACES = f"{_WALK}_problem"
FAULTS = (
    Fault("matrices of the expert before", _PRODUCT, "own_matrix", _expert_before),
    Fault("gate for up", _PRODUCT, "own_matrix", _gate_for_up),
    Fault("first row for all", _PRODUCT, "own_matrix", _first_row),
    Fault(
        "scale left out", "degarble.kernels.gemm.w4a16_instructions", "store_factors", _scale_of_one
    ),
    Fault("scale of up for gate", _PRODUCT, "scale_of", _scale_of_the_next),
    Fault("tiles twice", "degarble.kernels.gemm.w4a16_problem", "tile_place", _tile_before),
    Fault("a tile left out", "degarble.kernels.gemm.w4a16_problem", "run_length", _one_more),
    Fault(
        "limit left out", "degarble.kernels.primitives.device_words", "swiglu_numbers", not_clamped
    ),
    *(
        Fault(f"walks: {name}", module, function, instead, WHOLE)
        for name, module, function, instead in (
            ("expert of another row", _WALK, "expert_of_row", _row_before),
            ("half of the parts", _WALK, "added", _half_of_parts),
            ("scales of the first place", _PLACES, "scale_offset", _nothing),
            ("codes of the first part", _PLACES, "code_offset", _first_part),
        )
    ),
    Fault("routing weight left out", "degarble.kernels.moe.simt_moe_rows", "weighed", as_they_are),
)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace the function while kernels are traced, past every cache."""
    module = import_module(fault.module)
    true = getattr(module, fault.function)

    def instead(*given: Any, **named: Any) -> Any:
        return fault.instead(true, *given, **named)

    checks.fresh()
    try:
        with mock.patch.object(module, fault.function, instead):
            yield
    finally:
        checks.fresh()


def texts(case: Case) -> list[str]:
    """Return the PTX of all that a call launches, as it is traced now."""
    call: Any = kernel_named("sm90_moe_by_row")
    problems = call.problems(case.problem, None, {})
    return [
        kernel.compile_form(kernel.choose_form(own, "sm_90a"), checks.SETTINGS).ptx
        for kernel, own in zip(call.kernels, problems, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_what_is_traced(fault: Fault) -> None:
    whole = texts(fault.case)
    with planted(fault):
        assert texts(fault.case) != whole


@pytest.mark.h200
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_and_a_whole_call_is_not(fault: Fault) -> None:
    # The whole call first: the oracle must not be compiled with a fault.
    assert not checks.mismatch(fault.case)
    with planted(fault):
        assert checks.mismatch(fault.case)


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.h200
def test_a_token_depends_on_no_other_token() -> None:
    moe = MoeProblem(16, 1024, 512, 16, 4, 16, 10.0)
    case = Case(ByRowProblem(moe, shared=True), "same", 5)
    given = checks.given_of(case)
    whole = checks.memory_of(case, given)
    checks.launch(case, given, whole)
    of_tokens = ("x", "experts", "weights")
    for first, count in ((0, 1), (7, 1), (15, 1), (3, 2), (5, 9)):
        part = replace(case, problem=ByRowProblem(replace(moe, tokens=count), shared=True))
        tokens = slice(first, first + count)
        own = {**given, **{name: given[name][tokens].contiguous() for name in of_tokens}}
        memory = checks.memory_of(part, own)
        checks.launch(part, own, memory)
        assert torch.equal(memory["out"], whole["out"][tokens]), (first, count)
    given["x"][4] = torch.nan
    again = checks.memory_of(case, given)
    checks.launch(case, given, again)
    others = [token for token in range(16) if token != 4]
    assert torch.equal(again["out"][others], whole["out"][others])


@pytest.mark.h200
def test_tiles_and_stages_do_not_change_a_bit() -> None:
    call: Any = import_module("degarble.kernels.moe.sm90_moe_by_row")
    for hidden, width in ((4096, 2048), (512, 256)):
        problem = ByRowProblem(MoeProblem(3, hidden, width, 8, 2, 8, 10.0), shared=True)
        case = Case(problem, "even", hidden)
        given = checks.given_of(case)
        memory = checks.memory_of(case, given)
        checks.launch(case, given, memory)
        for products, kernel, out in (
            (GATE_AND_UP, call.FC1, "gate_and_up"), (1, call.FC2, "products"),
        ):  # fmt: skip
            read = {**given, **memory}
            own = {name: read[name] for name in kernel.names if name != out}
            for tactic, early in product(BY_ROW_TACTICS, (False, True)):
                form = facts.form_of(problem, products, "sm_90a", tactic, early=early)
                made = torch.full_like(memory[out], torch.nan)
                kernel.run(problem, checks.SETTINGS, form, **own, **{out: made})
                assert torch.equal(made, memory[out]), tactic


@pytest.mark.parametrize(
    ("outputs", "columns", "tiles"),
    [(32_768, 1024, 2), (18_432, 7168, 1), (4096, 8192, 1), (512, 4096, 1), (7168, 16_384, 1),
     (8480, 512, 4), (8480, 4096, 1), (4032, 4096, 1), (2080, 4096, 0), (8455, 4096, 0)],
)  # fmt: skip
def test_one_row_walks_whole_lines_or_where_tiles_fill_more_than_a_wave(
    outputs: int, columns: int, tiles: int
) -> None:
    problem = facts.alone(outputs, columns)
    if not tiles:
        assert problem is None
        return
    assert problem is not None
    form = facts.choose_second_form(problem, "sm_90a")
    assert (form.tiles, form.products) == (tiles, 1)
    assert isinstance(form, W4A16WalkForm) == (outputs % 128 == 0)
    one = facts.matrix_problem(problem, 1)
    assert (one.rows, one.outputs, one.columns) == (1, outputs, columns)


@pytest.mark.h200
@pytest.mark.parametrize("scale", ["ordinary", "tiny", "all"])
@pytest.mark.parametrize(("outputs", "columns"), [(32_768, 1024), (4096, 8192), (8480, 512)])
def test_one_row_alone_has_the_bits_of_its_product_with_others(
    outputs: int, columns: int, scale: str
) -> None:
    problem = facts.alone(outputs, columns)
    assert problem is not None
    case = w4a16_checks.Case(W4A16Problem(3, outputs, columns, "128x4"), scale=scale)
    # Rows as they come, decoded: walks keep them in FP16.
    x = checks.decoded(case.activations.cuda(), torch.full((1,), 0.01, device="cuda"))
    vars(case)["activations"] = x.cpu()
    want = w4a16_checks.on_device(case)
    weights, one = w4a16_checks.on_gpu(case.weights), torch.ones(1, device="cuda")
    for row in range(3):
        made = kernel_named("sm90_moe_by_row.ALONE").run_one(
            problem, checks.SETTINGS, x=x[row : row + 1], codes=weights.codes[None],
            scales=weights.block_scale[None], decode_scale=weights.decode_scale.reshape(1),
            input_scale=one, number=torch.zeros_like(one, dtype=torch.int32).reshape(1, 1),
        )  # fmt: skip
        assert torch.equal(made, want[row : row + 1])


LAUNCHES = {3: ("FIRST", "SECOND", "SUM"), 4: ("ROWS", "FC1", "SECOND", "SUM"),
            5: ("ROWS", "FC1", "GATED", "FC2", "SUM")}  # fmt: skip


@pytest.mark.parametrize("sequence", ["KERNEL", "PRODUCTS"])
@pytest.mark.parametrize(
    ("shape", "named", "launches"),
    [
        *(((1, 512, 256), named, 3) for named in ((), ("places",), ("gate_and_up", "products"))),
        *(((1, 512, 256), (name,), count) for name, count in (("x_rows", 4), ("hidden_rows", 5))),
        ((1, 4096, 256), (), 3), ((1, 4352, 256), (), 4), ((1, 7168, 256), ("x_rows", "places"), 4),
        ((1, 7168, 256), ("hidden_rows",), 5), ((2, 512, 256), (), 5), ((1, 384, 256), (), 5),
        ((1, 512, 4096), (), 3), ((1, 512, 4352), (), 5),
    ],
)  # fmt: skip
def test_products_decode_short_rows_themselves_unless_decoded_rows_are_named(
    shape: tuple[int, int, int], named: tuple[str, ...], launches: int, sequence: str
) -> None:
    """What all ways have between their kernels has one shape."""
    module = import_module("degarble.kernels.moe.sm90_moe_by_row")
    call: Any = getattr(module, sequence)
    case = Case(ByRowProblem(MoeProblem(*shape, 2, 2, 2, 10.0), shared=True), "even", 0)
    given = {
        name: tensor.to(META)
        for name, tensor in checks.given_of(case, "cpu").items()
        if name in call.names
    }
    made: dict[str, Any] = {}
    for kernel, own in zip(call.kernels, call.problems(case.problem, None, given), strict=True):
        made |= kernel.allocate(own, torch.device(META))
    heard: list[Any] = []
    with pretended_gpu(heard=lambda kernel, _form: heard.append(kernel)):
        call.run(case.problem, checks.SETTINGS, **given, **{name: made[name] for name in named})
    wanted = [name for name in LAUNCHES[launches] if sequence == "KERNEL" or name != "SUM"]
    assert heard == [getattr(module, name) for name in wanted]


@pytest.mark.h200
@pytest.mark.parametrize("choice", ["even", "absent"])
@pytest.mark.parametrize(
    ("hidden", "width"),
    [(4096, 2048), (512, 256), (2560, 1280), (7168, 2048), (7168, 3072), (4352, 256)],
)
def test_rows_that_walks_decode_themselves_have_the_same_bits(
    hidden: int, width: int, choice: str
) -> None:
    call: Any = import_module("degarble.kernels.moe.sm90_moe_by_row").KERNEL
    for seed, shared in enumerate((True, False)):
        moe = MoeProblem(1, hidden, width, 16, 6, 16, 10.0)
        case = Case(ByRowProblem(moe, shared), choice, seed, given_shared=not shared)
        assert call.shorter[1](case.problem, "sm_90a")
        given = checks.given_of(case)
        memory = checks.memory_of(case, given)
        checks.launch(case, given, memory)
        assert not checks.difference(case, given, memory)
        own = {n: t for n, t in memory.items() if n not in ("x_rows", "hidden_rows")}
        for _ in range(3):
            left = {name: torch.full_like(tensor, -1) for name, tensor in own.items()}
            checks.launch_whole(case, given, left)
            for name, tensor in left.items():
                assert torch.equal(tensor, memory[name]), name


@pytest.mark.h200
def test_turns_do_not_change_a_bit() -> None:
    sizes = ((4096, 2048, 16, 6), (7168, 2048, 9, 8), (352, 416, 8, 3), (32, 32, 2, 1))
    for tokens, (hidden, width, experts, chosen) in product((1, 3), sizes):
        moe = MoeProblem(tokens, hidden, width, experts, chosen, experts, 10.0)
        case = Case(ByRowProblem(moe, shared=True), "absent" if tokens == 3 else "even", hidden)
        given = checks.given_of(case)
        want, memory = checks.memory_of(case, given), checks.memory_of(case, given)
        checks.launch_runs(case, given, want, 1)
        assert not checks.difference(case, given, want)
        divisions: list[int | facts.Division] = [1, 2, 3, 17, 1 << 20, facts.Division(7, 1)]
        divisions += [facts.Division(264, unit) for unit in (1, 2, 3, 4)]
        for tactic, division in product(BY_ROW_TACTICS, divisions):
            for tensor in memory.values():
                tensor.view(torch.uint8).fill_(checks.POISON)
            checks.launch_runs(case, given, memory, division, tactic)
            for name, tensor in want.items():
                assert torch.equal(memory[name], tensor), (tactic, division, name)


@pytest.mark.h200
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1024), (4, 1024), (1, 4352)])
def test_calls_that_overlap_read_what_the_ones_before_wrote(tokens: int, hidden: int) -> None:
    """A chain without a pause: each call's sum is the next one's x, all in the same memory.

    Each call's experts are written just before it, as a router writes them.
    """
    moe = MoeProblem(tokens, hidden, 512, 8, 2, 8, 10.0)
    cases = [Case(ByRowProblem(moe, shared=True), "even", seed) for seed in range(4)]
    given = [checks.given_of(case) for case in cases]
    for each in given:
        each["w2_decode_scale"].mul_(2.0**-4)
    memory = checks.memory_of(cases[0], given[0])
    start, x = given[0]["x"].clone(), torch.empty_like(given[0]["x"])
    experts = torch.empty_like(given[0]["experts"])

    def chain(wait: bool) -> torch.Tensor:
        x.copy_(start)
        for step in range(32):
            now = given[step % 4]
            experts.copy_(now["experts"])
            checks.launch_whole(cases[step % 4], {**now, "x": x, "experts": experts}, memory)
            if wait:
                torch.cuda.synchronize()
            x.copy_(memory["out"])
            if wait:
                torch.cuda.synchronize()
        return x.clone()

    want = chain(wait=True)
    assert bool(want.isfinite().all())
    assert bool(want.any())
    for _ in range(10):
        assert torch.equal(chain(wait=False), want)


@pytest.mark.h200
@pytest.mark.parametrize(
    ("tokens", "hidden", "launch"),
    [
        *(
            (2, 4096, partial(checks.launch_runs, division=division))
            for division in (1, 4, 30, facts.Division(264, 1), facts.Division(50, 1))
        ),
        (1, 4096, checks.launch_whole),
        (1, 7168, checks.launch_whole),
        (2, 4096, checks.launch_whole),
    ],
)
def test_no_stage_is_filled_again_before_it_is_read(tokens: int, hidden: int, launch: Any) -> None:
    """Weights that stay in the cache, beside a busy stream, in graphs of launches without pause."""
    moe = MoeProblem(tokens, hidden, 512, 4, 2, 4, 10.0)
    case = Case(ByRowProblem(moe, shared=True), "even", 9)
    given = checks.given_of(case)
    memory = checks.memory_of(case, given)
    checks.launch(case, given, memory)
    want = {name: tensor.clone() for name, tensor in memory.items()}
    if launch is checks.launch_whole:
        want = {n: t for n, t in want.items() if n not in ("x_rows", "hidden_rows")}
    launch(case, given, memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(32):
            launch(case, given, memory)
    busy, neighbour = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(60):
        with torch.cuda.stream(neighbour):
            for _ in range(4):
                busy.mul_(1.0)
        for tensor in memory.values():
            tensor.view(torch.uint8).fill_(checks.POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(memory[name], tensor) for name, tensor in want.items())
