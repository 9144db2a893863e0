"""Known faults, one file a family: how to plant each and how to recognise it."""
