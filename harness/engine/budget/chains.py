"""Error budgets of chains that store values on the way: RoPE, the indexer, the compressor, mHC.

A stored value steps only where a rounding boundary lies within its error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.bounded_values import (
    FUNCTION,
    BoundedRotation,
    BoundedValue,
    bounded_norm,
    cache_grid,
    exactly,
    hadamard,
    indexer_grid,
    layer_normed,
    memories,
    reach,
    rope_rotation,
    rotated,
    stored,
)
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.rules import UNDERFLOW, U, exact, output_format, summed
from degarble.harness.formats.number_formats import BF16, FP32
from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.harness.model.family import family_of
from degarble.harness.model.types import RopeEnd, RopePairing
from degarble.harness.report.number_text import number
from degarble.references import sparse_attention
from degarble.references.facts import single, spans_of
from degarble.references.numerics import HeadNorm

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.references.facts import MixingFacts, Span
    from degarble.references.numerics import Numerics
    from degarble.references.sparse_attention import PoolFacts


# --------------------------------------------------------------------------------------------------
# Rotations (RoPE), the norms before them, and rows read from the cache.
#
# Features that are not rotated are copied after the norm.
#
# Shape letters: T tokens, H heads, L row width.

_ROTATION_DERIVATION = (
    "angles: 8 u, and the frequency's power 2 ln(theta) u of the angle; functions 4 u",
    "two products and a sum of each pair; features that are not rotated are copied",
)


def query_heads(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of each head's weightless norm, stored as its source does, and RoPE."""
    facts, x, out = call.known_facts, call.inputs["x"], call.outputs["out"]
    near = _head_norm(x.reshape(out.shape), facts.config.rms_norm_eps, facts.numerics)
    by = rope_rotation(facts.rope, call.inputs["positions"], facts.numerics, heads=True)
    words = (
        f"norm of {out.shape[-1]}, with what its source stores in between",
        *_ROTATION_DERIVATION,
    )
    return _budget(rotated(near, by), out, words)


def _head_norm(x: Tensor, epsilon: float, numerics: Numerics) -> BoundedValue:
    kind, store = numerics.switches.head_norm, numerics.store
    wide, width = x.double(), x.shape[-1]
    square = wide.square()
    if kind is HeadNorm.EACH_STEP:
        square = square.to(store).double()
    mean = square.mean(-1, keepdim=True)
    near = BoundedValue(mean, mean * (width / 2 + 2) * U)
    if kind is HeadNorm.EACH_STEP:
        near = stored(near, store)
        near = stored(BoundedValue(near.value + epsilon, near.error), store)
    else:
        near = BoundedValue(mean + epsilon, near.error)
    factor = near.value.rsqrt()
    relative = near.error / near.value / 2 + (FUNCTION + 1) * U
    value = BoundedValue(factor, factor * relative)
    if kind is HeadNorm.ONCE:
        return BoundedValue(wide * factor, (wide * factor).abs() * (relative + U))
    value = stored(value, store)
    return stored(BoundedValue(wide * value.value, wide.abs() * value.error), store)


