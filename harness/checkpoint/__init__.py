"""Checkpoints on disk: read, viewed, audited, written and transformed at any size."""
