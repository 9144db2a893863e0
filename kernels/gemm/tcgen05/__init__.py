"""Building blocks of the Blackwell (sm_100a) GEMM kernels: tcgen05 and tensor memory."""
