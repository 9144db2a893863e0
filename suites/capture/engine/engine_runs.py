"""Captures of the engine's stand-in, as vLLM's workers and their join make them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from degarble.harness.capture.engine.session import EngineCapture, Scheduled
from degarble.harness.capture.engine.traced import join_traced, maps_of_model
from degarble.harness.capture.options import CaptureRequest
from degarble.suites.capture.imports import dumps
from degarble.suites.support.engine_stand_in import engine_models, generated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


def engine_capture(
    source: nn.Module,
    folder: Path,
    ranks: int = 1,
    plant: Callable[[int, Any], object] | None = None,
    *,
    by_expert: bool = True,
) -> tuple[Path, list[str]]:
    """Capture two requests of the model in `folder / "ckpt"`; return the capture of all ranks."""
    models = engine_models(source, ranks, by_expert=by_expert)
    raw = json.loads((folder / "ckpt" / "config.json").read_text())
    captures = []
    for number, model in enumerate(models):
        if plant is not None:
            plant(number, model.model)
        places, facts = maps_of_model(model, raw, ranks)
        own = folder / f"rank-{number}"
        captures.append(EngineCapture(own, model, places, CaptureRequest(count=2), facts))

    def before(rank: int, batch: Any, _ids: Any, _positions: Any) -> None:
        captures[rank].batch([Scheduled(str(n), start, tokens) for n, start, tokens in batch])

    generated(models, dumps.PROMPTS, 3, before)
    for capture in captures:
        capture.close()
    out = folder / "out"
    return out, join_traced([folder / f"rank-{n}" for n in range(ranks)], folder / "ckpt", out)
