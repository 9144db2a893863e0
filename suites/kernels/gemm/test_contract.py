"""What a GEMM's entry point refuses beyond what every kernel does: its GPU and its D."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    MissingDevice,
    ShapeMismatch,
)
from degarble.kernels.gemm import contract
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.runtime.targets import SM90A, SM100A

X = torch.zeros(4, 32, dtype=torch.bfloat16)


def test_refuses_places() -> None:
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        contract.require_place((X, X), SM90A)
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        contract.require_place((X, X.to("meta")), SM90A)


def test_refuses_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(contract, "target_of_device", lambda _device: SM100A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        contract.require_place((X,), SM90A)
    assert contract.require_place((X,), SM100A) == 0


def test_refuses_outputs() -> None:
    problem = GemmProblem(4, 32, 8)
    contract.require_output(problem, contract.empty_output(problem, X.device))
    with pytest.raises(DtypeMismatch, match="D = "):
        contract.require_output(problem, X.float())
    with pytest.raises(ShapeMismatch, match="D = "):
        contract.require_output(problem, X[:3])
