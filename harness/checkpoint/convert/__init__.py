"""Conversions between checkpoints: each streams from a view, and each can prove its output."""
