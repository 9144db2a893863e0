"""Attention as arithmetic: every tile in one split, memory and registers that fit, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from degarble.harness.base.errors import DegarbleError, InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import (
    AttentionProblem,
    KeyList,
    MergeProblem,
    QueryProblem,
)
from degarble.kernels.primitives.kv_problem import ENTRIES, EntryFormat, Pages, entry_format
from degarble.kernels.runtime.targets import SM90A, SM100A

# --------------------------------------------------------------------------------------------------
# The arithmetic of sparse attention: every tile in one split, memory and registers that fit.

PAGES = Pages("fp8", 64, 4)
PAGES_OF_V32 = Pages("fp8-v32", 64, 4, width=576)
OF_V32 = AttentionProblem(64, 128, KeyList(2048, PAGES_OF_V32), mode="decode", scale=0.1352338)
ALL = [*ENTRIES.values(), *(entry_format(name, 576) for name in ("fp8-v32", "bf16"))]
PROBLEM = AttentionProblem(3, 64, KeyList(128, PAGES), KeyList(1024, PAGES), "decode")


def walked(problem: AttentionProblem, lengths: tuple[int, int]) -> list[list[int]]:
    """Return the tiles that each split goes through, as a kernel counts them."""
    widths = problem.window.tiles, problem.tiles - problem.window.tiles
    found = []
    for split in range(facts.choose_splits(problem)):
        first, near, steps = facts.tiles_of_split(split, facts.tiles_each(problem), widths, lengths)
        begin = max(first, widths[0])
        found.append([first + i if i < near else begin + i - near for i in range(steps)])
    return found


@pytest.mark.parametrize("near", [0, 1, 64, 65, 128, 700])
@pytest.mark.parametrize("far", [None, 0, 1, 63, 512, 1024, 1025, 25_000])
@pytest.mark.parametrize(("mode", "splits"), [("decode", 0), ("prefill", 0), ("decode", 7)])
def test_each_tile_that_counts_is_in_one_split(
    near: int, far: int | None, mode: str, splits: int
) -> None:
    of_far = None if far is None else KeyList(far, PAGES)
    problem = AttentionProblem(1, 8, KeyList(near, PAGES), of_far, mode, splits=splits)
    tiles = problem.window.tiles, problem.tiles - problem.window.tiles
    for share in (0.0, 0.3, 1.0):
        counts = int(share * tiles[0]), int(share * tiles[1])
        whole = [*range(counts[0]), *range(tiles[0], tiles[0] + counts[1])]
        found = walked(problem, counts)
        assert [tile for split in found for tile in split] == whole
        assert all(len(split) <= facts.tiles_each(problem) for split in found)
    assert 1 <= facts.choose_splits(problem) <= facts.MOST_SPLITS


def test_a_walk_that_leaves_a_tile_out_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    true = facts.tiles_of_split

    def shorter(split: Any, each: Any, widths: Any, lengths: Any) -> Any:
        first, near, steps = true(split, each, widths, lengths)
        return first, near, max(0, steps - split)

    monkeypatch.setattr(facts, "tiles_of_split", shorter)
    assert walked(PROBLEM, (2, 16)) != [[*range(9)], [*range(9, 18)]]


def test_splits_are_those_of_the_widths_alone() -> None:
    assert walked(PROBLEM, (2, 16)) == [[*range(9)], [*range(9, 18)]]
    many = replace(PROBLEM, tokens=4096, heads=8, lengths=True)
    assert facts.tiles_each(many) == facts.tiles_each(PROBLEM) == facts.TILES_OF_SPLIT
    assert facts.choose_splits(replace(PROBLEM, mode="prefill")) == 1
    for splits, together in ((0, 2), (1, 1), (8, 8), (9, 0)):
        form = facts.choose_form(replace(PROBLEM, splits=splits), SM90A.name)
        assert form.together == together
    assert facts.choose_form(replace(PROBLEM, mode="prefill"), SM90A.name).together == 1


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: f"{entry.name}-{entry.width}")
def test_a_thread_block_has_room(entry: EntryFormat) -> None:
    held = facts.shared_memory(entry)
    assert held.queries == 64 * 2 * entry.width
    assert held.total <= SM90A.shared_memory_bytes
    multiplying, bringing = facts.registers(entry)
    plan = facts.gather_plan(entry)
    registers = facts.CONSUMERS * multiplying + plan.warpgroups * bringing
    assert registers * facts.WARPGROUP <= facts.REGISTER_FILE
    # Sums of 64 heads go where the tiles were, and half an output where half of a tile was.
    assert held.keys >= 4 * facts.HEADS * 512
    assert facts.HEADS <= facts.TILE
    assert plan.arrivals == plan.warpgroups * (128 + 4)
    at_start = facts.REGISTER_FILE // facts.threads(entry)
    assert at_start > facts.HEADS * facts.columns_at_once(entry) // facts.WARPGROUP
    exchanged = held.exchanged + facts.laid_over(entry) * held.shares
    assert exchanged == facts.halved(entry) * 4 * facts.HEADS * facts.TILE


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: f"{entry.name}-{entry.width}")
def test_lanes_take_every_code_of_a_tile_once(entry: EntryFormat) -> None:
    for plan in (facts.gather_plan(entry), facts.sm100_gather_plan(entry)):
        assert plan.rows_of_warp * plan.warps == 64
        if entry.code_bits == facts.E4M3_BITS:  # a row a turn, in registers alone
            assert plan.rows_of_warp % facts.ROWS_AHEAD == 0
            assert plan.ahead_bytes == 0
            continue
        assert (
            plan.warps * plan.turns * plan.rows_at_once * entry.code_bytes == 64 * entry.code_bytes
        )
        assert plan.rows_at_once * entry.code_bytes <= 32 * 16
        in_registers = plan.turns - plan.turns_ahead
        assert 0 <= in_registers <= (1 if plan.warpgroups == 1 else 3)


@pytest.mark.parametrize(
    ("lists", "heads", "of_few", "of_more"),
    [
        ((OF_V32.window,), 128, 16, 4),
        ((OF_V32.window,), 16, 16, 8),
        (PROBLEM.lists, 128, 9, 3),
        (PROBLEM.lists, 64, 9, 4),
        ((KeyList(2500, PAGES_OF_V32),), 128, 10, 4),
        ((KeyList(640, PAGES),), 128, 4, 4),
        ((KeyList(65, PAGES),), 64, 2, 2),
    ],
)
def test_splits_of_few_tokens(
    lists: tuple[KeyList, ...], heads: int, of_few: int, of_more: int
) -> None:
    """What 16 tokens have run beside each other, in clusters that fit or with a second kernel."""
    for most, count in ((True, of_few), (False, of_more)):
        assert facts.few_token_splits(lists, heads, most=most) == count
        # None of them is empty.
        window, entries = (*lists, None)[:2]
        assert window is not None
        problem = AttentionProblem(1, heads, window, entries, "decode", splits=count, scale=0.1)
        assert facts.tiles_each(problem) * (count - 1) < problem.tiles


@pytest.mark.parametrize("count", range(1, 33))
def test_splits_without_empty_ones_have_the_same_keys(count: int) -> None:
    """So the bits are those of `count` splits, of which the last ones had no keys."""
    for tiles, pairs in product(range(1, 200), (1, 2)):
        each = -(-tiles // count)
        each += each % pairs
        kept = -(-tiles // each)
        again = -(-tiles // kept)
        assert again + again % pairs == each


def test_few_tokens_have_fewer_heads_a_thread_block() -> None:
    for tokens, heads, splits, each in (
        (1, 128, 9, 16),
        (1, 128, 18, 32),
        (2, 64, 9, 16),
        (1, 8, 9, 16),
        (16, 128, 3, 64),
        (16, 64, 4, 64),  # halves would be 128 thread blocks
        (3, 64, 2, 16),
        (64, 64, 2, 64),
    ):
        problem = replace(PROBLEM, tokens=tokens, heads=heads, splits=splits)
        assert facts.heads_of_block(problem) == each
        assert facts.heads_of_block(replace(problem, mode="prefill", splits=0)) == facts.HEADS


def test_every_line_of_an_entry_is_asked_for() -> None:
    entry = PAGES_OF_V32.format
    for start in range(0, 2 * facts.LINE, 16):  # entries lie side by side, at any of these
        asked = {
            (start + facts.byte_of_line(number, entry)) // facts.LINE
            for number in range(facts.lines(entry))
        }
        assert asked == {(start + byte) // facts.LINE for byte in range(entry.step)}


def test_figures_follow() -> None:
    assert PROBLEM.operations == 3 * 64 * 1152 * 512 * 4
    assert PROBLEM.gathered_bytes == 3 * 1152 * 584
    assert OF_V32.operations == 2 * 64 * 128 * 2048 * (576 + 512)
    assert OF_V32.gathered_bytes == 64 * 2048 * 656
    assert (facts.choose_splits(OF_V32), facts.tiles_each(OF_V32)) == (2, 16)
    form = facts.choose_form(OF_V32, SM90A.name)
    assert (form.width, form.together, form.sinks) == (576, 2, False)
    assert facts.grid(PROBLEM) == 3 * 2
    assert facts.grid(replace(PROBLEM, heads=65)) == 3 * 2 * 2


@pytest.mark.parametrize(
    ("error", "name", "make"),
    [
        (ShapeMismatch, "query heads", lambda: replace(PROBLEM, heads=129)),
        (ShapeMismatch, "query heads", lambda: replace(PROBLEM, heads=0)),
        (ShapeMismatch, "tokens", lambda: replace(PROBLEM, tokens=-1)),
        (InvalidArgument, "mode of attention", lambda: replace(PROBLEM, mode="both")),
        (InvalidArgument, "splits", lambda: replace(PROBLEM, splits=33)),
        (ShapeMismatch, "splits", lambda: MergeProblem(1, 64, 0)),
        (InvalidArgument, "splits of a merge", lambda: MergeProblem(1, 64, 33)),
        (InvalidArgument, "softmax scale", lambda: replace(PROBLEM, scale=0.0)),
        (InvalidArgument, "softmax scale", lambda: replace(OF_V32, scale=512**-0.5)),
        (UnknownName, "products of queries", lambda: replace(PROBLEM, products="nvfp4")),
        (InvalidArgument, "entries beside", lambda: replace(PROBLEM, products=facts.EXPERIMENT)),
        (InvalidArgument, "lists of keys", lambda: replace(OF_V32, entries=OF_V32.window)),
        (ShapeMismatch, "width of a list", lambda: KeyList(-1, PAGES)),
        (ShapeMismatch, "width of cache entries", lambda: KeyList(1, Pages("bf16", 1, 1, 0, 128))),
        (UnknownName, "cache entry format", lambda: KeyList(1, Pages("fp9", 1, 1))),
        (
            InvalidArgument,
            "entry formats",
            lambda: replace(PROBLEM, entries=KeyList(1, Pages("bf16", 1, 1))),
        ),
    ],
)
def test_refuses_by_name(error: type[DegarbleError], name: str, make: Any) -> None:
    with pytest.raises(error, match=name):
        make()


# --------------------------------------------------------------------------------------------------
# V3.2's query rows: what is refused, and that every chunk is somebody's.


@pytest.mark.parametrize(("heads", "width"), [(0, 192), (1 << 16, 192), (4, 56), (4, 196)])
def test_refuses_heads_by_name(heads: int, width: int) -> None:
    with pytest.raises(ShapeMismatch, match="query heads and their width"):
        QueryProblem(1, heads, width, 1)


def test_refuses_other_extents() -> None:
    for name, tokens, positions in (("tokens", -1, 1), ("table of turns", 1, 0)):
        with pytest.raises(ShapeMismatch, match=name):
            QueryProblem(tokens, 1, 192, positions)


def test_chunks_walk_every_row_once() -> None:
    problem = QueryProblem(3, 5, 192, 7)
    tokens, parts = facts.query_grid(problem)
    assert tokens == 3
    assert parts * facts.QUERY_THREADS >= 5 * facts.CHUNKS > (parts - 1) * facts.QUERY_THREADS
    places = [facts.place_of(chunk) for chunk in range(5 * facts.CHUNKS)]
    assert places == [(head, n) for head in range(5) for n in range(facts.CHUNKS)]
    assert (facts.CHUNKS, facts.OF_LATENT, facts.TURNED) == (72, 64, 8)
    assert problem.chunks_of_head == 24


# --------------------------------------------------------------------------------------------------
# Sparse attention on sm_100a: what a thread block holds fits, and numbers say what they mean.

FORMATS = [
    *ENTRIES.values(),
    *(entry_format(name, facts.V32.key) for name in ("fp8-v32", "fp8-v32-ue8m0", "bf16")),
]


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: f"{entry.name}-{entry.width}")
def test_every_entry_fits_shared_memory(entry: EntryFormat) -> None:
    assert facts.shared_bytes(entry) <= SM100A.shared_memory_bytes


def test_output_and_logits_fit_tensor_memory() -> None:
    first = facts.first_columns()
    # Two halves of 256 columns lie in 16 lanes each of the same columns.
    assert first == (0, 256)
    assert facts.columns_held() == first[1] + 2 * 64
    assert facts.columns_held() <= facts.columns_allocated()
    assert facts.columns_allocated() == SM100A.tensor_memory_columns
    assert 2 * facts.UPPER_LANES == facts.LANES_OF_WARP


def test_rows_of_an_instruction_are_those_of_wgmma() -> None:
    """A warp's 16 lanes are the 16 rows that wgmma gives it: layout F, reads of 256 bits."""
    rows = range(facts.HEADS)
    lanes = [row % 16 + 32 * (row // 16) for row in rows]  # PTX ISA 9.1, layout F
    for warp in range(4):
        held = [lanes.index(warp * facts.LANES_OF_WARP + lane) for lane in range(16)]
        assert held == [*range(16 * warp, 16 * warp + 16)]
    for lane in range(32):
        places = [(lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2) for r in range(4)]
        fragment = [(lane // 4 + 8 * row, 2 * (lane % 4) + i) for row in (0, 1) for i in (0, 1)]
        assert places == fragment
    assert facts.repeats(facts.KEYS) * facts.REPEAT_REGISTERS == 16


@pytest.mark.parametrize("width", facts.FAMILIES)
def test_registers_are_the_processors(width: int) -> None:
    held = facts.REGISTERS[width]
    assert held.total == facts.REGISTER_FILE
    assert facts.LAUNCH_REGISTERS * facts.SM100_THREADS == facts.REGISTER_FILE
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in held)
    assert held.multiplying < held.gathering < facts.LAUNCH_REGISTERS < held.weighing


@pytest.mark.parametrize("width", facts.FAMILIES)
def test_instructions_multiply_what_a_tile_has(width: int) -> None:
    of_logits, of_sums = facts.instructions(width)
    each = facts.HEADS * facts.INSTRUCTION_K
    assert of_logits * each * facts.TILE == facts.HEADS * facts.TILE * width
    assert of_sums * each * facts.COLUMNS == facts.HEADS * facts.TILE * 512
