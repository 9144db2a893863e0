"""Kernels of others by their own entries: what they are called with, and how operands are packed.

`make peers-pack` fetches the wheels. vLLM 0.26's libraries are loaded without its package, whose
import takes long and starts nothing that is needed: schemas of their operations are those of
suites/bench/kernel_peers/test_kernel_peers.py. Packing for Marlin follows
vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.suites.bench.kernel_peers.contest import Unavailable

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = "make peers-pack fetches it"
MARLIN_TILE = 64
# Columns of a tile of scales in the order of Marlin's fragments (marlin_utils.get_scale_perms).
MARLIN_SCALES = [row + 8 * column for row in range(8) for column in range(8)]
TOPK_WORKSPACE = 1 << 20  # bytes; vllm/model_executor/layers/sparse_attn_indexer.py
MOE_BLOCKS = (8, 16, 32, 48, 64)  # rows of a block; fused_moe/experts/marlin_moe.py
MOE_FILLED = 0.9


def module(name: str) -> Any:
    """Return a package of others; an absent one is a reason."""
    try:
        return import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported: {error}; {REMEDY}") from error


def folder_of(package: str) -> Path:
    """Return where a package lies, without importing it."""
    found = util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Unavailable(f"{package} is not installed; {REMEDY}")
    return Path(found.submodule_search_locations[0])


@cache
def vllm(library: str, namespace: str) -> Any:
    """Load a library of vLLM's wheel; return its operations."""
    path = folder_of("vllm") / library
    if not path.exists():
        raise Unavailable(f"vllm has no {library}; {REMEDY}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise Unavailable(f"{library} does not load: {error}") from error
    return getattr(torch.ops, namespace)


def common() -> Any:
    return vllm("_C_stable_libtorch.abi3.so", "_C")


def of_experts() -> Any:
    return vllm("_moe_C_stable_libtorch.abi3.so", "_moe_C")


def flash_mla() -> Any:
    return vllm("_flashmla_C.abi3.so", "_flashmla_C")


@cache
def deep_gemm() -> Any:
    """Return the DeepGEMM inside of vLLM's wheel; it compiles by nvcc at the first call."""
    home = str(folder_of("vllm") / "third_party")
    sys.path.append(home)
    try:
        return module("deep_gemm")
    finally:
        sys.path.remove(home)


# ---- Marlin --------------------------------------------------------------------------------------


class MarlinWeight(NamedTuple):
    """A matrix, or those of all experts, as Marlin reads them."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor


@cache
def float4() -> int:
    """Return the id of E2M1 among vLLM's scalar types."""
    found = util.spec_from_file_location("_scalar_type", folder_of("vllm") / "scalar_type.py")
    assert found is not None
    assert found.loader is not None
    made = util.module_from_spec(found)
    sys.modules[found.name] = made  # its dataclasses look their module up
    found.loader.exec_module(made)
    number: int = made.scalar_types.float4_e2m1f.id
    return number


def marlin_factor(scales: Tensor) -> float:
    """Return the power of two by which scales may grow, so that few of them become zero."""
    most = float(scales.float().max()) * 2**7
    if not 0 < most < 448 * 2**7:
        return 1.0
    return float(torch.tensor(448 * 2**7 / most).log2().floor().exp2())


def marlin_scales(scales: Tensor, factor: float) -> Tensor:
    """Return E4M3 scales [N, K / 16] as Marlin's bytes without a sign [K / 16, N]."""
    outputs = scales.shape[0]
    made = scales.view(torch.float8_e4m3fn).T.contiguous().bfloat16()
    made = made.reshape(-1, MARLIN_TILE)[:, MARLIN_SCALES].reshape(-1, outputs).half()
    made = made.view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, outputs)
    made = (made.float() * factor).half() * 2**7
    made = torch.where(made < 2, 0, made)
    bits = (made.view(torch.int16) << 1).view(torch.float8_e4m3fn)
    return bits[:, 1::2].contiguous()


def marlin_codes(codes: Tensor) -> Tensor:
    outputs, columns = codes.shape[0], 2 * codes.shape[1]
    words = codes.view(torch.int32).T.contiguous()
    none = torch.empty(0, dtype=torch.int32, device=codes.device)
    packed: Tensor = common().gptq_marlin_repack(words, none, columns, outputs, 4, False)
    return packed


def marlin_global(decode_scale: Tensor, factor: float) -> Tensor:
    """Return tensor scales with the exponents that decoding to BF16 leaves out."""
    return decode_scale.float() * (2.0 ** (126 - 7)) / factor


def marlin_weight(codes: Tensor, scales: Tensor, decode_scale: Tensor) -> MarlinWeight:
    """Pack a matrix: codes [N, K / 2], scales [N, K / 16], one tensor scale."""
    factor = marlin_factor(scales.view(torch.float8_e4m3fn))
    return MarlinWeight(
        marlin_codes(codes), marlin_scales(scales, factor), marlin_global(decode_scale, factor)
    )


