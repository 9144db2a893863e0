"""Compiled loops for a few tokens on the CPU, as in a decoding step.

Import it inside a function, because importing numba is slow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.compiled_loops import compiled, compiled_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.references.facts import MixingFacts, MixingWeights


# --------------------------------------------------------------------------------------------------
# Float64 products and attention
#
# Function calls and reading weights dominate: a product reads BF16 weights as stored, a quarter of
# the bytes that they decode to. The compiler orders the float64 sums, so their last bits may differ
# from torch's; the BF16 result does not notice. The definition never computes here; callers ask
# numerics.compiles first.

if TYPE_CHECKING:
    Doubles = NDArray[np.float64]
    Bits = NDArray[np.uint16]
    Words = NDArray[np.float32]

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
    """Return `x @ w.T` of float64 inputs and BF16 weights."""
    out = np.empty((x_TK.shape[0], value_NK.shape[0]))
    _product(x_TK.numpy(), value_NK.view(torch.uint16).numpy(), out)
    return torch.from_numpy(out)


# --------------------------------------------------------------------------------------------------
# Short sums of FP8 codes: the steps of tensor_core.dense_gemm in float32, where they are exact
#
# A product has 8 bits, a sum of aligned terms fewer than 24, and no product underflows.
# Shape letters: B blocks of rows, L lanes, the rows of a block.

_EXPONENT = U32(0x7F800000)
_LANES = 32  # rows of B that are summed at once


@compiled_with(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _short_sums(
    a_MK: Words, b_BKL: Words, step: int, unit: np.float32, kept: np.uint32, out_MN: Words
) -> None:
    """Sum for all lanes of a block of B's rows at once: a sum across lanes would cost most."""
    lanes = b_BKL.shape[3]
    total, largest = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    scale, sums = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    bits, power_bits = total.view(np.uint32), largest.view(np.uint32)
    for block in range(b_BKL.shape[1]):
        for m in range(a_MK.shape[1]):
            total[:] = F32(0.0)
            for begin in range(0, a_MK.shape[2], step):
                for lane in range(lanes):
                    power_bits[lane] = bits[lane] & _EXPONENT
                for k in range(begin, begin + step):
                    power = a_MK[1, m, k]
                    for lane in range(lanes):
                        largest[lane] = max(largest[lane], power * b_BKL[1, block, k, lane])
                for lane in range(lanes):
                    # All terms of a lane may be zero.
                    some = largest[lane] > F32(0.0)
                    scale[lane] = unit / largest[lane] if some else F32(1.0)
                    sums[lane] = np.trunc(total[lane] * scale[lane])
                for k in range(begin, begin + step):
                    value = a_MK[0, m, k]
                    for lane in range(lanes):
                        sums[lane] += np.trunc(value * b_BKL[0, block, k, lane] * scale[lane])
                for lane in range(lanes):
                    total[lane] = sums[lane] / scale[lane]
                    bits[lane] &= kept
            for lane in range(lanes):
                out_MN[m, block * lanes + lane] = total[lane]


def short_sums(a_MK: Tensor, b_NK: Tensor, step: int, bits: int) -> Tensor:
    """Return A B^T of numbers of E4M3 beside 2 to their exponents [2, R, K], in whole steps.

    A step's terms have so many fraction bits, and so has its sum.
    """
    rows, width = b_NK.shape[1:]
    whole = torch.nn.functional.pad(b_NK, (0, 0, 0, -rows % _LANES))
    b_BKL = whole.reshape(2, -1, _LANES, width).transpose(2, 3).contiguous()
    out = np.empty((a_MK.shape[1], whole.shape[1]), np.float32)
    kept = U32(0xFFFFFFFF >> (23 - bits) << (23 - bits))  # of a float32
    _short_sums(a_MK.numpy(), b_BKL.numpy(), step, F32(2.0**bits), kept, out)
    return torch.from_numpy(out)[:, :rows]


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
    """Multiply each group by its matrix [T, G * O], float64 inputs by BF16 weights."""
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
    """Replace logits by unnormalised weights, rounded to BF16 as stored, and write their sums."""
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
    """Return one token's output [H, L] over rows [R, L] in parts, all float64.

    The softmax weights are rounded to BF16, as they are stored.
    """
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


# --------------------------------------------------------------------------------------------------
# mixing.mixing_pre: gates, Sinkhorn and collapse, after the projection
#
# No fast-math; sums run over increasing index (that of squares in float64), so a result may differ
# from torch's in the last bits.

