"""Find out what a target is, and which checks can be made of it."""
