"""Norms, rotations (RoPE), the Hadamard transform and SwiGLU, as pure functions on tensors.

Callers check shapes.
Legend: T tokens, H heads, D any feature width, P rotated pairs (half the rotated dims).
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

from degarble.references.numerics import HeadNorm, cast

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.types import Rope, Yarn
    from degarble.references.numerics import Numerics


@dataclass(frozen=True)
class RotationTable:
    """Cos and sin of P pairs, scaled as the RoPE facts say: [T, P], or [T, 1, P] over heads."""

    cos: Tensor
    sin: Tensor

    @cached_property
    def turn(self) -> Tensor:
        """Return the rotation as a complex factor."""
        return torch.complex(self.cos, self.sin)

    @cached_property
    def back(self) -> Tensor:
        """Return the inverse rotation."""
        return torch.complex(self.cos, -self.sin)

    @cached_property
    def over_heads(self) -> RotationTable:
        """Return the same angles for every head."""
        return RotationTable(self.cos.unsqueeze(1), self.sin.unsqueeze(1))


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, numerics: Numerics) -> Tensor:
    """Return `w * x / sqrt(mean(x^2) + epsilon)`, in the working dtype, rounded once."""
    return rms_norm_unrounded(x_TD, weight_D, epsilon, numerics).to(numerics.store)


def rms_norm_unrounded(
    x_TD: Tensor, weight_D: Tensor, epsilon: float, numerics: Numerics
) -> Tensor:
    """Do the same without the final rounding, for kernels that continue in float32."""
    x = cast(x_TD, numerics.work)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    normal = x * scale
    if numerics.switches.norm_rounded_before_weight and not numerics.exact:
        normal = cast(cast(normal, numerics.store), numerics.work)
    return cast(weight_D, numerics.work) * normal


def layer_norm(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, epsilon: float, numerics: Numerics
) -> Tensor:
    """Return LayerNorm with weight and bias, in the working dtype, rounded once."""
    x = cast(x_TD, numerics.work)
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon)
    out = centred * scale * cast(weight_D, numerics.work) + cast(bias_D, numerics.work)
    return cast(out, numerics.store)


def head_rms(q_THD: Tensor, epsilon: float, numerics: Numerics) -> Tensor:
    """Return per-head RMS without weight, left in the working dtype (the rotation follows)."""
    kind = numerics.switches.head_norm
    if kind is HeadNorm.EACH_STEP:
        q = cast(q_THD, numerics.store)
        mean = q.square().mean(-1, keepdim=True, dtype=numerics.work).to(numerics.store) + epsilon
        # Trap: torch's rsqrt of BF16 rounds twice in a vector's tail, so batching would matter.
        return (q * torch.rsqrt(cast(mean, numerics.work)).to(numerics.store)).to(numerics.work)
    q = cast(q_THD, numerics.work)
    factor = torch.rsqrt(q.square().mean(-1, keepdim=True) + epsilon)
    if kind is HeadNorm.FACTOR:
        return (q * cast(factor, numerics.store).to(numerics.work)).to(numerics.store).to(q.dtype)
    return q * factor


@lru_cache(maxsize=32)
def frequencies(rope: Rope, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the P angular frequencies, blended as YaRN does where the RoPE has it.

    In float32 the operations are the official ones in their order: 1e-7 of a frequency is an angle
    of 0.1 at a position of a million.
    """
    exponent = torch.arange(0, rope.dims, 2, dtype=dtype, device=device) / rope.dims
    base = 1.0 / (rope.theta**exponent)
    if rope.yarn is None:
        return base
    low, high = _ramp(rope, rope.yarn)
    pair = torch.arange(rope.dims // 2, dtype=dtype, device=device)
    kept = 1.0 - ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return base / rope.yarn.factor * (1.0 - kept) + base * kept


def _ramp(rope: Rope, yarn: Yarn) -> tuple[float, float]:
    """Return the pairs at which YaRN's ramp begins and ends.

    The end may lie in front of the beginning: a short original length, or swapped betas, run the
    ramp backwards in every source.
    """
    low = _rotating_pair(rope, yarn, yarn.beta_fast)
    high = _rotating_pair(rope, yarn, yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    return low, high if high != low else high + 1e-3


def _rotating_pair(rope: Rope, yarn: Yarn, turns: float) -> float:
    """Return the pair index that makes `turns` full turns within the original length."""
    reach = math.log(yarn.original_max_position_embeddings / (turns * 2.0 * math.pi))
    return rope.dims * reach / (2.0 * math.log(rope.theta))


_TABLES: dict[tuple[object, ...], tuple[weakref.ref[Tensor], int, RotationTable]] = {}
_MOST_TABLES = 64


def rotation_table(rope: Rope, positions_T: Tensor, numerics: Numerics) -> RotationTable:
    """Return the angles [T, P] of each position, in the precision that the numerics name.

    All components of a step share one tensor of positions, so its tables are kept while it lives.
    """
    if positions_T.is_inference():  # has no version counter, so a change would go unnoticed
        return _rotation_table(rope, positions_T, numerics)
    stored = numerics.store if numerics.switches.rotation_in_storage_dtype else None
    key, version = (id(positions_T), rope, numerics.work, stored), positions_T._version  # noqa: SLF001
    known = _TABLES.get(key)
    if known is not None and known[0]() is positions_T and known[1] == version:
        return known[2]
    if len(_TABLES) >= _MOST_TABLES:
        _TABLES.clear()
    table = _rotation_table(rope, positions_T, numerics)
    _TABLES[key] = (weakref.ref(positions_T), version, table)
    return table


def _rotation_table(rope: Rope, positions_T: Tensor, numerics: Numerics) -> RotationTable:
    frequency_P = frequencies(rope, numerics.work, positions_T.device)
    angle_TP = cast(positions_T, numerics.work)[:, None] * frequency_P
    cos, sin = angle_TP.cos(), angle_TP.sin()
    if rope.scale != 1.0:
        cos, sin = cos * rope.scale, sin * rope.scale
    if numerics.switches.rotation_in_storage_dtype:
        cos, sin = cast(cos, numerics.store), cast(sin, numerics.store)
    return RotationTable(cast(cos, numerics.work), cast(sin, numerics.work))


def over_heads(table: RotationTable) -> RotationTable:
    """Let a table [T, P] broadcast over [T, H, P]."""
    return table.over_heads


def rotate_interleaved(x: Tensor, table: RotationTable, *, inverse: bool = False) -> Tensor:
    """Rotate pairs (2i, 2i+1) of the last axis; cos and sin broadcast over P pairs."""
    parts = cast(x, table.cos.dtype).reshape(*x.shape[:-1], -1, 2)
    # Trap: after an odd number of features the pairs are not aligned as complex numbers must be.
    if parts.storage_offset() % 2 or any(stride % 2 for stride in parts.stride()[:-1]):
        parts = parts.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(parts)
    return torch.view_as_real(pairs * (table.back if inverse else table.turn)).flatten(-2)


def rotate_halves(x: Tensor, table: RotationTable) -> Tensor:
    """Rotate pairs (i, i + P) of the last axis: the convention of the V3.2 indexer."""
    cos, sin = table.cos, table.sin
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def rotate_tail(x: Tensor, table: RotationTable, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2P features, interleaved; the leading ones stay."""
    width = 2 * table.cos.shape[-1]
    turned = rotate_interleaved(x[..., -width:], table, inverse=inverse)
    return torch.cat((x[..., :-width], turned), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis (a power of two)."""
    return torch.matmul(x, _walsh(x.shape[-1], x.dtype, x.device)) * float(x.shape[-1] ** -0.5)


@lru_cache(maxsize=8)
def _walsh(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return signs (-1)^popcount(i & j), by doubling."""
    signs = torch.ones(1, 1, dtype=dtype, device=device)
    while signs.shape[0] < width:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return signs


def swiglu(
    gate: Tensor, up: Tensor, limit: float | None, numerics: Numerics | None = None
) -> Tensor:
    """Return SiLU(gate) * up, both clamped first where a limit is given (gate from above only)."""
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
    passed = torch.nn.functional.silu(gate)
    if numerics is not None and numerics.switches.gate_rounded_before_product:
        passed = cast(cast(passed, numerics.store), passed.dtype)
    return passed * up
