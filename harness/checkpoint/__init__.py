"""Checkpoints on disk: read, judged, written and converted at any size; safetensors only."""
