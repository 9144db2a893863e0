"""Conversions between checkpoints: each streams from a view and can prove its output."""
