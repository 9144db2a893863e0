"""The commands behind the CLI: wiring of checkpoint, reference, engine and report."""
