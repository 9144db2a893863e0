"""Logical views of stored tensors: modules, weights, and the claims of quantisation configs."""
