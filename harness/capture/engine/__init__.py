"""Record an engine's run: its modules, ranks and session."""
