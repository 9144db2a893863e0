"""Reading from the latent cache: compiled for every target, refusals, on an H200 every bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.primitives.kv_problem import ENTRIES, Pages, ReadForm, ReadProblem
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import cache_checks as checks
from degarble.suites.kernels import latent_checks as plain

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 500, 50
OTHERS = [name for name in ENTRIES if name not in {"fp8", "nvfp4"}]


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.cache.simt_kv_read")


@each_target
@pytest.mark.parametrize(
    "entry", ["fp8", "nvfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target, entry: str
) -> None:
    kernel = kernels.compile_form(ReadForm(entry, target.name), CompileSettings())
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 40, facts
    assert unstated_roundings(kernel.ptx) == fused_instructions(kernel.ptx) == ()


def test_refuses_by_name(kernels: ModuleType) -> None:
    pages = Pages("fp8", 2, 3)
    problem = ReadProblem(4, pages)
    indices = torch.zeros(4, dtype=torch.int32)
    cache = torch.zeros(3, pages.stride, dtype=torch.uint8)
    out = torch.zeros(4, 512, dtype=torch.bfloat16)
    for error, name, operands, rows in (
        (DtypeMismatch, "indices", (indices.long(), cache), out),
        (ShapeMismatch, "indices", (indices[1:], cache), out),
        (ShapeMismatch, "cache", (indices, cache[1:]), out),
        (DtypeMismatch, "cache", (indices, cache.to(torch.int8)), out),
        (DtypeMismatch, "rows", (indices, cache), out.half()),
        (LayoutMismatch, "strides of rows", (indices, cache), out.T.contiguous().T),
        (InvalidArgument, "one CUDA device", (indices, cache), None),
    ):
        with pytest.raises(error, match=name):
            kernels.kv_read(*operands, problem, checks.SETTINGS, out=rows)


def test_a_wrong_bit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in ENTRIES:
        case = checks.Case(checks.write_problem(entry, 6, 3), "wide")
        monkeypatch.setattr(
            checks,
            "read_on_device",
            lambda cache, asked, problem: checks.read_by_definition(cache, asked, problem.pages),
        )
        assert not checks.read_mismatch(case)

        def broken(cache: torch.Tensor, asked: torch.Tensor, problem: ReadProblem) -> torch.Tensor:
            out = checks.read_by_definition(cache, asked, problem.pages)
            out.view(torch.int16)[-1, -1] ^= 1
            return out

        monkeypatch.setattr(checks, "read_on_device", broken)
        assert "1 of" in checks.read_mismatch(case)


def test_gaps_are_zeros_and_numbers_beyond_the_cache_are_nan() -> None:
    case = checks.Case(checks.write_problem("fp8", 5, 2))
    pages = case.problem.pages
    asked = torch.tensor([-1, pages.slots, int(case.slots[0])], dtype=torch.int32)
    out = checks.read_by_definition(checks.by_definition(case), asked, pages)
    assert not out[0].any()
    assert out[1].isnan().all()
    assert plain.steps_apart(out[2, 448:], case.rows()[0, 448:]) == 0


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_every_row_is_that_of_the_definition(case: checks.Case) -> None:
    assert not checks.read_mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_caches(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.read_mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_byte_of_a_foreign_cache_decodes(entry: str) -> None:
    """Bytes that no writer makes: codes and scales that are NaN, subnormal or the largest."""
    pages = Pages(entry, 64, 9)
    generator = torch.Generator().manual_seed(1)
    cache = torch.randint(256, (9, pages.stride), generator=generator, dtype=torch.uint8)
    asked = torch.randperm(pages.slots, generator=generator).to(torch.int32)
    got = checks.read_on_device(cache, asked, ReadProblem(len(asked), pages))
    assert torch.equal(plain.bits(got), plain.bits(checks.read_by_definition(cache, asked, pages)))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_graph_replays_on_changed_indices(kernels: ModuleType, entry: str) -> None:
    case = checks.Case(checks.write_problem(entry, 131), "wide")
    pages, cache = case.problem.pages, checks.by_definition(case)
    problem = ReadProblem(200, pages)
    asked, on_gpu = torch.zeros(200, dtype=torch.int32, device="cuda"), cache.cuda()
    out = kernels.kv_read(asked, on_gpu, problem, checks.SETTINGS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.kv_read(asked, on_gpu, problem, checks.SETTINGS, out=out)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(-1, pages.slots, (200,), generator=generator).to(torch.int32)
        asked.copy_(chosen)
        out.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        want = checks.read_by_definition(cache, chosen, pages)
        assert torch.equal(plain.bits(out.cpu()), plain.bits(want))
