"""Break every loading rule once, and find it by name, in the proof and on its page."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.audit.findings import RULES
from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text
from degarble.harness.checkpoint.audit.loader.maps import (
    LONGEST_NAME,
    Convert,
    Elsewhere,
    Fill,
    ListedParameter,
    LoaderMap,
    Rename,
    Split,
    Stack,
)
from degarble.harness.checkpoint.audit.loader.proof import LoaderProof, prove
from degarble.harness.checkpoint.audit.rules import STRUCTURE_RULES, Level
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.audit.loader.loader_cases import (
    FIELD,
    Raw,
    inventory_of,
    proven,
    require_claims,
)
from degarble.suites.checkpoint.converting_cases import source
from degarble.suites.checkpoint.structure_cases import V4, V32, errors, replant, told, write, zeros

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Faults of loading as data: what is changed in a map or a checkpoint, and which rule that breaks.
#
# The seven faults of the first field report stand first, by their numbers there; where one of them
# has two forms, each is a case.

if TYPE_CHECKING:
    Tensors = dict[str, Tensor]
    Change = Callable[[Tensors], None]

SOURCES: dict[str, tuple[Config, str]] = {
    "field": (V4, "nvfp4-full"),
    "official": (V4, "official"),
    "nvfp4": (V4, "nvfp4-experts"),
    "bf16": (V4, "bf16"),
    "hf": (V4, "transformers-saved"),
    "v32": (V32, "nvfp4-full"),
}
# A list of one parameter leaves the rest of a checkpoint without a place.
LISTED_ALONE = {"loader.dropped", "loader.dropped_scale"}
VLLM: Raw = {"base": "vllm", "tp": 2}
ATTN = "layers.1.attn"
EXPERT = r"\.experts\.(?P<expert>\d+)"


class Case(NamedTuple):
    """A fault: what is changed in the map and in the checkpoint, and what it breaks."""

    source: str
    base: Raw
    rules: Raw
    breaks: str
    change: Change | None = None


def put(name: str, make: Callable[[Tensors], Tensor]) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = make(tensors).contiguous()

    return change


def rename(name: str, to: str) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[to] = tensors.pop(name)

    return change


def converts(**changes: object) -> Raw:
    """Change the field report's conversion of wo_a."""
    first, *rest = FIELD["convert"]
    made = {key: value for key, value in {**first, **changes}.items() if value is not None}
    return {"convert": [made, *rest]}


def o_b_reads(*parts: str) -> Raw:
    """Let the field report's conversion of wo_b read these parts."""
    rule = {"match": r"\.o_b_proj$", "to": "BF16", "reads": list(parts)}
    return {"convert": [rule, *FIELD["convert"]]}


def copy(name: str, to: str) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[to] = tensors[name].clone()

    return change


