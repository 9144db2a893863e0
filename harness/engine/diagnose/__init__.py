"""Name the cause of a difference by reproducing it."""
