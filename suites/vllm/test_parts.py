"""Options, the choice of kernels and the messages at a start."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.model.recipes import ACTIVATION_FORMATS, WEIGHT_FORMATS
from degarble.harness.vllm import log_messages, parts
from degarble.harness.vllm.parts import OURS, PARTS, PluginOptions, read_options
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import TARGETS

if TYPE_CHECKING:
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Options are read strictly: what goes unheard would be a wrong start.


def test_no_option_is_degarble_everywhere() -> None:
    options = read_options({"another plugin": 1})
    assert options == PluginOptions()
    assert {options.side(part) for part in PARTS} == {OURS}


def test_options_are_read() -> None:
    said = {"parts": {"attend": "vllm"}, "nvfp4_activations": "bf16", "ledger": "l.yaml"}
    options = read_options({"degarble": said})
    assert (options.side("attend"), options.side("rows")) == ("vllm", "degarble")
    assert (options.nvfp4_activations, options.ledger, options.told) == ("bf16", "l.yaml", None)


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ([], InvalidArgument, "expected a mapping"),
        ({"degarble": 3}, InvalidArgument, "expected a mapping"),
        ({"degarble": {"part": {}}}, UnknownName, "Did you mean parts"),
        ({"degarble": {"parts": []}}, InvalidArgument, "a mapping of parts"),
        ({"degarble": {"parts": {"atend": "vllm"}}}, UnknownName, "Did you mean attend"),
        ({"degarble": {"parts": {"attend": "torch"}}}, UnknownName, "degarble or vllm"),
        ({"degarble": {"nvfp4_activations": "fp8"}}, UnknownName, "bf16 or quantised"),
        ({"degarble": {"ledger": 3}}, InvalidArgument, "expected a path"),
    ],
)
def test_the_rest_is_refused_by_name(said: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_options(said)


# --------------------------------------------------------------------------------------------------
# A part runs our kernel, or vLLM's own if configured so, or the start is refused.

PARTS_OURS = PluginOptions()


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
    assert {target.capability: target.name for target in TARGETS.values()} == dict(parts.TARGETS)


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
    kernel = parts.kernel_of(part, form, target, PARTS_OURS)
    assert kernel is not None
    assert kernel.module == module


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
        parts.kernel_of(part, form, target, PARTS_OURS)
    assert f'"{part}": "vllm"' in refused.value.remedy
    plugin_options = replace(PARTS_OURS, parts={part: "vllm"})
    assert parts.kernel_of(part, form, target, plugin_options) is None


def test_what_never_ran_says_so() -> None:
    kernel = parts.kernel_of("linear", parts.NVFP4, "sm_100a", PARTS_OURS)
    assert kernel is not None
    line = parts.ours("m", "linear", parts.NVFP4, kernel, "by rows").line()
    assert line == "m linear [NVFP4]: degarble kernels: sm100_gemm_nvfp4 (by rows; never run)"


def test_unknown_parts_and_gpus_are_refused() -> None:
    with pytest.raises(UnknownName, match="part"):
        parts.kernel_of("softmax", "", "sm_90a", PARTS_OURS)
    with pytest.raises(UnknownName, match=r"12\.0"):
        parts.target_of((12, 0))


def test_graphs_are_as_low_as_the_lowest() -> None:
    always = parts.KERNELS["linear", parts.BF16]
    never = always._replace(graphs="NEVER")
    assert parts.graph_level([always, None], "ALWAYS") == "ALWAYS"
    assert parts.graph_level([always, None], "UNIFORM_BATCH") == "UNIFORM_BATCH"
    assert parts.graph_level([always, never], "ALWAYS") == "NEVER"


# --------------------------------------------------------------------------------------------------
# Banner, lines and records: what a start says of itself, whole or not at all.

BANNER = log_messages.Banner(
    manifest="manifest 3a28", recipe="8 modules BF16", target="sm_90a",
    kernels=("sm90_gemm_bf16",), graphs="ALWAYS", proof="1 ranks, 119 tensors placed",
    known=("attn.attend DIFFERS until 2026-12-01: slow (issue 7)",), commit="commit 1a2b",
    version="0.1.0", vllm="0.33.0",
)  # fmt: skip
KERNEL = parts.KERNELS["linear", parts.BF16]
RUNNING = [
    parts.ours("model.layers.0.attn.wq_b", "linear", "BF16", KERNEL, "by rows"),
    parts.theirs("model.layers.0.attn", "attend", "fp8_ds_mla"),
]


def test_the_banner_says_code_checkpoint_kernels_and_known_failures() -> None:
    assert BANNER.lines() == [
        "degarble 0.1.0 (commit 1a2b) in vLLM 0.33.0 on sm_90a",
        "checkpoint manifest 3a28, recipe 8 modules BF16",
        "loader proof: 1 ranks, 119 tensors placed",
        "kernels: sm90_gemm_bf16; CUDA graphs: ALWAYS",
        "known failure: attn.attend DIFFERS until 2026-12-01: slow (issue 7)",
    ]


def test_every_part_has_a_line_and_says_whose_it_is() -> None:
    assert log_messages.lines(RUNNING) == [
        "2 parts: 1 by degarble, 1 by vllm",
        "model.layers.0.attn.wq_b linear [BF16]: degarble kernels: sm90_gemm_bf16 (by rows)",
        "model.layers.0.attn attend [fp8_ds_mla]: vllm its own (asked for)",
    ]


def test_records_become_labels(tmp_path: Path) -> None:
    folder = tmp_path / "start"
    log_messages.leave(folder, 3, BANNER, RUNNING)
    log_messages.leave(folder, 0, BANNER, RUNNING[:1])
    found = log_messages.read_records(folder)
    assert found == {0: RUNNING[:1], 3: RUNNING}
    label = log_messages.labels(3, found[3])[1]
    assert label["rank"] == "3"
    assert (label["part"], label["by"], label["kernel"]) == ("attend", "vllm", "its own")
    assert [path.suffix for path in folder.iterdir()] == [".json"] * 2


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "rank": 0}'])
def test_records_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(UnreadableFile, match=r"rank-0\.json"):
        log_messages.read_records(tmp_path)


def test_a_record_holds_no_path(tmp_path: Path) -> None:
    path = log_messages.leave(tmp_path, 0, BANNER, RUNNING)
    assert str(tmp_path) not in json.dumps(json.loads(path.read_text()))


def test_commit_and_folder() -> None:
    assert log_messages.commit_of("0.1.0+g1a2b3c") == "commit 1a2b3c"
    assert log_messages.commit_of("0.1.0") == log_messages.NO_COMMIT
    assert log_messages.folder_of("../x1", None).name.endswith("-x1")
    assert str(log_messages.folder_of("x", "asked")) == "asked"
