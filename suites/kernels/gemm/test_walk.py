"""Walks of one row: places of bytes, shares, waits; on an H200 the bits of the plain kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from degarble.kernels.gemm import w4a16_problem as w4a16
from degarble.kernels.gemm import w4a16_walk_problem as facts
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.runtime.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.gemm.w4a16_walk_problem import W4A16WalkForm

EXTENTS = ((2048, 4096), (4096, 2048), (2048, 7168), (32_768, 1024), (4096, 8192), (7168, 18_432),
           (128, 256), (512, 1280))  # fmt: skip


def form_of(outputs: int, columns: int, products: int = 1) -> W4A16WalkForm:
    return facts.form_of(W4A16Problem(1, outputs, columns, "128x4"), products)


# ---- places --------------------------------------------------------------------------------------


def swizzled(address: int) -> int:
    """CUDA Driver API 13.0, swizzle of 128 bytes: bits 4 to 6 change by bits 7 to 9."""
    return address ^ (address >> 7 & 7) << 4


@pytest.mark.parametrize("columns", [1024, 4096])
def test_lanes_read_the_codes_and_scales_of_their_steps(columns: int) -> None:
    """What the copy engine writes in a box's order is found where a lane looks for it."""
    form = form_of(256, columns)
    shape = facts.code_box(form)[:-1]
    codes: dict[int, tuple[int, int]] = {}  # of 8 bytes: row of 16, byte of the row
    for at, (line, run, row, word) in enumerate(product(*map(range, reversed(shape)))):
        codes[swizzled(at * 4)] = (row + 4 * run, line * facts.LINE + word * 4)
    assert len(codes) == facts.CODE_BYTES // form.tiles // 4
    groups, words = facts.scale_box(form)[1], facts.scale_box(form)[0] // 4
    for part, lane in product(range(form.parts), range(32)):
        place, quarter = facts.place_of(lane // 4), lane % 4
        first = facts.code_offset(part, place, lane)
        for half, block in product(range(2), range(2)):
            address = (first ^ block * 32) + half * 8 * facts.LINE
            step = part * w4a16.STEP // 2
            own = (place + 8 * half, step + block * 32 + quarter * 8)
            assert [codes[address], codes[address + 4]] == [own, (own[0], own[1] + 4)]
            at = facts.scale_offset(part, place) + half * 8 + block * 64
            # 128x4: 16 bytes for each of four rows, in which those 32 rows apart are words.
            group, word = divmod(at // 4, words)
            assert (group, word) == (2 * part + block, place % 4 * 4 + place // 4 + 2 * half)
            assert group < groups
    outputs = {facts.place_of(row) + 8 * half for row, half in product(range(8), range(2))}
    assert outputs == set(range(16))


def test_lanes_that_read_at_once_reach_every_bank() -> None:
    for part, half in product(range(16), range(2)):
        lanes = range(16 * half, 16 * half + 16)
        read = [facts.code_offset(part, facts.place_of(lane // 4), lane) for lane in lanes]
        assert len({address // 8 % 16 for address in read}) == 16
        scales = {
            facts.scale_offset(part, facts.place_of(lane // 4)) // 4 % 32 for lane in range(32)
        }
        assert len(scales) == 8


@pytest.mark.parametrize(("outputs", "columns"), EXTENTS)
@pytest.mark.parametrize("products", [1, 2])
def test_every_unit_has_one_walk_and_shared_memory_holds_it(
    outputs: int, columns: int, products: int
) -> None:
    form = form_of(outputs, columns, products)
    size = facts.shared_bytes(columns, form.stages)
    assert size <= facts.most_shared(form.resident)
    assert form.resident * form.threads <= 2048
    assert form.whole == (columns % (form.parts * w4a16.STEP) == 0)
    assert form.rounds == facts.rounds_of(columns)
    assert form.stages <= facts.MOST_STAGES
    assert facts.STAGE_BYTES % facts.ALIGNMENT == 0
    assert facts.CODE_BYTES // form.tiles % facts.ALIGNMENT == 0
    # A loading warp goes from a unit to the fourth one after it, past one matrix's end at most.
    assert facts.tiles_of_matrix(outputs) // form.tiles >= facts.LOADING
    steps = -(-columns // w4a16.STEP)
    assert steps <= form.parts * facts.rounds_of(columns)
    assert form.parts == (8 if steps <= 8 else 16)
    for rows in (1, 9, 36):
        blocks, least, more = facts.shares(rows, outputs, form, 132)
        every = rows * products * facts.tiles_of_matrix(outputs) // form.tiles
        assert blocks <= form.resident * 132
        walks = [w4a16.share_of(block, every, (least, more, 1)) for block in range(blocks)]
        assert [unit for walk in walks for unit in range(*walk)] == list(range(every))
        assert all(begin < end for begin, end in walks)


def test_serves_whole_lines_and_whole_rows_of_128x4_on_hopper() -> None:
    whole = W4A16Problem(1, 256, 512, "128x4")
    assert [target for target in TARGETS if facts.serves(whole, target)] == ["sm_90a"]
    for other in (
        replace(whole, outputs=192), replace(whole, columns=384), replace(whole, layout="linear"),
        replace(whole, columns=facts.MOST_COLUMNS + 256),
    ):  # fmt: skip
        assert not facts.serves(other, "sm_90a")


# ---- waits ---------------------------------------------------------------------------------------


class Phases:
    """An mbarrier: so many arrivals end a phase."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.count = arrivals, 0

    def arrive(self) -> None:
        self.count += 1

    def has_ended(self, parity: int) -> bool:
        return self.count // self.arrivals % 2 != parity


class Walk:
    """The order of a thread block's waits, arrivals, copies and sums, in any interleaving."""

    WARPS = 3

    def __init__(self, stages: int, rounds: int, *, in_turn: bool = True) -> None:
        self.rounds, self.in_turn = rounds, in_turn
        self.full = [Phases(1) for _ in range(stages)]
        self.empty = [Phases(self.WARPS) for _ in range(stages)]
        self.sums_full = [Phases(self.WARPS) for _ in range(facts.LOADING)]
        self.turns = [Phases(1) for _ in range(facts.LOADING)]
        self.held, self.reading = [-1] * stages, [set[int]() for _ in range(stages)]
        self.sums = [[-1] * self.WARPS for _ in range(facts.LOADING)]
        self.copies: list[int] = []
        self.added: set[int] = set()

    def feeding(self, mine: int, units: int) -> Iterator[Callable[[], bool]]:
        """Load every fourth unit, in turn, and add it up before the next one."""
        before = self.turns[mine - 1]
        for unit in range(mine, units, facts.LOADING):
            own_turn = unit // facts.LOADING % 2
            if self.in_turn:
                parity = own_turn if mine else 1 - own_turn
                yield lambda parity=parity: before.has_ended(parity)  # type: ignore[misc]
            for number in range(unit * self.rounds, (unit + 1) * self.rounds):
                turn, at = divmod(number, len(self.held))
                if 0 < number < len(self.held):  # one after the other, as early forms do
                    yield lambda at=at: self.full[at - 1].has_ended(0)  # type: ignore[misc]
                yield lambda at=at, turn=turn: self.empty[at].has_ended(1 - turn % 2)  # type: ignore[misc]
                self.copies.append(number)
            self.turns[mine].arrive()
            yield lambda parity=own_turn: self.sums_full[mine].has_ended(parity)  # type: ignore[misc]
            yield lambda: True
            assert self.sums[mine] == [unit] * self.WARPS, "sums of another unit"
            self.added.add(unit)

    def land(self, which: int) -> None:
        number = self.copies.pop(which)
        at = number % len(self.held)
        assert not self.reading[at], "a copy overwrites what a warp still reads"
        self.held[at] = number
        self.full[at].arrive()

    def multiplying(self, warp: int, units: int) -> Iterator[Callable[[], bool]]:
        for unit in range(units):
            for number in range(unit * self.rounds, (unit + 1) * self.rounds):
                turn, at = divmod(number, len(self.held))
                yield lambda at=at, turn=turn: self.full[at].has_ended(turn % 2)  # type: ignore[misc]
                assert self.held[at] == number, "another copy than the one that a warp waited for"
                self.reading[at].add(warp)
                yield lambda: True
                self.reading[at].remove(warp)
                self.empty[at].arrive()
            at = unit % len(self.sums)
            self.sums[at][warp] = unit
            self.sums_full[at].arrive()

    def run(self, units: int, drawn: random.Random) -> None:
        multiplying = [self.multiplying(warp, units) for warp in range(self.WARPS)]
        feeding = [self.feeding(mine, units) for mine in range(facts.LOADING)]
        warps: list[Any] = [*feeding, *multiplying]
        waits = {number: next(warp) for number, warp in enumerate(warps)}
        weights = [1.0] * (len(warps) + 1)
        while waits:
            if drawn.random() < 0.02:
                weights = [drawn.choice((0.01, 1.0, 30.0)) for _ in weights]
            able = [number for number, wait in waits.items() if wait()]
            able += [len(warps)] * bool(self.copies)
            assert able, "all wait for each other"
            (chosen,) = drawn.choices(able, [weights[number] for number in able])
            if chosen == len(warps):
                self.land(drawn.randrange(len(self.copies)))
            elif (wait := next(warps[chosen], None)) is None:
                del waits[chosen]
            else:
                waits[chosen] = wait
        assert self.added == set(range(units))


@pytest.mark.parametrize("rounds", [1, 2, 4, 9])
@pytest.mark.parametrize("stages", [1, facts.STAGES, 9])
def test_a_walk_ends_and_nothing_is_overwritten_before_it_is_read(stages: int, rounds: int) -> None:
    for seed in range(20):
        Walk(stages, rounds).run(30, random.Random(f"{stages} {rounds} {seed}"))


def test_units_asked_for_out_of_turn_are_taken_for_others() -> None:
    """A wait for an empty stage takes for granted that the use before the last one has ended."""
    failed = 0
    for seed in range(20):
        try:
            Walk(facts.STAGES, 2, in_turn=False).run(30, random.Random(f"out of turn {seed}"))
        except AssertionError:
            failed += 1
    assert failed > 10
