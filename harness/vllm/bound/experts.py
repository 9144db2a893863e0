"""vLLM's fused-MoE method over our grouped NVFP4 kernels: W4A4 with the scales of each expert.

Parameters have the names and shapes that vLLM's loader writes to. After loading, block scales are
reordered to 128x4 and one input scale an expert is kept. vLLM's router chooses; its choices and
weights are used as they are, and the sum is returned.

vLLM merges the input scales of all experts of a layer for its own fast kernels. Here each expert
keeps its own: the larger one of w1 and w3, as the fused product has one input.
Shape letters: T tokens, K chosen, D hidden, F width, E experts held here, G of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm.bound.linears import (
    BLOCK,
    UNSET,
    in_128x4,
    require_numbers,
    settings,
)
from degarble.harness.vllm.bound.upstream import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    ModelWeightParameter,
    PerTensorScaleParameter,
    set_weight_attrs,
)

if TYPE_CHECKING:
    from torch import Tensor

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
                f"routing weights of {self.prefix}", "on the input", "behind w2, as V4 has it",
                "Give the experts to vLLM: parts.experts = vllm.",
            )  # fmt: skip
        return by_moe(layer, x, topk_ids, topk_weights)


def by_moe(layer: Any, x_TD: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Return what our kernels sum, rounded once to BF16."""
    from degarble.kernels.moe.problem import MoeProblem  # noqa: PLC0415  needs the DSL
    from degarble.kernels.moe.sm90_moe_nvfp4 import (  # noqa: PLC0415
        ExpertWeights,
        MoeWeights,
        Routing,
        moe_nvfp4,
    )

    experts, rows, _ = layer.w13_weight.shape
    width, (tokens, hidden) = rows // GATE_AND_UP, x_TD.shape
    problem = MoeProblem(
        tokens=tokens, hidden=hidden, width=width, experts=experts, chosen=topk_ids.shape[1],
        routed=layer.global_num_experts, limit=layer.swiglu_limit,
    )  # fmt: skip
    w13, w2 = (
        ExpertWeights(codes, *(getattr(layer, f"{name}_{part}").data for part in _SCALES))
        for name, codes in (
            ("w13", layer.w13_weight.data.view(experts, GATE_AND_UP, width, hidden // 2)),
            ("w2", layer.w2_weight.data),
        )
    )
    local = layer.expert_map
    routing = Routing(
        topk_ids.to(torch.int32).contiguous(),
        topk_weights.float().contiguous(),
        None if local is None else local.to(torch.int32),
    )
    made = moe_nvfp4(x_TD.contiguous(), routing, MoeWeights(w13, w2), problem, settings())
    return made.to(x_TD.dtype)


_SCALES = ("weight_scale", "weight_scale_2", "input_scale")


def _replace(layer: Any, name: str, value: Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(value.contiguous(), requires_grad=False))
