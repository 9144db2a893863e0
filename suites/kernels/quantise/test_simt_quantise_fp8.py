"""Quantising to FP8: machine code, refusals, and on a GPU every byte of the canonical recipe."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import FP8_1X128_F32, FP8_1X128_UE8M0
from degarble.harness.formats.quantise import quantise
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.quantise_problem import Fp8Form, Fp8Problem
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FORMATS = {"float32": FP8_1X128_F32, "ue8m0": FP8_1X128_UE8M0}
SHAPES = ((1, 128), (3, 256), (7, 2048), (33, 7168), (1000, 1536))


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.quantise.simt_quantise_fp8")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scales", facts.SCALES)
def test_machine_code_is_sound(kernels: ModuleType, scales: str, target: str) -> None:
    for form in (
        Fp8Form(scales, "swiglu", 10.0, target),
        Fp8Form(scales, "values", None, target, 512),
    ):
        kernel = kernels.compile_form(form, CompileSettings())
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
    with pytest.raises(ShapeMismatch, match="values in front of which"):
        Fp8Problem(1, 640, turned=512, positions=9)
    with pytest.raises(ShapeMismatch, match="values in front of which"):
        Fp8Problem(1, 512, source="swiglu", turned=512, positions=9)
    with pytest.raises(ShapeMismatch, match="positions of the table"):
        Fp8Problem(1, 512, turned=512)
    problem, x = Fp8Problem(4, 128), torch.zeros(4, 128, dtype=torch.bfloat16)
    for error, name, values in (
        (DtypeMismatch, "values", x.float()),
        (ShapeMismatch, "values", x[:3]),
        (LayoutMismatch, "strides of values", x.T.contiguous().T),
        (InvalidArgument, "one CUDA device", x),
    ):
        with pytest.raises(error, match=name):
            kernels.quantise_fp8(values, problem, CompileSettings())
    turned = Fp8Problem(4, 128, turned=128, positions=5)
    turns = torch.zeros(5, 64), torch.zeros(4, dtype=torch.int64)
    for error, name, told, given in (
        (InvalidArgument, "turns", problem, turns),
        (InvalidArgument, "turns", turned, None),
        (ShapeMismatch, "turns", turned, (turns[0][:4], turns[1])),
        (DtypeMismatch, "positions", turned, (turns[0], turns[1].int())),
        (InvalidArgument, "one CUDA device", turned, turns),
    ):
        with pytest.raises(error, match=name):
            kernels.quantise_fp8(x, told, CompileSettings(), turns=given)
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
    from degarble.kernels.primitives.quantise_problem import QuantiseProblem  # noqa: PLC0415

    other = import_module("degarble.kernels.quantise.simt_quantise_nvfp4")
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


def test_sixteens_that_turn_are_the_last_of_a_head() -> None:
    for width in (128, 512):
        found = [facts.group_of(part, width) for part in range(2 * width // 16)]
        assert found[: width // 16] == list(range(4 - width // 16, 4))
        assert found[width // 16 :] == found[: width // 16]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("scales", facts.SCALES)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 8, 512), (7, 8, 128), (333, 16, 512)])
def test_heads_are_turned_back_first(
    kernels: ModuleType, tokens: int, heads: int, width: int, scales: str
) -> None:
    from degarble.kernels.rows.problem import BackProblem  # noqa: PLC0415

    rope = import_module("degarble.kernels.rows.simt_inverse_rope")
    values, known = drawn(tokens, heads * width), 50
    turns = torch.randn(known, 64, device="cuda")
    positions = torch.randint(known, (tokens,), device="cuda")
    positions[3:4] = known  # outside of the table: NaN
    back = BackProblem(tokens, heads, known, width=width)
    given = values.view(tokens, heads, width)
    turned = rope.inverse_rope(given, turns, positions, back, CompileSettings()).flatten(1)
    plain = Fp8Problem(tokens, heads * width, scales)
    want = kernels.quantise_fp8(turned, plain, CompileSettings())
    problem = replace(plain, turned=width, positions=known)
    made = kernels.quantise_fp8(values, problem, CompileSettings(), turns=(turns, positions))
    for a, b in zip(made, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    other = kernels.quantise_fp8(values, plain, CompileSettings())
    assert not torch.equal(made.codes.view(torch.uint8), other.codes.view(torch.uint8))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("fault", ["forth instead of back", "another sixteen", "another head"])
def test_planted_faults_of_turned_heads_are_caught(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    values, turns = drawn(33, 1024), torch.randn(9, 64, device="cuda")
    given = (turns, torch.randint(9, (33,), device="cuda"))
    problem = Fp8Problem(33, 1024, turned=512, positions=9)
    whole = kernels.quantise_fp8(values, problem, CompileSettings(), turns=given)
    if fault == "forth instead of back":
        true = kernels.turned_words
        monkeypatch.setattr(
            kernels, "turned_words", lambda numbers, turn, **_: true(numbers, turn, back=False)
        )
    else:
        step, of = (4 if fault == "another head" else 1), facts.group_of
        monkeypatch.setattr(facts, "group_of", lambda part, width: of(part + step, width))
    uncached = kernels.compile_form.__wrapped__
    monkeypatch.setitem(vars(kernels.KERNEL), "compile_form", uncached)
    made = kernels.quantise_fp8(values, problem, CompileSettings(), turns=given)
    assert not torch.equal(made.codes.view(torch.uint8), whole.codes.view(torch.uint8))
