"""Router, routed experts and the shared expert's activation of vLLM with our kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm.bound.linears import (
    BLOCK,
    UNSET,
    adopt_gate,
    in_128x4,
    launched,
    require_numbers,
)
from degarble.harness.vllm.bound.upstream import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    FusedTopKBiasRouter,
    ModelWeightParameter,
    PerTensorScaleParameter,
    SiluAndMulWithClamp,
    set_weight_attrs,
)
from degarble.harness.vllm.parts import BF16

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.vllm.bound.start import Start


# --------------------------------------------------------------------------------------------------
# vLLM's fused-MoE method over our grouped NVFP4 kernels: W4A4 with the scales of each expert.
#
# Parameters have the names and shapes that vLLM's loader writes to. After loading, block scales are
# reordered to 128x4 and one input scale an expert is kept. vLLM's router chooses; its choices and
# weights are used as they are, and the sum is returned.
#
# vLLM merges the input scales of all experts of a layer for its own fast kernels. Here each expert
# keeps its own: the larger one of w1 and w3, as the fused product has one input. Shape letters: T
# tokens, K chosen, D hidden, F width, E experts held here, G of the model.

GATE_AND_UP = 2


class ModelOptOfDegarble(FusedMoEMethodBase):
    """NVFP4 experts as ModelOpt stores them.

    Trap: vLLM's loader asks whether the class's name holds "ModelOpt"; otherwise the input scales
    of w1 and w3 would overwrite each other.
    """

    kernel: ClassVar[str] = "sm90_moe_nvfp4"

    def __init__(self, prefix: str, moe: Any) -> None:
        super().__init__(moe)
        self.prefix = prefix

    def uses_weight_scale_2_pattern(self) -> bool:
        """Block scales are `weight_scale`, tensor scales `weight_scale_2`."""
        return True

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """Dtype of expert indices that the kernels read."""
        return torch.int32

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: no kernel of vLLM's is configured."""
        del layer

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make parameters for vLLM's loader; scales start as NaN."""
        layer.num_experts, layer.params_dtype = num_experts, params_dtype
        loader = extra_weight_attrs["weight_loader"]
        width, hidden = intermediate_size_per_partition, hidden_size
        for name, rows, inner, matrices in (
            ("w13", GATE_AND_UP * width, hidden, (num_experts, GATE_AND_UP)),
            ("w2", hidden, width, (num_experts,)),
        ):
            shape = (num_experts, rows, inner)
            self._matrix(layer, name, shape, loader)
            for part in ("weight_scale_2", "input_scale"):
                # NaN: a scale that the loader never writes is detected after loading.
                scale = torch.full(matrices, UNSET, dtype=torch.float32)
                made = PerTensorScaleParameter(data=scale, weight_loader=loader)
                layer.register_parameter(f"{name}_{part}", made)
                kind = FusedMoeWeightScaleSupported.TENSOR.value
                set_weight_attrs(made, {"quant_method": kind})

    @staticmethod
    def _matrix(layer: Any, name: str, shape: tuple[int, int, int], loader: Any) -> None:
        experts, rows, inner = shape
        along = {"input_dim": 1, "output_dim": 2, "weight_loader": loader}
        # Two E2M1 codes a byte, packed along the inner dimension.
        codes = torch.zeros(experts, rows, inner // 2, dtype=torch.uint8)
        layer.register_parameter(f"{name}_weight", ModelWeightParameter(data=codes, **along))
        scales = torch.full((experts, rows, inner // BLOCK), UNSET).to(torch.float8_e4m3fn)
        made = ModelWeightParameter(data=scales, **along)
        layer.register_parameter(f"{name}_weight_scale", made)
        kind = FusedMoeWeightScaleSupported.BLOCK.value
        set_weight_attrs(made, {"quant_method": kind})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring scales into the order that the kernels read, matrix by matrix."""
        for name, matrices in (("w13", GATE_AND_UP), ("w2", 1)):
            scales = getattr(layer, f"{name}_weight_scale").data
            require_numbers(f"{self.prefix}.{name}_weight_scale", scales.float())
            experts, rows, blocks = scales.shape
            by_matrix = scales.view(torch.uint8).view(experts, matrices, rows // matrices, blocks)
            storage = in_128x4(by_matrix)
            _replace(layer, f"{name}_weight_scale", storage if matrices > 1 else storage[:, 0])
            tensor_scale = getattr(layer, f"{name}_weight_scale_2").data
            require_numbers(f"{self.prefix}.{name}_weight_scale_2", tensor_scale)
            inputs = getattr(layer, f"{name}_input_scale").data
            require_numbers(f"{self.prefix}.{name}_input_scale", inputs)
            _replace(layer, f"{name}_input_scale", inputs.view(experts, matrices).amax(dim=1))

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts that are held here."""
        del shared_experts, shared_experts_input  # vLLM's runner adds them
        if layer.apply_router_weight_on_input:
            raise InvalidArgument(
                f"routing weights of {self.prefix}", "on the input", "after w2, as V4 has it",
                "Give the experts to vLLM: parts.experts = vllm.",
            )  # fmt: skip
        return by_moe(layer, x, topk_ids, topk_weights)


def by_moe(layer: Any, x_TD: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Return what our kernels sum, rounded once to BF16."""
    from degarble.kernels.moe.problem import MoeProblem  # noqa: PLC0415  needs the DSL

    experts, rows, _ = layer.w13_weight.shape
    width, (tokens, hidden) = rows // GATE_AND_UP, x_TD.shape
    problem = MoeProblem(
        tokens=tokens, hidden=hidden, width=width, experts=experts, chosen=topk_ids.shape[1],
        routed=layer.global_num_experts, limit=layer.swiglu_limit,
    )  # fmt: skip
    weights = {
        f"{name}_{ours}": getattr(layer, f"{name}_{theirs}").data
        for name in ("w13", "w2")
        for ours, theirs in _OPERANDS
    }
    shape = (experts, GATE_AND_UP, width, hidden // 2)
    weights["w13_codes"] = weights["w13_codes"].view(shape)
    local = layer.expert_map
    made = launched(
        ModelOptOfDegarble.kernel, problem, x=x_TD.contiguous(),
        experts=topk_ids.to(torch.int32).contiguous(), weights=topk_weights.float().contiguous(),
        local=None if local is None else local.to(torch.int32), **weights,
    )["out"]  # fmt: skip
    out: Tensor = made.to(x_TD.dtype)
    return out


_OPERANDS = (
    ("codes", "weight"), ("scales", "weight_scale"), ("decode_scale", "weight_scale_2"),
    ("input_scale", "input_scale"),
)  # fmt: skip


def _replace(layer: Any, name: str, value: Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(value.contiguous(), requires_grad=False))


# --------------------------------------------------------------------------------------------------
# The router and the shared expert's activation of vLLM with our kernels.
#
# Experts are chosen by score or by the table of token ids, and weighted in float32. SwiGLU has its
# limit and is rounded once to BF16. On an H200 `degarble check` found a difference between vLLM's
# own kernels of both and the definition: docs/vllm.md.
#
# Routers and activations of another class stay vLLM's, which is logged. There is no fallback: if a
# kernel raises, its error is the result. Shape letters: T tokens, E experts, K chosen.


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

    by_table = source.dim() > 1
    kind = str(source.dtype).removeprefix("torch.") if by_table else "int64"
    tokens, experts = logits_TE.shape
    problem = RouterProblem(
        tokens, experts, router.top_k, router.scoring_func, router.routed_scaling_factor,
        normalises=router.renormalize, vocabulary=source.shape[0] if by_table else 0, ids=kind,
    )  # fmt: skip
    logits, given = logits_TE.float().contiguous(), source.contiguous()
    if not by_table:
        made = launched("simt_router", problem, logits=logits, bias=given)
    else:
        assert ids_T is not None, "a table is asked by token ids"
        ids = ids_T[:tokens].to(source.dtype).contiguous()
        made = launched("simt_router", problem, logits=logits, table=given, ids=ids)
    return made["weights"], made["experts"]


def activated(x: Tensor, limit: float) -> Tensor:
    """Return SwiGLU of gate and up, as our quantiser makes it in front of its codes."""
    from degarble.kernels.primitives.quantise_problem import QuantiseProblem  # noqa: PLC0415  the DSL

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    columns = rows.shape[1] // 2
    problem = QuantiseProblem(
        rows.shape[0], columns, "linear", "swiglu", keeps_values=True, limit=limit
    )
    unused = torch.ones(1, dtype=torch.float32, device=rows.device)
    made = launched("simt_quantise_nvfp4", problem, values=rows, decode_scale=unused)
    values: Tensor = made["kept"]
    return values.view(*x.shape[:-1], columns)
