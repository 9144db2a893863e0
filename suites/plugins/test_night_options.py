"""The night's options on the command line, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.plugins.pytest_plugin import NightOptions, night_options


def said(**given: str) -> NightOptions:
    found: Any = SimpleNamespace(getoption=lambda name: given.get(name.removeprefix("--")))
    return night_options(found)


def test_no_option_is_the_default() -> None:
    assert said() == NightOptions()


def test_options_are_read() -> None:
    found = said(repeats="2", museum="whole", store="h.sqlite", ledger="known.yaml", commit="abc")
    assert (found.repeats, found.museum, found.store, found.commit) == (
        2,
        "whole",
        "h.sqlite",
        "abc",
    )
    assert found.ledger == Path("known.yaml").absolute()


@pytest.mark.parametrize("repeats", ["1", "0", "-4", "four", "65", "", "99999999999999999999"])
def test_repeats_that_are_none_are_refused(repeats: str) -> None:
    with pytest.raises(InvalidArgument, match="--repeats"):
        said(repeats=repeats)


def test_an_unknown_extent_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--museum = 'all'"):
        said(museum="all")
