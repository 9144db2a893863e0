"""Model the grouped sm_100a products on the host: the plain model's roles on experts, then the sum.

It differs from suites/kernels/sm100_model.py in three things: boxes of one of many matrices; warps
that each store their own 32 rows (FC1 requantised, FC2 by TMA); and the steps around the products,
slots ordered by expert, rows quantised, rows summed in their order. Places and order are those of
kernels.moe.problem; SwiGLU and rounding are those of the references, so bits of approximate
instructions are not modelled. Nothing that was compiled runs.

Shape letters: T tokens, K chosen, D hidden, F width, E experts here, R rows, B blocks of K
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from degarble.harness.formats.codec import unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import (
    SWIZZLE_128X4,
    ceil_div,
    from_layout,
    round_up,
    to_layout,
)
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.moe import problem as moe
from degarble.references import elementary, tensor_core
from degarble.suites.kernels import sm100_model as plain
from degarble.suites.kernels import tcgen05_words as words
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.sm100_checks import CODE_ELEMENT, SCALE_ELEMENT, bytes_of
from degarble.suites.kernels.sm100_model import COLUMNS, Matrix, Memories, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.kernels.moe.problem import MoeForm

WARPS = tensor_memory.STORING_WARPS
TILE = tensor_memory.LANES


class Leaving(NamedTuple):
    """What tiles leave with, and where to: FC1's codes and scales, or FC2's rows."""

    scales: Tensor  # of each expert and part: the factor of its sums
    slots: Tensor  # of each row
    to: Any  # rows of NVFP4 (codes [R, F / 2], scales), or BF16 [R, D], as arrays of bytes
    hidden_scale: Tensor | None = None  # of each expert
    weights: Tensor | None = None  # of each slot


class Block(plain.Block):
    """A thread block of a grouped product."""

    moe: MoeForm

    def bring(self, boxes: tuple[Any, ...], step: int, stage: int) -> None:
        """Start the loads of one stage; an expert's matrices arrive one behind the other."""
        used: dict[str, int] = {}
        for load, box in zip(facts.loads(self.form), boxes, strict=True):
            tile, first = box if isinstance(box, tuple) else (box, 0)
            for i in range(load.matrices):
                matrix = self.matrices[load.name][first * load.matrices + i]  # type: ignore[index]
                at = self.layout.operand(load.name, stage) + used.get(load.name, 0)
                used[load.name] = used.get(load.name, 0) + load.rows * load.row_bytes
                shape = (load.rows, matrix.box[1])
                of = Matrix(matrix.rows, matrix.element, shape, matrix.swizzle)
                place = (tile * load.rows, step * shape[1])
                self.loads.append(partial(self.arrived, of, at, place, self.full[stage]))

    def leave(
        self, warp: int, tiles: list[tuple[int, int, int]], leaving: Leaving
    ) -> Iterator[Callable[[], bool]]:
        """Let a warp's rows of all tiles leave."""
        turn, stored, rows = plain.Turn(self.accumulators, 0), 0, moe.WARP_ROWS
        for row, column, expert in tiles:
            at, first = turn.at, row * TILE + warp * rows
            yield partial(self.sums_full[at].passed, turn.parity)
            is_there = int(leaving.slots[first]) >= 0
            sums = self.sums_of_warp(at, warp) if is_there else None
            self.sums_empty[at].arrive(rows)
            turn.advance()
            if sums is None:
                continue
            factors = leaving.scales[expert].repeat_interleave(moe.columns_of_part(self.moe))
            numbers = (sums * factors).bfloat16()
            if self.form.parts == moe.GATE_AND_UP:
                self.requantise(numbers.float(), (first, column, expert), leaving)
            else:
                stored = self.put_pieces(numbers, (first, column, warp), stored)

    def sums_of_warp(self, stage: int, warp: int) -> Tensor:
        """Read 32 lanes of sums."""
        wide = self.form.tactic.columns
        _, columns = self.memories.columns(self.base + stage * wide, wide)
        lanes = slice(warp * moe.WARP_ROWS, (warp + 1) * moe.WARP_ROWS)
        return torch.from_numpy(self.memories.tensor[lanes, columns].copy().view(np.float32))

    def requantise(self, numbers: Tensor, place: tuple[int, int, int], leaving: Leaving) -> None:
        """Write SwiGLU of gate beside up as NVFP4, where threads write theirs."""
        first, column, expert = place
        codes_RP, scales = leaving.to
        assert leaving.hidden_scale is not None
        values = self.gated(numbers, leaving.slots[first : first + len(numbers)], leaving)
        made = quantise(values, NVFP4, CANONICAL, decode_scale=leaving.hidden_scale[expert])
        scale_bytes = made.block_scale.view(torch.uint8)
        blocks = codes_RP.shape[1] // 8
        chunks, of_words = codes_RP.reshape(-1, 16), scales.reshape(-1, 4)
        of_tile = moe.blocks_of_tile(self.moe)
        for i, at in product(range(len(numbers)), range(0, of_tile, moe.BLOCKS_OF_STORE)):
            row, block = first + i, column * of_tile + at
            if block < blocks:
                place_of = moe.codes_at(row, block, blocks)
                chunks[place_of] = made.codes[i, at * 8 : at * 8 + 16].numpy()
            if block < blocks and at % moe.BLOCKS_OF_PIECE == 0:
                word = scale_bytes[i, at : at + moe.BLOCKS_OF_PIECE].clone()
                word[blocks - block :] = 0
                of_words[moe.scales_at(row, block, blocks)] = word.numpy()

    def gated(self, numbers: Tensor, slots: Tensor, leaving: Leaving) -> Tensor:
        """Return SwiGLU of gate beside up, times the routing weight where it comes first."""
        gate, up = numbers.chunk(moe.GATE_AND_UP, 1)
        made = elementary.swiglu(gate, up, self.moe.limit)
        if self.moe.weighted:
            assert leaving.weights is not None
            weights = torch.where(slots >= 0, leaving.weights[slots.clamp(min=0).long()], 0.0)
            made = made * weights[:, None]
        return made.bfloat16().float()

    def put_pieces(self, numbers: Tensor, place: tuple[int, int, int], stored: int) -> int:
        """Put a warp's rows piece by piece into its own buffers, and let TMA take them."""
        first, column, warp = place
        d, pieces = self.matrices["d"], self.form.tactic.columns // facts.PIECE_COLUMNS
        for i, part in enumerate(numbers.split(facts.PIECE_COLUMNS, 1)):
            buffer = warp * facts.PIECES_AT_ONCE + stored % facts.PIECES_AT_ONCE
            at = self.layout.operand("pieces", 0) + buffer * d.bytes
            of = words.operand(words.operand_word(at, plain.CORE_STRIDE, plain.SWIZZLE))
            held = part.contiguous().view(torch.uint8).numpy()
            for row, byte in product(range(len(held)), range(0, held.shape[1], words.ATOM)):
                start = of.byte(row, byte)
                self.memories.shared[start : start + words.ATOM] = held[row, byte:][: words.ATOM]
            of_matrix, of_box = d.overlap(first, (column * pieces + i) * facts.PIECE_COLUMNS)
            d.rows[of_matrix] = self.memories.shared[d.addresses(at)][of_box]
            self.stored[of_matrix] += 1
            stored += 1
        return stored


