"""Write small checkpoints for the suites of reading, with other code than the code that reads.

Hostile files are written as raw bytes, sound ones by the safetensors package. Models are placed
parameter by parameter through the slots of harness.model, so that what is read by logical name can
be compared with what was written.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from safetensors.torch import save_file

from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import NVFP4, block_format
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.tensors import PartKind, slots
from degarble.harness.model.types import Dtype

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter

TINY_V4 = small_v4(
    num_hidden_layers=3,
    compress_ratios=(0, 4, 128, 0),
    num_hash_layers=1,
    hidden_size=128,
    moe_intermediate_size=128,
    n_routed_experts=3,
    num_attention_heads=4,
    o_groups=2,
    vocab_size=64,
)
TINY_V32 = small_v32(
    num_hidden_layers=2,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=2,
    vocab_size=64,
)


def write_raw(path: Path, header: bytes | object, data: bytes = b"") -> None:
    """Write a file with any header: text as it is, or an object as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the header as the standard decoder reads it."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found: dict[str, dict[str, Any]] = json.loads(raw[8 : 8 + length])
    return found


def oracle_of(raw: bytes) -> dict[str, dict[str, Any]]:
    """Return what the safetensors package reads, by tensor: dtype, shape and data."""
    return dict(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]


def write_shards(folder: Path, shards: list[dict[str, Tensor]], *, index: bool = True) -> None:
    """Write shards with the safetensors package, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if index:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)


@dataclass(frozen=True)
class Model:
    """What went into a checkpoint: parts and values of every parameter, by logical name."""

    config: Config
    layout: Layout
    parts: Mapping[str, Mapping[PartKind, Tensor]]
    values: Mapping[str, Tensor]


def make_model(config: Config, layout: Layout, seed: int) -> Model:
    """Draw every parameter that the layout stores, quantised as its recipe says."""
    generator = torch.Generator().manual_seed(seed)
    recipe = layout.recipe_for(config)
    parts: dict[str, dict[PartKind, Tensor]] = {}
    values: dict[str, Tensor] = {}
    for slot in slots(config, layout):
        name = slot.parameter.name
        if name not in parts:
            weight = recipe.format_of(slot.parameter).weight
            parts[name], values[name] = _draw(slot.parameter, weight, slot.dtype, generator)
    return Model(config, layout, parts, values)


def _draw(
    parameter: Parameter, weight: str, dtype: Dtype, generator: torch.Generator
) -> tuple[dict[PartKind, Tensor], Tensor]:
    if dtype in (Dtype.I64, Dtype.I32):
        ids = torch.randint(0, 3, parameter.shape, generator=generator)
        ids = ids.to(TORCH_DTYPES[dtype.value])
        return {PartKind.VALUE: ids}, ids
    drawn = torch.randn(parameter.shape, generator=generator)
    if weight == "BF16":
        drawn = drawn.to(TORCH_DTYPES[dtype.value])
        return {PartKind.VALUE: drawn}, drawn
    fmt = block_format(weight)
    made = quantise(drawn, fmt, MODELOPT if fmt == NVFP4 else CANONICAL)
    parts = {PartKind.CODES: made.codes, PartKind.BLOCK_SCALE: made.block_scale}
    if made.tensor_scale is not None:
        parts[PartKind.TENSOR_SCALE] = made.tensor_scale
        parts[PartKind.INPUT_SCALE] = torch.rand((), generator=generator) + 0.1
    return parts, dequantise(made)


def write_model(folder: Path, model: Model, shards: int = 3) -> None:
    """Place every part where the layout wants it, and write shards, index and config."""
    stops: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    placed = list(slots(model.config, model.layout))
    for slot in placed:
        ends = tuple(stop for _, stop in slot.box.ranges)
        stops[slot.tensor] = tuple(map(max, stops.get(slot.tensor, ends), ends))
        dtypes[slot.tensor] = TORCH_DTYPES[slot.dtype.value]
    tensors = {name: torch.zeros(stops[name], dtype=dtypes[name]) for name in stops}
    for slot in placed:
        part = model.parts[slot.parameter.name][slot.part]
        target = tensors[slot.tensor][tuple(slice(*each) for each in slot.box.ranges)]
        stored = part if part.dtype is target.dtype else part.view(target.dtype)
        target.view(torch.uint8).copy_(stored.reshape(target.shape).view(torch.uint8)) if (
            target.dtype.itemsize == 1
        ) else target.copy_(stored.reshape(target.shape))
    names = list(tensors)
    write_shards(folder, [{n: tensors[n] for n in names[i::shards]} for i in range(shards)])
    (folder / "config.json").write_text(json.dumps(config_to_dict(model.config)))
