"""Model the sm_100a sparse attention on the host: the same roles, barriers and places, on numbers.

It stands in for a thread block with one split. Loading keys, multiplying and softmax take turns
over barriers with the form's own arrivals and parities, places in shared memory and columns of
tensor memory (kernels.attention.problem); descriptors are our own (tcgen05_words). A product runs
as late, or as early, as it may, on what lies there by then. So waiting too little, or overwriting
too early, gives other numbers, and a phase that never ends is reported.
Nothing that was compiled runs here: it shows that facts and protocol fit together, and nothing
about a chip.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.kernels.attention import problem as facts
from degarble.kernels.primitives import kv_problem as rows
from degarble.suites.kernels import tcgen05_words as words
from degarble.suites.kernels.sm100_model import BASE, LANES, MEMORY_BYTES, Barrier, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.attention.problem import AttentionForm

FIRST = ("roles", "products")  # who goes first
ROW_BYTES, CORE_STRIDE = 128, 1024
BLOCK_COLUMNS = ROW_BYTES // 2  # BF16 numbers of a swizzled row
MASKS = facts.MASK_BYTES // facts.STAGES  # bytes of a tile's: bits of all present, then beyond
WARPS = facts.CONSUMERS * facts.WARPGROUP // rows.LANES
WARP_ROWS = 16  # of a fragment
LOG2_E = 1.4426950408889634


def to_bits(x: Any) -> Any:
    """Round float32 to BF16, to nearest even: its 16 bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def of_bits(bits: Any) -> Any:
    """Return what BF16 bits are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def lines(height: int, width: int, begin: int) -> Any:
    """Return where each number of a swizzled tile lies: 64 columns, then the next 64."""
    row, column = np.arange(height)[:, None], np.arange(width)
    at = column // BLOCK_COLUMNS * (height * ROW_BYTES) + row * ROW_BYTES
    at = begin + at + column % BLOCK_COLUMNS * 2
    return at ^ (at >> 3 & 0x70)


@dataclass
class Turn:
    """A place in a ring of tiles, and the parity that is waited for."""

    parity: int
    at: int = 0

    def advance(self) -> None:
        """Go on; the parity turns where the ring begins anew."""
        self.at += 1
        if self.at == facts.STAGES:
            self.at, self.parity = 0, self.parity ^ 1


@dataclass
class Block:
    """One thread block of a form."""

    form: AttentionForm
    shared: Any = field(default_factory=lambda: np.full(MEMORY_BYTES // 2, 0xFFFF, np.uint16))
    tensor: Any = field(default_factory=lambda: np.full((LANES, 512), np.nan, np.float32))
    masks: Any = field(default_factory=lambda: np.zeros((facts.STAGES, MASKS), np.uint8))
    products: deque[Callable[[], None]] = field(default_factory=deque)
    skipped: int = 0  # tiles without a new peak

    def __post_init__(self) -> None:
        self.how = facts.sm100_gather_plan(self.form.format)
        self.full = [Barrier(self.how.arrivals) for _ in range(facts.STAGES)]
        self.empty = [Barrier(1) for _ in range(facts.STAGES)]
        self.logits = [Barrier(1) for _ in range(facts.LOGITS)]
        self.shares, self.sums = Barrier(WARPS), Barrier(1)
        self.place = {k: BASE + v for k, v in facts.places(self.form.format).items()}

    # ---- memory ----------------------------------------------------------------------------------

    def tile_at(self, stage: int) -> int:
        """Return where a tile begins."""
        return self.place["keys"] + stage * facts.TILE * self.form.width * 2

    def put(self, begin: int, bits: Any) -> None:
        """Leave BF16 numbers in shared memory as threads do."""
        self.shared[lines(bits.shape[0], bits.shape[1], begin) // 2] = bits

    def taken(self, begin: int, shape: tuple[int, int]) -> Any:
        """Return what lies there."""
        return self.shared[lines(*shape, begin) // 2]

    def operand(self, word: int, count: int, *, turned: bool = False) -> Any:
        """Return 16 numbers along K of so many rows by their descriptor; PTX ISA 9.1."""
        of = words.operand(word)
        row, k = np.arange(count)[:, None], np.arange(facts.INSTRUCTION_K)
        if turned:  # rows lie side by side, K goes down in groups of eight
            at = row // BLOCK_COLUMNS * of.leading + row % BLOCK_COLUMNS * 2
            at = of.start + at + k // 8 * of.stride + k % 8 * ROW_BYTES
        else:
            at = of.start + row // 8 * of.stride + row % 8 * ROW_BYTES + k * 2
        at = at ^ (at >> 3 & 0x70)
        return of_bits(self.shared[at // 2]).astype(np.float64)

    def multiply(self, a: int, b: int, to: tuple[int, int, int], *, adds: bool) -> None:
        """Run one instruction of 64 rows; `to` is the first lane, column and how many columns."""
        lane, column, count = to
        require(lane in {0, facts.UPPER_LANES}, f"64 rows from lane {lane}")
        require(column + count <= facts.columns_allocated(), f"column {column + count}")
        m = np.arange(facts.HEADS)
        lanes = (lane + m % 16 + 32 * (m // 16))[:, None]  # PTX ISA 9.1, layout F
        columns = column + np.arange(count)
        turned = count == facts.COLUMNS
        made = self.operand(a, facts.HEADS) @ self.operand(b, count, turned=turned).T
        before = self.tensor[lanes, columns] if adds else 0.0
        self.tensor[lanes, columns] = (before + made).astype(np.float32)

    def held(self, half: int, column: int, count: int) -> tuple[Any, Any]:
        """Return where a reading of 64 rows finds them: 16 lanes of each warp."""
        warp, row = np.divmod(np.arange(facts.HEADS), WARP_ROWS)
        lanes = warp * facts.LANES_OF_WARP + half * facts.UPPER_LANES + row
        return lanes[:, None], column + np.arange(count)

    # ---- roles -----------------------------------------------------------------------------------

    def gather(self, tiles: Any, masks: Any) -> Iterator[Callable[[], bool]]:
        """Bring tile after tile [S, 64, width] and its masks."""
        turn = Turn(1)
        for tile, mask in zip(tiles, masks, strict=True):
            yield partial(self.empty[turn.at].passed, turn.parity)
            self.put(self.tile_at(turn.at), tile)
            self.masks[turn.at] = mask
            self.full[turn.at].arrive(self.how.arrivals)
            turn.advance()

    def multiply_tiles(self, steps: int) -> Iterator[Callable[[], bool]]:
        """Multiply tile after tile, the next one's logits in front of this one's sums."""
        turn, before = Turn(0), 0
        for step in range(steps + 1):
            if step < steps:
                yield partial(self.full[turn.at].passed, turn.parity)
                self.begin_logits(turn.at, step)
            if step > 0:
                yield partial(self.shares.passed, (step - 1) % 2)
                self.begin_sums(before, step - 1)
            before = turn.at
            turn.advance()

    def begin_logits(self, stage: int, step: int) -> None:
        """Begin to multiply queries with a tile's keys."""
        buffer = step % facts.LOGITS
        column = facts.first_columns()[1] + buffer * facts.TILE
        for k in range(facts.instructions(self.form.width)[0]):
            block, within = divmod(k, BLOCK_COLUMNS // facts.INSTRUCTION_K)
            along = block * facts.TILE * ROW_BYTES + within * 2 * facts.INSTRUCTION_K
            a, b = (
                words.operand_word(at + along, CORE_STRIDE, ROW_BYTES)
                for at in (self.place["queries"], self.tile_at(stage))
            )
            to = (0, column, facts.TILE)
            self.products.append(partial(self.multiply, a, b, to, adds=k > 0))
        self.products.append(self.logits[buffer].arrive)

    def begin_sums(self, stage: int, step: int) -> None:
        """Begin to add shares times values."""
        down = facts.INSTRUCTION_K * ROW_BYTES
        for half in range(facts.CONSUMERS):
            for k in range(facts.TILE // facts.INSTRUCTION_K):
                at = self.place["shares"] + k * 2 * facts.INSTRUCTION_K
                a = words.operand_word(at, CORE_STRIDE, ROW_BYTES)
                at = self.tile_at(stage) + half * facts.TILE * facts.COLUMNS * 2 + k * down
                b = turned_word(at)
                to = (half * facts.UPPER_LANES, 0, facts.COLUMNS)
                self.products.append(partial(self.multiply, a, b, to, adds=step + k > 0))
        self.products += [self.empty[stage].arrive, self.sums.arrive]

    def weigh(
        self, steps: int, scale: float, state: dict[str, Any]
    ) -> Iterator[Callable[[], bool]]:
        """Weigh tile after tile; peaks and totals [64] are in `state`."""
        turn = Turn(0)
        for step in range(steps):
            buffer = step % facts.LOGITS
            yield partial(self.full[turn.at].passed, turn.parity)
            yield partial(self.logits[buffer].passed, step // facts.LOGITS % 2)
            column = facts.first_columns()[1] + buffer * facts.TILE
            logits = self.tensor[self.held(0, column, facts.TILE)]
            powers, factors = weighed(hidden(logits, self.masks[turn.at]), scale, state)
            if step > 0:
                yield partial(self.sums.passed, (step - 1) % 2)
                self.rescale(factors)
            self.put(self.place["shares"], to_bits(powers))
            self.shares.arrive(WARPS)
            turn.advance()
        if steps:
            yield partial(self.sums.passed, (steps - 1) % 2)

    def rescale(self, factors: Any) -> None:
        """Bring the output to new peaks, where a warp has one."""
        if (factors == 1).all():
            self.skipped += 1
            return
        for half in range(facts.CONSUMERS):
            self.tensor[self.held(half, 0, facts.COLUMNS)] *= factors[:, None]

    def output(self) -> Any:
        """Return the sums [64, 512]."""
        halves = [self.tensor[self.held(half, 0, facts.COLUMNS)] for half in range(facts.CONSUMERS)]
        return np.concatenate(halves, 1)

    def run(self, roles: list[Iterator[Callable[[], bool]]], first: str = "roles") -> None:
        """Let roles take turns until all have ended; products run as late or as early as may be."""
        waiting = [(role, next(role, None)) for role in roles]
        while any(ready for _, ready in waiting):
            moved = False
            if first == "products" and self.products:
                self.products.popleft()()
                continue
            for i, (role, ready) in enumerate(waiting):
                if ready and ready():
                    waiting[i], moved = (role, next(role, None)), True
                    if first == "products":
                        break  # those behind it in the list come when nobody else can go on
            if not moved:
                require(self.products, "all roles wait, and no product is under way")
                self.products.popleft()()
        while self.products:
            self.products.popleft()()


def turned_word(start: int) -> int:
    """Make the descriptor of a tile's rows taken as columns: 64 of them, then the next 64."""
    word = words.operand_word(start, CORE_STRIDE, ROW_BYTES)
    leading = facts.TILE * ROW_BYTES // words.ATOM
    return word & ~(0x3FFF << 16) | leading << 16


def hidden(logits: Any, masks: Any) -> Any:
    """Return logits, -inf of keys that are absent, NaN of those beyond the cache."""
    present, beyond = np.unpackbits(masks, bitorder="little").reshape(2, facts.TILE)
    absent = np.where(beyond == 1, np.nan, -np.inf)
    return np.where(present == 1, logits, absent).astype(np.float32)


def weighed(logits: Any, scale: float, state: dict[str, Any]) -> tuple[Any, Any]:
    """Return powers beside the running peak, and what brings older sums to it."""
    to_powers = np.float32(scale * LOG2_E)
    peak = np.fmax(state["peaks"], np.fmax.reduce(logits, axis=1) * to_powers)
    against = np.where(np.isneginf(peak), np.float32(0), peak)
    with np.errstate(invalid="ignore"):
        factors = np.exp2(state["peaks"] - against)
        powers = np.exp2(logits * to_powers - against[:, None])
    state["totals"] = state["totals"] * factors + powers.sum(1)
    state["peaks"] = peak
    return powers.astype(np.float32), factors.astype(np.float32)


def fresh_state() -> dict[str, Any]:
    """Return peaks and totals in front of the first tile."""
    heads = facts.HEADS
    return {"peaks": np.full(heads, -np.inf, np.float32), "totals": np.zeros(heads, np.float32)}
