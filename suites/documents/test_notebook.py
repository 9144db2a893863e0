"""The notebook of the documents runs from top to bottom, and shows what its text says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from degarble.suites.documents.notebook import cells, run_notebook
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_it_is_stored_without_outputs() -> None:
    held = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in held["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    for number, source in enumerate(cells(NOTEBOOK)):
        compile(source, f"cell {number}", "exec")


@pytest.mark.slow
def test_it_shows_what_its_text_says() -> None:
    _, healthy, garbled, run, agreed, found, origins = run_notebook(NOTEBOOK)
    assert healthy
    assert garbled.cause.fault == "M10.nibble_order"
    assert repr(run) == "MemoryRun(6 calls of 6 components in 1 step)"
    assert (agreed.verdict, found.verdict) == ("AGREES", "DIFFERS")
    assert origins == [("down", 1, "M02.applied_twice")]


def test_a_cell_sees_those_before_it(tmp_path: Path) -> None:
    sources = ["x = 1\n", "y = x + 1\ny\n", "raise ValueError(y)\n"]
    code = [{"cell_type": "code", "source": [s]} for s in sources]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "cells": code[:2]}))
    assert run_notebook(path) == [None, 2]
    path.write_text(json.dumps({"nbformat": 4, "cells": code}))
    with pytest.raises(ValueError, match="2"):
        run_notebook(path)
