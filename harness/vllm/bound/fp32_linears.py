"""Linears of vLLM with float32 results, by our kernel: the router's gate and scoring projections.

Covered are the gate of experts, and what a layer projects along with its queries: the scores of its
compressors and the weights of its indexer. vLLM picks the kernel by the rows of a batch, so
batching changes bits; ours sums in one order. Gates of another class stay vLLM's, which is logged.
Shape letters: M rows, N columns, K inner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.vllm.bound.linears import by_bf16, settings
from degarble.harness.vllm.bound.upstream import GateLinear

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.vllm.bound.start import Start


class DegarbleGate(GateLinear):
    """The gate of a layer's experts; made by vLLM, adopted by `adopt_gate`."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Multiply by our kernel."""
        return widely(x, self.weight.data), None


def adopt_gate(gate: Any, module: str, start: Start) -> None:
    """Make a gate ours, where its class is the one on record."""
    stored = str(gate.weight.dtype).removeprefix("torch.").replace("bfloat16", "BF16")
    if type(gate) is not GateLinear:
        start.other_class(module, "gate", gate)
    elif start.kernel(module, "gate", stored):
        gate.__class__ = DegarbleGate


def projected(attention: Any, hidden: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return what vLLM names kv_score, indexer_kv_score and indexer_weights, in its order."""
    x_MK, compressor, indexer = hidden.contiguous(), attention.compressor, attention.indexer
    own = None if compressor is None else widely(x_MK, compressor.fused_wkv_wgate.weight.data)
    if indexer is None:
        return own, None, None
    scores = widely(x_MK, indexer.compressor.fused_wkv_wgate.weight.data)
    return own, scores, by_bf16(x_MK, indexer.weights_proj.weight.data)


def widely(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the product of BF16 rows and a BF16 weight in float32."""
    from degarble.kernels.gemm.grouped_problem import GroupedProblem  # noqa: PLC0415  the DSL
    from degarble.kernels.gemm.sm90_gemm_grouped import gemm_grouped  # noqa: PLC0415

    (rows, inner), outputs = x_MK.shape, weight_NK.shape[0]
    problem = GroupedProblem(rows, 1, outputs, inner, out="fp32")
    return gemm_grouped(x_MK.contiguous(), weight_NK, problem, settings())
