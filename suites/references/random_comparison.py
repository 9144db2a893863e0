"""Our reading of a checkpoint that transformers saved, set beside what transformers computes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.harness.inference.model import open_model
from degarble.references.model import Sequence
from degarble.references.numerics import SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.suites.references.random_models import RandomModel

RELATIVE = 1e-9  # of the largest logit; both sides are float64


def disagreement(model: RandomModel, folder: Path, theirs: Mapping[str, Tensor]) -> str:
    """Say where our logits differ from transformers', or what was not refused; "" is agreement."""
    if model.refused:
        return _unrefused(folder, model.refused)
    switches = asdict(SOURCES["transformers"])
    for absorbed in (True, False) if model.family == "deepseek_v32" else (True,):
        form = "" if model.family == "deepseek_v4" else f", absorbed: {absorbed}"
        with open_model(folder, "definition", absorbed=absorbed, switches=switches) as ours:
            for name, calls in (("whole", (model.length,)), ("parts", model.calls)):
                sequence, logits_model = Sequence(), ours.logits_model
                tensors = [
                    logits_model.logits(logits_model.hidden([sequence], [part]))
                    for part in theirs["tokens"].split(calls)
                ]
                off = _distance(torch.cat(tensors), theirs[name])
                if not off <= RELATIVE:
                    return f"{name} in calls of {calls}{form}: {off:.2e} of the largest logit"
    return ""


def _distance(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or not bool(torch.isfinite(theirs).all()):
        return float("nan")
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _unrefused(folder: Path, name: str) -> str:
    try:
        open_model(folder, "definition").close()
    except DegarbleError as error:
        return "" if name in str(error) else f"refused, and not by the name of {name}: {error}"
    return f"{name} was not refused"
