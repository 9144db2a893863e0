"""Make operands for single roles of the sm_100a sparse attention; the host model executes them.

A token's lists become tiles and masks, a tile as it has to lie in shared memory (by the kernel's
own address). Products get numbers with exact results; softmax gets new peaks, absent keys and whole
tiles without any. `HostModel` runs all of it on sm100_attention_model and merges splits in float64.
Shape letters: S tiles, H heads (64), K keys of a tile (64), L width
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from degarble.kernels.attention import problem as facts
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.runtime.targets import SM100A
from degarble.suites.kernels import indexer_checks
from degarble.suites.kernels.attention import attention_checks as checks
from degarble.suites.kernels.attention import sm100_attention_model as model

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.suites.kernels.indexer_checks import ScoresCase


class Numbers(NamedTuple):
    """What parts take: BF16 as bits, logits and shares as float32, masks as bytes."""

    queries: Any  # [H, L]
    tiles: Any  # [S, K, L]
    shares: Any  # [S, H, K]
    logits: Any  # [S, H, K]
    masks: Any  # [S, bytes]


def numbers_of(case: checks.Case) -> Numbers:
    """Draw numbers for a case's tiles: whole ones for products, ordinary ones for weighing."""
    draw = np.random.default_rng(case.near)
    steps, width = case.problem.tiles, case.problem.family.key
    shape = (steps, facts.HEADS, facts.TILE)
    queries = draw.integers(-3, 4, (facts.HEADS, width))
    tiles = draw.integers(-2, 3, (steps, facts.TILE, width))
    shares = draw.integers(0, 5, shape).astype(np.float32)
    logits = draw.standard_normal(shape).astype(np.float32) * 4
    masks = np.zeros((steps, model.MASKS), np.uint8)
    masks[:, : facts.TILE // 8] = draw.integers(0, 256, (steps, facts.TILE // 8))
    if steps > 3:
        masks[2] = 0  # a tile without keys
        logits[3, ::2] = -20.0  # no new peak for half of the heads
    of_queries, of_tiles = (model.to_bits(x.astype(np.float32)) for x in (queries, tiles))
    return Numbers(of_queries, of_tiles, shares, logits, masks)


def tiles_of(case: checks.Case, given: checks.Drawn, token: int) -> tuple[Any, Any]:
    """Return a token's tiles as BF16 bits [S, K, L] and masks, the window's first."""
    tiles, masks = [], []
    for i, of in enumerate(case.problem.lists):
        slots = given.slots[i][token]
        kept = of.width if given.lengths is None else int(given.lengths[i][token])
        for first in range(0, of.tiles * facts.TILE, facts.TILE):
            part = torch.full((facts.TILE,), -1)
            own = slots[first : min(first + facts.TILE, kept)].long()
            part[: len(own)] = own
            decoded = given.decoded[i]
            inside, beyond = (part >= 0) & (part < len(decoded)), part >= len(decoded)
            found = torch.where(inside[:, None], decoded[part.clamp(0, len(decoded) - 1)], 0.0)
            tiles.append(found.bfloat16().view(torch.int16).numpy().view(np.uint16))
            masks.append(np.packbits([inside.numpy(), beyond.numpy()], bitorder="little"))
    width = case.problem.family.key
    empty = (np.zeros((0, facts.TILE, width), np.uint16), np.zeros((0, model.MASKS), np.uint8))
    return (np.stack(tiles), np.stack(masks)) if tiles else empty


def image_of(tile: Any) -> Any:
    """Return a tile's bytes as they have to lie, by the address that the kernel computes."""
    gather = import_module("degarble.kernels.attention.gather")
    chunks = tile.view(np.uint8).reshape(len(tile), -1, gather.CHUNK)
    made = np.zeros(chunks.size, np.uint8)
    for row in range(chunks.shape[0]):
        for chunk in range(chunks.shape[1]):
            at = gather.address_in_tile(row, chunk)
            made[at : at + gather.CHUNK] = chunks[row, chunk]
    return made


class HostModel:
    """The host model as a stand-in: it shows that the steps tell faults apart, and no more."""

    def __init__(self, first: str = "roles") -> None:
        self.first = first

    def load(self, case: checks.Case, given: checks.Drawn) -> tuple[Any, Any]:
        """See Executor."""
        block = block_of(case)
        tiles, masks = tiles_of(case, given, 0)
        seen, of_masks = [], []

        def watch() -> Any:
            turn = model.Turn(0)
            for _ in tiles:
                yield lambda: block.full[turn.at].passed(turn.parity)
                begin = block.tile_at(turn.at) // 2
                count = facts.TILE * block.form.width
                seen.append(block.shared[begin : begin + count].copy().view(np.uint8))
                of_masks.append(block.masks[turn.at].copy())
                block.empty[turn.at].arrive()
                turn.advance()

        block.run([block.gather(tiles, masks), watch()], self.first)
        return np.stack(seen), np.stack(of_masks)

    def multiply(self, case: checks.Case, numbers: Numbers) -> tuple[Any, Any]:
        """See Executor."""
        block = block_of(case)
        block.put(block.place["queries"], numbers.queries)
        steps, logits = len(numbers.tiles), []

        def stand_in() -> Any:
            for step, shares in enumerate(numbers.shares):
                buffer = step % facts.LOGITS
                phase = step // facts.LOGITS % 2
                yield lambda buffer=buffer, phase=phase: block.logits[buffer].passed(phase)
                column = facts.first_columns()[1] + buffer * facts.TILE
                logits.append(block.tensor[block.held(0, column, facts.TILE)])
                if step:
                    yield lambda step=step: block.sums.passed((step - 1) % 2)
                block.put(block.place["shares"], model.to_bits(shares))
                block.shares.arrive(model.WARPS)
            yield lambda: block.sums.passed((steps - 1) % 2)

        roles = [block.gather(numbers.tiles, numbers.masks), block.multiply_tiles(steps)]
        block.run([*roles, stand_in()], self.first)
        return np.stack(logits), block.output()

    def weigh(self, case: checks.Case, numbers: Numbers) -> tuple[Any, Any, Any]:
        """See Executor."""
        block, steps, shares = block_of(case), len(numbers.logits), []
        state = model.fresh_state()
        block.tensor[:, : facts.COLUMNS] = 1.0

        def stand_in() -> Any:
            for step in range(steps):
                buffer, stage = step % facts.LOGITS, step % facts.STAGES
                block.masks[stage] = numbers.masks[step]
                column = facts.first_columns()[1] + buffer * facts.TILE
                block.tensor[block.held(0, column, facts.TILE)] = numbers.logits[step]
                block.full[stage].arrive(block.how.arrivals)
                block.logits[buffer].arrive()
                yield lambda step=step: block.shares.passed(step % 2)
                shape = (facts.HEADS, facts.TILE)
                shares.append(model.of_bits(block.taken(block.place["shares"], shape)))
                block.sums.arrive()

        block.run([stand_in(), block.weigh(steps, 1.0, state)], self.first)
        return np.stack(shares), np.stack([state["peaks"], state["totals"]], 1), block.output()

    def attend(self, case: checks.Case, given: checks.Drawn) -> tuple[Tensor, Tensor]:
        """See Executor."""
        p = case.problem
        out = torch.zeros(p.tokens, p.heads, rows.WIDTH, dtype=torch.bfloat16)
        lse = torch.zeros(p.tokens, p.heads)
        for token in range(p.tokens):
            tiles, masks = tiles_of(case, given, token)
            for head in range(0, p.heads, facts.HEADS):
                own = slice(head, head + facts.HEADS)
                parts = [
                    self._split(case, given.q[token, own], (tiles[each], masks[each]))
                    for each in splits_of(case, given, token)
                ]
                out[token, own], lse[token, own] = merged(parts, sinks_of(case, given)[own])
        return out, lse

    def _split(self, case: checks.Case, q: Tensor, tiles: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        """Run one split; return peaks, totals and sums of the heads that there are."""
        block, state, steps = block_of(case), model.fresh_state(), len(tiles[0])
        queries = np.zeros((facts.HEADS, block.form.width), np.uint16)
        queries[: len(q)] = q.contiguous().view(torch.int16).numpy().view(np.uint16)
        block.put(block.place["queries"], queries)
        weighing = block.weigh(steps, case.problem.scale, state)
        block.run([block.gather(*tiles), block.multiply_tiles(steps), weighing], self.first)
        sums = block.output() if steps else np.zeros((facts.HEADS, rows.WIDTH), np.float32)
        held = (state["peaks"], state["totals"], sums)
        return tuple(each[: len(q)].astype(np.float64) for each in held)  # type: ignore[return-value]

    def scores(self, case: ScoresCase, of: indexer_checks.Sides) -> Tensor:
        """See Executor."""
        return indexer_checks.exact_scores(case, of)[0].float()


def block_of(case: checks.Case) -> model.Block:
    """Return a thread block of the case's form."""
    return model.Block(facts.choose_form(case.problem, SM100A.name))


def sinks_of(case: checks.Case, given: checks.Drawn) -> Any:
    """Return each head's sink; -inf where there are none."""
    none = np.full(case.problem.heads, -np.inf)
    return given.sink.double().numpy() if case.problem.family.sinks else none


def splits_of(case: checks.Case, given: checks.Drawn, token: int) -> list[list[int]]:
    """Return the numbers of the tiles of each split, as the kernel walks them."""
    p = case.problem
    widths = [of.tiles for of in p.lists] + [0] * (2 - len(p.lists))
    kept = widths
    if given.lengths is not None:
        kept = [-(-int(length[token]) // facts.TILE) for length in given.lengths]
        kept += [0] * (2 - len(kept))
    found = []
    for split in range(facts.choose_splits(p)):
        each = facts.tiles_each(p)
        of_lists = (widths[0], widths[1]), (kept[0], kept[1])
        first, near, steps = facts.tiles_of_split(split, each, *of_lists)
        begin = max(first, widths[0])
        found.append([first + i if i < near else begin + i - near for i in range(steps)])
    return found


def merged(parts: list[Any], sink: Any) -> tuple[Tensor, Tensor]:
    """Merge splits in their order; return outputs rounded once, and LSE."""
    largest = np.max([peaks for peaks, _, _ in parts], 0)
    against = np.where(np.isneginf(largest), 0.0, largest)
    factors = [np.exp2(peaks - against) for peaks, _, _ in parts]
    total = sum(f * totals for f, (_, totals, _) in zip(factors, parts, strict=True))
    sums = sum(f[:, None] * s for f, (_, _, s) in zip(factors, parts, strict=True))
    with np.errstate(divide="ignore"):
        both = total + np.exp2(sink * model.LOG2_E - against)
        inverse = np.where(both == 0, 0.0, 1 / both)
        lse = (against + np.log2(total)) / model.LOG2_E
    return torch.from_numpy(sums * inverse[:, None]).bfloat16(), torch.from_numpy(lse).float()
