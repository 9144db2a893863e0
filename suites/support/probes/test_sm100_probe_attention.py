"""Attention's first minute on a B200: parts compile, order and judgement distinguish faults.

The host model replaces a B200; tests marked b200 have never run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.kernels.attention import problem
from degarble.kernels.attention.problem import AttentionForm
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    package_root,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.kernels.attention import sm100_attention_model as model
from degarble.suites.kernels.attention import sm100_attention_stages as stages
from degarble.suites.kernels.attention import sm100_attention_table as table
from degarble.suites.kernels.attention.sm100_attention_stages import HostModel
from degarble.suites.support.probes import sm100_attention_minute as minute
from degarble.suites.support.probes.sm100_first_minute import in_a_process, judged

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

SETTINGS = CompileSettings()
FORM = AttentionForm("bf16", lengths=False, together=1, target="sm_100a")
OF_V32 = replace(FORM, entry="fp8-v32", width=576)
# Matrix instructions, reads and writes of tensor memory, copies from the cache.
COUNTED = ("tcgen05.mma.", "tcgen05.ld.", "tcgen05.st.", "cp.async.cg")
COUNTS = {"load": (0, 0, 0, 32), "multiply": (40, 5, 0, 16), "weigh": (0, 9, 16, 0)}


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.suites.support.probes.sm100_probe_attention")


@pytest.mark.slow
@pytest.mark.parametrize("part", COUNTS)
def test_a_part_has_its_own_role_alone(kernels: ModuleType, part: str) -> None:
    kernel = kernels.compile_part(part, FORM, SETTINGS)
    assert tuple(kernel.ptx.count(name) for name in COUNTED) == COUNTS[part]
    assert unstated_roundings(kernel.ptx) == ()
    (code,) = cubin_facts(kernel.cubin)
    assert code.registers <= problem.LAUNCH_REGISTERS
    of_v32 = kernels.compile_part(part, OF_V32, SETTINGS)
    assert of_v32.ptx != kernel.ptx


def test_refuses_by_name(kernels: ModuleType) -> None:
    with pytest.raises(UnknownName, match="Did you mean load"):
        kernels.compile_part("lode", FORM, SETTINGS)
    for case in (minute.alone(tokens=2), minute.alone(far=3), minute.alone(lengths=True)):
        with pytest.raises(InvalidArgument, match="problem of a part"):
            kernels.launch(None, case.problem, (None, None, None), None)


# ---- order and judgement -------------------------------------------------------------------------


def test_steps_need_one_thing_more_each_time() -> None:
    assert [step.name for step in minute.STEPS] == [
        "load only",
        "multiply only",
        "weigh only",
        "one tile",
        "two tiles",
        "pipeline wrap",
        "full",
        "scores: one stage",
        "scores: two",
        "scores: wrap",
        "scores: full",
    ]


@pytest.mark.parametrize("first", [pytest.param("roles", marks=pytest.mark.slow), "products"])
def test_what_is_right_passes_every_step(first: str) -> None:
    """Products as late as they may be, and as early."""
    assert minute.first_failure(HostModel(first)) is None


def test_late_tiles_rarely_have_a_new_peak() -> None:
    """A factor of one is left out, and no bit changes."""
    numbers = stages.numbers_of(minute.alone(near=320))
    outputs, skipped = [], []
    for rescale in (model.Block.rescale, always_rescaled):
        block, state = model.Block(FORM), model.fresh_state()
        block.put(block.place["queries"], numbers.queries)
        tiles = np.repeat(numbers.tiles[:1], 5, 0)
        roles = (block.gather(tiles, np.full_like(numbers.masks, 0xFF)), block.multiply_tiles(5))
        with mock.patch.object(model.Block, "rescale", rescale):
            block.run([*roles, block.weigh(5, 0.01, state)])
        outputs.append(block.output())
        skipped.append(block.skipped)
    assert skipped == [4, 0]
    assert np.array_equal(*outputs)


def always_rescaled(block: model.Block, factors: Any) -> None:
    for half in range(2):
        block.tensor[block.held(half, 0, 256)] *= factors[:, None]


def unswizzled(true: Any, *given: Any) -> Any:
    at = true(*given)
    return at ^ (at >> 3 & 0x70)


def without_masks(true: Any, block: Any, tiles: Any, masks: Any) -> Any:
    return true(block, tiles, np.zeros_like(masks))


def other_lead(true: Any, start: int) -> int:
    return int(true(start)) + (1 << 16)


def never_begun(true: Any, block: Any, stage: int, step: int) -> None:
    true(block, stage, step + 1)


def same_columns(_true: Any) -> tuple[int, int]:
    return 0, 192


def same_parity(_true: Any, turn: Any) -> None:
    turn.at = (turn.at + 1) % 2


def nothing(_true: Any, *_given: Any) -> None:
    return None


def all_present(true: Any, logits: Any, masks: Any) -> Any:
    return true(logits, np.full_like(masks, 0xFF))


def last_tile_dropped(true: Any, *given: Any) -> Any:
    return [tiles[:-1] for tiles in true(*given)]


def no_sinks(true: Any, *given: Any) -> Any:
    return np.full_like(true(*given), -np.inf)


def last_split_alone(true: Any, parts: Any, sink: Any) -> Any:
    return true(parts[-1:], sink)


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "swizzle left out": (model, "lines", unswizzled, "load only"),
    "masks left out": (model.Block, "gather", without_masks, "load only"),
    "parity": (model.Turn, "advance", same_parity, "load only"),
    "distance of columns": (model, "turned_word", other_lead, "multiply only"),
    "sums not begun": (model.Block, "begin_sums", never_begun, "multiply only"),
    "logits over sums": (problem, "first_columns", same_columns, "multiply only"),
    "new peaks passed over": (model.Block, "rescale", nothing, "weigh only"),
    "absent keys count": (model, "hidden", all_present, "weigh only"),
    "last tile dropped": (stages, "splits_of", last_tile_dropped, "one tile"),
    "sinks left out": (stages, "sinks_of", no_sinks, "one tile"),
    "splits left out": (stages, "merged", last_split_alone, "full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_localised(name: str) -> None:
    place, function, instead, step = FAULTS[name]
    true = getattr(place, function)
    with mock.patch.object(place, function, lambda *given: instead(true, *given)):
        failure = minute.first_failure(HostModel())
    assert failure is not None
    assert failure[0] == step, failure


@pytest.mark.slow
@pytest.mark.parametrize("first", model.FIRST)
def test_upper_lanes_and_two_buffers_are_needed(first: str) -> None:
    for name, number in (("UPPER_LANES", 0), ("LOGITS", 1)):
        with mock.patch.object(problem, name, number):
            failure = minute.first_failure(HostModel(first))
        if name == "UPPER_LANES" or first == "products":
            assert failure is not None


def test_a_damaged_answer_is_reported() -> None:
    class Damaged(HostModel):
        def scores(self, case: Any, of: Any) -> Any:
            return super().scores(case, of) * 1.001

    step = minute.BY_NAME["scores: one stage"]
    assert not judged(step, HostModel())
    assert "beyond their budget" in judged(step, Damaged())


def test_a_machine_without_a_b200_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (([], "REFUSED"), (["lode only"], "Did you mean load only")):
        with (
            mock.patch.object(sys, "argv", ["minute", *arguments]),
            mock.patch.object(minute, "target_of_device", return_value=SM90A),
        ):
            assert minute.main() == 2
        assert said in capsys.readouterr().out


def test_the_note_shows_the_tables_as_they_are() -> None:
    note = (package_root() / "docs/design-notes/sm100_attention.md").read_text(encoding="utf-8")
    tables = (table.table_of_scores(), table.table_of_attention(), table.bounds_of_attention())
    for lines in tables:
        assert "\n".join(lines) in note


@pytest.mark.b200
@pytest.mark.parametrize("step", [step.name for step in minute.STEPS])
def test_first_minute(step: str) -> None:
    assert not in_a_process(step, (sys.executable, "-m", minute.MODULE, step))
