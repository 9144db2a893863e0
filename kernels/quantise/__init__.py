"""Quantising kernels: BF16 to NVFP4 or to FP8 with block scales."""
