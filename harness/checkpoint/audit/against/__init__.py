"""Compare a checkpoint with a reference, weight by weight."""
