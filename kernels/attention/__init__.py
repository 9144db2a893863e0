"""Sparse attention kernels and the assembly of latent-attention queries."""
