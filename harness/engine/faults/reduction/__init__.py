"""Faults of sums, activations and output precision."""
