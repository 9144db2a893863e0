"""vLLM's linear methods over our GEMMs: BF16, FP8 in blocks, NVFP4, float32 results."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, PartnersMismatch
from degarble.harness.vllm.bound.upstream import (
    BlockQuantScaleParameter,
    GateLinear,
    LinearMethodBase,
    ModelWeightParameter,
    PerTensorScaleParameter,
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    per_token_group_quant_fp8,
    register_weight_loader_v2_supported_method,
    set_weight_attrs,
    validate_fp8_block_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.vllm.bound.start import Start


# --------------------------------------------------------------------------------------------------
# vLLM's linear methods over our GEMMs: BF16, FP8 in blocks, NVFP4 with NVFP4 or BF16 activations.
#
# Parameters have the names that vLLM's loader writes to. After loading, scales are put into the
# order that a kernel reads, and fused partners are checked: their tensor scales must be equal,
# because one product has one. Kernel modules are imported when weights are ready: they need the
# CuTe DSL. Trap: vLLM's newer loader is for classes on its list; the older one has no place for
# tensor scales.
#
# There is no fallback: if a kernel raises, its error is the result. Shape letters: M rows, N
# outputs, K inner.

BLOCK, FP8_BLOCK = 16, 128
MOST_ROWS_A16 = 64  # of kernels/gemm/sm90_gemm_w4a16.py; more rows go in pieces, with equal bits
STEMS = {"sm_90a": "sm90", "sm_100a": "sm100"}
UNSET = float("nan")  # a scale until it is loaded; NaN cannot go unnoticed


@cache
def settings() -> Any:
    """Return how kernels are compiled and kept, read once from the environment."""
    from degarble.kernels.runtime.compiling import read_settings  # noqa: PLC0415  with the kernels

    return read_settings(os.environ)


def launched(kernel: str, problem: Any, **operands: Any) -> dict[str, Any]:
    """Launch a kernel by its name and those of its operands; return its outputs by name."""
    from degarble.kernels.runtime.modules import kernel_named  # noqa: PLC0415  with the kernels

    return kernel_named(kernel).run(problem, settings(), **operands)


def for_gpu(stem: str, tensor: Tensor) -> Any:
    """Return the module of a kernel for the GPU that holds a tensor."""
    from degarble.kernels.runtime.modules import module_of  # noqa: PLC0415  with the kernels
    from degarble.kernels.runtime.targets import target_of_device  # noqa: PLC0415  with the kernels

    name = target_of_device(tensor.device.index or 0).name
    return import_module(module_of(f"{STEMS[name]}_{stem}"))


class DegarbleLinear(LinearMethodBase):
    """Base of our linear methods: the checks of a call, and activations as a matrix of rows."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make parameters for vLLM's loader; each starts as NaN or as nothing that decodes."""
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        loader = extra_weight_attrs.pop("weight_loader")
        self.make_parameters(layer, sizes, params_dtype, loader)
        for parameter in layer.parameters(recurse=False):
            set_weight_attrs(parameter, dict(extra_weight_attrs))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply rows of any leading shape."""
        if bias is not None:
            raise InvalidArgument(
                f"bias of {self.prefix}", tuple(bias.shape), "none: V4 has no biases",
                "Give this module to vLLM: parts.linear = vllm.",
            )  # fmt: skip
        if x.dtype is not torch.bfloat16:
            raise DtypeMismatch(
                f"activations of {self.prefix}", x.dtype, "torch.bfloat16", "Start with bfloat16."
            )
        x_MK = x.reshape(-1, x.shape[-1]).contiguous()
        y_MN = self.product(layer, x_MK)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    @abstractmethod
    def make_parameters(
        self, layer: Any, sizes: tuple[Any, ...], dtype: torch.dtype, loader: Any
    ) -> None:
        """Register the parameters of the format."""

    @abstractmethod
    def product(self, layer: Any, x_MK: Tensor) -> Tensor:
        """Multiply BF16 rows by the loaded weight."""


@register_weight_loader_v2_supported_method
class Bf16Linear(DegarbleLinear):
    """BF16 by BF16."""

    kernel: ClassVar[str] = "sm90_gemm_bf16"

    def make_parameters(
        self, layer: Any, sizes: tuple[Any, ...], dtype: torch.dtype, loader: Any
    ) -> None:
        """Register `weight`."""
        inner, outputs, *_ = sizes
        weight = torch.empty(sum(outputs), inner, dtype=dtype)
        made = ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", made)

    def product(self, layer: Any, x_MK: Tensor) -> Tensor:
        """Multiply by the weight as it is."""
        return by_bf16(x_MK, layer.weight.data)


def by_bf16(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the product of our BF16 kernel."""
    from degarble.kernels.gemm.problem import GemmProblem  # noqa: PLC0415  needs the DSL

    outputs, inner = weight_NK.shape
    problem = GemmProblem(x_MK.shape[0], outputs, inner)
    kernel = for_gpu("gemm_bf16", x_MK).KERNEL
    made: Tensor = kernel.run_one(problem, settings(), a=x_MK, b=weight_NK)
    return made


