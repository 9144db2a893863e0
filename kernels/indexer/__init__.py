"""Lightning indexer kernels: operands, scores, top-k."""
