"""What `degarble audit` does."""
