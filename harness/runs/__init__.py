"""Checkpoint, reference, engine and report put together: what the commands call."""
