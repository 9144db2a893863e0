"""Attention computed by hand with another mask: which keys a token sees.

It is planted only where the same computation with the right mask gives the healthy outputs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall

    Tensors = Mapping[str, Tensor]
    Seen = Callable[[Tensor, Tensor], Tensor]  # of positions of queries [T, 1] and keys [1, K]

_ALIKE = 0.02  # of the outputs' length


def attended(inputs: Tensors, seen: Seen) -> Tensor | None:
    """Return softmax attention in which each token sees some keys; None for other extents."""
    query, key, value = (inputs[name].double() for name in ("query", "key", "value"))
    positions, offsets = inputs["positions"], inputs["token_offsets"].tolist()
    spans = list(pairwise(offsets))
    lengths = [int(positions[b - 1]) + 1 if b > a else 0 for a, b in spans]
    if sum(lengths) != len(key) or query.shape[1] % key.shape[1]:
        return None
    groups = query.shape[1] // key.shape[1]
    made, begin = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64), 0
    for (a, b), length in zip(spans, lengths, strict=True):
        k, v = (side[begin : begin + length].repeat_interleave(groups, 1) for side in (key, value))
        scores = torch.einsum("thd,khd->htk", query[a:b], k) * query.shape[-1] ** -0.5
        visible = seen(positions[a:b, None], torch.arange(length)[None])
        scores = scores.masked_fill(~visible, -torch.inf)
        shares = scores.softmax(-1).nan_to_num(0.0)
        made[a:b] = torch.einsum("htk,khd->thd", shares, v)
        begin += length
    return made


def _causal(t: Tensor, k: Tensor) -> Tensor:
    return k <= t


def drawn_mask(
    drawn: random.Random, inputs: Tensors, outputs: Tensors
) -> tuple[dict[str, Any], Callable[[ComponentCall], ComponentCall]] | None:
    """Draw another mask; None where attention is not what is computed by hand here."""
    if not {"positions", "token_offsets"} <= inputs.keys() or list(outputs) != ["out"]:
        return None
    right, out = attended(inputs, _causal), outputs["out"].double()
    if right is None or right.numel() != out.numel():
        return None
    if float((right.reshape(out.shape) - out).norm()) > _ALIKE * float(out.norm()):
        return None
    number = drawn.randint(1, 8)
    kinds: dict[str, Seen] = {
        "window": lambda t, k: (k <= t) & (k > t - number),
        "first keys unseen": lambda t, k: (k <= t) & ((k >= number) | (k == t)),
        "itself unseen": lambda t, k: (k < t) | (t == 0),
        "every key so many apart": lambda t, k: (k <= t) & ((t - k) % (number + 1) == 0),
        "one key ahead": lambda t, k: k <= t + 1,
        "one key unseen": lambda t, k: (k <= t) & ((k != number) | (k == t)),
    }
    kind = drawn.choice(list(kinds))

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            healthy = call(inputs, weights)["out"]
            sides = [attended(inputs, seen) for seen in (kinds[kind], _causal)]
            if sides[0] is None or sides[1] is None:
                return {"out": healthy}
            # What differs is rounded once, as a kernel with this mask would.
            made, alike = (side.reshape(healthy.shape) for side in (sides[0], sides[0] == sides[1]))
            return {"out": torch.where(alike, healthy, made.to(healthy.dtype))}

        return faulty

    return {"op": kind, "number": number}, apply
