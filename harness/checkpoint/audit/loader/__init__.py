"""Prove which bytes of a checkpoint reach which parameter of an engine."""
