"""Run MoE routing and experts by our kernels: top-k, gate and up, SwiGLU, down projection, sum.

NVFP4 weights and activations use the grouped kernels, step by step (grouped.py); other formats use
one launch for each visited expert. For these, slots (token, chosen expert) are sorted by expert
first and restored afterwards. SwiGLU runs inside the quantiser, which also stores its values if
they are the component's output.

Shape letters: T tokens, K slots a token, E experts, D hidden, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.backends.cutedsl import grouped
from degarble.harness.backends.cutedsl import moe as steps
from degarble.harness.backends.cutedsl.linears import Rows, act_quant, input_scale, product, way_of
from degarble.harness.backends.cutedsl.parts import NoKernelError, own
from degarble.harness.formats.layouts import LINEAR
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, MoeProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.backends.cutedsl.parts import Compute, Outputs, Part, Work

_FIRST, _SECOND = ("w1", "w3"), ("w2",)
_NAME = "ffn.experts.{}.{}"


@dataclass(frozen=True)
class Slots:
    """Slots sorted by expert: `order[n]` is the flat slot at place n, `offsets` begins experts."""

    order: Tensor
    offsets: tuple[int, ...]
    per_token: int

    @classmethod
    def of(cls, expert_TK: Tensor, experts: int) -> Slots:
        """Sort; slots without an expert come last."""
        flat = expert_TK.flatten()
        key = torch.where(flat < 0, experts, flat)
        counts = torch.bincount(key, minlength=experts + 1)[:experts]
        ends = counts.cumsum(0).tolist()
        return cls(torch.argsort(key, stable=True), (0, *ends), expert_TK.shape[1])

    def visited(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, and their range."""
        for expert, (begin, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            if end > begin:
                yield expert, slice(begin, end)

    def rows(self, x: Tensor, *, by_slot: bool) -> Tensor:
        """Return the row of each place: of the slot itself, or of its token."""
        if by_slot:
            return x.flatten(0, 1)[self.order]
        return x[self.order // self.per_token]

    def back(self, made: Tensor) -> Tensor:
        """Restore rows to the order of their slots [T, K, .]."""
        out = torch.empty_like(made)
        out[self.order] = made
        return out.reshape(-1, self.per_token, *made.shape[1:])


def topk(part: Part) -> Compute:
    """Return the chosen experts and their weights."""
    c, name = part.config, part.name
    by_table = name.endswith("tid2eid")
    grouped = not part.v4
    problem = RouterProblem(
        1, c.n_routed_experts, c.num_experts_per_tok, c.scoring_func,
        scale=c.routed_scaling_factor,
        epsilon=part.facts.numerics.switches.routing_epsilon,
        groups=c.n_group if grouped else 1,
        groups_kept=c.topk_group if grouped else 1,
        vocabulary=part.shapes[name][0] if by_table else 0,
    )  # fmt: skip

    def compute(work: Work) -> Outputs:
        logits = work.fp32("logits")
        told = {each: getattr(problem, each) for each in problem.__dataclass_fields__}
        here = RouterProblem(**(told | {"tokens": logits.shape[0]}))
        source = work.weights.plain(name, torch.int64 if by_table else torch.float32)
        ids = own(work.inputs["tokens"].to(torch.int64)) if by_table else None
        experts, weights = work.run("simt_router", here, logits=logits, source=source, ids=ids)
        return {"experts": experts.to(torch.int64), "weights": weights}

    return compute


def _names(part: Part, parts: Sequence[str]) -> list[list[str]]:
    """Return the names of every expert's weights."""
    count = part.config.n_routed_experts
    return [[_NAME.format(expert, each) for each in parts] for expert in range(count)]


def _products(part: Part, parts: Sequence[str]) -> Compute:
    names = _names(part, parts)
    ways = [way_of(part, name) for name in names[0]]  # a recipe treats all experts alike
    if all(way.kernel == "sm90_gemm_nvfp4" for way in ways):
        return (grouped.first if parts == _FIRST else grouped.second)(part, names)
    width = sum(part.shapes[name][0] for name in names[0])

    def compute(work: Work) -> Outputs:
        given = work.inputs
        slots = Slots.of(given["experts"], len(names))
        rows = _rows(work, slots)
        made = torch.zeros(
            given["experts"].numel(), width, dtype=torch.bfloat16, device=work.kernels.device
        )
        for expert, span in slots.visited():
            place = torch.arange(span.start, span.stop, device=made.device)
            own_rows = rows.some(place)
            each = zip(ways, names[expert], strict=True)
            made[span] = torch.cat([product(work, way, n, own_rows) for way, n in each], dim=-1)
        return {"out": slots.back(made)}

    return compute


def _rows(work: Work, slots: Slots) -> Rows:
    """Return every slot's activations, sorted by expert."""
    given = work.inputs
    if "codes" not in given:
        x = work.bf16()
        return Rows(values=slots.rows(x, by_slot=x.ndim == 3))
    by_slot = given["codes"].ndim == 3
    scale = given.get("tensor_scale")
    if scale is not None and scale.ndim:
        scale = scale.flatten()[slots.order]
    codes, block_scale = (
        slots.rows(given[name], by_slot=by_slot) for name in ("codes", "block_scale")
    )
    return Rows(None, codes, block_scale, scale)


def w13(part: Part) -> Compute:
    """Compute gate and up of every slot, gate first."""
    return _products(part, _FIRST)


def w2(part: Part) -> Compute:
    """Compute the down projection of every slot."""
    return _products(part, _SECOND)


def _expert_scales(work: Work, names: Sequence[Sequence[str]]) -> Tensor:
    """Return the decode scale of each expert's input activations [E]."""
    return torch.cat([input_scale(work, each) for each in names])


def _quantised(
    work: Work, slots: Slots, x: Tensor, scales: Tensor, problem: QuantiseProblem
) -> Outputs:
    """Quantise rows that are sorted by expert, and restore them to the order of slots."""
    offsets = torch.tensor(slots.offsets, dtype=torch.int32, device=x.device)
    codes, block_scales = work.run(
        "simt_quantise_nvfp4", problem, values=own(x), decode_scale=scales, offsets=offsets
    )
    expert_TK = work.inputs["experts"]
    of_slot = torch.where(expert_TK < 0, 1.0, scales[expert_TK.clamp(min=0)])
    return {
        "codes": slots.back(codes),
        "block_scale": slots.back(block_scales.reshape(x.shape[0], -1)),
        "tensor_scale": of_slot,
    }


def _require_shares(part: Part) -> None:
    if part.facts.numerics.switches.input_scale_shared:
        raise NoKernelError("the quantiser has a scale for every expert, not one for a layer")


def w13_act_quant(part: Part) -> Compute:
    """Quantise every slot's input to NVFP4 with its expert's own scale."""
    names = _names(part, _FIRST)
    activation = part.facts.activation(names[0][0])
    if activation != "NVFP4":
        return act_quant(part)  # a token once for all of its experts
    _require_shares(part)
    if part.target == SM90A.name:
        return grouped.gather(part, names)
    return _gathered(part, names)


def _gathered(part: Part, names: Sequence[Sequence[str]]) -> Compute:
    """Quantise every slot's input without the grouped kernels."""
    columns, count = part.shapes[names[0][0]][-1], len(names)
    QuantiseProblem(1, columns, LINEAR.name, experts=count)

    def compute(work: Work) -> Outputs:
        slots = Slots.of(work.inputs["experts"], count)
        x = slots.rows(work.bf16(), by_slot=False)
        problem = QuantiseProblem(x.shape[0], columns, LINEAR.name, experts=count)
        return _quantised(work, slots, x, _expert_scales(work, names), problem)

    return compute


def routed_act(part: Part) -> Compute:
    """Apply clamped SwiGLU to every slot and requantise with its expert's own scale."""
    names = _names(part, _SECOND)
    if part.facts.weight_before_w2:
        raise NoKernelError("the quantiser's SwiGLU takes no routing weight in front of w2")
    activation = part.facts.activation(names[0][0])
    if activation is None:
        return swiglu(part.config.moe_intermediate_size, part.facts.limit)
    if activation != "NVFP4":
        raise NoKernelError(f"no kernel quantises activations to {activation}")
    _require_shares(part)
    count, limit, columns = len(names), part.facts.limit, part.config.moe_intermediate_size
    QuantiseProblem(1, columns, LINEAR.name, "swiglu", experts=count, limit=limit)

    def compute(work: Work) -> Outputs:
        slots = Slots.of(work.inputs["experts"], count)
        x = slots.rows(work.bf16(), by_slot=True)
        problem = QuantiseProblem(
            x.shape[0], columns, LINEAR.name, "swiglu", experts=count, limit=limit
        )
        return _quantised(work, slots, x, _expert_scales(work, names), problem)

    return grouped.act(part, names, compute) if part.target == SM90A.name else compute


def combine(part: Part) -> Compute:
    """Sum a token's slots, multiplied by routing weights if those come last."""
    c = part.config
    weighting = BEFORE_W2 if part.facts.weight_before_w2 else AFTER_W2

    def problem(tokens: int) -> MoeProblem:
        return MoeProblem(
            tokens, c.hidden_size, c.moe_intermediate_size, c.n_routed_experts,
            c.num_experts_per_tok, c.n_routed_experts, weighting=weighting,
        )  # fmt: skip

    problem(1)

    def compute(work: Work) -> Outputs:
        x = work.bf16()
        rows, places = grouped.rows_to_sum(work, x)
        terms = {"rows": rows, "places": places, "weights": work.fp32("weights")}
        here = problem(x.shape[0])
        (made,) = work.run(steps.ROWS, steps.Step(steps.SUM, here), **terms)
        work.kernels.summed = Summed(here, terms, made)
        return {"out": made}

    return compute


class Summed(NamedTuple):
    """A sum of slots, with the operands that it was made of."""

    problem: MoeProblem
    terms: dict[str, Tensor]
    out: Tensor


def moe_sum(part: Part) -> Compute:
    """Add routed and shared experts: repeat the sum with the shared expert as its last term.

    A sum that the kernel did not make has no slots: torch adds it, and the table records that.
    """
    del part

    def compute(work: Work) -> Outputs:
        routed, shared = work.inputs["routed"], work.bf16("shared")
        summed: Summed | None = work.kernels.summed
        work.kernels.summed = None
        if summed is None or not grouped.same(summed.out, routed):
            work.kernels.note("torch", "added to a sum that no kernel made")
            return {"out": (routed.float() + shared.float()).to(torch.bfloat16)}
        step = steps.Step(steps.TOTAL, summed.problem)
        (made,) = work.run(steps.ROWS, step, **summed.terms, shared=shared)
        return {"out": made}

    return compute


def shared_act(part: Part) -> Compute:
    """Apply SwiGLU of the shared expert, or of a dense layer."""
    c, dense = part.config, part.component.role == "ffn.act"
    columns = c.intermediate_size if dense else c.moe_intermediate_size
    return swiglu(columns, part.facts.shared_limit)


def swiglu(columns: int, limit: float | None) -> Compute:
    """Return the SwiGLU values that the quantiser encodes."""
    QuantiseProblem(1, columns, LINEAR.name, "swiglu", keeps_values=True, limit=limit)

    def compute(work: Work) -> Outputs:
        x = work.bf16()
        rows = own(x.reshape(-1, x.shape[-1]))
        problem = QuantiseProblem(
            rows.shape[0], rows.shape[1] // 2, LINEAR.name, "swiglu", keeps_values=True, limit=limit
        )
        unused = torch.ones(1, dtype=torch.float32, device=rows.device)
        made = work.run("simt_quantise_nvfp4", problem, values=rows, decode_scale=unused)
        return {"out": made[2].reshape(*x.shape[:-1], -1)}

    return compute
