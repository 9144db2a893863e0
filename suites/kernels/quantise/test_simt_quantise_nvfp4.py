"""The quantising kernel: compiled for every target, refusals, and on an H200 every byte."""

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
)
from degarble.kernels.primitives.quantise_problem import (
    LAYOUTS,
    SOURCES,
    SWIGLU,
    QuantiseProblem,
    choose_form,
    registers_allowed,
    resident_blocks,
)
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import SM90A, SM100A, TARGETS, Target
from degarble.suites.kernels.quantise import quantise_checks as checks

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 400, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.quantise.simt_quantise_nvfp4")


def require_sound(kernels: ModuleType, problem: QuantiseProblem, target: Target) -> None:
    form = choose_form(problem, target.name)
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {target.name}\n" in kernel.ptx
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= registers_allowed(resident_blocks(form)), facts
    assert facts.shared_bytes <= 1024, facts
    assert unstated_roundings(kernel.ptx) == ()
    # One addition a value rounds it to a code, one belongs to SwiGLU; nothing else is contracted.
    fused = 16 * (not target.converts_e2m1) + 16 * (problem.source == SWIGLU.name)
    assert len(fused_instructions(kernel.ptx)) == fused
    assert ("cvt.rn.satfinite.e2m1x2.f32" in kernel.ptx) is target.converts_e2m1
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, QuantiseProblem(1, 16), target)
    require_sound(kernels, QuantiseProblem(1, 16, source=SWIGLU.name, limit=10.0), target)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_form_compiles(
    kernels: ModuleType, target: Target, layout: str, source: str, experts: int
) -> None:
    for keeps_values in (False, True):
        problem = QuantiseProblem(1, 16, layout, source, experts=experts, keeps_values=keeps_values)
        require_sound(kernels, problem, target)


def test_extents_are_no_part_of_the_kernel(kernels: ModuleType) -> None:
    forms = {choose_form(QuantiseProblem(m, k), "sm_90a") for m in (0, 1, 999) for k in (16, 7168)}
    assert len(forms) == 1
    (form,) = forms
    first = kernels.compile_form(form, CompileSettings())
    assert kernels.compile_form(form, CompileSettings()) is first


