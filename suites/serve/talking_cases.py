"""Checkpoints that can be talked to: synthetic weights, with a tokenizer of 64 words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from degarble.harness.chat import special_tokens as marks
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config

CONFIGS: dict[str, Config] = {"v4": TINY_V4, "v32": TINY_V32}
SPECIAL = (marks.BOS, marks.EOS, marks.USER, marks.ASSISTANT, marks.THINK, marks.END_THINK)
WORDS = (*SPECIAL, *(f"w{number}" for number in range(6, 64)))


def write_tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": n, "content": word, "special": True, **flags}
        for n, word in enumerate(words)
        if word in SPECIAL
    ]
    model = {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(words)}, "unk_token": "?"}
    raw = {"version": "1.0", "added_tokens": added, "model": model}
    raw["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def write_speaker(folder: Path, family: str = "v4", layout: str = "bf16") -> Path:
    """Write a checkpoint with its tokenizer."""
    write_checkpoint(folder, Synthetic(CONFIGS[family], layout, seed=3))
    write_tokenizer(folder)
    return folder