def drop(*names: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def skip(*patterns: str) -> Raw:
    return {"skip": list(patterns)}


FAULTS: dict[str, Case] = {
    "1: a 1-D scale where one a block is expected": Case(
        "field", FIELD, converts(block="tensor"), "loader.scale_rank"
    ),
    "1: the same, in the file": Case(
        "official",
        VLLM,
        {},
        "loader.scale_rank",
        put(f"{ATTN}.wo_a.scale", lambda _: zeros((2,), torch.float8_e8m0fnu)),
    ),
    "2: E4M3 block scales where fp32 is expected": Case(
        "field", FIELD, converts(scale="F8_E4M3"), "loader.scale_dtype"
    ),
    "2: E4M3 block scales where UE8M0 is expected": Case(
        "official",
        VLLM,
        {},
        "loader.scale_dtype",
        put(f"{ATTN}.wo_a.scale", lambda t: t[f"{ATTN}.wo_a.scale"].to(torch.float8_e4m3fn)),
    ),
    "3: the block shape missing among the arguments": Case(
        "field", FIELD, converts(block=None), "loader.block_unstated"
    ),
    "4: the indexer's compressor and the main one from each other's prefix": Case(
        "bf16",
        VLLM,
        {
            "rename": [
                {"match": r"\.indexer\.compressor\.", "to": ".other."},
                {"match": r"(s\.1\.attn)\.compressor\.", "to": r"\1.indexer.compressor."},
                {"match": r"\.attn\.other\.", "to": ".attn.compressor."},
            ]
        },
        "loader.prefix",
    ),
    "4: the indexer's compressor from the main prefix, its own lost": Case(
        "bf16",
        VLLM,
        {
            "rename": [
                {"match": r"\.indexer\.compressor\.", "to": ".other."},
                {"match": r"(s\.1\.attn)\.compressor\.", "to": r"\1.indexer.compressor."},
            ]
        },
        "loader.prefix",
    ),
    "5: block scales of all ones": Case(
        "field",
        FIELD,
        {
            "rename": [{"match": r"o_a_proj\.weight_scale_inv$", "to": "o_a_proj.lost"}],
            "fill": [{"match": r"\.wo_a\.weight_scale_inv$", "value": 1.0}],
        },
        "loader.constant_scale",
    ),
    "6: input_scale multiplied into the weights": Case(
        "field",
        FIELD,
        o_b_reads("codes", "block_scale", "tensor_scale", "input_scale"),
        "loader.input_scale_in_weight",
    ),
    "6: input_scale in the place of the tensor scale": Case(
        "nvfp4",
        VLLM,
        {
            "rename": [
                {"match": r"(experts\.\d+\.w2)\.weight_scale_2$", "to": r"\1.lost"},
                {"match": r"(experts\.\d+\.w2)\.input_scale$", "to": r"\1.weight_scale_2"},
            ]
        },
        "loader.input_scale_in_weight",
    ),
    "7: a pattern for fused parameters that also skips scales": Case(
        "official", VLLM, {"skip": [r"\.(wq_b|wo_a|wo_b)\.scale$"]}, "loader.skipped_scale"
    ),
}

OTHERS: dict[str, Case] = {
    "a weight is skipped": Case("official", VLLM, {"skip": [r"\.wq_b\.weight$"]}, "loader.skipped"),
    "the correction bias under another name": Case(
        "official",
        VLLM,
        {},
        "loader.unwritten",
        rename("layers.1.ffn.gate.bias", "layers.1.ffn.gate.correction"),
    ),
    "a name that the rules lose": Case(
        "official",
        VLLM,
        {"rename": [{"match": r"\.q_norm\.", "to": ".query_norm."}]},
        "loader.dropped",
    ),
    "scales with underscores are not mapped": Case(
        "nvfp4",
        VLLM,
        {"rename": [{"match": r"(experts\.\d+\.w2)\.weight_scale$", "to": r"\1_weight_scale"}]},
        "loader.dropped_scale",
    ),
    "the scale of a fused parameter in its first slot alone": Case(
        "nvfp4",
        VLLM,
        {},
        "loader.slot_unwritten",
        drop(*(f"layers.1.ffn.experts.{e}.w3.weight_scale_2" for e in range(V4.n_routed_experts))),
    ),
    "gate and up exchanged": Case(
        "nvfp4",
        VLLM,
        {
            "stack": [
                {"match": rf"{EXPERT}\.w1\.", "into": ".experts.w13_", "slot": 1},
                {"match": rf"{EXPERT}\.w3\.", "into": ".experts.w13_", "slot": 0},
            ]
        },
        "loader.swapped_partners",
    ),
    "both partners in one slot": Case(
        "official",
        VLLM,
        {"stack": [{"match": r"_experts\.w3\.", "into": "_experts.gate_up_proj.", "slot": 0}]},
        "loader.swapped_partners",
    ),
    "two names that become one": Case(
        "official",
        VLLM,
        {"rename": [{"match": r"\.query_norm\.", "to": ".q_norm."}]},
        "loader.written_twice",
        copy(f"{ATTN}.q_norm.weight", f"{ATTN}.query_norm.weight"),
    ),
    "a slot that is not there": Case(
        "official",
        VLLM,
        {"stack": [{"match": r"\.attn\.wkv\.", "into": ".attn.fused_wqa_wkv.", "slot": 2}]},
        "loader.shape",
    ),
    "rows that no rank takes": Case(
        "official",
        {
            "parameters": {
                "w1": {"dtype": "I8", "shape": [2, 256, 64], "experts": True},
            }
        },
        {"stack": [{"match": rf"layers\.1\..*{EXPERT}\.w1\.weight$", "into": "w1"}]},
        "loader.unread",
    ),
    "the neighbour's layer": Case(
        "official",
        VLLM,
        {
            "rename": [
                {"match": r"^layers\.0\.(attn\.wq_b)", "to": r"layers.9.\1"},
                {"match": r"^layers\.1\.(attn\.wq_b)", "to": r"layers.0.\1"},
                {"match": r"^layers\.9\.(attn\.wq_b)", "to": r"layers.1.\1"},
            ]
        },
        "loader.wrong_parameter",
    ),
    "two experts exchanged, behind others that are right": Case(
        "nvfp4",
        VLLM,
        {
            "rename": [
                {"match": r"^(layers\.1\.ffn\.experts)\.2\.", "to": r"\1.9."},
                {"match": r"^(layers\.1\.ffn\.experts)\.3\.", "to": r"\1.2."},
                {"match": r"^(layers\.1\.ffn\.experts)\.9\.", "to": r"\1.3."},
            ]
        },
        "loader.wrong_parameter",
    ),
    "a tensor scale in the place of an input scale": Case(
        "nvfp4",
        VLLM,
        {
            "rename": [
                {"match": r"(experts\.\d+\.w2)\.input_scale$", "to": r"\1.lost"},
                {"match": r"(experts\.\d+\.w2)\.weight_scale_2$", "to": r"\1.input_scale"},
            ]
        },
        "loader.wrong_part",
    ),
    "rows cut in other multiples than the heads": Case(
        "official",
        VLLM,
        {"split": [{"match": r"\.attn_sink$", "dim": 0, "multiple": 3}]},
        "loader.wrong_rows",
    ),
    "linears in a format that is not built": Case("field", VLLM, {}, "loader.format"),
    "codes into a parameter of values": Case(
        "official",
        {"parameters": {"plain": {"dtype": "BF16", "shape": [1024, 128]}}},
        {"rename": [{"match": r"^layers\.1\.attn\.wq_b\.weight$", "to": "plain"}]},
        "loader.dtype",
    ),
    "a conversion without the second scale": Case(
        "field", FIELD, o_b_reads("codes", "block_scale"), "loader.scale_unread"
    ),
    "partners in two formats": Case(
        "v32",
        {"base": "vllm"},
        {
            "parameters": {
                "layout": "vllm",
                "recipe": {
                    "name": "one of two",
                    "rules": [{"match": "layers.*.ffn.experts.*.w1", "weight": "NVFP4"}],
                },
            }
        },
        "loader.partners_differ",
    ),
}
WARNED: dict[str, Case] = {
    "fp32 norms kept in bf16": Case("hf", {"base": "vllm"}, {}, "loader.narrowed"),
    "a map that is not the engine's own": Case("hf", {"base": "vllm"}, {}, "loader.caveat"),
    "the drafter in another format": Case("nvfp4", VLLM, {}, "loader.drafter_format"),
}
NOTED: dict[str, Case] = {
    "left to another loader": Case("v32", {"base": "vllm"}, {}, "loader.elsewhere"),
    "a rule that matches nothing": Case(
        "official", VLLM, {"skip": ["inv_freq$"]}, "loader.dead_rule"
    ),
    "no tensor of the model": Case(
        "official",
        VLLM,
        {},
        "loader.extra_dropped",
        put("layers.1.attn.rotary_emb.inv_freq", lambda _: zeros((8,), torch.float32)),
    ),
}


# --------------------------------------------------------------------------------------------------
# Faults of loading, planted one at a time: each breaks its own rule, and no other.
#
# The cases are in loader_fault_cases.py; every rule of loading is broken by one of them.

LOADER_RULES = [rule for rule in STRUCTURE_RULES if rule.id.startswith("loader.")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def write_once(source: str) -> Path:
        if source not in made:
            folder = tmp_path_factory.mktemp("faults") / "c"
            made[source] = write(folder, *SOURCES[source])
        return made[source]

    return write_once


def found_in(written: Callable[[str], Path], folder: Path, case: Case) -> list[Finding]:
    source = written(case.source)
    if case.change is not None:
        source = replant(source, folder / "c", case.change)
    return proven(source, {**case.base, **case.rules}).findings


@pytest.mark.parametrize("fault", [*FAULTS, *OTHERS])
def test_a_fault_breaks_its_rule_and_no_other(
    tmp_path: Path, written: Callable[[str], Path], fault: str
) -> None:
    case = {**FAULTS, **OTHERS}[fault]
    findings = found_in(written, tmp_path, case)
    ignored = LISTED_ALONE if "parameters" in case.base else set()
    assert errors(findings) - ignored == {case.breaks}
    for finding in told(findings, case.breaks):
        assert finding.remedy
        assert finding.message.endswith(".")


@pytest.mark.parametrize("what", [*WARNED, *NOTED])
def test_what_is_no_error_is_reported_as_such(
    tmp_path: Path, written: Callable[[str], Path], what: str
) -> None:
    case = {**WARNED, **NOTED}[what]
    findings = found_in(written, tmp_path, case)
    assert errors(findings) == set()
    level = "warning" if what in WARNED else "note"
    assert {finding.level for finding in told(findings, case.breaks)} == {level}


def test_every_rule_is_broken_by_a_case() -> None:
    cases = {**FAULTS, **OTHERS, **WARNED, **NOTED}.values()
    of_names = {
        "loader.unread_name",
        "loader.tied_apart",
        "loader.undecided",
    }  # suites of derived maps
    assert {case.breaks for case in cases} == {rule.id for rule in LOADER_RULES} - of_names
    by_level = {rule.id: rule.level for rule in LOADER_RULES}
    assert {by_level[case.breaks] for case in WARNED.values()} == {Level.WARNING}
    assert {by_level[case.breaks] for case in NOTED.values()} == {Level.NOTE}


def test_every_rule_has_its_source() -> None:
    for rule in LOADER_RULES:
        assert RULES[rule.id] is rule
        assert rule.id.startswith("loader.")
        assert rule.source


def test_a_skipped_scale_says_what_it_leaves_unwritten(
    tmp_path: Path, written: Callable[[str], Path]
) -> None:
    case = FAULTS["7: a pattern for fused parameters that also skips scales"]
    findings = found_in(written, tmp_path, case)
    message = next(
        finding.message for finding in findings if finding.tensor == f"{ATTN}.wo_b.scale"
    )
    assert "the block_scale of layers.1.attn.wo_b, is skipped" in message
    assert "the pattern \\.(wq_b|wo_a|wo_b)\\.scale$ covers it" in message
    assert "model.layers.1.attn.wo_b.weight_scale_inv stays as the engine found it" in message


def test_a_wrong_write_names_both_sides_and_all_ranks(
    tmp_path: Path, written: Callable[[str], Path]
) -> None:
    findings = found_in(written, tmp_path, OTHERS["the neighbour's layer"])
    first = next(finding for finding in findings if finding.tensor == "layers.0.attn.wq_b.weight")
    assert first.module == "model.layers.1.attn.wq_b.weight"
    assert "ranks 0-1: it is layers.0.attn.wq_b (codes)" in first.message
    assert first.evidence["ranks"] == [0, 1]


# --------------------------------------------------------------------------------------------------
# Loader proofs over what `degarble convert` writes: fused for vLLM, decoded, quantised again.


@pytest.mark.parametrize(
    ("kind", "to", "options"),
    [
        ("official", "vllm", {}),
        ("nvfp4-full", "vllm", {}),
        ("compressed-tensors", "vllm", {}),
        ("v32-nvfp4", "vllm", {}),
        ("nvfp4-full", "bf16", {}),
        ("official", "fused-compressor", {}),
        ("v32", "fp8-block", {}),
        ("v32", "nvfp4", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conversions_load_every_element(
    tmp_path: Path, kind: str, to: str, options: dict[str, object]
) -> None:
    convert(source(kind), tmp_path / "out", to, options)
    proof = proven(tmp_path / "out", VLLM)
    assert errors(proof.findings) == set()
    assert proof.unread == {}
    assert proof.unwritten == {}
    require_claims(proof)


def test_unmeasured_input_scales_stay_unwritten(tmp_path: Path) -> None:
    convert(source("official"), tmp_path / "out", "nvfp4-lossless", {})
    proof = proven(tmp_path / "out", VLLM)
    assert errors(proof.findings) == {"loader.unwritten"}
    assert {name.rpartition(".")[2] for _, name in proof.unwritten} == {
        "w13_input_scale",
        "w2_input_scale",
    }


def test_a_backends_order_is_reported(tmp_path: Path) -> None:
    convert(source("nvfp4-experts"), tmp_path / "out", "vllm", {"backend": "trtllm"})
    findings = proven(tmp_path / "out", VLLM).findings
    assert any(
        "order of trtllm kernels" in finding.message for finding in told(findings, "loader.caveat")
    )


def test_a_row_short_of_a_fused_tensor_is_found(tmp_path: Path) -> None:
    name = "model.layers.1.attn.fused_wqa_wkv.weight"

    def shorten(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].view(torch.uint8)[:-1].view(torch.float8_e4m3fn).contiguous()

    folder = write(tmp_path / "whole", V4, "vllm")
    proof = proven(replant(folder, tmp_path / "short", shorten), VLLM)
    assert errors(proof.findings) == {"loader.shape"}
    (finding,) = told(proof.findings, "loader.shape")
    assert finding.tensor == name


def test_a_fused_tensor_that_is_skipped_is_reported_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", V4, "vllm")
    raw = {**VLLM, "skip": [r"layers\.1\.ffn\.experts\.w13_weight$"]}
    proof = proven(folder, raw)
    assert errors(proof.findings) == {"loader.skipped"}
    assert {name for _, name in proof.unwritten} == {"model.layers.1.ffn.experts.w13_weight"}
    (finding,) = told(proof.findings, "loader.skipped")
    assert "w13_weight stays as the engine found it" in finding.message


def test_fused_checkpoints_are_proven_against_their_own_engine_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", V4, "vllm")
    with pytest.raises(LayoutMismatch, match="prove the checkpoint that it was made from"):
        proven(folder, {"parameters": {"a": {"dtype": "U8", "shape": [1]}}})


# --------------------------------------------------------------------------------------------------
# docs/loader-maps.md: its examples are maps that load, and its table has every key.

PAGE = (Path(__file__).parents[4] / "docs" / "loader-maps.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
ROWS = dict(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", PAGE, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "c", V4, "official")


def proof_of(folder: Path, text: str) -> LoaderProof:
    with Checkpoint.open(folder) as checkpoint:
        return prove(checkpoint, loader_map_from_text(text, inventory_of(checkpoint)))


def test_there_are_two_examples() -> None:
    assert [text.splitlines()[0] for text in EXAMPLES] == [
        "name: vLLM with our patch",
        "name: my engine",
    ]


def test_the_first_example_loads(official: Path) -> None:
    small = EXAMPLES[0].replace("tp: 8", "tp: 2").replace("ep: 8", "ep: 2")
    proof = proof_of(official, small)
    assert errors(proof.findings) == set()
    assert {finding.rule for finding in proof.findings} == {"loader.dead_rule"}


def test_the_second_example_loads_every_element(official: Path) -> None:
    proof = proof_of(official, EXAMPLES[1])
    assert errors(proof.findings) == set()
    assert proof.summary()["elements unwritten"] == 0
    assert proof.summary()["tensors placed"] == 5 + V4.n_routed_experts
    require_claims(proof)


def test_the_table_has_every_key() -> None:
    keys = {key for row in ROWS for key in re.findall(r"\w+", row)}
    own = {"derived"}  # no file states it
    assert keys == {field.name for field in fields(LoaderMap)} - own | {"base"}


@pytest.mark.parametrize("made", [Convert, Elsewhere, Rename, Stack, Split, Fill])
def test_each_row_names_every_field(made: type) -> None:
    told = ROWS[f"`{made.__name__.lower()}`"]
    assert [field.name for field in fields(made) if f"`{field.name}`" not in told] == []


def test_the_fields_of_a_parameter_are_named() -> None:
    text = PAGE.split("A parameter has", 1)[1].split("\n\n", 1)[0]
    for field in fields(ListedParameter)[1:]:
        assert f"`{field.name}" in text


def test_the_limits_are_those_of_the_code() -> None:
    assert f"beyond {LONGEST_NAME} signs" in " ".join(PAGE.split())
