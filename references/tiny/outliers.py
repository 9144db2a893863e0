"""Put outlier channels, as large models have them, into a small one without changing its function.

The weight of a norm grows by a power of two in chosen channels, and the columns that read the
channel shrink by it. Powers of two change no bit of a BF16 mantissa, so every output stays as it
was. SwiGLU's output gets no outliers: it is clamped, so gate and up may not grow.
Legend: D hidden, Q the query latent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

# Norms by the end of their name, and what reads their output.
_READERS = (
    (
        r"(?P<block>.*)\.attn_norm",
        r"attn\.(wq_a|wkv|wkv_a|(indexer\.)?compressor\.(wkv|wgate)|indexer\.(wk|weights_proj))",
    ),
    (r"(?P<block>.*)\.attn\.q_norm", r"attn\.(indexer\.)?wq_b"),
    (r"(?P<block>.*)\.ffn_norm", r"ffn\.(gate|w1|w3|(experts\.\d+|shared_experts)\.(w1|w3))"),
)
_SHARE = 0.03  # of the channels
_EXPONENTS = (3, 5)  # factors from 8 to 32, evenly drawn
_FLOOR = 2.0**-90  # a product below would lose bits; no weight of a trained model is that small


def readers_of(norm: str, names: Mapping[str, Tensor]) -> list[str]:
    """Return the matrices whose columns read the output of this norm."""
    for pattern, readers in _READERS:
        match = re.fullmatch(pattern, norm)
        if match:
            reader = re.compile(re.escape(match["block"]) + r"\." + readers)
            return [name for name in names if reader.fullmatch(name)]
    return []


def with_outliers(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the same model, with outlier channels after its norms."""
    made = dict(weights)
    generator = torch.Generator().manual_seed(seed)
    for norm in weights:
        readers = readers_of(norm, weights)
        if not readers:
            continue
        width = len(weights[norm])
        count = max(1, round(_SHARE * width))
        channels = torch.randperm(width, generator=generator)[:count]
        low, high = _EXPONENTS
        factor = 2.0 ** torch.randint(low, high + 1, (count,), generator=generator).float()
        made[norm] = weights[norm].clone()
        made[norm][channels] *= factor
        for name in readers:
            made[name] = weights[name].clone()
            made[name][:, channels] /= factor
            changed = made[name][:, channels].abs()
            assert not ((changed > 0) & (changed < _FLOOR)).any(), f"{name}: bits would be lost"
    return made
