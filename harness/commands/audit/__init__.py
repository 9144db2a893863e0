"""The command `degarble audit`."""
