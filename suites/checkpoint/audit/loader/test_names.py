"""Rules on names: their order, and the shortcut against the plain way."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from degarble.harness.checkpoint.audit.loader.maps import (
    LONGEST_NAME,
    Elsewhere,
    EngineLayout,
    LoaderMap,
    NameOutcome,
    NameRules,
    Rename,
    ResolvedName,
    Split,
    Splits,
    Stack,
    needed_literal,
)

KNOWN = {"model.layers.3.attn.fused.weight", "model.layers.3.ffn.w13_weight", "model.norm.weight"}
MAP = LoaderMap(
    "tried",
    EngineLayout("vllm"),
    skip=(r"inv_freq$",),
    elsewhere=(Elsewhere(r"^mtp\.", "a drafter"),),
    rename=(Rename(r"^layers\.", "model.layers."), Rename(r"^norm\.", "model.norm.")),
    stack=(
        Stack(r"\.wq_a\.", ".fused.", 0),
        Stack(r"\.wkv\.", ".fused.", 1),
        Stack(r"experts\.(?P<expert>\d+)\.w3\.", "w13_", 1),
    ),
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.3.rotary.inv_freq", ResolvedName(NameOutcome.SKIPPED, by=r"inv_freq$")),
        ("mtp.0.norm.weight", ResolvedName(NameOutcome.ELSEWHERE, by=r"^mtp\.")),
        ("norm.weight", ResolvedName(NameOutcome.PLACED, "model.norm.weight")),
        (
            "layers.3.attn.wkv.weight",
            ResolvedName(
                NameOutcome.PLACED, "model.layers.3.attn.fused.weight", 1, None, r"\.wkv\."
            ),
        ),
        (
            "layers.3.ffn.experts.17.w3.weight",
            ResolvedName(
                NameOutcome.PLACED,
                "model.layers.3.ffn.w13_weight",
                1,
                17,
                r"experts\.(?P<expert>\d+)\.w3\.",
            ),
        ),
        # A stack applies only where its result is a parameter: this one has other `wkv`.
        (
            "layers.3.attn.compressor.wkv.weight",
            ResolvedName(NameOutcome.DROPPED, "model.layers.3.attn.compressor.wkv.weight"),
        ),
        (
            "layers.4.attn.wkv.weight",
            ResolvedName(NameOutcome.DROPPED, "model.layers.4.attn.wkv.weight"),
        ),
    ],
)
def test_rules_apply_in_their_order(name: str, expected: ResolvedName) -> None:
    assert NameRules(MAP, KNOWN).resolve(name) == expected


def test_rules_that_never_match_are_told() -> None:
    rules = NameRules(MAP, KNOWN)
    rules.resolve("layers.3.attn.wkv.weight")
    rules.resolve("mtp.0.norm.weight")
    assert rules.dead() == [
        ("skip", r"inv_freq$"),
        ("rename", r"^norm\."),
        ("stack", r"\.wq_a\."),
        ("stack", r"experts\.(?P<expert>\d+)\.w3\."),
    ]


def test_the_first_split_counts() -> None:
    splits = Splits((Split(r"\.wq_b\.weight$", 0), Split(r"\.wq_b\.", 1), Split("absent", 0)))
    assert splits.of("layers.0.wq_b.weight") == Split(r"\.wq_b\.weight$", 0)
    assert splits.of("layers.0.wq_b.scale") == Split(r"\.wq_b\.", 1)
    assert splits.of("layers.0.wq_a.weight") is None
    assert splits.dead() == [("split", "absent")]


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        (r"^layers\.(\d+)\.attn\.wq_a(?=\.|$)", ".attn.wq_a"),
        (r"\.weight_scale_inv$", ".weight_scale_inv"),
        (r"(q_b|o_a)_proj", "_proj"),
        (r"abc?def+gh", "def"),
        (r"colou{0,1}rs", "colo"),
        (r"[a-z.\]]kv", "kv"),
        (r"[]x]kv", "kv"),
        (r"one|two", ""),
        (r"(?i)Layers", ""),
        (r"(?<=a)bc", ""),
        (r".*", ""),
    ],
)
def test_what_every_match_contains(pattern: str, literal: str) -> None:
    assert needed_literal(pattern) == literal


PIECES = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        r"\.",
        ".",
        r"\d",
        "(",
        ")",
        "(?:",
        "|",
        "?",
        "*",
        "+",
        "[ab]",
        "[^a]",
        "{2}",
        "^",
        "$",
        r"\b",
    ]
)


@given(st.lists(PIECES, max_size=8).map("".join), st.text("ab.1", max_size=12))
def test_the_shortcut_never_misses_a_match(pattern: str, name: str) -> None:
    try:
        expression = re.compile(pattern)
    except re.error:
        assume(False)
    if expression.search(name):
        assert needed_literal(pattern) in name


def test_names_that_no_parameter_can_have_are_dropped_unread() -> None:
    rules = NameRules(MAP, KNOWN)
    long = "layers.3.attn.wkv.weight" + "x" * LONGEST_NAME
    assert rules.resolve(long) == ResolvedName(NameOutcome.DROPPED, long)
    growing = replace(MAP, rename=(Rename("x", "x" * 60),) * 9)
    found = NameRules(growing, KNOWN).resolve("xx")
    assert found.outcome is NameOutcome.DROPPED
    assert len(found.target) < LONGEST_NAME * 60


def test_an_experts_number_beyond_all_counts_as_none() -> None:
    number = "1" * 200
    found = NameRules(MAP, KNOWN).resolve(f"layers.3.ffn.experts.{number}.w3.weight")
    assert found.target == "model.layers.3.ffn.w13_weight"
    assert found.expert is None
