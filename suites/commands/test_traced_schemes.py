"""Quantised checkpoints of other tools, of families that transformers alone describes."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import FP8_128X128_F32
from degarble.harness.formats.quantise import quantise
from degarble.harness.inference.model import open_model
from degarble.suites.campaigns.healthy_exports import (
    compressed_export,
    modelopt_export,
    saved_model,
)
from degarble.suites.commands.calls import call
from degarble.suites.commands.test_traced_families import captured, checked
from degarble.suites.commands.traced_checkpoints import write_checkpoint, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Capsys = pytest.CaptureFixture[str]

pytestmark = pytest.mark.needs("transformers", "modelopt", "compressed_tensors")

_SLOW = pytest.mark.slow
_EXPORTS = [
    ("modelopt", "llama", "NVFP4_DEFAULT_CFG"),
    pytest.param("modelopt", "v3", "NVFP4_DEFAULT_CFG", marks=_SLOW),
    pytest.param("compressed", "qwen3-moe", "NVFP4A16", marks=_SLOW),
    ("modelopt", "llama", "NVFP4_FP8_MHA_CONFIG"),  # mixed precision, and a cache in FP8
    ("modelopt", "llama", "W4A8_AWQ_BETA_CFG"),  # factors in front of inputs
    pytest.param("modelopt", "llama", "INT4_AWQ_CFG", marks=_SLOW),
    pytest.param("modelopt", "llama", "INT8_SMOOTHQUANT_CFG", marks=_SLOW),
    pytest.param("modelopt", "qwen3-moe", "FP8_DEFAULT_CFG", marks=_SLOW),
    pytest.param("modelopt", "llama", "MXFP8_DEFAULT_CFG", marks=_SLOW),
    pytest.param("compressed", "llama", "NVFP4", marks=_SLOW),
    pytest.param("modelopt", "llama", "FP8_DEFAULT_CFG", marks=_SLOW),
    pytest.param("modelopt", "llama", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", marks=_SLOW),
    pytest.param("compressed", "qwen3-moe", "W4A8", marks=_SLOW),
    pytest.param("modelopt", "llama", "FP8_PER_CHANNEL_PER_TOKEN_CFG", marks=_SLOW),
    pytest.param("modelopt", "llama-tied", "NVFP4_MLP_ONLY_CFG", marks=_SLOW),
    pytest.param("modelopt", "qwen3", "W4A16_NVFP4_CFG", marks=_SLOW),
    pytest.param("modelopt", "qwen3-moe", "NVFP4_DEFAULT_CFG", marks=_SLOW),
    pytest.param("compressed", "qwen3", "NVFP4", marks=_SLOW),
]


def _exported(folder: Path, tool: str, model: str, scheme: str) -> tuple[Path, Path]:
    export = modelopt_export if tool == "modelopt" else compressed_export
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what ModelOpt imports
        made, source = export(model, scheme, folder)
    write_tokenizer(made)
    return made, source


@pytest.mark.parametrize(("tool", "model", "scheme"), _EXPORTS)
def test_healthy_runs_of_an_export_agree(
    capsys: Capsys, tmp_path: Path, tool: str, model: str, scheme: str
) -> None:
    made, source = _exported(tmp_path, tool, model, scheme)
    assert call(capsys, "audit", made).status == 0
    for backend in ("torch", "transformers"):
        done = captured(capsys, made, tmp_path / backend, "--backend", backend)
        assert done.status == 0, done.err
        found = checked(capsys, tmp_path / backend, source)
        assert found["verdict"] == "AGREES", found["origins"]
    # transformers multiplies by decoded weights, and no fault of short sums stands for that.
    learned = {each["name"]: each["value"] for each in found["conventions"]}
    # MXFP8's scales are powers of two, so that decoded numbers are exact in BF16.
    assert scheme.startswith("MXFP8") or learned["decoded_operands"] == "weights_bf16"


def test_inputs_of_nvfp4_linears_are_quantised_by_the_stored_scale(tmp_path: Path) -> None:
    made, _ = _exported(tmp_path, "modelopt", "llama", "NVFP4_DEFAULT_CFG")
    with open_model(made) as model:
        bound = model.logits_model.bound
        assert model.arithmetic == "twin"
        name = "layers.1.self_attn.q_proj"
        assert bound.quantises(name)
        assert not bound.quantises("lm_head")
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        codes = bound(f"{name}.act_quant", x=x)
        scale = bound.weights[f"{name}.weight"].input_scale
        assert scale is not None
        assert torch.equal(codes["tensor_scale"].reshape(()), scale.reshape(()))


def test_experts_of_gpt_oss_are_read_as_transformers_decodes_them(
    capsys: Capsys, tmp_path: Path
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415  heavy

    folder = write_checkpoint(tmp_path / "gpt_oss", "gpt_oss")
    generator = torch.Generator().manual_seed(0)
    wanted = {}
    for shard in sorted(folder.glob("*.safetensors")):
        held = load_file(shard)
        for name in [each for each in held if each.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = held.pop(name).shape
            shape = (experts, rows, columns // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 123, shape[:-1], generator=generator, dtype=torch.uint8)
            held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wanted[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        save_file(held, shard, {"format": "pt"})
    _reindex(folder)
    with open_model(folder) as model:
        for name, values in wanted.items():
            own = name.removeprefix("model.")
            assert torch.equal(model.weights[own].values(torch.float32), values)
    assert captured(capsys, folder, tmp_path / "capture", "--backend", "transformers").status == 0
    assert checked(capsys, tmp_path / "capture", folder)["verdict"] == "AGREES"
    refused = call(capsys, "convert", folder, tmp_path / "bf16", "--to", "bf16")
    assert refused.status == 2
    assert "quantised experts in one stack" in refused.err
    assert not (tmp_path / "bf16").exists()


def test_blocks_of_fp8_have_inputs_in_blocks_of_a_row(capsys: Capsys, tmp_path: Path) -> None:
    made, source = saved_model("llama", "bf16", tmp_path)
    write_tokenizer(made)
    for shard in sorted(made.glob("*.safetensors")):
        held = load_file(shard)
        for name in [each for each in held if each.endswith("_proj.weight")]:
            codes = quantise(held[name].float(), FP8_128X128_F32, CANONICAL)
            held[name] = codes.codes.view(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = codes.block_scale
        save_file(held, shard, {"format": "pt"})
    _reindex(made)
    config = json.loads((made / "config.json").read_text())
    stated = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with open_model(made) as model:
        assert model.logits_model.bound.quantises("layers.1.mlp.down_proj")
    for backend in ("torch", "transformers"):
        assert captured(capsys, made, tmp_path / backend, "--backend", backend).status == 0
        assert checked(capsys, tmp_path / backend, source)["verdict"] == "AGREES"


def _reindex(folder: Path) -> None:
    """Write the index of shards that were changed."""
    held = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    size = sum(value.nbytes for tensors in held.values() for value in tensors.values())
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, tensors in held.items() for name in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


_CODES_ROLLED = """
def patch(candidate):
    codes = candidate.weights["layers.1.self_attn.v_proj.weight"].codes
    codes.copy_((codes << 4) | (codes >> 4))
    scale = candidate.weights["layers.0.mlp.up_proj.weight"].tensor_scale
    scale.mul_(1.5)
