"""Plants on one rank of the engine's stand-in, and its linears in FP8 with inputs by token."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from degarble.suites.support.engine_stand_in import MoERunner, RowParallelLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

_LARGEST = {"float": 448.0, "int": 127.0}


def _stated(kind: str) -> dict[str, Any]:
    arguments = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**arguments, "strategy": "channel", "dynamic": False},
                "input_activations": {**arguments, "strategy": "token", "dynamic": True},
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


def by_token(source: nn.Module, folder: Path, kind: str = "float") -> Callable[[int, Any], None]:
    """Store the linears and experts of a checkpoint in FP8, or in INT8 (`kind` int).

    `source` gets the decoded weights, in float64. Return what makes an engine compute so, each of
    its inputs with a scale for each token.
    """
    file = folder / "model.safetensors"
    held = dict(_by_expert(load_file(file)))
    decoded: dict[str, Tensor] = {}
    for name in [each for each in held if each.endswith("_proj.weight")]:
        held[name], held[f"{name}_scale"] = codes, scale = _codes(held[name], kind)
        decoded[name] = codes.double() * scale.double()
    save_file(held, file)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"quantization_config": _stated(kind)}))
    for name, parameter in source.named_parameters():
        if name in decoded:
            parameter.data = decoded[name]
        elif name.endswith("experts.gate_up_proj"):
            both = [_stacked(decoded, name, part) for part in ("gate_proj", "up_proj")]
            parameter.data = torch.cat(both, 1)
        elif name.endswith("experts.down_proj"):
            parameter.data = _stacked(decoded, name, "down_proj")
    return partial(_computing, kind)


def _codes(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the codes of rows, each with its own scale, and the scales."""
    most = _LARGEST[kind]
    scale = (x.double().abs().amax(-1, keepdim=True).float() / most).clamp(min=1e-12)
    quotient = (x.float() / scale).clamp(-most, most)
    if kind == "int":
        return quotient.round().to(torch.int8), scale
    return quotient.to(torch.float8_e4m3fn), scale


def _by_expert(held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, stacks of experts one by one."""
    for name, tensor in held.items():
        path, _, leaf = name.rpartition(".")
        if not path.endswith("experts"):
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            for part, own in zip(expert.chunk(len(names)), names, strict=True):
                yield f"{path}.{number}.{own}.weight", part.contiguous()


def _stacked(decoded: Mapping[str, Tensor], name: str, part: str) -> Tensor:
    path = name.rpartition(".")[0]
    count = sum(n.startswith(f"{path}.") and n.endswith(f".{part}.weight") for n in decoded)
    return torch.stack([decoded[f"{path}.{number}.{part}.weight"] for number in range(count)])


def _computing(kind: str, _rank: int, model: Any) -> None:
    coded = partial(_coded, kind)
    for path, module in model.named_modules():
        if path.endswith("_proj"):
            module.forward = partial(_product, module, coded)
        elif isinstance(module, MoERunner):
            module.multiply = coded


def _product(module: Any, coded: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Any:
    out = coded(x, module.weight)
    return (module._rank.sum(out) if isinstance(module, RowParallelLinear) else out), None


def _coded(kind: str, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply what a rank's part of a token becomes in 8 bits by its own scale."""
    codes, scale = _codes(x, kind)
    return (codes.double() * scale.double() @ weight.double().T).to(x.dtype)