def test_the_second_process_takes_it_from_disk(kernels: ModuleType, tmp_path: Path) -> None:
    settings = CompileSettings(cache_folder=tmp_path)
    form = choose_form(QuantiseProblem(1, 16), "sm_90a")
    compiled = [kernels.compile_form.__wrapped__(form, settings) for _ in range(2)]
    assert [kernel.from_cache for kernel in compiled] == [False, True]
    other = kernels.compile_form(choose_form(QuantiseProblem(1, 16, "8x4"), "sm_90a"), settings)
    assert not other.from_cache


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem, scale = QuantiseProblem(4, 32), torch.ones(1)
    x = torch.zeros(4, 32, dtype=torch.bfloat16)

    def run(values: torch.Tensor, scale: torch.Tensor = scale, **more: object) -> None:
        kernels.quantise_nvfp4(values, scale, problem, CompileSettings(), **more)

    with pytest.raises(DtypeMismatch, match="values"):
        run(x.float())
    with pytest.raises(ShapeMismatch, match="values"):
        run(x[:3])
    with pytest.raises(LayoutMismatch, match="strides of values"):
        run(torch.zeros(32, 4, dtype=torch.bfloat16).T)
    with pytest.raises(LayoutMismatch, match="address of values"):
        run(torch.zeros(129, dtype=torch.bfloat16)[1:].view(4, 32))
    with pytest.raises(DtypeMismatch, match="decode_scale"):
        run(x, scale.double())
    with pytest.raises(ShapeMismatch, match="decode_scale"):
        run(x, torch.ones(2))
    with pytest.raises(InvalidArgument, match="offsets"):
        run(x, offsets_E=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        run(x)


def test_refuses_outputs_that_do_not_fit(kernels: ModuleType) -> None:
    problem, scale = QuantiseProblem(4, 32, experts=2), torch.ones(2)
    x, offsets = torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    out = kernels.empty_outputs(problem, x.device)
    wrong = (
        (DtypeMismatch, "codes", out._replace(codes=out.codes.to(torch.int8))),
        (ShapeMismatch, "codes", out._replace(codes=out.codes[:, :8])),
        (ShapeMismatch, "scales", out._replace(scales=out.scales[1:])),
        (InvalidArgument, "values to write", out._replace(values=x)),
    )
    for error, name, output in wrong:
        with pytest.raises(error, match=name):
            kernels.quantise_nvfp4(
                x, scale, problem, CompileSettings(), offsets_E=offsets, out=output
            )
    for bad in (offsets.long(), offsets[1:], None):
        with pytest.raises((DtypeMismatch, ShapeMismatch, InvalidArgument), match="offsets"):
            kernels.quantise_nvfp4(x, scale, problem, CompileSettings(), offsets_E=bad)


def test_nothing_is_launched_for_no_rows(kernels: ModuleType) -> None:
    out = kernels.empty_outputs(QuantiseProblem(0, 32), torch.device("cpu"))
    assert [tuple(t.shape) for t in out[:2]] == [(0, 16), (0,)]


def as_on_device(case: checks.Case) -> object:
    """What the kernel has to give, made by the definition."""
    codes, scales = checks.by_definition(case, case.values)
    return import_module("degarble.kernels.quantise.simt_quantise_nvfp4").QuantisedRows(
        codes, scales, None
    )


@pytest.mark.parametrize("place", ["codes", "scales"])
def test_a_wrong_bit_and_an_unwritten_byte_are_detected(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = checks.Case(QuantiseProblem(5, 80), "blocks")
    out = as_on_device(case)
    monkeypatch.setattr(checks, "on_device", lambda _case: out)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    assert not checks.mismatch(case)
    flat = getattr(out, place).view(-1)
    for damage in (lambda byte: byte ^ 1, lambda _byte: checks.POISON):
        kept = flat[-1].clone()  # the last scale byte is padding
        flat[-1] = damage(kept)
        assert f"{place}: 1 of" in checks.mismatch(case)
        flat[-1] = kept


def test_cases_have_names_of_their_own_and_fuzzed_ones_differ() -> None:
    names = [case.name for case in checks.cases()]
    assert len(set(names)) == len(names)
    drawn = checks.fuzzed(1, 20)
    assert drawn == checks.fuzzed(1, 20) != checks.fuzzed(2, 20)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_every_byte_is_that_of_the_definition(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal_bit_for_bit() -> None:
    for case in checks.fuzzed(99, 20):
        first, second = checks.on_device(case), checks.on_device(case)
        for one, other in zip(first[:2], second[:2], strict=True):
            assert torch.equal(one, other), case.name


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("source", SOURCES)
def test_a_graph_replays_on_changed_data(kernels: ModuleType, source: str) -> None:
    problem = QuantiseProblem(257, 1056, source=source, limit=10.0 if source == "swiglu" else None)
    cases = [checks.Case(problem, "blocks", seed=seed) for seed in range(4)]
    x, scale = torch.empty_like(cases[0].values.cuda()), torch.empty(1).cuda()
    out = checks.poisoned(problem)

    def run(into: object) -> None:
        kernels.quantise_nvfp4(x, scale, problem, checks.SETTINGS, out=into)

    run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    for case in cases:
        x.copy_(case.values)
        scale.copy_(case.decode_scales)
        for tensor in out[:2]:
            tensor.fill_(checks.POISON)
        graph.replay()
        want = checks.on_device(case)
        torch.cuda.synchronize()
        assert torch.equal(out.codes, want.codes)
        assert torch.equal(out.scales, want.scales)


@pytest.mark.h200
@pytest.mark.b200
def test_the_fused_form_gives_what_two_launches_give(kernels: ModuleType) -> None:
    problem = QuantiseProblem(333, 2048, source=SWIGLU.name, limit=10.0, keeps_values=True)
    case = checks.Case(problem, "blocks", "one", seed=5)
    fused = checks.on_device(case)
    again = replace(problem, source="values", limit=None, keeps_values=False)
    plain = kernels.quantise_nvfp4(
        fused.values, case.decode_scales.cuda(), again, checks.SETTINGS, out=checks.poisoned(again)
    )
    assert torch.equal(plain.codes, fused.codes)
    assert torch.equal(plain.scales, fused.scales)


def test_targets_are_those_that_the_table_of_conversions_knows() -> None:
    assert (SM90A.converts_e2m1, SM100A.converts_e2m1) == (False, True)
