"""Faults of attention and of its rotation."""
