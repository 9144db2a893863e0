"""Quantise a checkpoint to NVFP4."""
