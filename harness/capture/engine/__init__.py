"""Record a running engine: maps of its modules, joining of ranks, one session a capture."""
