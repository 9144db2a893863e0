"""The indexer's scores on sm_100a: forms of all models fit tensor memory and shared memory."""

from __future__ import annotations

import pytest

from degarble.harness.model.presets import V3_2, V4_FLASH, V4_PRO, small_v4, small_v32
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import KeyPages, ScoresForm, ScoresProblem
from degarble.kernels.runtime.targets import SM100A

CONFIGS = (V4_PRO, V4_FLASH, V3_2, small_v4(), small_v32())


def form_of(heads: int, tokens: int, operands: str, arithmetic: str = "float32") -> ScoresForm:
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
            require_fits(form_of(heads, tokens, operands, arithmetic))


@pytest.mark.parametrize("operands", facts.OPERANDS)
def test_every_model_has_a_form(operands: str) -> None:
    for config in CONFIGS:
        form = form_of(config.index_n_heads, 300, operands)
        assert form.padded >= config.index_n_heads
        assert form.at_once == facts.TOKENS_AT_ONCE
        assert facts.stages(form) >= 4
        assert facts.instructions(form) == {"bf16": 8, "fp8": 4}[operands]


def test_few_heads_of_one_token_fill_the_smallest_instruction() -> None:
    assert form_of(4, 1, "bf16").padded == 16
    assert form_of(4, 2, "bf16").padded == 8
    assert facts.columns_allocated(form_of(4, 1, "bf16")) == 32
    assert facts.columns_allocated(form_of(64, 300, "bf16")) == 512
