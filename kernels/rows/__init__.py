"""Row kernels: norms, RoPE, mHC, router, embedding, scaling."""
