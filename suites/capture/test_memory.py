"""A run in memory is the capture on disk, without the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from degarble.harness import api
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.recorder import MemoryRun
from degarble.suites.capture.capture_models import Stack

if TYPE_CHECKING:
    from pathlib import Path


def test_memory_and_disk_hold_the_same(tmp_path: Path) -> None:
    model, tokens = Stack(), torch.arange(6)[None]
    run = api.capture(model, tokens)
    disk = api.capture(model, tokens, folder=tmp_path / "run")
    assert isinstance(run, MemoryRun)
    assert isinstance(disk, Capture)
    assert run.steps == list(disk.steps)
    assert [c.component for c in run.calls] == [c.component for c in disk.calls]
    for ours, theirs in zip(run.calls, disk.calls, strict=True):
        for read in ("inputs", "outputs"):
            left, right = getattr(run, read)(ours), getattr(disk, read)(theirs)
            assert set(left) == set(right)
            assert all(torch.equal(left[name], right[name]) for name in left)
    assert {kept.dtype for c in run.calls for _, kept in c.sites()} == {"F32", "I64"}


def test_what_is_written_over_later_stays_as_it_was() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.first(x)
            out: torch.Tensor = self.last(made)
            made.zero_()
            return out

    run = api.capture(Careless(), torch.randn(3, 4))
    assert isinstance(run, MemoryRun)
    first, last = run.calls
    assert torch.equal(run.outputs(first)["out"], run.inputs(last)["x"])
    assert bool(run.outputs(first)["out"].any())


def test_a_model_of_numbers_has_one_row_a_token() -> None:
    run = api.capture(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 5, 4))
    assert len(run.steps[0].tokens) == 10
    (call,) = run.calls
    assert run.inputs(call)["x"].shape == (10, 4)
    single = api.capture(nn.Sequential(nn.Linear(4, 4)), torch.randn(5, 4))
    assert len(single.steps[0].tokens) == 5
