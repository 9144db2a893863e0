"""Faults of element codes: codecs, signs, nibbles, number formats."""