@register_weight_loader_v2_supported_method
class Fp8Linear(DegarbleLinear):
    """E4M3 with float32 or UE8M0 scales of 128 x 128; activations 1 x 128 by vLLM's quantiser."""

    kernel: ClassVar[str] = "sm90_gemm_fp8_block"

    def __init__(self, prefix: str, *, powers_of_two: bool) -> None:
        super().__init__(prefix)
        self.powers_of_two = powers_of_two

    def make_parameters(
        self, layer: Any, sizes: tuple[Any, ...], dtype: torch.dtype, loader: Any
    ) -> None:
        """Register `weight` and `weight_scale_inv`."""
        inner, outputs, input_size, output_size = sizes
        block = [FP8_BLOCK, FP8_BLOCK]
        layer.orig_dtype, layer.weight_block_size = dtype, block
        validate_fp8_block_shape(layer, input_size, output_size, inner, outputs, block)
        weight = create_fp8_weight_parameter(sum(outputs), inner, loader)
        layer.register_parameter("weight", weight)
        kind = torch.float8_e8m0fnu if self.powers_of_two else None
        scale = create_fp8_scale_parameter(
            BlockQuantScaleParameter, outputs, inner, block, loader, scale_dtype=kind
        )
        layer.register_parameter("weight_scale_inv", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Widen UE8M0 to float32, which is exact, and refuse scales that are no number."""
        scale = layer.weight_scale_inv.data.float().contiguous()
        require_numbers(f"{self.prefix}.weight_scale_inv", scale)
        layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)

    def product(self, layer: Any, x_MK: Tensor) -> Tensor:
        """Quantise the rows, then multiply."""
        codes, scales = per_token_group_quant_fp8(
            x_MK, FP8_BLOCK, use_ue8m0=self.powers_of_two, column_major_scales=False
        )
        return by_fp8(codes, scales, layer.weight.data, layer.weight_scale_inv.data)


def by_fp8(codes_MK: Tensor, scales_MG: Tensor, weight_NK: Tensor, scales_HG: Tensor) -> Tensor:
    """Return the product of our FP8 kernel, with float32 scales on both sides."""
    from degarble.kernels.gemm.problem import FP8_BLOCK as NAME  # noqa: PLC0415
    from degarble.kernels.gemm.problem import GemmProblem  # noqa: PLC0415

    outputs, inner = weight_NK.shape
    problem = GemmProblem(codes_MK.shape[0], outputs, inner, NAME.name, "float32")
    made: Tensor = for_gpu("gemm_fp8_block", codes_MK).KERNEL.run_one(
        problem, settings(), a=codes_MK, a_scales=scales_MG.contiguous(), b=weight_NK,
        b_scales=scales_HG,
    )  # fmt: skip
    return made


@register_weight_loader_v2_supported_method
class Nvfp4Linear(DegarbleLinear):
    """E2M1 with E4M3 scales of 16 and one float32 a tensor: W4A4, or W4A16 by option."""

    kernel: ClassVar[str] = "sm90_gemm_nvfp4"

    def __init__(self, prefix: str, *, quantises: bool) -> None:
        super().__init__(prefix)
        self.quantises = quantises

    def make_parameters(
        self, layer: Any, sizes: tuple[Any, ...], dtype: torch.dtype, loader: Any
    ) -> None:
        """Register `weight`, `weight_scale`, `weight_scale_2`, `input_scale`."""
        del dtype  # NVFP4 says its own
        inner, outputs, *_ = sizes
        if inner % (2 * BLOCK):
            raise InvalidArgument(
                f"inner extent of {self.prefix}", inner, f"a multiple of {2 * BLOCK}",
                "Split it over fewer ranks.",
            )  # fmt: skip
        rows, along = sum(outputs), {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        codes = torch.zeros(rows, inner // 2, dtype=torch.uint8)
        layer.register_parameter("weight", ModelWeightParameter(data=codes, **along))
        scales = torch.full((rows, inner // BLOCK), UNSET).to(torch.float8_e4m3fn)
        layer.register_parameter("weight_scale", ModelWeightParameter(data=scales, **along))
        for name in ("weight_scale_2", "input_scale")[: 2 if self.quantises else 1]:
            scale = torch.full((len(outputs),), UNSET, dtype=torch.float32)
            layer.register_parameter(
                name, PerTensorScaleParameter(data=scale, weight_loader=loader)
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep one scale of each kind, and block scales in the order that the kernel reads."""
        scale = one_scale(f"{self.prefix}.weight_scale_2", layer.weight_scale_2.data)
        layer.weight_scale_2 = torch.nn.Parameter(scale, requires_grad=False)
        require_numbers(f"{self.prefix}.weight_scale", layer.weight_scale.data.float())
        if not self.quantises:
            return
        # Partners read one input: the larger scale clips nothing, as vLLM and ModelOpt have it.
        inputs = layer.input_scale.data.float()
        require_numbers(f"{self.prefix}.input_scale", inputs)
        layer.input_scale = torch.nn.Parameter(inputs.max().reshape(1), requires_grad=False)
        scales = in_128x4(layer.weight_scale.data.view(torch.uint8))
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)

    def product(self, layer: Any, x_MK: Tensor) -> Tensor:
        """Multiply; as W4A16 in pieces of rows, each row with the same bits in any company."""
        weight = (layer.weight.data, layer.weight_scale.data, layer.weight_scale_2.data)
        if self.quantises:
            return by_nvfp4(x_MK, layer.input_scale.data, weight)
        pieces = [by_w4a16(each, weight) for each in x_MK.split(MOST_ROWS_A16)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def by_nvfp4(x_MK: Tensor, input_scale: Tensor, weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Quantise the rows by our kernel and return the product of our NVFP4 kernel."""
    from degarble.kernels.gemm.problem import NVFP4, GemmProblem  # noqa: PLC0415
    from degarble.kernels.primitives.quantise_problem import QuantiseProblem  # noqa: PLC0415

    rows, inner = x_MK.shape
    quantised = QuantiseProblem(rows, inner)
    made = launched("simt_quantise_nvfp4", quantised, values=x_MK, decode_scale=input_scale)
    problem = GemmProblem(rows, weight[0].shape[0], inner, NVFP4.name, "e4m3")
    codes, scales, decode_scale = weight
    product: Tensor = for_gpu("gemm_nvfp4", x_MK).KERNEL.run_one(
        problem, settings(), a=made["codes"], a_scales=made["scales"], a_decode_scale=input_scale,
        b=codes, b_scales=scales, b_decode_scale=decode_scale,
    )  # fmt: skip
    return product


def by_w4a16(x_MK: Tensor, weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the product of our kernel for BF16 rows and NVFP4 weights as stored."""
    from degarble.harness.formats.layouts import LINEAR  # noqa: PLC0415
    from degarble.kernels.gemm.w4a16_problem import W4A16Problem  # noqa: PLC0415  needs the DSL

    codes, scales, tensor_scale = weight
    (rows, inner), outputs = x_MK.shape, codes.shape[0]
    problem = W4A16Problem(rows, outputs, inner, LINEAR.name)
    given = {"x": x_MK, "codes": codes, "scales": scales.view(torch.uint8)}
    made = launched("sm90_gemm_w4a16", problem, **given, decode_scale=tensor_scale)
    out: Tensor = made["out"]
    return out


def in_128x4(scales_NB: Tensor) -> Tensor:
    """Bring linear scale bytes into the order of the hardware, padded with zeros."""
    from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout  # noqa: PLC0415

    return to_layout(scales_NB, SWIZZLE_128X4)


def one_scale(name: str, scales: Tensor) -> Tensor:
    """Return the one tensor scale of fused partners; refuse partners that differ."""
    require_numbers(name, scales)
    if bool((scales != scales[0]).any()):
        raise PartnersMismatch(
            name, scales.tolist(), "equal tensor scales: one product has one",
            "degarble convert --to vllm brings partners to one scale.",
        )  # fmt: skip
    return scales[:1].float().contiguous()


def require_numbers(name: str, scales: Tensor) -> None:
    """Refuse scales that nothing was loaded into, or that are no number."""
    bad = ~torch.isfinite(scales) | (scales == torch.finfo(torch.float32).min)
    if bool(bad.any()):
        raise InvalidArgument(
            name, f"{int(bad.sum())} of {scales.numel()} not finite", "scales that were loaded",
            "degarble audit CKPT --loader vllm says what should have come.",
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Linears of vLLM with float32 results, by our kernel: the router's gate and scoring projections.
#
# Covered are the gate of experts, and what a layer projects along with its queries: the scores of
# its compressors and the weights of its indexer. vLLM picks the kernel by the rows of a batch, so
# batching changes bits; ours sums in one order. Gates of another class stay vLLM's, which is
# logged. Shape letters: M rows, N columns, K inner.


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

    (rows, inner), outputs = x_MK.shape, weight_NK.shape[0]
    problem = GroupedProblem(rows, 1, outputs, inner, out="fp32")
    made = launched("sm90_gemm_grouped", problem, a=x_MK.contiguous(), b=weight_NK)
    out: Tensor = made["out"]
    return out
