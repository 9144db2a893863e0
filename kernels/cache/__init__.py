"""Paged caches: reading, writing, pooling, slots."""
