"""Faults of caches and other memory."""
