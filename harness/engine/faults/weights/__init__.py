"""Faults of weights and weight loading."""
