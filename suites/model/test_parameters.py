"""Parameter tables and recipes: what exists where, known shapes, and which formats apply."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from degarble.harness.base.errors import Refused, UnknownName, UnreadableFile
from degarble.harness.families.deepseek_v4.tables import V4_BLOCK, V4_ENDS, V4_MTP
from degarble.harness.families.deepseek_v32.tables import V32_BLOCK, V32_ENDS, V32_MTP
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.model.config.config import (
    V3_2,
    V4_FLASH,
    V4_PRO,
    Dspark,
    V4Config,
    small_v4,
    small_v32,
)
from degarble.harness.model.parameters import WHERE, Row, parameter_named, parameters
from degarble.harness.model.recipes import (
    ACTIVATION_FORMATS,
    BF16,
    UNQUANTISED,
    WEIGHT_FORMATS,
    Recipe,
    Rule,
    recipe_from_file,
    recipe_from_yaml,
    recipe_named,
)
from degarble.harness.model.types import RECIPE_NAMES, Kind
from degarble.suites.model.configs import configs

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# The parameter tables: what exists where, known shapes, and one owner each.

TABLES = {
    "V4_ENDS": V4_ENDS, "V4_BLOCK": V4_BLOCK, "V4_MTP": V4_MTP,
    "V32_ENDS": V32_ENDS, "V32_BLOCK": V32_BLOCK, "V32_MTP": V32_MTP,
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_names_everything_once(table: tuple[Row, ...]) -> None:
    assert len({row.name for row in table}) == len(table)
    spelled = [row.hf for row in table if row.hf]
    assert len(set(spelled)) == len(spelled)
    for row in table:
        assert all(place in WHERE for place in row.where.split(", ")), row.name


@given(configs())
def test_names_are_unique_and_shapes_are_positive(config: Config) -> None:
    found = parameters(config)
    assert len({parameter.name for parameter in found}) == len(found)
    assert all(extent > 0 for parameter in found for extent in parameter.shape)


@given(configs())
def test_what_a_block_has_follows_from_its_type(config: Config) -> None:
    for block in config.blocks:
        inside = {p.row.name for p in parameters(config) if p.block == block}
        has = {part: any(part in name for name in inside) for part in ("compressor", "indexer")}
        if isinstance(config, V4Config):
            assert has == {"compressor": block.ratio > 0, "indexer": block.ratio == 4}
            hashed = block.index < config.num_hash_layers and not block.is_drafter
            assert ("ffn.gate.tid2eid" in inside) == hashed
            assert ("ffn.gate.bias" in inside) != hashed
        else:
            assert has == {"compressor": False, "indexer": True}
        dense = "ffn.w1" in inside
        assert dense != ("ffn.gate" in inside)


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        # deepseek-ai/DeepSeek-V4-Pro shard headers
        (V4_PRO, "embed", (129280, 7168)),
        (V4_PRO, "hc_head_fn", (4, 28672)),
        (V4_PRO, "layers.0.hc_attn_fn", (24, 28672)),
        (V4_PRO, "layers.0.attn.wq_b", (65536, 1536)),
        (V4_PRO, "layers.0.attn.wkv", (512, 7168)),
        (V4_PRO, "layers.0.attn.wo_a", (16384, 4096)),
        (V4_PRO, "layers.0.attn.wo_b", (7168, 16384)),
        (V4_PRO, "layers.0.attn.compressor.ape", (128, 512)),
        (V4_PRO, "layers.2.attn.compressor.ape", (4, 1024)),
        (V4_PRO, "layers.0.attn.compressor.wkv", (512, 7168)),
        (V4_PRO, "layers.2.attn.compressor.wgate", (1024, 7168)),
        (V4_PRO, "layers.2.attn.indexer.compressor.ape", (4, 256)),
        (V4_PRO, "layers.2.attn.indexer.compressor.wkv", (256, 7168)),
        (V4_PRO, "layers.2.attn.indexer.weights_proj", (64, 7168)),
        (V4_PRO, "layers.2.ffn.gate.tid2eid", (129280, 6)),
        (V4_PRO, "mtp.0.e_proj", (7168, 7168)),
        (V4_FLASH, "layers.2.attn.wo_a", (8192, 4096)),
        # deepseek-ai/DeepSeek-V3.2-Exp inference/model.py
        (V3_2, "layers.0.attn.wq_b", (24576, 1536)),
        (V3_2, "layers.0.attn.wkv_a", (576, 7168)),
        (V3_2, "layers.0.attn.wkv_b", (32768, 512)),
        (V3_2, "layers.0.attn.wo", (7168, 16384)),
        (V3_2, "layers.0.ffn.w1", (18432, 7168)),
        (V3_2, "layers.3.ffn.experts.255.w2", (7168, 2048)),
        (V3_2, "mtp.0.eh_proj", (7168, 14336)),
    ],
)
def test_known_shapes(config: Config, name: str, shape: tuple[int, ...]) -> None:
    assert parameter_named(config, name).shape == shape


def test_counts_of_v4_pro() -> None:
    counts = Counter(p.row.name for p in parameters(V4_PRO))
    assert counts["attn.compressor.wkv"] == 61
    assert counts["attn.indexer.compressor.wkv"] == 30
    assert counts["ffn.gate.tid2eid"] == 3
    assert counts["ffn.gate.bias"] == 58 + 1
    assert counts["ffn.experts.{e}.w1"] == 384 * 62


def test_a_block_parallel_drafter_has_its_own_tensors() -> None:
    # DeepSeek-V4-Flash-0731 shard headers, second-hand.
    dspark = Dspark(target_layer_ids=(40, 41, 42), markov_rank=256, block_size=5,
                    noise_token_id=128799)  # fmt: skip
    config = replace(V4_FLASH, dspark=dspark)
    drafter = {p.name: p.shape for p in parameters(config) if p.name.startswith("mtp.")}
    assert drafter["mtp.0.main_proj"] == (4096, 3 * 4096)
    assert drafter["mtp.2.markov_head.markov_w1"] == (129280, 256)
    assert drafter["mtp.2.confidence_head.proj"] == (1, 4096 + 256)
    assert {"mtp.0.main_norm", "mtp.2.norm", "mtp.2.hc_head_fn"} <= set(drafter)
    assert not {"mtp.0.enorm", "mtp.0.norm", "mtp.2.e_proj", "mtp.0.hc_head_fn"} & set(drafter)


def test_experts_come_one_after_the_other() -> None:
    routed = [p.name for p in parameters(small_v4()) if p.expert is not None][:4]
    assert routed == [f"layers.0.ffn.experts.{tail}" for tail in ("0.w1", "0.w2", "0.w3", "1.w1")]


def test_an_unknown_name_is_refused_with_its_neighbours() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean layers\.0\.attn\.wq_b"):
        parameter_named(small_v4(), "layers.0.attn.wqb")


def test_plain_parameters_carry_no_suffix() -> None:
    for parameter in parameters(small_v4()):
        assert (parameter.kind is Kind.PLAIN) == (not parameter.kind.has_suffix)


# --------------------------------------------------------------------------------------------------
# Recipes: what the built-in ones say, first match first, and how custom ones are read.

FP8 = ("FP8_128X128_UE8M0", "FP8_1X128_UE8M0")
FP8_F32 = ("FP8_128X128_F32", "FP8_1X128_F32")
NVFP4 = ("NVFP4", "NVFP4")
MXFP4 = ("MXFP4", "FP8_1X128_UE8M0")
PLAIN = (BF16, BF16)

SAID = [
    ("official", V4_PRO, "layers.2.attn.wq_a", FP8),
    ("official", V4_PRO, "layers.2.attn.wo_a", FP8),
    ("official", V4_PRO, "layers.2.attn.indexer.wq_b", FP8),
    ("official", V4_PRO, "layers.2.attn.indexer.weights_proj", PLAIN),
    ("official", V4_PRO, "layers.2.attn.compressor.wkv", PLAIN),
    ("official", V4_PRO, "layers.2.attn.indexer.compressor.wgate", PLAIN),
    ("official", V4_PRO, "layers.2.ffn.shared_experts.w2", FP8),
    ("official", V4_PRO, "layers.2.ffn.experts.17.w3", MXFP4),
    ("official", V4_PRO, "layers.2.ffn.gate", PLAIN),
    ("official", V4_PRO, "mtp.0.ffn.experts.17.w3", MXFP4),
    ("official", V4_PRO, "mtp.0.e_proj", FP8),
    ("official", V4_PRO, "head", PLAIN),
    ("nvfp4-experts", V4_PRO, "layers.2.ffn.experts.17.w3", NVFP4),
    ("nvfp4-experts", V4_PRO, "layers.2.ffn.shared_experts.w1", FP8),
    ("nvfp4-experts", V4_PRO, "layers.2.attn.wkv", FP8),
    ("nvfp4-experts", V4_PRO, "layers.2.attn.compressor.wkv", PLAIN),
    ("nvfp4-experts", V4_PRO, "mtp.0.ffn.experts.17.w3", MXFP4),
    ("nvfp4-full", V4_PRO, "layers.2.attn.wq_a", NVFP4),
    ("nvfp4-full", V4_PRO, "layers.2.attn.wo_a", PLAIN),
    ("nvfp4-full", V4_PRO, "layers.2.attn.wo_b", NVFP4),
    ("nvfp4-full", V4_PRO, "layers.2.attn.compressor.wkv", NVFP4),
    ("nvfp4-full", V4_PRO, "layers.2.attn.indexer.compressor.wgate", NVFP4),
    ("nvfp4-full", V4_PRO, "layers.2.attn.indexer.wq_b", PLAIN),
    ("nvfp4-full", V4_PRO, "layers.2.ffn.shared_experts.w1", NVFP4),
    ("nvfp4-full", V4_PRO, "layers.2.ffn.experts.17.w2", NVFP4),
    ("nvfp4-full", V4_PRO, "layers.2.ffn.gate", PLAIN),
    ("nvfp4-full", V4_PRO, "mtp.0.attn.wq_a", PLAIN),
    ("official", V3_2, "layers.0.ffn.w1", FP8_F32),
    ("official", V3_2, "layers.0.attn.indexer.wk", FP8_F32),
    ("official", V3_2, "layers.0.attn.indexer.weights_proj", PLAIN),
    ("official", V3_2, "layers.0.attn.wkv_b", ("FP8_128X128_F32", BF16)),
    ("official", V3_2, "layers.9.ffn.gate", PLAIN),
    ("official", V3_2, "mtp.0.eh_proj", PLAIN),
    ("nvfp4-experts", V3_2, "layers.9.ffn.experts.3.w1", NVFP4),
    ("nvfp4-experts", V3_2, "layers.9.ffn.shared_experts.w1", FP8_F32),
    ("nvfp4-full", V3_2, "layers.0.ffn.w2", NVFP4),
    ("nvfp4-full", V3_2, "layers.9.attn.wo", NVFP4),
    ("nvfp4-full", V3_2, "layers.9.attn.wq_b", PLAIN),
    ("nvfp4-full", V3_2, "layers.9.ffn.gate", PLAIN),
    ("nvfp4-full", V3_2, "mtp.0.ffn.experts.3.w1", PLAIN),
    ("bf16", V4_PRO, "layers.2.ffn.experts.17.w2", PLAIN),
]


@pytest.mark.parametrize(("name", "config", "parameter", "formats"), SAID)
def test_what_a_recipe_says(
    name: str, config: Config, parameter: str, formats: tuple[str, str]
) -> None:
    assert recipe_named(name, config).format_of(parameter_named(config, parameter)) == formats


@pytest.mark.parametrize("name", RECIPE_NAMES)
@settings(max_examples=15)
@given(config=configs())
def test_only_linears_are_quantised(name: str, config: Config) -> None:
    recipe = recipe_named(name, config)
    for parameter in parameters(config):
        if parameter.kind is not Kind.LINEAR:
            assert recipe.format_of(parameter) == UNQUANTISED


def test_nvfp4_full_turns_back_what_the_field_report_counted() -> None:
    # 305 attention and shared layers (fused q_a+kv, q_b, o_b, fused gate+up, down: five a layer)
    # and 91 compressors had to be turned back to bf16 for vLLM.
    recipe = recipe_named("nvfp4-full", V4_PRO)
    counts = Counter(
        parameter.row.name
        for parameter in parameters(V4_PRO)
        if recipe.format_of(parameter).weight == "NVFP4" and parameter.expert is None
    )
    fused = (
        "attn.wq_a",
        "attn.wq_b",
        "attn.wo_b",
        "ffn.shared_experts.w1",
        "ffn.shared_experts.w2",
    )
    assert sum(counts[name] for name in fused) == 305
    assert counts["attn.compressor.wkv"] + counts["attn.indexer.compressor.wkv"] == 91
    assert sum(counts.values()) == 7 * 61 + 2 * 91, "nothing else beside the routed experts"


def test_fp8_experts_of_the_base_releases() -> None:
    base = replace(V4_FLASH, expert_dtype="fp8")
    said = recipe_named("official", base).format_of(
        parameter_named(base, "layers.2.ffn.experts.0.w1")
    )
    assert said == ("FP8_128X128_F32", "FP8_1X128_UE8M0")


def test_the_first_match_decides() -> None:
    rules = (Rule("*.wq_a", "NVFP4", "NVFP4"), Rule("*", "FP8_128X128_F32"))
    forward, backward = Recipe("a", rules), Recipe("b", rules[::-1])
    wq_a = parameter_named(V4_PRO, "layers.2.attn.wq_a")
    assert forward.format_of(wq_a).weight == "NVFP4"
    assert backward.format_of(wq_a).weight == "FP8_128X128_F32"
    assert forward.unmatched(small_v4()) == ()
    assert backward.unmatched(small_v4()) == ("*.wq_a",)


def test_patterns_mean_what_they_say() -> None:
    rule = Rule("layers.1.*.w1", "NVFP4")
    assert rule.pattern.fullmatch("layers.1.ffn.experts.0.w1")
    assert not rule.pattern.fullmatch("layers.11.ffn.experts.0.w1")
    assert not rule.pattern.fullmatch("layersX1.ffn.w1"), "a dot is a dot"
    assert not rule.pattern.fullmatch("layers.1.ffn.experts.0.w1.scale")


@pytest.mark.parametrize(
    ("config", "name", "unmatched"),
    [
        (V4_PRO, "official", ("mtp.*.main_proj",)),
        (V4_PRO, "nvfp4-experts", ("mtp.*.main_proj",)),
        (V4_PRO, "nvfp4-full", ()),
        (V3_2, "official", ()),
        (V3_2, "nvfp4-full", ()),
        (small_v4(compress_ratios=(0,) * 5), "nvfp4-full",
         ("layers.*.attn.indexer.wq_b", "layers.*.attn.indexer.weights_proj")),
    ],
)  # fmt: skip
def test_unmatched_patterns_are_reported(
    config: Config, name: str, unmatched: tuple[str, ...]
) -> None:
    assert recipe_named(name, config).unmatched(config) == unmatched


def test_a_pattern_for_norms_alone_is_reported() -> None:
    recipe = Recipe("norms", (Rule("*.q_norm", "NVFP4"),))
    assert recipe.unmatched(small_v32()) == ("*.q_norm",)


def test_every_format_is_known_to_the_formats_folder() -> None:
    assert (WEIGHT_FORMATS | ACTIVATION_FORMATS) - {BF16} <= set(BLOCK_FORMATS)


CUSTOM = """
name: careful
base: nvfp4-experts
rules:
  - match: "layers.0.*"
    weight: BF16
  - match: "layers.*.attn.wo_b"
    weight: NVFP4
    activation: NVFP4
