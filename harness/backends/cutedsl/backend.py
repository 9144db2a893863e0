"""The backend `cutedsl`: replace a model's components by our kernels, one table row per role.

CONVENTIONS states what our kernels do where sources disagree; the twin follows it. Nothing falls
back silently: a run's table lists launches for the components that kernels compute, and the reason
for every other one.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.backends.cutedsl import attention, experts, linears, rows
from degarble.harness.backends.cutedsl.kernels import (
    ComponentCallWork,
    ComponentPart,
    NoKernelError,
    PreparedWeights,
)
from degarble.harness.backends.pairings import Paired, replace_call
from degarble.harness.base.errors import Refused
from degarble.harness.model.family import family_of
from degarble.harness.model.parameters import parameter_named
from degarble.harness.report.kernel_table import KernelTable
from degarble.references.numerics import HeadNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Compute, Kernels
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel

    Pairing = Callable[[ComponentPart], Compute]

NAME = "cutedsl"
# What our kernels do where sources disagree; the twin that judges them does the same.
CONVENTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "head_norm": HeadNorm.ONCE,
        "routing_weight_before_w2": False,
        "attention_in_storage_dtype": False,
    }
)
_ACT_QUANT = ".act_quant"

PAIRINGS: Mapping[str, Pairing] = {
    "embed": rows.embed,
    "head": linears.wide,
    "attn.q_norm": rows.norm,
    "attn.kv_norm": attention.latent_norm,
    "attn.wq_a": linears.linear,
    "attn.wq_b": linears.linear,
    "attn.wkv": linears.linear,
    "attn.wkv_a": linears.linear,
    "attn.wkv_b": linears.linear,
    "attn.wo_a": linears.grouped,
    "attn.wo_b": linears.linear,
    "attn.wo": linears.linear,
    "attn.q_head_norm_rope": rows.query_heads,
    "attn.rope": rows.rope,
    "attn.kv_norm_rope": rows.latent_row,
    "attn.inverse_rope": rows.inverse_rope,
    "attn.compressor.proj": linears.compressor,
    "attn.compressor.write": rows.cache_row,
    "attn.indexer.wq_b": linears.linear,
    "attn.indexer.wk": linears.linear,
    "attn.indexer.compressor.proj": linears.compressor,
    "hc_head": rows.head,
    "attn.hc_pre": rows.pre,
    "ffn.hc_pre": rows.pre,
    "attn.hc_post": rows.post,
    "ffn.hc_post": rows.post,
    "attn.compressor.pool": attention.pool,
    "attn.indexer.q": attention.queries,
    "attn.indexer.k": attention.keys,
    "attn.indexer.compressor.pool": attention.pooled,
    "attn.indexer.topk": attention.topk,
    "ffn.experts.combine": experts.combine,
    "ffn.moe_sum": experts.moe_sum,
    "ffn.gate": linears.wide,
    "ffn.topk": experts.topk,
    "ffn.w13": linears.linear,
    "ffn.act": experts.shared_act,
    "ffn.w2": linears.linear,
    "ffn.experts.w13": experts.w13,
    "ffn.experts.w13.act_quant": experts.w13_act_quant,
    "ffn.experts.act_quant": experts.routed_act,
    "ffn.experts.w2": experts.w2,
    "ffn.shared.w13": linears.linear,
    "ffn.shared.act": experts.shared_act,
    "ffn.shared.w2": linears.linear,
}
# Roles that a family has in a form of its own: ModelFamily.kernel_pairings.
V4_PAIRINGS: Mapping[str, Pairing] = {
    "norm": rows.norm,
    "attn.norm": rows.norm,
    "ffn.norm": rows.norm,
    "attn.kv_write": rows.cache_row,
    "attn.attend": attention.attend,
    "attn.indexer.weights_proj": partial(attention.weights, in_bf16=True),
    "attn.indexer.scores": partial(attention.scores, may_store=True),
}
V32_PAIRINGS: Mapping[str, Pairing] = {
    "norm": rows.residual_norm,
    "attn.norm": rows.residual_norm,
    "ffn.norm": rows.residual_norm,
    "attn.kv_write": attention.cache_row,
    "attn.attend": attention.attend_latent,
    "attn.indexer.weights_proj": partial(attention.weights, in_bf16=False),
    "attn.indexer.scores": partial(attention.scores, may_store=False),
}


class KernelCall:
    """A component computed by kernels; outputs return to the device of the inputs."""

    def __init__(self, name: str, compute: Compute, kernels: Kernels, table: KernelTable) -> None:
        self._name, self._compute = name, compute
        self._kernels, self._table = kernels, table
        self._kept: dict[tuple[str, str], Any] = {}

    def __call__(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Compute the component, and record what was launched."""
        there = self._kernels.device
        home = next(iter(inputs.values())).device
        given = {name: tensor.to(there) for name, tensor in inputs.items()}
        work = ComponentCallWork(given, PreparedWeights(weights, there, self._kept), self._kernels)
        made = self._compute(work)
        self._table.note(self._name, self._kernels.take_launches())
        return {name: tensor.to(home) for name, tensor in made.items()}


def use_kernels(bound: BoundModel, recipe: Recipe, kernels: Kernels) -> Paired:
    """Replace every component for which there is a kernel."""
    computes: dict[str, Compute] = {}
    reasons: dict[str, str] = {}
    for part in parts_of(bound, recipe, kernels.target):
        found = decided(part)
        if isinstance(found, str):
            reasons[part.component.name] = found
        else:
            computes[part.component.name] = found
    table = KernelTable(kernels.target, reasons)
    for name, compute in computes.items():
        replace_call(bound, name, KernelCall(name, compute, kernels, table), f"backend {NAME}")
    return Paired(NAME, tuple(computes), tuple(reasons), table)


def decided(part: ComponentPart) -> Compute | str:
    """Return a component's kernels, or the reason why none computes it."""
    role = part.component.role
    family = family_of(part.config)
    pairing = family.kernel_pairings().get(role) or PAIRINGS.get(role)
    if pairing is None and role.endswith(_ACT_QUANT):
        pairing = linears.act_quant
    if pairing is None:
        return "no kernel of this version computes it"
    try:
        return pairing(part)
    except NoKernelError as reason:
        return str(reason)
    except Refused as error:  # a problem that the kernel's own contract does not have
        return f"{error.name} = {error.shown_value}: the kernel takes {error.expectation}"


def parts_of(bound: BoundModel, recipe: Recipe, target: str) -> list[ComponentPart]:
    """Return every component of a bound model in order, with the data for choosing a kernel."""
    made = []
    for name in bound.calls:
        component, facts = bound.bound_to(name)
        prefix = f"{component.block.prefix}." if component.block else ""
        known = {
            local: parameter_named(bound.config, prefix + local) for local in bound.weights_of(name)
        }
        made.append(
            ComponentPart(
                component,
                facts,
                {local: recipe.format_of(parameter).weight for local, parameter in known.items()},
                {local: parameter.shape for local, parameter in known.items()},
                {local: str(parameter.row.dtype) for local, parameter in known.items()},
                target,
            )
        )
    return made
