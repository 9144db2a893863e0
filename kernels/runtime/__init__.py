"""Runtime of all kernels: targets, compile settings, compilation with a cache, machine code."""
