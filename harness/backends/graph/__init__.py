"""Whole decoder layers of our kernels in CUDA graphs."""
