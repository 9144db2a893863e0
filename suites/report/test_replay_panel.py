from __future__ import annotations

import json

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.page import from_plain, to_plain
from degarble.harness.report.replay_record import (
    AxisProfile,
    Histogram,
    JudgedOutput,
    PromptTexts,
    ReplayRecord,
    worst_first,
)
from degarble.harness.report.verdict import Verdict
from degarble.suites.reports.replay_cases import replay


def test_a_record_survives_its_file() -> None:
    record = replay("plain")
    text = json.dumps(to_plain(record), allow_nan=False)
    assert from_plain(ReplayRecord, json.loads(text), "record") == record


def test_where_texts_part_is_found() -> None:
    def said(*texts: str) -> int | None:
        return PromptTexts(
            "p", tuple((str(n), tuple(t.split())) for n, t in enumerate(texts))
        ).parting

    assert said("a b c", "a b c") is None
    assert said("a b c", "a x c") == 1
    assert said("a b", "a b c") == 2  # one goes on
    assert said("", "a") == 0
    assert said("a b c", "a b c", "a b d") == 2
    assert said() is None


def test_what_differs_comes_first_then_what_is_undecided_then_what_is_near() -> None:
    def made(name: str, verdict: Verdict, ratio: float | None) -> JudgedOutput:
        return JudgedOutput(name, name, 0, "out", verdict, ratio)

    given = (
        made("fine", Verdict.AGREES, 0.1),
        made("near", Verdict.AGREES, 0.69),
        made("open", Verdict.UNDECIDED, None),
        made("off", Verdict.DIFFERS, 2.0),
        made("far", Verdict.DIFFERS, 900.0),
    )
    assert [each.component for each in worst_first(given)] == ["far", "off", "open", "near", "fine"]


def test_sites_and_columns_are_named() -> None:
    made = JudgedOutput("layers.3.ffn.topk", "ffn.topk", 3, "experts", Verdict.AGREES)
    assert (made.site, made.column) == ("layers.3.ffn.topk.out.experts", "3")
    head = JudgedOutput("head", "head", None, "out", Verdict.AGREES)
    assert (head.site, head.column) == ("head.out", "ends")
    drafter = JudgedOutput("mtp.0.attn.norm", "attn.norm", 0, "out", Verdict.AGREES)
    assert drafter.column == "mtp.0"


def test_labels_and_values_have_one_number() -> None:
    with pytest.raises(ShapeMismatch, match="labels of head = 1: expected 2"):
        AxisProfile("head", ("0",), (0.1, 0.2))
    with pytest.raises(ShapeMismatch, match="labels of histogram"):
        Histogram("ulps", ("0", "1"), (3,))
