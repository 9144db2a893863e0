"""Sparse attention and the queries of latent attention."""
