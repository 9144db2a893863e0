"""Loader maps from text: what a file says is what the record holds, the rest is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName, UnreadableFile
from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text, read_loader_map
from degarble.harness.checkpoint.audit.loader.maps import (
    Convert,
    Elsewhere,
    EngineLayout,
    Fill,
    ListedParameter,
    LoaderMap,
    Rename,
    Split,
    Stack,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.storage import Part
from degarble.harness.model.types import Dtype
from degarble.suites.checkpoint.audit.loader.loader_cases import FIELD, Raw, inventory_of, map_of
from degarble.suites.checkpoint.structure_cases import V4, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
            r"\.o$", "FP8", frozenset({Part.CODES, Part.BLOCK_SCALE}), (128, 128), Dtype.F8_E8M0
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
    made = map_of(
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
    assert made.skip == ("a", *base.skip)
    assert made.rename == (Rename("b", "c"), *base.rename)
    assert made.caveats == ("ours", *base.caveats)
    assert (made.stack, made.split, made.parameters) == (base.stack, base.split, base.parameters)
    assert (made.tp, made.ep, made.pp) == (2, 2, 1)


def test_a_file_can_say_what_the_engine_builds(official: Checkpoint) -> None:
    made = map_of(official, FIELD)
    assert isinstance(made.parameters, EngineLayout)
    assert not isinstance(made.parameters.recipe, str)
    assert made.parameters.recipe.name == "field report"
    plain = map_of(official, {"base": "vllm", "parameters": {"layout": "vllm", "recipe": "bf16"}})
    assert plain.parameters == EngineLayout("vllm", "bf16", "vllm")


@pytest.mark.parametrize(
    ("argument", "ranks"),
    [("vllm", (1, 1, 1)), ("vllm:tp=2", (2, 1, 1)), ("vllm:tp=2,ep=4,pp=3", (2, 4, 3))],
)
def test_ranks_stand_behind_an_engine(
    official: Checkpoint, argument: str, ranks: tuple[int, int, int]
) -> None:
    made = read_loader_map(argument, official)
    assert (made.tp, made.ep, made.pp) == ranks


def raw(**changes: object) -> Raw:
    return {"parameters": {"a": {"dtype": "BF16", "shape": [1]}}, **changes}


REFUSED: dict[str, tuple[object, type[Refused], str]] = {
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


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_file_may_not_say_is_refused_by_place(what: str) -> None:
    content, error, message = REFUSED[what]
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
