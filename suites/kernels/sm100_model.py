"""A host model of the sm_100a GEMM kernels: memories, barriers, and the roles of their warps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.references import tensor_core
from degarble.suites.kernels import tcgen05_words as words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.gemm.problem import GemmForm, GemmProblem


# --------------------------------------------------------------------------------------------------
# Model what a thread block of sm_100a holds: barriers, boxes of TMA, tensor memory.
#
# PTX ISA 9.1 in our own words: phases of barriers, boxes and swizzles, scale copies to tensor
# memory, matrix instructions by their descriptors. Arithmetic is that of references.tensor_core.
# Nothing that was compiled is read or run here.
#
# Fails on what hardware leaves undefined: tensor memory that was not allocated, reserved bits,
# scales that differ between groups of lanes.

MEMORY_BYTES = 227 * 1024
BASE = 1024  # where shared memory begins; the first kilobyte belongs to the system
POISON = 0x7FC0_0BAD  # a NaN that nothing computes
LANES, COLUMNS, SUBPARTITION = 128, 512, 32
SCALE_BYTES = 16  # of a row in a copy of 32 x 128 bits
CODE_BYTES = 32  # of a row in one matrix instruction: 64 codes
SWIZZLE_ROWS = 8


class Undefined(AssertionError):
    """Something that hardware leaves undefined, or a wait that never ends."""


def require(condition: Any, text: str) -> None:
    """Refuse by name."""
    if not condition:
        raise Undefined(text)


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    pending: int = 0
    phase: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        """Count arrivals, and bytes that are to come."""
        require(count <= self.pending, f"{count} arrivals where {self.pending} are left")
        self.pending -= count
        self.transact(-expected)

    def transact(self, arrived: int) -> None:
        """Count bytes; end the phase where nothing is left of it."""
        self.bytes -= arrived
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def passed(self, parity: int) -> bool:
        """Tell whether the phase of a parity is over."""
        return self.phase != parity


@dataclass(frozen=True)
class Matrix:
    """A matrix as TMA sees it: rows of bytes, bytes of an element, the box, bytes of a swizzle."""

    rows: Any
    element: int
    box: tuple[int, int]  # rows, elements
    swizzle: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return self.box[0] * self.box[1] * self.element

    def addresses(self, start: int) -> Any:
        """Return where each byte of a box lies in shared memory: (rows, bytes of a row)."""
        width = self.box[1] * self.element
        require(start % (SWIZZLE_ROWS * (self.swizzle or SCALE_BYTES)) == 0, f"box at {start}")
        at = start + np.arange(self.box[0])[:, None] * width + np.arange(width)
        if self.swizzle:
            require(width == self.swizzle, f"rows of {width} bytes in a swizzle of {self.swizzle}")
            at ^= at >> 3 & (self.swizzle - 1 & ~(words.ATOM - 1))
        return at

    def overlap(self, row: int, column: int) -> tuple[Any, Any]:
        """Return slices of the matrix, and of the box, where they meet."""
        width, first = self.box[1] * self.element, column * self.element
        rows = max(0, min(self.rows.shape[0] - row, self.box[0]))
        count = max(0, min(self.rows.shape[1] - first, width))
        return (slice(row, row + rows), slice(first, first + count)), (slice(rows), slice(count))

    def filled(self, row: int, column: int) -> Any:
        """Return a box: zeros where it leaves the matrix."""
        of_matrix, of_box = self.overlap(row, column)
        box = np.zeros((self.box[0], self.box[1] * self.element), np.uint8)
        box[of_box] = self.rows[of_matrix]
        return box


@dataclass
class Memories:
    """Shared memory and tensor memory of one thread block."""

    allocated: tuple[int, int]  # first column, columns
    shared: Any = field(default_factory=lambda: np.full(MEMORY_BYTES, 0xCD, np.uint8))
    tensor: Any = field(default_factory=lambda: np.full((LANES, COLUMNS), POISON, np.uint32))
    instructions: int = 0

    def columns(self, word: int, count: int) -> tuple[int, slice]:
        """Return the lane and the columns of an address; all have to be allocated."""
        at, (first, size) = words.place(word), self.allocated
        inside = first <= at.column and at.column + count <= first + size
        require(inside, f"columns {at.column} to {at.column + count} of {first} and {size}")
        return at.lane, slice(at.column, at.column + count)

    def copy_scales(self, word: int, descriptor: int) -> None:
        """Copy 32 rows of 128 bits to all four groups of lanes; PTX ISA 9.1, tcgen05.cp."""
        lane, columns = self.columns(word, SCALE_BYTES // 4)
        require(lane == 0, f"scales copied to lane {lane}")
        source = words.operand(descriptor)
        require(source.swizzle == 0, "scales are not swizzled")
        addresses = [
            [source.byte(row, byte) for byte in range(SCALE_BYTES)] for row in range(SUBPARTITION)
        ]
        rows = self.shared[np.array(addresses)].view(np.uint32)
        self.tensor[:, columns] = np.tile(rows, (LANES // SUBPARTITION, 1))

    def scales(self, word: int, rows: int) -> Any:
        """Return four scales a row out of tensor memory; every group of lanes has to agree."""
        lane, columns = self.columns(word, -(-rows // SUBPARTITION))
        require(lane == 0, f"scales in lane {lane}")
        groups = self.tensor[:, columns].reshape(LANES // SUBPARTITION, SUBPARTITION, -1)
        require((groups == groups[0]).all(), "groups of lanes hold different scales")
        return groups[0].T.reshape(-1).copy().view(np.uint8).reshape(-1, 4)[:rows]

    def operand(self, descriptor: int, rows: int) -> Any:
        """Return 32 bytes a row of an operand."""
        of = words.operand(descriptor)
        row = np.arange(rows)[:, None]
        at = of.start + row // words.ROWS_OF_CORE * of.stride + np.arange(CODE_BYTES)
        at = at + row % words.ROWS_OF_CORE * (of.swizzle or words.ATOM)
        if of.swizzle:
            at ^= at >> 3 & (of.swizzle - 1 & ~(words.ATOM - 1))
        return self.shared[at]

    def codes(self, descriptor: int, rows: int) -> Any:
        """Return an operand's E2M1 codes, row by row: the lower half of a byte first."""
        held = self.operand(descriptor, rows)
        return np.stack([held & 15, held >> 4], -1).reshape(rows, -1)

    def multiply(self, operands: tuple[int, ...], adds: bool) -> None:
        """Run one block-scaled instruction; `operands` are D, A, B, descriptor, both scales."""
        _, _, b, word, _, _ = operands
        what = of_codes(word)
        self.multiply_codes(operands, what, self.codes(b, what.columns), adds)

    def multiply_codes(
        self, operands: tuple[int, ...], what: words.Instruction, b_codes: Any, adds: bool
    ) -> None:
        """Multiply this thread block's rows with codes of B, wherever these came from."""
        d, a, _, _, a_scales, b_scales = operands
        columns = self.columns_of_sums(d, what)
        given = (
            self.codes(a, what.rows),
            self.scales(a_scales, what.rows),
            b_codes,
            self.scales(b_scales, what.columns),
        )
        sums = self.sums_before(columns, adds)
        a_codes, a_scaled, b_codes, b_scaled = map(_tensor, given)
        found = tensor_core.block_scaled_gemm(a_codes, a_scaled, b_codes, b_scaled, sums)
        self.tensor[:, columns] = found.numpy().view(np.uint32)
        self.instructions += 1

    def multiply_dense(self, operands: tuple[int, ...], adds: bool) -> None:
        """Run one instruction on BF16 operands; `operands` are D, A, B, descriptor."""
        d, a, b, word = operands
        what = words.dense(word)
        formats = (what.a_format, what.b_format)
        require(formats == (words.BF16_OF_F16,) * 2, f"formats {formats}")
        columns = self.columns_of_sums(d, what)
        of_a, of_b = (
            _tensor(self.operand(descriptor, rows)).view(torch.bfloat16)
            for descriptor, rows in ((a, what.rows), (b, what.columns))
        )
        sums = self.sums_before(columns, adds)
        found = tensor_core.dense_gemm(of_a, of_b, sums, rule=tensor_core.TCGEN05_F16)
        self.tensor[:, columns] = found.numpy().view(np.uint32)
        self.instructions += 1

    def columns_of_sums(self, word: int, what: words.Instruction) -> slice:
        """Return the columns of an instruction's sums."""
        require(what.rows == LANES, f"{what.rows} rows")
        lane, columns = self.columns(word, what.columns)
        require(lane == 0, f"sums in lane {lane}")
        return columns

    def sums_before(self, columns: slice, adds: bool) -> torch.Tensor:
        """Return the sums that an instruction adds to."""
        held = self.tensor[:, columns]
        return _tensor((held if adds else np.zeros_like(held)).view(np.float32))


