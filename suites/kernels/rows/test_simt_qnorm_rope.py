"""Norming and turning query heads: compiled for every target, refusals, on an H200 every bit."""

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
from degarble.kernels.rows.problem import HeadsForm, HeadsProblem
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.rows import head_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 500, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_qnorm_rope")


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    kernel = kernels.compile_form(HeadsForm(target.name), CompileSettings())
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 40, facts  # six thread blocks of eight warps fit beside each other
    assert unstated_roundings(kernel.ptx) == ()
    assert len(fused_instructions(kernel.ptx)) == 14  # of the sum of squares, nothing else


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = HeadsProblem(2, 3, 5)
    x = torch.zeros(2, 3, 512, dtype=torch.bfloat16)
    turns, positions = torch.zeros(5, 64), torch.zeros(2, dtype=torch.int64)
    for error, name, operands, out in (
        (DtypeMismatch, "heads", (x.float(), turns, positions), None),
        (ShapeMismatch, "heads", (x[:1], turns, positions), None),
        (LayoutMismatch, "strides of heads", (x.mT.contiguous().mT, turns, positions), None),
        (ShapeMismatch, "turns", (x, turns[:, :32], positions), None),
        (DtypeMismatch, "turns", (x, turns.bfloat16(), positions), None),
        (DtypeMismatch, "positions", (x, turns, positions.int()), None),
        (ShapeMismatch, "normed heads", (x, turns, positions), x[:1]),
        (InvalidArgument, "one CUDA device", (x, turns, positions), None),
    ):
        with pytest.raises(error, match=name):
            kernels.qnorm_rope(*operands, problem, checks.SETTINGS, out=out)


def test_a_wrong_bit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = checks.Case("norm", 3, 2)
    out = checks.by_definition(case)
    monkeypatch.setattr(checks, "on_device", lambda _case: out)
    assert not checks.mismatch(case)
    out.view(torch.int16)[-1, -1, -1] ^= 1
    assert "1 of" in checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases("norm"), ids=lambda case: case.name.replace(" ", "-"))
def test_every_bit_is_that_of_the_stated_order(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_heads(seed: int) -> None:
    found = checks.fuzzed("norm", seed, AT_ONCE)
    wrong = [why for case in found if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal_and_the_result_may_lie_where_the_heads_were() -> None:
    for case in checks.fuzzed("norm", 99, 10):
        first = checks.on_device(case)
        assert torch.equal(first.view(torch.int16), checks.on_device(case).view(torch.int16))
        x, positions = case.values.cuda(), case.positions.cuda()
        turns = plain.table_of_turns(checks.POSITIONS).cuda()
        checks.run(case, (x, turns, positions), x)
        assert torch.equal(x.view(torch.int16), first.view(torch.int16))


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data() -> None:
    assert not checks.replay_mismatch(checks.Case("norm", 33, 16, "wide"), range(3))
