"""Check single modules: inventory, shapes, formats as stated, partners and scalar scales."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.checkpoint.audit.structure.inventory import (
    Inventory,
    ModuleCheck,
    ModuleChecks,
    check_fused,
    stored_recipe,
    take_inventory,
)
from degarble.harness.checkpoint.read.types import DTYPE_BITS, TensorEntry
from degarble.harness.checkpoint.view.modules import ModuleTable
from degarble.harness.checkpoint.view.view import Checkpoint, logical_names
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.structure_cases import (
    V4,
    V32,
    audited,
    errors,
    reconfigure,
    replant,
    told,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Single and fused modules against the parameters that they should hold.

Seen = dict[str, tuple[str, tuple[int, ...]]]
WQ_A = parameter_named(V4, "layers.1.attn.wq_a")  # 128 x 128
W2 = parameter_named(V4, "layers.1.ffn.experts.0.w2")  # 128 x 256
NORM = parameter_named(V4, "layers.1.attn.q_norm")


def judged(tensors: Seen, name: str = "layers.1.attn.wq_a") -> ModuleCheck:
    entries = {
        f"m{suffix}": TensorEntry(
            f"m{suffix}", dtype, shape, Path("f"), 0, prod(shape) * DTYPE_BITS[dtype] // 8
        )
        for suffix, (dtype, shape) in tensors.items()
    }
    return ModuleChecks(ModuleTable(entries)).check(parameter_named(V4, name), "m")


NVFP4: Seen = {
    ".weight": ("U8", (128, 128)),
    ".weight_scale": ("F8_E4M3", (128, 16)),
    ".weight_scale_2": ("F32", ()),
    ".input_scale": ("F32", ()),
}


@pytest.mark.parametrize(
    ("tensors", "weight"),
    [
        ({".weight": ("BF16", (128, 256))}, "BF16"),
        ({".weight": ("F32", (128, 256))}, "BF16"),
        (NVFP4, "NVFP4"),
        ({**NVFP4, ".weight_scale_2": ("F32", (1,))}, "NVFP4"),
        ({".weight": ("I8", (128, 128)), ".scale": ("F8_E8M0", (128, 8))}, "MXFP4"),
        ({".weight": ("U8", (128, 128)), ".weight_scale": ("U8", (128, 8))}, "MXFP4"),
        (
            {".weight": ("F8_E4M3", (128, 256)), ".weight_scale_inv": ("F32", (1, 2))},
            "FP8_128X128_F32",
        ),
        ({".weight": ("F8_E4M3", (128, 256)), ".scale": ("F8_E8M0", (1, 2))}, "FP8_128X128_UE8M0"),
        (
            {
                ".weight_packed": ("U8", (128, 128)),
                ".weight_scale": ("F8_E4M3", (128, 16)),
                ".weight_global_scale": ("F32", (1,)),
            },
            "NVFP4",
        ),
    ],
)
def test_every_known_form_is_recognised_without_an_issue(tensors: Seen, weight: str) -> None:
    check = judged(tensors, W2.name)
    assert (check.weight, check.issues) == (weight, [])
    assert check.has_input_scale == (".input_scale" in tensors)


@pytest.mark.parametrize(
    ("tensors", "rule", "words"),
    [
        ({".weight": ("BF16", (256, 128))}, "structure.shape", "expected [128, 256]"),
        ({".weight": ("F16", (128, 256))}, "structure.narrowed", "published as BF16"),
        ({".weight": ("I32", (128, 256))}, "structure.dtype", "expected BF16"),
        ({**NVFP4, ".weight": ("U8", (128, 64))}, "structure.shape", "two codes a byte"),
        ({**NVFP4, ".weight_scale": ("F8_E4M3", (2048,))}, "scales.rank", "2 dimensions expected"),
        ({**NVFP4, ".weight_scale": ("F32", (128, 16))}, "scales.dtype", "F8_E4M3 expected"),
        ({**NVFP4, ".weight_scale": ("F8_E4M3", (128, 8))}, "scales.from_packed", "16 bytes"),
        ({**NVFP4, ".weight_scale": ("F8_E4M3", (128, 2))}, "scales.block", "a 1x128 block"),
        ({**NVFP4, ".weight_scale_2": ("F32", (128,))}, "scales.rank", "one number expected"),
        ({**NVFP4, ".weight_scale_2": ("BF16", ())}, "scales.dtype", "read its bits as fp32"),
        ({**NVFP4, ".input_scale": ("F16", ())}, "scales.dtype", "F32 expected"),
        (
            {".weight": ("F8_E4M3", (128, 256)), ".scale": ("F8_E4M3", (1, 2))},
            "scales.dtype",
            "F32 or BF16 or F8_E8M0 or U8 expected",
        ),
        (
            {
                ".weight": ("F8_E4M3", (128, 256)),
                ".scale": ("F32", (1, 2)),
                ".weight_scale_2": ("F32", ()),
            },
            "scales.left_over",
            "which has none",
        ),
        (
            {
                ".weight": ("F8_E4M3", (128, 256)),
                ".scale": ("F32", (1, 2)),
                ".weight_scale_inv": ("F32", (1, 2)),
            },
            "structure.unreadable_module",
            "two tensors for one part",
        ),
        ({".weight": ("F8_E5M2", (128, 256))}, "structure.unreadable_module", "no known format"),
    ],
)
def test_every_other_form_breaks_a_rule(tensors: Seen, rule: str, words: str) -> None:
    issues = [issue for issue in judged(tensors, W2.name).issues if issue.rule.id == rule]
    assert issues, judged(tensors, W2.name).issues
    assert words in issues[0].text


def test_scales_that_were_padded_for_a_kernel_are_recognised() -> None:
    name = "layers.1.attn.indexer.weights_proj"  # 4 x 128
    tensors: Seen = {**NVFP4, ".weight": ("U8", (4, 64)), ".weight_scale": ("F8_E4M3", (128, 8))}
    (issue,) = judged(tensors, name).issues
    assert issue.rule.id == "scales.block"
    assert "128x4 layout of a kernel" in issue.text


def test_modules_that_are_alike_are_judged_once() -> None:
    entries = {
        f"{m}.weight": TensorEntry(f"{m}.weight", "BF16", (128, 128), Path("f"), 0, 32768)
        for m in ("a", "b")
    }
    checks = ModuleChecks(ModuleTable(entries))
    assert checks.check(WQ_A, "a") is checks.check(WQ_A, "b")
    assert checks.check(NORM, "a") is not checks.check(WQ_A, "a")


def test_a_fused_module_is_compared_with_all_its_members(tmp_path: Path) -> None:
    healthy = write(tmp_path / "a", V4, "vllm")
    module = "model.layers.1.attn.fused_wqa_wkv"

    def shorter(tensors: dict[str, object]) -> None:
        for suffix in (".weight", ".weight_scale_inv"):
            tensor = tensors[module + suffix]
            rows = tensor.shape[0] - (128 if suffix == ".weight" else 1)  # type: ignore[attr-defined]
            tensors[module + suffix] = tensor[:rows].clone()  # type: ignore[index]

    folder = replant(healthy, tmp_path / "b", shorter)  # type: ignore[arg-type]
    members = [parameter_named(V4, f"layers.1.attn.{name}") for name in ("wq_a", "wkv")]
    for path, rules in ((healthy, set()), (folder, {"structure.shape"})):
        with Checkpoint.open(path) as checkpoint:
            names = logical_names(V4, checkpoint.table)
            assert names is not None
            check = check_fused(names, module, members)
            assert {issue.rule.id for issue in check.issues} == rules
            assert check.weight == "FP8_128X128_UE8M0"


# --------------------------------------------------------------------------------------------------
# Formats against promises, block sizes against shapes, partners and drafters among themselves.

if TYPE_CHECKING:
    Tensors = dict[str, Tensor]

HF = "hf_quant_config.json"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("healthy") / "c", V4, "nvfp4-experts")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("healthy") / "c", V4, "nvfp4-full")


def same(tensors: Tensors) -> None:
    del tensors


def turned_back(*modules: str) -> Callable[[Tensors], None]:
    """Replace NVFP4 or FP8 modules by BF16 values, as if somebody had dequantised them."""

    def change(tensors: Tensors) -> None:
        for module in modules:
            codes = tensors[f"{module}.weight"]
            columns = codes.shape[1] * (2 if codes.dtype in (torch.uint8, torch.int8) else 1)
            for name in [name for name in tensors if name.startswith(f"{module}.")]:
                del tensors[name]
            tensors[f"{module}.weight"] = torch.ones(codes.shape[0], columns).bfloat16()

    return change


def test_block_sizes_of_128_and_16_together_are_an_error_that_quotes_both(
    tmp_path: Path, full: Path
) -> None:
    folder = replant(full, tmp_path / "c", same)
    reconfigure(
        folder, "config.json", lambda raw: raw["quantization_config"].update(group_size=128)
    )
    findings = audited(folder)
    assert errors(findings) == {"config.block_size_built"}
    (size,) = told(findings, "config.block_size_built")
    assert "config.json: group_size 128" in size.message
    assert f"{HF}: group_size 16" in size.message
    assert "blocks of 16 by the shapes" in size.message
    assert size.evidence["shown"] == [16]


def test_a_config_of_32_with_scales_of_16_columns_is_an_error(
    tmp_path: Path, experts: Path
) -> None:
    """In config.json only: engines do not read the other file where this one states a format."""
    folder = replant(experts, tmp_path / "c", same)
    reconfigure(folder, "config.json", lambda raw: raw["quantization_config"].update(group_size=32))
    assert errors(audited(folder)) == {"config.block_size_built"}


def test_groups_are_believed_where_nothing_else_states_a_size(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)

    def change(raw: dict[str, Any]) -> None:
        stated = raw["quantization_config"]
        stated["config_groups"]["group_0"]["weights"]["group_size"] = 32

    reconfigure(folder, "config.json", change)
    assert errors(audited(folder)) == set()
    assert told(audited(folder), "config.block_size")
    reconfigure(folder, "config.json", lambda raw: raw["quantization_config"].pop("group_size"))
    assert "config.block_size_built" in errors(audited(folder))


@pytest.mark.parametrize(
    ("file", "rule"), [("config.json", "config.block_size_built"), (HF, "config.block_size")]
)
def test_each_config_file_gives_its_block_size(
    tmp_path: Path, full: Path, file: str, rule: str
) -> None:
    folder = replant(full, tmp_path / "c", same)

    def change(raw: dict[str, Any]) -> None:
        raw["quantization_config" if file == "config.json" else "quantization"]["group_size"] = 32

    reconfigure(folder, file, change)
    (size,) = told(audited(folder), rule)
    assert f"{file}: group_size 32" in size.message


def test_a_module_in_bf16_that_the_config_does_not_list(tmp_path: Path, full: Path) -> None:
    module = "model.layers.1.self_attn.q_b_proj"
    findings = audited(replant(full, tmp_path / "c", turned_back(module)))
    (broken,) = told(findings, "config.contradicts")
    assert (broken.module, broken.layer, broken.level) == (module, 1, "error")
    assert (broken.evidence["found"], broken.evidence["promised"]) == ("BF16", "NVFP4")


def test_a_module_that_is_excluded_must_not_be_quantised(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)
    pattern = "model.layers.1.self_attn.q_b*"
    for file, key, names in (
        ("config.json", "quantization_config", "ignore"),
        (HF, "quantization", "exclude_modules"),
    ):
        reconfigure(folder, file, lambda raw, k=key, n=names: raw[k][n].append(pattern))  # type: ignore[misc]
    (broken,) = told(audited(folder), "config.contradicts")
    assert (broken.evidence["found"], broken.evidence["promised"]) == ("NVFP4", "BF16")


def test_two_configs_that_differ_are_reported(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)
    excluded = "model.layers.1.self_attn.q_b_proj"
    reconfigure(folder, HF, lambda raw: raw["quantization"]["exclude_modules"].append(excluded))
    findings = audited(folder)
    assert errors(findings) == set()
    (apart,) = told(findings, "config.two_statements")
    assert apart.module == excluded


def test_quantised_weights_without_a_word_are_an_error(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)
    reconfigure(folder, "config.json", lambda raw: raw.pop("quantization_config"))
    (folder / HF).unlink()
    (silent,) = told(audited(folder), "config.no_statement")
    assert "NVFP4" in silent.message
    reconfigure(folder, "config.json", lambda raw: raw.update(dtype="fp8"))
    assert told(audited(folder), "config.no_statement") == []


def test_ignore_together_with_fp8_means_left_alone(experts: Path) -> None:
    findings = audited(experts)
    (kept,) = told(findings, "config.ignore_keeps_source")
    assert kept.level == "note"
    assert errors(findings) == set()


def test_the_drafters_mxfp4_experts_are_a_trap_worth_a_warning(experts: Path) -> None:
    (trap,) = told(audited(experts), "config.drafter_experts")
    assert trap.level == "warning"
    assert trap.evidence == {"drafter": ["MXFP4"], "main": ["NVFP4"]}


def test_a_config_that_promises_nvfp4_to_the_drafter_is_wrong(
    tmp_path: Path, experts: Path
) -> None:
    folder = replant(experts, tmp_path / "c", same)

    def change(raw: dict[str, Any]) -> None:
        ignored = raw["quantization_config"]["ignore"]
        ignored[:] = [each for each in ignored if not each.startswith("mtp")]

    reconfigure(folder, "config.json", change)
    broken = told(audited(folder), "config.contradicts")
    assert {finding.layer for finding in broken} == {V4.num_hidden_layers}
    assert {finding.evidence["found"] for finding in broken} == {"MXFP4"}
    assert {finding.count for finding in broken} == {V4.n_routed_experts}


def test_gate_and_up_in_two_formats_are_an_error(tmp_path: Path, experts: Path) -> None:
    change = turned_back("layers.1.ffn.experts.2.w1")
    findings = audited(replant(experts, tmp_path / "c", change))
    assert {finding.layer for finding in told(findings, "partners.format")} == {1}
    assert any(
        "experts.2.w3 is NVFP4" in finding.message for finding in told(findings, "partners.format")
    )


def test_partners_that_some_engines_fuse_are_a_warning(tmp_path: Path, full: Path) -> None:
    findings = audited(
        replant(full, tmp_path / "c", turned_back("model.layers.1.self_attn.kv_proj"))
    )
    (apart,) = told(findings, "partners.format_fusable")
    assert (apart.level, apart.layer) == ("warning", 1)


def test_released_partners_of_two_formats_are_no_partners(tmp_path: Path) -> None:
    findings = audited(write(tmp_path / "c", V32, "official"))
    assert told(findings, "partners.format_fusable") == []


def test_a_weight_only_checkpoint_needs_no_input_scales(tmp_path: Path, full: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".input_scale")]:
            del tensors[name]

    folder = replant(full, tmp_path / "c", change)
    assert "scales.input_missing" in errors(audited(folder))
    for file, key in (("config.json", "quantization_config"), (HF, "quantization")):
        reconfigure(folder, file, lambda raw, k=key: raw[k].update(quant_algo="W4A16_NVFP4"))  # type: ignore[misc]
    assert errors(audited(folder)) == set()


def test_unknown_words_are_noted(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)
    reconfigure(
        folder, "config.json", lambda raw: raw["quantization_config"].update(quant_algo="NEW_ALGO")
    )
    (unread,) = told(audited(folder), "config.unread_statement")
    assert "NEW_ALGO" in unread.message


# --------------------------------------------------------------------------------------------------
# Parameters are paired with modules, and the recipe of a checkpoint is read off them.

CASES = [
    (V4, "official"),
    (V4, "nvfp4-experts"),
    (V4, "nvfp4-full"),
    (V4, "compressed-tensors"),
    (V4, "vllm"),
    (V32, "official"),
    (V32, "nvfp4-full"),
    (V32, "vllm"),
]


def inventory_of(folder: Path) -> Inventory:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.names is not None
        return take_inventory(checkpoint.names)


@pytest.mark.parametrize(("config", "name"), CASES)
def test_the_stored_recipe_is_the_one_that_wrote_it(
    tmp_path: Path, config: Config, name: str
) -> None:
    inventory = inventory_of(write(tmp_path / "c", config, name))
    layout = layout_named(name, config)
    written, stored = layout.recipe_for(config), stored_recipe(inventory)
    there = [each for each in parameters(config) if not layout.omits(each, config)]
    assert [stored_parameter.parameter for stored_parameter in inventory.stored] != []
    assert {stored_parameter.parameter.name for stored_parameter in inventory.stored} == {
        each.name for each in there
    }
    assert inventory.missing == []
    for parameter in there:
        if parameter.kind is Kind.LINEAR:
            assert stored.format_of(parameter).weight == written.format_of(parameter).weight
            if written.format_of(parameter).weight == "NVFP4":
                assert stored.format_of(parameter) == written.format_of(parameter)


def test_a_block_that_differs_has_rules_of_its_own(tmp_path: Path) -> None:
    healthy = write(tmp_path / "a", V4, "nvfp4-full")
    changed = turned_back("model.layers.1.self_attn.o_b_proj")
    recipe = stored_recipe(inventory_of(replant(healthy, tmp_path / "b", changed)))
    found = {
        parameter.name: recipe.format_of(parameter).weight
        for parameter in parameters(V4)
        if parameter.row.name == "attn.wo_b" and parameter.block and not parameter.block.is_drafter
    }
    assert found == {
        "layers.0.attn.wo_b": "NVFP4",
        "layers.1.attn.wo_b": "BF16",
        "layers.2.attn.wo_b": "NVFP4",
    }
    assert len(recipe.rules) < 60


def test_suffixes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    inventory = inventory_of(write(tmp_path / "c", V32, "compressed-tensors"))
    assert inventory.layout.suffixes == "compressed-tensors"
    assert inventory_of(write(tmp_path / "d", V32, "nvfp4-full")).layout.suffixes == "huggingface"


def test_drafters_are_numbered_after_the_decoder(tmp_path: Path) -> None:
    inventory = inventory_of(write(tmp_path / "c", V4, "official"))
    layers = {inventory.layer_of(parameter.parameter) for parameter in inventory.stored}
    assert layers == {None, 0, 1, 2, 3}
    assert inventory.layer_of(inventory.by_name["mtp.0.attn.wq_a"].parameter) == 3


# --------------------------------------------------------------------------------------------------
# Scalar scales: shared by partners, in modules of their own and in stacks; no factor inside.


@pytest.mark.parametrize(
    ("name", "rule", "level"),
    [
        ("mlp.experts.3.up_proj", "partners.tensor_scale", "error"),
        ("mlp.shared_experts.up_proj", "partners.tensor_scale", "error"),
        ("self_attn.kv_proj", "partners.tensor_scale_fusable", "warning"),
        ("self_attn.compressor.gate_proj", "partners.tensor_scale_fusable", "warning"),
        ("self_attn.compressor.indexer.gate_proj", "partners.tensor_scale_fusable", "warning"),
    ],
)
def test_a_partner_with_its_own_scale_is_reported(
    tmp_path: Path, full: Path, name: str, rule: str, level: str
) -> None:
    scale = f"model.layers.1.{name}.weight_scale_2"

    def change(tensors: Tensors) -> None:
        tensors[scale] = tensors[scale] * 0.5

    (finding,) = told(audited(replant(full, tmp_path / "c", change)), rule)
    assert (finding.level, finding.layer) == (level, 1)
    assert finding.evidence["ratio"] == pytest.approx(2)
    assert scale in finding.message


@pytest.mark.parametrize("suffix", ["weight_scale_2", "input_scale"])
def test_a_stack_is_compared_column_by_column(tmp_path: Path, suffix: str) -> None:
    healthy = write(tmp_path / "a", V4, "vllm", "nvfp4-experts")
    name = f"model.layers.1.ffn.experts.w13_{suffix}"

    def change(tensors: Tensors) -> None:
        tensors[name][2, 1] *= 3

    findings = audited(replant(healthy, tmp_path / "b", change))
    rule = "partners.tensor_scale" if suffix == "weight_scale_2" else "partners.input_scale"
    (apart,) = told(findings, rule)
    assert f"{name}[2, 1]" in apart.message
    assert apart.evidence["ratio"] == pytest.approx(3)


def test_all_scales_with_their_input_scale_inside_are_reported(tmp_path: Path) -> None:
    config = replace(V4, n_routed_experts=16)
    healthy = write(tmp_path / "a", config, "nvfp4-full")
    assert errors(audited(healthy)) == set()

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.endswith(".weight_scale_2"):
                inputs = tensors[name.replace("weight_scale_2", "input_scale")]
                tensors[name] = tensors[name] * inputs

    findings = told(audited(replant(healthy, tmp_path / "b", change)), "scales.input_scale_inside")
    rows = {
        finding.tensor.split(".")[-2]
        for finding in findings
        if finding.tensor and "experts." in finding.tensor
    }
    assert rows == {"gate_proj", "up_proj", "down_proj"}
    # Of the dead experts, whose scales are tiny anyway, nothing is said.
    assert 3 * 3 * 12 < sum(finding.count for finding in findings) <= 3 * 3 * 16


def test_a_small_scale_that_no_input_scale_explains_is_another_rules_business(
    tmp_path: Path, full: Path
) -> None:
    name = "model.layers.1.mlp.experts.0.down_proj.weight_scale_2"

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name] * 1e-20

    assert told(audited(replant(full, tmp_path / "c", change)), "scales.input_scale_inside") == []


def test_divisors_are_read_as_divisors(tmp_path: Path) -> None:
    healthy = write(tmp_path / "a", V32, "compressed-tensors")
    assert errors(audited(healthy)) == set()
    module = "model.layers.1.mlp.experts.0.down_proj"

    def change(tensors: Tensors) -> None:
        inputs = 1 / tensors[f"{module}.input_global_scale"]
        tensors[f"{module}.weight_global_scale"] = tensors[f"{module}.weight_global_scale"] / inputs

    (inside,) = told(audited(replant(healthy, tmp_path / "b", change)), "scales.input_scale_inside")
    assert inside.module == module
