"""Audit a checkpoint: structure, numbers, comparison with a reference, loading."""
