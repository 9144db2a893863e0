"""Kernels over rows: norms, rotations, mHC, router, embedding."""
