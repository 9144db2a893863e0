"""The shared expert on Hopper: refusals, and on an H200 what its kernels make one by one."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, LayoutMismatch, ShapeMismatch
from degarble.harness.formats.scalar_ops import ue8m0_decode
from degarble.references import elementary
from degarble.suites.kernels.moe import moe_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

SHAPES = ((1, 4096, 2048), (130, 7168, 3072), (37, 256, 256))
NORM_ALLOWED = 0.05  # of FP8 with 128 values a scale, twice: 3 mantissa bits round at 2**-4


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_shared_expert")


def fp8_weights(kernels: ModuleType, hidden: int, width: int, scales: str, device: str) -> Any:
    generator = torch.Generator(device).manual_seed(hidden + width)

    def codes(n: int, k: int) -> torch.Tensor:
        made = torch.randn(n, k, generator=generator, device=device)
        return made.to(torch.float8_e4m3fn)

    def of_blocks(n: int, k: int) -> torch.Tensor:
        shape = (n // 128, k // 128)
        made = torch.randint(116, 120, shape, generator=generator, device=device)
        return made.to(torch.uint8) if scales == "ue8m0" else ue8m0_decode(made) * 1.37

    sides = ((2 * width, hidden), (hidden, width))
    first, second = ((codes(*side), of_blocks(*side)) for side in sides)
    return kernels.Fp8Weights(*first, *second)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = kernels.problem_of(4, 256, 128, 10.0)
    x, weights = (
        torch.zeros(4, 256, dtype=torch.bfloat16),
        fp8_weights(kernels, 256, 128, "float32", "cpu"),
    )
    run, settings = kernels.shared_expert_fp8, checks.SETTINGS
    for error, name, values in (
        (DtypeMismatch, "x", x.float()),
        (ShapeMismatch, "x", x[:3]),
        (LayoutMismatch, "strides of x", x.T.contiguous().T),
    ):
        with pytest.raises(error, match=name):
            run(values, weights, problem, settings)
    with pytest.raises(ShapeMismatch, match="hidden and width of an FP8 expert"):
        run(x, weights, replace(problem, width=96), settings)
    case = checks.Case(replace(problem, hidden=64))
    given = checks.given_of(case, "cpu")
    two = replace(case.problem, experts=2, routed=2, chosen=2)
    with pytest.raises(ShapeMismatch, match="experts of a shared expert"):
        kernels.shared_expert_nvfp4(given.x, given.weights, two, settings)
    w13 = given.weights.w13._replace(codes=given.weights.w13.codes[:, :1])
    broken = given.weights._replace(w13=w13)
    with pytest.raises(ShapeMismatch, match="codes of w13"):
        kernels.shared_expert_nvfp4(given.x, broken, case.problem, settings)


@pytest.mark.h200
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_one_kernel_after_the_other(
    kernels: ModuleType, shape: tuple[int, int, int]
) -> None:
    case = checks.Case(kernels.problem_of(*shape, 10.0), seed=2)
    given = checks.given_of(case)
    got = kernels.shared_expert_nvfp4(given.x, given.weights, case.problem, checks.SETTINGS)
    slots = torch.arange(shape[0], device="cuda")
    want = checks.wanted(case, given, 0, slots)[2]
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_near_the_exact_expert(
    kernels: ModuleType, shape: tuple[int, int, int], scales: str
) -> None:
    tokens, hidden, width = shape
    weights = fp8_weights(kernels, hidden, width, scales, "cuda")
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    problem = kernels.problem_of(*shape, 10.0)
    got = kernels.shared_expert_fp8(x, weights, problem, checks.SETTINGS)
    want = exact(x, weights, 10.0)
    assert float((got.double() - want).norm() / want.norm()) < NORM_ALLOWED
    halves = weights.w13.view(2, width, hidden).flip(0).reshape(2 * width, hidden)
    changed = kernels.shared_expert_fp8(
        x, weights._replace(w13=halves.contiguous()), problem, checks.SETTINGS
    )
    assert float((changed.double() - want).norm() / want.norm()) > NORM_ALLOWED


def exact(x: torch.Tensor, weights: Any, limit: float) -> torch.Tensor:
    """The expert in float64, without rounding an activation."""

    def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        of_blocks = ue8m0_decode(scales.int()) if scales.dtype is torch.uint8 else scales
        wide = of_blocks.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.double() * wide

    gate, up = (x.double() @ values(*weights[:2]).T).chunk(2, 1)
    return elementary.swiglu(gate, up, limit) @ values(*weights[2:]).T
