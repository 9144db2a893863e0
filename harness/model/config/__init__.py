"""Model configs: records, their checks, and config.json in every known spelling."""
