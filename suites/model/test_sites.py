"""The grammar of sites: what is well formed comes back, and everything else is refused by place."""

from __future__ import annotations

from contextlib import suppress
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.model.components import components
from degarble.harness.model.config.config import V4_PRO
from degarble.harness.model.sites import Port, Site, parse_site
from degarble.suites.model.configs import configs

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

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
def test_every_site_of_a_config_is_well_formed(config: Config) -> None:
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
        ("attn.q_norm.in", "one name behind `in`"),
        ("attn.q_norm.in.x.y", "one name behind `in`"),
        ("attn.q_norm.out.x.y", "at most one behind `out`"),
        ("layers.attn.q_norm.out", "a number behind `layers`"),
        ("layers.out", "a number behind `layers`"),
        ("layers.07.attn.q_norm.out", "without leading zeros"),
        ("layers.-1.attn.q_norm.out", "a number behind `layers`"),
        ("layers.1000000.attn.q_norm.out", "a number behind `layers`"),
        ("mtp.x.norm.out", "a number behind `mtp`"),
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
