"""Check loader maps: their rules for names, the maps of known engines, and map files."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    Refused,
    UnknownName,
    UnreadableFile,
)
from degarble.harness.checkpoint.audit.loader.engine_maps import ONE_RANK, Ranks, engine_map
from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text, read_loader_map
from degarble.harness.checkpoint.audit.loader.maps import (
    LONGEST_NAME,
    Convert,
    Elsewhere,
    EngineLayout,
    Fill,
    ListedParameter,
    LoaderMap,
    NameOutcome,
    NameRules,
    Rename,
    ResolvedName,
    Split,
    Splits,
    Stack,
    compiled,
    needed_literal,
)
from degarble.harness.checkpoint.audit.loader.proof import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import V4Config, V32Config
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.tensors import PartKind, tensors_of
from degarble.harness.model.types import Dtype
from degarble.suites.checkpoint.audit.loader.loader_cases import FIELD, Raw, inventory_of, map_of
from degarble.suites.checkpoint.audit.loader.loader_vllm import v4_place, v32_place
from degarble.suites.checkpoint.structure_cases import V4, V32, errors, told, write
from degarble.suites.support.families import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Records of loader maps: what is refused, by name, before a proof begins.

ONE = ListedParameter("a.weight", "BF16", (4, 4))

BAD_PATTERNS = {
    "does not compile": "(",
    "unknown escape": r"\q",
    "set that Python will read otherwise": "[[a]",
    "exponential": "(a+)+$",
    "exponential by alternatives": "(a|a)*$",
    "counted group": "(a*){20}",
    "many repeats": ".*a.*b.*c.*d",
    "open counts": "a{1,}b{2,}c{3,}d{4,}",
    "too long": "a" * 501,
    "deep": "(" * 200 + ")" * 200 + "(" * 101,
}


@pytest.mark.parametrize("why", BAD_PATTERNS)
@pytest.mark.parametrize(
    "make",
    [
        lambda pattern: Rename(pattern, "x"),
        lambda pattern: Stack(pattern, "x"),
        lambda pattern: Split(pattern, 0),
        lambda pattern: Fill(pattern, 1.0),
        lambda pattern: Elsewhere(pattern, "x"),
        lambda pattern: Convert(pattern, "BF16"),
        lambda pattern: LoaderMap("m", (ONE,), skip=(pattern,)),
    ],
    ids=["rename", "stack", "split", "fill", "elsewhere", "convert", "skip"],
)
def test_a_bad_pattern_is_refused_by_every_rule(
    why: str, make: Callable[[str], object], request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.id.partition("-")[0]
    with pytest.raises(InvalidArgument, match=rf"^{kind} = ") as refused:
        make(BAD_PATTERNS[why])
    assert refused.value.value in (BAD_PATTERNS[why], f"{BAD_PATTERNS[why]} -> x")


def test_patterns_that_are_accepted_end_soon() -> None:
    hostile = "layers." + "a" * 249
    for pattern in (".*a.*b.*c", "a*a*a*b", r"(x|y)?\d+\.\d+\.", "[)*+{]a*", r"\)*\(+\{"):
        start = time.process_time()
        compiled("skip", pattern).search(hostile)
        assert time.process_time() - start < 10


@pytest.mark.parametrize("to", [r"\2", r"\g<name>", r"\g<1", "x" * 501])
def test_a_replacement_that_cannot_be_made_is_refused(to: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^rename = "):
        Rename("(a)", to)
    with pytest.raises(InvalidArgument, match=r"^stack = "):
        Stack("(a)", to)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "tp of zero": (lambda: LoaderMap("m", (ONE,), tp=0), "tp = 0: expected an integer from 1"),
    "tp of True": (lambda: LoaderMap("m", (ONE,), tp=True), "tp = True"),
    "too many ranks": (lambda: LoaderMap("m", (ONE,), tp=4096, pp=2), "all ranks.* = 8192"),
    "rank": (lambda: LoaderMap("m", (ONE,), tp=2, ep=4, rank=4), "rank = 4: .* from 0 to 3"),
    "parameter twice": (lambda: LoaderMap("m", (ONE, ONE)), r"parameters = \['a.weight'\]"),
    "no parameter": (lambda: LoaderMap("m", ()), "parameters = "),
    "rules": (lambda: LoaderMap("m", (ONE,), skip=("a",) * 1001), "kind skip = 1001"),
    "slot": (lambda: Stack("a", "b", -1), "stack: slot = -1"),
    "dim": (lambda: Split("a", -1), "split: dim = -1"),
    "multiple": (lambda: Split("a", 0, 0), "split: multiple = 0"),
    "block": (lambda: Convert("a", "FP8", block=(0, 128)), "convert: block = 0"),
    "extent": (lambda: ListedParameter("a", "BF16", (-1,)), "shape of a = -1"),
    "fraction": (lambda: ListedParameter("a", "BF16", (1.5,)), "shape of a = 1.5"),  # type: ignore[arg-type]
    "dimensions": (lambda: ListedParameter("a", "BF16", (1,) * 9), "dimensions of a = 9"),
    "experts": (
        lambda: ListedParameter("a", "U8", (1 << 20, 2), experts=True),
        "experts of a = 1048576",
    ),
    "experts of a scalar": (lambda: ListedParameter("a", "U8", (), experts=True), "slots of a"),
    "slots": (lambda: ListedParameter("a", "U8", (4, 2), (3, 2)), r"slots of a = \[3, 2\]"),
    "slots of a stack": (
        lambda: ListedParameter("a", "U8", (2, 4), (2,), experts=True),
        "slots of a",
    ),
    "slots of a scalar": (lambda: ListedParameter("a", "F32", (), (1,)), "slots of a"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_numbers_out_of_range_are_refused(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UnknownName, match="convert: to = 'FP4'"):
        Convert("a", "FP4")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="dtype of a = 'bfloat16'"):
        ListedParameter("a", "bfloat16", (1,))


def test_every_refusal_has_a_remedy() -> None:
    for make, _ in REFUSED.values():
        with pytest.raises(Refused) as refused:
            make()
        assert refused.value.remedy


def test_an_engine_has_the_name_of_its_layout() -> None:
    assert EngineLayout("vllm").name == "vllm"


# --------------------------------------------------------------------------------------------------
# Rules on names: their order, and the shortcut against the plain way.

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


def test_rules_that_never_match_are_reported() -> None:
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
    assert splits.rule_for("layers.0.wq_b.weight") == Split(r"\.wq_b\.weight$", 0)
    assert splits.rule_for("layers.0.wq_b.scale") == Split(r"\.wq_b\.", 1)
    assert splits.rule_for("layers.0.wq_a.weight") is None
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
    name = NameRules(growing, KNOWN).resolve("xx")
    assert name.outcome is NameOutcome.DROPPED
    assert len(name.target) < LONGEST_NAME * 60


def test_an_experts_number_beyond_all_counts_as_none() -> None:
    number = "1" * 200
    name = NameRules(MAP, KNOWN).resolve(f"layers.3.ffn.experts.{number}.w3.weight")
    assert name.target == "model.layers.3.ffn.w13_weight"
    assert name.expert is None


# --------------------------------------------------------------------------------------------------
# Engines' own maps: every name goes where vLLM's loaders send it, and refusals are by name.

if TYPE_CHECKING:
    Write = Callable[[Config, str], Path]

V4_LAYOUTS = ("official", "bf16", "nvfp4-experts")
V32_LAYOUTS = ("official", "bf16", "nvfp4-experts", "nvfp4-full")
FUSED = {"transformers"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    made: dict[tuple[str, str], Path] = {}

    def write_once(config: Config, layout: str) -> Path:
        key = (config.family, layout)
        if key not in made:
            made[key] = write(tmp_path_factory.mktemp("engine") / "c", config, layout)
        return made[key]

    return write_once


def map_and_names(folder: Path, ranks: Ranks = ONE_RANK) -> tuple[LoaderMap, NameRules, list[str]]:
    """Return an engine's map, its rules with the engine's parameters, and the stored names."""
    with Checkpoint.open(folder) as checkpoint:
        inventory = inventory_of(checkpoint)
        loader_map = engine_map(inventory, "vllm", ranks)
        assert isinstance(loader_map.parameters, EngineLayout)
        layout = loader_map.parameters.layout
        assert not isinstance(layout, str)
        known = {tensor.name for tensor in tensors_of(inventory.config, layout)}
        return loader_map, NameRules(loader_map, known), sorted(checkpoint.entries)


@pytest.mark.parametrize("layout", V4_LAYOUTS)
def test_names_of_v4_go_where_vllm_sends_them(written: Write, layout: str) -> None:
    _, rules, names = map_and_names(written(V4, layout))
    nvfp4 = layout == "nvfp4-experts"
    for name in names:
        if nvfp4 and name.startswith("mtp.") and ".experts." in name:
            continue  # built as NVFP4, so that these tensors have no parameter
        resolved_name, wanted = rules.resolve(name), v4_place(name, V4.num_hidden_layers, nvfp4)
        assert resolved_name.outcome is NameOutcome.PLACED, name
        assert (resolved_name.target, resolved_name.slot, resolved_name.expert) == wanted, name


@pytest.mark.parametrize("layout", V32_LAYOUTS)
def test_names_of_v32_go_where_vllm_sends_them(written: Write, layout: str) -> None:
    _, rules, names = map_and_names(written(V32, layout))
    drafted = 0
    for name in names:
        resolved_name, wanted = rules.resolve(name), v32_place(name, V32.num_hidden_layers)
        if wanted is None:
            drafted += 1
            assert resolved_name.outcome is NameOutcome.ELSEWHERE, name
        elif name.endswith(".indexer.wk.weight_scale_inv"):
            assert resolved_name.outcome is NameOutcome.DROPPED, name  # the conversion reads it
        else:
            assert resolved_name.outcome is NameOutcome.PLACED, name
            assert (resolved_name.target, resolved_name.slot, resolved_name.expert) == wanted, name
    assert drafted


def test_only_names_that_vllm_knows_go_without_a_caveat(written: Write) -> None:
    known = {(V4Config.family, each) for each in V4_LAYOUTS}
    known |= {(V32Config.family, each) for each in (*V32_LAYOUTS, "compressed-tensors")}
    known.add((V32Config.family, "transformers-saved"))
    for family, layout in LAYOUTS:
        if layout not in FUSED:
            config = V4 if family == V4Config.family else V32
            loader_map, _, _ = map_and_names(written(config, layout))
            assert bool(loader_map.caveats) == ((family, layout) not in known), (family, layout)


def test_a_caveat_is_reported(written: Write) -> None:
    with Checkpoint.open(written(V4, "transformers-saved")) as checkpoint:
        findings = prove(checkpoint, engine_map(inventory_of(checkpoint), "vllm")).findings
    (caveat,) = told(findings, "loader.caveat")
    assert caveat.level == "warning"
    assert "these renames are degarble's" in caveat.message


def test_the_drafter_is_built_like_the_other_experts(written: Write) -> None:
    with Checkpoint.open(written(V4, "nvfp4-experts")) as checkpoint:
        findings = prove(checkpoint, engine_map(inventory_of(checkpoint), "vllm")).findings
    assert errors(findings) == set()
    warned = told(findings, "loader.drafter_format")
    assert {finding.evidence["built"] for finding in warned} == {"NVFP4"}
    assert {finding.layer for finding in warned} == {V4.num_hidden_layers}
    assert [finding.count for finding in warned] == [V4.n_routed_experts] * 3


def test_experts_are_not_split_where_they_are_spread(written: Write) -> None:
    folder = written(V4, "official")
    cut = {split.match for split in map_and_names(folder, Ranks(tp=2))[0].split}
    spread = {split.match for split in map_and_names(folder, Ranks(tp=2, ep=2))[0].split}
    assert {each for each in cut - spread if "experts" not in each} == set()
    assert cut - spread
    assert not spread - cut


def test_a_fused_checkpoint_of_transformers_is_refused(written: Write) -> None:
    with Checkpoint.open(written(V4, "transformers")) as checkpoint:
        inventory = inventory_of(checkpoint)
        with pytest.raises(LayoutMismatch, match=r"transformers.*fused for an engine already"):
            engine_map(inventory, "vllm")


@pytest.mark.parametrize("config", [V4, V32], ids=["V4", "V3.2"])
def test_a_checkpoint_in_the_engines_own_names_needs_no_rules(
    written: Write, config: Config
) -> None:
    loader_map, _, _ = map_and_names(written(config, "vllm"), Ranks(tp=2))
    assert (loader_map.convert, loader_map.rename, loader_map.stack, loader_map.elsewhere) == (
        (),
        (),
        (),
        (),
    )
    assert loader_map.split
    (caveat,) = loader_map.caveats
    assert "no names for stacked experts" in caveat


def test_an_unknown_engine_is_refused(written: Write) -> None:
    with Checkpoint.open(written(V4, "official")) as checkpoint:
        inventory = inventory_of(checkpoint)
        with pytest.raises(UnknownName, match="engine = 'sglang'"):
            engine_map(inventory, "sglang")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (Ranks(tp=3), "tp = 3: expected a divisor of 2 output groups"),
        (Ranks(ep=3), "ep = 3: expected a divisor of 4 experts"),
        (Ranks(tp=2, ep=1, pp=9), "pp = 9: expected at most 3 layers"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(
    written: Write, ranks: Ranks, message: str
) -> None:
    with Checkpoint.open(written(V4, "official")) as checkpoint:
        loader_map = engine_map(inventory_of(checkpoint), "vllm", ranks)
        with pytest.raises(InvalidArgument, match=message):
            prove(checkpoint, loader_map)


def test_a_map_that_anatomy_contradicts_never_leaves(
    written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from degarble.harness.checkpoint.audit.loader import engine_maps as loader_engine  # noqa: PLC0415  patched here alone

    layout = layout_named("vllm", V4)
    swapped = tuple(replace(fusion, target=fusion.target + "_x") for fusion in layout.fusions)
    monkeypatch.setattr(loader_engine, "layout_named", lambda *_: replace(layout, fusions=swapped))
    with Checkpoint.open(written(V4, "official")) as checkpoint:
        inventory = inventory_of(checkpoint)
        engine_map(inventory, "vllm")  # other names are fine while they agree
        monkeypatch.setattr(loader_engine._Maker, "_stacks", lambda _: iter(()))
        with pytest.raises(AssertionError, match="is Resolved"):
            engine_map(inventory, "vllm")


# --------------------------------------------------------------------------------------------------
# Loader maps from text: what a file says is what the record holds, the rest is refused.

EVERYTHING = r"""
name: all of it
tp: 2
ep: 4
pp: 1
rank: 3
parameters:
  a.w13_weight: {dtype: torch.uint8, shape: [2, 8, 4], slots: [4, 4], experts: true}
  b.weight: {dtype: F8_E4M3, shape: [16, 4]}
