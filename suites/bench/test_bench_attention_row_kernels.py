"""The bench of attention's row kernels: its arms, what misses a target, its refusal."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_attention_row_kernels as bench
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure


def figure(name: str, *microseconds: float) -> Figure:
    return Figure(Arm(name, 0, 1, lambda: None, ()), microseconds)


def test_arms_have_names_of_their_own_and_their_problems_bytes() -> None:
    found = bench.launches_of(8192, None)
    names = [name for name, _, _ in found]
    assert len(set(names)) == len(names) == 10 + 4 + 12 + 2 + 4
    assert [name for name, *_ in bench.chosen(found, ["mhc p"])] == [
        f"mhc {part}, {width}" for width in bench.WIDTHS for part in ("post", "project")
    ]
    sizes = {name: size for name, size, _ in found}
    assert sizes["kv_write fp8"] == 8192 * (1024 + 8 + 8 + 256 + 584)
    assert sizes["kv_read fp8-v32"] == 8192 * (4 + 656 + 1152)
    assert sizes["mhc post, 7168"] == 8192 * (16 + 64 + 9 * 2 * 7168)


def test_what_misses_its_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [figure("empty node", 1.0, 1.0), figure("kv_write", 2.0, 2.4)]
    assert bench.verdict({"kv_write": 0.81}, nodes) == 0
    assert capsys.readouterr().out == ""
    assert bench.verdict({"kv_write": 0.79}, nodes) == 1
    assert "0.790 of copy bandwidth" in capsys.readouterr().out
    assert bench.verdict({}, [nodes[0], figure("mhc all", 2.6, 2.7)]) == 1
    assert "mhc all: 2.65 empty nodes" in capsys.readouterr().out
    assert bench.node_row(nodes[1], nodes[0]) == "| kv_write | 2.20 | 2.20 |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
