"""Captures on disk: written, read and checked."""
