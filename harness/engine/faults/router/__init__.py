"""Faults of the MoE router."""
