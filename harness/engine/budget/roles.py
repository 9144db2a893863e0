"""The table from component roles to the rules that derive their error budgets.

RULES holds roles with one formula for each output. WHOLE holds chains that pass through stored
values; these derive all outputs at once and need the twin's facts. Codes go through
judging.judge_outputs instead. The components of the DSpark drafter, and calls that lack the facts
their chain needs, are UNDECIDED.

Shape letters: T tokens, S streams, D hidden, K slots, G groups, O outputs of one, R rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import Undecided
from degarble.harness.base.gpu import gpu_failures
from degarble.harness.engine.budget import attention, chains, spans, traced
from degarble.harness.engine.budget.bounded_values import BoundedValue, exactly, stored
from degarble.harness.engine.budget.bounded_values import bounded_norm as near_normed
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.chains import compressor_pool, mhc_mixing
from degarble.harness.engine.budget.codes_and_choices import gated, is_coded, weights_budget
from degarble.harness.engine.budget.rules import (
    FP8_ACTIVATIONS,
    LARGE,
    UNDERFLOW,
    JudgeableCall,
    U,
    ambiguous,
    cut_in_steps,
    cut_off,
    exact,
    few,
    normed,
    output_format,
    over_ranks,
    product_operand,
    summed,
)
from degarble.harness.formats.number_formats import BF16, FP32
from degarble.harness.model.family import family_of
from degarble.references.linears import weight_values
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.budget.rules import ProductOperand
    from degarble.harness.formats.number_formats import ElementFormat
    from degarble.harness.formats.weight import Weight

    Rule = Callable[[JudgeableCall, Tensor], Budget]
    Whole = Callable[[JudgeableCall], dict[str, Budget]]

__all__ = ("RULES", "SUMS", "WHOLE", "JudgeableCall", "budgets_of")

_SILU_ROUNDINGS = 12  # exponential and quotient, approximate ones included, two products, weight


@gpu_failures()
def budgets_of(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of every output of a component."""
    whole, rule = _own_rule(call) or WHOLE.get(call.role), RULES.get(call.role)
    if whole is not None:
        return whole(call)
    if rule is None:
        raise Undecided(
            "budget", call.role, "a component whose rounding errors have a derivation",
            "Judge it by its distance to the BF16 reference, or compare two runs.",
        )  # fmt: skip
    return {
        name: rule(call, out)
        if out.dtype.is_floating_point
        else exact(FP32, f"{name} are whole numbers")
        for name, out in call.outputs.items()
    }


def has_rule(call: JudgeableCall) -> bool:
    """Tell whether outputs of a role are judged at all, as numbers or as codes."""
    return call.role in WHOLE or call.role in RULES or is_coded(call) or bool(_own_rule(call))


def _own_rule(call: JudgeableCall) -> Whole | None:
    """Return the rule of a component that its family alone has."""
    return family_of(call.facts.config).budget_rules().get(call.role) if call.facts else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _copied(_call: JudgeableCall, out: Tensor) -> Budget:
    return exact(
        output_format(out), "values are copied, or rounded by a rule that is exact in float32"
    )


