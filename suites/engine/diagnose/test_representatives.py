"""Equal discrepancies are searched once; what the first cause does not explain, by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from degarble.harness.engine.diagnose import representatives
from degarble.harness.engine.diagnose.diagnose import Diagnosed, diagnose
from degarble.suites.campaigns.traced_plants import judged

pytestmark = pytest.mark.needs("transformers")


def _norms(model: Any) -> None:
    """Give three norms another epsilon, and one another weight."""
    for number, layer in enumerate(model.model.layers):
        norm = layer.post_attention_layernorm
        if number == 2:
            norm.weight.data = torch.ones_like(norm.weight)
        else:
            norm.variance_epsilon = 1e-2


def test_equal_discrepancies_have_one_representative(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[str] = []

    def counted(context: Any, records: Any, faults: Any = None) -> Diagnosed:
        whole.extend([context.name] if faults is None else [])
        return diagnose(context, records, faults)

    monkeypatch.setattr(representatives, "diagnose", counted)
    found, known = judged("llama", "bf16", _norms), representatives.Representatives()
    told = {origin.component: known.diagnose(origin) for origin in found.origins}
    names = [f"layers.{layer}.post_attention_layernorm" for layer in range(4)]
    assert list(told) == names
    assert [told[name].named[0].id for name in names] == [
        "M24.constant", "M24.constant", told[names[2]].named[0].id, "M24.constant",
    ]  # fmt: skip
    assert told[names[2]].named[0].id != "M24.constant"
    assert [told[name].like for name in names] == ["", names[0], "", names[0]]
    assert whole == [names[0], names[2]]


def test_after_the_last_search_only_known_causes_are_tried() -> None:
    found, known = judged("llama", "bf16", _norms), representatives.Representatives(1)
    told = [known.diagnose(origin) for origin in found.origins]
    assert [each.named[0].id if each.named else "" for each in told] == [
        "M24.constant", "M24.constant", "", "M24.constant",
    ]  # fmt: skip
    assert told[2].sentence.startswith("Its cause was not searched: none of the causes of 1 ")
