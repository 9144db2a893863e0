"""The small models for training."""
