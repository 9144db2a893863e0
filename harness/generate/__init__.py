"""Generate text with a model and a backend: the run behind `degarble generate`."""
