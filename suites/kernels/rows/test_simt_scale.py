"""Scaling by one factor: compiled for every target, refusals, on an H200 every bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.rows.problem import SCALE_KINDS, ScaleForm, ScaleProblem
from degarble.kernels.runtime.compiling import cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels.row_checks import SETTINGS, bits_differ, spread

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}
FACTORS = (1.0, 8192**-0.5, -3.0, 2.0**-5)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_scale")


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("source", SCALE_KINDS)
def test_compiles_without_spills(kernels: ModuleType, target: Target, source: str) -> None:
    for out in SCALE_KINDS:
        kernel = kernels.compile_form(ScaleForm(source, out, target.name), SETTINGS)
        (facts,) = cubin_facts(kernel.cubin)
        assert not facts.spills, facts
        assert unstated_roundings(kernel.ptx) == ()


def test_refuses_by_name(kernels: ModuleType) -> None:
    x = torch.zeros(3, 4)
    for error, name, values, out in (
        (DtypeMismatch, "values", x.bfloat16(), None),
        (ShapeMismatch, "values", x[:2], None),
        (ShapeMismatch, "values", x.T, None),
        (ShapeMismatch, "scaled", x, x[:2]),
        (InvalidArgument, "one CUDA device", x, None),
    ):
        with pytest.raises(error, match=name):
            kernels.scale(values, ScaleProblem(12, 2.0), SETTINGS, out=out)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("source", SCALE_KINDS)
@pytest.mark.parametrize("out", SCALE_KINDS)
def test_every_bit_is_one_product_and_one_rounding(
    kernels: ModuleType, factor: float, source: str, out: str
) -> None:
    for rows, kind in ((1, "ordinary"), (37, "special"), (64, "rows"), (16, "tiny")):
        x = spread((rows, 64), kind, rows).float().cuda()
        x = (x * 1.0009765).to(TORCH[source]) if kind != "special" else x.to(TORCH[source])
        made = kernels.scale(x, ScaleProblem(x.numel(), factor, source, out), SETTINGS)
        want = (x.float() * torch.tensor(factor, device="cuda")).to(TORCH[out])
        assert not bits_differ(f"{kind} by {factor}", made, want)


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data(kernels: ModuleType) -> None:
    x, problem = torch.randn(16, 64, device="cuda"), ScaleProblem(1024, 8192**-0.5)
    out = torch.empty_like(x)
    kernels.scale(x, problem, SETTINGS, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.scale(x, problem, SETTINGS, out=out)
    x.normal_()
    graph.replay()
    assert torch.equal(out, x * torch.tensor(8192**-0.5, device="cuda"))
