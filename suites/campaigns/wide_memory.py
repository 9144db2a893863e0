"""Measure the memory in which the commands capture and check models of real widths.

A random checkpoint in BF16 is written shard by shard, then run through the commands:

    python -m degarble.suites.campaigns.wide_memory --out FOLDER llama head mixture

`llama` has two layers of Llama 70B's widths, `head` one of them with a vocabulary of 128,256,
`mixture` one layer of Mixtral 8x22B's. They take 5 to 6 GB of disk each, and stay for the next run.
The figures are the peaks of resident memory, pages of the checkpoint's files included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from degarble.suites.commands.traced_checkpoints import write_tokenizer

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 2,
    "vocab_size": 32000, "dtype": "bfloat16", "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "head": {**_LLAMA, "num_hidden_layers": 1, "vocab_size": 128256},
    "mixture": {
        **_LLAMA, "model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384,
        "num_attention_heads": 48, "num_hidden_layers": 1, "num_local_experts": 8,
    },
}  # fmt: skip
_PROMPT = "the quick brown fox"
_MANY = 1 << 22


def shapes(config: dict[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the tensors of every shard, as files of transformers name them."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    found: dict[str, dict[str, tuple[int, ...]]] = {
        "embedding": {"model.embed_tokens.weight": (vocab, hidden)},
        "head": {"lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)},
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        rows = {"q": hidden, "k": keys, "v": keys, "o": hidden}
        found[f"attention{layer}"] = {
            **{
                f"{at}self_attn.{part}_proj.weight": (count, hidden) for part, count in rows.items()
            },
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
        experts = config.get("num_local_experts")
        if experts is None:
            names = {f"{at}mlp.": ("gate_proj", "up_proj", "down_proj")}
        else:
            at += "block_sparse_moe."
            found[f"router{layer}"] = {f"{at}gate.weight": (experts, hidden)}
            names = {f"{at}experts.{number}.": ("w1", "w3", "w2") for number in range(experts)}
        for prefix, (gate, up, down) in names.items():
            found[f"mlp{prefix}"] = {
                f"{prefix}{gate}.weight": (inner, hidden),
                f"{prefix}{up}.weight": (inner, hidden),
                f"{prefix}{down}.weight": (hidden, inner),
            }
    return found


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint of random numbers that keep the size of what passes."""
    drawn = torch.randn(_MANY, generator=torch.Generator().manual_seed(0))
    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    for shard, forms in shapes(config).items():
        tensors = {}
        for number, (name, shape) in enumerate(forms.items()):
            # Another turn of the same numbers for every matrix: no two are equal.
            turned = drawn.roll(_MANY // (number + 2)) * shape[-1] ** -0.5
            repeated = turned.bfloat16().repeat(-(-prod(shape) // _MANY))[: prod(shape)]
            tensors[name] = torch.ones(shape).bfloat16() if len(shape) == 1 else repeated
            tensors[name] = tensors[name].reshape(shape).contiguous()
        file = f"{shard.strip('.').replace('.', '_')}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(forms, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))


def peak(*words: object) -> str:
    """Run a command, and return its peak of resident memory and its processor time."""
    command = [sys.executable, "-m", "degarble.harness.cli.main", *map(str, words)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = used.ru_utime + used.ru_stime
    return f"{used.ru_maxrss / 1e6:.2f} GB, {seconds:.0f} s, status {child.returncode}"


def main() -> None:
    """Write what is missing, and print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="transformers")
    asked = parser.parse_args()
    for name in asked.models:
        source, capture = asked.out / name, asked.out / f"{name}-{asked.backend}"
        if not source.exists():
            # Trap: a child's peak begins with that of the process that starts it.
            writer = get_context("spawn").Process(target=write, args=(source, MODELS[name]))
            writer.start()
            writer.join()
        generating = ["--prompt", _PROMPT, "--max-new-tokens", 2, "--backend", asked.backend]
        if not capture.exists():
            sys.stdout.write(
                f"{name} capture: {peak('capture', source, '--out', capture, *generating)}\n"
            )
        sys.stdout.write(f"{name} check: {peak('check', capture, '--reference', source)}\n")


if __name__ == "__main__":
    main()
