"""Turning attention's outputs back: compiled for every target, refusals, on an H200 every bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.rows.problem import BackForm, BackProblem
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
each_kind = pytest.mark.parametrize("kind", checks.KINDS[1:])
FUZZED, AT_ONCE = 500, 50
CASES = [case for kind in checks.KINDS[1:] for case in checks.cases(kind)]


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_inverse_rope")


@each_target
@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target, in_place: bool
) -> None:
    kernel = kernels.compile_form(BackForm(in_place, target.name), CompileSettings())
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 32, facts  # every thread that a processor can hold
    assert unstated_roundings(kernel.ptx) == fused_instructions(kernel.ptx) == ()


def test_refuses_by_name(kernels: ModuleType) -> None:
    x = torch.zeros(2, 3, 512, dtype=torch.bfloat16)
    turns, positions = torch.zeros(5, 64), torch.zeros(2, dtype=torch.int64)
    for error, name, operands, out, in_place in (
        (DtypeMismatch, "heads", (x.half(), turns, positions), None, False),
        (ShapeMismatch, "heads", (x[:, :2], turns, positions), None, True),
        (ShapeMismatch, "turns", (x, turns[1:], positions), None, False),
        (ShapeMismatch, "positions", (x, turns, positions[1:]), None, False),
        (DtypeMismatch, "turned heads", (x, turns, positions), x.float(), False),
        (InvalidArgument, "turned heads", (x, turns, positions), x.clone(), True),
        (InvalidArgument, "one CUDA device", (x, turns, positions), None, True),
    ):
        problem = BackProblem(2, 3, 5, in_place=in_place)
        with pytest.raises(error, match=name):
            kernels.inverse_rope(*operands, problem, checks.SETTINGS, out=out)


@each_kind
def test_a_wrong_bit_is_detected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = checks.Case(kind, 3, 2)
    out = checks.by_definition(case)
    monkeypatch.setattr(checks, "on_device", lambda _case: out)
    assert not checks.mismatch(case)
    out.view(torch.int16)[0, 0, 0] ^= 1
    assert "1 of" in checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_every_bit_is_that_of_the_stated_order(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@each_kind
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE // 2))
def test_fuzzed_heads(kind: str, seed: int) -> None:
    found = checks.fuzzed(kind, seed, AT_ONCE)
    wrong = [why for case in found if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
@each_kind
def test_a_graph_replays_on_changed_data(kind: str) -> None:
    assert not checks.replay_mismatch(checks.Case(kind, 33, 16, "wide"), range(3))


@pytest.mark.h200
@pytest.mark.b200
def test_turning_back_undoes_turning() -> None:
    case = checks.Case("back", 60, 16)
    turned = checks.on_device(checks.Case("norm", 60, 16))
    x, positions = turned, checks.Case("norm", 60, 16).positions.cuda()
    turns = plain.table_of_turns(checks.POSITIONS).cuda()
    back = checks.run(case, (x, turns, positions), torch.empty_like(x)).float().cpu()
    want = plain.normed_rows(case.values.reshape(-1, 512), None, 1e-6).view_as(back)
    assert float((back - want).abs().max()) <= 2.0**-6 * float(want.abs().max())
