"""The proof of the plugin in an engine that runs: what is asked, and what has to come back."""