"""


def test_a_custom_recipe_goes_before_its_base(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(CUSTOM, "utf-8")
    config = small_v4()
    recipe = recipe_from_file(path, config)
    said = {
        name: recipe.format_of(parameter_named(config, name))
        for name in ("layers.0.ffn.experts.0.w1", "layers.1.ffn.experts.0.w1", "layers.1.attn.wo_b")
    }
    assert said == {
        "layers.0.ffn.experts.0.w1": PLAIN,
        "layers.1.ffn.experts.0.w1": NVFP4,
        "layers.1.attn.wo_b": NVFP4,
    }
    assert recipe.format_of(parameter_named(config, "layers.1.attn.wq_a")) == FP8


@pytest.mark.parametrize(
    ("text", "expectation"),
    [
        ("name: a\nrule: []", "recipe key = 'rule'"),
        ("name: a", "recipe.rules = 'missing'"),
        ("rules: [{match: a, weight: BF16}]", "recipe.name = 'missing'"),
        ("name: a\nname: b\nrules: []", "recipe key = 'name': expected each key once"),
        ("name: a\nrules: []", "a list of rules"),
        ("name: a\nrules: {}", "a list of rules"),
        ("name: bf16\nrules: [{match: a, weight: BF16}]", "no built-in recipe has"),
        ("name: 3\nrules: [{match: a, weight: BF16}]", "name = 3"),
        ("name: a\nrules: [3]", "rules[0] = 3"),
        ("name: a\nrules: [{match: a}]", "rules[0].weight = 'missing'"),
        ("name: a\nrules: [{match: a, weight: 4}]", "rules[0].weight = 4"),
        ("name: a\nrules: [{match: a, weight: BF16, scale: 1}]", "rules[0] key = 'scale'"),
        ("name: a\nrules: [{match: a, weight: NVFP5}]", "Did you mean NVFP4"),
        ("name: a\nrules: [{match: a, weight: NVFP4, activation: MXFP4}]", "activation = 'MXFP4'"),
        (
            "name: a\nrules: [{match: a, weight: BF16, activation: NVFP4}]",
            "BF16 with a BF16 weight",
        ),
        ("name: a\nbase: nvfp4\nrules: [{match: a, weight: BF16}]", "recipe = 'nvfp4'"),
        ("just text", "recipe = 'just text'"),
        ("", "recipe = None"),
        ("name: [", "plain YAML"),
        ("name: !!python/object/apply:os.getcwd []", "plain YAML"),
        ("[" * 1500, "plain YAML"),
        ("? [a]\n: 1", "plain YAML"),
    ],
)
def test_unclear_recipes_are_refused(text: str, expectation: str) -> None:
    with pytest.raises(Refused) as refusal:
        recipe_from_yaml(text, V4_PRO)
    assert expectation in str(refusal.value)


def test_an_unreadable_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile):
        recipe_from_file(tmp_path / "absent.yaml", V4_PRO)
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(UnreadableFile, match="1 MiB"):
        recipe_from_file(path, V4_PRO)


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean nvfp4-"):
        recipe_named("nvfp4", V4_PRO)


# Nine lists of nine: 3,486,784,401 words, were they written out.
NESTED = "&l0 [x, x, x, x, x, x, x, x, x]"
for depth in range(1, 10):
    NESTED = f"&l{depth} [{NESTED}, {', '.join([f'*l{depth - 1}'] * 8)}]"


@pytest.mark.parametrize(
    "value",
    ["!!int x", "!!float x", "!!bool x", "!!timestamp x", "2020-99-99", "0b_", "!!int ''", NESTED],
    ids=lambda text: text[:14],
)
def test_values_that_yaml_itself_trips_over_are_refused(value: str) -> None:
    with pytest.raises(Refused, match=r"^recipe = "):
        recipe_from_yaml(f"name: {value}\nrules: []\n", V4_FLASH)