"""


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "transformers"])
def test_faults_of_quantised_weights_are_placed(
    capsys: Capsys, tmp_path: Path, backend: str
) -> None:
    made, source = _exported(tmp_path, "modelopt", "llama", "NVFP4_DEFAULT_CFG")
    patch = tmp_path / "patch.py"
    patch.write_text(_CODES_ROLLED)
    folder = tmp_path / backend
    captured(capsys, made, folder, "--backend", backend, "--patch", patch)
    found = checked(capsys, folder, source)
    assert {(each["layer"], each["component"]) for each in found["origins"]} == {
        (1, "self_attn.v_proj"), (0, "mlp.up_proj"),
    }  # fmt: skip


def _unknown_codes(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    name = "model.layers.1.self_attn.q_proj"
    del held[f"{name}.weight_packed"]
    held[f"{name}.strange"] = torch.zeros(4, 8, dtype=torch.int32)
    save_file(held, file, {"format": "pt"})


def _coded_stack(folder: Path) -> None:
    """Store a parameter as a stack of codes in a format that stacks are not read in."""
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj"
    held[name] = torch.zeros(4, 16, 16).to(torch.float8_e4m3fn)
    held[f"{name}_weight_scale"] = torch.ones(())
    save_file(held, file, {"format": "pt"})


_REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "stack": (_coded_stack, "experts in one stack model.layers.1.mlp.experts.down_proj"),
    "scheme": (
        _unknown_codes,
        "q_proj.weight; stored are model.layers.1.self_attn.q_proj.",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_an_unknown_scheme_is_refused_by_name(capsys: Capsys, tmp_path: Path, case: str) -> None:
    made, _ = _exported(tmp_path, "compressed", "llama", "NVFP4A16")
    damage, expected = _REFUSED[case]
    damage(made)
    done = captured(capsys, made, tmp_path / "capture")
    assert done.status == 2
    assert expected in " ".join(done.err.split())
    with Checkpoint.survey(made) as checkpoint:
        assert checkpoint.model is None
