"""What the commands do: wiring of checkpoint, reference, engine and report."""
