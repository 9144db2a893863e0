"""The first minute on a B200: its parts compile, its order and its judgement distinguish faults.

The host model replaces a B200; tests marked b200 have never run.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice, ShapeMismatch, UnknownName
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.runtime import targets
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts
from degarble.kernels.runtime.kernel import LaunchContext
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_model, tcgen05_words
from degarble.suites.support.probes import sm100_executors as executors
from degarble.suites.support.probes import sm100_first_minute as first_minute

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FORM = first_minute.FORMS[128]
# Boxes, matrix instructions, copies of scales, reads and writes of tensor memory, stores by TMA.
COUNTED = (
    "cp.async.bulk.tensor.2d.shared",
    "tcgen05.mma",
    "tcgen05.cp",
    "tcgen05.ld.",
    "tcgen05.st.",
    "cp.async.bulk.tensor.2d.global",
)
COUNTS = {
    "load": (4, 0, 0, 0, 0, 0),
    "multiply": (0, 4, 8, 2, 0, 0),
    "store": (0, 0, 0, 2, 2, 2),
}


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.suites.support.probes.sm100_probe_gemm")


@pytest.mark.parametrize("part", COUNTS)
def test_a_part_has_its_own_role_alone(kernels: ModuleType, part: str) -> None:
    kernel = kernels.compile_part(part, FORM, CompileSettings())
    assert tuple(kernel.ptx.count(name) for name in COUNTED) == COUNTS[part]
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills


@pytest.mark.slow
@pytest.mark.parametrize("part", COUNTS)
def test_a_part_of_two_together_has_its_own_role_alone(part: str) -> None:
    kernels = import_module("degarble.suites.support.probes.sm100_probe_pair")
    kernel = kernels.compile_part(part, first_minute.PAIRS[128], CompileSettings())
    assert tuple(kernel.ptx.count(name) for name in COUNTED) == COUNTS[part]
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills
    # The first one reads, or fills and clears, the other one's stages: by operand of both.
    far = {"load": (4, 0), "multiply": (2, 4 + 2), "store": (0, 0)}
    found = tuple(kernel.ptx.count(f"{way}.shared::cluster.v4") for way in ("ld", "st"))
    assert found == far[part]
    assert kernel.ptx.count("barrier.cluster.arrive;") == (4 if part == "store" else 1)


def test_refuses_by_name(kernels: ModuleType) -> None:
    with pytest.raises(UnknownName, match="Did you mean load"):
        kernels.compile_part("lode", FORM, CompileSettings())
    for extents in ((129, 128, 64), (128, 136, 64)):
        with pytest.raises(ShapeMismatch, match="within one tile"):
            kernels.launch(None, FORM, GemmProblem(*extents, "nvfp4", "e4m3"), ())
    with pytest.raises(InvalidArgument, match="K = 1536"):
        kernels.launch(None, FORM, GemmProblem(128, 128, 1536, "nvfp4", "e4m3"), ())


# ---- order and judgement -------------------------------------------------------------------------


def test_steps_need_one_thing_more_each_time() -> None:
    assert [step.name for step in first_minute.STEPS] == [
        "load only",
        "multiply only",
        "store only",
        "one tile",
        "two tiles",
        "pipeline wrap",
        "full",
        "few rows",
        "pair: load only",
        "pair: multiply only",
        "pair: store only",
        "pair: one stage",
        "pair: two tiles",
        "pair: pipeline wrap",
        "pair: full",
    ]
    assert first_minute.STEPS[first_minute.PLAIN - 1].name == "full"


def test_what_is_right_passes_every_step() -> None:
    plain = first_minute.STEPS[: first_minute.PLAIN]
    assert first_minute.first_failure(executors.HostModel(), plain) is None


@pytest.mark.slow
def test_what_is_right_passes_the_steps_of_other_forms() -> None:
    others = first_minute.STEPS[first_minute.PLAIN :]
    assert first_minute.first_failure(executors.HostModel(), others) is None


def more(by: int) -> Callable[..., Any]:
    return lambda true, *given: true(*given) + by


def other_rows_of_b(true: Any, tile: Any, form: Any) -> Any:
    a, b, *scales = true(tile, form)
    return a, b + 1, *scales


def never_begins(true: Any, *given: Any, begins: bool) -> None:
    true(*given, begins=begins and False)


def next_piece(true: Any, block: Any, numbers: Any, piece: Any, buffer: int) -> None:
    true(block, numbers, (piece[0], piece[1] + 1), buffer)


def unscaled(true: Any, block: Any, tiles: Any, scale: Any) -> Any:
    return true(block, tiles, torch.ones_like(scale))


def first_tile(true: Any, *given: Any) -> Any:
    return [(0, 0) for _ in true(*given)]


def pairs_of_scale_tiles(true: Any, tile: Any, form: Any) -> Any:
    found = list(true(tile, form))
    return [*found[:3], *(each // 2 * 2 + i for i, each in enumerate(found[3:]))]


def same_parity(_true: Any, turn: Any) -> None:
    turn.at = (turn.at + 1) % turn.stages


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "bytes expected": (facts, "transaction_bytes", more(16), "load only"),
    "other rows of B": (tensor_memory, "tiles_of_boxes", other_rows_of_b, "load only"),
    "columns": (tcgen05_words, "block_scaled_word", more(-1 << 17), "multiply only"),
    "distance of cores": (tcgen05_words, "operand_word", more(1 << 32), "multiply only"),
    "sums not begun": (sm100_model.Block, "multiply_stage", never_begins, "multiply only"),
    "scales beyond K": (
        tensor_memory,
        "end_of_scales",
        lambda _true, *_given: (0, 0),
        "multiply only",
    ),
    "next piece": (sm100_model.Block, "put", next_piece, "store only"),
    "tensor scales left out": (sm100_model.Block, "store", unscaled, "one tile"),
    "scales not skipped": (
        tensor_memory,
        "columns_skipped",
        lambda _true, *_given: 0,
        "two tiles",
    ),
    "first tile again": (sm100_model, "tiles_of", first_tile, "two tiles"),
    "parity": (sm100_model.Turn, "advance", same_parity, "pipeline wrap"),
    "pairs of scale tiles": (tensor_memory, "tiles_of_boxes", pairs_of_scale_tiles, "full"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_localised(name: str) -> None:
    place, function, instead, step = FAULTS[name]
    true = getattr(place, function)
    with mock.patch.object(place, function, lambda *given, **named: instead(true, *given, **named)):
        plain = first_minute.STEPS[: first_minute.PLAIN]
        failure = first_minute.first_failure(executors.HostModel(), plain)
    assert failure is not None
    assert failure[0] == step, failure


def brings_same_half(true: Any, block: Any, boxes: Any, *given: Any) -> None:
    a, b, *scales = boxes
    together = block.form.tactic.together
    true(block, (a, b // together * together, *scales), *given)


def first_rows(true: Any, block: Any, numbers: Any, piece: Any, buffer: int) -> None:
    true(block, numbers, (piece[0] // block.form.tactic.together, piece[1]), buffer)


def upright(true: Any, block: Any, numbers: Any, piece: Any, buffer: int) -> None:
    true(block, numbers.T, piece, buffer)


def own_scales_alone(true: Any, block: Any, *given: Any) -> None:
    with mock.patch.object(block, "other", None):
        true(block, *given)


FAULTS_OF_OTHER_FORMS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a piece not turned": (sm100_model.Block, "put_below", upright, "few rows"),
    "the same half of B": (sm100_model.Block, "bring", brings_same_half, "pair: load only"),
    "rows of one": (
        tcgen05_words,
        "block_scaled_word",
        lambda true, *given: true(128, given[1]),
        "pair: multiply only",
    ),
    "stores the first one's rows": (sm100_model.Block, "put", first_rows, "pair: store only"),
    "sums given back by one": (
        tensor_memory,
        "arrivals_of_sums",
        lambda _true, _form: tensor_memory.threads_that_store(),
        "pair: two tiles",
    ),
    "parity": (sm100_model.Turn, "advance", same_parity, "pair: two tiles"),
    "own scales cleared alone": (
        sm100_model.Block,
        "clear_beyond",
        own_scales_alone,
        "pair: multiply only",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS_OF_OTHER_FORMS)
def test_a_planted_fault_of_other_forms_is_localised(name: str) -> None:
    place, function, instead, step = FAULTS_OF_OTHER_FORMS[name]
    true = getattr(place, function)
    others = list(first_minute.STEPS[first_minute.PLAIN :])
    if name == "parity":  # few rows wrap as well
        others = others[1:]
    with mock.patch.object(place, function, lambda *given: instead(true, *given)):
        failure = first_minute.first_failure(executors.HostModel(), others)
    assert failure is not None
    assert failure[0] == step, failure


def test_other_bits_of_two_together_are_undecided_and_wrong_ones_are_not() -> None:
    case = first_minute.case_of(first_minute.PAIRS[64], (256, 64, 64))
    drawn = blackwell.drawn(case)
    scale = drawn.given[0].decode_scale * drawn.given[1].decode_scale
    apart = (drawn.sums * (1 + 2**-18) * scale).bfloat16()
    assert blackwell.difference(case, apart, drawn.want)
    assert first_minute.undecided(case, apart) == first_minute.UNDECIDED
    assert not first_minute.undecided(case, apart * 1.1)
    alone = first_minute.case_of(first_minute.FORMS[64], (256, 64, 64))
    assert not first_minute.undecided(alone, apart)


def test_one_cluster_is_all_that_a_launch_knows_of() -> None:
    form = first_minute.PAIRS[256]
    problem = GemmProblem(256, 776, 64, "nvfp4", "e4m3")
    with executors.one_cluster(form):
        processors = LaunchContext(problem, form, None, 0, {}).processors
        assert facts.grid(problem, form.tactic, processors) == (2, 1, 1)
    assert facts.grid(problem, form.tactic, 148) == (2, 1, 4)


def test_a_step_that_never_ends_costs_its_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_minute, "SECONDS", 0.3)
    command = (sys.executable, "-c", "while True: pass")
    assert first_minute.in_a_process("one tile", command) == first_minute.UNDER_WAY
    monkeypatch.setattr(first_minute, "SECONDS", 60)
    assert first_minute.in_a_process("x", (sys.executable, "-c", "exit('wrong')")) == "wrong"
    assert not first_minute.in_a_process("x", (sys.executable, "-c", ""))


def test_refuses_where_there_is_no_b200(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executors, "target_of_device", lambda: targets.SM90A)
    with pytest.raises(MissingDevice, match="Run it on a B200"):
        executors.Gpu()
    for given, expected in (([], "sm_100a"), (["one tyle"], "Did you mean one tile")):
        monkeypatch.setattr(sys, "argv", ["first_minute", *given])
        assert first_minute.main() == 2
        assert expected in capsys.readouterr().out


@pytest.mark.b200
@pytest.mark.parametrize("step", first_minute.STEPS, ids=lambda step: step.name.replace(" ", "_"))
def test_first_minute(step: first_minute.Step) -> None:
    why = first_minute.in_a_process(step.name)
    if first_minute.UNDECIDED in why:
        pytest.xfail(why)
    assert not why, step.proves