def marlin_experts(codes: Tensor, scales: Tensor, decode_scales: Tensor) -> MarlinWeight:
    """Pack matrices [E, N, K / 2], an expert at a time; all share a factor."""
    factor = min(marlin_factor(each.view(torch.float8_e4m3fn)) for each in scales)
    return MarlinWeight(
        torch.stack([marlin_codes(each) for each in codes]),
        torch.stack([marlin_scales(each, factor) for each in scales]),
        marlin_global(decode_scales, factor),
    )


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def locks(device: torch.device, blocks: int = 1) -> Tensor:
    return torch.zeros(processors(device) * blocks, dtype=torch.int32, device=device)


def marlin(x: Tensor, weight: MarlinWeight, work: Tensor, out: Tensor) -> Any:
    """Multiply by Marlin, reduced in float32 as vLLM asks for it."""
    (rows, columns), outputs = x.shape, out.shape[1]
    return common().marlin_gemm(
        x, out, weight.codes, None, weight.scales, None, weight.global_scale, None, None, None,
        work, float4(), rows, outputs, columns, True, False, True, False,
    )  # fmt: skip


def moe_rows(slots: int, experts: int) -> int:
    """Return the rows of a block of Marlin's experts."""
    fit = (rows for rows in MOE_BLOCKS if slots / experts / rows < MOE_FILLED)
    return next(fit, MOE_BLOCKS[-1])


class MarlinMoe:
    """Routed experts by Marlin, step by step as vLLM's fused_marlin_moe takes them."""

    def __init__(self, w13: MarlinWeight, w2: MarlinWeight, extents: tuple[int, int, int]) -> None:
        self.w13, self.w2 = w13, w2
        self.hidden, self.width, self.chosen = extents
        self.experts = len(w13.codes)
        self.locks = locks(w13.codes.device, 4)

    def sorted_slots(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort slots by expert, each expert filled up to whole blocks."""
        slots = ids.numel()
        most = slots + self.experts * (rows - 1)
        if slots < self.experts:
            most = min(slots * rows, most)
        made = (
            torch.empty(count, dtype=torch.int32, device=ids.device)
            for count in (most, -(-most // rows), 1)
        )
        order, experts, count = made
        of_experts().moe_align_block_size(ids, self.experts, rows, order, experts, count, None)
        return order, experts, count

    def product(
        self, x: Tensor, weight: MarlinWeight, plan: tuple[Any, ...], top: int, out: Tensor
    ) -> None:
        """Multiply the rows of every slot; the second product weights them."""
        order, weights, rows = plan
        of_experts().moe_wna16_marlin_gemm(
            x, out, weight.codes, None, weight.scales, None, weight.global_scale, None, None, None,
            self.locks, *order, weights, rows, top, top == 1, float4(), x.shape[0], out.shape[1],
            x.shape[1], True, False, True, False, -1, -1, -1,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, limit: float | None, out: Tensor
    ) -> None:
        slots = ids.numel()
        rows = moe_rows(slots, self.experts)
        plan = self.sorted_slots(ids, rows), weights, rows
        first, middle, last = (
            torch.empty(slots, columns, dtype=x.dtype, device=x.device)
            for columns in (2 * self.width, self.width, self.hidden)
        )
        self.product(x, self.w13, plan, self.chosen, first)
        if limit is None:
            common().silu_and_mul(middle, first)
        else:
            common().silu_and_mul_with_clamp(middle, first, limit)
        self.product(middle, self.w2, plan, 1, last)
        torch.sum(last.view(len(x), self.chosen, self.hidden), dim=1, out=out)


# ---- quack, humming ------------------------------------------------------------------------------


def quack_product(codes: Tensor, scales: Tensor, decode_scale: float) -> Any:
    """Return quack's W4A16 product of x into out."""
    home = module("quack.gemm_w4")
    blob, strip = home.prepare_w4_weight(codes, scales.view(torch.float8_e4m3fn), "nvfp4")

    def call(x: Tensor, out: Tensor) -> Any:
        return home.gemm_w4a16(x, blob, strip, tensor_scale=decode_scale, out=out, wformat="nvfp4")

    return call


def humming_product(codes: Tensor, scales: Tensor, decode_scale: Tensor) -> Any:
    """Return humming's product of x into out, of a layer as modelopt stores it."""
    home = module("humming.layer")
    outputs, columns = codes.shape[0], 2 * codes.shape[1]
    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = home.HummingLayer(
        shape_n=outputs, shape_k=columns, weight_config=config, torch_dtype=torch.bfloat16
    ).to(codes.device)
    stored = scales.view(torch.float8_e4m3fn)
    layer.load_from_tensors(
        {"weight": codes, "weight_scale": stored, "weight_scale_2": decode_scale.reshape(1)}
    )
    layer.transform()

    def call(x: Tensor, out: Tensor) -> Any:
        return layer(x, outputs=out)

    return call
