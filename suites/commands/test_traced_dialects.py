"""Real exports change their dialect by `degarble convert`, and every command reads the result."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.commands.calls import call
from degarble.suites.commands.test_traced_families import captured, checked
from degarble.suites.commands.test_traced_schemes import _exported

if TYPE_CHECKING:
    from pathlib import Path

    Capsys = pytest.CaptureFixture[str]

pytestmark = [
    pytest.mark.needs("transformers", "modelopt", "compressed_tensors"),
    pytest.mark.slow,
]

_CASES = [
    ("modelopt", "llama", "NVFP4_FP8_MHA_CONFIG", "compressed-tensors"),
    ("modelopt", "qwen3-moe", "NVFP4_DEFAULT_CFG", "compressed-tensors"),
    ("modelopt", "llama", "W4A16_NVFP4_CFG", "compressed-tensors"),
    ("modelopt", "llama-tied", "NVFP4_MLP_ONLY_CFG", "compressed-tensors"),
    ("modelopt", "llama", "FP8_DEFAULT_CFG", "compressed-tensors"),
    ("modelopt", "llama", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "compressed-tensors"),
    ("modelopt", "llama", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "compressed-tensors"),
    ("modelopt", "llama", "MXFP8_DEFAULT_CFG", "compressed-tensors"),
    ("compressed", "llama", "NVFP4", "modelopt"),
    ("compressed", "qwen3-moe", "NVFP4A16", "modelopt"),
    ("compressed", "llama", "FP8_DYNAMIC", "modelopt"),
    ("compressed", "llama", "MXFP8", "modelopt"),
    ("compressed", "llama", "FP8_BLOCK", "finegrained-fp8"),
]


@pytest.mark.parametrize(("tool", "model", "scheme", "to"), _CASES)
def test_a_converted_export_is_read_by_every_command(
    capsys: Capsys, tmp_path: Path, tool: str, model: str, scheme: str, to: str
) -> None:
    source, original = _exported(tmp_path, tool, model, scheme)
    made = tmp_path / "converted"
    line = ("convert", source, made, "--to", to, "--prove", "--tensor-scales", "nearest")
    done = call(capsys, *line)
    assert done.status == 0, done.err
    assert f"The promise of {to} holds" in done.out
    assert call(capsys, "audit", made, "--loader", "transformers").status == 0
    for backend in ("torch", "transformers"):
        folder = tmp_path / backend
        recorded = captured(capsys, made, folder, "--backend", backend)
        assert recorded.status == 0, recorded.err
        found = checked(capsys, folder, original)
        assert found["verdict"] == "AGREES", found["origins"]


def _logits(folder: Path, **loading: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = import_module("transformers").AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, **loading
        )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.arange(1, 33)[None]).logits
    return logits.double()


@pytest.mark.parametrize(
    "scheme", ["W4A16_NVFP4_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "MXFP8_DEFAULT_CFG"]
)
def test_transformers_loads_what_modelopt_exported(
    capsys: Capsys, tmp_path: Path, scheme: str
) -> None:
    """transformers has no reader of ModelOpt's files; of compressed-tensors' it has."""
    source, _ = _exported(tmp_path, "modelopt", "llama", scheme)
    converted, decoded = tmp_path / "converted", tmp_path / "decoded"
    line = ("convert", source, converted, "--to", "compressed-tensors")
    assert call(capsys, *line, "--tensor-scales", "nearest").status == 0
    assert call(capsys, "convert", source, decoded, "--to", "bf16").status == 0
    ours, theirs = _logits(converted), _logits(decoded)
    # Inputs quantised by the token, where the scheme says so; weights decoded once to BF16.
    assert float((ours - theirs).norm() / theirs.norm()) < 0.06


def test_modelopt_reads_what_compressed_tensors_wrote(capsys: Capsys, tmp_path: Path) -> None:
    tensor_class = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor
    source, _ = _exported(tmp_path, "compressed", "llama", "NVFP4")
    made = tmp_path / "converted"
    assert call(capsys, "convert", source, made, "--to", "modelopt").status == 0
    with Checkpoint.open(made) as checkpoint, Checkpoint.open(source) as before:
        module = "model.layers.1.mlp.down_proj"
        codes, scale, factor = (
            checkpoint.tensor(f"{module}.{part}").clone()
            for part in ("weight", "weight_scale", "weight_scale_2")
        )
        shape = (codes.shape[0], 2 * codes.shape[1])
        quantised = tensor_class(torch.Size(shape), torch.float32, codes)
        theirs = quantised.dequantize(scale=scale, double_scale=factor, block_sizes={-1: 16})
        ours = before.weight(module).values(torch.float64)
        assert bool(((theirs.double() - ours).abs() <= 2.0**-22 * ours.abs()).all())
