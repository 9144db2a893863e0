"""Reference models read off transformers' own forward pass."""
