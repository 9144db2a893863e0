"""Error budgets of the sparse-attention indexer: its operands, head weights and scores.

* Operands: rotation, stored; Hadamard, stored; rounding to blocks of codes, where a code may be the
  neighbour only if its exact quotient lies within slack of a boundary.
* Head weights: a product, stored where the source stores it, times a constant.
* Scores: dot products, stored; times the head's weight, stored; summed over heads. Where a source
  keeps float32, all of this is one sum.

Shape letters: T tokens, N indexer heads, I indexer width, W entries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.bounded_values import (
    Near,
    exactly,
    hadamard,
    layer_normed,
    memories,
    stored,
    turn,
    turned,
)
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.grid import indexer_grid, reach
from degarble.harness.engine.budget.rules import U, output_format, summed
from degarble.harness.formats.element_formats import BF16
from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.references.facts import V4Facts, V32Facts, spans_of

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.call import Call
    from degarble.references.numerics import Numerics

_CHUNK = 1 << 23  # products [T, N, W] of one step
_TURNED = (
    "rotation: angles within 8 u and the power's 2 ln(theta) u of the angle, functions 4 u",
    "stored: where a rounding boundary lies within the error, the neighbour is met as well",
)


def operand(x: Near, dtype: torch.dtype, numerics: Numerics) -> tuple[Near, tuple[str, ...]]:
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
    return Near(x.value, reach(x, dtype, grid)), words


def operand_of(call: Call) -> dict[str, Budget]:
    """Return budgets of the queries [T, N, I] of both families, and of V3.2's keys [T, I]."""
    facts, x, out = call.known_facts, call.inputs["x"], call.outputs["out"]
    numerics, positions = facts.numerics, call.inputs["positions"]
    words: tuple[str, ...] = _TURNED
    near = exactly(x.reshape(x.shape[0], *out.shape[1:]))
    if isinstance(facts, V32Facts):
        if call.role.endswith("indexer.k"):
            by_part = {
                n.rpartition(".")[2]: w.values(torch.float64) for n, w in call.weights.items()
            }
            near = layer_normed(x, by_part["k_norm"], by_part["bias"], INDEXER_NORM_EPSILON)
            near = stored(near, numerics.store)
            words = (f"LayerNorm of {x.shape[-1]}: mean and variance in any order", *words)
        # V3.2 rotates the leading features, in halves; V4 rotates the last ones, in pairs.
        by = turn(facts.config.indexer_rope(), positions, numerics, heads=out.ndim == 3)
        near = turned(near, by, leading=True, halves=True)
    else:
        assert isinstance(facts, V4Facts), "there are two families"
        near = turned(near, turn(facts.rope, positions, numerics, heads=True))
    if numerics.switches.indexer_operand_rounded_in_between:
        near = stored(near, numerics.store)
    found, more = operand(near, out.dtype, numerics)
    return {"out": Budget(output_format(out), found.error, (*words, *more))}


def head_weights(call: Call) -> dict[str, Budget]:
    """Return the budget of a product, stored by V4, times a constant."""
    facts, out = call.known_facts, call.outputs["out"]
    c = facts.config
    (weight,) = (each.values(torch.float32) for each in call.weights.values())
    x, factor = call.inputs["x"].float(), (c.index_head_dim * c.index_n_heads) ** -0.5
    product = summed(x, weight, output_format(out))
    made = Near(x.double() @ weight.double().T, product.slack.double())
    words: tuple[str, ...] = ("times a constant",)
    if isinstance(facts, V4Facts):
        made = stored(made, facts.numerics.store)
        words = ("the product is stored", *words)
    slack = made.error * factor + 2 * U * factor * made.value.abs()
    derivation = (*product.derivation[:-1], *words)
    return {"out": replace(product, slack=slack, derivation=derivation)}


def scored(call: Call) -> dict[str, Budget]:
    """Return the budget of scores [T, W]; masked scores are not judged by size."""
    facts, out = call.known_facts, call.outputs["out"]
    v4 = isinstance(facts, V4Facts)
    ratio = facts.decoder_block.ratio if isinstance(facts, V4Facts) else 1
    in_steps = v4 and facts.numerics.switches.indexer_in_storage_dtype
    spans = spans_of(call.inputs)
    keys = memories(spans, call.inputs.get("state_keys"), call.inputs["keys"], ratio)
    q, weights = call.inputs["q"], call.inputs["weights"].double()
    slack = torch.zeros(out.shape, dtype=torch.float64)
    for span, key in zip(spans, keys, strict=True):
        step = max(1, _CHUNK // max(1, q.shape[1] * len(key)))
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
    near = Near(dot.clamp(min=0), size * ((q_TNI.shape[-1] / 2 + 2) * U))
    factor = weight_TN.unsqueeze(-1)
    if in_steps:
        near = stored(near, store)
        near = stored(Near(near.value * factor, near.error * factor.abs()), store)
        terms, error = near.value, near.error
    else:
        terms, error = near.value * factor, near.error * factor.abs()
    added = (weight_TN.shape[1] + 1) * U * terms.abs().sum(1)
    return error.sum(1) + added
