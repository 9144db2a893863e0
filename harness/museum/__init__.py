"""The museum of faults, and the demo."""
