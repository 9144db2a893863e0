"""Compressor, indexer and attention in place of the references', with pages made for a call.

Owns the way from a component's tensors to what kernels read. Rows that a sequence remembers and
those of this call are written into pages by the kernel that writes caches, and lists of slots say
which a token attends to. The compressor's state, which sites carry in the official order, is laid
into rings and back. Entries are chosen in ascending order by the kernel; which they are is the
same. Indexers of either family.

Gives the reason where no kernel fits. Kept honest by suites/runs/test_cutedsl.py. Shape letters: T
tokens, B sequences, W windows or entries, E width of an entry, H heads, N indexer heads, R rows.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.runs.cutedsl_linears import wide_product
from degarble.harness.runs.cutedsl_parts import NoKernelError, own
from degarble.harness.runs.cutedsl_rows import TURNS, norm_weight, rope_of, through_pages
from degarble.kernels.common.attention_rows import ROTATED, WIDTH
from degarble.kernels.common.compressor_problem import (
    PoolProblem,
    as_references_have_it,
    overlaps,
    rows_of_ring,
    windows_of,
)
from degarble.kernels.common.gemm_problem import GemmProblem
from degarble.kernels.common.indexer_operand_problem import WIDTH as KEY_WIDTH
from degarble.kernels.common.indexer_operand_problem import OperandProblem
from degarble.kernels.common.indexer_problem import KeyPages, ScoresProblem
from degarble.kernels.common.kv_problem import Pages, WriteProblem
from degarble.kernels.common.sparse_attention_problem import AttentionProblem, KeyList
from degarble.kernels.common.targets import SM90A
from degarble.kernels.common.topk_problem import TopkProblem
from degarble.references.facts import Span, spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.anatomy.types import Rope
    from degarble.harness.runs.cutedsl_parts import Compute, Outputs, Part, Work

_PAGE = 64  # entries


# ---- compressor ----------------------------------------------------------------------------------


def pool(part: Part) -> Compute:
    """Entries that this call completes, normed and turned, and the carried state."""
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
    """Values and positions of the entries, None without any; and the state behind the call."""
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
    """Lay the official state behind `length` tokens into a ring: position p in row p % R."""
    ring = torch.zeros_like(state_RF)
    whole, base = length // ratio * ratio, ratio if overlaps(ratio) else 0
    for position in range(max(0, whole - base), length):
        ring[position % rows_of_ring(ratio)] = state_RF[base + position - whole]
    return ring


# ---- indexer -------------------------------------------------------------------------------------


def _require_indexer(part: Part) -> None:
    if part.config.index_head_dim != KEY_WIDTH:
        raise NoKernelError(f"indexer heads of {part.config.index_head_dim}; kernels have 128")


def _indexer_rope(part: Part) -> tuple[Rope, str]:
    if not part.v4:
        return part.config.indexer_rope(), "halves"
    return part.config.rope(part.component.block), "interleaved"


def _operand(part: Part, tokens: int, heads: int, pairing: str, **more: Any) -> OperandProblem:
    switches = part.facts.numerics.switches
    return OperandProblem(
        tokens, heads, pairing, str(switches.indexer_format), switches.indexer_hadamard, **more
    )


def indexer_q(part: Part) -> Compute:
    """Queries turned, transformed and rounded as the scores multiply them."""
    _require_indexer(part)
    rope, pairing = _indexer_rope(part)
    heads = part.config.index_n_heads
    _operand(part, 1, heads, pairing, positions=1)

    def compute(work: Work) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        table = TURNS.reaching(rope, positions)
        problem = _operand(part, x.shape[0], heads, pairing, positions=table.shape[0])
        (made,) = work.run(
            "simt_indexer_operand", problem, rows=x.reshape(-1, heads, KEY_WIDTH), turns=table,
            positions=positions,
        )  # fmt: skip
        return {"out": made}

    return compute


def indexer_k(part: Part) -> Compute:
    """V3.2's keys: LayerNorm, then what queries go through."""
    _require_indexer(part)
    rope, pairing = _indexer_rope(part)
    names = {name.rpartition(".")[2]: name for name in part.shapes}
    epsilon = part.config.rms_norm_eps
    _operand(part, 1, 1, pairing, positions=1, normed=True, epsilon=epsilon)

    def compute(work: Work) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        table = TURNS.reaching(rope, positions)
        problem = _operand(
            part, x.shape[0], 1, pairing, positions=table.shape[0], normed=True, epsilon=epsilon
        )
        weight, bias = (
            work.weights.plain(names[each], torch.float32) for each in ("k_norm", "bias")
        )
        (made,) = work.run(
            "simt_indexer_operand", problem, rows=x.unsqueeze(1), turns=table,
            positions=positions, weight=weight, bias=bias,
        )  # fmt: skip
        return {"out": made.squeeze(1)}

    return compute


def indexer_pool(part: Part) -> Compute:
    """As the main compressor, then what the indexer's queries go through but the turn."""
    _require_indexer(part)
    pooled = pool(part)
    _operand(part, 1, 1, "none")

    def compute(work: Work) -> Outputs:
        made = pooled(work)
        rows = made["out"]
        problem = _operand(part, rows.shape[0], 1, "none")
        (keys,) = work.run("simt_indexer_operand", problem, rows=own(rows.unsqueeze(1)))
        return made | {"out": keys.squeeze(1)}

    return compute


