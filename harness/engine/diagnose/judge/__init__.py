"""Judge one kernel call alone, without a checkpoint."""
