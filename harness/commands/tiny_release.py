"""Make a checkpoint of a small model that was trained: outliers, BF16, tokenizer, configs.

    python -m degarble.harness.commands.tiny_release --model v4 --trained DIR --out DIR

Writes the layout in which DeepSeek names a BF16 model. The tokenizer knows the words of the small
language and nothing else. Equal inputs give equal bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.view.quantisation_configs import config_files
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import CompanionFiles, write
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.tensors import slots
from degarble.references.tiny import language
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.references.tiny.outliers import with_outliers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.model.config.config import Config

CONFIGS: Mapping[str, Config] = {"v4": TINY_V4, "v32": TINY_V32}
_SEED = 20261121  # of the outliers
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def trained_weights(folder: Path, config: Config) -> dict[str, Tensor]:
    """Read the files that references.tiny.train wrote, by logical name."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights_*.safetensors")):
        stored.update(load_file(path))
    found = {p.name: stored.get(p.name.replace(".", "__")) for p in parameters(config)}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise InvalidArgument(
            "--trained", str(folder), f"weights of every parameter, such as {missing[0]}",
            "Name the folder that the training wrote, and the model that it trained.",
        )  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def tokenizer_files() -> dict[str, bytes]:
    """Return a tokenizer of blank-separated words, and the ids of its begin and end tokens."""
    special = [
        {"id": number, "content": word, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, word in enumerate(language.SPECIALS)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": dict(language.IDS), "unk_token": "<unused_0>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unused_0>",
        "add_bos_token": True,
    }
    generation = {
        "bos_token_id": language.BOS,
        "eos_token_id": language.EOS,
        "pad_token_id": language.PAD,
    }
    made = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }
    return {
        name: (json.dumps(each, ensure_ascii=False, indent=1) + "\n").encode()
        for name, each in made.items()
    }


def release(config: Config, weights: Mapping[str, Tensor], out: Path) -> None:
    """Write the checkpoint."""
    layout = layout_named("bf16", config)
    changed = with_outliers(weights, _SEED)
    stored = {
        slot.tensor: (slot.parameter.name, str(slot.dtype), slot.shape)
        for slot in slots(config, layout)
    }
    plan = WritePlan.from_tensors(
        [PlannedTensor(name, dtype, shape) for name, (_, dtype, shape) in stored.items()],
        sources={"tiny": "v1"},
    )

    def produce(tensor: PlannedTensor) -> Iterator[Tensor]:
        yield changed[stored[tensor.name][0]].to(_DTYPES[tensor.dtype]).contiguous()

    write(out, plan, produce, CompanionFiles({**config_files(config, layout), **tokenizer_files()}))


def main(arguments: list[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    config = CONFIGS[given.model]
    release(config, trained_weights(given.trained, config), given.out)


if __name__ == "__main__":
    main()
