"""Plants on one rank of the engine's stand-in, and its linears in FP8 with inputs by token."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import FP8_ROW
from degarble.harness.formats.quantise import quantise
from degarble.suites.support.engine_stand_in import RowParallelLinear

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

_ARGUMENTS = {"num_bits": 8, "type": "float", "symmetric": True}
_STATED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_ARGUMENTS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_ARGUMENTS, "strategy": "token", "dynamic": True},
        }
    },
}


def shard_of_rank_0(path: str, tensor: str, layer: int = 1) -> Callable[[int, Any], None]:
    """Give rank 1 the shard of rank 0, as a loader does that counts devices from 0 on each host."""
    kept: list[Tensor] = []

    def plant(rank: int, model: Any) -> None:
        weight = getattr(model.layers[layer].get_submodule(path), tensor)
        if rank == 0:
            kept.append(weight.data.clone())
        elif rank == 1:
            weight.data.copy_(kept[0])

    return plant


def fp8_by_token(source: nn.Module, folder: Path) -> Callable[[int, Any], None]:
    """Store the linears of a checkpoint in FP8, and return what makes an engine compute so.

    `source` gets the decoded weights, in float64.
    """
    file = folder / "model.safetensors"
    held = load_file(file)
    decoded: dict[str, Tensor] = {}
    for name in [each for each in held if each.endswith("_proj.weight")]:
        made = quantise(held[name].float(), FP8_ROW, CANONICAL)
        scale = made.block_scale.reshape(-1, 1).float()
        held[name] = made.codes.view(torch.float8_e4m3fn)
        held[f"{name}_scale"] = scale
        decoded[name] = held[name].double() * scale.double()
    save_file(held, file)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"quantization_config": _STATED}))
    for name, parameter in source.named_parameters():
        if name in decoded:
            parameter.data = decoded[name]
    return _computing


def _computing(_rank: int, model: Any) -> None:
    for path, module in model.named_modules():
        if path.endswith("_proj"):
            module.forward = partial(_product, module)


def _product(module: Any, x: Tensor) -> Any:
    """Multiply what a rank's part of a token becomes in FP8 by its own scale."""
    wide = x.double()
    scale = (wide.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    out = (codes.double() * scale.double() @ module.weight.double().T).to(x.dtype)
    return (module._rank.sum(out) if isinstance(module, RowParallelLinear) else out), None
