"""Sparse attention in Triton, as a baseline: BF16 cache, 64 heads a program.

A program has a token and up to 64 heads, gathers 32 keys at a time, and keeps the sums of 512
columns in registers. Triton comes with torch for GPUs; only bench_sparse_attention imports this,
and it compares the results with torch's version before it measures.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
HEADS = 64  # of a program


@triton.jit
def attention_kernel(
    tensors: tl.tuple,
    lists: tl.tuple,
    caches: tl.tuple,
    numbers: tl.tuple,
    WIDTHS: tl.constexpr,
) -> None:
    """Attend with a token's heads; absent keys have logits of -inf, and rows of zeros.

    Tensors are queries, sinks and outputs; numbers are the scale times log2(e), and the heads.
    """
    q, sink, out = tensors[0], tensors[1], tensors[2]
    scale, heads = numbers[0], numbers[1]
    NEAR: tl.constexpr = WIDTHS[0]
    FAR: tl.constexpr = WIDTHS[1]
    token, first = tl.program_id(0), tl.program_id(1) * 64
    head = first + tl.arange(0, 64)
    column = tl.arange(0, 512)
    at = (token.to(tl.int64) * heads + head)[:, None] * 512 + column[None, :]
    query = tl.load(q + at, mask=(head < heads)[:, None], other=0.0)
    peak = tl.full((64,), -float("inf"), tl.float32)
    total = tl.zeros((64,), tl.float32)
    sums = tl.zeros((64, 512), tl.float32)
    for begin in range(0, NEAR + FAR, 32):
        place = begin + tl.arange(0, 32)
        near = tl.load(lists[0] + token * NEAR + place, mask=place < NEAR, other=-1)
        far = tl.load(lists[1] + token * FAR + place - NEAR, mask=place >= NEAR, other=-1)
        slot = tl.where(place < NEAR, near, far)
        seen = slot >= 0
        where = slot.to(tl.int64)[:, None] * 512 + column[None, :]
        source = tl.where(begin < NEAR, caches[0], caches[1])
        keys = tl.load(source + where, mask=seen[:, None], other=0.0)
        logits = tl.dot(query, tl.trans(keys)) * scale
        logits = tl.where(seen[None, :], logits, -float("inf"))
        top = tl.maximum(peak, tl.max(logits, 1))
        factor = tl.exp2(peak - top)
        shares = tl.exp2(logits - top[:, None])
        total = total * factor + tl.sum(shares, 1)
        sums = tl.dot(shares.to(tl.bfloat16), keys, sums * factor[:, None])
        peak = top
    own = tl.load(sink + head, mask=head < heads, other=0.0) * 1.4426950408889634
    total = total + tl.exp2(own - peak)
    tl.store(out + at, (sums / total[:, None]).to(tl.bfloat16), mask=(head < heads)[:, None])


def attend(rows: Any, lists: Any, problem: Any) -> None:
    """Launch on queries, sinks and output, and on slots and cache of each list.

    Widths are multiples of 32, and the first of them name a key each.
    """
    attention_kernel[problem.tokens, -(-problem.heads // HEADS)](
        rows,
        tuple(slots for slots, _ in lists),
        tuple(cache.view(torch.bfloat16) for _, cache in lists),
        (problem.scale * LOG2_E, problem.heads),
        tuple(slots.shape[1] for slots, _ in lists),
        num_warps=8,
        num_stages=1,
    )
