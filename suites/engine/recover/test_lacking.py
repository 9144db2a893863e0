"""Where nothing explains a difference, the answer says which data would tell more."""

from __future__ import annotations

import re

import pytest
import torch

from degarble.harness import api

WIDE, HIGH = 32, 24


def _answer(rows: int, *, spoiled: bool = False) -> tuple[str, str]:
    """Return the level of an answer and what it asks for; the weight's columns have any order."""
    generator = torch.Generator().manual_seed(3)
    right = torch.randn(HIGH, WIDE, generator=generator)
    x = torch.randn(rows, WIDE, generator=generator)
    out = x @ right[:, torch.randperm(WIDE, generator=generator)].T
    if spoiled:
        out[0, 0] = torch.nan
    found = api.judge("gemm", x, right, out).document()
    return found["level"], found["wanted"]


def test_as_many_tokens_as_it_asks_for_raise_the_answer() -> None:
    level, wanted = _answer(12)
    assert level == "placed"
    asked = re.search(r"Give it (\d+) more rows", wanted)
    assert asked is not None, wanted
    assert int(asked[1]) == WIDE + 4 - 12
    assert _answer(12 + int(asked[1])) == ("described", "")


@pytest.mark.parametrize("rows", [12, 40])
def test_outputs_that_are_not_finite_are_said(rows: int) -> None:
    level, wanted = _answer(rows, spoiled=True)
    assert level == "placed"
    assert "capture a prompt without them" in wanted