def latent_row(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of V4's shared row: norm, stored, and rotation."""
    facts, out = call.known_facts, call.outputs["out"]
    weight = single(call.weights).values(torch.float64)
    numerics = facts.numerics
    near = bounded_norm(
        exactly(call.inputs["x"]), weight, facts.config.rms_norm_eps, numerics.norm_stored_before
    )
    by = rope_rotation(facts.rope, call.inputs["positions"], numerics)
    words = (f"RMS norm of {out.shape[-1]}, fused with the rotation", *_ROTATION_DERIVATION)
    if numerics.switches.latent_rounded_before_rotation:
        near = stored(near, numerics.store)
        words = (f"RMS norm of {out.shape[-1]}, stored", *_ROTATION_DERIVATION)
    return _budget(rotated(near, by), out, words)


def inverse_rotation(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of the inverse rotation after attention."""
    facts, x = call.known_facts, call.inputs["x"]
    by = rope_rotation(facts.rope, call.inputs["positions"], facts.numerics, heads=True)
    back = BoundedRotation(by.cos, BoundedValue(-by.sin.value, by.sin.error))
    return _budget(rotated(exactly(x), back), call.outputs["out"], _ROTATION_DERIVATION)


def query_and_key(call: JudgeableCall) -> dict[str, Budget]:
    """Return V3.2's budgets: the rotated tail of every query head, and the shared key."""
    facts = call.known_facts
    rope, positions = facts.config.rope(facts.block), call.inputs["positions"]
    q, key = call.outputs["q"], call.outputs["key"]
    heads = exactly(call.inputs["q"].reshape(q.shape))
    by = (rope_rotation(rope, positions, facts.numerics, heads=heads) for heads in (True, False))
    values = rotated(heads, next(by)), rotated(exactly(call.inputs["key"]), next(by))
    return {
        "q": _budget(values[0], q, _ROTATION_DERIVATION)["out"],
        "key": _budget(values[1], key, _ROTATION_DERIVATION)["out"],
    }


def cache_rows(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of cache rows as read: rotated features copied, others rounded to codes."""
    facts, out = call.known_facts, call.outputs["out"]
    x = call.inputs.get("latent", call.inputs.get("x"))
    plain, block = family_of(facts.config).cached_latent(facts.config)
    grid = None if facts.numerics.exact else cache_grid(facts.numerics, block)
    if grid is None or x is None:
        return {"out": exact(output_format(out), "rows are copied")}
    slack = torch.zeros(out.shape, dtype=torch.float64)
    slack[..., :plain] = reach(exactly(x[..., :plain]), out.dtype, grid)
    words = (
        f"codes of blocks of {grid.block}: the neighbour only where the quotient's slack reaches",
        "a boundary, another scale only where amax does",
        "a quotient by a power of two is exact"
        if grid.exact_quotient
        else "a quotient errs by 5 u",
        "rotated features are copied",
    )
    return {"out": Budget(output_format(out), slack, words)}


def _budget(near: BoundedValue, out: Tensor, words: tuple[str, ...]) -> dict[str, Budget]:
    return {"out": Budget(output_format(out), near.error.reshape(out.shape), words)}


# --------------------------------------------------------------------------------------------------
# The sparse-attention indexer: operands, head weights and scores.
#
# * Operands: rotation, stored; Hadamard, stored; rounding to blocks of codes, where a code may be
#   the neighbour only if its exact quotient lies within slack of a boundary.
# * Head weights: a product, stored where the source stores it, times a constant.
# * Scores: dot products, stored; times the head's weight, stored; summed over heads. Where a source
#   keeps float32, all of this is one sum.
#
# Shape letters: T tokens, N indexer heads, I indexer width, W entries.

_SCORES_AT_ONCE = 1 << 23  # products [T, N, W] of one step
_OPERAND_DERIVATION = (
    "rotation: angles within 8 u and the power's 2 ln(theta) u of the angle, functions 4 u",
    "stored: where a rounding boundary lies within the error, the neighbour is met as well",
)


def indexer_operand(
    x: BoundedValue, dtype: torch.dtype, numerics: Numerics
) -> tuple[BoundedValue, tuple[str, ...]]:
    """Apply what follows the rotation: Hadamard, stored, codes. The error is that of the output."""
    words = tuple[str, ...]()
    if numerics.transforms(x.value.shape[-1]):
        x = hadamard(x)
        words = (f"Hadamard of {x.value.shape[-1]}: steps of all inputs, additions in any order",)
    grid = None if numerics.exact else indexer_grid(numerics, x.value.shape[-1])
    if grid is None:
        return x, words
    if numerics.switches.indexer_operand_rounded_in_between:
        x = stored(x, numerics.store)
    words = (
        *words,
        f"stored; codes of blocks of {grid.block} under a power of two: the neighbour only",
        "where the quotient's slack reaches a boundary, another scale only where amax does",
    )
    return BoundedValue(x.value, reach(x, dtype, grid)), words


def indexer_operands(call: JudgeableCall) -> dict[str, Budget]:
    """Return budgets of the queries [T, N, I] of both families, and of V3.2's keys [T, I]."""
    facts, x, out = call.known_facts, call.inputs["x"], call.outputs["out"]
    numerics, positions = facts.numerics, call.inputs["positions"]
    words: tuple[str, ...] = _OPERAND_DERIVATION
    near = exactly(x.reshape(x.shape[0], *out.shape[1:]))
    if call.role.endswith("indexer.k"):
        by_part = {n.rpartition(".")[2]: w.values(torch.float64) for n, w in call.weights.items()}
        near = layer_normed(x, by_part["k_norm"], by_part["bias"], INDEXER_NORM_EPSILON)
        near = stored(near, numerics.store)
        words = (f"LayerNorm of {x.shape[-1]}: mean and variance in any order", *words)
    rope = facts.config.indexer_rope(facts.block)
    by = rope_rotation(rope, positions, numerics, heads=out.ndim == 3)
    leading, halves = rope.end is RopeEnd.FIRST, rope.pairing is RopePairing.HALVES
    near = rotated(near, by, leading=leading, halves=halves)
    if numerics.switches.indexer_operand_rounded_in_between:
        near = stored(near, numerics.store)
    value, more = indexer_operand(near, out.dtype, numerics)
    return {"out": Budget(output_format(out), value.error, (*words, *more))}


def indexer_head_weights(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of a product, stored by V4, times a constant."""
    facts, out = call.known_facts, call.outputs["out"]
    c = facts.config
    (weight,) = (each.values(torch.float32) for each in call.weights.values())
    x, factor = call.inputs["x"].float(), (c.index_head_dim * c.index_n_heads) ** -0.5
    product = summed(x, weight, output_format(out))
    value = BoundedValue(x.double() @ weight.double().T, product.slack.double())
    words: tuple[str, ...] = ("times a constant",)
    if family_of(c).stores_indexer:
        value = stored(value, facts.numerics.store)
        words = ("the product is stored", *words)
    slack = value.error * factor + 2 * U * factor * value.value.abs()
    derivation = (*product.derivation[:-1], *words)
    return {"out": replace(product, slack=slack, derivation=derivation)}


def indexer_scores(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of scores [T, W]; masked scores are not judged by size."""
    facts, out = call.known_facts, call.outputs["out"]
    ratio = max(1, facts.block.ratio)  # 0: the keys are tokens, not entries
    stores = family_of(facts.config).stores_indexer
    in_steps = stores and facts.numerics.switches.indexer_in_storage_dtype
    spans = spans_of(call.inputs)
    keys = memories(spans, call.inputs.get("state_keys"), call.inputs["keys"], ratio)
    q, weights = call.inputs["q"], call.inputs["weights"].double()
    slack = torch.zeros(out.shape, dtype=torch.float64)
    for span, key in zip(spans, keys, strict=True):
        step = max(1, _SCORES_AT_ONCE // max(1, q.shape[1] * len(key)))
        for begin in range(span.begin, span.end, step):
            part = slice(begin, min(begin + step, span.end))
            slack[part, : len(key)] = _score_errors(
                q[part].double(), key.double(), weights[part], facts.numerics.store, in_steps
            )
    # -inf masks an entry: it has to be equal.
    slack[out.isneginf()] = 0.0
    words = [f"dot products of {q.shape[-1]} in any order: half as many u of the sum of magnitudes"]
    if in_steps:
        words.append("stored, times the head's weight, stored: steps only at rounding boundaries")
    words.append(f"sum over {q.shape[1]} heads in any order")
    sum_stored = in_steps and facts.numerics.switches.indexer_sum_in_storage_dtype
    return {"out": Budget(BF16 if sum_stored else output_format(out), slack, tuple(words))}


def _score_errors(
    q_TNI: Tensor, key_WI: Tensor, weight_TN: Tensor, store: torch.dtype, in_steps: bool
) -> Tensor:
    size = torch.matmul(q_TNI.abs(), key_WI.abs().T)
    dot = torch.matmul(q_TNI, key_WI.T)
    # ReLU follows the dot product, and lengthens no error.
    near = BoundedValue(dot.clamp(min=0), size * ((q_TNI.shape[-1] / 2 + 2) * U))
    factor = weight_TN.unsqueeze(-1)
    if in_steps:
        near = stored(near, store)
        near = stored(BoundedValue(near.value * factor, near.error * factor.abs()), store)
        terms, error = near.value, near.error
    else:
        terms, error = near.value * factor, near.error * factor.abs()
    added = (weight_TN.shape[1] + 1) * U * terms.abs().sum(1)
    return error.sum(1) + added


# --------------------------------------------------------------------------------------------------
# The compressor: pooled entries and the carried state.
#
# The chain: gates with their position's bias, softmax over the slots of a window, weighted sum,
# stored; norm, stored; rotation, stored; for the indexer also Hadamard, stored, and rounding to
# codes. The state is copied plus one float32 sum, hence exact. State rows that no later call reads
# may hold anything and are not judged.
#
# Shape letters: W windows, R slots, E width.

_COPIED = "carried rows are copied, gates with one exact sum: nothing may differ"
_POOLING_DERIVATION = (
    "shares of slots: the exponential's argument rounds once (2 u of it), functions 4 u",
    "weighted sum of the slots in any order, stored: near a rounding boundary it may step",
    "norm of the entry, stored; rotation, stored; each step is carried on",
)


def compressor_pool(call: JudgeableCall) -> dict[str, Budget]:
    """Return budgets of the entries, their offsets, and the carried rows."""
    facts = call.known_facts
    numerics, outputs = facts.numerics, call.outputs
    by_part = {
        name.rpartition(".")[2]: weight.values(torch.float64)
        for name, weight in call.weights.items()
    }
    how = facts.pool(by_part["norm"].shape[0])
    bias = by_part["ape"][call.inputs["positions"] % how.ratio]
    made, unread = [], []
    for sequence, span in enumerate(spans_of(call.inputs)):
        slots, first = _slots(call, sequence, span, bias, how)
        if slots is not None:
            made.append(_entries(slots, first, by_part["norm"], how, numerics))
        unread.append(_unread(span, how))
    state = {
        name: Budget(
            output_format(outputs[name]), torch.zeros(()), (_COPIED,),
            free=torch.stack(unread)[..., None],
        )
        for name in ("state_latent", "state_gate")
    }  # fmt: skip
    offsets = exact(output_format(torch.zeros(())), "entry_offsets are whole numbers")
    out = exact(output_format(outputs["out"]), "no window was completed")
    if made:
        near = BoundedValue(*(torch.cat(parts) for parts in zip(*made, strict=True)))
        words: tuple[str, ...] = _POOLING_DERIVATION
        if "indexer" in call.role:
            near = stored(near, numerics.store)  # as the main compressor's entries
            near, more = indexer_operand(near, outputs["out"].dtype, numerics)
            words = (*words, *more)
        out = Budget(output_format(outputs["out"]), near.error, words)
    return {"out": out, "entry_offsets": offsets, **state}


def _slots(
    call: JudgeableCall, number: int, span: Span, bias: Tensor, how: PoolFacts
) -> tuple[tuple[Tensor, Tensor] | None, int]:
    """Return latents and gates [W, R, E] of completed windows, and the first window's number."""
    # Tokens of the incomplete window that earlier calls left in the state, and its number.
    partial, first = span.start % how.ratio, span.start // how.ratio
    complete = (partial + span.count) // how.ratio * how.ratio
    if not complete:
        return None, first
    state = sparse_attention.PoolState(
        call.inputs["state_latent"][number].double(), call.inputs["state_gate"][number].double()
    )
    base = how.ratio if how.overlap else 0
    new = (
        call.inputs["latent"][span.tokens].double(),
        (call.inputs["gate"][span.tokens].double() + bias[span.tokens]),
    )
    latent, gate = (
        torch.cat((old[base : base + partial], rows))[:complete]
        for old, rows in zip((state.latent, state.gate), new, strict=True)
    )
    return sparse_attention.slots_of((latent, gate), state, first, how), first


def _entries(
    slots: tuple[Tensor, Tensor], first: int, norm_E: Tensor, how: PoolFacts, numerics: Numerics
) -> BoundedValue:
    latent_WRE, gate_WRE = slots
    share = torch.softmax(gate_WRE, dim=1)
    below = torch.where(share > 0, gate_WRE.amax(1, keepdim=True) - gate_WRE, 0.0)
    size = torch.where(share > 0, gate_WRE.abs(), 0.0)
    relative = U * (2 * below + 2 * size + FUNCTION + 2)
    relative = relative + (share * relative).sum(1, keepdim=True) + U * (share.shape[1] + FUNCTION)
    weight, rows = BoundedValue(share, share * relative), latent_WRE
    if numerics.switches.pooling_in_storage_dtype:
        weight, rows = stored(weight, numerics.store), latent_WRE.to(numerics.store).double()
    terms = BoundedValue(weight.value * rows, weight.error * rows.abs())
    if numerics.switches.pooling_in_storage_dtype:
        terms = stored(terms, numerics.store)
    added = U * (share.shape[1] + 1) * terms.value.abs().sum(1)
    in_between = numerics.switches.entry_rounded_in_between
    total = BoundedValue(terms.value.sum(1), terms.error.sum(1) + added)
    if in_between or numerics.switches.pooling_in_storage_dtype:
        total = stored(total, numerics.store)
    entry = bounded_norm(total, norm_E, how.epsilon, numerics.norm_stored_before)
    if in_between:
        entry = stored(entry, numerics.store)
    positions = torch.arange(first, first + len(share)) * how.ratio
    return rotated(entry, rope_rotation(how.rope, positions, numerics))


def _unread(span: Span, how: PoolFacts) -> Tensor:
    """Return which rows of the carried state no later call reads [R]."""
    free = torch.ones(how.state_rows, dtype=torch.bool)
    base = how.ratio if how.overlap else 0
    # Rows of the window that is still incomplete are read by the next call.
    free[base : base + span.stop % how.ratio] = False
    # With overlapping windows the previous complete window is read again.
    if how.overlap and span.stop >= how.ratio:
        free[: how.ratio] = False
    return free


# --------------------------------------------------------------------------------------------------
# mHC: the collapsed input, the gates, and the mixing matrix after Sinkhorn.
#
# The error of the coefficients `fn . x` passes through sigmoid and normalisation:
#
# * A coefficient errs by the slack of its product and by the norm factor's share.
# * A gate errs by its slope s (1 - s), at most 1/4, times that, and by the exponential's argument.
# * The error of the mixing matrix P is, for small errors, that of the logits with row and column
#   factors projected out. The projection, weighted by P, lengthens nothing: |dP| <= sqrt(S P) d,
#   and also |dP| <= P (2 + 8 g) d. Factors common to a row or column cancel, but for the last ones:
#   each later pass leaves the square of the second singular value, at most |P|_F^2 - 1. Hence g = 1
#   / (2 - |P|_F^2), or the number of passes if that is less.
#
# Shape letters: T tokens, S streams, K = S * D, N coefficients.

_DIVISION = 2  # in u per pass: an entry's division by its row sum, and by its column sum


def mhc_mixing(call: JudgeableCall) -> dict[str, Budget]:
    """Return budgets of `out`, `post` and `mix`, or of `out` alone where the streams end."""
    facts = call.known_facts
    how, streams = facts.mixing, call.inputs["streams"]
    # Coefficients [T, N]: S of `pre`, S of `post`, then S * S of the mixing matrix.
    m, words = _coefficients(call, how)
    count = how.streams
    gates = _sigmoid(BoundedValue(m.value[:, : 2 * count], m.error[:, : 2 * count]))
    pre = gates.value[:, :count] + how.epsilon, gates.error[:, :count] + U
    x = streams.double()
    slack = torch.einsum("ts,tsd->td", pre[1] + (count + 2) * U * pre[0], x.abs())
    named = "sum of streams: errors of the gates, and one rounding a term"
    made = {"out": Budget(output_format(call.outputs["out"]), slack, (*words, named))}
    if "mix" in call.outputs:
        # post = 2 sigmoid(m)
        post = 2 * gates.error[:, count:]
        made["post"] = Budget(output_format(call.outputs["post"]), post, words)
        made["mix"] = _balanced(
            BoundedValue(m.value[:, 2 * count :], m.error[:, 2 * count :]), call, how
        )
    return made


def _coefficients(call: JudgeableCall, how: MixingFacts) -> tuple[BoundedValue, tuple[str, ...]]:
    """Return scaled products with their errors [T, N], and the derivation in words."""
    by_part = {name.rpartition("_")[2]: weight for name, weight in call.weights.items()}
    fn, base, scale = (by_part[part].values(torch.float32) for part in ("fn", "base", "scale"))
    flat = call.inputs["streams"].flatten(1).float()
    width, count = flat.shape[1], how.streams
    product = summed(flat, fn, FP32)
    wide = flat.double()
    rho = (wide.square().mean(-1, keepdim=True) + how.norm_epsilon).rsqrt()
    factor = scale.double()
    if len(factor) > 1:
        factor = factor.repeat_interleave(torch.tensor([count, count, count * count]))
    scaled = (wide @ fn.double().T) * rho * factor
    error = product.slack.double() * rho * factor.abs()
    of_norm = width / 4 + 8
    error = error + scaled.abs() * (of_norm * U) + 3 * U * (scaled.abs() + base.abs())
    words = (
        *product.derivation[:-1],
        f"norm factor over {width}: {number(of_norm)} u of the coefficient",
        f"coefficients err by {number(float(error.mean()))} on average",
        f"gates: slope s (1 - s) of that; functions within 2 units ({FUNCTION} u)",
    )
    return BoundedValue(scaled + base.double(), error), words


def _sigmoid(m: BoundedValue) -> BoundedValue:
    value = torch.sigmoid(m.value)
    argument = m.error + (2 * m.value.abs() + FUNCTION) * U
    off = value * (1 - value) * argument + (FUNCTION + 2) * U * value
    return BoundedValue(value, off + UNDERFLOW)


def _balanced(logits: BoundedValue, call: JudgeableCall, how: MixingFacts) -> Budget:
    count, mix = how.streams, call.outputs["mix"].double()
    value = logits.value.reshape(-1, count, count)
    spread = (value.amax(-1) - value.amin(-1)).amax(-1) if len(value) else value.new_zeros(0)
    own = logits.error.amax(-1) + U * (2 * spread + FUNCTION + _DIVISION * how.iterations)
    # 1 / g of the module's docstring; g is bounded by the number of passes.
    rest = (2 - mix.square().sum((1, 2))).clamp(min=1 / how.iterations)
    g = (1 / rest).clamp(min=1.0)[:, None, None]
    per_error = torch.minimum((count * mix).sqrt(), mix * (2 + 8 * g))
    common = 2 * (count + 2 + FUNCTION) * U * g * mix
    most = float(g.max()) if g.numel() else 1.0
    words = (
        f"logits err by {number(float(own.mean()))}, divisions of {how.iterations} passes included",
        "normalisation projects row and column factors out: sqrt(S P) or P (2 + 8 g) of that",
        f"factors of the last passes: 2 (S + 2 + {FUNCTION}) u g P, g up to {number(most)}",
    )
    slack = own[:, None, None] * per_error + common
    return Budget(output_format(call.outputs["mix"]), slack, words)
