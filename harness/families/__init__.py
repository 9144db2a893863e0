"""The families that degarble knows, one folder each, and the one that transformers traces.

Nothing imports this package: a family is found by its entry point in pyproject.toml.
"""
