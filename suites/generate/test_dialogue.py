"""Talking turn by turn: what stays in the history, and what never ends the talk."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.generate.generate import Dialogue, GenerationOptions, TextGenerator
from degarble.harness.inference.generation import Continuation, Limits, Sampling
from degarble.harness.inference.model import LogitsModel, open_model
from degarble.suites.commands.calls import call
from degarble.suites.serve.talking_cases import WORDS, write_speaker, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINE = ("--interactive", "--max-new-tokens", 3, "--numerics", "definition")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_speaker(tmp_path_factory.mktemp("dialogue") / "model")
    write_tokenizer(folder, (*WORDS[:-1], "?"))  # it has an id for what it does not know
    return folder


@pytest.fixture(scope="module")
def opened(model: Path) -> Iterator[Any]:
    with open_model(model, "definition") as made:
        yield made


def talker(opened: Any, tokens: int = 4, **manner: Any) -> TextGenerator:
    return TextGenerator(opened, GenerationOptions(limits=Limits(tokens), **manner))


def said_until(number: int) -> Any:
    """Ctrl-C as soon as that many pieces were heard."""
    pieces: list[str] = []

    def heard(_speech: Continuation, piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == number:
            raise KeyboardInterrupt

    return heard


@pytest.mark.parametrize("chat", [False, True])
def test_an_interrupted_answer_stays_as_far_as_it_came(opened: Any, *, chat: bool) -> None:
    dialogue = Dialogue(talker(opened, chat=chat))
    question = dialogue.hear("w7 w8")
    with pytest.raises(KeyboardInterrupt):
        dialogue.answer(question, said_until(2))
    following = dialogue.hear("w9")
    assert following.ids[: len(question.ids)] == question.ids
    if chat:
        assert [each["role"] for each in following.messages] == ["user", "assistant", "user"]
        assert len(following.messages[1]["content"].split()) == 2
    else:
        assert len(following.ids) == len(question.ids) + 2 + 1
    fresh = talker(opened, chat=chat).generation()
    alone = Continuation(list(following.ids))
    fresh.run([alone])
    assert dialogue.answer(following).ids == alone.ids


def test_one_stream_of_random_numbers_goes_through_all_turns(opened: Any) -> None:
    dialogue = Dialogue(talker(opened, sampling=Sampling(1.0, 1.0, 5)))
    spoken = [dialogue.say("w7 w8").ids, dialogue.say("w9").ids]
    again = Dialogue(talker(opened, sampling=Sampling(1.0, 1.0, 5)))
    assert [again.say("w7 w8").ids, again.say("w9").ids] == spoken
    assert dialogue._sampler.drawn == sum(map(len, spoken))


def test_what_cannot_be_read_is_refused_and_changes_nothing(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogitsModel, "context", property(lambda _self: 12))
    told: list[str] = []
    made = TextGenerator(opened, GenerationOptions(limits=Limits(2)), told.append)
    dialogue = Dialogue(made)
    dialogue.say("w7 w8")  # begin, two words, two new
    with pytest.raises(InvalidArgument, match="12"):
        dialogue.hear("w9 " * 20)
    assert len(dialogue.hear("w9").ids) == 6
    assert not told
    anew = dialogue.hear("w9 " * 8)
    assert len(anew.ids) == 9
    assert told == ["(the context of 12 tokens is full: starting anew)"]
    fresh = Continuation(list(anew.ids))
    made.generation().run([fresh])
    assert dialogue.answer(anew).ids == fresh.ids


def test_a_line_that_is_no_text_does_not_end_the_talk(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"w7\nw\xff8\n \nw9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", lines)
    done = call(capsys, "generate", model, *LINE)
    assert done.status == 0
    assert len(done.out.splitlines()) == 2
    assert done.err.count("text in UTF-8 (character 2 is none)") == 1


def test_unknown_words_are_told_once_by_name_and_count(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LINE[1:]
    done = call(capsys, "generate", model, "--prompt", "w7 frog w8 frog toad ?", *limits)
    assert done.status == 0
    assert "3 words are unknown to the tokenizer" in done.err
    assert "'frog' (2 times), 'toad'" in done.err
    assert "unknown" not in call(capsys, "generate", model, "--prompt", "w7 ?", *limits).err
    (tmp_path / "text.txt").write_text("w7 newt w8")
    evaluated = call(capsys, "generate", model, "--perplexity", tmp_path / "text.txt")
    assert "warning: 1 word is unknown" in evaluated.err
    assert "'newt'" in evaluated.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("frog\nfrog w7\ntoad\n"))
    talk = call(capsys, "generate", model, *LINE)
    assert talk.err.count("'frog'") == 1
    assert talk.err.count("'toad'") == 1


def test_lines_of_a_file_are_counted_from_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("[", "3"):
        (tmp_path / "prompts.jsonl").write_text(f'"w7"\n\n{wrong}\n')
        done = call(capsys, "generate", model, "--prompts", tmp_path / "prompts.jsonl")
        assert done.status == 2
        assert "prompts.jsonl: line 3 = " in done.err
