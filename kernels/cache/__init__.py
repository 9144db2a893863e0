"""Paged cache kernels: write, read, pool into compressed entries, list slots."""
