"""The table of consumers: each target and recipe has one, and the page says what the table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnknownName
from degarble.harness.checkpoint.transform.convert.job import CONVERSIONS
from degarble.harness.checkpoint.view.consumers import (
    COMPRESSORS,
    LOADERS,
    TRANSFORMERS,
    V4,
    V32,
    VLLM,
    VLLM_NVFP4,
    consumer_of,
    consumer_of_recipe,
    name_coverage,
    table,
)
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.tensors import tensors_of
from degarble.harness.model.types import RECIPE_NAMES
from degarble.suites.campaigns.consumers import HEAD, asked, by_row, failures, line, rows_of
from degarble.suites.campaigns.runner import CaseResult
from degarble.suites.model.configs import TINY_V4, TINY_V32
from degarble.suites.support.families import LAYOUTS
from degarble.suites.vllm.test_proof import READ

if TYPE_CHECKING:
    from degarble.harness.checkpoint.view.consumers import Consumer
    from degarble.harness.model.config.config import Config

PAGE = Path(__file__).parents[3] / "docs" / "consumers.md"
READ_BY_NONE = {(V4, "nvfp4-full"), (V4, "compressed-tensors")}


def test_every_target_and_recipe_has_a_consumer_and_the_page_names_it() -> None:
    for family in (V4, V32):
        assert all(consumer_of(to, family).what for to in CONVERSIONS)
        assert all(consumer_of_recipe(each, family).what for each in RECIPE_NAMES)
    assert "\n".join(table()) in PAGE.read_text("utf-8"), "bring docs/consumers.md up to date"
    with pytest.raises(UnknownName):
        consumer_of("bf17", V4)
    with pytest.raises(UnknownName):
        consumer_of_recipe("nvfp4-ful", V4)


def test_what_is_declared_to_vllm_was_loaded_in_it() -> None:
    """V3.2's NVFP4 and V4's nvfp4-lossless were declared to vLLM, which loads neither."""
    for short, family in (("v4", V4), ("v32", V32)):
        loaded = {(layout, to) for (each, layout), known in READ.items() if each == short
                  for to in known}  # fmt: skip
        declared = {to for to in CONVERSIONS if _is_vllms(consumer_of(to, family), family)}
        recipes = {
            each for each in RECIPE_NAMES if _is_vllms(consumer_of_recipe(each, family), family)
        }
        assert declared <= {to for _, to in loaded}
        assert recipes <= {layout for layout, to in loaded if not to}


def _is_vllms(consumer: Consumer, family: str) -> bool:
    return consumer in (VLLM, VLLM_NVFP4, COMPRESSORS) and family in consumer.reads


def test_the_campaign_lists_what_it_did_not_show_and_fails_on_mismatches_alone() -> None:
    for outcome in ("refused", "no vLLM", "not built", "not read back", "died"):
        result = CaseResult(0, "", outcome, "a | b\nc")
        assert line(result).endswith(f"| not shown: {outcome}, a / b c |")
        assert line(result).count(" | ") == HEAD.count(" | ")
        assert failures([result]) == []
    for outcome in ("names", "perplexity", "error"):
        assert failures([CaseResult(0, "", outcome, "")])
    shown = CaseResult(0, "", "ok", "0 | 0 | 8.5 | 8.5 | same")
    assert line(shown).count(" | ") == HEAD.count(" | ")
    assert failures([shown]) == []


def test_rows_of_a_case_that_ended_early_have_its_outcome() -> None:
    (only,) = by_row([CaseResult(0, "", "ok", json.dumps({"3": ["names", "1 | 0"]}))])
    assert (only.seed, only.outcome, only.detail) == (3, "names", "1 | 0")
    died = by_row([CaseResult(1, "", "died", "gone")])
    assert {result.outcome for result in died} == {"died"}
    assert [result.seed for result in died] == list(rows_of(1))
    assert [place for case in range(8) for place in rows_of(case)] == list(range(len(asked())))


def test_only_transformers_words_for_single_experts_are_read_by_none() -> None:
    for config in (TINY_V4, TINY_V32):
        for family, name in LAYOUTS:
            if family == config.family:
                layout = layout_named(name, config)
                read = any(consumer.knows(layout, config) for consumer in LOADERS)
                assert read == ((family, name) not in READ_BY_NONE), (family, name)


@pytest.mark.parametrize("config", [TINY_V4, TINY_V32])
def test_names_of_a_layout_are_complete_or_reported(config: Config) -> None:
    recipe = recipe_named("bf16", config)
    names = [tensor.name for tensor in tensors_of(config, layout_named("bf16", config))]
    drafted = sum(".2." in name or name.startswith("mtp.") for name in names)
    for consumer in (TRANSFORMERS, VLLM):
        coverage = name_coverage(consumer, config, recipe, names, packed=False)
        assert coverage is not None
        assert (coverage.missing, coverage.unexpected) == ((), ())
        assert (coverage.passed_over > 0) == (consumer is TRANSFORMERS and drafted > 0)
    coverage = name_coverage(
        VLLM, config, recipe, [*names[1:], "layers.0.attn.wq_c.weight"], packed=False
    )
    assert coverage is not None
    assert coverage.missing == (names[0],)
    assert coverage.unexpected == ("layers.0.attn.wq_c.weight",)


def test_a_half_drafter_is_missing_where_it_is_read_and_absent_as_a_whole() -> None:
    recipe = recipe_named("bf16", TINY_V4)
    names = [tensor.name for tensor in tensors_of(TINY_V4, layout_named("bf16", TINY_V4))]
    drafter = [name for name in names if name.startswith("mtp.")]
    main = [name for name in names if not name.startswith("mtp.")]
    assert len(drafter) > 1
    for stored, missing in ((main, 0), ([*main, drafter[0]], len(drafter) - 1)):
        coverage = name_coverage(VLLM, TINY_V4, recipe, stored, packed=False)
        assert coverage is not None
        assert len(coverage.missing) == missing
        passed = name_coverage(TRANSFORMERS, TINY_V4, recipe, stored, packed=False)
        assert passed is not None
        assert not passed.missing
