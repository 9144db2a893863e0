"""A part runs our kernel, or vLLM's own because somebody said so, or the start is refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.model.recipes import ACTIVATION_FORMATS, WEIGHT_FORMATS
from degarble.harness.vllm import parts
from degarble.harness.vllm.parts import PARTS, PluginOptions
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import TARGETS

OURS = PluginOptions()


def test_every_kernel_of_the_table_is_in_the_tree() -> None:
    for (part, form), kernel in (*parts.KERNELS.items(), *parts.BLACKWELL.items()):
        assert part in PARTS
        for module in kernel.module.split(", "):
            assert find_spec(module_of(module)), (part, form)
        assert set(kernel.shown_on) <= set(kernel.targets) <= set(TARGETS)
        assert kernel.graphs in parts.GRAPHS
        assert "sm_100a" not in kernel.shown_on  # never run on one: docs/vllm.md says so


def test_formats_are_those_of_recipes() -> None:
    stored = {parts.NVFP4, parts.BF16, *parts.FP8}
    assert stored <= set(WEIGHT_FORMATS)
    assert "BF16" in ACTIVATION_FORMATS


def test_targets_are_those_of_kernels() -> None:
    assert {each.capability: each.name for each in TARGETS.values()} == dict(parts.TARGETS)


@pytest.mark.parametrize(
    ("part", "form", "target", "module"),
    [
        ("linear", parts.BF16, "sm_90a", "sm90_gemm_bf16"),
        ("linear", parts.FP8_E8M0, "sm_90a", "sm90_gemm_fp8_block"),
        ("linear", parts.NVFP4, "sm_90a", "sm90_gemm_nvfp4"),
        ("linear", parts.NVFP4_A16, "sm_100a", "sm90_gemm_w4a16"),
        ("linear", parts.BF16, "sm_100a", "sm100_gemm_bf16"),
        ("linear", parts.NVFP4, "sm_100a", "sm100_gemm_nvfp4"),
        ("linear", parts.FP8_F32, "sm_100a", "sm100_gemm_fp8_block"),
        ("router", "sqrtsoftplus", "sm_100a", "simt_router"),
    ],
)
def test_our_kernel_is_chosen(part: str, form: str, target: str, module: str) -> None:
    found = parts.kernel_of(part, form, target, OURS)
    assert found is not None
    assert found.module == module


@pytest.mark.parametrize(
    ("part", "form", "target", "words"),
    [
        ("linear", "MXFP4", "sm_90a", "degarble has one for BF16 or "),
        ("experts", parts.NVFP4, "sm_100a", "degarble has simt_moe_rows, sm90_moe_nvfp4 on sm_90a"),
        ("compressor", parts.FP8_CACHE, "sm_100a", "has simt_paged_pool, simt_kv_write on sm_90a"),
        ("compressor", "bfloat16", "sm_90a", "degarble has one for fp8_ds_mla"),
        ("attend", "bfloat16", "sm_90a", "degarble has one for fp8_ds_mla"),
        ("experts", "MXFP4", "sm_90a", "degarble has one for NVFP4"),
        ("act_quant", parts.FP8_E8M0, "sm_90a", "degarble has one for NVFP4"),
    ],
)
def test_what_has_no_kernel_is_refused_with_the_way_out(
    part: str, form: str, target: str, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        parts.kernel_of(part, form, target, OURS)
    assert f'"{part}": "vllm"' in refused.value.remedy
    asked = replace(OURS, parts={part: "vllm"})
    assert parts.kernel_of(part, form, target, asked) is None


def test_what_never_ran_says_so() -> None:
    kernel = parts.kernel_of("linear", parts.NVFP4, "sm_100a", OURS)
    assert kernel is not None
    line = parts.ours("m", "linear", parts.NVFP4, kernel, "by rows").line()
    assert line == "m linear [NVFP4]: degarble kernels: sm100_gemm_nvfp4 (by rows; never run)"


def test_unknown_parts_and_gpus_are_refused() -> None:
    with pytest.raises(UnknownName, match="part"):
        parts.kernel_of("softmax", "", "sm_90a", OURS)
    with pytest.raises(UnknownName, match=r"12\.0"):
        parts.target_of((12, 0))


def test_graphs_are_as_low_as_the_lowest() -> None:
    always = parts.KERNELS["linear", parts.BF16]
    never = always._replace(graphs="NEVER")
    assert parts.graph_level([always, None], "ALWAYS") == "ALWAYS"
    assert parts.graph_level([always, None], "UNIFORM_BATCH") == "UNIFORM_BATCH"
    assert parts.graph_level([always, never], "ALWAYS") == "NEVER"
