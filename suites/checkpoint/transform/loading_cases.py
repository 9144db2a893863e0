"""Converted checkpoints beside what their consumers load: names, and logits of one text."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file

from degarble.harness.inference.model import open_model
from degarble.references.model import Sequence
from degarble.references.numerics import SOURCES
from degarble.suites.checkpoint.transform.loading_oracle import LOGITS
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence as Many
    from pathlib import Path

    from torch import Tensor


class Loaded(NamedTuple):
    """What transformers made of one checkpoint. `told`: its loading report, or its error."""

    told: dict[str, Any]
    logits: Tensor | None  # [T, V]

    @property
    def is_clean(self) -> bool:
        """Whether it missed nothing and met nothing that it did not expect."""
        return self.logits is not None and not any(self.told.values())


def loaded_by_transformers(folders: Many[Path], tokens: Many[int]) -> list[Loaded]:
    """Load checkpoints in one process; the files that it leaves are removed."""
    asked = {"folders": [str(folder) for folder in folders], "tokens": list(tokens)}
    done = subprocess.run(
        [sys.executable, "-m", "degarble.suites.checkpoint.transform.loading_oracle"],
        input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = []
    for folder, load in zip(folders, json.loads(done.stdout.splitlines()[-1]), strict=True):
        path = folder / LOGITS
        found.append(Loaded(load, load_file(path)["logits"] if path.exists() else None))
        path.unlink(missing_ok=True)
    return found


def our_logits(folder: Path, tokens: Many[int]) -> Tensor:
    """Compute logits [T, V] by the definition, where sources disagree as transformers does."""
    switches = vars(SOURCES["transformers"])
    with open_model(folder, "definition", switches=switches) as model:
        hidden = model.logits_model.hidden([Sequence()], [torch.tensor(list(tokens))])
        return model.logits_model.logits(hidden)


def perplexity(logits_TV: Tensor, tokens: Many[int]) -> float:
    """Return the exponential of the mean surprise."""
    logp_TV = torch.log_softmax(logits_TV.double()[:-1], dim=-1)
    following = torch.tensor(list(tokens[1:]))
    return math.exp(-float(logp_TV.gather(1, following[:, None]).mean()))
