"""A host model of the barriers of sm90_attention_turns, in random interleavings.

Two warpgroups and the producers are generators; a step is whatever may happen before another one
goes on. Products read from where they are issued to where they are waited for. Every read must find
the tile that it is meant for, and nothing may be written while it is read. The shares of a pair's
first tile lie over its turned key, as in V3.2. It is our model, not the compiled kernel.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from degarble.kernels.attention import problem as facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    Steps = Iterator[None]
    Read = tuple[Any, int | None]  # a place, and the tile that is meant; a turned key is None

FAULTS = ("a part given back under its products", "one arrival too few", "shares written early")
MOST_STEPS = 100_000


@dataclass
class PhasedBarrier:
    """An mbarrier: the arrivals of a phase."""

    arrivals: int
    left: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.left = self.arrivals

    def arrive(self) -> None:
        """Arrive; the last arrival ends the phase."""
        self.left -= 1
        if self.left == 0:
            self.left = self.arrivals
            self.phase += 1

    def ended(self, parity: int) -> bool:
        """Return whether the phase of a parity has ended, as try_wait.parity sees it."""
        return self.phase % 2 != parity


@dataclass
class NamedBarrier:
    """A named barrier of both warpgroups."""

    there: int = 0
    turn: int = 0

    def arrive(self) -> int:
        """Arrive; the turn that was entered ends when `turn` differs."""
        entered = self.turn
        self.there += 1
        if self.there == facts.CONSUMERS:
            self.there, self.turn = 0, self.turn + 1
        return entered


@dataclass
class ModelledBlock:
    """Shared memory and barriers of a thread block."""

    fault: str
    full: dict[tuple[int, int], PhasedBarrier] = field(default_factory=dict)
    empty: dict[tuple[int, int], PhasedBarrier] = field(default_factory=dict)
    holds: dict[Any, int | None] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    first: NamedBarrier = field(default_factory=NamedBarrier)
    second: NamedBarrier = field(default_factory=NamedBarrier)

    def __post_init__(self) -> None:
        # One arrival stands for a warpgroup's, and for those of all producers.
        for stage in range(facts.STAGES):
            for part in range(facts.PARTS):
                self.full[stage, part] = PhasedBarrier(1)
                self.empty[stage, part] = PhasedBarrier(1)

    def write(self, key: Any, value: int | None) -> None:
        """Write what nobody reads."""
        assert all(read != key for read, _ in self.reads), f"{key} is written while it is read"
        self.holds[key] = value

    def check(self, key: Any, wanted: int | None) -> None:
        """Require that a place has what is read there."""
        assert self.holds.get(key) == wanted, f"{key} has {self.holds.get(key)}, not {wanted}"

    def issue(self, groups: list[list[Read]], reads: list[Read]) -> None:
        """Begin products."""
        for key, wanted in reads:
            self.check(key, wanted)
        self.reads += reads
        groups.append(reads)

    def wait(self, groups: list[list[Read]], most: int) -> None:
        """Wait until at most so many groups of products are under way."""
        while len(groups) > most:
            for read in groups.pop(0):
                self.check(*read)
                self.reads.remove(read)


def logits(
    block: ModelledBlock, groups: list[list[Read]], at: tuple[int, int], number: int, phase: int
) -> Steps:
    while not block.full[at].ended(phase):
        yield
    turned: list[Read] = [("shares 0", None)] if at == (0, 1) else []
    block.issue(groups, [(at, number), *turned])


def first_warpgroup(block: ModelledBlock, pairs: int) -> Steps:
    groups: list[list[Read]] = []
    for pair in range(pairs):
        yield from logits(block, groups, (0, 0), 2 * pair, pair % 2)
        if pair:
            block.wait(groups, 1)
            block.empty[1, 0].arrive()
        yield from logits(block, groups, (0, 1), 2 * pair, pair % 2)
        if block.fault == FAULTS[2]:
            block.write("shares 0", 2 * pair)
        yield
        block.wait(groups, 0)
        yield
        block.write("shares 0", 2 * pair)
        yield
        block.first.arrive()
        block.issue(groups, [((0, 0), 2 * pair)])
        yield
        block.wait(groups, 0)
        if block.fault != FAULTS[1]:
            block.empty[0, 0].arrive()
        entered = block.second.arrive()
        while block.second.turn == entered:
            yield
        block.issue(groups, [("shares 1", 2 * pair + 1), ((1, 0), 2 * pair + 1)])
        yield
    block.wait(groups, 0)
    block.empty[1, 0].arrive()


def second_warpgroup(block: ModelledBlock, pairs: int) -> Steps:
    groups: list[list[Read]] = []
    for pair in range(pairs):
        for part in range(2):
            yield from logits(block, groups, (1, part), 2 * pair + 1, pair % 2)
        yield
        block.wait(groups, 0)
        entered = block.first.arrive()
        while block.first.turn == entered:
            yield
        block.issue(groups, [("shares 0", 2 * pair), ((0, 1), 2 * pair)])
        yield
        if block.fault == FAULTS[0]:
            block.empty[0, 1].arrive()
        block.write("shares 1", 2 * pair + 1)
        yield
        block.second.arrive()
        yield
        block.wait(groups, 0)
        if block.fault != FAULTS[0]:
            block.empty[0, 1].arrive()
        block.issue(groups, [((1, 1), 2 * pair + 1)])
        yield
        block.wait(groups, 0)
        block.empty[1, 1].arrive()
        yield


def producers(block: ModelledBlock, pairs: int) -> Steps:
    for pair in range(pairs):
        for at in product(range(facts.STAGES), range(facts.PARTS)):
            while not block.empty[at].ended(1 - pair % 2):
                yield
            block.write(at, 2 * pair + at[0])
            if at == (0, 1):
                block.write("shares 0", None)  # the turned key
            yield
            block.full[at].arrive()
            yield


def run(pairs: int, seed: int, fault: str = "") -> None:
    """Run one interleaving; raise AssertionError where it goes wrong or nowhere."""
    drawn = random.Random(seed)
    block = ModelledBlock(fault)
    roles = [role(block, pairs) for role in (first_warpgroup, second_warpgroup, producers)]
    speeds = {role: drawn.choice((1, 1, 5, 20)) for role in roles}
    for _ in range(MOST_STEPS):
        if not roles:
            return
        role = drawn.choices(roles, [speeds[each] for each in roles])[0]
        try:
            next(role)
        except StopIteration:
            roles.remove(role)
    raise AssertionError("nobody goes on")
