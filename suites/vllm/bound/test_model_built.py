"""vLLM's real DeepSeek-V4 with the plugin: built, loaded whole, and it says what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from degarble.suites.vllm.built_model import write_served  # noqa: PLC0415  needs vLLM

    return write_served(tmp_path_factory.mktemp("built") / "c")


def built(folder: Path, *dropped: str) -> Any:
    command = [sys.executable, "-m", "degarble.suites.vllm.built_model"]
    done = subprocess.run(
        [*command, str(folder), *dropped], capture_output=True, text=True, check=True,
        timeout=HANG_SECONDS, env=os.environ | {"VLLM_PLUGINS": "degarble"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_built_loaded_and_logged(folder: Path) -> None:
    found = built(folder)
    assert (found["model"], found["attention"]) == ("DegarbleDeepseekV4", ["DegarbleAttention"])
    assert found["loaded"] == found["parameters"] > 100
    assert found["layers"] == ["DegarbleDecoderLayer"]
    assert "DegarbleIndexer" in found["indexers"]
    served = {"DegarbleCompressor 4 512", "DegarbleCompressor 4 128", "DegarbleCompressor 128 512"}
    assert set(found["compressors"]) == served
    assert found["records"] == ["rank-0.json"]
    assert found["banner"][0].endswith("in vLLM 0.33.0 on sm_90a")
    assert "recipe 24 modules BF16, 6 modules NVFP4" in found["banner"][1]
    assert found["banner"][2].endswith(" 0 elements unwritten")
    running = found["running"]
    for line in (
        "model.layers.0.attn.fused_wqa_wkv linear [BF16]: degarble kernels: sm90_gemm_bf16 ",
        "model.layers.0.attn.wo_b linear [NVFP4]: degarble kernels: sm90_gemm_nvfp4 ",
        "model.layers.0.attn.wo_b act_quant [NVFP4]: degarble kernels: simt_quantise_nvfp4",
        "model.layers.0.attn.wo_a o_proj [BF16]: degarble kernels: simt_inverse_rope, ",
        "model.layers.0.attn attend [fp8_ds_mla]: degarble kernels: sm90_sparse_attention",
        "model.layers.1.attn indexer [fp8_ds_mla]: degarble kernels: simt_indexer_operand, ",
        "model.layers.0 mhc [BF16]: degarble kernels: simt_mhc_project, ",
        "model.layers.0.ffn.gate gate [BF16]: degarble kernels: sm90_gemm_grouped",
        "model.layers.1.attn projections [BF16]: degarble kernels: sm90_gemm_grouped, ",
        "model head [BF16]: degarble kernels: simt_rmsnorm, sm90_gemm_grouped",
        "model.layers.0.ffn.gate router [sqrtsoftplus]: degarble kernels: simt_router",
        "model.layers.0.ffn.shared_experts act [BF16]: degarble kernels: simt_quantise_nvfp4",
        "model.layers.2.attn compressor [fp8_ds_mla]: degarble kernels: simt_paged_pool, ",
        "model.layers.2.ffn.experts experts [NVFP4]: degarble kernels: simt_moe_",
    ):
        assert sum(each.startswith(line) for each in running) == 1, line


def test_two_ranks_hold_their_shares(folder: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "degarble.suites.vllm.built_model", str(folder)]
    running = [
        subprocess.Popen(
            [*line, "--rank", str(rank), "--store", str(tmp_path / "met")],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"VLLM_PLUGINS": "degarble"},
        )
        for rank in range(2)
    ]  # fmt: skip
    alone = built(folder)["shapes"]
    for rank, each in enumerate(running):
        found = json.loads(each.communicate(timeout=HANG_SECONDS)[0].splitlines()[-1])
        assert found["banner"][2].startswith("loader proof: 2 ranks, ")
        assert found["records"] == [f"rank-{rank}.json"]
        assert found["loaded"] == found["parameters"]
        shapes, experts = found["shapes"], "model.layers.0.ffn.experts.routed_experts.w13_weight"
        assert shapes[experts][0] * 2 == alone[experts][0]
        assert shapes["lm_head.weight"][0] * 2 == alone["lm_head.weight"][0]
        assert any("experts [NVFP4]: degarble" in each for each in found["running"])


def test_a_tensor_that_does_not_come_ends_the_start(folder: Path) -> None:
    found = built(folder, "layers.1.ffn.experts.2.w3.input_scale")
    assert "weights that never came = '1, as layers.1.ffn.experts.2.w3" in found["refused"]
