"""RMSNorm and RMSNorm + quantise: compiled for every target, refusals, on an H200 every bit."""

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
from degarble.kernels.primitives.quantise_problem import LAYOUTS, QuantiseProblem
from degarble.kernels.rows.problem import (
    NORM_WEIGHTS,
    NormProblem,
    choose_norm_form,
    norm_threads_declared,
)
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import row_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 300, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_rmsnorm")


def require_sound(kernels: ModuleType, problem: NormProblem, target: Target) -> None:
    form = choose_norm_form(problem, target.name)
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {target.name}\n" in kernel.ptx
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 65_536 // norm_threads_declared(form) // 8 * 8, facts
    assert facts.shared_bytes <= 1024, facts
    assert unstated_roundings(kernel.ptx) == ()
    # 7 of each of 4 halves sum squares; rounding to a code takes one a value.
    of_codes = 32 if problem.layout and not target.converts_e2m1 else 0
    assert len(fused_instructions(kernel.ptx)) == 4 * 7 + of_codes


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, NormProblem(1, 7168), target)
    require_sound(kernels, NormProblem(1, 7168, layout="128x4"), target)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("columns", [512, 7168, 16_384])
@pytest.mark.parametrize("weight", NORM_WEIGHTS)
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_every_form_compiles(
    kernels: ModuleType, target: Target, columns: int, weight: str, layout: str | None
) -> None:
    for keeps_values in (False, True)[: 2 if layout else 1]:
        problem = NormProblem(1, columns, weight=weight, layout=layout, keeps_values=keeps_values)
        require_sound(kernels, problem, target)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = NormProblem(4, 64, layout="8x4")
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    scale, settings = torch.ones(1), CompileSettings()

    def run(values: torch.Tensor, of: torch.Tensor = weight, **more: object) -> None:
        kernels.rmsnorm(values, of, problem, settings, **{"decode_scale": scale, **more})

    for error, name, arguments in (
        (DtypeMismatch, "values", (x.float(),)),
        (ShapeMismatch, "values", (x[:3],)),
        (LayoutMismatch, "strides of values", (torch.zeros(64, 4, dtype=torch.bfloat16).T,)),
        (DtypeMismatch, "weight", (x, weight.float())),
        (ShapeMismatch, "weight", (x, weight[:32])),
        (InvalidArgument, "one CUDA device", (x,)),
    ):
        with pytest.raises(error, match=name):
            run(*arguments)
    with pytest.raises(InvalidArgument, match="decode_scale"):
        run(x, decode_scale=None)
    with pytest.raises(ShapeMismatch, match="decode_scale"):
        run(x, decode_scale=torch.ones(2))
    out = kernels.empty_outputs(problem, x.device)
    for error, name, wrong in (
        (DtypeMismatch, "codes", out._replace(codes=out.codes.to(torch.int8))),
        (ShapeMismatch, "scales", out._replace(scales=out.scales[1:])),
        (InvalidArgument, "normed values", out._replace(values=x)),
        (InvalidArgument, "codes", out._replace(codes=None)),
    ):
        with pytest.raises(error, match=name):
            run(x, out=wrong)


@pytest.mark.parametrize("place", ["values", "codes", "scales"])
def test_a_wrong_bit_and_an_unwritten_byte_are_detected(
    kernels: ModuleType, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = checks.NormCase(NormProblem(5, 80, layout="128x4", keeps_values=True))
    out = kernels.Normed(*checks.norm_by_definition(case, "cpu"))
    monkeypatch.setattr(checks, "norm_on_device", lambda _case: out)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    assert not checks.norm_mismatch(case)
    flat = getattr(out, place).view(torch.uint8).view(-1)
    for damage in (lambda byte: byte ^ 1, lambda _byte: checks.POISON):
        kept = flat[-1].clone()  # the last scale byte is padding
        flat[-1] = damage(kept)
        assert f"{place}: 1 of" in checks.norm_mismatch(case)
        flat[-1] = kept


def test_cases_have_names_of_their_own_and_fuzzed_ones_differ() -> None:
    names = [case.name + str(case.problem) for case in checks.norm_cases()]
    assert len(set(names)) == len(names)
    assert checks.fuzzed_norms(1, 20) == checks.fuzzed_norms(1, 20) != checks.fuzzed_norms(2, 20)


@pytest.mark.h200
@pytest.mark.b200
def test_every_bit_is_that_of_the_definition() -> None:
    wrong = [why for case in checks.norm_cases() if (why := checks.norm_mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    cases = checks.fuzzed_norms(seed, AT_ONCE)
    assert not [why for case in cases if (why := checks.norm_mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_those_that_two_launches_give(layout: str) -> None:
    quantiser = import_module("degarble.kernels.quantise.simt_quantise_nvfp4")
    for rows, columns, kind in ((8192, 7168, "ordinary"), (333, 4096, "rows"), (70, 512, "zeros")):
        problem = NormProblem(rows, columns, layout=layout)
        case = checks.NormCase(problem, kind, seed=5)
        fused = checks.norm_on_device(case)
        plain = checks.norm_on_device(replace(case, problem=replace(problem, layout=None)))
        again = QuantiseProblem(rows, columns, layout)
        assert case.decode_scale is not None
        assert plain.values is not None
        scale = case.decode_scale.cuda()
        two = quantiser.quantise_nvfp4(plain.values, scale, again, checks.SETTINGS)
        for mine, theirs in ((fused.codes, two.codes), (fused.scales, two.scales)):
            assert mine is not None
            assert torch.equal(mine, theirs)


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal_and_other_rows_change_nothing(kernels: ModuleType) -> None:
    for case in checks.fuzzed_norms(99, 10):
        first, second = checks.norm_on_device(case), checks.norm_on_device(case)
        for one, other in zip(first, second, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert not checks.bits_differ(case.name, one, other)
    case = checks.NormCase(NormProblem(64, 7168), "rows")
    whole = checks.norm_on_device(case).values
    assert whole is not None
    for row in (0, 1, 63):
        alone = kernels.rmsnorm(
            case.values[row : row + 1].cuda(),
            case.weight.cuda(),
            NormProblem(1, 7168),
            checks.SETTINGS,
        )
        assert torch.equal(alone.values[0], whole[row])


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("layout", [None, "128x4"])
def test_a_graph_replays_on_changed_data(kernels: ModuleType, layout: str | None) -> None:
    problem = NormProblem(257, 1040, layout=layout)
    cases = [checks.NormCase(problem, "rows", seed=seed) for seed in range(4)]
    x, weight = torch.empty_like(cases[0].values.cuda()), torch.empty_like(cases[0].weight.cuda())
    given = cases[0].decode_scale
    scale = None if given is None else given.cuda()
    out = checks.poisoned(problem)

    def run() -> None:
        kernels.rmsnorm(x, weight, problem, checks.SETTINGS, decode_scale=scale, out=out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        x.copy_(case.values)
        weight.copy_(case.weight)
        for tensor in out:
            if tensor is not None:
                tensor.view(torch.uint8).fill_(checks.POISON)
        graph.replay()
        for mine, theirs in zip(out, checks.norm_on_device(case), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert torch.equal(mine, theirs)
