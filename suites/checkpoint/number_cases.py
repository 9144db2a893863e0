"""Draw weights with the statistics that audits examine, and write small checkpoints of them.

Matrices are realistic: heavy tails, outlier channels, rows of unlike gain. Modules are written
under ModelOpt's and DeepSeek's names, so that a fault can be planted in any stored tensor
beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import MXFP4, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.checkpoint.reading_cases import write_shards

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.quantise import QuantisedTensor

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def channels(seed: int, count: int, spread: float = 0.25) -> Tensor:
    """Gains of input channels: lognormal, and one in a hundred far out."""
    drawn = generator(seed)
    gains = torch.exp(spread * torch.randn(count, generator=drawn))
    far = torch.rand(count, generator=drawn) < 0.01
    return torch.where(far, gains * 6, gains)


def matrix(seed: int, rows: int, columns: int, gains: Tensor | None = None) -> Tensor:
    """A bfloat16 matrix: Student's t with six degrees of freedom, rows of unlike gain."""
    drawn = generator(seed)
    normal = torch.randn(rows, columns, generator=drawn)
    square = torch.randn(6, rows, columns, generator=drawn).square().mean(0)
    height = torch.exp(0.3 * torch.randn(rows, 1, generator=drawn))
    values = normal / square.sqrt() * height * columns**-0.5
    drawn_matrix: Tensor = values if gains is None else values * gains
    return drawn_matrix.bfloat16()


def stored_parts(
    made: QuantisedTensor, input_scale: float | None = 0.01, *, packed_name: bool = False
) -> dict[str, Tensor]:
    """Name the parts of a quantised tensor as its producers do, without the module's name."""
    fmt = made.format
    if fmt == NVFP4 and packed_name:
        assert made.tensor_scale is not None
        parts = {
            "weight_packed": made.codes,
            "weight_scale": made.block_scale.view(E4M3),
            "weight_global_scale": made.encode_scale.reshape(1),
        }
        if input_scale is not None:
            parts["input_global_scale"] = torch.tensor([1 / input_scale])
        return parts
    codes = made.codes if fmt.packed else made.codes.view(E4M3)
    if fmt == MXFP4:
        return {"weight": codes.view(torch.int8), "scale": made.block_scale.view(E8M0)}
    if fmt != NVFP4:
        in_bytes = made.block_scale.dtype is torch.uint8
        scale = made.block_scale.view(E8M0) if in_bytes else made.block_scale
        return {"weight": codes, "scale" if in_bytes else "weight_scale_inv": scale}
    parts = {
        "weight": codes,
        "weight_scale": made.block_scale.view(E4M3),
        "weight_scale_2": made.decode_scale,
    }
    if input_scale is not None:
        parts["input_scale"] = torch.tensor(input_scale)
    return parts


def quantised_parts(
    values: Tensor,
    fmt: BlockFormat = NVFP4,
    dialect: Dialect | None = None,
    *,
    input_scale: float | None = 0.01,
) -> dict[str, Tensor]:
    """Quantise a matrix as a producer does, and name its parts."""
    chosen = dialect or (MODELOPT if fmt == NVFP4 else CANONICAL)
    return stored_parts(quantise(values, fmt, chosen), input_scale)


def write_modules(folder: Path, modules: Mapping[str, Mapping[str, Tensor] | Tensor]) -> Checkpoint:
    """Write modules by name: parts, or one plain tensor called by the name itself."""
    tensors: dict[str, Tensor] = {}
    for name, parts in modules.items():
        if isinstance(parts, torch.Tensor):
            tensors[name] = parts.clone().contiguous()
        else:
            tensors |= {
                f"{name}.{part}": value.clone().contiguous() for part, value in parts.items()
            }
    write_shards(folder, [tensors])
    return Checkpoint.open(folder)
