"""Models for the campaign of consumers: the trained ones made wide, and stored weights decoded.

Wide: each channel of an inner width is there several times, and what reads the copies is divided by
their number, a power of two. The function stays what it was; blocks of 128 now end where vLLM's
fused parameters do. Norms are rounded to BF16, because vLLM keeps them so in a BF16 model.

Decoded: plain arithmetic on the bytes, nothing of harness/formats, so that a row whose only reader
is degarble has a second opinion.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.config.json_file import config_from_dict
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.tensors import slots

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.model.config.config import Config

_MATRIX = 2
_FUSED = ".fused_wkv_wgate"
_MXFP4_BLOCK, _FP8_BLOCK = 32, 128
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "scale", "input_scale")


def widened(source: Path, folder: Path) -> None:
    """Write a trained model with inner widths that are multiples of 128."""
    with Checkpoint.open(source) as checkpoint:
        config, names = checkpoint.model, checkpoint.names
    assert config is not None
    assert names is not None
    fields = _config(source) | _widths(config)
    shapes = {parameter.name: parameter.shape for parameter in parameters(config_from_dict(fields))}
    stored = load_file(source / "model-00001-of-00001.safetensors")
    made = {
        slot.tensor: _wider(stored[slot.tensor], shapes[slot.parameter.name])
        for slot in slots(config, names.layout.with_recipe(recipe_named("bf16", config)))
    }
    folder.mkdir()
    _save(folder, made, fields)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)


def _widths(config: Config) -> dict[str, int]:
    names = ["q_lora_rank", "moe_intermediate_size"]
    names.append("o_lora_rank" if isinstance(config, V4Config) else "intermediate_size")
    found = {}
    for name in names:
        found[name] = width = getattr(config, name)
        while found[name] % _FP8_BLOCK:
            found[name] += found[name]
        assert found[name] <= 4 * width, f"{name} of {width}"
    return found


def _wider(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    made = value
    for axis, (before, after) in enumerate(zip(value.shape, shape, strict=True)):
        made = made.repeat_interleave(after // before, dim=axis)
    if made.dim() == _MATRIX:
        return (made / (shape[1] // value.shape[1])).contiguous()
    if made.dtype == torch.float32 and made.shape[-1] % 64 == 0:  # V3.2's norms
        return made.bfloat16().float()
    return made


def decoded(folder: Path, out: Path) -> None:
    """Write a stored checkpoint with decoded weights, under the same names, compressors apart."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    made: dict[str, Tensor] = {}
    for name, value in stored.items():
        module, _, part = name.rpartition(".")
        if module.endswith(_FUSED):
            block = module.removesuffix(_FUSED)
            made[f"{block}.wkv.weight"], made[f"{block}.wgate.weight"] = value.chunk(2)
        elif part == "weight":
            parts = {word: stored.get(f"{module}.{word}") for word in _SCALES}
            made[name] = _values(value, parts)
        elif part not in _SCALES:
            made[name] = value
    config = _config(folder)
    config.pop("quantization_config", None)
    out.mkdir()
    _save(out, made, config)


def _values(stored: Tensor, scales: Mapping[str, Tensor | None]) -> Tensor:
    block, whole = scales["weight_scale"], scales["weight_scale_2"]
    if block is not None and whole is not None:
        return _halves(stored) * _spread(block.float(), 16) * whole
    kept = scales["weight_scale_inv"] if scales["scale"] is None else scales["scale"]
    if kept is None:
        return stored
    if stored.dtype in (torch.int8, torch.uint8):
        return _halves(stored) * _spread(kept.float(), _MXFP4_BLOCK)
    if kept.dtype == torch.int32:
        return _of_words(stored, kept).flatten(0, 1)
    rows, columns = stored.shape[-2:]
    scale = kept.float().repeat_interleave(_FP8_BLOCK, -1).repeat_interleave(_FP8_BLOCK, -2)
    value = stored.float() * scale[..., :rows, :columns]
    return value.flatten(0, 1) if value.dim() > _MATRIX else value


def _halves(stored: Tensor) -> Tensor:
    """Decode two E2M1 codes a byte, the low half first."""
    codes = stored.view(torch.uint8)
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    return torch.tensor([*_E2M1, *(-each for each in _E2M1)])[both]


def _spread(scales: Tensor, block: int) -> Tensor:
    return scales.repeat_interleave(block, dim=-1)


def _of_words(stored: Tensor, words: Tensor) -> Tensor:
    """Decode DeepGEMM's operand: four powers of two a word, one a block of 128, rows innermost."""
    shifts = torch.arange(0, 32, 8)
    exponents = (words.long()[..., None] >> shifts) & 0xFF  # [g, words, r, 4]
    scales = torch.exp2(exponents.permute(0, 2, 1, 3).flatten(2).float() - 127)
    return stored.float() * _spread(scales, _FP8_BLOCK)[..., : stored.shape[-1]]


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return found


def _save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