# ---- one product ---------------------------------------------------------------------------------


class Sides(NamedTuple):
    """What a product reads: rows of A, all matrices of B one after the other."""

    a: Any  # codes [R, K / 2], scales
    codes: Tensor  # [matrices, N, K / 2]
    scales: Tensor  # [matrices, bytes]


def matrices_of(form: facts.GemmForm, sides: Sides, d: Matrix) -> dict[str, Any]:
    """Return what TMA is told of."""
    row_bytes = {load.name: load.row_bytes for load in facts.loads(form)}

    def one(side: str, codes: Any, scales: Any) -> tuple[Matrix, Matrix]:
        of_scales = row_bytes[f"scales of {side}"] // SCALE_ELEMENT
        tiles = ceil_div(len(codes), facts.SCALE_TILE_ROWS)
        box = (0, row_bytes[side] // CODE_ELEMENT)
        return (
            Matrix(bytes_of(codes, len(codes)), CODE_ELEMENT, box, plain.SWIZZLE),
            Matrix(bytes_of(scales, tiles), SCALE_ELEMENT, (0, of_scales)),
        )

    a, a_scales = one("a", *sides.a)
    of_b = [one("b", *each) for each in zip(sides.codes, sides.scales, strict=True)]
    return {
        "a": [a],
        "scales of a": [a_scales],
        "b": [codes for codes, _ in of_b],
        "scales of b": [scales for _, scales in of_b],
        "d": d,
    }


def block_of(form: MoeForm, sides: Sides, to_rows: Any = None) -> Block:
    """Make a thread block; `to_rows` is where FC2 stores."""
    size = tensor_memory.columns_allocated(form.gemm)
    box, none = (moe.WARP_ROWS, facts.PIECE_COLUMNS), np.zeros((1, 2), np.uint8)
    d = Matrix(none if to_rows is None else to_rows, 2, box, plain.SWIZZLE)
    held, expected = Memories((COLUMNS - size, size)), facts.transaction_bytes(form.gemm)
    block = Block(form.gemm, matrices_of(form.gemm, sides, d), held, expected)
    block.moe = form
    return block


def first_sides(case: checks.Case, given: Any, x: Any) -> Sides:
    """Return what FC1 reads."""
    w13, count = given.weights.w13, case.problem.experts * moe.GATE_AND_UP
    codes = w13.codes.reshape(count, case.problem.width, -1)
    return Sides(x, codes, w13.scales.reshape(count, -1))


def tiles_of(
    plan: Any, columns: int, form: facts.GemmForm, share: tuple[int, int], place: tuple[int, int]
) -> list[Any]:
    """Return the tiles of one of so many clusters, at a place in it, each with its expert."""
    from degarble.kernels.gemm.mainloop import tile_of  # noqa: PLC0415  needs the DSL

    number, count = share
    tactic, (in_row, in_column) = form.tactic, place
    down, across = tactic.cluster_rows, tactic.cluster_columns
    tiles = (
        int(plan.rows) // moe.rows_of_one_expert(tactic),
        ceil_div(columns, tactic.columns * across),
    )
    found = [tile_of(i, tiles, tactic.group) for i in range(number, tiles[0] * tiles[1], count)]
    return [
        (row * down + in_row, column * across + in_column, int(plan.experts[row]))
        for row, column in found
    ]


def multiply(
    form: MoeForm, sides: Sides, plan: Any, leaving: Leaving, order: tuple[str, int] = ("loads", 2)
) -> int:
    """Run all thread blocks of a product; return how many instructions ran.

    Those of a cluster load all of theirs, for who issues which part is left out.
    """
    first, clusters = order
    places = product(range(form.gemm.tactic.cluster_rows), range(form.gemm.tactic.cluster_columns))
    inner, columns = sides.codes.shape[2] * 2, form.gemm.parts * sides.codes.shape[1]
    steps, instructions = ceil_div(inner, form.gemm.tactic.inner), 0
    for number, place in product(range(clusters), places):
        tiles = tiles_of(plan, columns, form.gemm, (number, clusters), place)
        block = block_of(form, sides, leaving.to if form.gemm.parts == 1 else None)
        in_order = [tile[:2] for tile in tiles]
        roles = [
            block.load(tiles, steps),
            block.multiply(in_order, steps, inner // facts.NVFP4.block),
            *(block.leave(warp, tiles, leaving) for warp in range(WARPS)),
        ]
        block.run(roles, first)
        instructions += block.memories.instructions
        require(int(block.stored.max(initial=0)) <= 1, "bytes of rows are stored twice")
    return instructions


# ---- around the products -------------------------------------------------------------------------


def ordered(case: checks.Case, given: Any, plan: Any) -> None:
    """Order slots by expert, each expert from where a tile begins; write the plan."""
    groups, row = checks.slots_of_experts(case, given.routing), 0
    plan.places.fill_(moe.NONE)
    for expert, slots in enumerate(groups):
        end = row + round_up(len(slots), case.tile)
        plan.counts[expert] = len(slots)
        plan.slots[row:end] = moe.NONE
        plan.slots[row : row + len(slots)] = slots.int()
        plan.places[slots] = torch.arange(row, row + len(slots), dtype=torch.int32)
        plan.experts[row // case.tile : end // case.tile] = expert
        row = end
    plan.rows[0] = row


def gathered(case: checks.Case, given: Any, plan: Any, out: Any) -> None:
    """Quantise every row's token with its expert's scale; rows of zeros fill groups up."""
    p, count = case.problem, int(plan.rows)
    codes = torch.zeros(count, p.hidden // 2, dtype=torch.uint8)
    scales = torch.zeros(count, p.hidden // 16, dtype=torch.uint8)
    for tile in range(count // TILE):
        rows = slice(tile * TILE, (tile + 1) * TILE)
        slots = plan.slots[rows].long()
        own = slots >= 0
        scale = given.weights.w13.input_scale[int(plan.experts[tile * TILE // case.tile])]
        x = given.x[slots[own] // p.chosen].float()
        made = quantise(x, NVFP4, CANONICAL, decode_scale=scale)
        codes[rows][own] = made.codes
        scales[rows][own] = made.block_scale.view(torch.uint8)
    out.codes[:count] = codes
    if count:
        stored = to_layout(scales, SWIZZLE_128X4)
        out.scales[: len(stored)] = stored


def factors(weights: Any) -> Tensor:
    """Return the factor of each expert's sums, part by part [E, parts]."""
    count = len(weights.input_scale)
    made: Tensor = weights.input_scale[:, None] * weights.decode_scale.reshape(count, -1)
    return made


def on_model(case: checks.Case, given: Any, order: tuple[str, int] = ("loads", 2)) -> checks.Result:
    """Let the host model answer a whole call, in poisoned memory."""
    result = checks.poisoned(case, given)
    plan, x, hidden, out = result.workspace
    w13, w2 = given.weights
    ordered(case, given, plan)
    gathered(case, given, plan, x)
    first, second = moe.forms_of(case.problem, case.target, case.tactic)
    sides = first_sides(case, given, x)
    to = (hidden.codes.numpy(), hidden.scales.numpy())
    weights = given.routing.weights.flatten()
    leaving = Leaving(factors(w13), plan.slots, to, w2.input_scale, weights)
    multiply(first, sides, plan, leaving, order)
    to_rows = out.view(torch.uint8).numpy()
    leaving = Leaving(factors(w2), plan.slots, to_rows)
    multiply(second, Sides(hidden, w2.codes, w2.scales), plan, leaving, order)
    result.out.copy_(combined(case, given, plan, out))
    return result


def combined(case: checks.Case, given: Any, plan: Any, rows: Tensor) -> Tensor:
    """Sum a token's rows slot after slot, as the kernel does: one float32 number at a time."""
    p, weights = case.problem, given.routing.weights
    total = torch.zeros(p.tokens, p.hidden)
    for token, k in product(range(p.tokens), range(p.chosen)):
        place = int(plan.places[token * p.chosen + k])
        if place >= 0:
            row = rows[place].float()
            weighted = p.weighting == moe.AFTER_W2
            total[token] += row * weights[token, k] if weighted else row
    if given.shared is None:
        return total
    rounded: Tensor = (total + given.shared.float()).bfloat16()
    return rounded


# ---- the definition ------------------------------------------------------------------------------


def sums_of(a: tuple[Tensor, Tensor], codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 sums of rows and one matrix, as tcgen05 computes them."""
    a_codes, a_scales = a
    n, blocks = codes.shape[0], codes.shape[1] // 8
    b_scales = from_layout(scales, SWIZZLE_128X4, n, blocks)
    pad = -2 * codes.shape[1] % 64
    whole = (
        functional.pad(tensor, (0, by))
        for tensor, by in (
            (unpack_nibbles(a_codes), pad),
            (a_scales, pad // 16),
            (unpack_nibbles(codes), pad),
            (b_scales, pad // 16),
        )
    )
    return tensor_core.block_scaled_gemm(*whole)


def wanted(case: checks.Case, given: Any, expert: int, slots: Tensor) -> tuple[Any, Any, Tensor]:
    """Return codes and scales of x, those of SwiGLU, and the outputs, of one expert's slots.

    The same as checks.wanted makes with kernels of their own, by definitions.
    """
    p, (w13, w2) = case.problem, given.weights
    scales = factors(w13)[expert], factors(w2)[expert]
    x = coded(given.x[slots // p.chosen].float(), w13.input_scale[expert])
    gate, up = (
        (sums_of(x, w13.codes[expert, part], w13.scales[expert, part]) * scales[0][part])
        .bfloat16()
        .float()
        for part in range(moe.GATE_AND_UP)
    )
    values = elementary.swiglu(gate, up, p.limit)
    if p.weighting == moe.BEFORE_W2:
        values = values * given.routing.weights.flatten()[slots, None]
    hidden = coded(values.bfloat16().float(), w2.input_scale[expert])
    rows = (sums_of(hidden, w2.codes[expert], w2.scales[expert]) * scales[1]).bfloat16()
    return stored(x), stored(hidden), rows


def coded(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows; return codes, and scale codes in row order."""
    made = quantise(values, NVFP4, CANONICAL, decode_scale=scale)
    return made.codes, made.block_scale.view(torch.uint8)


def stored(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Put scales into 128x4 order."""
    return rows[0], to_layout(rows[1], SWIZZLE_128X4)
