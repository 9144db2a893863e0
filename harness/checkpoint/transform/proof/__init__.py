"""Compare converted values with their source."""
