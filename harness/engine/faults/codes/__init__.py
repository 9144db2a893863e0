"""Faults of codes."""
