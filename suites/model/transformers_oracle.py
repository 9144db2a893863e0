"""What transformers makes of configs and files, asked in a process of its own: it imports widely.

Reads {"configs": [...], "folders": [...]} as JSON on stdin. For each config it answers with the
model's state dict on the meta device as {name: shape} and with the config as transformers saves
it. For each folder it loads the checkpoint in it in bfloat16 and leaves there state.safetensors,
the state dict, and saved/, what save_pretrained makes of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DeepseekV32Config
from transformers.models.deepseek_v32 import DeepseekV32ForCausalLM

CLASSES: dict[str, Any] = {
    "deepseek_v4": (DeepseekV4Config, DeepseekV4ForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
}


def described(raw: dict[str, Any]) -> dict[str, Any]:
    """Build one model without data and tell what it holds."""
    make_config, make_model = CLASSES[raw["model_type"]]
    config = make_config(**{key: value for key, value in raw.items() if key != "model_type"})
    with torch.device("meta"):
        model = make_model(config)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    return {"shapes": shapes, "config": config.to_dict()}


def reloaded(folder: Path) -> None:
    """Load a checkpoint and write down what is held, and what is saved again."""
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    _, make_model = CLASSES[raw["model_type"]]
    model = make_model.from_pretrained(folder, dtype=torch.bfloat16)
    state = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    save_file(state, folder / "state.safetensors")
    model.save_pretrained(folder / "saved")


def main() -> None:
    """Answer what stdin asks."""
    asked = json.load(sys.stdin)
    for folder in asked["folders"]:
        reloaded(Path(folder))
    json.dump([described(raw) for raw in asked["configs"]], sys.stdout, default=str)


if __name__ == "__main__":
    main()
