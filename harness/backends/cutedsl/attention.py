"""Run V4's compressor and sparse attention by our kernels, with paged caches built for each call.

A sequence's old rows and those of this call are written into pages by the cache-writing kernel, and
slot lists say which rows a token attends to. The compressor's state, which sites carry in the
official order, is converted into rings and back.

Shape letters: T tokens, B sequences, W windows or entries, E width of an entry, H heads, R rows, F
columns of a compressor's state.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from degarble.harness.backends.cutedsl.parts import NoKernelError, own
from degarble.harness.backends.cutedsl.rows import TURNS, norm_weight, rope_of, through_pages
from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.cache.problem import (
    PoolProblem,
    as_references_have_it,
    overlaps,
    rows_of_ring,
    windows_of,
)
from degarble.kernels.primitives.kv_problem import Pages, WriteProblem
from degarble.kernels.runtime.targets import SM90A
from degarble.references.facts import Span, spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.backends.cutedsl.parts import Compute, Outputs, Part, Work

PAGE = 64  # entries


# ---- compressor ----------------------------------------------------------------------------------


def pool(part: Part) -> Compute:
    """Return the compressor's compute function: completed entries, normed and rotated; state."""
    if part.facts.numerics.switches.pooling_in_storage_dtype:
        raise NoKernelError("the kernel pools in float32")
    names = {name.rpartition(".")[2]: name for name in part.shapes}
    width = part.shapes[names["norm"]][0]
    rope, kind = rope_of(part, width), norm_weight(part, names["norm"])
    block = part.component.block
    assert block is not None, "only blocks compress"
    PoolProblem(1, 1, 1, 1, block.ratio, width)

    def compute(work: Work) -> Outputs:
        spans = spans_of(work.inputs)
        entries, made = _pooled(work, spans, names["ape"], block.ratio, width)
        if entries is None:
            out = made["state_latent"].new_empty(0, width, dtype=torch.bfloat16)
        else:
            values, positions = entries
            table = TURNS.reaching(rope, positions)
            told = {
                "positions": table.shape[0], "epsilon": part.config.rms_norm_eps,
                "weight": kind, "source": "latent",
            }  # fmt: skip
            weight = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
            more = {
                "weight": work.weights.plain(names["norm"], weight),
                "turns": table, "positions": positions,
            }  # fmt: skip
            out = through_pages(work, values, "bf16", told, more)
        counts = accumulate(span.entries_made(block.ratio) for span in spans)
        offsets = torch.tensor([0, *counts], device=out.device)
        return {"out": out, "entry_offsets": offsets, **made}

    return compute


def _pooled(
    work: Work, spans: Sequence[Span], ape: str, ratio: int, width: int
) -> tuple[tuple[Tensor, Tensor] | None, Outputs]:
    """Return values and positions of the entries, None without any; and the later state."""
    latent, gate = work.fp32("latent"), work.fp32("gate")
    device, tokens, sequences = latent.device, latent.shape[0], len(spans)
    starts, counts = [span.start for span in spans], [span.count for span in spans]
    alone = tokens == sequences
    closing, owners = windows_of(starts, counts, ratio)
    if alone:  # one token a sequence: every sequence has a window, which may not close
        closing = owners = torch.arange(sequences, dtype=torch.int32)
    problem = PoolProblem(tokens, sequences, len(closing), sequences, ratio, width)
    state = torch.cat((work.fp32("state_latent"), work.fp32("state_gate")), dim=2)
    rings = torch.stack([_ring(state[n], start, ratio) for n, start in enumerate(starts)])
    ids = torch.arange(sequences, dtype=torch.int32, device=device)
    values, positions, _ = work.run(
        "simt_compressor", problem,
        projected=own(torch.cat((latent, gate), dim=1)),
        ape=work.weights.plain(ape, torch.float32), rings=rings,
        closing=closing.to(device), owners=owners.to(device),
        starts=torch.tensor(starts, device=device),
        offsets=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        ring_of=ids, table=torch.zeros(sequences, 1, dtype=torch.int32, device=device),
    )  # fmt: skip
    after = torch.stack(
        [as_references_have_it(rings[n], span.stop, ratio) for n, span in enumerate(spans)]
    )
    columns = latent.shape[1]
    made = {"state_latent": after[..., :columns], "state_gate": after[..., columns:]}
    if alone:
        closes = [n for n, span in enumerate(spans) if span.entries_made(ratio)]
        index = torch.tensor(closes, dtype=torch.int64, device=device)
        values, positions = values[index], positions[index]
    return ((own(values), own(positions)) if len(values) else None), made


def _ring(state_RF: Tensor, length: int, ratio: int) -> Tensor:
    """Write the official state after `length` tokens into a ring: position p in row p % R."""
    ring = torch.zeros_like(state_RF)
    whole, base = length // ratio * ratio, ratio if overlaps(ratio) else 0
    for position in range(max(0, whole - base), length):
        # The official state begins with the previous window if windows overlap (`base`).
        ring[position % rows_of_ring(ratio)] = state_RF[base + position - whole]
    return ring


