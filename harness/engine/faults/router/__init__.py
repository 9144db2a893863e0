"""Faults of the router."""
