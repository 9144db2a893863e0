"""mHC's projection: compiled for every target, refusals, on an H200 exact or near float64."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.rows import mhc_problem as facts
from degarble.kernels.rows.mhc_problem import MixProblem, ProjectProblem, split_weight
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import mhc_checks
from degarble.suites.kernels.rows import mhc_project_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 500, 50
REGISTERS = 200  # two thread blocks of four warps beside each other


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_mhc_project")


@each_target
@pytest.mark.parametrize(
    "tokens", [facts.LEAST_TOKENS, pytest.param(facts.FEW_TOKENS, marks=pytest.mark.slow), 1 << 13]
)
@pytest.mark.parametrize("kind", ["layer", pytest.param("head", marks=pytest.mark.slow)])
def test_compiles_without_spills_and_multiplies_each_part_once(
    kernels: ModuleType, target: Target, tokens: int, kind: str
) -> None:
    form = facts.choose_form(ProjectProblem(tokens, 7168, kind), target.name)
    kernel = kernels.compile_form(form, CompileSettings())
    for found in cubin_facts(kernel.cubin):
        assert not found.local_bytes, found
        assert found.registers <= REGISTERS, found
    assert unstated_roundings(kernel.ptx) == ()
    # Three parts, four times sixteen values of a stage, for every tile of rows and of tokens.
    assert kernel.ptx.count("mma.sync") == 3 * 4 * form.tiles * form.tokens_of_warp // 16


def test_refuses_by_name(kernels: ModuleType) -> None:
    case = checks.Case(3, 16)
    streams, split = case.streams, split_weight(case.fn)
    for error, name, given in (
        (DtypeMismatch, "streams", (streams.float(), split)),
        (ShapeMismatch, "streams", (streams[:, :3], split)),
        (DtypeMismatch, "weight", (streams, case.fn)),
        (ShapeMismatch, "weight", (streams, split[:2])),
        (InvalidArgument, "one CUDA device", (streams, split)),
    ):
        with pytest.raises(error, match=name):
            kernels.mhc_project(*given, case.problem, checks.SETTINGS)
    weights = kernels.MhcWeights(split, torch.zeros(24), torch.ones(3))
    with pytest.raises(InvalidArgument, match="after a projection"):
        kernels.mhc_pre(streams, weights, MixProblem(3, 16, "post"), checks.SETTINGS)


def test_errors_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for spread in ("ordinary", "integers"):
        case = checks.Case(4, 64, spread=spread)
        products, squares, _ = checks.definition(case)
        made = [products.float(), squares.float()]
        monkeypatch.setattr(checks, "on_device", lambda _case, made=made: made)
        assert not checks.mismatch(case)
        made[0][2, 3] += 1e-4
        assert "1 of products, first [2, 3]" in checks.mismatch(case)
        made[0][2, 3] -= 1e-4
        made[1][1] = torch.nan
        assert "of squares, first [1]" in checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_products_and_squares(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_projections(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("kind", ["layer", "head"])
def test_repeats_and_other_tokens_change_no_bit(kind: str) -> None:
    many = checks.Case(checks.FEW + 70, 1032, kind, "wide")
    whole = checks.on_device(many)
    assert all(map(torch.equal, whole, checks.on_device(many)))
    for count in (1, 16, checks.LEAST, checks.LEAST + 1, 50, checks.FEW):
        fewer = replace(many, tokens=count)
        fewer.__dict__["streams"] = many.streams[-count:]
        fewer.__dict__["fn"] = many.fn
        assert all(map(torch.equal, checks.on_device(fewer), (each[-count:] for each in whole)))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("part", ["all", "head", "coefficients"])
@pytest.mark.parametrize("width", [256, 4096, 7168])
def test_in_one_call_it_is_the_parts_in_turn_and_near_the_references(
    kernels: ModuleType, part: str, width: int
) -> None:
    from degarble.kernels.rows import simt_mhc  # noqa: PLC0415  needs the DSL

    for tokens in (1, 130):
        case = mhc_checks.Case(MixProblem(tokens, width, part), seed=tokens)
        given = case.weights
        weights = kernels.MhcWeights(
            split_weight(given.fn).cuda(), given.base.cuda(), given.scale.cuda()
        )
        streams = case.streams.cuda()
        got = kernels.mhc_pre(streams, weights, case.problem, checks.SETTINGS)
        kind = "head" if part == "head" else "layer"
        projected = kernels.ProjectProblem(tokens, width, kind)
        found = kernels.mhc_project(streams, weights.split, projected, checks.SETTINGS)
        own = None if part == "coefficients" else streams
        products, squares = found
        mixing = simt_mhc.MixOperands(own, products, squares, weights.base, weights.scale)
        want = simt_mhc.mhc(mixing, case.problem, checks.SETTINGS)
        names = {"all": ("post", "mix", "out"), "head": ("out",)}.get(part, ("pre", "post", "mix"))
        made = {name: getattr(got, name).cpu() for name in names}
        for name in names:
            words = torch.int16 if name == "out" else torch.int32
            assert torch.equal(made[name].view(words), getattr(want, name).cpu().view(words))
        assert not mhc_checks.far_from_references(case, made)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("tokens", [3, checks.FEW + 5])
def test_a_graph_replays_on_changed_data(kernels: ModuleType, tokens: int) -> None:
    cases = [checks.Case(tokens, 264, seed=seed) for seed in range(3)]
    problem, split = cases[0].problem, split_weight(cases[0].fn).cuda()
    streams = cases[0].streams.cuda()
    out = kernels.empty_outputs(problem, torch.device("cuda"))
    kernels.mhc_project(streams, split, problem, checks.SETTINGS, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.mhc_project(streams, split, problem, checks.SETTINGS, out=out)
    for case in cases:
        streams.copy_(case.streams)
        for tensor in out:
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        case.__dict__["fn"] = cases[0].fn
        assert all(map(torch.equal, (out[1].cpu(), out[2].cpu()), checks.on_device(case)))
