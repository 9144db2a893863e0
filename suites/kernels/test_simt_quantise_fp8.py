"""Quantising to FP8: machine code, refusals, and on a GPU every byte of the canonical recipe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.block_formats import FP8_1X128_F32, FP8_1X128_UE8M0
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.quantise import quantise
from degarble.kernels.common import fp8_quantise_problem as facts
from degarble.kernels.common.fp8_quantise_problem import Fp8Form, Fp8Problem
from degarble.kernels.common.machine_code import cubin_facts, unstated_roundings
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.targets import TARGETS

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FORMATS = {"float32": FP8_1X128_F32, "ue8m0": FP8_1X128_UE8M0}
SHAPES = ((1, 128), (3, 256), (7, 2048), (33, 7168), (1000, 1536))


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.simt_quantise_fp8")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scales", facts.SCALES)
def test_machine_code_is_sound(kernels: ModuleType, scales: str, target: str) -> None:
    kernel = kernels.compile_form(Fp8Form(scales, "swiglu", 10.0, target), CompileSettings())
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills
    assert not unstated_roundings(kernel.ptx)


def test_refuses_by_name(kernels: ModuleType) -> None:
    for shape in ((1, 96), (1, 0), (-1, 128), (1 << 31, 128)):
        with pytest.raises(ShapeMismatch, match="matrix to quantise"):
            Fp8Problem(*shape)
    with pytest.raises(UnknownName, match="format of block scales"):
        Fp8Problem(1, 128, "e4m3")
    with pytest.raises(UnknownName, match="source of a kernel"):
        Fp8Problem(1, 128, source="gelu")
    with pytest.raises(InvalidArgument, match="limit"):
        Fp8Problem(1, 128, limit=10.0)
    problem, x = Fp8Problem(4, 128), torch.zeros(4, 128, dtype=torch.bfloat16)
    for error, name, values in (
        (DtypeMismatch, "values", x.float()),
        (ShapeMismatch, "values", x[:3]),
        (LayoutMismatch, "strides of values", x.T.contiguous().T),
        (InvalidArgument, "one CUDA device", x),
    ):
        with pytest.raises(error, match=name):
            kernels.quantise_fp8(values, problem, CompileSettings())
    out = kernels.empty_outputs(Fp8Problem(4, 128, "ue8m0"), x.device)
    with pytest.raises(DtypeMismatch, match="scales"):
        kernels.quantise_fp8(x, problem, CompileSettings(), out=out)


def drawn(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    x *= torch.exp2(torch.randint(-30, 20, (rows, 1), generator=generator, device="cuda"))
    x[::3, ::5] = 0
    x[1::4, :128] = 0  # blocks of nothing
    return x.bfloat16()


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("scales", facts.SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_is_canonical(kernels: ModuleType, shape: tuple[int, int], scales: str) -> None:
    x = drawn(*shape)
    problem = Fp8Problem(*shape, scales)
    out = kernels.empty_outputs(problem, x.device)
    for each in out:
        each.view(torch.uint8).fill_(0xFF)
    made = kernels.quantise_fp8(x, problem, CompileSettings(), out=out)
    want = quantise(x.float(), FORMATS[scales], CANONICAL)
    assert torch.equal(made.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(made.scales.view(torch.uint8), want.block_scale.view(torch.uint8))
    assert not torch.equal(made.codes.view(torch.uint8).roll(1, 1), want.codes.view(torch.uint8))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("limit", [None, 10.0])
def test_swiglu_is_that_of_the_nvfp4_kernel(kernels: ModuleType, limit: float | None) -> None:
    from degarble.kernels.common.quantise_problem import QuantiseProblem  # noqa: PLC0415

    other = import_module("degarble.kernels.simt_quantise_nvfp4")
    halves = (torch.randn(65, 1024, device="cuda") * 6).bfloat16()
    problem = QuantiseProblem(65, 512, source="swiglu", limit=limit, keeps_values=True)
    one = torch.ones(1, device="cuda")
    values = other.quantise_nvfp4(halves, one, problem, CompileSettings()).values
    for scales in facts.SCALES:
        given = Fp8Problem(65, 512, scales, "swiglu", limit)
        fused = kernels.quantise_fp8(halves, given, CompileSettings())
        plain = kernels.quantise_fp8(values, Fp8Problem(65, 512, scales), CompileSettings())
        for a, b in zip(fused, plain, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
