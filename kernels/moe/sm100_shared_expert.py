"""Shared expert on Blackwell (sm_100a), NVFP4 or FP8: gate and up, clamped SwiGLU, down.

Composes kernels and has none of its own. NVFP4 (`KERNEL`): every token visits one expert, by the
grouped products of sm100_moe_nvfp4 with SwiGLU and requantisation in the epilogue. `FP8` (128 x 128
blocks of weights, 1 x 128 of activations): gate and up are one product of sm100_gemm_fp8_block, and
SwiGLU precedes the second quantisation in simt_quantise_fp8.

Nothing waits on the host; a call allocates its output and intermediates. Compiled but never run.
"""

from __future__ import annotations

from degarble.kernels.gemm.sm100_gemm_fp8_block import KERNEL as PRODUCT
from degarble.kernels.moe.entry import shared_expert, shared_expert_fp8
from degarble.kernels.moe.sm100_moe_nvfp4 import PRODUCTS
from degarble.kernels.runtime.targets import SM100A

KERNEL = shared_expert(PRODUCTS, SM100A)
FP8 = shared_expert_fp8(PRODUCT)
