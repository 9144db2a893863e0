"""Which factors of the logits have a name depends on what YaRN does to a model's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.engine.faults.attention.softmax_scale import _named, mscale_squared
from degarble.harness.model.presets import V3_2, V4_PRO
from degarble.references.latent_attention import softmax_scale

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

assert V3_2.yarn is not None
BARE = replace(V3_2, yarn=replace(V3_2.yarn, mscale=None, mscale_all_dim=None))
UNEQUAL = replace(V3_2, yarn=replace(V3_2.yarn, mscale=1.0, mscale_all_dim=0.5))


@pytest.mark.parametrize(
    ("config", "words"),
    [(V3_2, "without"), (UNEQUAL, "without"), (BARE, "times"), (V4_PRO, "times")],
    ids=["v32", "unequal", "bare", "v4"],
)
def test_a_factor_is_left_out_or_added_as_the_model_has_it(config: Config, words: str) -> None:
    scene: Any = SimpleNamespace(bound=SimpleNamespace(config=config))
    named = dict(_named(scene))
    square = mscale_squared(config)
    assert named[f"logits {words} YaRN's mscale squared"] == pytest.approx(
        1 / square if words == "without" else square
    )
    if words == "without":
        assert softmax_scale(config) * config.qk_head_dim**0.5 == pytest.approx(square)  # type: ignore[arg-type, union-attr]
