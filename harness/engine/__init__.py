"""Judging: compares, localises, names causes. Receives reference and candidate as values."""
