from __future__ import annotations

from dataclasses import fields

from degarble.harness.report.verdict import SEVERITY, Origin, Verdict

# The keys of `origins` in the contract of the command line.
CONTRACT = (
    *("layer", "component", "site", "where", "fault", "cosine", "difference", "budget"),
    *("confidence", "evidence", "reproducer"),
)


def test_origin_has_the_keys_of_the_contract() -> None:
    assert tuple(field.name for field in fields(Origin)) == CONTRACT


def test_exit_statuses_are_those_of_the_contract() -> None:
    assert {str(verdict): verdict.exit_status for verdict in Verdict} == {
        "AGREES": 0,
        "DIFFERS": 1,
        "UNSTABLE": 1,
        "UNDECIDED": 2,
        "REFUSED": 2,
    }


def test_what_fails_weighs_more_than_what_could_not_run() -> None:
    assert set(SEVERITY) == set(Verdict)
    assert len(SEVERITY) == len(Verdict)
    statuses = [each.exit_status for each in SEVERITY]
    assert statuses == [0, 2, 2, 1, 1]


def test_every_verdict_is_explained_once() -> None:
    meanings = [verdict.meaning for verdict in Verdict]
    assert len(set(meanings)) == len(meanings)
    assert all(meanings)
