"""Chat encodings, tokenizers and parsing of completions."""
