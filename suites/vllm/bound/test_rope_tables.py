"""A layer's table of turns is its config's own, is mended where vLLM errs, or refuses the start."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.backends.cutedsl.rows import table_of
from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.vllm.proof import StartProof
from degarble.suites.checkpoint.structure_cases import V4

pytestmark = pytest.mark.vllm


@pytest.fixture
def require() -> Any:
    return import_module("degarble.harness.vllm.bound.attention").require_turns


def start() -> Any:
    return SimpleNamespace(proven=StartProof("", "", "", {}, {}, V4), running=[])


def attention(number: int, table: torch.Tensor) -> Any:
    rotary = SimpleNamespace(cos_sin_cache=table)
    return SimpleNamespace(prefix=f"model.layers.{number}.attn", rotary_emb=rotary)


def plain() -> int:
    return next(n for n, block in enumerate(V4.layers) if not block.ratio)


def test_what_the_config_says_passes(require: Any) -> None:
    for number, block in enumerate(V4.layers):
        begun = start()
        require(attention(number, table_of(V4.rope(block), 2048)), begun, "0.33")
        assert begun.running == []


def test_a_gpu_as_the_default_device_changes_nothing(require: Any) -> None:
    """So vLLM builds its model there: a table made beside it would be of another device."""
    begun, layer = start(), attention(plain(), table_of(V4.rope(V4.layers[plain()]), 2048))
    with torch.device("meta"):
        require(layer, begun, "0.33")
    assert begun.running == []


def test_yarn_where_there_is_none_is_mended_in_026_alone(require: Any) -> None:
    own = V4.rope(V4.layers[plain()])
    compressed = next(V4.rope(block) for block in V4.layers if block.ratio)
    wrong = replace(own, yarn=compressed.yarn)
    layer, begun = attention(plain(), table_of(wrong, 2048)), start()
    with pytest.raises(LayoutMismatch, match="no YaRN, as config"):
        require(layer, begun, "0.33")
    require(layer, begun, "0.26")
    assert torch.equal(layer.rotary_emb.cos_sin_cache, table_of(own, 2048))
    assert [(each.part, each.by) for each in begun.running] == [("turns", "degarble")]
