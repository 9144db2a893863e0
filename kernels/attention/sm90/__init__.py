"""Device code of sparse attention for Hopper (sm_90a)."""
