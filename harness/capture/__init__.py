"""Record any run: the references, a torch model, or an engine."""
