"""Where degarble plugs into other programs: pytest, and later vLLM."""
