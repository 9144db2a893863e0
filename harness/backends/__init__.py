"""Backends: the registry, and whose callable computes which component."""
