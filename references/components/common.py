"""Components that V4 and V3.2 share: embedding, head, norms, linears, quantisation, router.

Legend: T tokens, D hidden, V vocabulary, F expert width, N indexer heads.
Each is a pure function from named tensors to named tensors, bound to its facts by binding.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.references import elementary, experts, linears
from degarble.references.facts import single
from degarble.references.linears import (
    largest_scale,
    product,
    quantise_activations,
    table_rows,
)
from degarble.references.numerics import cast

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.facts import Inputs, ModelFacts, Outputs, Weights


def embed(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return rows of the embedding table."""
    return {"out": table_rows(single(weights), inputs["tokens"], facts.numerics.store)}


def norm(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Apply RMSNorm with weight."""
    (name,) = weights
    weight = weights[name].values(facts.numerics.work)
    out = elementary.rms_norm(inputs["x"], weight, facts.norm_epsilon(name), facts.numerics)
    return {"out": out}


def head(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return logits [T, V] in the working dtype; the official product is in float32."""
    return {"out": product(inputs["x"], single(weights), facts.numerics.work, facts.numerics)}


def linear(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Apply one linear; its input is codes where the recipe quantises it."""
    (name,) = weights
    numerics = facts.numerics
    (out,) = linears.products(inputs, facts.activation(name), weights.values(), numerics)
    return {"out": cast(out, numerics.store)}


def stacked(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Apply linears of one input, outputs side by side: gate and up [T, 2F], gate first."""
    numerics = facts.numerics
    form = facts.activation(next(iter(weights)))
    parts = linears.products(inputs, form, weights.values(), numerics)
    return {"out": cast(torch.cat(parts, dim=-1), numerics.store)}


def act_quant(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Quantise the input of the linears whose weights these are."""
    chosen = facts.activation(next(iter(weights)))
    assert chosen is not None, "bound only where the recipe quantises"
    return quantise_activations(inputs["x"], chosen, largest_scale(weights.values()))


def gate(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return router logits."""
    weight = single(weights).values(facts.numerics.work)
    return {"out": experts.router_logits(inputs["x"], weight, facts.numerics)}


def shared_act(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Apply SwiGLU of the shared expert, or of a dense layer."""
    del weights
    gate_up = cast(inputs["x"], facts.numerics.work)
    width = gate_up.shape[-1] // 2
    out = elementary.swiglu(
        gate_up[..., :width], gate_up[..., width:], facts.shared_limit, facts.numerics
    )
    return {"out": cast(out, facts.numerics.store)}


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Stack tensors of one shape; a single one is not copied."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate rows; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
