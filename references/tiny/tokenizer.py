"""The words of the small language as a tokenizer.json: one word, one token, split at blanks.

Owns the file's text and nothing else. A word that the language does not have is refused by whoever
reads the file, because it names no unknown token. Kept honest by suites/references/tiny/
test_tokenizer.py, which reads it with the package `tokenizers`.
"""

from __future__ import annotations

import json

from degarble.references.tiny.words import IDS, SPECIALS


def tokenizer_json() -> str:
    """Spell the tokenizer."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": IDS[word], "content": word, **special, "special": True} for word in SPECIALS]
    raw = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": dict(IDS), "unk_token": "<unknown>"},
    }
    return json.dumps(raw, indent=1) + "\n"
