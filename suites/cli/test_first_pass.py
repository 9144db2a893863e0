"""The first pass over streamed weights is shown until it is over; held weights show nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.cli.terminal import Terminal, first_pass

if TYPE_CHECKING:
    import pytest


class Streamed:
    total = 1000
    heard: Any = None


def test_bytes_are_heard_until_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    streamed: Any = Streamed()
    with first_pass(Terminal(), streamed) as over:
        streamed.heard(400, "layers.0.attn.wq_a")
        over()
        assert streamed.heard is None
    with first_pass(Terminal(quiet=True), streamed):
        assert streamed.heard is not None
    assert streamed.heard is None
    with first_pass(Terminal(), None) as over:
        over()
    assert capsys.readouterr().out == ""
