"""Each step passes on a server that is right, and fails on one that errs in what it is for."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from degarble.harness.vllm.engine import steps
from degarble.harness.vllm.engine.server import Caller
from degarble.harness.vllm.engine.steps import Answers
from degarble.suites.vllm.engine import stand_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stand_in.Server]:
    monkeypatch.setattr(steps, "_QUIET", 0.0)
    with stand_in.Server(captured=tmp_path / "captures" / "capture-one") as made:
        yield made


@pytest.fixture
def session(server: stand_in.Server, tmp_path: Path) -> steps.EngineSession:
    caller = Caller(server.port)
    (tmp_path / "captures" / "capture-one").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    made = stand_in.answers()
    return steps.EngineSession(caller, made, tmp_path, tmp_path / "captures", tmp_path / "out")


ASKED = ("parts", "questions", "texts", "prefix", "many", "storm")


@pytest.mark.parametrize("name", ASKED)
def test_a_server_that_is_right_passes(session: steps.EngineSession, name: str) -> None:
    assert steps.taken(name, session).passed, steps.taken(name, session).told


def test_likeliest_tokens_are_counted_and_not_judged(session: steps.EngineSession) -> None:
    outcome = steps.taken("forced", session)
    assert outcome.passed is None
    assert outcome.told.startswith("80 of 80 places")


def test_a_text_may_leave_only_where_the_references_are_not_sure(
    server: stand_in.Server, session: steps.EngineSession
) -> None:
    server.errs[3] = 5
    sure = steps.taken("texts", session)
    assert (sure.passed, sure.told[:7]) == (False, "0 of 10")
    close = [stand_in.text(text.prompt, 8, gap=0.5) for text in session.answers.texts]
    session.answers = Answers(close, [], moves=1.0, steady=0)
    outcome = steps.taken("texts", session)
    assert outcome.passed
    assert "leave them at 5, 5, 5" in outcome.told


def test_a_wrong_answer_fails(server: stand_in.Server, session: steps.EngineSession) -> None:
    server.errs[600] = 0
    assert steps.taken("questions", session).told.startswith("3 of 4")
    assert steps.taken("questions", session).passed is False


def test_questions_that_are_all_short_prove_no_chunks(session: steps.EngineSession) -> None:
    session.answers = Answers([], session.answers.questions[:3], 1.0, 0)
    assert steps.taken("questions", session).passed is False


def test_a_cache_that_gives_nothing_fails(
    server: stand_in.Server, session: steps.EngineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "seen", _Forgetful())
    assert steps.taken("prefix", session).passed is False


class _Forgetful(set[str]):
    def add(self, element: str) -> None:
        del element


def test_batching_that_changes_a_text_fails(
    server: stand_in.Server, session: steps.EngineSession
) -> None:
    session.texts()
    server.errs[3] = 7
    outcome = steps.taken("many", session)
    assert (outcome.passed, "0 as alone" in outcome.told) == (False, True)
    session.alone = []
    server.errs, server.apart = {}, 0.11
    session.texts()
    server.errs[3] = 7
    assert steps.taken("many", session).passed  # these words tie
    assert steps.taken("storm", session).passed is False


def test_requests_that_stay_fail(server: stand_in.Server, session: steps.EngineSession) -> None:
    server.leaks = 2
    outcome = steps.taken("storm", session)
    assert (outcome.passed, "2 requests left" in outcome.told) == (False, True)


def test_refusals_of_a_server_are_reported(
    server: stand_in.Server, session: steps.EngineSession
) -> None:
    server.captured = None
    assert "not opened: 400" in steps.taken("capture", session).told
    session.caller = Caller(1)
    assert steps.taken("parts", session).told.startswith("ConnectionRefusedError")


ORIGIN = {"site": "layers.1.ffn.shared.w13.out", "fault": "M14.swapped"}
OTHER = {"site": "layers.0.ffn.topk.out", "fault": None}


@pytest.mark.parametrize(
    ("verdict", "origins", "blamed", "passed"),
    [
        ("AGREES", [], ("", ""), True),
        ("DIFFERS", [ORIGIN], ("", ""), False),
        ("DIFFERS", [ORIGIN], ("layers.1.ffn.shared.w13", "M14"), True),
        ("AGREES", [], ("layers.1.ffn.shared.w13", "M14"), False),
        ("DIFFERS", [ORIGIN, OTHER], ("layers.1.ffn.shared.w13", "M14"), False),
        ("DIFFERS", [{**ORIGIN, "fault": None}], ("layers.1.ffn.shared.w13", "M14"), False),
    ],
)
def test_a_check_is_judged_by_what_was_planted(
    session: steps.EngineSession, monkeypatch: pytest.MonkeyPatch, verdict: str,
    origins: list[dict[str, object]], blamed: tuple[str, str], passed: bool,
) -> None:  # fmt: skip
    fields = {"verdict": verdict, "origins": origins, "sentence": "So it is."}

    def check(line: list[str], **_: object) -> object:
        assert line[3:5] == ["check", str(session.out / "capture")]
        (session.out / "check.json").write_text(json.dumps(fields), encoding="utf-8")
        return type("Done", (), {"stdout": "", "stderr": "", "returncode": 1})

    monkeypatch.setattr(subprocess, "run", check)
    session.blamed = blamed
    outcome = steps.taken("capture", session)
    assert outcome.passed is passed
    assert verdict in outcome.told
