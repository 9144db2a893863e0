"""Compiled form of mixing.mixing_pre for a few tokens on the CPU, where function calls dominate.

It covers gates, Sinkhorn and collapse, after the projection. Import it inside a function, because
importing numba is slow. No fast-math; sums run over increasing index (that of squares in float64),
so a result may differ from torch's in the last bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.compiled_loops import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.references.mixing_facts import MixingFacts, MixingWeights

    Floats = NDArray[Any]


@compiled
def _normalise(mix: Floats, iterations: int, epsilon: Any, sums: Floats) -> None:
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
def _pre(
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
        _normalise(mix_TSS[t], iterations, epsilon, sums)


def pre(x_TSD: Tensor, weights: MixingWeights, facts: MixingFacts) -> tuple[Tensor, Tensor, Tensor]:
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
    _pre(x, m_TN.numpy(), parameters, facts.iterations, outputs)
    collapsed, post, mix = (torch.from_numpy(each) for each in outputs)
    return collapsed, post, mix


def sinkhorn(logits_TSS: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Do the same as mixing.sinkhorn, for float32 and float64 on the CPU."""
    mix = logits_TSS.clone(memory_format=torch.contiguous_format)
    values = mix.numpy()
    sums = np.empty(values.shape[1], values.dtype)
    for token in values:
        _normalise(token, iterations, values.dtype.type(epsilon), sums)
    return mix
