"""Write checkpoints so that a crash leaves nothing half-written."""