def _linear(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of one matrix, or of several whose outputs are concatenated."""
    x, loose, weights = product_operand(_rows(call.x)), call.x_loose, call.matrices.values()
    budget = _side_by_side(
        [_product(x, loose, _used(call, w), output_format(out)) for w in weights]
    )
    if call.fraction_bits is not None and call.activation in FP8_ACTIVATIONS:
        values = torch.cat([w.values(torch.float32) for w in call.weights.values()])
        budget = cut_in_steps(budget, x.rows, values, call.fraction_bits)
    budget = replace(budget, slack=budget.slack.reshape(out.shape))
    if call.ranks == 1 or call.role not in _SUMMED_OVER_RANKS:
        return budget
    (weight,) = call.weights.values()
    return over_ranks(
        budget, _rows(call.x), weight.values(torch.float32), call.ranks, on_the_way=True
    )


class _Matrix(NamedTuple):
    """A weight as it is multiplied, and how far each number may be off where it was rounded."""

    value: Tensor
    loose: Tensor | None = None

    def chunks(self, count: int) -> list[_Matrix]:
        """Split it by rows."""
        loose = [None] * count if self.loose is None else self.loose.chunk(count)
        return [_Matrix(*each) for each in zip(self.value.chunk(count), loose, strict=True)]


def _used(call: JudgeableCall, weight: Weight) -> _Matrix:
    if call.operands is DecodedOperands.EXACT or not weight.is_decoded:
        return _Matrix(_matrix(weight))
    assert call.facts is not None, "without facts operands are exact"
    numerics = call.facts.numerics
    loose = ambiguous(weight.values(torch.float32), numerics.decoded).float()
    return _Matrix(weight_values(weight, torch.float32, numerics), loose)


def _product(
    x: ProductOperand,
    x_loose: Tensor | None,
    w: _Matrix,
    output: ElementFormat,
    *,
    worded: bool = True,
) -> Budget:
    """Return the budget of one matrix; decoded numbers near a BF16 boundary may go either way.

    It is computed where the matrix is, and judged on the CPU.
    """
    device = w.value.device
    x = x.on(device)
    budget = summed(x, w.value, output, worded=worded)
    slack = budget.slack
    if w.loose is not None:
        slack = slack + x.rows.abs() @ w.loose.T
    if x_loose is not None:
        slack = slack + x_loose.to(device) @ w.value.float().abs().T
    return replace(budget, slack=slack.cpu())


def _matrix(weight: Weight) -> Tensor:
    """Return a matrix in float32; a large plain one as stored, to be widened in pieces."""
    value = weight.value
    if value is not None and value.numel() > LARGE:
        return value
    return weight.values(torch.float32)


def _projected(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of one of two matrices with outputs of their own: latent or gate."""
    name = next(n for n, output in call.outputs.items() if output is out)
    part = {"latent": "wkv", "gate": "wgate"}[name]
    (weight,) = (w for n, w in call.matrices.items() if n.endswith(part))
    kept = output_format(out)
    if call.facts is not None and call.facts.numerics.switches.pooling_in_storage_dtype:
        kept = BF16  # values of BF16 in a wider tensor
    return _product(product_operand(_rows(call.x)), call.x_loose, _used(call, weight), kept)


def _grouped(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of a linear with one matrix for each group of heads."""
    (weight,) = call.matrices.values()
    used, x, loose = _used(call, weight), _rows(call.x), call.x_loose
    w, groups = used.value, x.shape[1] // used.value.shape[1]
    x_loose = [None] * groups if loose is None else loose.chunk(groups, 1)
    budgets = [
        _product(product_operand(a), b, c, output_format(out))
        for a, b, c in zip(x.chunk(groups, 1), x_loose, used.chunks(groups), strict=True)
    ]
    if call.fraction_bits is not None and call.activation in FP8_ACTIVATIONS:
        parts = zip(budgets, x.chunk(groups, 1), w.cpu().chunk(groups, 0), strict=True)
        budgets = [cut_in_steps(budget, a, b, call.fraction_bits) for budget, a, b in parts]
    return _side_by_side(budgets)


def _side_by_side(made: Sequence[Budget]) -> Budget:
    """Concatenate the budgets of several products; keep the first one's derivation."""
    if len(made) == 1:
        return made[0]
    slack = torch.cat([budget.slack for budget in made], dim=1)
    return replace(made[0], slack=slack, repeats=_most(made))


def _most(made: Sequence[Budget]) -> tuple[int, int]:
    """Return the largest repeats of several parts."""
    return max(budget.repeats[0] for budget in made), max(budget.repeats[1] for budget in made)


def _routed(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of every slot through its own expert's matrices."""
    experts, x = call.inputs["experts"], call.x
    per_slot = x if x.ndim == 3 else x[:, None].expand(-1, experts.shape[1], -1)
    loose = None if call.x_loose is None else call.x_loose.reshape(x.shape)
    if loose is not None and loose.ndim == 2:
        loose = loose[:, None].expand(per_slot.shape)
    parts = ("w2",) if call.role.endswith("w2") else ("w1", "w3")
    slack = torch.zeros(*experts.shape, out.shape[-1])
    budgets, matrices = [exact(output_format(out), "no expert was visited")], call.matrices
    numbers = experts[experts >= 0].unique().tolist()
    for number in numbers:
        # Mask [T, K] of the slots routed to this expert.
        at = experts == number
        names = [f"ffn.experts.{number}.{part}" for part in parts]
        x_own = product_operand(per_slot[at])
        x_loose = None if loose is None else loose[at]
        weights = [_used(call, matrices[name]) for name in names]
        x_there = x_own.on(weights[0].value.device)  # once for all matrices
        parts_of = partial(_product, x_there, x_loose, output=output_format(out))
        # The words of the last expert stand for all.
        made = [parts_of(w, worded=number == numbers[-1]) for w in weights]
        budgets.append(_side_by_side(made))
        if call.ranks > 1 and parts == ("w2",):
            own = per_slot[at]
            budgets[-1] = over_ranks(
                budgets[-1], own, weights[0].value.cpu(), call.ranks, on_the_way=False
            )
        slack[at] = budgets[-1].slack
    return replace(budgets[-1], slack=slack, repeats=_most(budgets))


def _norm(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of a norm, or of the residual that it passes on."""
    if out is call.outputs.get("residual"):
        return few(out.abs(), 1, output_format(out), "sum of input and residual")
    weight = next((each.values(torch.float32) for each in call.weights.values()), None)
    numerics = None if call.facts is None else call.facts.numerics
    if weight is not None and numerics is not None and numerics.norm_stored_before is not None:
        return _norm_in_steps(call, out, weight)
    return normed(out, out.shape[-1], output_format(out), additions=1, weight=weight)


def _norm_in_steps(call: JudgeableCall, out: Tensor, weight: Tensor) -> Budget:
    """Return the budget of a norm whose rows are stored before the weight is applied."""
    facts = call.known_facts
    near = exactly(call.inputs["x"])
    if "residual" in call.inputs:
        total = near.value + call.inputs["residual"].double()
        near = BoundedValue(total, U * total.abs())
        if facts.numerics.switches.residual_rounded_before_norm:
            near = stored(near, facts.numerics.store)
    (name,) = call.weights
    near = near_normed(
        near, weight.double(), facts.norm_epsilon(name), facts.numerics.norm_stored_before
    )
    words = (f"RMS norm of {out.shape[-1]}, stored in front of the weight",)
    return Budget(output_format(out), near.error.reshape(out.shape), words)


def _gated(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of SwiGLU; the rounded argument of the exponential costs |gate| u."""
    if call.facts is not None and call.facts.numerics.switches.gate_rounded_before_product:
        words = ("SiLU, stored in BF16; its product with up",)
        return Budget(output_format(out), gated(call, shared=True).error, words)
    gate, up = call.inputs["x"].double().chunk(2, -1)
    amplitude = out.abs() * (1 + 2 * gate.abs().float() / _SILU_ROUNDINGS)
    budget = few(amplitude, _SILU_ROUNDINGS, output_format(out), "SwiGLU")
    end = cut_off(torch.sigmoid(gate)) * (gate * up).abs() + UNDERFLOW
    return replace(budget, slack=budget.slack + end)


def _combined(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of the sum over slots, with weights or without."""
    x = call.inputs["x"].float().abs()
    if "weights" in call.inputs:
        x = torch.maximum(x, x * call.inputs["weights"].float().abs()[..., None])
    return few(x.sum(1), x.shape[1] + 1, output_format(out), f"sum of {x.shape[1]} slots")


def _added(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of two terms; V3.2's drafter concatenates them."""
    if call.role == "join" and out.ndim == call.inputs["e"].ndim:
        return exact(output_format(out), "two rows side by side")
    amplitude = out.abs().double()
    for x in call.inputs.values():
        if x.dtype is torch.float64 and x.shape == out.shape:
            # A kernel that sums in float32 rounds this float64 operand first.
            amplitude = amplitude + x.abs()
    return few(amplitude, 2, output_format(out), "sum of two terms")


def _spread(call: JudgeableCall, out: Tensor) -> Budget:
    """Return the budget of mHC's expansion: one product with the output, one with each stream."""
    x, streams, post, mix = (
        call.inputs[name].float().abs() for name in ("x", "streams", "post", "mix")
    )
    largest = torch.bmm(mix.transpose(1, 2), streams) + post[..., None] * x[:, None]
    count = 2.0 * (streams.shape[1] + 1)
    return few(largest, count, output_format(out), "one product a stream, and their sum")


def _experts_gated(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of the routed experts' SwiGLU where nothing is quantised."""
    if is_coded(call):
        raise Undecided(
            "budget", call.role, "numbers; codes and scales have no slack of their own",
            "Judge all outputs together: harness.engine.budget.judging.judge_outputs.",
        )  # fmt: skip
    out = call.outputs["out"]
    words = ("SwiGLU: exponential by its argument, functions within 2 units, products; weight",)
    return {"out": Budget(output_format(out), gated(call).error, words)}


def _weighed(call: JudgeableCall) -> dict[str, Budget]:
    """Return the router's budgets for the twin's choice; judging.py judges the candidate's own."""
    whole = exact(FP32, "experts are whole numbers")
    return {"experts": whole, "weights": weights_budget(call, call.outputs["experts"])[1]}


_LINEARS = (
    "head e_proj h_proj eh_proj attn.wq_a attn.wq_b attn.wkv attn.wkv_a attn.wkv_b attn.wo"
    " attn.wo_b attn.indexer.wq_b attn.indexer.wk ffn.gate ffn.shared.w13 ffn.shared.w2 ffn.w13"
    " ffn.w2"
)
# Row-parallel linears: tensor parallelism splits K and sums the outputs of the ranks.
_SUMMED_OVER_RANKS = frozenset({"attn.wo_b", "attn.wo", "ffn.shared.w2", "ffn.w2"})
_NORMS = "norm enorm hnorm attn.norm attn.q_norm attn.kv_norm ffn.norm"
_GROUPS: tuple[tuple[str, Rule], ...] = (
    (_LINEARS, _linear),
    (_NORMS, _norm),
    ("attn.compressor.proj attn.indexer.compressor.proj", _projected),
    ("attn.wo_a", _grouped),
    ("ffn.experts.w13 ffn.experts.w2", _routed),
    ("ffn.shared.act ffn.act", _gated),
    ("ffn.experts.combine", _combined),
    ("ffn.moe_sum join", _added),
    ("attn.hc_post ffn.hc_post", _spread),
    ("embed attn.indexer.topk", _copied),
)
RULES: Mapping[str, Rule] = MappingProxyType(
    {role: rule for roles, rule in _GROUPS for role in roles.split()}
)
# Roles linear in their operand: twice the operand is twice the output, and twice its slack.
SUMS = frozenset(
    role for role, rule in RULES.items() if rule in (_linear, _projected, _grouped, _routed)
)
_TRACED = (
    "traced.embedding traced.cache traced.norm traced.activation traced.rotary traced.attention"
    " traced.router traced.module traced.rotation traced.residual traced.gated"
    " traced.stretch"
)
_WHOLE_GROUPS: tuple[tuple[str, Whole], ...] = (
    ("attn.hc_pre ffn.hc_pre hc_head", mhc_mixing),
    ("attn.compressor.pool attn.indexer.compressor.pool", compressor_pool),
    ("attn.indexer.q attn.indexer.k", chains.indexer_operands),
    ("attn.indexer.weights_proj", chains.indexer_head_weights),
    ("attn.indexer.scores", chains.indexer_scores),
    ("attn.attend", attention.attended),
    ("attn.q_head_norm_rope", chains.query_heads),
    ("attn.kv_norm_rope", chains.latent_row),
    ("attn.inverse_rope", chains.inverse_rotation),
    ("attn.rope", chains.query_and_key),
    ("attn.kv_write attn.compressor.write", chains.cache_rows),
    ("ffn.experts.act_quant", _experts_gated),
    ("ffn.topk", _weighed),
    ("traced.topk", traced.own_choice),
    ("traced.choice", traced.exact_rows),
    ("traced.linear", traced.linear),
    ("traced.span", spans.span),
    ("traced.experts", spans.experts),
    (_TRACED, traced.traced),
)
WHOLE: Mapping[str, Whole] = MappingProxyType(
    {role: rule for roles, rule in _WHOLE_GROUPS for role in roles.split()}
)
