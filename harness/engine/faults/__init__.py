"""Known faults, a module a kind: how to plant each and how to recognise it."""
