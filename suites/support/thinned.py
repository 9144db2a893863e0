"""Mark most cases of a long list slow: a default run takes some of them, a nightly run all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def thinned(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Keep the first of every so many cases as it is, and mark the others slow.

    A case of several arguments is a tuple, as for `parametrize`.
    """
    return [
        case if number % every == 0 else pytest.param(*_values(case), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return tuple(case) if type(case) is tuple else (case,)
