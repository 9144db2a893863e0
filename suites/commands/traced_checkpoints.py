"""Checkpoints on disk of tiny models of transformers, with a tokenizer of letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.suites.references.traced.traced_models import built

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "hello there, how are you"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_checkpoint(
    folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **saving: Any
) -> Path:
    """Save a model as transformers does, in several shards."""
    model: Any = built(name, dtype)
    model.save_pretrained(folder, max_shard_size="100KB", **saving)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that has a token for every letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415  of suites

    words = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127))]
    codec = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    codec.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    codec.decoder = decoders.Fuse()
    codec.save(str(folder / "tokenizer.json"))