def indexer_weights(part: Part) -> Compute:
    """Weights of heads. A factor that is a power of two is part of the matrix, bit for bit."""
    c, name = part.config, part.name
    factor = float((c.index_head_dim * c.index_n_heads) ** -0.5)
    if part.format_of(name) != "BF16" or part.facts.activation(name) is not None:
        raise NoKernelError(f"no kernel has heads' weights of {part.format_of(name)}")
    if torch.frexp(torch.tensor(factor)).mantissa != 0.5:
        raise NoKernelError(f"no kernel multiplies by {factor:.4f}, which is no power of two")
    outputs, inner = part.shapes[name]
    problem = GemmProblem(1, outputs, inner)
    stored = part.v4 and part.facts.numerics.switches.indexer_in_storage_dtype

    def compute(work: Work) -> Outputs:
        x = work.bf16()
        weight = work.weights.made(
            name, "scaled", lambda w: work.weights.there(w.values(torch.bfloat16) * factor)
        )
        if not part.v4:
            return {"out": wide_product(work, x, weight, outputs)}
        told = GemmProblem(x.shape[0], problem.columns, problem.inner)
        (made,) = work.run("sm90_gemm_bf16", told, a=x, b=weight)
        return {"out": made if stored else made.float()}

    if part.v4 and part.target != SM90A.name:
        raise NoKernelError(f"the GEMM of bf16 has run on {SM90A.name} alone")
    return compute


def indexer_scores(part: Part) -> Compute:
    """Scores of every entry that a token may see, -inf elsewhere."""
    _require_indexer(part)
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, block = part.config.index_n_heads, part.component.block
    ratio = block.ratio if part.v4 and block is not None else 1
    stored = part.v4 and part.facts.numerics.switches.indexer_in_storage_dtype
    arithmetic = "stored" if stored else "float32"
    ScoresProblem(1, heads, 1, 1, KeyPages("bf16", _PAGE, 1), ratio, arithmetic)

    def compute(work: Work) -> Outputs:
        spans = spans_of(work.inputs)
        keys = memories(work, spans, "state_keys", "keys", ratio)
        widest = max(len(own_keys) for own_keys in keys)
        q = work.bf16("q")
        if not widest:
            return {"out": q.new_empty(len(q), 0, dtype=torch.float32)}
        each = -(-widest // _PAGE)
        pages = q.new_zeros(len(keys) * each * _PAGE, KEY_WIDTH)
        for n, own_keys in enumerate(keys):
            pages[n * each * _PAGE : n * each * _PAGE + len(own_keys)] = own_keys
        told = KeyPages("bf16", _PAGE, len(keys) * each)
        problem = ScoresProblem(len(q), heads, widest, len(keys), told, ratio, arithmetic)
        counts = torch.tensor([span.count for span in spans])
        owners = torch.repeat_interleave(torch.arange(len(spans), dtype=torch.int32), counts)
        (made,) = work.run(
            "sm90_indexer_scores", problem, queries=q,
            weights=work.bf16("weights") if stored else work.fp32("weights"),
            positions=own(work.inputs["positions"]), sequences=owners.to(q.device),
            table=torch.arange(told.count, dtype=torch.int32, device=q.device).reshape(-1, each),
            pages=pages.view(torch.uint8).reshape(told.count, -1),
        )  # fmt: skip
        return {"out": made}

    return compute


def indexer_topk(part: Part) -> Compute:
    """The entries of the largest scores, -1 for none."""
    count = part.config.index_topk
    TopkProblem(1, 1, count)

    def compute(work: Work) -> Outputs:
        scores = work.fp32("scores")
        rows, entries = scores.shape
        if not entries:
            return {"out": scores.new_empty(rows, 0, dtype=torch.int64)}
        problem = TopkProblem(rows, entries, min(count, entries))
        (made,) = work.run("simt_indexer_topk", problem, scores=scores)
        return {"out": made.to(torch.int64)}

    return compute


# ---- attention -----------------------------------------------------------------------------------


def memories(work: Work, spans: Sequence[Span], before: str, name: str, ratio: int) -> list[Tensor]:
    """Each sequence's rows of BF16: those of earlier calls, then those of this one."""
    new = work.bf16(name)
    old = work.bf16(before) if before in work.inputs else new[:0]
    kept = [span.entries_before(ratio) for span in spans]
    made = [span.entries_made(ratio) for span in spans]
    parts = zip(old[: sum(kept)].split(kept), new.split(made), strict=True)
    return [torch.cat(pair) for pair in parts]


def attend(part: Part) -> Compute:
    """V4's attention: window, entries and sink in one softmax over pages of BF16."""
    c, name, block = part.config, part.name, part.component.block
    rope_of(part, c.head_dim)
    if part.facts.numerics.switches.attention_in_storage_dtype:
        raise NoKernelError("the kernel's softmax is float32")
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, ratio = c.num_attention_heads, block.ratio if block is not None else 0
    AttentionProblem(1, heads, KeyList(c.sliding_window, Pages("bf16", _PAGE, 1)))

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
    """Slots of the last `window` positions of every token, and the pages that have them."""
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
    """Slots of every token's entries, chosen or all visible ones; no list where there are none."""
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
    """Rows written into pages of BF16 entries, in order."""
    count = rows.shape[0]
    pages = Pages("bf16", _PAGE, max(1, -(-count // _PAGE)), width=rows.shape[1])
    cache = torch.zeros(pages.count, pages.stride, dtype=torch.uint8, device=rows.device)
    slots = torch.arange(count, device=rows.device)
    work.run(
        "simt_kv_write", WriteProblem(count, pages, source="row"), values=own(rows), slots=slots,
        cache=cache,
    )  # fmt: skip
    return cache, pages


assert ROTATED < KEY_WIDTH < WIDTH, "rows of the indexer are narrower than those of attention"
