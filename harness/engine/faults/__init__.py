"""Known ways to go wrong, one family a file: how to make each, and how to recognise it."""
