"""One command line, run in this process as the entry point runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.cli.main import main

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Result:
    """What came out of a command line."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as the one JSON document that it has to be."""
        document: dict[str, Any] = json.loads(self.out)
        return document


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run `degarble` with these arguments."""
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Result(status, captured.out, captured.err)
