"""Components, their wiring and sites: names of the contract, no loose ends, one reader a weight."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, UnknownName
from degarble.harness.families.deepseek_v4.family import DeepSeekV4
from degarble.harness.families.deepseek_v4.tables import V4_BLOCK_WIRING
from degarble.harness.model.components import (
    OUTSIDE,
    Component,
    component_named,
    components,
    site_named,
)
from degarble.harness.model.config.config import (
    V4_PRO,
    Dspark,
    V4Config,
    small_v4,
    small_v32,
)
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.recipes import Recipe, Rule, recipe_named
from degarble.harness.model.sites import Port, Site, parse_site
from degarble.harness.model.types import RECIPE_NAMES, Kind
from degarble.suites.model.configs import configs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.model import components as wiring
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# Components: the names of the contract, wiring without loose ends, one reader for every weight.

# The contract: scripts, backends and reports say these names.
V4_ATTENTION = """attn.hc_pre attn.norm attn.wq_a attn.q_norm attn.wq_b attn.q_head_norm_rope
attn.wkv attn.kv_norm_rope attn.kv_write attn.attend attn.inverse_rope attn.wo_a attn.wo_b
attn.hc_post"""
V4_COMPRESSOR = "attn.compressor.proj attn.compressor.pool attn.compressor.write"
V4_INDEXER = """attn.indexer.wq_b attn.indexer.q attn.indexer.weights_proj
attn.indexer.compressor.proj attn.indexer.compressor.pool attn.indexer.scores attn.indexer.topk"""
MOE = """ffn.gate ffn.topk ffn.experts.w13 ffn.experts.act_quant ffn.experts.w2 ffn.experts.combine
ffn.shared.w13 ffn.shared.act ffn.shared.w2 ffn.moe_sum"""
V4_FFN = f"ffn.hc_pre ffn.norm {MOE} ffn.hc_post"
V4_ENDS = "embed hc_head norm head"
V4_DRAFTER = "embed enorm hnorm e_proj h_proj join hc_head norm head"
V32_ATTENTION = """attn.norm attn.wq_a attn.q_norm attn.wq_b attn.rope attn.wkv_a attn.kv_norm
attn.kv_write attn.wkv_b attn.indexer.wq_b attn.indexer.q attn.indexer.wk attn.indexer.k
attn.indexer.weights_proj attn.indexer.scores attn.indexer.topk attn.attend attn.wo"""
DENSE = "ffn.w13 ffn.act ffn.w2"


def roles(found: Iterable[Component]) -> set[str]:
    return {component.role for component in found}


@given(configs())
def test_names_are_those_of_the_contract(config: DeepSeekConfig) -> None:
    found = components(config)
    dspark = isinstance(config, V4Config) and config.dspark is not None
    for block in config.blocks:
        if block.is_drafter and dspark:
            continue
        if isinstance(config, V4Config):
            expected = f"{V4_ATTENTION} {V4_FFN}"
            expected += f" {V4_COMPRESSOR}" if block.ratio else ""
            expected += f" {V4_INDEXER}" if block.ratio == 4 else ""
            expected += f" {V4_DRAFTER}" if block.is_drafter else ""
        else:
            dense = not block.is_drafter and block.index < config.first_k_dense_replace
            expected = f"{V32_ATTENTION} ffn.norm {DENSE if dense else MOE}"
            expected += " embed enorm hnorm join eh_proj norm head" if block.is_drafter else ""
        assert roles(c for c in found if c.block == block) == set(expected.split())
    ends = V4_ENDS if isinstance(config, V4Config) else "embed norm head"
    assert roles(c for c in found if c.block is None) == set(ends.split())


@given(configs())
def test_names_are_unique_and_prefixed(config: DeepSeekConfig) -> None:
    found = components(config)
    assert len({component.name for component in found}) == len(found)
    for component in found:
        prefix = f"{component.block.prefix}." if component.block else ""
        assert component.name == prefix + component.role
        assert component.outputs


@pytest.mark.parametrize("name", RECIPE_NAMES)
@settings(max_examples=15)
@given(config=configs())
def test_every_input_has_a_producer_that_comes_earlier(name: str, config: DeepSeekConfig) -> None:
    assert loose_ends(components(config, recipe_named(name, config))) == []


def loose_ends(found: Iterable[Component]) -> list[str]:
    """Name every input that nothing produces, or that is produced too late."""
    seen: set[object] = set()
    loose = []
    for component in found:
        for each in component.inputs:
            known = all(site in seen for site in each.sources)
            outside = not each.sources and each.via in OUTSIDE
            if not (known and (outside or len(each.sources) == 1)):
                loose.append(f"{component.name}.in.{each.name}")
        seen.update(component.sites)
    return loose


def test_a_wrong_producer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [replace_input(line, "attn.wq_b") for line in V4_BLOCK_WIRING]
    changed = replace(DeepSeekV4.wiring, block=tuple(lines))
    monkeypatch.setattr(DeepSeekV4, "wiring", changed)
    found = loose_ends(components(small_v4(compress_ratios=(0,) * 5)))
    assert found == [f"{b.prefix}.attn.wq_b.in.x" for b in small_v4().blocks]


def replace_input(line: wiring.ComponentWiring, name: str) -> wiring.ComponentWiring:
    if line.name != name:
        return line
    return line._replace(inputs="x=attn.wo_b.out")  # produced later


@given(configs())
def test_every_parameter_has_exactly_one_reader(config: DeepSeekConfig) -> None:
    readers: dict[str, list[Component]] = {}
    for component in components(config):
        for name in component.weights:
            readers.setdefault(name, []).append(component)
    assert set(readers) == {parameter.name for parameter in parameters(config)}
    for name, read_by in readers.items():
        owner = parameter_named(config, name).component
        others = {component.role for component in read_by if component.name != owner}
        assert owner in {component.name for component in read_by}
        if name in {"embed", "head"}:
            assert others <= {name}, "a drafter of V4 shares them"
        elif name.endswith(".attn.wkv_b"):
            assert others == {"attn.attend"}, "the absorbed form"
        else:
            assert not others


@pytest.mark.parametrize("name", RECIPE_NAMES)
@settings(max_examples=15)
@given(config=configs())
def test_act_quant_stands_in_front_of_what_the_recipe_quantises(
    name: str, config: DeepSeekConfig
) -> None:
    recipe = recipe_named(name, config)
    found = {component.name: component for component in components(config, recipe)}
    plain = {component.name for component in components(config)}
    for component in found.values():
        linears = [parameter_named(config, w) for w in component.weights]
        formats = {recipe.format_of(p).activation for p in linears if p.kind is Kind.LINEAR}
        fed = any(i.name == "codes" for i in component.inputs)
        quantised = bool(formats - {"BF16"})
        assert fed == quantised, component.name
        if component.role == "ffn.experts.w2":
            maker = component.name.replace("w2", "act_quant")
        else:
            maker = f"{component.name}.act_quant"
            assert (maker in found) == quantised
        if quantised:
            made = found[maker]
            scaled = formats == {"NVFP4"}
            parts = ("codes", "block_scale", "tensor_scale")[: 3 if scaled else 2]
            assert made.outputs == parts
            assert made.input_scales == (component.weights if scaled else ())
            assert [i.name for i in component.inputs[: len(parts)]] == list(parts)
    added = set(found) - plain
    assert all(each.endswith(".act_quant") for each in added)
    assert plain <= set(found)


def test_partners_with_one_input_must_agree() -> None:
    recipe = Recipe(
        "odd", (Rule("*.experts.*.w1", "NVFP4", "NVFP4"), Rule("*.w3", "MXFP8", "MXFP8"))
    )
    with pytest.raises(LayoutMismatch, match=r"activations of layers\.0\.ffn\.experts\.w13.*odd"):
        components(small_v4(), recipe)


def test_a_layer_without_indexer_has_none_of_it() -> None:
    heavy = roles(c for c in components(V4_PRO) if c.layer == 3)
    assert {"attn.compressor.pool"} <= heavy
    assert not {role for role in heavy if "indexer" in role}
    window = roles(c for c in components(small_v4()) if c.layer == 0)
    assert not {role for role in window if "compressor" in role}


def test_what_attention_attends_to() -> None:
    config = small_v4()
    around = {"q", "window", "state_window", "positions", "token_offsets"}
    entries = {"compressed", "state_compressed"}
    for layer, more in ((0, set()), (1, entries | {"chosen"}), (2, entries)):
        attend = component_named(config, f"layers.{layer}.attn.attend")
        assert {each.name for each in attend.inputs} == around | more
        assert all(each.via == "" for each in attend.inputs if each.sources)


def test_streams_run_through_the_model() -> None:
    config = small_v4()
    streams = {
        component.name: (str(each.sources[0]), each.via)
        for component in components(config)
        for each in component.inputs
        if each.name == "streams"
    }
    assert streams["layers.0.attn.hc_pre"] == ("embed.out", "streams")
    assert streams["layers.3.attn.hc_pre"] == ("layers.2.ffn.hc_post.out", "")
    assert streams["layers.3.ffn.hc_post"] == ("layers.3.attn.hc_post.out", "")
    assert streams["hc_head"] == ("layers.4.ffn.hc_post.out", "")
    assert streams["mtp.0.attn.hc_pre"] == ("mtp.0.join.out", "")
    assert streams["mtp.0.hc_head"] == ("mtp.0.ffn.hc_post.out", "")


def test_the_residual_is_separate_from_the_stream_in_v3_2() -> None:
    config = small_v32()
    inputs = {
        name: {i.name: str(i.sources[0]) for i in component_named(config, name).inputs}
        for name in ("layers.0.attn.norm", "layers.2.attn.norm", "norm", "mtp.0.attn.norm")
    }
    assert inputs == {
        "layers.0.attn.norm": {"x": "embed.out"},
        "layers.2.attn.norm": {
            "x": "layers.1.ffn.moe_sum.out",
            "residual": "layers.1.ffn.norm.out.residual",
        },
        "norm": {"x": "layers.2.ffn.moe_sum.out", "residual": "layers.2.ffn.norm.out.residual"},
        "mtp.0.attn.norm": {"x": "mtp.0.eh_proj.out"},
    }
    one_dense = component_named(config, "layers.1.attn.norm").inputs[0]
    assert str(one_dense.sources[0]) == "layers.0.ffn.w2.out"


def test_the_block_parallel_drafter_listens_to_its_targets() -> None:
    dspark = Dspark(target_layer_ids=(2, 4), markov_rank=8, block_size=5, noise_token_id=1)
    config = replace(small_v4(), dspark=dspark)
    mean = component_named(config, "mtp.0.main_mean")
    assert [str(i.sources[0]) for i in mean.inputs] == [
        "layers.2.ffn.hc_post.out", "layers.4.ffn.hc_post.out",
    ]  # fmt: skip
    last = roles(c for c in components(config) if c.name.startswith("mtp.1."))
    assert {"hc_head", "norm", "head", "markov", "confidence"} <= last
    assert "main_proj" not in last
    context = component_named(config, "mtp.1.attn.wkv").inputs[1]
    assert (context.name, str(context.sources[0])) == ("context", "mtp.0.main_norm.out")


def test_components_and_sites_are_looked_up_by_name() -> None:
    config = small_v4()
    recipe = recipe_named("nvfp4-full", config)
    assert component_named(config, "layers.1.attn.wq_a.act_quant", recipe).layer == 1
    with pytest.raises(UnknownName, match=r"Did you mean layers\.1\.attn\.wq_a"):
        component_named(config, "layers.1.attn.wq_a.act_quant")
    assert (
        str(site_named(config, "layers.1.attn.hc_pre.out.post")) == "layers.1.attn.hc_pre.out.post"
    )
    with pytest.raises(UnknownName, match=r"layers\.1\.attn\.hc_pre\.out\.post"):
        site_named(config, "layers.1.attn.hc_pre.out.pots")
    with pytest.raises(UnknownName):
        site_named(config, "layers.0.attn.indexer.q.out")
    with pytest.raises(InvalidArgument):
        site_named(config, "layers.0.attn")


# --------------------------------------------------------------------------------------------------
# The grammar of sites: what is well formed comes back, and everything else is refused by place.

names = st.builds(
    "{}{}".format,
    st.sampled_from(ascii_lowercase),
    st.text(ascii_lowercase + digits + "_", max_size=8),
).filter(lambda name: name not in {"in", "out", "layers", "mtp"})
blocks = st.builds("{}.{}.".format, st.sampled_from(["layers", "mtp"]), st.integers(0, 999_999))
owners = st.builds(
    "{}{}".format, st.just("") | blocks, st.lists(names, min_size=1, max_size=4).map(".".join)
)


@st.composite
def sites(draw: st.DrawFn) -> Site:
    port = draw(st.sampled_from(Port))
    name = draw(names if port is Port.IN else st.just("") | names)
    return Site(draw(owners), port, name)


@given(sites())
def test_printing_and_parsing_are_inverse(site: Site) -> None:
    assert parse_site(str(site)) == site


@given(st.text(max_size=40) | owners.map(lambda owner: owner + ".out..") | st.integers())
def test_whatever_is_read_prints_as_it_was(text: Any) -> None:
    with suppress(InvalidArgument):
        assert str(parse_site(text)) == text


@settings(max_examples=20)
@given(configs())
def test_every_site_of_a_config_is_well_formed(config: DeepSeekConfig) -> None:
    for component in components(config):
        for site in component.sites:
            read = parse_site(str(site))
            assert read == site
            assert (read.layer, read.role) == (component.layer, component.role)
            assert read.block == (component.block.prefix if component.block else "")


def test_the_parts_of_a_site() -> None:
    site = parse_site("layers.17.attn.hc_pre.out.post")
    assert (site.component, site.port, site.name) == ("layers.17.attn.hc_pre", Port.OUT, "post")
    assert (site.layer, site.block, site.role) == (17, "layers.17", "attn.hc_pre")
    end, drafter = parse_site("hc_head.in.streams"), parse_site("mtp.0.norm.out")
    assert (end.layer, end.block, end.role) == (None, "", "hc_head")
    assert (drafter.layer, drafter.block, drafter.role) == (None, "mtp.0", "norm")


@pytest.mark.parametrize(
    ("text", "expectation"),
    [
        ("", "1 to 200 characters"),
        ("norm." + "a" * 200, "1 to 200 characters"),
        (17, "1 to 200 characters"),
        ("layers.17.attn.q_norm", "exactly one word `in` or `out`"),
        ("attn.in.out", "exactly one word `in` or `out`"),
        ("attn.q_norm.in", "one name after `in`"),
        ("attn.q_norm.in.x.y", "one name after `in`"),
        ("attn.q_norm.out.x.y", "at most one after `out`"),
        ("layers.attn.q_norm.out", "a number after `layers`"),
        ("layers.out", "a number after `layers`"),
        ("layers.07.attn.q_norm.out", "without leading zeros"),
        ("layers.-1.attn.q_norm.out", "a number after `layers`"),
        ("layers.1000000.attn.q_norm.out", "a number after `layers`"),
        ("mtp.x.norm.out", "a number after `mtp`"),
        ("layers.3.out", "the name of a component"),
        ("out", "the name of a component"),
        ("attn..out", "a lower-case name instead of ''"),
        ("attn.Q.out", "a lower-case name instead of 'Q'"),
        ("attn.q-norm.out", "a lower-case name instead of 'q-norm'"),
        ("attn.q_norm.out.", "a lower-case name instead of ''"),
        (" norm.out", "a lower-case name instead of ' norm'"),
        ("norm.out\n", "exactly one word"),
        ("attn.é.out", "a lower-case name instead of 'é'"),
        ("attn.2.out", "a lower-case name instead of '2'"),
    ],
)
def test_malformed_text_is_refused_by_place(text: Any, expectation: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse_site(text)
    assert expectation in refusal.value.expectation


def test_a_site_cannot_be_built_from_parts_that_do_not_fit() -> None:
    with pytest.raises(InvalidArgument):
        Site("layers.17.attn.q_norm", Port.IN)
    with pytest.raises(InvalidArgument, match="exactly one word"):
        Site("norm.out", Port.OUT)
    assert V4_PRO.layers[17].prefix == parse_site("layers.17.ffn.norm.out").block
