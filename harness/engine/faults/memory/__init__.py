"""Faults of KV caches and other memory: stale, misread, racing or padded."""