# ---- attention -----------------------------------------------------------------------------------


def memories(work: Work, spans: Sequence[Span], before: str, name: str, ratio: int) -> list[Tensor]:
    """Return each sequence's BF16 rows: those of earlier calls, then those of this one."""
    new = work.bf16(name)
    old = work.bf16(before) if before in work.inputs else new[:0]
    kept = [span.entries_before(ratio) for span in spans]
    made = [span.entries_made(ratio) for span in spans]
    parts = zip(old[: sum(kept)].split(kept), new.split(made), strict=True)
    return [torch.cat(pair) for pair in parts]


def attend(part: Part) -> Compute:
    """Return the compute function of V4's attention: window, entries and sink in one softmax."""
    c, name, block = part.config, part.name, part.component.block
    rope_of(part, c.head_dim)
    if part.facts.numerics.switches.attention_in_storage_dtype:
        raise NoKernelError("the kernel's softmax is float32")
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, ratio = c.num_attention_heads, block.ratio if block is not None else 0
    AttentionProblem(1, heads, KeyList(c.sliding_window, Pages("bf16", PAGE, 1)))

    def compute(work: Work) -> Outputs:
        spans = spans_of(work.inputs)
        q, positions = work.bf16("q"), work.inputs["positions"]
        lists = [_window_list(work, spans, positions, c.sliding_window)]
        if ratio:
            lists += _entry_list(work, spans, positions, ratio)
        of = [KeyList(slots.shape[1], pages) for slots, _, pages in lists]
        mode = "decode" if len(q) == len(spans) else "prefill"
        problem = AttentionProblem(len(q), heads, of[0], of[1] if of[1:] else None, mode)
        more: dict[str, Tensor] = {}
        for kind, (slots, cache, _) in zip(("window", "entries"), lists, strict=False):
            more |= {f"{kind}_slots": slots, f"{kind}_cache": cache}
        sink = work.weights.plain(name, torch.float32)
        made = work.run("sm90_sparse_attention", problem, q=q, sink=sink, **more)
        return {"out": made[0]}

    return compute


def _window_list(
    work: Work, spans: Sequence[Span], positions: Tensor, window: int
) -> tuple[Tensor, Tensor, Pages]:
    """Return slots of every token's last `window` positions, and the pages that contain them."""
    new = work.bf16("window")
    kept = [min(span.start, window - 1) for span in spans]
    old = work.bf16("state_window") if "state_window" in work.inputs else new[:0]
    parts = zip(old[: sum(kept)].split(kept), new.split([s.count for s in spans]), strict=True)
    rows = torch.cat([torch.cat(pair) for pair in parts])
    begins, at = [], 0
    for span, count in zip(spans, kept, strict=True):
        begins += [at + count - span.start] * span.count  # the slot of position 0
        at += count + span.count
    back = torch.arange(window - 1, -1, -1, device=rows.device)
    seen = positions[:, None] - back
    first = torch.tensor(begins, device=rows.device)[:, None]
    slots = torch.where(seen >= 0, first + seen, -1)
    return own(slots.to(torch.int32)), *paged(work, rows)


def _entry_list(
    work: Work, spans: Sequence[Span], positions: Tensor, ratio: int
) -> list[tuple[Tensor, Tensor, Pages]]:
    """Return slots of every token's chosen or visible entries; empty if there are no entries."""
    entries = memories(work, spans, "state_compressed", "compressed", ratio)
    rows = torch.cat(entries)
    if not len(rows):
        return []
    begins = [0, *accumulate(len(each) for each in entries)]
    first = [begin for begin, span in zip(begins, spans, strict=False) for _ in range(span.count)]
    start = torch.tensor(first, device=rows.device)[:, None]
    if "chosen" in work.inputs:
        chosen = work.inputs["chosen"]
    else:
        widest = max(len(each) for each in entries)
        every = torch.arange(widest, device=rows.device).expand(len(positions), -1)
        chosen = torch.where(every < (positions[:, None] + 1) // ratio, every, -1)
    slots = torch.where(chosen >= 0, start + chosen, -1)
    return [(own(slots.to(torch.int32)), *paged(work, rows))]


def paged(work: Work, rows: Tensor) -> tuple[Tensor, Pages]:
    """Write rows into pages of BF16 entries, in order."""
    count = rows.shape[0]
    pages = Pages("bf16", PAGE, max(1, -(-count // PAGE)), width=rows.shape[1])
    cache = torch.zeros(pages.count, pages.stride, dtype=torch.uint8, device=rows.device)
    slots = torch.arange(count, device=rows.device)
    work.run(
        "simt_kv_write", WriteProblem(count, pages, source="row"), values=own(rows), slots=slots,
        cache=cache,
    )  # fmt: skip
    return cache, pages
