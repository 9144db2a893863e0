from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.commands.check.texts import PROMPTS, pieces, spoken_in, texts_of
from degarble.harness.inference.model import open_model
from degarble.references import tiny
from degarble.suites.capture.files.capture_cases import old_capture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.inference.model import OpenModel

RELEASED = Path(tiny.__file__).parent / "v1" / "v4"


@dataclass
class Run:
    """A run that has said something."""

    facts: dict[str, Any] = field(default_factory=dict)
    steps: tuple[CapturedStep, ...] = ()


def run(*sequences: object, steps: tuple[CapturedStep, ...] = ()) -> RecordedRun:
    facts = {"sequences": list(sequences)} if sequences else {}
    return cast("RecordedRun", Run(facts, steps))


@pytest.fixture(scope="module")
def model() -> Iterator[OpenModel]:
    with open_model(RELEASED, "bf16") as opened:
        yield opened


def test_a_capture_says_its_prompts_or_its_steps_do() -> None:
    assert spoken_in(run({"prompt": [1, 2], "new": [3], "text": "x"})) == [([1, 2], [3])]
    steps = (
        CapturedStep(0, Phase.PREFILL, (5, 6, 7, 8), (0, 1, 0, 1), (0, 0, 1, 1)),
        CapturedStep(1, Phase.DECODE, (9, 4), (2, 2), (0, 1)),
        CapturedStep(2, Phase.DECODE, (3,), (3,), (1,)),
    )
    assert spoken_in(run(steps=steps)) == [([5, 6], [9]), ([7, 8], [4, 3])]


@pytest.mark.parametrize("raw", [7, {}, {"prompt": [1]}, {"prompt": ["a"], "new": [True]}])
def test_a_strange_record_of_a_sequence_is_passed_over(raw: object) -> None:
    assert spoken_in(run(raw)) == []


def test_a_capture_of_version_1_still_tells_its_prompts(tmp_path: Path) -> None:
    with_prompts = spoken_in(Capture.open(old_capture(tmp_path / "capture")))
    assert all(ids for ids, _ in with_prompts)
    assert with_prompts


def test_the_twin_goes_on_from_the_very_same_ids(model: OpenModel) -> None:
    told = texts_of(run({"prompt": [0, 13, 20], "new": [6, 500, 7]}), model)
    (said,) = told.said
    names = [name for name, _ in said.voices]
    assert names == ["Twin", "Candidate"]
    assert [len(tokens) for _, tokens in said.voices] == [3, 3]
    assert said.parting is not None


def test_what_is_not_told_is_a_note(model: OpenModel) -> None:
    one = {"prompt": [0, 13], "new": [6]}
    many = texts_of(run(*[one] * (PROMPTS + 1)), model)
    assert len(many.said) == PROMPTS
    assert many.notes == (f"The first {PROMPTS} of {PROMPTS + 1} prompts.",)
    long = texts_of(run({"prompt": [0] * 3000, "new": [6]}), model)
    assert long.said == ()
    assert "2,048 tokens" in long.notes[0]


def test_ids_that_nobody_can_say_do_no_harm(model: OpenModel) -> None:
    (said,) = texts_of(run({"prompt": [0, 13], "new": [2**61, -4, 10**6]}), model).said
    assert dict(said.voices)["Candidate"]
    (lone,) = texts_of(run({"prompt": [10**7], "new": [6]}), model).said
    assert [name for name, _ in lone.voices] == ["Candidate"]
    assert pieces([3, 4], None) == ("3 ", "4 ")
