"""Known faults, a family a file: how to plant each and how to recognise it."""
