"""Faults of layout: order of bytes, words and fused operands."""
