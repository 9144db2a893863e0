"""Nightly runs over one checkpoint, and the bisection for the commit that broke it."""
