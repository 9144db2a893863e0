"""Two runs of one candidate: equal to the bit, or UNSTABLE where a race is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest

from degarble.harness.capture.files.reader import Capture
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum import plants as museum_repeats
from degarble.harness.museum.cases import equal
from degarble.harness.museum.plants import RepeatedRun, run_repeatedly, ways_of, write_capture
from degarble.harness.report.verdict import Verdict
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from pathlib import Path

W2 = "layers.1.ffn.experts.w2"
RIGHT = RepeatedRun("M37.tile", W2, "a", "b", Verdict.UNSTABLE, (W2, "head"))


def test_a_race_is_unstable_where_it_is() -> None:
    stage, fault = small_stage(), MODEL_FAULTS["M37.tile"]
    way = random.Random(1).choice(ways_of(stage, fault, W2))
    found = run_repeatedly(stage, fault.id, W2, way)
    assert (found.verdict, found.blamed[0]) == (Verdict.UNSTABLE, W2)
    assert found.apart
    assert found.right


def test_what_is_written_lies_in_the_museums_folder_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is ended removes nothing: the museum removes its folder, with all in it."""
    seen: list[Path] = []

    def interrupted(*folders: Path) -> NoReturn:
        seen.extend(folders)
        raise KeyboardInterrupt

    monkeypatch.setattr(museum_repeats, "compare_runs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_repeatedly(small_stage(), root=tmp_path)
    assert [each.parent.parent for each in seen] == [tmp_path] * 2
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_twice_in_the_same_way_is_stable() -> None:
    stage, fault = small_stage(), MODEL_FAULTS["M10.nibble_order"]
    found = run_repeatedly(stage, fault.id, W2, ways_of(stage, fault, W2)[0])
    assert found.verdict is Verdict.AGREES
    assert not found.apart
    assert not found.right, "nothing was there to tell"


@pytest.mark.parametrize(
    ("made", "right"),
    [
        (RIGHT, True),
        (replace(RIGHT, blamed=("head", W2)), False),
        (replace(RIGHT, verdict=Verdict.DIFFERS), False),
        (replace(RIGHT, fault="", component="", verdict=Verdict.AGREES, blamed=()), True),
        (replace(RIGHT, fault="", component=""), False),
    ],
)
def test_what_is_right(made: RepeatedRun, right: bool) -> None:
    assert made.right == right


def test_a_run_is_written_as_it_was_seen(tmp_path: Path) -> None:
    stage = small_stage()
    write_capture(stage.healthy, tmp_path / "a", {"weights": "here"})
    seen = Capture.open(tmp_path / "a")
    assert seen.complete
    assert [step.tokens for step in seen.steps] == [step.tokens for step in stage.healthy.steps]
    assert len(seen.calls) == len(stage.healthy.calls)
    for one, other in list(zip(seen.calls, stage.healthy.calls, strict=True))[::17]:
        assert one.component == other.component
        assert equal(seen.inputs(one), stage.healthy.inputs(other))
        assert equal(seen.outputs(one), stage.healthy.outputs(other))
