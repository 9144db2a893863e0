"""Conventions that are declared: read as switches of the references, or refused by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from degarble.harness.backends.cutedsl.backend import CONVENTIONS
from degarble.harness.base.errors import DegarbleError
from degarble.harness.engine.conventions.registry import (
    REGISTRY,
    conventions_in,
    conventions_line,
    read_options,
    stored_conventions,
)
from degarble.references.numerics import HeadNorm, Numerics, Switches


def test_what_a_manifest_says_is_what_the_kernels_follow() -> None:
    found = conventions_in({"conventions": stored_conventions(CONVENTIONS)})
    assert found == dict(CONVENTIONS)
    assert found["head_norm"] is HeadNorm.ONCE
    assert Numerics.twin().with_switches(**found).switches.head_norm is HeadNorm.ONCE
    assert "head_norm: once" in conventions_line(found)
    assert conventions_in({}) == {}


def test_the_registry_and_the_switches_of_the_references_are_the_same() -> None:
    assert set(REGISTRY) == {field.name for field in fields(Switches)}
    for name, convention in REGISTRY.items():
        default = getattr(Switches(), name)
        assert default is None or not convention.values or default in convention.values
        assert convention.by_family or default is not None or not convention.values
        for value, words in convention.values.items():
            assert convention.read(value, "here") is value
            assert read_options([f"{name}={str(value).lower()}"])[name] is value
            assert words in convention.words(value)


def table() -> str:
    """Return the table of docs/checking.md."""
    lines = []
    for name, each in REGISTRY.items():
        values = "; ".join(f"`{str(v).lower()}`: {words}" for v, words in each.values.items())
        roles = ", ".join(f"`{role}`" for role in sorted(each.roles))
        learned = "yes" if each.learned else "no"
        lines.append(f"| `{name}` | {each.subject}: {values or 'a number'} | {learned} | {roles} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_convention() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "checking.md"
    assert table() in page.read_text(encoding="utf-8"), table()


@pytest.mark.parametrize(
    "stated",
    [
        {"head_nrm": "once"}, {"head_norm": "twice"}, {"head_norm": 1}, {"routing_epsilon": "0"},
        {"routing_epsilon": -1.0}, {"indexer_hadamard": 1}, {"indexer_hadamard": "true"}, [],
    ],
    ids=str,
)  # fmt: skip
def test_what_the_references_do_not_have_is_refused(stated: Any) -> None:
    with pytest.raises(DegarbleError, match="of the capture"):
        conventions_in({"conventions": stated})


@pytest.mark.parametrize("word", ["head_norm", "head_nrm=once", "head_norm=twice", "kv_cache="])
def test_an_option_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(DegarbleError, match="--convention"):
        read_options([word])


def test_an_older_capture_states_head_weights_with_the_scores() -> None:
    found = conventions_in({"conventions": {"indexer_in_storage_dtype": False}})
    assert found["indexer_weights_in_storage_dtype"] is False
