"""The commands `degarble check` and `degarble compare`."""
