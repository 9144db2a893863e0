"""Record runs of transformers models with random tokens, and judge them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.capture.traced import cache_argument, recording
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.recipes import Recipe


def prompt(config: Any, device: str = "cpu", seed: int = 1) -> Tensor:
    """Return two sequences of tokens, without those that configs call padding, begin and end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (2, 23), generator=generator).to(device)


def recorded(model: Any, config: Any, ids: Tensor, steps: int = 2) -> MemoryRun:
    """Record a prefill and decoding steps."""
    run, name = MemoryRun({}), cache_argument(model)
    with torch.inference_mode(), recording(model, config, Recorder(run)):
        out = model(input_ids=ids, use_cache=True)
        for step in range(steps):
            cache = getattr(out, name, None)
            if cache is None:
                break
            new, at = out.logits[:, -1].argmax(-1, keepdim=True), {}
            # Bamba forgets the length of its cache where it counts positions itself.
            if "position_ids" in inspect.signature(model.forward).parameters:
                at["position_ids"] = torch.full(new.shape, ids.shape[1] + step).to(ids.device)
            out = model(input_ids=new, **{name: cache}, use_cache=True, **at)
    return run


def judged_run(
    config: Any, weights: Mapping[str, Weight], run: MemoryRun, recipe: Recipe | None = None
) -> Localised:
    """Judge a run against a twin that stores results in the config's dtype."""
    wide, store = torch.float64, config.torch_dtype
    numerics = replace(Numerics.bf16(), work=wide, products=wide, store=store)
    recipe = recipe or recipe_named("bf16", config)
    return localise(TracedModel(config, numerics, weights, recipe), recipe, run)
