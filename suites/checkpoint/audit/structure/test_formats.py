"""Formats against promises, block sizes against shapes, partners and drafters among themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

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
    from pathlib import Path

    from torch import Tensor

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


def test_a_block_size_of_128_beside_16_is_an_error_that_quotes_both(
    tmp_path: Path, full: Path
) -> None:
    folder = replant(full, tmp_path / "c", same)
    reconfigure(
        folder, "config.json", lambda raw: raw["quantization_config"].update(group_size=128)
    )
    found = audited(folder)
    assert errors(found) == {"config.block_size_built"}
    (size,) = told(found, "config.block_size_built")
    assert "config.json: group_size 128" in size.message
    assert f"{HF}: group_size 16" in size.message
    assert "blocks of 16 by the shapes" in size.message
    assert size.evidence["shown"] == [16]


def test_a_config_of_32_beside_scales_of_16_columns_is_an_error(
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
def test_each_file_is_asked_for_its_block_size(
    tmp_path: Path, full: Path, file: str, rule: str
) -> None:
    folder = replant(full, tmp_path / "c", same)

    def change(raw: dict[str, Any]) -> None:
        raw["quantization_config" if file == "config.json" else "quantization"]["group_size"] = 32

    reconfigure(folder, file, change)
    (size,) = told(audited(folder), rule)
    assert f"{file}: group_size 32" in size.message


def test_a_module_turned_back_behind_the_configs_back(tmp_path: Path, full: Path) -> None:
    module = "model.layers.1.self_attn.q_b_proj"
    found = audited(replant(full, tmp_path / "c", turned_back(module)))
    (broken,) = told(found, "config.contradicts")
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


def test_two_configs_that_differ_are_told(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)
    excluded = "model.layers.1.self_attn.q_b_proj"
    reconfigure(folder, HF, lambda raw: raw["quantization"]["exclude_modules"].append(excluded))
    found = audited(folder)
    assert errors(found) == set()
    (apart,) = told(found, "config.two_statements")
    assert apart.module == excluded


def test_quantised_weights_without_a_word_are_an_error(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)
    reconfigure(folder, "config.json", lambda raw: raw.pop("quantization_config"))
    (folder / HF).unlink()
    (silent,) = told(audited(folder), "config.no_statement")
    assert "NVFP4" in silent.message
    reconfigure(folder, "config.json", lambda raw: raw.update(dtype="fp8"))
    assert told(audited(folder), "config.no_statement") == []


def test_ignore_beside_fp8_means_left_alone(experts: Path) -> None:
    found = audited(experts)
    (kept,) = told(found, "config.ignore_keeps_source")
    assert kept.level == "note"
    assert errors(found) == set()


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
    assert {each.layer for each in broken} == {V4.num_hidden_layers}
    assert {each.evidence["found"] for each in broken} == {"MXFP4"}
    assert {each.count for each in broken} == {V4.n_routed_experts}


def test_gate_and_up_in_two_formats_are_an_error(tmp_path: Path, experts: Path) -> None:
    change = turned_back("layers.1.ffn.experts.2.w1")
    found = audited(replant(experts, tmp_path / "c", change))
    assert {each.layer for each in told(found, "partners.format")} == {1}
    assert any("experts.2.w3 is NVFP4" in each.message for each in told(found, "partners.format"))


def test_partners_that_some_engines_fuse_are_a_warning(tmp_path: Path, full: Path) -> None:
    found = audited(replant(full, tmp_path / "c", turned_back("model.layers.1.self_attn.kv_proj")))
    (apart,) = told(found, "partners.format_fusable")
    assert (apart.level, apart.layer) == ("warning", 1)


def test_released_partners_of_two_formats_are_no_partners(tmp_path: Path) -> None:
    found = audited(write(tmp_path / "c", V32, "official"))
    assert told(found, "partners.format_fusable") == []


def test_a_weight_only_checkpoint_needs_no_input_scales(tmp_path: Path, full: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".input_scale")]:
            del tensors[name]

    folder = replant(full, tmp_path / "c", change)
    assert "scales.input_missing" in errors(audited(folder))
    for file, key in (("config.json", "quantization_config"), (HF, "quantization")):
        reconfigure(folder, file, lambda raw, k=key: raw[k].update(quant_algo="W4A16_NVFP4"))  # type: ignore[misc]
    assert errors(audited(folder)) == set()


def test_words_that_nobody_can_judge_are_noted(tmp_path: Path, full: Path) -> None:
    folder = replant(full, tmp_path / "c", same)
    reconfigure(
        folder, "config.json", lambda raw: raw["quantization_config"].update(quant_algo="NEW_ALGO")
    )
    (unread,) = told(audited(folder), "config.unread_statement")
    assert "NEW_ALGO" in unread.message
