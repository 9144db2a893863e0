"""Facts of a capture: a known one of another type is refused by name, others are let through."""

from __future__ import annotations

from typing import Any

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.capture.files.records import FACTS, require_known_types

SOUND: dict[str, Any] = {
    "source": {"name": "model", "path": "/x", "fingerprint": "ab", "content": None},
    "config": {"hidden_size": 8},
    "recipe": [{"match": "*", "weight": "BF16", "activation": "BF16"}],
    "filters": {"layers": ["layers.0"], "components": None, "tokens": ["0-3"]},
    "statistics_only": False,
    "new_tokens": 4,
    "versions": {"torch": "2"},
    "conventions": {"wo_a_follows_recipe": True},
    "by_backend": ["head"],
    "fell_to_torch": [],
    "fraction_bits": {"head": 13},
    "sequences": [{"prompt": [1], "new": [], "text": "", "finish": "length"}],
    **dict.fromkeys(("family", "backend", "arithmetic", "form", "sums", "device"), "a"),
}


def test_facts_of_our_captures_are_known_and_others_are_accepted() -> None:
    assert SOUND.keys() == FACTS.keys()
    require_known_types(SOUND)
    require_known_types({"texts": ["anna"], "engine": [{}], "config": None})


@pytest.mark.parametrize("name", sorted(FACTS))
@pytest.mark.parametrize("value", [-1, 2**63, True, 0.5, "a", [], {}, [[]], [1], {"a": [{}]}])
def test_a_fact_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    alike = type(value) is type(SOUND[name])
    try:
        require_known_types({name: value})
    except UnreadableFile as error:
        assert error.name == f"facts: {name}"  # noqa: PT017  a value of the type may be legal
    else:
        assert alike
