"""Error budgets: how far a correct kernel may differ from its twin."""
