"""The bench of a night: what a share says, what fails alone, and what it does without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.kernels.runtime.targets import SM90A, TARGETS
from degarble.suites.bench import bench_night as bench
from degarble.suites.bench import bench_quantise_kernel as quantising
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def figure(name: str, *microseconds: float) -> Figure:
    return Figure(Arm(name, 1, 1, lambda: None, ()), microseconds)


def test_a_share_is_of_all_arms_round_by_round_and_of_the_work() -> None:
    ours = [figure("fc1", 10.0, 20.0, 30.0), figure("fc2", 10.0, 20.0, 10.0)]
    theirs = [figure("copy", 10.0, 10.0, 10.0)]
    pair = bench.Pair([f.arm for f in ours], [f.arm for f in theirs], bench.COPY, 3.0)
    assert pair.share([*ours, *theirs]) == pytest.approx(0.75)


def test_a_kernel_that_cannot_be_timed_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm = figure("x", 1.0).arm

    def broken() -> bench.Pair:
        raise RuntimeError("no such\ninstruction")

    rows = {"good": bench.Row(lambda: bench.Pair([arm], [arm], bench.CUBLAS)),
            "bad": bench.Row(broken)}  # fmt: skip
    monkeypatch.setattr(bench, "ROWS", rows)
    monkeypatch.setattr(
        quantising, "timed", lambda *_: [figure("ours", 2.0, 2.0), figure("theirs", 1.0, 1.0)]
    )
    found = bench.measured(["bad", "good"], 2)
    assert found["speeds"]["good"] == {"share": 0.5, "of": "cuBLAS", "microseconds": 2.0}
    assert found["failed"] == {"bad": "RuntimeError: no such instruction"}
    assert bench.lines_of(found)[-1] == "not timed: bad: RuntimeError: no such instruction"
    assert json.loads(json.dumps(found)) == found


def test_every_target_has_rows_and_hopper_has_all() -> None:
    for target in TARGETS:
        assert [name for name, row in bench.ROWS.items() if target in row.targets]
    assert all(SM90A.name in row.targets for row in bench.ROWS.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
