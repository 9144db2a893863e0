"""Attention, caches and indexer of a model by our kernels: V4's and V3.2's."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.kernels import NoKernelError, own
from degarble.harness.backends.cutedsl.linears import wide_product
from degarble.harness.backends.cutedsl.rows import (
    NORM_WEIGHTS,
    TURNS,
    norm_weight,
    rope_of,
    through_pages,
)
from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.cache.problem import (
    PoolProblem,
    as_references_have_it,
    overlaps,
    rows_of_ring,
    windows_of,
)
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.indexer.problem import KeyPages, OperandProblem, ScoresProblem, TopkProblem
from degarble.kernels.primitives.kv_problem import ROTATED, WIDTH, WITH_KEY, Pages, WriteProblem
from degarble.kernels.rows.problem import ScaleProblem
from degarble.kernels.runtime.targets import SM90A
from degarble.references.attention import softmax_scale
from degarble.references.facts import Span, spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import (
        ComponentCallWork,
        ComponentPart,
        Compute,
        Kernels,
        Outputs,
    )
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.types import Rope


# --------------------------------------------------------------------------------------------------
# Run V4's compressor and sparse attention by our kernels, with paged caches built for each call.
#
# A sequence's old rows and those of this call are written into pages by the cache-writing kernel,
# and slot lists say which rows a token attends to. The compressor's state, which sites carry in the
# official order, is converted into rings and back.
#
# Shape letters: T tokens, B sequences, W windows or entries, E width of an entry, H heads, R rows,
# F columns of a compressor's state.

PAGE = 64  # entries


# ---- compressor ----------------------------------------------------------------------------------


def pool(part: ComponentPart) -> Compute:
    """Return the compressor's compute function: completed entries, normed and rotated; state."""
    if part.facts.numerics.switches.pooling_in_storage_dtype:
        raise NoKernelError("the kernel pools in float32")
    names = {name.rpartition(".")[2]: name for name in part.shapes}
    width = part.shapes[names["norm"]][0]
    rope, kind = rope_of(part, width), norm_weight(part, names["norm"])
    block = part.component.block
    assert block is not None, "only blocks compress"
    PoolProblem(1, 1, 1, 1, block.ratio, width)

    def compute(work: ComponentCallWork) -> Outputs:
        spans = spans_of(work.inputs)
        entries, made = _pooled(work, spans, names["ape"], block.ratio, width)
        if entries is None:
            out = made["state_latent"].new_empty(0, width, dtype=torch.bfloat16)
        else:
            values, positions = entries
            table = TURNS.covering(rope, positions)
            fields = {
                "positions": table.shape[0], "epsilon": part.config.rms_norm_eps,
                "weight": kind, "source": "latent",
            }  # fmt: skip
            weight = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
            more = {
                "weight": work.weights.plain(names["norm"], weight),
                "turns": table, "positions": positions,
            }  # fmt: skip
            out = through_pages(work, values, "bf16", fields, more)
        counts = accumulate(span.entries_made(block.ratio) for span in spans)
        offsets = torch.tensor([0, *counts], device=out.device)
        return {"out": out, "entry_offsets": offsets, **made}

    return compute


