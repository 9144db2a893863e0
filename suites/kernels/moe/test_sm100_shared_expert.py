"""The shared expert on Blackwell: refusals; what a B200 would be asked. Nothing here ran on one."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, LayoutMismatch, MissingDevice, ShapeMismatch
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe.test_sm90_shared_expert import (
    NORM_ALLOWED,
    SHAPES,
    exact,
    fp8_weights,
)

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

TARGET = "sm_100a"


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm100_shared_expert")


@pytest.fixture
def hopper() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_shared_expert")


def test_fp8_refuses_by_name(
    kernels: ModuleType, hopper: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = hopper.problem_of(4, 256, 128, 10.0)
    x, weights = (
        torch.zeros(4, 256, dtype=torch.bfloat16),
        fp8_weights(hopper, 256, 128, "float32", "cpu"),
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
    for error, name, other in (
        (ShapeMismatch, "codes of w13", weights._replace(w13=weights.w13[:128])),
        (DtypeMismatch, "codes of w2", weights._replace(w2=weights.w2.view(torch.uint8))),
    ):
        with pytest.raises(error, match=name):
            run(x, other, problem, settings)
    monkeypatch.setattr(kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(kernels.contract, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        run(x, weights, problem, settings)


def test_nvfp4_refuses_by_name(kernels: ModuleType, hopper: ModuleType) -> None:
    case = checks.Case(hopper.problem_of(4, 64, 128, 10.0), target=TARGET)
    given = checks.given_of(case, "cpu")
    two = replace(case.problem, experts=2, routed=2, chosen=2)
    run, settings = kernels.shared_expert_nvfp4, checks.SETTINGS
    with pytest.raises(ShapeMismatch, match="experts of a shared expert"):
        run(given.x, given.weights, two, settings)
    w13 = given.weights.w13._replace(codes=given.weights.w13.codes[:, :1])
    broken = given.weights._replace(w13=w13)
    with pytest.raises(ShapeMismatch, match="codes of w13"):
        run(given.x, broken, case.problem, settings)


# ---- on a B200 -----------------------------------------------------------------------------------


@pytest.mark.b200
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_one_kernel_after_the_other(
    kernels: ModuleType, hopper: ModuleType, shape: tuple[int, int, int]
) -> None:
    case = checks.Case(hopper.problem_of(*shape, 10.0), seed=2, target=TARGET)
    given = checks.given_of(case)
    got = kernels.shared_expert_nvfp4(given.x, given.weights, case.problem, checks.SETTINGS)
    slots = torch.arange(shape[0], device="cuda")
    want = checks.wanted(case, given, 0, slots)[2]
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.b200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_near_the_exact_expert(
    kernels: ModuleType, hopper: ModuleType, shape: tuple[int, int, int], scales: str
) -> None:
    tokens, hidden, width = shape
    weights = fp8_weights(hopper, hidden, width, scales, "cuda")
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    problem = hopper.problem_of(*shape, 10.0)
    got = kernels.shared_expert_fp8(x, weights, problem, checks.SETTINGS)
    want = exact(x, weights, 10.0)
    assert float((got.double() - want).norm() / want.norm()) < NORM_ALLOWED
    halves = weights.w13.view(2, width, hidden).flip(0).reshape(2 * width, hidden)
    changed = kernels.shared_expert_fp8(
        x, weights._replace(w13=halves.contiguous()), problem, checks.SETTINGS
    )
    assert float((changed.double() - want).norm() / want.norm()) > NORM_ALLOWED
