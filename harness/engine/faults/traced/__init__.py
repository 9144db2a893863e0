"""Faults of components that are known by what they compute, and not by a role."""
