"""From checkpoint to checkpoint: units of work and values that all transforms share."""
