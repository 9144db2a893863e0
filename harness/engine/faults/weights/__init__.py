"""Faults of weights and their loading."""
