"""Statistics of one weight in one pass, and what they reveal of its layout."""
