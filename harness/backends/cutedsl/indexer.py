"""Run the sparse-attention indexer of V4 and V3.2 by our kernels: queries, keys, scores, top-k.

Keys are written into pages made for the call. The kernel returns the chosen entries in ascending
order; the set is the same as the reference's.

Shape letters: T tokens, W entries, N indexer heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.attention import PAGE, memories, pool
from degarble.harness.backends.cutedsl.linears import wide_product
from degarble.harness.backends.cutedsl.parts import NoKernelError, own
from degarble.harness.backends.cutedsl.rows import TURNS
from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.indexer.problem import KeyPages, OperandProblem, ScoresProblem, TopkProblem
from degarble.kernels.primitives.kv_problem import ROTATED, WIDTH
from degarble.kernels.rows.problem import ScaleProblem
from degarble.kernels.runtime.targets import SM90A
from degarble.references.facts import spans_of

if TYPE_CHECKING:
    from degarble.harness.backends.cutedsl.parts import Compute, Outputs, Part, Work
    from degarble.harness.model.types import Rope


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


def queries(part: Part) -> Compute:
    """Rotate, transform and round queries as the scores multiply them."""
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


def keys(part: Part) -> Compute:
    """Compute V3.2's keys: LayerNorm, then the same steps as for queries."""
    _require_indexer(part)
    rope, pairing = _indexer_rope(part)
    names = {name.rpartition(".")[2]: name for name in part.shapes}
    epsilon = INDEXER_NORM_EPSILON
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


def pooled(part: Part) -> Compute:
    """Compress as the main compressor does, then treat keys like queries but without rotation."""
    _require_indexer(part)
    main = pool(part)
    _operand(part, 1, 1, "none")

    def compute(work: Work) -> Outputs:
        made = main(work)
        rows = made["out"]
        problem = _operand(part, rows.shape[0], 1, "none")
        (keys,) = work.run("simt_indexer_operand", problem, rows=own(rows.unsqueeze(1)))
        return made | {"out": keys.squeeze(1)}

    return compute


def weights(part: Part) -> Compute:
    """Compute weights of heads; a factor that is a power of two is folded into the matrix."""
    c, name = part.config, part.name
    factor = float((c.index_head_dim * c.index_n_heads) ** -0.5)
    if part.format_of(name) != "BF16" or part.facts.activation(name) is not None:
        raise NoKernelError(f"no kernel has heads' weights of {part.format_of(name)}")
    within = torch.frexp(torch.tensor(factor)).mantissa == 0.5
    outputs, inner = part.shapes[name]
    if part.v4:
        GemmProblem(1, outputs, inner)
    stored = part.v4 and part.facts.numerics.switches.indexer_weights_in_storage_dtype
    out = "bf16" if stored else "fp32"

    def compute(work: Work) -> Outputs:
        x = work.bf16()
        weight = work.weights.made(
            name, "scaled",
            lambda w: work.weights.there(w.values(torch.bfloat16) * (factor if within else 1.0)),
        )  # fmt: skip
        if part.v4:
            told = GemmProblem(x.shape[0], outputs, inner)
            (made,) = work.run("sm90_gemm_bf16", told, a=x, b=weight)
        else:
            made = wide_product(work, x, weight, outputs)
        kind = "bf16" if part.v4 else "fp32"
        if within and kind == out:
            return {"out": made}
        scaling = ScaleProblem(made.numel(), 1.0 if within else factor, kind, out)
        return {"out": work.run("simt_scale", scaling, values=made)[0]}

    if part.v4 and part.target != SM90A.name:
        raise NoKernelError(f"the GEMM of bf16 has run on {SM90A.name} alone")
    return compute


def scores(part: Part) -> Compute:
    """Return scores of every visible entry, -inf elsewhere."""
    _require_indexer(part)
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, block = part.config.index_n_heads, part.component.block
    ratio = block.ratio if part.v4 and block is not None else 1
    stored = part.v4 and part.facts.numerics.switches.indexer_in_storage_dtype
    arithmetic = "stored" if stored else "float32"
    ScoresProblem(1, heads, 1, 1, KeyPages("bf16", PAGE, 1), ratio, arithmetic)

    def compute(work: Work) -> Outputs:
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
        told = KeyPages("bf16", PAGE, len(keys) * each)
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


def topk(part: Part) -> Compute:
    """Return the entries with the largest scores, -1 for none."""
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


assert ROTATED < KEY_WIDTH < WIDTH, "rows of the indexer are narrower than those of attention"
