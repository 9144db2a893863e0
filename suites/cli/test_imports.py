"""Nothing is collected while a command imports, and everything as before afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.cli import imports
from degarble.harness.cli.imports import importing

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKING = """
import gc
from degarble.harness.cli import main
from degarble.harness.cli.commands import judging
from degarble.harness.cli.imports import importing
assert gc.isenabled() and not gc.get_freeze_count()
with importing():
    import torch
    assert not gc.isenabled()
assert gc.isenabled()
print(gc.get_freeze_count())
"""


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_a_command_imports_torch_uncollected_and_sets_it_aside() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CHECKING], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) > 100_000


def test_a_process_that_has_torch_is_left_alone() -> None:
    before = gc.get_freeze_count()
    assert torch.__name__ == imports.HEAVY
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


@pytest.mark.usefixtures("unfrozen")
def test_collecting_goes_on_after_an_import_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "HEAVY", "no such module")
    with pytest.raises(ImportError), importing():
        raise ImportError("broken")
    assert gc.isenabled()


def test_who_does_without_collecting_keeps_doing_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "HEAVY", "no such module")
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
