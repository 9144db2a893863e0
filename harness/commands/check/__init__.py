"""What `degarble check` and `degarble compare` do."""