@dataclass
class Together:
    """The memories of two thread blocks, as one instruction of cta_group::2 takes them.

    PTX ISA 9.1, tcgen05.mma and tcgen05.cp: the same places in both; each has half of the rows of
    A, half of those of B, and sums of its own rows with all of B.
    """

    memories: tuple[Memories, Memories]

    def copy_scales(self, word: int, descriptor: int) -> None:
        """Copy to both tensor memories, from the shared memory of each."""
        for memory in self.memories:
            memory.copy_scales(word, descriptor)

    def multiply(self, operands: tuple[int, ...], adds: bool) -> None:
        """Run one block-scaled instruction of both."""
        _, _, b, word, _, _ = operands
        whole = of_codes(word)
        halves = [memory.codes(b, whole.columns // 2) for memory in self.memories]
        instruction = replace(whole, rows=whole.rows // 2)
        for memory in self.memories:
            memory.multiply_codes(operands, instruction, np.concatenate(halves), adds)


def of_codes(word: int) -> words.Instruction:
    """Read the descriptor of an instruction on E2M1 codes with their scales."""
    what = words.block_scaled(word)
    formats = (what.a_format, what.b_format, what.a_scale_id, what.b_scale_id)
    require(formats == (words.E2M1_OF_MXF4,) * 2 + (0, 0), f"formats {formats}")
    return what


def _tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


# --------------------------------------------------------------------------------------------------
# Model the sm_100a GEMM kernels on the host: the same roles, rings and places, on numbers.
#
# It stands in for a thread block. Loading, multiplying and storing take turns over rings with the
# form's own stages, bytes and arrivals (kernels.gemm.problem and tensor_memory); descriptors are
# our own (tcgen05_words), memories those of the section above. Engines finish as late as they may,
# so what waits too little reads poison, and a phase that never ends is reported. Nothing that was
# compiled runs here: it shows that facts and protocol fit together, bit for bit with
# references.tensor_core, and nothing about a chip.

LATE = 8  # turns of all roles that a thread waits, once the next tile may begin
FIRST = ("loads", "tensor")  # which engine goes first where all roles wait
CORE_STRIDE, SCALE_STRIDE = 1024, 128  # bytes between groups of eight rows
SWIZZLE = 128
WIDE = facts.SCALE_TILE_ROWS // tensor_memory.ROWS_OF_COLUMN  # columns of a scale tile


@dataclass
class Turn:
    """A place in a ring: stage and the parity that is waited for."""

    stages: int
    parity: int
    at: int = 0

    def advance(self) -> None:
        """Go to the next stage; the parity turns where the ring begins anew."""
        self.at += 1
        if self.at == self.stages:
            self.at, self.parity = 0, self.parity ^ 1


@dataclass(frozen=True)
class Layout:
    """Where things lie in shared memory, in the order in which the kernel allocates them."""

    form: GemmForm

    def operand(self, name: str, stage: int) -> int:
        """Return where a stage of an operand or of its scales begins."""
        held = tensor_memory.footprint(self.form)
        at = BASE
        for each in ("a", "b", "scales of a", "scales of b"):
            size = facts.bytes_of(self.form, each)
            if each == name:
                return at + stage * size
            at += size * held.stages
        return at

    def piece(self, number: int) -> int:
        """Return where a buffer of stored pieces begins."""
        return self.operand("pieces", 0) + number * tensor_memory.piece_bytes()


@dataclass
class Block:
    """One thread block of a form, its rings and engines."""

    form: GemmForm
    matrices: dict[str, Matrix]
    memories: Memories
    expected: int
    leads: bool = True  # issues instructions; of two together one does, for both
    other: Block | None = None  # that multiplies with this one
    loads: deque[Callable[[], None]] = field(default_factory=deque)
    tensor: deque[Callable[[], None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        stages, sums = tensor_memory.footprint(self.form).stages, self.accumulators
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(1) for _ in range(stages)]
        self.sums_full = [Barrier(1) for _ in range(sums)]
        arrivals = tensor_memory.arrivals_of_sums(self.form)
        self.sums_empty = [Barrier(arrivals) for _ in range(sums)]
        self.engine: Memories | Together = self.memories  # what instructions work on
        self.layout = Layout(self.form)
        self.stored = np.zeros(self.matrices["d"].rows.shape, np.uint8)

    @property
    def accumulators(self) -> int:
        """Sums that tensor memory holds."""
        return tensor_memory.accumulators(self.form)

    @property
    def base(self) -> int:
        """First column."""
        return self.memories.allocated[0]

    # ---- roles -----------------------------------------------------------------------------------

    def load(self, tiles: list[tuple[int, int]], steps: int) -> Iterator[Callable[[], bool]]:
        """Load all steps of all tiles."""
        turn = Turn(len(self.full), 1)
        for tile in tiles:
            boxes = tensor_memory.tiles_of_boxes(tile, self.form)
            for step in range(steps):
                yield partial(self.empty[turn.at].passed, turn.parity)
                if self.leads:
                    self.full[turn.at].arrive(expected=self.expected)
                self.bring(boxes, step, turn.at)
                turn.advance()

    def bring(self, boxes: tuple[int, ...], step: int, stage: int) -> None:
        """Start the loads of one stage, each behind the one before of its operand."""
        used: dict[str, int] = {}
        for load, box in zip(facts.loads(self.form), boxes, strict=True):
            matrix = self.matrices[load.name]
            count = matrix.box[1]
            at = self.layout.operand(load.name, stage) + used.get(load.name, 0)
            used[load.name] = used.get(load.name, 0) + load.bytes
            place = (box * load.rows, step * count)
            of = Matrix(matrix.rows, matrix.element, (load.rows, count), matrix.swizzle)
            self.loads.append(partial(self.arrived, of, at, place, self.full[stage]))

    def arrived(self, of: Matrix, at: int, place: tuple[int, int], barrier: Barrier) -> None:
        """Put a box where it belongs."""
        self.memories.shared[of.addresses(at)] = of.filled(*place)
        barrier.transact(of.bytes)

    def multiply(
        self, tiles: list[tuple[int, int]], steps: int, blocks: int
    ) -> Iterator[Callable[[], bool]]:
        """Sum up tile after tile."""
        turn, target = Turn(len(self.full), 0), Turn(self.accumulators, 1)
        for _, column in tiles:
            into = target.parity ^ 1 if tensor_memory.overlaps(self.form) else target.at
            yield partial(self.sums_empty[target.at].passed, target.parity)
            for step in range(steps):
                at = turn.at
                yield partial(self.full[at].passed, turn.parity)
                self.clear_beyond(at, tensor_memory.end_of_scales(blocks, step, self.form))
                self.multiply_stage(at, column, into, begins=step == 0)
                self.commit([block.empty[at] for block in self.both])
                turn.advance()
            self.commit([block.sums_full[target.at] for block in self.both])
            target.advance()

    def commit(self, barriers: list[Barrier]) -> None:
        """Arrive at all of them once what was started before has finished."""
        self.tensor.append(partial(arrive_at, barriers))

    def is_idle(self) -> bool:
        """Tell whether nothing that was started is left to do."""
        return not (self.tensor or self.loads)

    @property
    def both(self) -> tuple[Block, ...]:
        """Return who multiplies together."""
        return (self,) if self.other is None else (self, self.other)

    def tiles_of_scales(self, side: str) -> int:
        """Return how many scale tiles a stage of an operand has along its rows."""
        return (
            facts.bytes_of(self.form, f"scales of {side}") // self.words // facts.SCALE_TILE_BYTES
        )

    @property
    def words(self) -> int:
        """Instructions along a stage's K; for each a word of four scales a row."""
        return tensor_memory.instructions(self.form)

    def clear_beyond(self, stage: int, end: tuple[int, int]) -> None:
        """Clear scales beyond K in the word that K ends within."""
        word, kept = end
        if self.form.operands != facts.NVFP4.name or not kept or word >= self.words:
            return
        for side in "ab":
            for tile in range(self.tiles_of_scales(side)):
                at = self.layout.operand(f"scales of {side}", stage)
                at += (tile * self.words + word) * facts.SCALE_TILE_BYTES
                for block in self.both:
                    rows = block.memories.shared[at : at + facts.SCALE_TILE_BYTES].reshape(-1, 4)
                    rows[:, kept:] = 0

    def multiply_stage(self, stage: int, column: int, into: int, *, begins: bool) -> None:
        """Start a stage's copies of scales and its matrix instructions."""
        scales = []
        if self.form.operands == facts.NVFP4.name:
            self.bring_scales(stage)
            scales = self.places_of_scales(column)
        tactic = self.form.tactic
        make = words.block_scaled_word if scales else words.dense_word
        run = self.engine.multiply if scales else self.memories.multiply_dense
        for k in range(self.words):
            a, b = (
                words.operand_word(self.layout.operand(side, stage), CORE_STRIDE, SWIZZLE)
                + k * CODE_BYTES // words.ATOM
                for side in "ab"
            )
            to = self.base + into * tensor_memory.columns_apart(self.form)
            word = make(tactic.together * tactic.rows, tactic.columns)
            given = (to, a, b, word, *(scales[k] if scales else ()))
            self.tensor.append(partial(run, given, not (begins and k == 0)))

    def bring_scales(self, stage: int) -> None:
        """Start a stage's copies of scales."""
        first = dict(zip("ab", tensor_memory.first_columns(self.form), strict=True))
        for side in "ab":
            count = self.tiles_of_scales(side)
            for tile in range(count):
                for k in range(self.words):
                    at = self.layout.operand(f"scales of {side}", stage)
                    at += (tile * self.words + k) * facts.SCALE_TILE_BYTES
                    to = self.base + first[side] + (k * count + tile) * WIDE
                    word = words.operand_word(at, SCALE_STRIDE, 0)
                    self.tensor.append(partial(self.engine.copy_scales, to, word))

    def places_of_scales(self, column: int) -> list[tuple[int, int]]:
        """Return where each instruction finds the scales of A and of B."""
        a, b = (self.base + first for first in tensor_memory.first_columns(self.form))
        b += tensor_memory.columns_skipped(column, self.form)
        count = self.tiles_of_scales("b")
        return [(a + k * WIDE, b + k * WIDE * count) for k in range(self.words)]

    def store(
        self, tiles: list[tuple[int, int]], scale: torch.Tensor
    ) -> Iterator[Callable[[], bool]]:
        """Store tile after tile, piece by piece."""
        turn, count = Turn(self.accumulators, 0), 0
        pieces = tensor_memory.stores(self.form)
        wide, early = self.form.tactic.columns // pieces, tensor_memory.overlaps(self.form)
        for row, column in tiles:
            at = turn.at
            yield partial(self.sums_full[at].passed, turn.parity)
            place = turn.parity if early else at
            for turned in range(pieces):
                i = tensor_memory.piece_in_turn(turned, place, pieces) if early else turned
                first = self.base + place * tensor_memory.columns_apart(self.form) + i * wide
                _, columns = self.memories.columns(first, wide)
                sums = self.memories.tensor[:, columns].copy().view(np.float32)
                if turned == (0 if early else pieces - 1):
                    self.sums_empty[at].arrive(tensor_memory.threads_that_store())
                    for _ in range(LATE if early else 0):
                        yield self.is_idle
                rounded = (torch.from_numpy(sums) * scale).bfloat16()
                buffer, count = count % facts.PIECES_AT_ONCE, count + 1
                if self.form.tactic.swapped:
                    self.put_below(rounded.T, (column, row), buffer)
                else:
                    numbers = rounded.view(torch.uint8).numpy()
                    self.put(numbers, (row, column * pieces + i), buffer)
            turn.advance()

    def put(self, numbers: Any, piece: tuple[int, int], buffer: int) -> None:
        """Put a piece into its buffer and let TMA take it."""
        at = self.layout.piece(buffer)
        of = words.operand(words.operand_word(at, CORE_STRIDE, SWIZZLE))
        row, byte = np.indices(numbers.shape)
        places = np.vectorize(of.byte)(row[:, ::16], byte[:, ::16])
        for i in range(words.ATOM):
            self.memories.shared[places + i] = numbers[:, i::16]
        self.take(piece, at)

    def put_below(self, numbers: torch.Tensor, piece: tuple[int, int], buffer: int) -> None:
        """Put a piece of D^T into its buffer, row below row, and let TMA take it."""
        held = numbers.contiguous().view(torch.uint8).numpy()
        at = self.layout.operand("pieces", 0) + buffer * held.size
        self.memories.shared[at : at + held.size] = held.reshape(-1)
        self.take(piece, at)

    def take(self, piece: tuple[int, int], at: int) -> None:
        """Store a piece of D that lies in shared memory."""
        d = self.matrices["d"]
        of_matrix, of_box = d.overlap(piece[0] * d.box[0], piece[1] * d.box[1])
        d.rows[of_matrix] = self.memories.shared[d.addresses(at)][of_box]
        self.stored[of_matrix] += 1

    # ---- partners of one role alone --------------------------------------------------------------

    def stage_slices(self, stage: int) -> list[slice]:
        """Return where the operands of a stage lie."""
        names = ("a", "b", "scales of a", "scales of b")
        starts = [(self.layout.operand(name, stage), name) for name in names]
        return [slice(at, at + facts.bytes_of(self.form, name)) for at, name in starts]

    def watch(self, seen: Any, steps: int) -> Iterator[Callable[[], bool]]:
        """Write out every stage once it is there, and give it back."""
        turn = Turn(len(self.full), 0)
        for step in range(steps):
            yield partial(self.full[turn.at].passed, turn.parity)
            parts = [
                block.memories.shared[part]
                for block in self.both
                for part in self.stage_slices(turn.at)
            ]
            seen[step] = np.concatenate(parts)
            arrive_at([block.empty[turn.at] for block in self.both])
            turn.advance()

    def fill(self, image: Any) -> None:
        """Fill stages from an image, no more than the ring has."""
        for stage, row in enumerate(image):
            at = 0
            for block in self.both:
                for part in self.stage_slices(stage):
                    size = part.stop - part.start
                    block.memories.shared[part] = row[at : at + size]
                    at += size
            self.full[stage].arrive()

    # ---- order -----------------------------------------------------------------------------------

    def run(self, roles: list[Iterator[Callable[[], bool]]], first: str = "loads") -> None:
        """Let roles run until they wait; where all do, let one engine finish one operation."""
        queues = (self.loads, self.tensor) if first == "loads" else (self.tensor, self.loads)
        waiting: list[tuple[Any, Callable[[], bool]]] = [(role, lambda: True) for role in roles]
        while waiting or any(queues):
            went, still = False, []
            for role, ready in waiting:
                if not ready():
                    still.append((role, ready))
                    continue
                went = True
                following = next(role, None)
                if following is not None:
                    still.append((role, following))
            waiting = still
            if not went:
                for queue in queues:
                    if queue:
                        queue.popleft()()
                        break
                else:
                    state = [(b.phase, b.pending, b.bytes) for b in (*self.full, *self.empty)]
                    raise Undefined(f"{len(waiting)} roles wait for ever: {state}")


def arrive_at(barriers: list[Barrier]) -> None:
    """Arrive once at each."""
    for barrier in barriers:
        barrier.arrive()


def block_of(form: GemmForm, matrices: dict[str, Matrix]) -> Block:
    """Make a thread block whose tensor memory begins as far from column 0 as it may."""
    size = tensor_memory.columns_allocated(form)
    expected = facts.transaction_bytes(form)
    return Block(form, matrices, Memories((COLUMNS - size, size)), expected)


def pair_of(form: GemmForm, matrices: dict[str, Matrix]) -> tuple[Block, Block]:
    """Make two thread blocks that multiply together: one issues, and its barriers count for both.

    All of B's scales are brought by each for itself: who issues which part is left out.
    """
    first, second = (block_of(form, matrices) for _ in range(2))
    first.expected = facts.expected_bytes(form)
    first.other, second.leads = second, False
    first.engine = Together((first.memories, second.memories))
    second.full, second.sums_empty = first.full, first.sums_empty
    second.loads, second.tensor = first.loads, first.tensor
    return first, second


def tiles_of(problem: GemmProblem, form: GemmForm, number: int, count: int) -> list[Any]:
    """Return the tiles of one of so many thread blocks."""
    from degarble.kernels.gemm.mainloop import tile_of  # noqa: PLC0415  needs the DSL

    tiles = facts.cluster_tiles(problem, form.tactic)
    return [tile_of(i, tiles, form.tactic.group) for i in range(number, tiles[0] * tiles[1], count)]


def steps_of(problem: GemmProblem, form: GemmForm) -> int:
    """Return the steps of K."""
    steps: int = ceil_div(problem.inner, form.tactic.inner)
    return steps
