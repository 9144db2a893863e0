"""Runs with an FP8 cache agree, and so do runs without; another scale is placed and named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.formats.weight import Weight
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.quantised_runs import E4M3, learned
from degarble.suites.references.traced.traced_models import built, config_of, weights_of
from degarble.suites.support.traced_runs import judged_run, prompt, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from degarble.harness.engine.localise.localise import Localised

    # Layer and the two scales of the checkpoint to (written, read) by key and value
    Cached = Callable[[int, Sequence[float]], Sequence[tuple[float, float]]]

pytestmark = pytest.mark.needs("transformers")

LAYERS, AT = 3, 1
SCALES = tuple((0.005 * (1 + layer), 0.013 * (1 + layer)) for layer in range(LAYERS))


def _healthy(_layer: int, own: Sequence[float]) -> Sequence[tuple[float, float]]:
    return [(scale, scale) for scale in own]


def _rounded(rows: Tensor, written: float, read: float) -> Tensor:
    codes = (rows.float() / written).clamp(-448, 448).to(E4M3).float()
    return (codes * read).to(rows.dtype)


def _run(cached: Cached | None, dtype: torch.dtype, name: str) -> Localised:
    from transformers.cache_utils import Cache  # noqa: PLC0415  heavy

    model: Any = built(name, dtype, num_hidden_layers=LAYERS)
    config: Any = replace(config_of(name, dtype, num_hidden_layers=LAYERS), cache="FP8_ROW")
    weights = weights_of(model)
    for layer, scales in enumerate(SCALES):
        for side, scale in zip("kv", scales, strict=True):
            weights[f"layers.{layer}.self_attn.{side}_scale"] = Weight(value=torch.tensor(scale))
    updating = Cache.update

    def update(cache: Any, keys: Tensor, values: Tensor, layer: int, *a: Any, **named: Any) -> Any:
        if cached is not None:
            ways = cached(layer, SCALES[layer])
            keys, values = (
                _rounded(rows, *way) for rows, way in zip((keys, values), ways, strict=True)
            )
        return updating(cache, keys, values, layer, *a, **named)

    with mock.patch.object(Cache, "update", update):
        run = recorded(model, config, prompt(config))
    return judged_run(config, weights, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_healthy_run_agrees_with_the_cache_and_without(name: str, dtype: torch.dtype) -> None:
    found = _run(_healthy, dtype, name)
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert "cache_quantised" not in learned(found)
    found = _run(None, dtype, name)
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert learned(found)["cache_quantised"] is False


_FAULTS: dict[str, Callable[[Sequence[float]], Sequence[tuple[float, float]]]] = {
    "k_scale for v": lambda own: [(own[0],) * 2, (own[0],) * 2],
    "exchanged": lambda own: [(own[1],) * 2, (own[0],) * 2],
    "values read by k_scale": lambda own: [(own[0],) * 2, (own[1], own[0])],
    "lost": lambda _own: [(1.0, 1.0), (1.0, 1.0)],
    "keys read without": lambda own: [(own[0], 1.0), (own[1],) * 2],
    "of another layer": lambda _own: [(scale, scale) for scale in SCALES[AT + 1]],
}


def _in_one_layer(change: Any, layer: int, own: Sequence[float]) -> Sequence[tuple[float, float]]:
    chosen = change(own) if layer == AT else _healthy(layer, own)
    return [(written, read) for written, read in chosen]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("fault", _FAULTS)
def test_another_scale_of_a_cache_is_placed_and_named(fault: str, dtype: torch.dtype) -> None:
    found = _run(partial(_in_one_layer, _FAULTS[fault]), dtype, "llama")
    (origin,) = found.origins
    assert origin.component == f"layers.{AT}.self_attn.cache"
    assert origin.record is not None
    told = diagnose(origin.context, [origin.record, *origin.more])
    assert told.named, told.sentence
    assert told.named[0].id == "M32.cache_scale", told.sentence
