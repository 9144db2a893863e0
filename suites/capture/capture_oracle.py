"""A capture of transformers' own models; in a process of its own, since it imports widely.

`python -m degarble.suites.capture.capture_oracle FOLDER` writes FOLDER/v4 and FOLDER/v32: a prompt
of two sequences, then two steps with transformers' cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.modules import places_of, recording
from degarble.harness.capture.recorder import Recorder
from degarble.harness.model.config.json_file import config_to_dict
from degarble.references.weights import random_weights
from degarble.suites.capture.capture_models import THEIRS
from degarble.suites.references.transformers_cases import tokens
from degarble.suites.references.transformers_models import build


def main() -> None:
    """Capture both models."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, config in THEIRS.items():
        model = build(config, random_weights(config, 1, torch.float32), torch.float32)
        ids, cache = tokens(2, 22, config.vocab_size, 3), None
        facts = {"family": config.family, "config": config_to_dict(config)}
        with torch.no_grad(), CaptureWriter(folder / name, facts) as writer:
            with recording(model, places_of(config), Recorder(writer)):
                for piece in (ids[:, :20], ids[:, 20:21], ids[:, 21:]):
                    made = model(piece, past_key_values=cache, use_cache=True)
                    cache = made.past_key_values
            writer.finish()


if __name__ == "__main__":
    main()
