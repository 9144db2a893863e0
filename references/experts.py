"""The MoE layer: the router, and the routed experts with SwiGLU, requantisation and weighted sum.

Sources: DeepSeek-V4 and V3.2-Exp inference/model.py (Gate, MoE).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.references import elementary
from degarble.references.linears import (
    BLOCK_SCALE,
    CODES,
    TENSOR_SCALE,
    X,
    activation_values,
    holds_codes,
    largest_scale,
    product,
    quantise_activations,
)
from degarble.references.numerics import cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.references.facts import Inputs, ModelFacts, Outputs, Weights
    from degarble.references.numerics import Numerics


# --------------------------------------------------------------------------------------------------
# The router
#
# Legend: T tokens, E experts, K experts per token, G expert groups.
# V4: sqrt(softplus(logit)) scores; the correction bias takes part in the choice only; the first
# layers choose by a table of token ids. V3.2: sigmoid scores, choice inside the best groups.
# Ties go to the lower expert id (the official code leaves them open).


@dataclass(frozen=True)
class GroupFacts:
    """V3.2's expert groups: how many there are and how many are kept."""

    groups: int
    kept: int


def router_logits(x_TD: Tensor, weight_ED: Tensor, numerics: Numerics) -> Tensor:
    """Return router logits [T, E] in the working dtype; the official product is in float32."""
    made = torch.nn.functional.linear(cast(x_TD, numerics.work), cast(weight_ED, numerics.work))
    return cast(made, numerics.store) if numerics.switches.router_in_storage_dtype else made


def sqrt_softplus(logit_TE: Tensor) -> Tensor:
    """Return sqrt(log(1 + e^x)), or sqrt(x) beyond 20 as the kernels do."""
    return torch.nn.functional.softplus(logit_TE, beta=1.0, threshold=20.0).sqrt()


def largest_experts(score_TE: Tensor, count: int) -> Tensor:
    """Return ids [T, count] of the largest scores, best first, ties to the lower id."""
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :count]


def grouped_scores(score_TE: Tensor, facts: GroupFacts) -> Tensor:
    """Return scores with all but the best groups at -inf; a group scores its two best experts."""
    score_TGe = score_TE.reshape(score_TE.shape[0], facts.groups, -1)
    worth_TG = torch.sort(score_TGe, dim=-1, descending=True).values[..., :2].sum(-1)
    kept_TK = largest_experts(worth_TG, facts.kept)
    keep_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, kept_TK, value=True)
    return score_TGe.masked_fill(~keep_TG[..., None], -torch.inf).flatten(1)


def router_weights(score_TE: Tensor, expert_TK: Tensor, scale: float, epsilon: float) -> Tensor:
    """Return weights [T, K] of the chosen experts: shares of the chosen scores, times `scale`."""
    chosen_TK = score_TE.gather(1, expert_TK.long())
    return chosen_TK / (chosen_TK.sum(-1, keepdim=True) + epsilon) * scale


# --------------------------------------------------------------------------------------------------
# The routed experts
#
# Legend: T tokens, K slots (chosen experts) a token, D hidden, F expert width.
# Everything stays in (token, slot) order, so nothing has to be permuted back and a wrong slot is
# located by its index. A slot's NVFP4 activations are quantised with its own expert's input scale,
# unless the switch says that a layer shares the largest; formats without tensor scale quantise a
# token once for all its experts. A slot with expert -1 (on another rank, or padding) yields zero.

if TYPE_CHECKING:
    Slots = Tensor | slice


_FIRST, _SECOND = ("w1", "w3"), ("w2",)


def _expert(number: int, part: str) -> str:
    return f"ffn.experts.{number}.{part}"


def _format(facts: ModelFacts, part: str) -> str | None:
    """Return the activation format of the routed experts' `part`; all experts share it."""
    return facts.activation(_expert(0, part))


def slots_by_expert(experts_TK: Tensor) -> Iterator[tuple[int, Slots]]:
    """Return each visited expert with the flat slots (t * K + k) that chose it, in order."""
    if experts_TK.shape[0] == 1 and experts_TK.device.type == "cpu":
        # One token visits an expert once, so that every slot stands for itself.
        for slot, number in sorted(enumerate(experts_TK[0].tolist()), key=itemgetter(1)):
            if number >= 0:
                yield number, slice(slot, slot + 1)
        return
    # Stable, so that the slots of an expert stay in token order.
    order = torch.sort(experts_TK.flatten(), stable=True)
    numbers, counts = torch.unique_consecutive(order.values, return_counts=True)
    begin = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if number >= 0:
            yield number, order.indices[begin : begin + count]
        begin += count


def _input_scale(
    facts: ModelFacts, experts_TK: Tensor, weights: Weights, parts: Sequence[str]
) -> Tensor | None:
    """Return the input scale of each slot's expert [T, K], or one for all; None if missing."""
    if facts.numerics.switches.input_scale_shared:
        return largest_scale(weights[name] for name in weights if name.rpartition(".")[2] in parts)
    scales = torch.ones(experts_TK.numel(), dtype=torch.float32, device=experts_TK.device)
    for number, slots in slots_by_expert(experts_TK):
        scale = largest_scale(weights[_expert(number, part)] for part in parts)
        if scale is None:
            return None
        scales[slots] = scale
    return scales.reshape(experts_TK.shape)


