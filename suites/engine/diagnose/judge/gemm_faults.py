"""A simulated W4A4 product in float32, healthy in many orders and wrong in sixteen ways.

The faults are those of the side-by-side measurement of published gates, written here without any
code of the engine: a fault is what a kernel would do. Inputs: Gaussian, heavy-tailed, and small
(outputs of 1e-3 to 5e-3, where absolute tolerances see nothing). Letters: M rows, K summed, N out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout
from degarble.harness.formats.number_formats import E4M3, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.formats.quantise import QuantisedTensor

INPUTS = ("gaussian", "heavy-tailed", "small")


@dataclass(frozen=True)
class Gemm:
    """Operands before and after quantisation."""

    x: Tensor
    w: Tensor
    xq: QuantisedTensor
    wq: QuantisedTensor


def gemm(kind: str, shape: tuple[int, int, int], seed: int = 0) -> Gemm:
    """Operands of one kind; shape is M, N, K."""
    rows, columns, length = shape
    generator = torch.Generator().manual_seed(seed + INPUTS.index(kind))
    x, w = (torch.randn(n, length, generator=generator) for n in (rows, columns))
    if kind == "heavy-tailed":
        x, w = (t * torch.randn(t.shape, generator=generator).abs() ** 3 for t in (x, w))
    if kind == "small":
        x, w = x * 0.003 * (2048 / length) ** 0.5, w * 0.02
    x, w = x.bfloat16(), w.bfloat16()
    return Gemm(x, w, quantise(x, NVFP4), quantise(w, NVFP4))


def product(xq: QuantisedTensor, wq: QuantisedTensor) -> Tensor:
    """As a kernel sums: float32, scales of tensors behind the sum."""
    one = torch.ones(())
    x, w = (dequantise(replace(t, tensor_scale=one), torch.float32) for t in (xq, wq))
    return (x @ w.T) * (xq.decode_scale * wq.decode_scale)


def values(made: Gemm) -> tuple[Tensor, Tensor]:
    """Both operands, decoded."""
    return dequantise(made.xq, torch.float32), dequantise(made.wq, torch.float32)


# --- healthy: every legal order of sums ----------------------------------------------------------


def in_steps(made: Gemm, step: int, *, reverse: bool = False) -> Tensor:
    """Steps along K one after the other."""
    x, w = values(made)
    begins = list(range(0, x.shape[1], step))
    total = torch.zeros(len(x), len(w))
    for begin in reversed(begins) if reverse else begins:
        total += x[:, begin : begin + step] @ w[:, begin : begin + step].T
    return total


def split(made: Gemm, parts: int) -> Tensor:
    """Split along K, parts added at the end."""
    x, w = values(made)
    pairs = zip(x.chunk(parts, 1), w.chunk(parts, 1), strict=True)
    return torch.stack([a @ b.T for a, b in pairs]).sum(0)


def shuffled(made: Gemm) -> Tensor:
    """K in any order."""
    x, w = values(made)
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(3))
    return x[:, order] @ w[:, order].T


HEALTHY: Mapping[str, Callable[[Gemm], Tensor]] = {
    "library": lambda g: product(g.xq, g.wq),
    "scales before the sum": lambda g: values(g)[0] @ values(g)[1].T,
    "steps of 16": lambda g: in_steps(g, 16),
    "steps of 64, from the end": lambda g: in_steps(g, 64, reverse=True),
    "steps of 256": lambda g: in_steps(g, 256),
    "split in 2": lambda g: split(g, 2),
    "split in 8": lambda g: split(g, 8),
    "shuffled": shuffled,
}


# --- sixteen faults ------------------------------------------------------------------------------


def _scales(tensor: QuantisedTensor, scales: Tensor) -> QuantisedTensor:
    return replace(tensor, block_scale=scales.contiguous())


def _nibbles(g: Gemm) -> Tensor:
    codes = g.wq.codes
    return product(g.xq, replace(g.wq, codes=(codes >> 4) | (codes << 4)))


def _off_by_one(g: Gemm) -> Tensor:
    return product(g.xq, _scales(g.wq, g.wq.block_scale.roll(-1, 1)))


def _read_linear(g: Gemm) -> Tensor:
    stored = to_layout(g.wq.block_scale, SWIZZLE_128X4)
    cut = stored.reshape(-1)[: g.wq.block_scale.numel()]
    return product(g.xq, _scales(g.wq, cut.reshape(g.wq.block_scale.shape)))


def _transposed(g: Gemm) -> Tensor:
    turned = g.wq.block_scale.T.reshape(g.wq.block_scale.shape)
    return product(g.xq, _scales(g.wq, turned))


def _inverted(g: Gemm) -> Tensor:
    return product(g.xq, replace(g.wq, tensor_scale=g.wq.decode_scale.reciprocal()))


def _gate_scale_for_up(g: Gemm) -> Tensor:
    out = product(g.xq, g.wq)
    out[:, out.shape[1] // 2 :] *= 1.3
    return out


def _without(g: Gemm, begin: int, end: int, columns: slice = slice(None)) -> Tensor:
    x, w = values(g)
    w = w.clone()
    w[columns, begin:end] = 0
    return x @ w.T


def _unwritten_row(g: Gemm) -> Tensor:
    out = product(g.xq, g.wq)
    out[len(out) // 3] = 0
    return out


def _stale_tile(g: Gemm) -> Tensor:
    out = product(g.xq, g.wq)
    stale = out.clone()
    stale[:128, 128:256] = out[:128, :128]
    return stale


def _power_of_two(g: Gemm) -> Tensor:
    scales = decode_array(g.wq.block_scale, E4M3)
    floored = torch.where(scales > 0, torch.exp2(scales.clamp(min=1e-9).log2().floor()), scales)
    return product(g.xq, _scales(g.wq, encode_array(floored, E4M3)))


def _truncated(g: Gemm) -> Tensor:
    out = product(g.xq, g.wq)
    return (out.view(torch.int32) & -65536).view(torch.float32)


def _lost_sign(g: Gemm) -> Tensor:
    low, high = g.wq.codes & 15, g.wq.codes >> 4
    low, high = (torch.where(half == 9, 1, half) for half in (low, high))
    return product(g.xq, replace(g.wq, codes=(low | high << 4).to(torch.uint8)))


def _narrow(g: Gemm) -> Tensor:
    x, w = values(g)
    total = torch.zeros(len(x), len(w))
    for begin in range(0, x.shape[1], 64):
        total = (total + x[:, begin : begin + 64] @ w[:, begin : begin + 64].T).bfloat16().float()
    return total


@dataclass(frozen=True)
class Planted:
    """One fault: what it does, and the id under which it is to be named."""

    run: Callable[[Gemm], Tensor]
    named: str


FAULTS: Mapping[str, Planted] = {
    "nibbles swapped": Planted(_nibbles, "M10.nibble_order"),
    "scale column off by one": Planted(_off_by_one, "M12.column_off"),
    "128x4 swizzle read linear": Planted(_read_linear, "M11.read_unswizzled"),
    "scales transposed": Planted(_transposed, "M11.transposed"),
    "global scale x2": Planted(lambda g: product(g.xq, g.wq) * 2, "M43.whole"),
    "global scale inverted": Planted(_inverted, "M01.inverse"),
    "gate scale used for up": Planted(_gate_scale_for_up, "M43.whole"),
    "last 128 of K dropped": Planted(
        lambda g: _without(g, g.x.shape[1] - 128, g.x.shape[1]), "M41.tile_of_k"
    ),
    "one row unwritten": Planted(_unwritten_row, "M41.rows_unwritten"),
    "one 128x128 tile stale": Planted(_stale_tile, "M37.tile"),
    "block scales floored to 2^k": Planted(_power_of_two, "M06.down"),
    "output truncated": Planted(_truncated, "M40.coarse_output"),
    "sign of -0.5 lost": Planted(_lost_sign, "M09.decode_table"),
    "silent BF16 fallback": Planted(lambda g: g.x.float() @ g.w.float().T, "M19.unquantised"),
    "one block of 16 dropped": Planted(lambda g: _without(g, 48, 64, slice(5, 6)), "M41.tile_of_k"),
    "sum kept in BF16": Planted(_narrow, "M40.short_sums"),
}
