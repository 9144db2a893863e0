"""The compiled twins of products and of attention in float64, for a few tokens on the CPU.

Owns the loops of a decoding step, where calls and the reading of weights are what costs: a product
reads BF16 weights as they are stored, a quarter of what they decode to. Sums run in float64 in an
order of the compiler's, so the last bits of a sum may differ from torch's; what is stored in BF16
behind it does not notice. The definition is never computed here. Imported inside functions: numba.
Refuses nothing: callers ask numerics.compiles first.
Kept honest by suites/references/test_fast_decoding.py, against the readable forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.base.compiled_loops import compiled_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Doubles = NDArray[np.float64]
    Bits = NDArray[np.uint16]

U32, F32 = np.uint32, np.float32

# Sums in any order; nothing is assumed of NaN, infinities and signs.
_compiled = compiled_with(fastmath={"reassoc", "contract"})


@_compiled
def _product(x_TK: Doubles, bits_NK: Bits, out_TN: Doubles) -> None:
    for n in range(bits_NK.shape[0]):
        for t in range(x_TK.shape[0]):
            total = 0.0
            for k in range(x_TK.shape[1]):
                total += x_TK[t, k] * np.float64(U32(U32(bits_NK[n, k]) << U32(16)).view(F32))
            out_TN[t, n] = total


def product(x_TK: Tensor, value_NK: Tensor) -> Tensor:
    """`x @ w.T` of float64 inputs and BF16 weights."""
    out = np.empty((x_TK.shape[0], value_NK.shape[0]))
    _product(x_TK.numpy(), value_NK.view(torch.uint16).numpy(), out)
    return torch.from_numpy(out)


@_compiled
def _grouped(x_TGK: Doubles, bits_GOK: Bits, out_TGO: Doubles) -> None:
    for t in range(x_TGK.shape[0]):
        for g in range(bits_GOK.shape[0]):
            for n in range(bits_GOK.shape[1]):
                total = 0.0
                for k in range(bits_GOK.shape[2]):
                    bits = U32(U32(bits_GOK[g, n, k]) << U32(16))
                    total += x_TGK[t, g, k] * np.float64(bits.view(F32))
                out_TGO[t, g, n] = total


def grouped(x_TGK: Tensor, value_GOK: Tensor) -> Tensor:
    """One matrix per group [T, G * O], of float64 inputs and BF16 weights."""
    out = np.empty((x_TGK.shape[0], *value_GOK.shape[:2]))
    _grouped(x_TGK.numpy(), value_GOK.view(torch.uint16).numpy(), out)
    return torch.from_numpy(out).flatten(1)


@_compiled
def _logits(q_HL: Doubles, rows_RL: Doubles, scale: float, logit_HR: Doubles, begin: int) -> None:
    for r in range(rows_RL.shape[0]):
        for h in range(q_HL.shape[0]):
            total = 0.0
            for i in range(q_HL.shape[1]):
                total += q_HL[h, i] * rows_RL[r, i]
            logit_HR[h, begin + r] = total * scale


@_compiled
def _weights(logit_HR: Doubles, sink_H: Doubles, total_H: Doubles) -> None:
    """Unnormalised weights in place of logits, rounded to BF16 as stored, and their sums."""
    for h in range(logit_HR.shape[0]):
        peak = np.finfo(np.float64).min
        for r in range(logit_HR.shape[1]):
            logit = logit_HR[h, r]
            if logit > peak or np.isnan(logit):
                peak = logit
        total = 0.0
        for r in range(logit_HR.shape[1]):
            weight = np.exp(logit_HR[h, r] - peak)
            total += weight
            bits = F32(weight).view(U32)
            odd = U32(U32(bits >> U32(16)) & U32(1))
            rounded = U32(U32(bits + U32(0x7FFF) + odd) & U32(0xFFFF0000)).view(F32)
            logit_HR[h, r] = np.float64(rounded) if weight <= 1.0 else weight
        total_H[h] = total + np.exp(sink_H[h] - peak)


@_compiled
def _values(weight_HR: Doubles, begin: int, rows_RL: Doubles, out_HL: Doubles) -> None:
    for r in range(rows_RL.shape[0]):
        for h in range(out_HL.shape[0]):
            weight = weight_HR[h, begin + r]
            for i in range(out_HL.shape[1]):
                out_HL[h, i] += weight * rows_RL[r, i]


@_compiled
def _normalise(out_HL: Doubles, total_H: Doubles) -> None:
    for h in range(out_HL.shape[0]):
        for i in range(out_HL.shape[1]):
            out_HL[h, i] = out_HL[h, i] / total_H[h]


def attend(q_HL: Tensor, rows: Sequence[Tensor], sink_H: Tensor, scale: float) -> Tensor:
    """One token's output [H, L] over rows [R, L] in parts, all float64; weights are BF16's."""
    q, parts = q_HL.numpy(), [part.numpy() for part in rows if len(part)]
    counts = [len(part) for part in parts]
    weight, total = np.empty((len(q), sum(counts))), np.empty(len(q))
    begin = 0
    for part, count in zip(parts, counts, strict=True):
        _logits(q, part, scale, weight, begin)
        begin += count
    _weights(weight, sink_H.numpy(), total)
    out, begin = np.zeros_like(q), 0
    for part, count in zip(parts, counts, strict=True):
        _values(weight, begin, part, out)
        begin += count
    _normalise(out, total)
    return torch.from_numpy(out)
