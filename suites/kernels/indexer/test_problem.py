"""The indexer's problems as arithmetic: forms that fit, rows as the references round them, cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO, small_v4, small_v32
from degarble.harness.model.types import Rope, RopeEnd, RopePairing
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import (
    KeyPages,
    OperandProblem,
    ScoresForm,
    ScoresProblem,
    TopkForm,
    TopkProblem,
    choose_form,
    choose_operand_form,
    choose_topk_form,
)
from degarble.kernels.primitives.kv_problem import fp8_factor
from degarble.kernels.runtime.targets import SM100A, TARGETS
from degarble.references import elementary, sparse_attention
from degarble.references import numerics as rounding
from degarble.references.numerics import Numerics
from degarble.suites.kernels.indexer import indexer_operand_checks as checks

# --------------------------------------------------------------------------------------------------
# The indexer's scores: problem, forms that fit, pages, the cut of keys, and what is visible.

PROCESSORS = 132  # of an H200
CONFIGS = (V4_PRO, V4_FLASH, V3_2, small_v4(), small_v32())


def problem_of(tokens: int, heads: int, entries: int, operands: str = "bf16") -> ScoresProblem:
    return ScoresProblem(tokens, heads, entries, 1, KeyPages(operands, 64, 10))


@pytest.mark.parametrize("operands", facts.OPERANDS)
@pytest.mark.parametrize("tokens", [1, 300])
def test_every_model_has_a_form_that_fits(operands: str, tokens: int) -> None:
    for config in CONFIGS:
        assert config.index_head_dim == facts.WIDTH
        form = choose_form(problem_of(tokens, config.index_n_heads, 5000, operands), "sm_90a")
        assert form.padded >= config.index_n_heads
        assert form.columns % 8 == 0
        assert form.columns <= facts.MOST_COLUMNS
        assert facts.shared_bytes(form) + facts.ALIGNMENT <= facts.room(form)
        assert facts.stages(form) >= 4
        assert form.at_once == (4 if tokens > 1 else 1)


@pytest.mark.parametrize("heads", range(1, 257, 5))
def test_any_number_of_heads_has_a_form(heads: int) -> None:
    for operands in facts.OPERANDS:
        form = choose_form(problem_of(9, heads, 5000, operands), "sm_90a")
        assert form.columns <= facts.MOST_COLUMNS
        assert facts.shared_bytes(form) + facts.ALIGNMENT <= facts.room(form)


@pytest.mark.parametrize("team", [facts.ALONE, facts.OF_TOKENS, *facts.OF_ONE_TOKEN.values()])
def test_registers_and_threads_fit_the_processor(team: facts.ScoresTeam) -> None:
    if team.registers:
        loading, multiplying = team.registers
        kept = facts.WARPGROUP * (loading + team.consumers * multiplying)
        # setmaxnreg takes from what the blocks were launched with: multiples of 8.
        assert kept * team.blocks <= 65_536
        assert loading % 8 == multiplying % 8 == 0
    assert team.consumers <= facts.CONSUMERS
    assert team.fewest_keys % facts.KEYS == 0


def test_an_fp8_decode_asks_early_for_the_boxes_of_one_stage() -> None:
    form = choose_form(problem_of(1, 64, 32768, "fp8"), "sm_90a")
    assert facts.boxes_asked(form) * form.box == facts.keys_of_stage(form) == facts.KEYS
    assert not facts.boxes_asked(choose_form(problem_of(1, 64, 32768), "sm_90a"))


def test_the_form_and_the_cut_do_not_depend_on_company() -> None:
    """Which warpgroups work is chosen by operands, heads and whether tokens share keys."""
    for operands in facts.OPERANDS:
        for heads in (8, 64, 128, 256):
            found = {
                choose_form(problem_of(tokens, heads, entries, operands), "sm_90a")
                for tokens in (2, 5, 4096)
                for entries in (1, 8192)
            }
            assert len(found) == 1
    teams = {
        (operands, at_once): facts.team_of(ScoresForm(target, operands, "float32", 64, at_once, 64))
        for target in ("sm_90a",)
        for operands in facts.OPERANDS
        for at_once in (1, 4)
    }
    assert teams == {
        ("bf16", 1): facts.OF_ONE_TOKEN["bf16"],
        ("bf16", 4): facts.ALONE,
        ("fp8", 1): facts.OF_ONE_TOKEN["fp8"],
        ("fp8", 4): facts.OF_TOKENS,
    }
    assert facts.team_of(ScoresForm("sm_100a", "fp8", "float32", 64, 4, 64)) == facts.ALONE


@pytest.mark.parametrize("operands", facts.OPERANDS)
@pytest.mark.parametrize("tokens", [1, 3, 64, 300, 4096])
@pytest.mark.parametrize("entries", [1, 127, 512, 513, 8192, 100_001])
def test_chunks_cover_the_keys_once(tokens: int, entries: int, operands: str) -> None:
    problem = problem_of(tokens, 64, entries, operands)
    form = choose_form(problem, "sm_90a")
    tiles, chunks, keys = facts.grid(problem, form, PROCESSORS)
    assert tiles * form.at_once >= tokens > (tiles - 1) * form.at_once
    assert keys % facts.KEYS == 0
    assert chunks * keys >= entries > (chunks - 1) * keys
    assert chunks == 1 or keys >= facts.team_of(form).fewest_keys - facts.KEYS


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        (16, 16), (64, 4), (128, 2), (150, 3), (200, 2), (264, 1),
        (265, 4), (300, 4), (329, 4), (330, 1), (1000, 1),
    ],
)  # fmt: skip
def test_one_wave_is_taken_where_it_fills_the_places(tokens: int, chunks: int) -> None:
    problem = replace(problem_of(tokens, 64, 32_768, "fp8"), sequences=tokens)
    assert facts.grid(problem, choose_form(problem, "sm_90a"), PROCESSORS)[:2] == (tokens, chunks)


@pytest.mark.parametrize(
    ("tokens", "heads", "entries", "operands", "target", "chunks"),
    [
        (132, 64, 8192, "bf16", "sm_90a", 1), (133, 64, 8192, "bf16", "sm_90a", 4),
        (164, 64, 8192, "bf16", "sm_90a", 4), (165, 64, 8192, "bf16", "sm_90a", 1),
        (300, 64, 385, "fp8", "sm_90a", 4), (300, 64, 384, "fp8", "sm_90a", 1),
        (140, 128, 8192, "fp8", "sm_90a", 1), (140, 64, 8192, "fp8", "sm_100a", 1),
    ],
)  # fmt: skip
def test_keys_are_cut_for_a_second_wave_of_few_blocks(
    tokens: int, heads: int, entries: int, operands: str, target: str, chunks: int
) -> None:
    """Only of decodes that would be one wave, and of rows that give each chunk its keys."""
    problem = replace(problem_of(tokens, heads, entries, operands), sequences=tokens)
    assert facts.grid(problem, choose_form(problem, target), PROCESSORS)[1] == chunks


def test_pages_are_measured_as_written() -> None:
    assert KeyPages("fp8", 64, 1).stride == 64 * 132
    assert KeyPages("fp8", 64, 1, 8640).stride == 8640
    assert KeyPages("bf16", 64, 1).stride == 64 * 256
    assert [KeyPages("bf16", e, 1).box for e in (8, 16, 24, 64, 96, 256)] == [8, 16, 8, 64, 32, 64]


def test_visible_entries_are_the_references() -> None:
    positions = torch.arange(100)
    for ratio in (1, 4, 128):
        want = sparse_attention.visible_entries(positions, ratio)
        assert torch.equal(facts.visible_entries(positions, ratio), want)


def test_refuses_by_name() -> None:
    pages = KeyPages("bf16", 64, 10)
    for name, numbers in (
        ("tokens", (-1, 64, 9, 1, pages)),
        ("heads of the indexer", (1, 257, 9, 1, pages)),
        ("entries of a row of scores", (1, 64, 0, 1, pages)),
        ("sequences", (1, 64, 9, 0, pages)),
        ("tokens that become one entry", (1, 64, 9, 1, pages, 0)),
    ):
        with pytest.raises(ShapeMismatch, match=name):
            ScoresProblem(*numbers)
    with pytest.raises(UnknownName, match="arithmetic"):
        ScoresProblem(1, 64, 9, 1, pages, 1, "float64")
    with pytest.raises(UnknownName, match="operands"):
        KeyPages("mxfp4", 64, 10)
    for entries, count, stride in ((63, 1, 0), (0, 1, 0), (64, 0, 0), (64, 1, 64), (64, 1, 16_392)):
        with pytest.raises(ShapeMismatch, match="page"):
            KeyPages("bf16", entries, count, stride)
    with pytest.raises(UnknownName, match="target"):
        choose_form(problem_of(1, 64, 9), "sm_80")


# --------------------------------------------------------------------------------------------------
# Rows of the indexer: problem, blocks as the references round them, the whole against the twin.


def test_mxfp4_numbers_are_the_references_for_every_bf16_value() -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[~numbers.isnan()]
    got, want = facts.mxfp4_number(numbers), rounding.round_e2m1(numbers)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_mxfp4_scales_are_the_references_for_every_amax() -> None:
    bits = torch.arange(facts.NAN_BF16)
    code = facts.mxfp4_scale_code(bits)
    amax = codecs.bf16_decode(bits).clamp(min=rounding.FP4_AMAX_FLOOR)
    want = rounding.power_of_two_above(amax * (1.0 / rounding.E2M1_LARGEST))
    assert torch.equal(codecs.ue8m0_decode(code), want)
    assert torch.equal(fp8_factor(code) * want, torch.ones_like(want))
    assert facts.mxfp4_scale_code(torch.tensor([facts.NAN_BF16])).item() == facts.NAN_CODE


def test_the_transform_is_the_references() -> None:
    x = torch.randn(50, facts.WIDTH, generator=torch.Generator().manual_seed(1))
    want = elementary.hadamard(x.double())
    assert (checks.transformed(x) - want).abs().max() <= 2e-6


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
def test_the_whole_is_the_twins_but_for_neighbours(pairing: str) -> None:
    """Sums of another order move a few values to the next code: at most a step of their block."""
    halves, tokens = pairing == "halves", 200
    kind = RopePairing.HALVES if halves else RopePairing.INTERLEAVED
    end = RopeEnd.FIRST if halves else RopeEnd.LAST
    rope = Rope(theta=10_000, dims=64, pairing=kind, end=end, yarn=None)
    numerics, position_T = Numerics.bf16(), torch.arange(tokens) * 37
    table = elementary.rotation_table(rope, position_T, numerics)
    name = "fp8" if halves else "mxfp4"
    p = OperandProblem(tokens, 4, pairing, name, hadamard=True, positions=tokens * 37)
    case = checks.OperandCase(p, seed=5)
    turns = torch.zeros(p.positions, facts.TABLE_WIDTH)
    turns[position_T] = torch.cat((table.cos, table.sin), dim=1)
    case.__dict__["turning"] = (turns, position_T)

    x, wide = case.rows, elementary.over_heads(table)
    if halves:
        part = elementary.rotate_halves(x[..., :64].float(), wide)
        x = torch.cat((part, x[..., 64:].float()), -1).bfloat16()
    else:
        x = elementary.rotate_tail(x.float(), wide).bfloat16()
    x = elementary.hadamard(x.float()).bfloat16()
    want = rounding.through_fp8(x, 128) if halves else rounding.through_mxfp4(x)
    got = checks.by_definition(case).values.float()
    moved = got != want
    assert float(moved.float().mean()) <= 2e-3
    block = x.float().abs().unflatten(-1, (-1, facts.BLOCKS[name])).amax(-1, keepdim=True)
    step = (block / (14 if halves else 1.5)).expand(*block.shape[:-1], facts.BLOCKS[name])
    assert bool(((got - want).abs() <= step.flatten(-2)).all())


def test_operand_problem_refuses_by_name() -> None:
    for error, name, numbers in (
        (UnknownName, "pairing", (1, 1, "pairs", "fp8")),
        (UnknownName, "format", (1, 1, "none", "nvfp4")),
        (InvalidArgument, "coded", (1, 1, "none", "mxfp4", True, True)),
        (ShapeMismatch, "tokens, heads", (-1, 1, "none", "fp8")),
        (ShapeMismatch, "tokens, heads", (1, 0, "none", "fp8")),
        (ShapeMismatch, "positions", (1, 1, "halves", "fp8")),
        (ShapeMismatch, "positions", (1, 1, "none", "fp8", False, False, False, 9)),
        (InvalidArgument, "epsilon", (1, 1, "none", "fp8", False, False, False, 0, 1.0)),
    ):
        with pytest.raises(error, match=name):
            OperandProblem(*numbers)


def test_extents_are_no_part_of_a_form() -> None:
    forms = {choose_operand_form(checks.problem_of(n, 2 * n, 0), "sm_90a") for n in (1, 9)}
    assert len(forms) == 1
    assert [facts.operand_grid(checks.problem_of(n, 3, 0)) for n in (3, 10, 11)] == [1, 1, 2]
    assert checks.problem_of(3, 3, 6).bytes_moved == 9 * (256 + 132) + 3 * (256 + 8)


# --------------------------------------------------------------------------------------------------
# The choice of the largest k: its problem, forms that hold every row, and the cut of a row.


def form_of(rows: int, entries: int, count: int = 1024) -> TopkForm:
    return choose_topk_form(TopkProblem(rows, entries, count), "sm_90a", PROCESSORS)


@pytest.mark.parametrize("rows", [1, 16, 64, 66, 67, 4096])
@pytest.mark.parametrize("entries", [1, 127, 8192, 8193, 32_768, 40_000, 131_072, 262_144])
def test_a_form_holds_the_row(rows: int, entries: int) -> None:
    form = form_of(rows, entries)
    target = TARGETS["sm_90a"]
    assert form.blocks * facts.topk_shared_bytes(form) <= target.shared_memory_bytes
    assert form.blocks * form.threads <= 2 * facts.MOST_THREADS
    assert facts.BINS % (facts.VECTOR * form.threads) == 0
    assert form.each <= facts.MOST_HELD
    assert form.each % facts.VECTOR == 0
    assert form.threads >= facts.LISTED  # a thread each
    if form.held:
        # A thread block's segment begins at a whole warp of entries.
        own = round_up(ceil_div(entries, form.cluster), facts.WARP)
        assert own <= form.segment
    else:
        # After the chosen ones are kept there is room for a whole chunk.
        assert form.cluster == 1
        assert form.capacity >= facts.MOST_COUNT + form.segment
        assert form.kept % facts.VECTOR == 0
        # The rank that is looked up lies within the sample.
        sample = facts.VECTOR * form.threads
        assert 3 * facts.MOST_COUNT * sample // (2 * form.capacity) + 16 <= sample


def test_clusters_have_rows_only_where_all_run_at_once() -> None:
    def cut(rows: int, entries: int) -> tuple[int, int, bool]:
        form = form_of(rows, entries)
        return form.cluster, form.each, form.held

    assert [cut(rows, 8192) for rows in (1, 4096)] == 2 * [(1, 8, True)]
    assert [form_of(rows, 8192).blocks for rows in (1, PROCESSORS, PROCESSORS + 1)] == [1, 1, 2]
    assert [cut(rows, 32_768) for rows in (16, 64)] == [(4, 8, True), (2, 16, True)]
    assert [cut(rows, 131_072) for rows in (1, 16)] == [(8, 16, True), (4, 32, True)]
    assert [cut(rows, 131_072) for rows in (64, 4096)] == [(1, 8, False), (1, 12, False)]
    assert [form_of(rows, 131_072).threads for rows in (64, 4096)] == [1024, 512]
    assert cut(4096, 32_768) == (1, 12, False)
    # 32 scores of a thread are read in fours alone.
    assert cut(16, 131_071) == (1, 8, False)


def test_levels_cover_a_key_without_overlap() -> None:
    covered = 0
    for shift, bins in facts.LEVELS:
        assert covered & (bins - 1) << shift == 0
        covered |= (bins - 1) << shift
    assert covered == 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("rows of scores", (-1, 8, 1)),
        ("entries of a row", (1, 0, 1)),
        ("entries of a row", (1, facts.MOST_ENTRIES + 1, 1)),
        ("chosen entries", (1, 8, 0)),
        ("chosen entries", (1, 8, 2049)),
        ("tokens that become one entry", (1, 8, 1, -1)),
    ],
)
def test_topk_problem_refuses_by_name(name: str, numbers: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch, match=name):
        TopkProblem(*numbers)


def test_bytes_are_those_of_scores_and_choice() -> None:
    assert TopkProblem(2, 100, 10).bytes_moved == 4 * 2 * 110


# --------------------------------------------------------------------------------------------------
# The indexer's scores on sm_100a: forms of all models fit tensor memory and shared memory.


def tensor_memory_form_of(
    heads: int, tokens: int, operands: str, arithmetic: str = "float32"
) -> ScoresForm:
    problem = ScoresProblem(
        tokens, heads, 5000, 1, KeyPages(operands, 64, 10), arithmetic=arithmetic
    )
    return facts.choose_form(problem, SM100A.name)


def require_fits(form: ScoresForm) -> None:
    assert form.columns % facts.LEAST_COLUMNS[SM100A.name] == 0
    assert form.columns <= facts.MOST_COLUMNS
    assert facts.columns_held(form) <= facts.columns_allocated(form)
    assert facts.columns_allocated(form) <= SM100A.tensor_memory_columns
    assert facts.columns_allocated(form).bit_count() == 1
    assert facts.reads(form) * facts.columns_read(form) == form.columns
    assert facts.words_of_weights(form) <= facts.threads(form)
    # What lies behind the operands is within what indexer_problem leaves for it.
    held = facts.query_bytes(form) + facts.stages(form) * facts.stage_bytes(form)
    assert facts.sm100_shared_bytes(form) - held <= 2 * facts.ALIGNMENT
    assert facts.sm100_shared_bytes(form) <= SM100A.shared_memory_bytes


@pytest.mark.parametrize("operands", facts.OPERANDS)
@pytest.mark.parametrize("arithmetic", facts.ARITHMETICS)
def test_any_number_of_heads_has_a_form_that_fits(operands: str, arithmetic: str) -> None:
    for heads in range(1, facts.MOST_COLUMNS + 1):
        for tokens in (1, 300):
            require_fits(tensor_memory_form_of(heads, tokens, operands, arithmetic))


@pytest.mark.parametrize("operands", facts.OPERANDS)
def test_every_model_has_a_form(operands: str) -> None:
    for config in CONFIGS:
        form = tensor_memory_form_of(config.index_n_heads, 300, operands)
        assert form.padded >= config.index_n_heads
        assert form.at_once == facts.TOKENS_AT_ONCE
        assert facts.stages(form) >= 4
        assert facts.instructions(form) == {"bf16": 8, "fp8": 4}[operands]


def test_few_heads_of_one_token_fill_the_smallest_instruction() -> None:
    assert tensor_memory_form_of(4, 1, "bf16").padded == 16
    assert tensor_memory_form_of(4, 2, "bf16").padded == 8
    assert facts.columns_allocated(tensor_memory_form_of(4, 1, "bf16")) == 32
    assert facts.columns_allocated(tensor_memory_form_of(64, 300, "bf16")) == 512
