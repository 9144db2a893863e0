"""docs/anatomy.md against the records: what the page prints, names and shows must be so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from degarble.harness.model.components import component_named, site_named
from degarble.harness.model.config import config as presets
from degarble.harness.model.config import json_file
from degarble.harness.model.config.config import V3_2, V4_PRO, Dspark, small_v4
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.recipes import recipe_from_yaml
from degarble.harness.model.sites import parse_site
from degarble.harness.model.tensors import SUFFIXES
from degarble.suites.model.page_tables import PARTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "anatomy.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", PARTS)
def test_every_generated_part_is_there(page: str, name: str) -> None:
    assert PARTS[name]() in page


def test_a_changed_fact_would_be_detected(page: str) -> None:
    assert PARTS["layer types"]().replace("160000", "10000") not in page


def test_the_example_recipe_is_one(page: str) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    recipe = recipe_from_yaml(text, V4_PRO)
    said = recipe.format_of(parameter_named(V4_PRO, "layers.0.ffn.experts.0.w1"))
    assert said == ("BF16", "BF16")


def test_the_sites_named_are_sites(page: str) -> None:
    (sentence,) = re.findall(r"\n\n(`layers\.17.*?) are sites\.", page, flags=re.DOTALL)
    named = re.findall(r"`([^`]+)`", sentence)
    assert len(named) == 5
    for text in named:
        assert str(parse_site(text)) == text
        assert site_named(V4_PRO, text)


def test_the_grammar_is_the_one_of_the_code(page: str) -> None:
    from degarble.harness.model import sites  # noqa: PLC0415  its docstring is the subject

    assert sites.__doc__ is not None
    rules = [line.strip() for line in sites.__doc__.splitlines() if " = " in line][:2]
    assert len(rules) == 2
    assert all(rule in page for rule in rules)


def test_drafters_have_the_components_that_the_page_says(page: str) -> None:
    dspark = Dspark(target_layer_ids=(3, 4), markov_rank=8, block_size=5, noise_token_id=1)
    cases = [
        (small_v4(), "mtp.0", "`embed enorm hnorm e_proj h_proj join`"),
        (small_v4(), "mtp.0", "`hc_head norm head`"),
        (small_v4(dspark=dspark), "mtp.0", "`embed main_mean main_proj main_norm`"),
        (small_v4(dspark=dspark), "mtp.1", "`hc_head norm head markov confidence`"),
    ]
    for config, block, words in cases:
        assert words in page
        for word in words.strip("`").split():
            assert component_named(config, f"{block}.{word}")


def test_suffixes_and_names_on_the_page_exist(page: str) -> None:
    (sentence,) = re.findall(r"\nSuffixes: (.*?)\n\n", page, flags=re.DOTALL)
    named = set(re.findall(r"`(\.[a-z_0-9]+)`", sentence))
    known = {suffix for table in SUFFIXES.values() for suffix in table.by_part.values()}
    known |= {suffix for table in SUFFIXES.values() for suffix in table.by_format.values()}
    assert named == known
    for name in ("V4_PRO", "V4_FLASH", "V3_2", "small_v4", "small_v32"):
        assert name in page
        assert hasattr(presets, name)
    for spelling in json_file.SPELLINGS:
        assert f"`{spelling}`" in page


def test_the_counts_in_prose_are_those_of_the_table(page: str) -> None:
    prose = page[: page.index("## Configs")]
    assert "145,116 tensors" in prose
    assert "92,425 tensors" in prose
    assert V3_2.num_hidden_layers == V4_PRO.num_hidden_layers == 61
