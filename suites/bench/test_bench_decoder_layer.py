"""The bench of a layer's step: what a table says, and what it does without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.references.tiny.configs import TINY_V32
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.bench import bench_decoder_layer as bench
from degarble.suites.bench import bench_decoder_layer_v32
from degarble.suites.bench.bench_quantise_kernel import Arm, Figure

if TYPE_CHECKING:
    from types import ModuleType


def figure(microseconds: float) -> Figure:
    return Figure(Arm("any", 1, 1, lambda: None, ()), (microseconds,))


def test_kernels_are_summed_over_their_launches_and_compared_with_the_whole() -> None:
    names = ["one", "two", "one"]
    lines = bench.told(names, [figure(each) for each in (20.0, 4.0, 10.0, 2.0)])
    assert "| two | 1 | 10.0 | 62.5% |" in lines
    assert "| one | 2 | 6.0 | 37.5% |" in lines
    assert lines.index("| two | 1 | 10.0 | 62.5% |") < lines.index("| one | 2 | 6.0 | 37.5% |")
    assert lines[-1] == "| the whole step as a graph | 1 | 20.0 | 125.0% |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
@pytest.mark.parametrize("of", [bench, bench_decoder_layer_v32], ids=["v4", "v32"])
def test_refuses_without_a_gpu(of: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert of.main([]) == EXIT_REFUSED
    assert "NVIDIA GPU" in capsys.readouterr().err


def test_a_step_of_v32_launches_every_kernel_of_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At small widths, by stand-ins: the layers that are timed are layers that run."""
    small = replace(  # whole tiles of FP8
        TINY_V32, index_n_heads=8, q_lora_rank=128, moe_intermediate_size=128,
        intermediate_size=256,
    )  # fmt: skip
    for name, value in {"V3_2": small, "DEVICE": "cpu", "ENTRY": "bf16", "SETS": 1}.items():
        monkeypatch.setattr(bench_decoder_layer_v32, name, value)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench_decoder_layer_v32, "CONTEXT", 256)
    kernels: Any = Recording()
    every = bench.experts(128, 128, small.n_routed_experts)
    for recipe in bench.RECIPES:
        for block, size in zip(small.layers, ((2, 2), (1, 64)), strict=True):
            (step,) = bench_decoder_layer_v32.steps_of(kernels, block, size, (every, recipe))
            made = step.run()
            assert isinstance(made, tuple)
            assert all(each.isfinite().all() for each in made)
            names = {name for name, *_ in step.calls}
            assert {"simt_residual_norm", "simt_latent_query", "sm90_sparse_attention"} <= names


class Recording(StandIn):
    """Stand-ins that remember what they were handed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Any:
        self.calls.append((kernel, problem, dict(tensors)))
        return super()._run(kernel, problem, tensors)
