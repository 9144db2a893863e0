"""The bench of V3.2's attention: problems, the torch version, and that it refuses without a GPU."""

from __future__ import annotations

import pytest
import torch

from degarble.suites.bench import bench_latent_attention as bench
from degarble.suites.kernels import cache_checks
from degarble.suites.kernels.attention import attention_checks as checks


def test_problems_are_those_of_the_model() -> None:
    decode = bench.problem_of("decode", "fp8-v32", 64, 128)
    assert decode.operations == 2 * 64 * 128 * 2048 * 1088
    assert decode.gathered_bytes == 64 * 2048 * 656
    for mode in ("decode", "prefill"):
        problem = bench.problem_of(mode, "bf16", 3, 16)
        assert problem.window.pages.slots >= problem.window.width


@pytest.mark.needs("cutlass")
def test_drawn_entries_are_small_numbers() -> None:
    problem = bench.problem_of("prefill", "fp8-v32", 2, 8)
    operands = bench.drawn(problem, "cpu")
    pages, slots = problem.window.pages, torch.arange(5, dtype=torch.int32)
    rows = cache_checks.read_by_definition(operands["window_cache"], slots, pages)
    assert rows.isfinite().all()
    assert 0 < rows[:, :512].abs().amax() < 8


def test_torch_version_is_the_formula() -> None:
    case = checks.Case(tokens=2, heads=3, near=20, far=None, entry="bf16", gaps=0.0, key=576)
    given = checks.drawn(case, "cpu")
    keys = given.slots[0], given.caches[0]
    out = bench.torch_attention(case.problem, given.q, keys)
    assert torch.allclose(out.double(), checks.formula(case, given)[0], atol=2e-3, rtol=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--rounds", "1"]) == 2
    assert "REFUSED" in capsys.readouterr().err
