"""Logical views of stored tensors: modules, weights, statements of the configs."""
