from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnwritablePath
from degarble.harness.cli.command import CliSession, command, dispatch
from degarble.harness.cli.terminal import Terminal
from degarble.suites.cli.command_cases import NoOptions, PlainOptions

if TYPE_CHECKING:
    from collections.abc import Callable

Seen = list[tuple[object, Terminal]]


def _app(
    options: type, *, spreads: bool = False, json_word: bool = False
) -> tuple[typer.Typer, Seen]:
    app, seen = typer.Typer(), Seen()

    @app.callback()
    def _root() -> None:
        pass

    def body(given: object, terminal: Terminal) -> int:
        """Do it."""
        seen.append((given, terminal))
        return 1

    command(app, "do", options, spreads=spreads, json_word=json_word)(body)
    return app, seen


def test_the_record_arrives_with_its_defaults() -> None:
    app, seen = _app(PlainOptions)
    assert dispatch(app, ["do", "here"], CliSession()) == 1
    assert seen == [(PlainOptions(Path("here")), Terminal())]


def test_an_empty_path_is_not_the_folder_that_one_stands_in() -> None:
    app, seen = _app(PlainOptions)
    with pytest.raises(InvalidArgument, match="= ''"):
        dispatch(app, ["do", ""], CliSession())
    with pytest.raises(InvalidArgument, match="--json = ''"):
        dispatch(app, ["do", "here", "--json="], CliSession())
    assert not seen


def test_every_field_can_be_given() -> None:
    app, seen = _app(PlainOptions)
    dispatch(app, ["do", "here", "--count", "7", "--quiet", "--json"], CliSession())
    assert seen == [(PlainOptions(Path("here"), 7), Terminal(quiet=True, json_wanted=True))]


FILE = Terminal(json_file=Path("a.json"))
STDOUT = Terminal(json_wanted=True)


@pytest.mark.parametrize(
    ("before", "words", "expected"),
    [
        (Terminal(), ["x", "--json=a.json"], FILE),
        (Terminal(), ["x", "--json"], STDOUT),
        (Terminal(), ["--json", "x"], STDOUT),
        (Terminal(), ["x", "--json=-"], STDOUT),
        (STDOUT, ["x"], STDOUT),
        (STDOUT, ["x", "--json=a.json"], Terminal(json_wanted=True, json_file=Path("a.json"))),
    ],
)
@pytest.mark.parametrize("json_word", [False, True])
def test_json_is_written_where_requested(
    before: Terminal, words: list[str], expected: Terminal, json_word: bool
) -> None:
    app, seen = _app(PlainOptions, json_word=json_word)
    dispatch(app, ["do", *words], CliSession(before))
    assert seen == [(PlainOptions(Path("x")), expected)]


@pytest.mark.parametrize("words", [["x", "--json", "a.json"], ["--json", "a.json", "x"]])
def test_the_older_spelling_takes_the_word_that_follows(words: list[str]) -> None:
    app, seen = _app(PlainOptions, json_word=True)
    dispatch(app, ["do", *words], CliSession())
    assert seen == [(PlainOptions(Path("x")), FILE)]
    bare, seen = _app(NoOptions, json_word=True)
    dispatch(bare, ["do", "--json", "-"], CliSession())
    assert seen[0][1] == STDOUT


@pytest.mark.parametrize(
    "words", [["x"], ["x", "--json"], ["--json", "x"], ["x", "--json", "a.json"]], ids=" ".join
)
def test_a_line_is_parsed_once(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = []
    genuine = typer.core.TyperCommand.make_parser

    def counted(self: typer.core.TyperCommand, ctx: Any) -> Any:
        parsers.append(ctx)
        return genuine(self, ctx)

    monkeypatch.setattr(typer.core.TyperCommand, "make_parser", counted)
    app, seen = _app(PlainOptions, json_word=True)
    dispatch(app, ["do", *words], CliSession())
    assert seen[0][0] == PlainOptions(Path("x"))
    assert len(parsers) == 1


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    app, seen = _app(PlainOptions)
    for file, error in (("", UnwritablePath), ("no/folder.json", UnwritablePath)):
        with pytest.raises(error, match="--json"):
            dispatch(app, ["do", "x", f"--json={tmp_path / file}"], CliSession())
    assert not seen


def test_a_cluster_option_is_accepted_before_and_after_the_name() -> None:
    app, seen = _app(PlainOptions, spreads=True)
    dispatch(app, ["do", "x", "--cluster", "ray"], CliSession())
    dispatch(app, ["do", "x"], CliSession(Terminal(cluster="ray")))
    assert [terminal.cluster for _, terminal in seen] == ["ray", "ray"]


@pytest.mark.parametrize(
    ("spreads", "cluster", "error"),
    [(False, "ray", InvalidArgument), (True, "slurm", UnknownName), (False, "x", UnknownName)],
)
def test_a_cluster_without_meaning_is_refused(
    spreads: bool, cluster: str, error: type[Exception]
) -> None:
    app, seen = _app(PlainOptions, spreads=spreads)
    with pytest.raises(error, match="--cluster"):
        dispatch(app, ["do", "x"], CliSession(Terminal(cluster=cluster)))
    assert seen == []


def test_the_body_stays_a_plain_function() -> None:
    app = typer.Typer()

    def body(_options: PlainOptions, _terminal: Terminal) -> int:
        """Do it."""
        return 0

    kept: Callable[[PlainOptions, Terminal], int] = command(app, "do", PlainOptions)(body)
    assert kept is body
