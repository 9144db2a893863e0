"""Run a reference model: weights, ranks, generation, sampling."""
