"""A host model of the barriers of sm90_attention_turns, in random interleavings.

Two warpgroups and the producers are generators; a step is whatever may happen before another one
goes on. Products read from where they are issued to where they are waited for. Every read must find
the tile that it is meant for, and nothing may be written while it is read. The shares of a pair's
first tile lie over its turned key, as in V3.2. A thread block stays for several items. In prefill
queries come by barriers of their own, and rows leave by way of the shares of second tiles. In
decoding two thread blocks have a split each; sums of the other one come to the last tile's place.
It is our model, not the compiled kernel. It leaves out that a thread block's sums come in parts,
each with a barrier (`given` is one barrier here), and the statistics that come with them, to the
place of shares.
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
    Read = tuple[Any, Any]  # a place, and the tile that is meant; a turned key is None
    Groups = list[list[Read]]

FAULTS = (
    "a part given back under its products",
    "one arrival too few",
    "shares written early",
    "queries given back under their products",
    "rows leave by way of first tiles' shares",
    "no barrier behind an item",
)
FAULTS_OF_PAIRS = (
    "a part given back under its products",
    "one arrival too few",
    "the last tile given back in front of the merge",
    "sums sent before there is room",
    "queries begun under their products",
    "no barrier in front of an item",
)
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
    full: dict[Any, PhasedBarrier] = field(default_factory=dict)
    empty: dict[Any, PhasedBarrier] = field(default_factory=dict)
    holds: dict[Any, Any] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    first: NamedBarrier = field(default_factory=NamedBarrier)
    second: NamedBarrier = field(default_factory=NamedBarrier)
    both: NamedBarrier = field(default_factory=NamedBarrier)
    ready: PhasedBarrier = field(default_factory=lambda: PhasedBarrier(1))
    given: PhasedBarrier = field(default_factory=lambda: PhasedBarrier(facts.CONSUMERS))
    other: ModelledBlock | None = None  # of the cluster

    def __post_init__(self) -> None:
        # One arrival stands for a warpgroup's, and for those of all producers.
        for stage in range(facts.STAGES):
            for part in range(facts.PARTS):
                self.full[stage, part] = PhasedBarrier(1)
                self.empty[stage, part] = PhasedBarrier(1)
        self.full["queries"] = PhasedBarrier(1)
        self.empty["queries"] = PhasedBarrier(facts.CONSUMERS)

    def write(self, key: Any, value: Any) -> None:
        """Write what nobody reads."""
        assert all(read != key for read, _ in self.reads), f"{key} is written while it is read"
        self.holds[key] = value

    def check(self, key: Any, wanted: Any) -> None:
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


SECOND_SHARES = ("shares 1, first half", "shares 1, second half")  # by which rows leave


def logits(
    block: ModelledBlock, groups: Groups, at: tuple[int, int], tile: tuple[int, int], phase: int
) -> Steps:
    """Begin the logits of a part of a tile, which is an item and a number."""
    while not block.full[at].ended(phase):
        yield
    turned: list[Read] = [("shares 0", None)] if at == (0, 1) else []
    block.issue(groups, [(at, tile), ("queries", tile[0]), *turned])


def give_queries_back(block: ModelledBlock, *, last: bool, early: bool) -> None:
    """Arrive behind the last products with queries, or, by a fault, in front of their end."""
    if last and early == (block.fault == FAULTS[3]):
        block.empty["queries"].arrive()


def meet(block: ModelledBlock) -> Steps:
    """Wait for the other warpgroup."""
    entered = block.both.arrive()
    while block.both.turn == entered:
        yield


def end_of_item(block: ModelledBlock, own: int, item: int) -> Steps:
    """Exchange totals, and write rows by way of shared memory."""
    yield from meet(block)
    block.write(f"counts {own}", ("total", item))
    yield from meet(block)
    yield
    block.check(f"counts {1 - own}", ("total", item))
    place = "shares 0" if block.fault == FAULTS[4] and own else SECOND_SHARES[own]
    block.write(place, ("rows", own))
    yield
    block.check(place, ("rows", own))
    if block.fault != FAULTS[5]:
        yield from meet(block)


def first_warpgroup(block: ModelledBlock, items: list[int]) -> Steps:
    """Weigh first tiles."""
    groups: Groups = []
    turn = 0  # pairs so far
    for item, pairs in enumerate(items):
        while not block.full["queries"].ended(item % 2):
            yield
        if not pairs:
            block.empty["queries"].arrive()
        for pair in range(pairs):
            tile, last = (item, 2 * pair), pair + 1 == pairs
            yield from logits(block, groups, (0, 0), tile, turn % 2)
            if pair:
                block.wait(groups, 1)
                block.empty[1, 0].arrive()
            yield from logits(block, groups, (0, 1), tile, turn % 2)
            give_queries_back(block, last=last, early=True)
            if block.fault == FAULTS[2]:
                block.write("shares 0", tile)
            yield
            block.wait(groups, 0)
            give_queries_back(block, last=last, early=False)
            yield
            block.write("shares 0", tile)
            block.write("counts 0", tile)
            yield
            block.first.arrive()
            block.issue(groups, [((0, 0), tile)])
            yield
            block.wait(groups, 0)
            if block.fault != FAULTS[1]:
                block.empty[0, 0].arrive()
            entered = block.second.arrive()
            while block.second.turn == entered:
                yield
            second = (item, 2 * pair + 1)
            block.check("counts 1", second)
            block.issue(groups, [*((half, second) for half in SECOND_SHARES), ((1, 0), second)])
            turn += 1
            yield
        block.wait(groups, 0)
        if pairs:
            block.empty[1, 0].arrive()
        yield from end_of_item(block, 0, item)


def second_warpgroup(block: ModelledBlock, items: list[int]) -> Steps:
    """Weigh second tiles."""
    groups: Groups = []
    turn = 0
    for item, pairs in enumerate(items):
        while not block.full["queries"].ended(item % 2):
            yield
        if not pairs:
            block.empty["queries"].arrive()
        for pair in range(pairs):
            first, second, last = (item, 2 * pair), (item, 2 * pair + 1), pair + 1 == pairs
            for part in range(2):
                yield from logits(block, groups, (1, part), second, turn % 2)
            give_queries_back(block, last=last, early=True)
            yield
            block.wait(groups, 0)
            give_queries_back(block, last=last, early=False)
            entered = block.first.arrive()
            while block.first.turn == entered:
                yield
            block.check("counts 0", first)
            block.issue(groups, [("shares 0", first), ((0, 1), first)])
            yield
            if block.fault == FAULTS[0]:
                block.empty[0, 1].arrive()
            for half in SECOND_SHARES:
                block.write(half, second)
            block.write("counts 1", second)
            yield
            block.second.arrive()
            yield
            block.wait(groups, 0)
            if block.fault != FAULTS[0]:
                block.empty[0, 1].arrive()
            block.issue(groups, [((1, 1), second)])
            yield
            block.wait(groups, 0)
            block.empty[1, 1].arrive()
            turn += 1
            yield
        yield from end_of_item(block, 1, item)


def producers(block: ModelledBlock, items: list[int]) -> Steps:
    """Bring queries and both tiles of every pair."""
    turn = 0
    for item, pairs in enumerate(items):
        while not block.empty["queries"].ended(1 - item % 2):
            yield
        block.write("queries", item)
        yield
        block.full["queries"].arrive()
        for pair in range(pairs):
            for at in product(range(facts.STAGES), range(facts.PARTS)):
                while not block.empty[at].ended(1 - turn % 2):
                    yield
                block.write(at, (item, 2 * pair + at[0]))
                if at == (0, 1):
                    block.write("shares 0", None)  # the turned key
                yield
                block.full[at].arrive()
                yield
            turn += 1


# ---- decoding: two thread blocks that stay -------------------------------------------------------

LAST = ((1, 0), (1, 1))  # where the last tile of a split is


def merge(block: ModelledBlock, own: int, item: int) -> Steps:
    """Exchange totals; bring the next queries; exchange sums with the other thread block."""
    yield from meet(block)
    block.write(f"counts {own}", ("total", item))
    yield from meet(block)
    yield
    block.check(f"counts {1 - own}", ("total", item))
    if block.fault != FAULTS_OF_PAIRS[4]:
        block.write("queries", item + 1)
    yield
    other = block.other
    assert other is not None
    if own == 0:
        other.ready.arrive()
    while block.fault != FAULTS_OF_PAIRS[3] and not block.ready.ended(item % 2):
        yield
    for place in LAST:
        other.write(place, ("sums", item))
    yield
    other.given.arrive()
    while not block.given.ended(item % 2):
        yield
    for place in LAST:
        block.check(place, ("sums", item))
    yield
    for place in LAST:
        block.check(place, ("sums", item))
    if block.fault != FAULTS_OF_PAIRS[2]:
        block.empty[LAST[own]].arrive()


def first_that_decodes(block: ModelledBlock, items: list[int]) -> Steps:
    """Weigh first tiles that others decode."""
    groups: Groups = []
    turn = 0
    for item, pairs in enumerate(items):
        if block.fault != FAULTS_OF_PAIRS[5]:
            yield from meet(block)  # queries have come
        for pair in range(pairs):
            first, second, last = (item, 2 * pair), (item, 2 * pair + 1), pair + 1 == pairs
            yield from logits(block, groups, (0, 0), first, turn % 2)
            if pair:
                block.wait(groups, 1)
                block.empty[1, 0].arrive()
            yield from logits(block, groups, (0, 1), first, turn % 2)
            if last and block.fault == FAULTS_OF_PAIRS[4]:
                block.write("queries", item + 1)
            yield
            block.wait(groups, 0)
            block.write("shares 0", first)
            block.write("counts 0", first)
            yield
            block.first.arrive()
            block.issue(groups, [((0, 0), first)])
            yield
            block.wait(groups, 0)
            if block.fault != FAULTS_OF_PAIRS[1]:
                block.empty[0, 0].arrive()
            entered = block.second.arrive()
            while block.second.turn == entered:
                yield
            block.check("counts 1", second)
            block.issue(groups, [*((half, second) for half in SECOND_SHARES), ((1, 0), second)])
            turn += 1
            yield
        block.wait(groups, 0)
        if block.fault == FAULTS_OF_PAIRS[2]:
            block.empty[1, 0].arrive()
        yield from merge(block, 0, item)


def second_that_decodes(block: ModelledBlock, items: list[int]) -> Steps:
    """Weigh second tiles; first tiles are added while second ones are decoded."""
    groups: Groups = []
    turn = 0
    for item, pairs in enumerate(items):
        if block.fault != FAULTS_OF_PAIRS[5]:
            yield from meet(block)
        for pair in range(pairs):
            first, second, last = (item, 2 * pair), (item, 2 * pair + 1), pair + 1 == pairs
            entered = block.first.arrive()
            while block.first.turn == entered:
                yield
            block.check("counts 0", first)
            block.issue(groups, [("shares 0", first), ((0, 1), first)])
            if block.fault == FAULTS_OF_PAIRS[0]:
                block.empty[0, 1].arrive()
            yield
            block.wait(groups, 0)
            if block.fault != FAULTS_OF_PAIRS[0]:
                block.empty[0, 1].arrive()
            for part in range(2):
                yield from logits(block, groups, (1, part), second, turn % 2)
            yield
            block.wait(groups, 0)
            for half in SECOND_SHARES:
                block.write(half, second)
            block.write("counts 1", second)
            yield
            block.second.arrive()
            block.issue(groups, [((1, 1), second)])
            yield
            block.wait(groups, 0)
            if not last or block.fault == FAULTS_OF_PAIRS[2]:
                block.empty[1, 1].arrive()
            turn += 1
        yield from merge(block, 1, item)


def decoders(block: ModelledBlock, items: list[int]) -> Steps:
    """Decode both tiles of every pair, both parts of a stage at once."""
    turn = 0
    for item, pairs in enumerate(items):
        for pair, stage in product(range(pairs), range(facts.STAGES)):
            parts = [(stage, part) for part in range(facts.PARTS)]
            for at in parts:
                while not block.empty[at].ended(1 - turn // 2 % 2):
                    yield
            for at in parts:
                block.write(at, (item, 2 * pair + stage))
            if stage == 0:
                block.write("shares 0", None)  # the turned key
            yield
            for at in parts:
                block.full[at].arrive()
            yield
            turn += 1


def run_pairs(items: tuple[list[int], list[int]], seed: int, fault: str = "") -> None:
    """Run one interleaving of a cluster, whose splits have so many pairs; raise where it fails."""
    blocks = [ModelledBlock(fault) for _ in items]
    blocks[0].other, blocks[1].other = blocks[1], blocks[0]
    for block in blocks:
        block.write("queries", 0)
    go_on(
        [
            role(block, of_split)
            for block, of_split in zip(blocks, items, strict=True)
            for role in (first_that_decodes, second_that_decodes, decoders)
        ],
        seed,
    )


def run(items: list[int], seed: int, fault: str = "") -> None:
    """Run one interleaving, of items of so many pairs; raise AssertionError where it goes wrong."""
    block = ModelledBlock(fault)
    go_on([role(block, items) for role in (first_warpgroup, second_warpgroup, producers)], seed)


def go_on(roles: list[Steps], seed: int) -> None:
    """Let one role after the other take a step, in drawn order, until all have ended."""
    drawn = random.Random(seed)
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
