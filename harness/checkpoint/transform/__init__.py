"""Checkpoint-to-checkpoint transforms: convert formats and layouts, quantise, prove the output."""