def _pooled(
    work: ComponentCallWork, spans: Sequence[Span], ape: str, ratio: int, width: int
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


def memories(
    work: ComponentCallWork, spans: Sequence[Span], before: str, name: str, ratio: int
) -> list[Tensor]:
    """Return each sequence's BF16 rows: those of earlier calls, then those of this one."""
    new = work.bf16(name)
    old = work.bf16(before) if before in work.inputs else new[:0]
    kept = [span.entries_before(ratio) for span in spans]
    made = [span.entries_made(ratio) for span in spans]
    parts = zip(old[: sum(kept)].split(kept), new.split(made), strict=True)
    return [torch.cat(pair) for pair in parts]


def attend(part: ComponentPart) -> Compute:
    """Return the compute function of V4's attention: window, entries and sink in one softmax."""
    c, name, block = part.config, part.name, part.component.block
    rope_of(part, c.head_dim)
    if part.facts.numerics.switches.attention_in_storage_dtype:
        raise NoKernelError("the kernel's softmax is float32")
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, ratio = c.num_attention_heads, block.ratio if block is not None else 0
    AttentionProblem(1, heads, KeyList(c.sliding_window, Pages("bf16", PAGE, 1)))

    def compute(work: ComponentCallWork) -> Outputs:
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
        tensors = work.run("sm90_sparse_attention", problem, q=q, sink=sink, **more)
        return {"out": tensors[0]}

    return compute


def _window_list(
    work: ComponentCallWork, spans: Sequence[Span], positions: Tensor, window: int
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
    work: ComponentCallWork, spans: Sequence[Span], positions: Tensor, ratio: int
) -> list[tuple[Tensor, Tensor, Pages]]:
    """Return slots of every token's chosen or visible entries; empty if there are no entries."""
    entries = memories(work, spans, "state_compressed", "compressed", ratio)
    rows = torch.cat(entries)
    if not len(rows):
        return []
    begins = [0, *accumulate(len(entry) for entry in entries)]
    first = [begin for begin, span in zip(begins, spans, strict=False) for _ in range(span.count)]
    start = torch.tensor(first, device=rows.device)[:, None]
    if "chosen" in work.inputs:
        chosen = work.inputs["chosen"]
    else:
        widest = max(len(entry) for entry in entries)
        every = torch.arange(widest, device=rows.device).expand(len(positions), -1)
        chosen = torch.where(every < (positions[:, None] + 1) // ratio, every, -1)
    slots = torch.where(chosen >= 0, start + chosen, -1)
    return [(own(slots.to(torch.int32)), *paged(work, rows))]


def paged(work: ComponentCallWork, rows: Tensor) -> tuple[Tensor, Pages]:
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


# --------------------------------------------------------------------------------------------------
# Run V3.2's MLA by our kernels: cache rows, and absorbed attention over pages built for a call.
#
# Absorbed attention has three steps: queries times each head's key rows of wkv_b, attention over
# latents, the result times the head's value rows. The first and the last are grouped GEMMs with one
# group a head. A weight that BF16 cannot represent (NVFP4 times its tensor scale) becomes a sum of
# up to three BF16 matrices, concatenated along K: each product is exact, and the sum is float32.
#
# Shape letters: T tokens, H heads, n nope width, v value width, C latent width (512), K chosen keys
# in attention or inner extent of a matrix, N its outputs.

_ENTRY_OF_CACHE = {"exact": "bf16", "fp8": "fp8-v32-ue8m0", "fp8_f32": "fp8-v32"}
_PAGE = 64  # entries
_MOST_PARTS = 3  # BF16 numbers of eight bits each that add up to any float32 number's 24


def _require_rows(part: ComponentPart) -> None:
    c = part.config
    if (c.kv_lora_rank, c.qk_rope_head_dim) != (WIDTH, ROTATED):
        raise NoKernelError(
            f"rows of {c.kv_lora_rank} and {c.qk_rope_head_dim}; kernels have {WIDTH} and {ROTATED}"
        )


def cache_row(part: ComponentPart) -> Compute:
    """Write and read back rows, in the cache format that the model's arithmetic names."""
    _require_rows(part)
    switches = part.facts.numerics.switches
    kind = str(switches.kv_cache)
    if part.facts.numerics.exact or kind not in _ENTRY_OF_CACHE or switches.cache_scale_floored:
        raise NoKernelError(f"no kernel writes such {kind} entries of rows of {WITH_KEY}")
    entry = _ENTRY_OF_CACHE[kind]
    WriteProblem(1, Pages(entry, _PAGE, 1, width=WITH_KEY), source="row")

    def compute(work: ComponentCallWork) -> Outputs:
        rows = torch.cat((work.bf16("latent"), work.bf16("key")), dim=-1)
        return {"out": through_pages(work, own(rows), entry, {"source": "row"}, {})}

    return compute


def latent_norm(part: ComponentPart) -> Compute:
    """Norm the latent with the row-writing kernel, padded with a key of zeros."""
    _require_rows(part)
    kind, epsilon = norm_weight(part, part.name), part.facts.norm_epsilon(part.name)
    fields = {"positions": 1, "epsilon": epsilon, "weight": kind, "source": "latent"}

    def compute(work: ComponentCallWork) -> Outputs:
        # The kernel writes rows of 576; the appended key of zeros is cut off again.
        x = work.bf16()
        rows = own(torch.nn.functional.pad(x, (0, ROTATED)))
        more = {
            "weight": work.weights.plain(part.name, NORM_WEIGHTS[kind]),
            "turns": torch.zeros(1, ROTATED, device=x.device),
            "positions": torch.zeros(len(x), dtype=torch.int64, device=x.device),
        }
        return {"out": own(through_pages(work, rows, "bf16", fields, more)[:, :WIDTH])}

    return compute


def attend_latent(part: ComponentPart) -> Compute:
    """Return the compute function of V3.2's attention over chosen latents, in its absorbed form."""
    _require_rows(part)
    c, name = part.config, part.name
    if part.facts.numerics.switches.attention_in_storage_dtype is not False:
        raise NoKernelError("the kernel's softmax is float32")
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, nope, value = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
    scale, of_one = softmax_scale(c), Pages("bf16", _PAGE, 1, width=WITH_KEY)
    AttentionProblem(1, heads, KeyList(1, of_one), scale=scale)
    GroupedProblem(1, heads, WIDTH, nope)
    GroupedProblem(1, heads, value, WIDTH)

    def compute(work: ComponentCallWork) -> Outputs:
        assert "expanded" not in work.inputs, "a model by kernels is bound in its absorbed form"
        q, spans = work.bf16("q"), spans_of(work.inputs)
        key, of_value = work.weights.derived(
            name, "absorbed",
            lambda weight: tuple(map(work.weights.on_device, absorbed(weight, c))),
        )  # fmt: skip
        latent = by_head(work.kernels, q[..., :nope], key).reshape(len(q), heads, WIDTH)
        query = own(torch.cat((latent, q[..., nope:]), dim=-1))
        rows = memories(work, spans, "state_rows", "rows", 1)
        # Rows of all sequences are concatenated; `chosen` counts within each sequence.
        begins = [0, *accumulate(len(row) for row in rows)]
        first = [at for at, span in zip(begins, spans, strict=False) for _ in range(span.count)]
        chosen = work.inputs["chosen"]
        start = torch.tensor(first, device=chosen.device)[:, None]
        slots = own(torch.where(chosen >= 0, start + chosen, -1).to(torch.int32))
        cache, pages = paged(work, torch.cat(rows))
        mode = "decode" if len(q) == len(spans) else "prefill"
        keys = KeyList(slots.shape[1], pages)
        problem = AttentionProblem(len(q), heads, keys, mode=mode, scale=scale)
        given: dict[str, Any] = {"window_slots": slots, "window_cache": cache}
        out = work.run("sm90_sparse_attention", problem, q=query, sink=None, **given)[0]
        return {"out": by_head(work.kernels, out, of_value)}

    return compute


def absorbed(weight: Weight, config: V32Config) -> tuple[Tensor, Tensor]:
    """Return each head's key rows of wkv_b, transposed, and its value rows, as BF16 matrices."""
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    shape = (config.num_attention_heads, nope + value, WIDTH)
    per_head = weight.values(torch.float32).reshape(shape)
    return side_by_side(per_head[:, :nope].mT), side_by_side(per_head[:, nope:])


def side_by_side(weight_HNK: Tensor) -> Tensor:
    """Split float32 into the fewest BF16 parts that sum to it, concatenated along K."""
    parts: list[Tensor] = []
    rest = weight_HNK.float()
    while not parts or (len(parts) < _MOST_PARTS and bool((rest != 0).any())):
        parts.append(rest.to(torch.bfloat16))
        # Exact: the remainder of a rounding to BF16 fits in float32.
        rest = rest - parts[-1].float()
    return torch.cat(parts, dim=-1).flatten(0, 1).contiguous()


def by_head(kernels: Kernels, x_THK: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's values by its own matrix, BF16 [T, H N]."""
    tokens, heads, inner = x_THK.shape
    parts = weight.shape[1] // inner
    wide = x_THK if parts == 1 else x_THK.repeat(1, 1, parts)
    problem = GroupedProblem(tokens, heads, weight.shape[0] // heads, weight.shape[1])
    return kernels.run("sm90_gemm_grouped", problem, a=own(wide.flatten(1)), b=weight)[0]


# --------------------------------------------------------------------------------------------------
# Run the sparse-attention indexer of V4 and V3.2 by our kernels: queries, keys, scores, top-k.
#
# Keys are written into pages made for the call. The kernel returns the chosen entries in ascending
# order; the set is the same as the reference's.
#
# Shape letters: T tokens, W entries, N indexer heads.


def _require_indexer(part: ComponentPart) -> None:
    if part.config.index_head_dim != KEY_WIDTH:
        raise NoKernelError(f"indexer heads of {part.config.index_head_dim}; kernels have 128")


def _indexer_rope(part: ComponentPart) -> tuple[Rope, str]:
    rope: Rope = part.config.indexer_rope(part.component.block)
    return rope, str(rope.pairing)


def _operand(
    part: ComponentPart, tokens: int, heads: int, pairing: str, **more: Any
) -> OperandProblem:
    switches = part.facts.numerics.switches
    return OperandProblem(
        tokens, heads, pairing, str(switches.indexer_format), switches.indexer_hadamard, **more
    )


def queries(part: ComponentPart) -> Compute:
    """Rotate, transform and round queries as the scores multiply them."""
    _require_indexer(part)
    rope, pairing = _indexer_rope(part)
    heads = part.config.index_n_heads
    _operand(part, 1, heads, pairing, positions=1)

    def compute(work: ComponentCallWork) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        table = TURNS.covering(rope, positions)
        problem = _operand(part, x.shape[0], heads, pairing, positions=table.shape[0])
        (made,) = work.run(
            "simt_indexer_operand", problem, rows=x.reshape(-1, heads, KEY_WIDTH), turns=table,
            positions=positions,
        )  # fmt: skip
        return {"out": made}

    return compute


def keys(part: ComponentPart) -> Compute:
    """Compute V3.2's keys: LayerNorm, then the same steps as for queries."""
    _require_indexer(part)
    rope, pairing = _indexer_rope(part)
    names = {name.rpartition(".")[2]: name for name in part.shapes}
    epsilon = INDEXER_NORM_EPSILON
    _operand(part, 1, 1, pairing, positions=1, normed=True, epsilon=epsilon)

    def compute(work: ComponentCallWork) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        table = TURNS.covering(rope, positions)
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


def pooled(part: ComponentPart) -> Compute:
    """Compress as the main compressor does, then treat keys like queries but without rotation."""
    _require_indexer(part)
    main = pool(part)
    _operand(part, 1, 1, "none")

    def compute(work: ComponentCallWork) -> Outputs:
        made = main(work)
        rows = made["out"]
        problem = _operand(part, rows.shape[0], 1, "none")
        (keys,) = work.run("simt_indexer_operand", problem, rows=own(rows.unsqueeze(1)))
        return made | {"out": keys.squeeze(1)}

    return compute


def weights(part: ComponentPart, *, in_bf16: bool) -> Compute:
    """Compute weights of heads by a BF16 or an FP32 product.

    A factor that is a power of two is folded into the matrix.
    """
    c, name = part.config, part.name
    factor = float((c.index_head_dim * c.index_n_heads) ** -0.5)
    if part.format_of(name) != "BF16" or part.facts.activation(name) is not None:
        raise NoKernelError(f"no kernel has heads' weights of {part.format_of(name)}")
    within = torch.frexp(torch.tensor(factor)).mantissa == 0.5
    outputs, inner = part.shapes[name]
    if in_bf16:
        GemmProblem(1, outputs, inner)
    stored = in_bf16 and part.facts.numerics.switches.indexer_weights_in_storage_dtype
    out = "bf16" if stored else "fp32"

    def compute(work: ComponentCallWork) -> Outputs:
        x = work.bf16()
        weight = work.weights.derived(
            name,
            "scaled",
            lambda w: work.weights.on_device(
                w.values(torch.bfloat16) * (factor if within else 1.0)
            ),
        )
        if in_bf16:
            problem = GemmProblem(x.shape[0], outputs, inner)
            (made,) = work.run("sm90_gemm_bf16", problem, a=x, b=weight)
        else:
            made = wide_product(work, x, weight, outputs)
        kind = "bf16" if in_bf16 else "fp32"
        if within and kind == out:
            return {"out": made}
        scaling = ScaleProblem(made.numel(), 1.0 if within else factor, kind, out)
        return {"out": work.run("simt_scale", scaling, values=made)[0]}

    if in_bf16 and part.target != SM90A.name:
        raise NoKernelError(f"the GEMM of bf16 has run on {SM90A.name} alone")
    return compute


def scores(part: ComponentPart, *, may_store: bool) -> Compute:
    """Return scores of every visible entry, -inf elsewhere.

    `may_store`: a switch says whether they are kept in the storage dtype.
    """
    _require_indexer(part)
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, block = part.config.index_n_heads, part.component.block
    ratio = max(1, block.ratio) if block is not None else 1
    stored = may_store and part.facts.numerics.switches.indexer_in_storage_dtype
    arithmetic = "stored" if stored else "float32"
    ScoresProblem(1, heads, 1, 1, KeyPages("bf16", PAGE, 1), ratio, arithmetic)

    def compute(work: ComponentCallWork) -> Outputs:
        spans = spans_of(work.inputs)
        keys = memories(work, spans, "state_keys", "keys", ratio)
        widest = max(len(own_keys) for own_keys in keys)
        q = work.bf16("q")
        if not widest:
            return {"out": q.new_empty(len(q), 0, dtype=torch.float32)}
        each = -(-widest // PAGE)
        pages = q.new_zeros(len(keys) * each * PAGE, KEY_WIDTH)
        for n, own_keys in enumerate(keys):
            pages[n * each * PAGE : n * each * PAGE + len(own_keys)] = own_keys
        key_pages = KeyPages("bf16", PAGE, len(keys) * each)
        problem = ScoresProblem(len(q), heads, widest, len(keys), key_pages, ratio, arithmetic)
        counts = torch.tensor([span.count for span in spans])
        owners = torch.repeat_interleave(torch.arange(len(spans), dtype=torch.int32), counts)
        (made,) = work.run(
            "sm90_indexer_scores",
            problem,
            queries=q,
            weights=work.bf16("weights") if stored else work.fp32("weights"),
            positions=own(work.inputs["positions"]),
            sequences=owners.to(q.device),
            table=torch.arange(key_pages.count, dtype=torch.int32, device=q.device).reshape(
                -1, each
            ),
            pages=pages.view(torch.uint8).reshape(key_pages.count, -1),
        )
        return {"out": made}

    return compute


def topk(part: ComponentPart) -> Compute:
    """Return the entries with the largest scores, -1 for none."""
    count = part.config.index_topk
    TopkProblem(1, 1, count)

    def compute(work: ComponentCallWork) -> Outputs:
        scores = work.fp32("scores")
        rows, entries = scores.shape
        if not entries:
            return {"out": scores.new_empty(rows, 0, dtype=torch.int64)}
        problem = TopkProblem(rows, entries, min(count, entries))
        (made,) = work.run("simt_indexer_topk", problem, scores=scores)
        return {"out": made.to(torch.int64)}

    return compute


assert ROTATED < KEY_WIDTH < WIDTH, "rows of the indexer are narrower than those of attention"
