"""Quantising kernels."""
