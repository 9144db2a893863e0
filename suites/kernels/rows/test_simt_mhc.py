"""mHC without its projection: compiled for every target, refusals, near the references."""

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
from degarble.kernels.rows.mhc_problem import MIX_PARTS, MixForm, MixProblem
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels import mhc_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 500, 50
OTHERS = [part for part in MIX_PARTS if part not in {"all", "post"}]
REGISTERS = {"all": 56, "coefficients": 56, "collapse": 32, "head": 32, "post": 64}
# Three to a weighted sum of four, three to an exponential, one to a logit; of Sinkhorn four to each
# of four rows and columns.
SINKHORN = 2 * 16
FUSED = {
    "all": 3 * 8 + 36 + SINKHORN,
    "coefficients": 24 + SINKHORN,
    "collapse": 3 * 8,
    "head": 3 * 8 + 16,
    "post": 128,
}


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_mhc")


@each_target
@pytest.mark.parametrize(
    "part", ["all", "post", *(pytest.param(part, marks=pytest.mark.slow) for part in OTHERS)]
)
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target, part: str
) -> None:
    kernel = kernels.compile_form(MixForm(part, target.name), CompileSettings())
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= REGISTERS[part], facts
    assert facts.shared_bytes == 0, facts
    assert unstated_roundings(kernel.ptx) == ()
    assert len(fused_instructions(kernel.ptx)) == FUSED[part]


def test_refuses_by_name(kernels: ModuleType) -> None:
    case = checks.Case(MixProblem(3, 16, "post"))
    good = kernels.MixOperands(**checks.given(case), out=case.streams.clone())
    for error, name, changed in (
        (DtypeMismatch, "streams", {"streams": case.streams.float()}),
        (ShapeMismatch, "streams", {"streams": case.streams[:, :2]}),
        (LayoutMismatch, "strides of mix", {"mix": good.mix.mT}),
        (DtypeMismatch, "post", {"post": good.post.bfloat16()}),
        (InvalidArgument, "layer", {"layer": None}),
        (InvalidArgument, "pre", {"pre": good.post}),
        (ShapeMismatch, "out", {"out": case.layer}),
        (InvalidArgument, "one CUDA device", {}),
    ):
        with pytest.raises(error, match=name):
            kernels.mhc(good._replace(**changed), case.problem, checks.SETTINGS)


@pytest.mark.parametrize("part", MIX_PARTS)
def test_every_part_knows_its_tensors(kernels: ModuleType, part: str) -> None:
    case = checks.Case(MixProblem(3, 16, part))
    kinds, inputs = kernels.wanted(case.problem), checks.given(case)
    made = kernels.KERNEL.allocate(case.problem, torch.device("cpu"))
    kernels.KERNEL.require(case.problem, inputs | made)
    stated = checks.by_stated_order(case)
    for name in kinds.keys() - inputs.keys():
        got = made[name]
        assert (got.dtype, tuple(got.shape)) == kinds[name]
        assert (stated[name].dtype, tuple(stated[name].shape)) == kinds[name]


@pytest.mark.parametrize("part", MIX_PARTS)
def test_errors_are_detected(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = checks.Case(MixProblem(3, 16, part))
    out = checks.by_stated_order(case)
    monkeypatch.setattr(checks, "on_device", lambda _case: out)
    assert not checks.mismatch(case)
    for tensor in (out[name] for name in out if name != "pre"):
        kept = tensor.view(-1)[-1].clone()
        tensor.view(-1)[-1] = kept * 1.01 + 1e-4
        assert checks.mismatch(case)
        tensor.view(-1)[-1] = kept


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_parts_give_what_they_have_to(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_parts(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("tokens", checks.LENGTHS)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_fused_is_unfused_bit_for_bit(tokens: int, sharpness: float) -> None:
    for width in (8, 1032, 4096):
        case = checks.Case(MixProblem(tokens, width), sharpness=sharpness, seed=tokens)
        assert not checks.fusion_mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal_and_other_tokens_change_no_token() -> None:
    for case in checks.fuzzed(99, 20):
        first, second = checks.on_device(case), checks.on_device(case)
        for name in first:
            assert torch.equal(first[name], second[name]), case.name
    whole = checks.Case(MixProblem(200, 512))
    alone = checks.Case(MixProblem(1, 512))
    out = checks.on_device(whole)
    alone.__dict__["weights"] = whole.weights
    for token in (0, 77, 199):
        here = slice(token, token + 1)
        alone.__dict__["streams"] = whole.streams[here]
        alone.__dict__["projected"] = tuple(each[here] for each in whole.projected)
        for name, tensor in checks.on_device(alone).items():
            assert torch.equal(tensor, out[name][here])


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("part", MIX_PARTS)
def test_a_graph_replays_on_changed_data(kernels: ModuleType, part: str) -> None:
    cases = [checks.Case(MixProblem(131, 1032, part), seed=seed) for seed in range(3)]
    inputs = {name: tensor.cuda() for name, tensor in checks.given(cases[0]).items()}
    tensors = kernels.mhc(kernels.MixOperands(**inputs), cases[0].problem, checks.SETTINGS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.mhc(tensors, cases[0].problem, checks.SETTINGS)
    written = [name for name in kernels.wanted(cases[0].problem) if name not in inputs]
    for case in cases:
        for name, tensor in checks.given(case).items():
            inputs[name].copy_(tensor)
        for name in written:
            getattr(tensors, name).fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        want = checks.on_device(case)
        for name in written:
            assert torch.equal(getattr(tensors, name).cpu(), want[name])


@pytest.mark.h200
@pytest.mark.b200
def test_a_nan_is_detected_everywhere_it_reaches(kernels: ModuleType) -> None:
    case = checks.Case(MixProblem(4, 64))
    inputs = {name: tensor.cuda() for name, tensor in checks.given(case).items()}
    inputs["products"][1] = torch.nan
    made = kernels.mhc(kernels.MixOperands(**inputs), case.problem, checks.SETTINGS)
    for tensor in (made.out, made.post, made.mix):
        assert bool(tensor[1].isnan().all())
        assert not bool(tensor[[0, 2, 3]].isnan().any())


@pytest.mark.h200
@pytest.mark.b200
def test_streams_may_be_written_where_they_were_read(kernels: ModuleType) -> None:
    case = checks.Case(MixProblem(100, 4096, "post"))
    inputs = {name: tensor.cuda() for name, tensor in checks.given(case).items()}
    kernels.mhc(kernels.MixOperands(**inputs, out=inputs["streams"]), case.problem, checks.SETTINGS)
    want = checks.by_stated_order(case)["out"]
    assert torch.equal(plain.bits(inputs["streams"].cpu()), plain.bits(want))
