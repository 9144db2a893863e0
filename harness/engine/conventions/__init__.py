"""Conventions in which correct implementations differ: the table, and learning them from a run."""
