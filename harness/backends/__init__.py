"""Backends: kernels that compute a model's components, and their registry."""
