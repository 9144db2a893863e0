"""What a GEMM's entry point refuses, by name, before anything is launched."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.common import gemm_contract as contract
from degarble.kernels.common.gemm_problem import GemmProblem
from degarble.kernels.common.targets import SM90A

X = torch.zeros(4, 32, dtype=torch.bfloat16)


def test_refuses_what_would_be_misread() -> None:
    def require(tensor: torch.Tensor) -> None:
        contract.require("A", tensor, torch.bfloat16, (4, 32), contract.TMA_ALIGNMENT)

    require(X)
    with pytest.raises(DtypeMismatch, match=r"A = torch\.float32"):
        require(X.float())
    with pytest.raises(ShapeMismatch, match=r"A = \(3, 32\)"):
        require(X[:3])
    with pytest.raises(LayoutMismatch, match="strides of A"):
        require(torch.zeros(32, 4, dtype=torch.bfloat16).T)
    with pytest.raises(LayoutMismatch, match="address of A"):
        require(torch.zeros(129, dtype=torch.bfloat16)[1:].view(4, 32))


def test_refuses_places_and_outputs() -> None:
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        contract.require_place((X, X), SM90A)
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        contract.require_place((X, X.to("meta")), SM90A)
    problem = GemmProblem(4, 32, 8)
    contract.require_output(problem, contract.empty_output(problem, X.device))
    with pytest.raises(DtypeMismatch, match="D = "):
        contract.require_output(problem, X.float())
