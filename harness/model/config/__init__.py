"""Configs of models: records, their checks, and config.json in every known spelling."""
