"""Import path of each kernel module by its name.

The names are stored in captures, reports and nightly series, so they stay when a module moves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.kernels.runtime.kernel import Kernel

_ROOMS = {
    "attention": (
        "simt_attention_merge",
        "simt_latent_query",
        "sm100_attention_kernel",
        "sm100_sparse_attention",
        "sm90_attention_kernel",
        "sm90_attention_turns",
        "sm90_latent_heads",
        "sm90_sparse_attention",
    ),
    "cache": (
        "simt_compressor",
        "simt_kv_read",
        "simt_kv_write",
        "simt_paged_pool",
        "simt_slots",
    ),
    "gemm": (
        "simt_gemv_bf16",
        "sm100_gemm_bf16",
        "sm100_gemm_fp8_block",
        "sm100_gemm_grouped",
        "sm100_gemm_nvfp4",
        "sm90_gemm_bf16",
        "sm90_gemm_fp8_block",
        "sm90_gemm_grouped",
        "sm90_gemm_grouped_fp8",
        "sm90_gemm_nvfp4",
        "sm90_gemm_w4a16",
        "sm90_gemm_w4a16_wgmma",
    ),
    "indexer": (
        "simt_indexer_operand",
        "simt_indexer_topk",
        "sm100_indexer_scores",
        "sm90_indexer_scores",
    ),
    "moe": (
        "simt_moe_rows",
        "sm100_moe_nvfp4",
        "sm100_shared_expert",
        "sm90_moe_by_row",
        "sm90_moe_decoded",
        "sm90_moe_nvfp4",
        "sm90_shared_expert",
    ),
    "quantise": (
        "simt_quantise_fp8",
        "simt_quantise_nvfp4",
    ),
    "rows": (
        "simt_embed",
        "simt_inverse_rope",
        "simt_mhc",
        "simt_mhc_norm",
        "simt_mhc_onward",
        "simt_mhc_project",
        "simt_qnorm_rope",
        "simt_residual_norm",
        "simt_rmsnorm",
        "simt_router",
        "simt_scale",
    ),
}
MODULES: Mapping[str, str] = {
    name: f"degarble.kernels.{room}.{name}" for room, names in _ROOMS.items() for name in names
}


def module_of(kernel: str) -> str:
    """Return the import path of a kernel's module."""
    name, *_ = kernel.partition(".")
    if name not in MODULES:
        raise UnknownName.among("kernel", name, MODULES)
    return MODULES[name]


def kernel_named(name: str) -> Kernel[Any, Any]:
    """Return a module's descriptor, or "module.NAME" of several; the module needs the DSL."""
    *_, record = name.partition(".")
    kernel: Kernel[Any, Any] = getattr(import_module(module_of(name)), record or "KERNEL")
    return kernel
