"""Experts as arithmetic: how slots become rows, what is enough for any choice; refusals."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.nvfp4_stages import word_of_scales
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import MoeProblem
from degarble.kernels.runtime.targets import TARGETS

FLASH = MoeProblem(8192, 4096, 2048, 256, 6, 256, 10.0)
TILES = facts.TILES["sm_90a"]
TACTICS = tuple(TILES.values())


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda tactic: str(tactic.rows))
def test_there_are_tiles_enough_for_any_choice(tactic: gemm.GemmTactic) -> None:
    drawn = random.Random("tiles")
    for _ in range(300):
        experts, tokens, chosen = drawn.randint(1, 9), drawn.randint(0, 300), drawn.randint(1, 2)
        problem = MoeProblem(tokens, 32, 32, experts, min(chosen, experts), experts)
        favourite = drawn.randint(0, experts - 1)
        counts = [0] * experts
        for _ in range(problem.slots):
            counts[favourite if drawn.random() < 0.5 else drawn.randint(0, experts - 1)] += 1
        needed = sum(-(-count // tactic.rows) for count in counts)
        assert needed <= facts.most_tiles(problem, tactic)
    worst = MoeProblem(7, 32, 32, 7, 1, 7)  # each slot a tile of its own: not one too many
    assert facts.most_tiles(worst, tactic) == 7
    assert facts.most_tiles(replace(worst, tokens=0), tactic) == 1


def test_numbers_of_a_layer() -> None:
    assert FLASH.slots == 49_152
    assert FLASH.operations == 2 * 49_152 * 4096 * 3 * 2048
    first, second = facts.forms_of(FLASH, "sm_90a")
    assert (first.gemm.parts, second.gemm.parts) == (2, 1)
    assert first.gemm.tactic == second.gemm.tactic == TILES[256]
    assert facts.most_rows(FLASH, TILES[128]) == 128 * ((49_152 + 127 * 256) // 128)
    assert facts.columns_of(FLASH, first) == (4096, 4096)
    assert facts.columns_of(FLASH, second) == (4096, 2048)
    assert facts.grid(FLASH, first, 132) == 132
    assert facts.scale_bytes(129, 96) == 256 * 8
    more = facts.choose_tactic(replace(FLASH, tokens=16_384), "sm_90a")
    assert (more.rows, more.rows_up_to) == (128, gemm.ANY)
    one = replace(FLASH, tokens=1)
    assert facts.choose_tactic(one, "sm_90a") == TACTICS[0]
    assert facts.grid(one, facts.forms_of(one, "sm_90a")[0], 10_000) == 6 * 16


def test_where_the_weight_counts_is_part_of_a_form() -> None:
    weighted = [
        facts.forms_of(replace(FLASH, weighting=weighting), "sm_90a")[0].weighted
        for weighting in (facts.BEFORE_W2, facts.AFTER_W2)
    ]
    assert weighted == [True, False]


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda tactic: str(tactic.rows))
def test_a_stage_of_gate_and_up_fits_and_is_counted(tactic: gemm.GemmTactic) -> None:
    first, second = (form.gemm for form in facts.forms_of(FLASH, "sm_90a", tactic))
    for form in (first, second):
        held = gemm.footprint(form)
        each = held.total + gemm.ALIGNMENT + gemm.RESERVED_BYTES
        of_processor = TARGETS["sm_90a"].shared_memory_bytes + gemm.RESERVED_BYTES
        assert each * tactic.blocks <= of_processor
        # Decoders of few rows skip stages, and rely on the second one.
        assert held.stages > (1 if gemm.has_few_rows(form) else gemm.AHEAD)
        assert held.stages >= gemm.decoded_stages(form)
        assert gemm.registers_of_roles(form) <= gemm.registers_at_launch(form) * gemm.threads(form)
        registers = gemm.registers_of_roles(form) * tactic.blocks
        assert registers <= gemm.REGISTERS_OF_PROCESSOR
    boxes = [(load.name, load.rows, load.matrices) for load in gemm.loads(first)]
    half = tactic.columns // 2
    assert boxes[:2] == [("a", tactic.rows, 1), ("b", half, 2)]
    tiles = max(1, tactic.rows // gemm.SCALE_TILE_ROWS)
    assert boxes[2:] == [("scales of a", tiles, 1), ("scales of b", 1, 2)]
    codes = tactic.columns * tactic.inner // 2
    assert [gemm.loads(form)[1].bytes for form in (first, second)] == [codes, codes]


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda tactic: str(tactic.rows))
def test_scales_of_up_lie_in_tiles_of_their_own(tactic: gemm.GemmTactic) -> None:
    form = facts.forms_of(FLASH, "sm_90a", tactic)[0].gemm
    part = tactic.columns // 2
    for first in range(0, 128, part):
        for row in range(tactic.columns):
            matrix, within = divmod(row, part)
            want = 128 * matrix + word_of_scales(first + within)
            # A thread decodes every 128th row, and adds what its first one needs.
            added = facts.first_scale_row(row % 128, first, form)
            assert word_of_scales(row + added) == want


def test_refuses_by_name() -> None:
    for name, wrong in (("hidden", 48), ("width", 0), ("tokens", -1), ("tokens", 1 << 27)):
        with pytest.raises(ShapeMismatch, match="tokens, hidden, width"):
            replace(FLASH, **{name: wrong})  # type: ignore[arg-type]
    wide = replace(FLASH, hidden=(1 << 19) - 1024, tokens=1)
    with pytest.raises(ShapeMismatch, match=r"below 2\*\*31"):  # by tiles of 256 rows, not of 128
        replace(wide, hidden=1 << 19)
    for name, wrong in (("experts", 0), ("experts", 257), ("routed", 1024)):
        with pytest.raises(ShapeMismatch, match="experts held here"):
            replace(FLASH, **{name: wrong})  # type: ignore[arg-type]
    for chosen in (0, 17):
        with pytest.raises(ShapeMismatch, match="experts of a token"):
            replace(FLASH, chosen=chosen)
    with pytest.raises(UnknownName, match="after w2"):
        replace(FLASH, weighting="after w3")
    for limit in (0.0, -1.0, 10.01):
        with pytest.raises(InvalidArgument, match="limit"):
            replace(FLASH, limit=limit)
    with pytest.raises(UnknownName, match="target of a mixture"):
        facts.choose_tactic(FLASH, "sm_80")
    first, second = facts.forms_of(MoeProblem(4, 64, 32, 2, 1, 2), "sm_90a")
    assert replace(first, shown=True).shown
    of_blackwell, _ = facts.forms_of(MoeProblem(4, 64, 32, 2, 1, 2), "sm_100a")
    for form in (second, of_blackwell):
        with pytest.raises(InvalidArgument, match="shows gate and up"):
            replace(form, shown=True)
