"""Compiled twins of the number formats, bit for bit as the definitions."""
