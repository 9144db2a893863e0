from __future__ import annotations

import pytest

from degarble.suites.commands.calls import call

CASES = [
    (["chek"], "command of degarble = 'chek'", "Did you mean check?"),
    (["faults", "lst"], "command of degarble faults = 'lst'", "Did you mean list?"),
    (["check"], "CAPTURE = None", "See degarble check --help."),
    (["check", "x"], "--reference = None", "See degarble check --help."),
    (["check", "x", "--devise", "cpu"], "option of degarble check = '--devise'", "--device"),
    (["--jsn", "demo"], "option of degarble = '--jsn'", "--json"),
    (["generate", "x", "--top-p", "much"], "--top-p = 'much'", "See degarble generate --help."),
    (["generate", "x", "--seed=one"], "--seed = 'one'", "See degarble generate --help."),
    (["serve", "x", "y"], "arguments = ", "See degarble serve --help."),
    (["audit", "x", "--jsno"], "option of degarble audit = '--jsno'", "--json"),
    (["bisect"], "-- CMD = None", "See degarble bisect --help."),
]


@pytest.mark.parametrize(("arguments", "begin", "remedy"), CASES)
def test_wrong_usage_is_refused_with_name_value_expectation_and_remedy(
    capsys: pytest.CaptureFixture[str], arguments: list[str], begin: str, remedy: str
) -> None:
    result = call(capsys, *arguments)
    assert result.status == 2
    assert result.out == ""
    first, expected, last = result.err.splitlines()
    assert first.startswith(f"degarble: REFUSED: {begin}")
    assert expected.startswith("  expected  ")
    assert last.startswith("  remedy    ")
    assert remedy in last


ASKED = [
    ["--json", "chek"],
    ["--json", "faults", "lst"],
    ["--quiet", "--json", "chek"],
    ["--cluster", "ray", "--json", "chek"],
    ["demo", "--json", "--fualt", "x"],
    ["demo", "--fualt", "x", "--json"],
    ["faults", "list", "--json", "-", "--fualt"],
    ["faults", "list", "--json=-", "--fualt"],
    ["audit", "--json", "x", "--fualt"],  # the word is the checkpoint
    ["audit", "--fualt", "--json", "x"],
]
# A file takes the document, or --json belongs to somebody else.
NOT_ASKED = [
    ["faults", "list", "--json", "x", "--fualt"],
    ["faults", "list", "--fualt", "--json", "x"],
    ["audit", "x", "--json", "y", "--fualt"],
    ["chek", "--", "--json"],
]


@pytest.mark.parametrize("arguments", ASKED, ids=" ".join)
def test_programs_get_the_refusal_as_a_document(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    result = call(capsys, *arguments)
    assert result.status == 2
    assert result.document["verdict"] == "REFUSED"
    assert result.document["error"]["class"] == "UnknownName"


def test_a_line_without_a_needed_option_is_refused_where_its_json_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = call(capsys, "check", "--json", "x")
    assert result.document["error"]["name"] == "--reference"
    assert call(capsys, "check", "x", "--json", "y").out == ""


@pytest.mark.parametrize("arguments", NOT_ASKED, ids=" ".join)
def test_without_json_no_document_is_printed(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    result = call(capsys, *arguments)
    assert (result.status, result.out) == (2, "")


def test_the_words_of_a_command_to_bisect_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys, "bisect", "--", "make", "test", "--quiet", "--unknown")
    assert "--good and --bad" in result.err


@pytest.mark.parametrize("words", [[], ["faults"], ["history"]])
def test_a_group_alone_shows_what_there_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = call(capsys, *words)
    assert (result.status, result.err) == (0, "")
    assert "Commands" in result.out
    assert "<bool>" not in result.out
