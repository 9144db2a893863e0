"""The indexer's scores: problem, forms that fit, pages, the cut of keys, and what is visible."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.model.presets import V3_2, V4_FLASH, V4_PRO, small_v4, small_v32
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import KeyPages, ScoresProblem, choose_form
from degarble.kernels.runtime.targets import SM90A
from degarble.references import indexer

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
        assert facts.shared_bytes(form) + 2 * facts.ALIGNMENT <= SM90A.shared_memory_bytes
        assert facts.stages(form) >= 4
        assert form.at_once == (4 if tokens > 1 else 1)


@pytest.mark.parametrize("heads", range(1, 257, 5))
def test_any_number_of_heads_has_a_form(heads: int) -> None:
    for operands in facts.OPERANDS:
        form = choose_form(problem_of(9, heads, 5000, operands), "sm_90a")
        assert form.columns <= facts.MOST_COLUMNS
        assert facts.shared_bytes(form) + 2 * facts.ALIGNMENT <= SM90A.shared_memory_bytes


def test_registers_fit_the_processor() -> None:
    kept = facts.PRODUCER_REGISTERS + facts.CONSUMERS * facts.CONSUMER_REGISTERS
    assert facts.WARPGROUP * kept <= 65_536


@pytest.mark.parametrize("tokens", [1, 3, 64, 4096])
@pytest.mark.parametrize("entries", [1, 127, 512, 513, 8192, 100_001])
def test_chunks_cover_the_keys_once(tokens: int, entries: int) -> None:
    problem = problem_of(tokens, 64, entries)
    form = choose_form(problem, "sm_90a")
    tiles, chunks, keys = facts.grid(problem, form, PROCESSORS)
    assert tiles * form.at_once >= tokens > (tiles - 1) * form.at_once
    assert keys % facts.KEYS == 0
    assert chunks * keys >= entries > (chunks - 1) * keys
    assert chunks == 1 or keys >= facts.FEWEST_KEYS - facts.KEYS


def test_pages_are_measured_as_written() -> None:
    assert KeyPages("fp8", 64, 1).stride == 64 * 132
    assert KeyPages("fp8", 64, 1, 8640).stride == 8640
    assert KeyPages("bf16", 64, 1).stride == 64 * 256
    assert [KeyPages("bf16", e, 1).box for e in (8, 16, 24, 64, 96, 256)] == [8, 16, 8, 64, 32, 64]


def test_visible_entries_are_the_references() -> None:
    positions = torch.arange(100)
    for ratio in (1, 4, 128):
        want = indexer.visible_entries(positions, ratio)
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
