"""Held weights: the source's own values, decoded once, also under inference mode."""

from __future__ import annotations

import torch

from degarble.harness.inference.weights import HeldWeights
from degarble.harness.model.presets import small_v4
from degarble.harness.model.recipes import recipe_named
from degarble.references.weights import quantised_weights, random_weights

CONFIG = small_v4(num_hidden_layers=2, compress_ratios=(0, 4), num_nextn_predict_layers=0)


def test_values_are_the_sources_and_are_decoded_once() -> None:
    recipe = recipe_named("nvfp4-experts", CONFIG)
    source = quantised_weights(random_weights(CONFIG, 1), CONFIG, recipe)
    held = HeldWeights(source)
    assert list(held) == list(source)
    assert len(held) == len(source)
    for name in ("embed", "layers.0.attn.wq_a", "layers.0.ffn.experts.3.w2"):
        for dtype in (torch.float32, torch.float64):
            with torch.inference_mode():
                values = held[name].values(dtype)
                assert held[name].values(dtype) is values
            assert not values.is_inference()
            assert torch.equal(values, source[name].values(dtype))
        assert held[name].is_quantised == source[name].is_quantised
        assert held[name].shape == source[name].shape