convert:
  - {match: '\.o$', to: FP8, reads: [codes, block_scale], block: [128, 128], scale: F8_E8M0}
  - {match: '\.q$', to: FP8, block: tensor, suffix: .weight_scale}
  - {match: '\.k$', to: BF16}
skip: ['inv_freq$']
caveats: [it was written from memory]
elsewhere: [{match: '^mtp\.', reason: a drafter}]
rename: [{match: '^layers\.', to: model.layers.}]
stack: [{match: 'experts\.(?P<expert>\d+)\.w3\.', into: w13_, slot: 1}]
split: [{match: '\.w2_', dim: 1, multiple: 16}, {match: '\.b\.', dim: 0}]
fill: [{match: scale, value: 1}]
"""

WHOLE = LoaderMap(
    "all of it",
    (
        ListedParameter("a.w13_weight", "U8", (2, 8, 4), (4, 4), experts=True),
        ListedParameter("b.weight", "F8_E4M3", (16, 4)),
    ),
    tp=2,
    ep=4,
    pp=1,
    rank=3,
    convert=(
        Convert(
            r"\.o$",
            "FP8",
            frozenset({PartKind.CODES, PartKind.BLOCK_SCALE}),
            (128, 128),
            Dtype.F8_E8M0,
        ),
        Convert(r"\.q$", "FP8", block="tensor", suffix=".weight_scale"),
        Convert(r"\.k$", "BF16"),
    ),
    skip=("inv_freq$",),
    caveats=("it was written from memory",),
    elsewhere=(Elsewhere(r"^mtp\.", "a drafter"),),
    rename=(Rename(r"^layers\.", "model.layers."),),
    stack=(Stack(r"experts\.(?P<expert>\d+)\.w3\.", "w13_", 1),),
    split=(Split(r"\.w2_", 1, 16), Split(r"\.b\.", 0)),
    fill=(Fill("scale", 1),),
)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with Checkpoint.open(
        write(tmp_path_factory.mktemp("text") / "c", V4, "official")
    ) as checkpoint:
        yield checkpoint


def test_every_field_is_read() -> None:
    assert loader_map_from_text(EVERYTHING, None) == WHOLE


def test_json_says_the_same() -> None:
    assert loader_map_from_text(json.dumps(yaml.safe_load(EVERYTHING)), None) == WHOLE


def test_a_file_is_read_by_its_path(tmp_path: Path, official: Checkpoint) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(EVERYTHING, encoding="utf-8")
    assert read_loader_map(str(path), official) == WHOLE


def test_rules_of_a_file_come_before_those_of_its_base(official: Checkpoint) -> None:
    base = read_loader_map("vllm:tp=2,ep=2", official)
    loader_map = map_of(
        official,
        {
            "base": "vllm",
            "tp": 2,
            "ep": 2,
            "skip": ["a"],
            "rename": [{"match": "b", "to": "c"}],
            "caveats": ["ours"],
        },
    )
    assert loader_map.skip == ("a", *base.skip)
    assert loader_map.rename == (Rename("b", "c"), *base.rename)
    assert loader_map.caveats == ("ours", *base.caveats)
    assert (loader_map.stack, loader_map.split, loader_map.parameters) == (
        base.stack,
        base.split,
        base.parameters,
    )
    assert (loader_map.tp, loader_map.ep, loader_map.pp) == (2, 2, 1)


def test_a_file_can_say_what_the_engine_builds(official: Checkpoint) -> None:
    loader_map = map_of(official, FIELD)
    assert isinstance(loader_map.parameters, EngineLayout)
    assert not isinstance(loader_map.parameters.recipe, str)
    assert loader_map.parameters.recipe.name == "field report"
    plain = map_of(official, {"base": "vllm", "parameters": {"layout": "vllm", "recipe": "bf16"}})
    assert plain.parameters == EngineLayout("vllm", "bf16", "vllm")


@pytest.mark.parametrize(
    ("argument", "ranks"),
    [("vllm", (1, 1, 1)), ("vllm:tp=2", (2, 1, 1)), ("vllm:tp=2,ep=4,pp=3", (2, 4, 3))],
)
def test_ranks_follow_the_name_of_an_engine(
    official: Checkpoint, argument: str, ranks: tuple[int, int, int]
) -> None:
    loader_map = read_loader_map(argument, official)
    assert (loader_map.tp, loader_map.ep, loader_map.pp) == ranks


def raw(**changes: object) -> Raw:
    return {"parameters": {"a": {"dtype": "BF16", "shape": [1]}}, **changes}


TEXT_REFUSED: dict[str, tuple[object, type[Refused], str]] = {
    "a list": ([], InvalidArgument, "loader map: map"),
    "nothing": (None, InvalidArgument, "loader map: map"),
    "numbers as keys": ({1: 2}, InvalidArgument, "loader map: key = 1"),
    "unknown key": (raw(skips=[]), UnknownName, "map: key = 'skips'.*skip"),
    "no parameters": ({"skip": []}, InvalidArgument, "parameters = 'missing'"),
    "parameters as a list": (raw(parameters=[]), InvalidArgument, "loader map: parameters"),
    "parameters twice": (raw(parameters={}), InvalidArgument, "parameters"),
    "no dtype": ({"parameters": {"a": {"shape": [1]}}}, InvalidArgument, r"a\.dtype = 'missing'"),
    "no shape": ({"parameters": {"a": {"dtype": "U8"}}}, InvalidArgument, r"a\.shape = 'missing'"),
    "unknown dtype": (
        {"parameters": {"a": {"dtype": "torch.float4", "shape": [1]}}},
        UnknownName,
        "dtype of a = 'torch.float4'",
    ),
    "experts as a number": (
        {"parameters": {"a": {"dtype": "U8", "shape": [1], "experts": 1}}},
        InvalidArgument,
        r"a\.experts = 1",
    ),
    "unknown field of a parameter": (
        {"parameters": {"a": {"dtype": "U8", "shape": [1], "slot": []}}},
        UnknownName,
        "a: key = 'slot'",
    ),
    "name as a number": (raw(name=3), InvalidArgument, "name = 3"),
    "tp as text": (raw(tp="2"), InvalidArgument, "tp = '2'"),
    "skip as text": (raw(skip="a"), InvalidArgument, "skip = 'a'"),
    "skip of a number": (raw(skip=["a", 1]), InvalidArgument, r"skip\[1\] = 1"),
    "rule as text": (raw(rename=["a"]), InvalidArgument, r"rename\[0\] = 'a'"),
    "rule without its field": (raw(rename=[{"match": "a"}]), InvalidArgument, r"rename\[0\]\.to"),
    "unknown field": (
        raw(stack=[{"match": "a", "into": "b", "slots": 1}]),
        UnknownName,
        r"stack\[0\]: key = 'slots'",
    ),
    "match as a number": (raw(skip=[], rename=[{"match": 1, "to": "a"}]), InvalidArgument, "match"),
    "slot as text": (raw(stack=[{"match": "a", "into": "b", "slot": "1"}]), InvalidArgument, "'1'"),
    "no pattern": (raw(rename=[{"match": "(", "to": "a"}]), InvalidArgument, r"rename = '\( -> a'"),
    "fill of text": (
        raw(fill=[{"match": "a", "value": "1"}]),
        InvalidArgument,
        r"fill\[0\]\.value",
    ),
    "fill of a truth": (raw(fill=[{"match": "a", "value": True}]), InvalidArgument, "value = True"),
    "conversion to FP4": (raw(convert=[{"match": "a", "to": "FP4"}]), UnknownName, "convert: to"),
    "unknown part": (
        raw(convert=[{"match": "a", "to": "BF16", "reads": ["scales"]}]),
        UnknownName,
        r"reads = 'scales'",
    ),
    "block of one": (
        raw(convert=[{"match": "a", "to": "FP8", "block": [128]}]),
        InvalidArgument,
        r"block = \[128\]",
    ),
    "scale type": (
        raw(convert=[{"match": "a", "to": "FP8", "scale": "F4"}]),
        UnknownName,
        "scale = 'F4'",
    ),
    "base": ({"base": "sglang"}, UnknownName, "loader map = 'sglang'"),
    "base without a config": ({"base": "vllm"}, InvalidArgument, "cannot be derived"),
    "recipe": (raw(parameters={"layout": "vllm", "recipe": "fp6"}), UnknownName, "fp6"),
    "layout with more": (
        raw(parameters={"layout": "vllm", "receipt": "bf16"}),
        UnknownName,
        "'receipt'",
    ),
}


@pytest.mark.parametrize("what", TEXT_REFUSED)
def test_what_a_file_may_not_say_is_refused_by_place(what: str) -> None:
    content, error, message = TEXT_REFUSED[what]
    with pytest.raises(error, match=message) as refused:
        loader_map_from_text(yaml.safe_dump(content), None)
    assert refused.value.remedy


TEXTS: dict[str, tuple[str, type[Refused], str]] = {
    "no YAML": ("a: [", UnreadableFile, "YAML or JSON"),
    "no JSON": ('{"a": ', UnreadableFile, "YAML or JSON"),
    "two documents": ("a: 1\n---\nb: 2\n", UnreadableFile, "YAML or JSON"),
    "a tag that runs code": (
        "name: !!python/object/apply:os.getcwd []\n",
        UnreadableFile,
        "YAML or JSON",
    ),
    "a key twice": ("tp: 1\ntp: 2\n", InvalidArgument, "key = 'tp'"),
    "a key twice in JSON": ('{"tp": 1, "tp": 2}', InvalidArgument, "key = 'tp'"),
    "a parameter twice": (
        "parameters:\n  a: {dtype: U8, shape: [1]}\n  a: {dtype: U8, shape: [2]}\n",
        InvalidArgument,
        "key = 'a'",
    ),
    "a key that YAML reads as a truth": ("on: 1\n", InvalidArgument, "key = True"),
    "a key that is a list": ("? [a]\n: 1\n", InvalidArgument, "key"),
    "a circle": ("skip: &a [*a]\n", InvalidArgument, "alias"),
    "a tree without end": (
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
        InvalidArgument,
        "alias",
    ),
    "too deep": ("[" * 5_000, UnreadableFile, "YAML or JSON"),
    "too deep for JSON": ('{"a":' + "[" * 5_000, UnreadableFile, "YAML or JSON"),
    "a number beyond all": ("tp: 1" + "0" * 5000, Refused, "."),
    "empty": ("", InvalidArgument, "loader map: map"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_texts_that_are_no_map_are_refused(what: str) -> None:
    text, error, message = TEXTS[what]
    with pytest.raises(error, match=message):
        loader_map_from_text(text, None)


ARGUMENTS = {
    "sglang": "loader map = 'sglang'",
    "vllm:": "ranks = ''",
    "vllm:tp=1,,ep=1": "ranks = ''",
    "vllm:tp=1,": "ranks = ''",
    "vllm:tp": "ranks = 'tp'",
    "vllm:tp=two": "ranks = 'tp=two'",
    "vllm:dp=2": "ranks = 'dp=2'",
    "vllm:tp=2,tp=4": "ranks = 'tp=4'",
    "vllm:tp=-1": "ranks = 'tp=-1'",
    "vllm:tp=0": "tp = 0",
    "vllm:tp=" + "9" * 5000: "ranks = ",
    "": "loader map = ''",
    "map.txt": "loader map = 'map.txt'",
    "absent.yaml": "absent.yaml",
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arguments_that_name_no_map_are_refused(official: Checkpoint, argument: str) -> None:
    with pytest.raises(Refused) as refused:
        read_loader_map(argument, official)
    assert ARGUMENTS[argument] in str(refused.value)


def test_files_that_are_no_text_are_refused(tmp_path: Path, official: Checkpoint) -> None:
    path = tmp_path / "map.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(UnreadableFile, match="UTF-8"):
        read_loader_map(str(path), official)
    with pytest.raises(UnreadableFile, match="a regular file"):
        read_loader_map(str(_folder(tmp_path / "folder.yaml")), official)
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(UnreadableFile, match="at most 16 MiB"):
        read_loader_map(str(path), official)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_inventories_are_needed_for_engines_alone(official: Checkpoint) -> None:
    assert loader_map_from_text("base: vllm", inventory_of(official)).name == "vllm for deepseek_v4"