def w13_act_quant(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Quantise the routed experts' input: per token, or per slot where scales belong to experts."""
    chosen, x = _format(facts, "w1"), inputs["x"]
    assert chosen is not None, "bound only where the recipe quantises"
    scale = None
    if BLOCK_FORMATS[chosen].tensor_scale:
        scale = _input_scale(facts, inputs["experts"], weights, _FIRST)
    # A scale a slot: the token's row is quantised once for each of its K experts.
    if scale is not None and scale.ndim:
        x = x.unsqueeze(1).expand(-1, scale.shape[1], -1)
    return quantise_activations(x, chosen, scale)


def _slot_values(
    inputs: Inputs, per_token: int, format_name: str | None, numerics: Numerics
) -> Callable[[Slots], Tensor]:
    """Return a getter of the inputs [n, .] of flat slots; inputs belong to slots or to tokens."""
    coded, dtype = holds_codes(inputs), numerics.products
    parts = {name: inputs[name] for name in (CODES, BLOCK_SCALE, TENSOR_SCALE) if name in inputs}
    if not coded:
        parts = {X: inputs[X].to(dtype)}
    x = parts[CODES if coded else X]
    flat = {
        name: part.reshape(-1, part.shape[-1]) if part.ndim > 1 and name != TENSOR_SCALE else part
        for name, part in parts.items()
    }
    if TENSOR_SCALE in flat and flat[TENSOR_SCALE].ndim:
        flat[TENSOR_SCALE] = flat[TENSOR_SCALE].flatten()

    def values(slots: Slots) -> Tensor:
        rows = slots
        # [T, .] belongs to tokens, [T, K, .] to slots.
        if x.ndim == 2:
            rows = slice(0, 1) if isinstance(slots, slice) else slots // per_token
        if not coded:
            return flat[X][rows]
        chosen = {name: part[rows] if part.ndim else part for name, part in flat.items()}
        return activation_values(chosen, format_name, dtype, numerics)

    return values


def _through(facts: ModelFacts, inputs: Inputs, weights: Weights, parts: Sequence[str]) -> Tensor:
    """Multiply every slot by the matrices `parts` of its expert, outputs side by side."""
    numerics, experts = facts.numerics, inputs["experts"]
    dtype, form = numerics.products, _format(facts, parts[0])
    values, out = _slot_values(inputs, experts.shape[1], form, numerics), None
    # Slots of a single token: joined in one copy at the end.
    alone: dict[int, list[Tensor]] = {}
    for number, slots in slots_by_expert(experts):
        x = values(slots)
        each = [weights[_expert(number, part)] for part in parts]
        tensors = [product(x, weight, dtype, numerics) for weight in each]
        if isinstance(slots, slice):
            alone[slots.start] = tensors
            continue
        rows = cast(tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1), numerics.store)
        if out is None:
            out = rows.new_zeros(experts.numel(), rows.shape[-1])
        out[slots] = rows
    if alone:
        out = cast(_in_order(alone, experts.numel()), numerics.store)
    if out is None:
        width = sum(weights[_expert(n, p)].shape[0] for n, p in _any_expert(weights, parts))
        out = torch.zeros(experts.numel(), width, dtype=numerics.store, device=experts.device)
    return out.reshape(*experts.shape, -1)


def _in_order(alone: Mapping[int, list[Tensor]], slots: int) -> Tensor:
    """Return one row for each slot of a token in one copy, zero where no expert took it."""
    some = next(iter(alone.values()))
    nothing = [] if len(alone) == slots else [torch.zeros_like(part) for part in some]
    rows = [part for slot in range(slots) for part in alone.get(slot, nothing)]
    return torch.cat(rows, dim=-1).reshape(slots, -1)


def _any_expert(weights: Weights, parts: Sequence[str]) -> list[tuple[int, str]]:
    """Return an expert of this rank: it gives the output width when no slot visits one."""
    held = (n for n in weights if weights[n].is_quantised or weights[n].value is not None)
    number = int(next(held).split(".")[2])
    return [(number, part) for part in parts]


def routed_w13(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return gate and up of every slot [T, K, 2F], gate first."""
    return {"out": _through(facts, inputs, weights, _FIRST)}


def routed_act(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Apply clamped SwiGLU, the routing weight if it comes first, and requantisation by recipe."""
    numerics = facts.numerics
    gate, up = cast(inputs["x"], numerics.work).chunk(2, -1)
    out = elementary.swiglu(gate, up, facts.limit, numerics)
    if facts.weight_before_w2:
        out = out * cast(inputs["weights"], numerics.work)[..., None]
    chosen = _format(facts, "w2")
    if chosen is None or numerics.switches.activation_rounded_before_codes:
        out = cast(out, numerics.store)
    if chosen is None:
        return {"out": out}
    scale = None
    if BLOCK_FORMATS[chosen].tensor_scale:
        scale = _input_scale(facts, inputs["experts"], weights, _SECOND)
    return quantise_activations(out, chosen, scale)


def routed_w2(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return the down projection of every slot [T, K, D]."""
    return {"out": _through(facts, inputs, weights, _SECOND)}


def combine(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Sum over the chosen experts, in slot order, kept in the working dtype."""
    del weights
    x_TKD = cast(inputs["x"], facts.numerics.work)
    if not facts.weight_before_w2:
        x_TKD = x_TKD * cast(inputs["weights"], facts.numerics.work)[..., None]
    return {"out": x_TKD.sum(1)}


def moe_sum(facts: ModelFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Add routed and shared output, rounded once."""
    del weights
    total = cast(inputs["routed"], facts.numerics.work) + cast(
        inputs["shared"], facts.numerics.work
    )
    return {"out": cast(total, facts.numerics.store)}
