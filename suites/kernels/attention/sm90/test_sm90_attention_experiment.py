"""NVFP4 products of queries and keys: by name only; on an H200 those of rounded queries."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from degarble.kernels.attention import problem as facts
from degarble.references import rounding
from degarble.suites.kernels.attention import attention_checks as checks

CASE = checks.Case(tokens=3, heads=70, far=200, entry=facts.EXPERIMENT_ENTRY, seed=5)
ROOT = Path(__file__).parents[4]


def test_nothing_chooses_it() -> None:
    """The default is BF16, and no module outside of the kernels knows the other name."""
    assert CASE.problem.products == facts.PRODUCTS[0] == "bf16"
    told = [
        str(path.relative_to(ROOT))
        for folder in ("harness", "references", "reports")
        for path in (ROOT / folder).rglob("*.py")
        if facts.EXPERIMENT in path.read_text() or "problem.EXPERIMENT" in path.read_text()
    ]
    assert told == []


def test_products_of_nvfp4_numbers_are_exact_in_float32() -> None:
    """So BF16 operands and float32 sums are NVFP4's arithmetic, but for the order of sums."""
    code = torch.arange(16)
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[code % 8]
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = (e2m1.double()[:, None] * scales).flatten().unique()
    assert torch.equal(numbers.bfloat16().double(), numbers)
    products = numbers[:, None] * numbers
    assert torch.equal(products.float().double(), products)


@pytest.mark.h200
@pytest.mark.needs("cutlass")
@pytest.mark.parametrize("mode", facts.MODES)
def test_it_is_attention_over_rounded_queries(mode: str) -> None:
    kernels = import_module("degarble.kernels.attention.sm90_sparse_attention")
    case = replace(CASE, mode=mode)
    given = checks.drawn(case)
    rounded = rounding.through_nvfp4_row(given.q.cpu()).bfloat16().cuda()
    assert not torch.equal(rounded, given.q)
    operands = checks.operands_of(given)
    problem = replace(case.problem, products=facts.EXPERIMENT)
    made = kernels.sparse_attention(operands, problem, checks.SETTINGS)
    plain = kernels.sparse_attention(operands._replace(q=rounded), case.problem, checks.SETTINGS)
    assert torch.equal(made.out, plain.out)
    assert torch.equal(made.lse, plain.lse)
    wanted = checks.formula(case, replace(given, q=rounded))
    assert not checks.complaint(tuple(made), wanted)
    assert checks.complaint(tuple(made), checks.formula(case, given)), "BF16 queries differ"
