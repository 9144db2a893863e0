"""Faults of block, tensor and input scales."""
