"""V3.2's rows of 576 in the kernels of the cache: machine code, refusals; on an H200 every byte."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.kernels.primitives import kv_problem as facts
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import Pages, ReadForm, ReadProblem, WriteForm
from degarble.kernels.runtime.compiling import cubin_facts, unstated_roundings
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels import cache_checks as checks
from degarble.suites.kernels import latent_checks as plain

pytestmark = pytest.mark.needs("cutlass")

WIDTH = rows.WITH_KEY
each_entry = pytest.mark.parametrize("entry", checks.WITH_KEY)


@pytest.mark.parametrize(
    ("entry", "target"),
    [
        pytest.param(entry, target, marks=pytest.mark.slow)
        for target in TARGETS
        for entry in checks.WITH_KEY
    ],
)
def test_compiles_without_spills_and_with_every_rounding_stated(entry: str, target: str) -> None:
    reading, writing = (import_module(module_of(f"simt_kv_{which}")) for which in ("read", "write"))
    kernels = [
        reading.compile_form(ReadForm(entry, target, WIDTH), checks.SETTINGS),
        *(
            writing.compile_form(
                WriteForm(entry, source, "bf16", "last", True, target, WIDTH), checks.SETTINGS
            )
            for source in facts.SOURCES
        ),
    ]
    for kernel in kernels:
        assert not any(code.spills for code in cubin_facts(kernel.cubin))
        assert unstated_roundings(kernel.ptx) == ()


def test_the_latent_is_normed_and_the_key_is_not() -> None:
    problem = checks.write_problem("bf16", 4, width=WIDTH)
    case = checks.Case(problem, "ordinary")
    larger = replace(case, spread="ordinary")
    larger.__dict__["values"] = case.values.clone()
    larger.values[:, : rows.WIDTH] *= 2
    assert torch.equal(larger.rows()[:, : rows.WIDTH], case.rows()[:, : rows.WIDTH])
    larger.values[:, rows.WIDTH :] *= 2
    assert torch.equal(larger.rows()[:, rows.WIDTH :], 2 * case.rows()[:, rows.WIDTH :])


def test_refuses_by_name() -> None:
    kernels = import_module("degarble.kernels.cache.simt_kv_write")
    case = checks.Case(checks.write_problem("fp8-v32", 3, width=WIDTH))
    wide = torch.ones(WIDTH, dtype=torch.bfloat16)
    for name, given in (("weight", (case.values, wide)), ("values", (case.values[:, :512], None))):
        weight = case.weight if given[1] is None else given[1]
        operands = kernels.WriteOperands(
            given[0].contiguous(), weight, case.turns, case.positions, case.slots
        )
        with pytest.raises(ShapeMismatch, match=name):
            kernels.kv_write(operands, case.cache(), case.problem, checks.SETTINGS)


@pytest.mark.h200
@pytest.mark.b200
@each_entry
def test_every_byte_of_a_foreign_cache_decodes(entry: str) -> None:
    """Bytes that no writer makes: scales that are negative, subnormal, infinite or NaN."""
    pages = Pages(entry, 64, 9, width=WIDTH)
    generator = torch.Generator().manual_seed(1)
    cache = torch.randint(256, (9, pages.stride), generator=generator, dtype=torch.uint8)
    asked = torch.randperm(pages.slots, generator=generator).to(torch.int32)
    got = checks.read_on_device(cache, asked, ReadProblem(len(asked), pages))
    want = checks.read_by_definition(cache, asked, pages)
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(plain.bits(got)[known], plain.bits(want)[known])