if TYPE_CHECKING:
    Floats = NDArray[Any]


@compiled
def _normalise_streams(mix: Floats, iterations: int, epsilon: Any, sums: Floats) -> None:
    """Turn logits [S, S] into the mix, in place: softmax of rows, then columns and rows in turn."""
    streams = mix.shape[0]
    for i in range(streams):
        peak = mix[i, 0]
        for k in range(1, streams):
            peak = max(peak, mix[i, k])
        total = mix.dtype.type(0.0)
        for k in range(streams):
            mix[i, k] = np.exp(mix[i, k] - peak)
            total += mix[i, k]
        for k in range(streams):
            mix[i, k] = mix[i, k] / total + epsilon
    # The softmax of the rows counts as the row half of the first iteration.
    for half in range(2 * iterations - 1):
        is_column = half % 2 == 0
        for a in range(streams):
            sums[a] = epsilon
            for b in range(streams):
                sums[a] += mix[b, a] if is_column else mix[a, b]
        for i in range(streams):
            for k in range(streams):
                mix[i, k] = mix[i, k] / (sums[k] if is_column else sums[i])


@compiled
def _mixing_pre(
    x_TSD: Floats,
    m_TN: Floats,
    parameters: tuple[Floats, Floats, Any, Any],
    iterations: int,
    outputs: tuple[Floats, Floats, Floats],
) -> None:
    """Compute gates, mix and collapse of every token; `m_TN` lacks the norm factor."""
    base_N, scale, epsilon, norm_epsilon = parameters
    collapsed_TD, post_TS, mix_TSS = outputs
    tokens, streams, width = x_TSD.shape
    sums, one = np.empty(streams, x_TSD.dtype), x_TSD.dtype.type(1.0)
    for t in range(tokens):
        squares = 0.0
        for s in range(streams):
            for d in range(width):
                squares += np.float64(x_TSD[t, s, d]) * np.float64(x_TSD[t, s, d])
        # One RMS over all streams of a token together.
        rho = x_TSD.dtype.type(1.0 / math.sqrt(squares / (streams * width) + norm_epsilon))
        for s in range(streams):
            gate = m_TN[t, s] * rho * scale[0] + base_N[s]
            pre = one / (one + np.exp(-gate)) + epsilon
            for d in range(width):
                part = pre * x_TSD[t, s, d]
                collapsed_TD[t, d] = part if s == 0 else collapsed_TD[t, d] + part
            gate = m_TN[t, streams + s] * rho * scale[1] + base_N[streams + s]
            post_TS[t, s] = (one + one) / (one + np.exp(-gate))
            for k in range(streams):
                # Rows of fn: S pre, S post, then the mix row by row.
                row = 2 * streams + s * streams + k
                mix_TSS[t, s, k] = m_TN[t, row] * rho * scale[2] + base_N[row]
        _normalise_streams(mix_TSS[t], iterations, epsilon, sums)


def mixing_pre(
    x_TSD: Tensor, weights: MixingWeights, facts: MixingFacts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return collapsed input, post and mix in the dtype of `x_TSD` (float32 or float64, CPU)."""
    tokens, streams, width = x_TSD.shape
    m_TN = torch.mm(x_TSD.reshape(tokens, -1), weights.fn.T)
    x, real = x_TSD.numpy(), x_TSD.numpy().dtype.type
    outputs = (
        np.empty((tokens, width), x.dtype),
        np.empty((tokens, streams), x.dtype),
        np.empty((tokens, streams, streams), x.dtype),
    )
    parameters = (
        weights.base.numpy(),
        weights.scale.numpy(),
        real(facts.epsilon),
        facts.norm_epsilon,
    )
    _mixing_pre(x, m_TN.numpy(), parameters, facts.iterations, outputs)
    collapsed, post, mix = (torch.from_numpy(output) for output in outputs)
    return collapsed, post, mix


def sinkhorn(logits_TSS: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Do the same as mixing.sinkhorn, for float32 and float64 on the CPU."""
    mix = logits_TSS.clone(memory_format=torch.contiguous_format)
    values = mix.numpy()
    sums = np.empty(values.shape[1], values.dtype)
    for token in values:
        _normalise_streams(token, iterations, values.dtype.type(epsilon), sums)
    return mix
