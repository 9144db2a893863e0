"""Commands are parsed into records, and wrong usage is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from degarble.harness.base.errors import (
    InvalidArgument,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.cli import values
from degarble.harness.cli.command import CliSession, command, dispatch
from degarble.harness.cli.terminal import Terminal
from degarble.suites.cli.command_cases import NoOptions, PlainOptions
from degarble.suites.commands.calls import call

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


CASES = [
    (["chek"], "command of degarble = 'chek'", "Did you mean check?"),
    (["faults", "lst"], "command of degarble faults = 'lst'", "Did you mean list?"),
    (["check"], "CAPTURE = None", "See degarble check --help."),
    (["convert", "x", "y"], "--to = None", "See degarble convert --help."),
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
    result = call(capsys, "capture", "--json", "x")
    assert result.document["error"]["name"] == "--out"
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


def test_the_program_alone_says_what_to_type_first(capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys)
    assert (result.status, result.err) == (0, "")
    assert "degarble doctor CKPT --engine" in result.out
    assert len(result.out.splitlines()) < 12


@pytest.mark.parametrize("words", [["faults"], ["history"]])
def test_a_group_alone_shows_what_there_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = call(capsys, *words)
    assert (result.status, result.err) == (0, "")
    assert "Commands" in result.out
    assert "<bool>" not in result.out


def test_paths(tmp_path: Path) -> None:
    values.existing("CKPT", tmp_path)
    values.existing("CKPT", None)
    with pytest.raises(UnreadableFile, match=r"CKPT = '.*none'"):
        values.existing("CKPT", tmp_path / "none")


@pytest.mark.parametrize("name", ["CKPT", "--reference"])
def test_an_id_of_the_hub_is_told_with_its_download(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "hf download deepseek-ai/DeepSeek-V4 --local-dir DeepSeek-V4"
    with pytest.raises(UnreadableFile, match=command):
        values.existing(name, Path("deepseek-ai/DeepSeek-V4"))
    with pytest.raises(UnreadableFile, match="typo"):
        values.existing("--prompts", Path("texts/prompts"))
    (tmp_path / "deepseek-ai").mkdir()
    with pytest.raises(UnreadableFile, match="typo"):
        values.existing(name, Path("deepseek-ai/DeepSeek-V4"))


def test_names() -> None:
    values.one_of("--to", "bf16", ("bf16", "nvfp4"))
    values.one_of("--to", None, ("bf16",))
    with pytest.raises(UnknownName, match="Did you mean nvfp4"):
        values.one_of("--to", "nvpf4", ("bf16", "nvfp4"))


def test_names_or_files(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.touch()
    values.named_or_file("--recipe", str(recipe), ("bf16",), (".yaml",))
    values.named_or_file("--recipe", "bf16", ("bf16",), (".yaml",))
    with pytest.raises(UnreadableFile):
        values.named_or_file("--recipe", "none.yaml", ("bf16",), (".yaml",))
    with pytest.raises(UnknownName):
        values.named_or_file("--recipe", "b16", ("bf16",), (".yaml",))


def test_options_that_exclude_each_other() -> None:
    values.exactly_one(prompt="a", prompts=None, interactive=False)
    values.at_most_one(prompt=None, prompts=None)
    values.exactly_one(prompt="", prompts=None)  # an empty prompt is a prompt
    with pytest.raises(InvalidArgument, match=r"--prompt and --interactive = .*Keep one"):
        values.exactly_one(prompt="a", prompts=None, interactive=True)
    with pytest.raises(InvalidArgument, match="Add one of them"):
        values.exactly_one(prompt=None, prompts=None)
    with pytest.raises(InvalidArgument):
        values.at_most_one(prompt="a", prompts="b")


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_ranges(value: float) -> None:
    values.within("--top-p", 0.5, 0, 1)
    values.within("--top-p", None, 0, 1)
    with pytest.raises(InvalidArgument, match="at least 0 and at most 1"):
        values.within("--top-p", value, 0, 1)


@pytest.mark.parametrize("name", ["torch", "cutedsl", "vllm", "my_kernels:make", "a.b_1:C", None])
def test_backends(name: str | None) -> None:
    values.backend("--backend", name)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("troch", UnknownName),
        ("", UnknownName),
        ("a b:c", InvalidArgument),
        ("a:b:c", InvalidArgument),
        (":c", InvalidArgument),
        ("os;x:y", InvalidArgument),
    ],
)
def test_what_is_no_backend(name: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="--backend"):
        values.backend("--backend", name)


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    values.writable("--json", tmp_path / "found.json")
    assert list(tmp_path.iterdir()) == []
    for wrong in (tmp_path, tmp_path / "nowhere" / "found.json"):
        with pytest.raises(UnwritablePath, match="--json"):
            values.writable("--json", wrong)
    assert list(tmp_path.iterdir()) == []
