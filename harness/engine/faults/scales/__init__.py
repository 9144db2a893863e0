"""Faults of scales."""
