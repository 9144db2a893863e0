"""Measure one weight in one pass, and infer its layout from the statistics."""
