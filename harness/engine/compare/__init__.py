"""Compare two tensors in one pass."""
