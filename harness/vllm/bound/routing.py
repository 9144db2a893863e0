"""The router and the shared expert's activation of vLLM with our kernels.

Experts are chosen by score or by the table of token ids, and weighted in float32. SwiGLU has its
limit and is rounded once to BF16. On an H200 `degarble check` found a difference between vLLM's own
kernels of both and the definition: docs/vllm.md.

Routers and activations of another class stay vLLM's, which is logged. There is no fallback: if a
kernel raises, its error is the result.
Shape letters: T tokens, E experts, K chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.vllm.bound.fp32_linears import adopt_gate
from degarble.harness.vllm.bound.linears import settings
from degarble.harness.vllm.bound.upstream import FusedTopKBiasRouter, SiluAndMulWithClamp
from degarble.harness.vllm.parts import BF16

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.vllm.bound.start import Start


class DegarbleRouter(FusedTopKBiasRouter):
    """vLLM's router; made by vLLM, adopted by `adopt_block`."""

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose and weigh by our kernel."""
        del hidden_states
        table = self._hash_indices_table
        source = self.e_score_correction_bias if table is None else table
        weights, experts = routed(self, router_logits, source.data, input_ids)
        return weights, experts if indices_type is None else experts.to(indices_type)


class DegarbleAct(SiluAndMulWithClamp):
    """vLLM's SwiGLU with a limit; made by vLLM, adopted by `adopt_block`."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by our kernel."""
        return activated(x, self.swiglu_limit)


def adopt_block(ffn: Any, module: str, start: Start) -> None:
    """Make a block's gate, router and activation ours, where their classes are those on record."""
    adopt_gate(ffn.gate, f"{module}.gate", start)
    router = ffn.experts.router
    if type(router) is not FusedTopKBiasRouter:
        start.other_class(f"{module}.gate", "router", router)
    elif start.kernel(f"{module}.gate", "router", router.scoring_func):
        router.__class__ = DegarbleRouter
    act = ffn.shared_experts.act_fn if ffn.shared_experts is not None else None
    if act is None:
        return
    if type(act) is not SiluAndMulWithClamp:
        start.other_class(f"{module}.shared_experts", "act", act)
    elif start.kernel(f"{module}.shared_experts", "act", BF16):
        act.__class__ = DegarbleAct


def routed(
    router: Any, logits_TE: Tensor, source: Tensor, ids_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return weights [T, K] and experts [T, K] by our kernel."""
    from degarble.kernels.rows.router_problem import RouterProblem  # noqa: PLC0415  needs the DSL
    from degarble.kernels.rows.simt_router import route  # noqa: PLC0415

    by_table = source.dim() > 1
    kind = str(source.dtype).removeprefix("torch.") if by_table else "int64"
    tokens, experts = logits_TE.shape
    problem = RouterProblem(
        tokens, experts, router.top_k, router.scoring_func, router.routed_scaling_factor,
        normalises=router.renormalize, vocabulary=source.shape[0] if by_table else 0, ids=kind,
    )  # fmt: skip
    ids = None
    if by_table:
        assert ids_T is not None, "a table is asked by token ids"
        ids = ids_T[:tokens].to(source.dtype).contiguous()
    made = route(logits_TE.float().contiguous(), source.contiguous(), problem, settings(), id_T=ids)
    return made.weights, made.experts


def activated(x: Tensor, limit: float) -> Tensor:
    """Return SwiGLU of gate and up, as our quantiser makes it in front of its codes."""
    from degarble.kernels.primitives.quantise_problem import QuantiseProblem  # noqa: PLC0415  the DSL
    from degarble.kernels.quantise.simt_quantise_nvfp4 import quantise_nvfp4  # noqa: PLC0415

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    columns = rows.shape[1] // 2
    problem = QuantiseProblem(
        rows.shape[0], columns, "linear", "swiglu", keeps_values=True, limit=limit
    )
    unused = torch.ones(1, dtype=torch.float32, device=rows.device)
    made = quantise_nvfp4(rows, unused, problem, settings()).values
    assert made is not None, "values were asked for"
    return made.view(*x.shape[:-1], columns)
