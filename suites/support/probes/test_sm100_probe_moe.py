"""The first minute of grouped experts on a B200: parts compile, judgement distinguishes faults.

The host model replaces a B200; tests marked b200 have never run.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from degarble.harness.base.errors import InvalidArgument, MissingDevice, UnknownName
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.moe import problem as moe
from degarble.kernels.runtime import targets
from degarble.kernels.runtime.compiling import cubin_facts
from degarble.suites.kernels import sm100_model, tcgen05_words
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import sm100_moe_model as model
from degarble.suites.support.probes import sm100_moe_first_minute as first_minute
from degarble.suites.support.probes.sm100_first_minute import in_a_process, judged

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FORM = moe.forms_of(first_minute.REQUANTISED.problem, "sm_100a")[0]
# Boxes of rows and of experts, instructions, reads and writes of tensor memory, codes written.
COUNTED = (
    "cp.async.bulk.tensor.2d.shared",
    "cp.async.bulk.tensor.3d.shared",
    "tcgen05.mma",
    "tcgen05.ld.",
    "tcgen05.st.",
    "st.global.v4.b32",
)
LAST_QUICK = 4  # step
COUNTS = {"load": (2, 2, 0, 0, 0, 0), "requantise": (0, 0, 0, 4, 4, 4)}


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.suites.support.probes.sm100_probe_moe")


@pytest.mark.slow
@pytest.mark.parametrize("part", COUNTS)
def test_a_part_has_its_own_role_alone(kernels: ModuleType, part: str) -> None:
    kernel = kernels.compile_part(part, FORM, checks.SETTINGS)
    assert tuple(kernel.ptx.count(name) for name in COUNTED) == COUNTS[part]
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills


def test_refuses_by_name(kernels: ModuleType) -> None:
    with pytest.raises(UnknownName, match="Did you mean load"):
        kernels.compile_part("lode", FORM, checks.SETTINGS)
    for extents in ((128, 288, 64, 2), (128, 256, 1056, 2)):
        with pytest.raises(InvalidArgument, match="one tile, and 4 stages"):
            kernels.launch(None, FORM, extents, ())


# ---- order and judgement -------------------------------------------------------------------------


def test_steps_need_one_thing_more_each_time() -> None:
    assert list(first_minute.BY_NAME) == [
        "rows",
        "load",
        "requantise",
        "one tile",
        "two groups",
        "jagged groups",
        "pipeline wrap",
        "full",
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if i > LAST_QUICK else [])
        for i, name in enumerate(first_minute.BY_NAME)
    ],
)
def test_what_is_right_passes_every_step(name: str) -> None:
    step = first_minute.BY_NAME[name]
    assert not judged(step, first_minute.HostModel())


def more(by: int) -> Callable[..., Any]:
    return lambda true, *given: true(*given) + by


def expert_before(true: Any, tile: Any, form: Any) -> Any:
    *place, expert = tile
    return true((*place, max(expert - 1, 0)), form)


def halves_changed(true: Any, block: Any, numbers: Any, *rest: Any) -> Any:
    return true(block, numbers.roll(numbers.shape[1] // 2, 1), *rest)


def next_pair(true: Any, row: Any, block: Any, blocks: Any) -> Any:
    return true(row, block, blocks) ^ 1


def next_piece(true: Any, block: Any, numbers: Any, place: Any, stored: int) -> int:
    first, column, warp = place
    found: int = true(block, numbers, (first, column + 1, warp), stored)
    return found


def first_expert(true: Any, *given: Any) -> Any:
    return [(row, column, 0) for row, column, _ in true(*given)]


def first_warp_alone(true: Any, block: Any, warp: int, tiles: Any, leaving: Any) -> Any:
    return true(block, warp, tiles if warp != 1 else [], leaving)


def same_parity(_true: Any, turn: Any) -> None:
    turn.at = (turn.at + 1) % turn.stages


def left_out(true: Any, case: Any, given: Any, *rest: Any) -> Any:
    return true(case, given._replace(shared=None), *rest)


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "bytes expected": (facts, "transaction_bytes", more(16), "load"),
    "expert before": (tensor_memory, "tiles_of_boxes", expert_before, "load"),
    "gate and up changed": (model.Block, "gated", halves_changed, "requantise"),
    "pairs of blocks exchanged": (moe, "codes_at", next_pair, "requantise"),
    "next piece": (model.Block, "put_pieces", next_piece, "one tile"),
    "descriptor": (tcgen05_words, "operand_word", more(1 << 32), "one tile"),
    "one expert for all": (model, "tiles_of", first_expert, "two groups"),
    "a warp left out": (model.Block, "leave", first_warp_alone, "requantise"),
    "parity": (sm100_model.Turn, "advance", same_parity, "two groups"),
    "shared expert left out": (model, "combined", left_out, "full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_localised(name: str) -> None:
    place, function, instead, step = FAULTS[name]
    true = getattr(place, function)
    with mock.patch.object(place, function, lambda *given, **named: instead(true, *given, **named)):
        failure = first_minute.first_failure(first_minute.HostModel())
    assert failure is not None
    assert failure[0] == step, failure


def test_refuses_where_there_is_no_b200(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_minute, "target_of_device", lambda: targets.SM90A)
    with pytest.raises(MissingDevice, match="Run it on a B200"):
        first_minute.Gpu()
    for given, expected in (([], "sm_100a"), (["one tyle"], "Did you mean one tile")):
        monkeypatch.setattr(sys, "argv", ["first_minute", *given])
        assert first_minute.main() == 2
        assert expected in capsys.readouterr().out


@pytest.mark.b200
@pytest.mark.parametrize("step", first_minute.STEPS, ids=lambda step: step.name.replace(" ", "_"))
def test_first_minute(step: Any) -> None:
    command = (sys.executable, "-m", first_minute.MODULE, step.name)
    assert not in_a_process(step.name, command), step.proves
