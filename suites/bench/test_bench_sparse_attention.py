"""The bench of sparse attention: problems, rows, targets, and that it refuses without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.suites.bench import bench_sparse_attention as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure

if TYPE_CHECKING:
    from degarble.kernels.attention.problem import AttentionProblem


def figure(problem: AttentionProblem, microseconds: float) -> Figure:
    arm = Arm("an arm", problem.gathered_bytes, 1, lambda: None, ())
    return Figure(arm, (microseconds,))


def test_a_row_counts_operations_and_bytes() -> None:
    problem = bench.decode("fp8", 64, 64)
    assert problem.operations == 4 * 64 * 64 * 1152 * 512
    row = bench.Row(figure(problem, 27.6), problem)
    assert round(row.teraflops) == 350
    assert "| 350 | 2.00 |" in row.line(figure(problem, 55.2))


def test_every_cache_has_room() -> None:
    for problem in (bench.prefill("nvfp4", 100, 64), bench.decode("bf16", 3, 128)):
        assert all(each.pages.slots >= each.width for each in problem.lists)


@pytest.mark.parametrize(
    ("prefill", "speed", "share", "status"),
    [(450, 350, 0.1, 0), (450, 349, 0.7, 0), (449, 350, 0.7, 1), (450, 349, 0.69, 1)],
)
def test_targets(
    capsys: pytest.CaptureFixture[str], prefill: int, speed: int, share: float, status: int
) -> None:
    decoded = {"fp8, 64 heads": speed, "fp8, 64 heads share": share}
    assert bench.verdict({"bf16, 64 heads": prefill}, decoded) == status
    assert bool(capsys.readouterr().out) == bool(status)


def test_torch_version_is_the_formula() -> None:
    from degarble.suites.kernels.attention import attention_checks as checks  # noqa: PLC0415

    case = checks.Case(tokens=2, heads=3, near=9, far=20, entry="bf16", gaps=0.0, pages=(3, 2))
    given = checks.drawn(case, "cpu")
    keys = [*zip(given.slots, given.caches, strict=True)]
    out = bench.torch_attention(case.problem, given.q, given.sink, keys)
    assert torch.allclose(out.double(), checks.formula(case, given)[0], atol=2e-3, rtol=0.02)


def test_a_missing_triton_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda _name: None)
    assert "triton is not installed" in bench.why_not_triton()


@pytest.mark.h200
def test_triton_version_has_the_numbers_of_torch() -> None:
    assert not bench.why_not_triton()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--rounds", "1"]) == 2
    assert "REFUSED" in capsys.readouterr().err
