"""Device functions and derived facts that kernels of several packages share."""
