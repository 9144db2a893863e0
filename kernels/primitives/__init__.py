"""Device functions that kernels of several rooms share."""
