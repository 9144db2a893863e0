"""What transformers finds in converted checkpoints, asked in a process of its own.

Reads {"folders": [...], "tokens": [...]} as JSON on stdin, loads each folder as a user would, in
float32, and answers for each with the keys that it missed, did not expect or found misshapen. The
logits of the tokens are left in the folder, `logits.safetensors`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LOGITS = "logits.safetensors"


def loaded(folder: Path, tokens: list[int]) -> dict[str, Any]:
    """Load one checkpoint; an error is an answer too."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  heavy, and it warns

    make_model: Any = AutoModelForCausalLM.from_pretrained  # typed without its loading report
    try:
        model, told = make_model(
            folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
        )
    except (RuntimeError, ValueError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    with torch.no_grad():
        logits_TV = model.eval()(torch.tensor([tokens]), use_cache=False).logits[0]
    save_file({"logits": logits_TV.contiguous()}, folder / LOGITS)
    return {key: sorted(map(str, told[key])) for key in ("missing_keys", "unexpected_keys")} | {
        "mismatched_keys": [str(each) for each in told["mismatched_keys"]]
    }


def main() -> None:
    """Answer what stdin asks."""
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    asked = json.load(sys.stdin)
    answers = [loaded(Path(folder), asked["tokens"]) for folder in asked["folders"]]
    print("\n" + json.dumps(answers))  # noqa: T201  read by the suite


if __name__ == "__main__":
    main()
