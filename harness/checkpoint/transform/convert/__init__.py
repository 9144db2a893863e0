"""Conversions between checkpoint formats, streamed from a view and provable afterwards."""
