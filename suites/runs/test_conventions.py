"""Conventions of a captured run: read back as the switches that they were, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from degarble.harness.errors import DegarbleError
from degarble.harness.runs.conventions import conventions_in, conventions_line
from degarble.harness.runs.cutedsl import CONVENTIONS
from degarble.references.numerics import HeadNorm, Numerics


def test_what_a_manifest_says_is_what_the_kernels_follow() -> None:
    told = {name: str(each) if isinstance(each, HeadNorm) else each
            for name, each in CONVENTIONS.items()}  # fmt: skip
    found = conventions_in({"conventions": told})
    assert found == dict(CONVENTIONS)
    assert found["head_norm"] is HeadNorm.ONCE
    assert Numerics.twin().with_switches(**found).switches.head_norm is HeadNorm.ONCE
    assert "head_norm: once" in conventions_line(found)
    assert conventions_in({}) == {}


@pytest.mark.parametrize(
    "stated",
    [{"head_nrm": "once"}, {"head_norm": "twice"}, {"head_norm": 1}, {"routing_epsilon": "0"}, []],
    ids=str,
)
def test_what_the_references_do_not_have_is_refused(stated: Any) -> None:
    with pytest.raises(DegarbleError, match="of the capture"):
        conventions_in({"conventions": stated})
