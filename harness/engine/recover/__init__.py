"""Recover what a component really computed with, where no known fault explains its outputs."""
