"""Talking to a model: chat encodings, tokenizers, sampling, and the loop that generates."""
