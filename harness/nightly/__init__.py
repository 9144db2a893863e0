"""A night over one checkpoint, and the search for the commit that broke it."""
