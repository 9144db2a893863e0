"""Faults of attention and RoPE."""
