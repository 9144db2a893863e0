"""A component judged briefly: small calls first, and no further than the first that differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from degarble.harness.engine.localise import judged_run
from degarble.harness.engine.localise.judged_run import Judge, OutputRow
from degarble.harness.report.verdict import Verdict


@pytest.mark.parametrize(("briefly", "asked"), [(False, [3, 1, 2, 4]), (True, [1, 2])])
def test_a_brief_judgement_ends_at_the_first_finding(
    briefly: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def take(_judge: Judge, made: Any, rows: int) -> None:
        seen.append(rows)
        verdict = Verdict.DIFFERS if rows == 2 else Verdict.AGREES
        made.rows[str(rows)] = OutputRow(made.component, str(rows), verdict)

    monkeypatch.setattr(judged_run, "replayed", lambda _known, batch: len(batch.step_of))
    monkeypatch.setattr(Judge, "_take", take)
    batches: Any = [SimpleNamespace(step_of=range(rows)) for rows in (3, 1, 2, 4)]
    nothing: Any = None
    assert Judge(nothing).component(nothing, batches, briefly=briefly).differs
    assert seen == asked
