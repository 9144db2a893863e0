"""Checkpoints for the start of a container: a healthy NVFP4 one, and one with swapped nibbles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from degarble.harness.cli.main import main
from degarble.harness.serve.smoke import make_answers

TINY = Path(__file__).parents[2] / "references" / "tiny" / "v1" / "v4"
PROMPTS = ("anna paints", "the old fox sees")
SWAPPED = "layers.1.ffn.experts.3.w1"


def healthy(folder: Path) -> Path:
    """The tiny model with NVFP4 experts."""
    assert main(["convert", str(TINY), str(folder), "--to", "nvfp4", "--quiet"]) == 0
    return folder


def with_swapped_nibbles(source: Path, folder: Path) -> Path:
    """The same, with the halves of every byte of one weight exchanged."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    codes = tensors[f"{SWAPPED}.weight"]
    tensors[f"{SWAPPED}.weight"] = (codes << 4) | (codes >> 4)
    file.unlink()
    save_file(tensors, file, metadata=metadata)
    return folder


def answers(checkpoint: Path, file: Path) -> dict[str, Any]:
    """The reference's own answers, written to a file."""
    made = make_answers(checkpoint, PROMPTS)
    file.write_text(json.dumps(made), encoding="utf-8")
    return made
