"""What a run of the history may say, and what is refused."""

from dataclasses import replace

import pytest

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName
from degarble.harness.history.records import MEASURES, measure_named
from degarble.suites.history.history_cases import run


def test_a_run_has_one_id_whoever_adds_it() -> None:
    assert run(3).id == run(3).id
    assert run(3).id != replace(run(3), commit="another").id
    assert run(3).id != run(3, {"head": 0.25000001}).id
    assert run(3, {"a": 1.0, "b": 2.0}).id == run(3, {"b": 2.0, "a": 1.0}).id


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"night": "last"}, "night"),
        ({"night": "2026-1-1"}, "night"),
        ({"night": "2026-99-99"}, "night"),
        ({"night": "20261122"}, "night"),
        ({"subject": "a\x1b[31m"}, "subject"),
        ({"subject": "a\ud800"}, "subject"),
        ({"subject": " "}, "subject"),
        ({"subject": "x" * 501}, "subject"),
        ({"machine": ""}, "machine"),
        ({"values": {}}, "values of the run"),
        ({"values": {"budgets": {}}}, "values of the run"),
        ({"values": {"budgets": {"head": float("nan")}}}, "budgets at head"),
        ({"values": {"budgets": {"head": float("inf")}}}, "budgets at head"),
        ({"values": {"budgets": {"": 1.0}}}, "place of budgets"),
        ({"values": {"buget": {"head": 1.0}}}, "measure"),
    ],
)
def test_a_run_that_says_nothing_is_refused_by_name(changed: dict[str, object], name: str) -> None:
    with pytest.raises(Refused) as refusal:
        run(0, None, **changed)
    assert refusal.value.name == name


def test_measures_are_known_by_name() -> None:
    assert all(measure_named(name) is each for name, each in MEASURES.items())
    with pytest.raises(UnknownName, match="budgets"):
        measure_named("budget")
    assert issubclass(InvalidArgument, Refused)
