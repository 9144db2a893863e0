"""`degarble generate`: single prompts, conversations turn by turn, and refusals by name."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.generate.generate import (
    Dialogue,
    GenerationOptions,
    TextGenerator,
    prompts_from,
)
from degarble.harness.inference.generation import Continuation, Limits, Sampling
from degarble.harness.inference.model import LogitsModel, open_model
from degarble.suites.chat.talk_cases import ENCODER, TOOL
from degarble.suites.commands.calls import call
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.serve.talking_cases import WORDS, write_speaker, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# `degarble generate`: what it says, in which form, and what it refuses by name.

SHORT = ("--max-new-tokens", 5, "--numerics", "definition")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("talking") / "model")


def test_a_prompt_is_continued(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, "generate", model, "--prompt", "w7 w8", *SHORT)
    assert done.status == 0
    words = done.out.split()
    assert len(words) == 5
    assert done.out.endswith("\n")
    assert "5 new tokens" in done.err
    document = call(capsys, "--json", "generate", model, "--prompt", "w7 w8", *SHORT).document
    (text,) = document["texts"]
    assert text["text"].split() == words
    assert [WORDS[number] for number in text["tokens"]] == words
    assert (text["finish"], text["prompt_tokens"]) == ("length", 3)  # BOS counts
    assert document["verdict"] is None
    assert document["tokens_per_second"] > 0
    assert call(capsys, "--quiet", "generate", model, "--prompt", "w7 w8", *SHORT).out == ""
    stop = words[2]
    cut = call(capsys, "generate", model, "--prompt", "w7 w8", *SHORT, "--stop", f" {stop}")
    assert cut.out.split() == words[: words.index(stop)] or stop in words[:2]


def test_prompts_of_a_file_generate_what_each_generates_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["w7 w8", " ".join(WORDS[10:50]), "w9"]
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts) + "\n")
    drawn = ("--temperature", 1, "--seed", 4, "--max-new-tokens", 5, "--numerics", "bf16")
    line = ("--json", "generate", model, "--prompts", tmp_path / "prompts.txt", *drawn)
    together = call(capsys, *line).document["texts"]
    assert [each["prompt"] for each in together] == prompts
    for each in together:
        alone = call(capsys, "--json", "generate", model, "--prompt", each["prompt"], *drawn)
        assert alone.document["texts"] == [each]
    shown = call(capsys, *line[1:]).out.splitlines()
    assert [row[:4] for row in shown] == ["[1] ", "[2] ", "[3] "]


def test_a_chat_is_encoded_and_taken_apart(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w7"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps(talk) + "\n")
    line = ("--json", "generate", model, "--prompts", tmp_path / "talk.jsonl", *SHORT)
    (text,) = call(capsys, *line).document["texts"]
    assert text["prompt_tokens"] == 6  # BOS, w9, the user's mark, w7, the assistant's, </think>
    assert text["message"] == {"role": "assistant", "content": text["text"]}
    (thought,) = call(capsys, *line, "--thinking").document["texts"]
    assert thought["message"] is None
    assert "an end of thinking" in thought["not_a_message"]
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    tools = ("--tools", tmp_path / "tools.json")
    refused = call(capsys, "generate", model, "--prompt", "w7", *tools, *SHORT)
    assert "wording of tools" in refused.err
    (model / "encoding_dsv4.py").write_text(ENCODER)
    known = call(capsys, "generate", model, "--prompt", "w7", *tools, *SHORT)
    (model / "encoding_dsv4.py").unlink()
    assert "wording of tools" not in known.err


def test_a_dialogue_keeps_its_history(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\n\nw9\n"))
    done = call(capsys, "generate", model, "--interactive", *SHORT)
    assert done.status == 0
    first, second = done.out.splitlines()
    result = call(capsys, "generate", model, "--prompt", "w7 w8", *SHORT)
    assert result.out.splitlines() == [first]
    history = f"w7 w8 {first} w9"
    again = call(capsys, "generate", model, "--prompt", history, *SHORT)
    assert again.out.splitlines() == [second]


def test_a_text_is_evaluated(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("w7 w8 w9 w10")
    line = ("generate", model, "--perplexity", tmp_path / "text.txt", "--numerics", "definition")
    document = call(capsys, "--json", *line).document
    assert document["tokens"] == 4  # BOS is given, the four words are predicted
    loss = -sum(document["log_probabilities"]) / 4
    assert document["loss"] == pytest.approx(loss)
    assert document["perplexity"] == pytest.approx(math.exp(loss))
    assert "perplexity" in call(capsys, *line).out


@pytest.mark.parametrize("prompt", ["", "  "])
def test_a_prompt_without_a_word_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    """Else the model continues its begin token, which nobody said."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt) + "\n")
    for given in (("--prompt", prompt), ("--prompts", file), ("--chat", "--prompt", prompt)):
        done = call(capsys, "generate", model, *given, *SHORT)
        assert (done.status, done.out) == (2, "")
        assert "a text of one token at least" in done.err
    assert call(capsys, "generate", model, "--prompt", WORDS[0], *SHORT).status == 0, "said"


def test_only_a_line_feed_ends_a_prompt(tmp_path: Path) -> None:
    prompts = ["w7\u2028w8", "w9\x0cw7\x85"]
    lines = "\r\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_bytes(f"{lines}\r\n".encode())
    assert prompts_from(tmp_path / "prompts.jsonl") == prompts
    (tmp_path / "prompts.txt").write_bytes("\n".join(prompts).encode())
    assert prompts_from(tmp_path / "prompts.txt") == prompts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--prompts", "{tmp}/nowhere"), "--prompts = "),
        (("--prompts", "{tmp}/empty.txt"), "one prompt a line"),
        (("--prompts", "{tmp}/latin.txt"), "a text in UTF-8"),
        (("--prompts", "{tmp}/wrong.jsonl"), "a list of messages"),
        (("--prompts", "{tmp}/number.jsonl"), "a list of messages"),
        (("--perplexity", "{tmp}/empty.txt"), "2 to "),
        (("--prompt", "unheard"), "the tokenizer can encode"),
        (("--prompt", "w7", "--tools", "{tmp}/empty.txt"), "--tools"),
        (("--prompt", "w7", "--tools", "{tmp}/number.jsonl"), "--tools"),
        (("--prompt", "w7", "--numerics", "fp32"), "--numerics"),
        (("--prompt", "w7", "--effort", "most"), "--effort"),
        (("--prompt", "w7", "--effort", "max"), "--thinking with it"),
        (("--prompts", "{tmp}/talk.jsonl", "--system", "w8"), "with a conversation"),
        (("--prompts", "{tmp}/parts.jsonl"), "content of message 0"),
        (("--prompts", "{tmp}/silent.jsonl"), "one message at least"),
        (("--prompt", "w7", "--stop", ""), "--stop"),
        (("--prompt", "w7", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("--interactive", "--json"), "--interactive"),
        (("--prompt", "w7", "--perplexity", "{tmp}/empty.txt"), "exactly one of"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...],
    expected: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "wrong.jsonl").write_text("[\n")
    (tmp_path / "number.jsonl").write_text("3\n")
    (tmp_path / "talk.jsonl").write_text('[{"role": "user", "content": "w7"}]\n')
    (tmp_path / "parts.jsonl").write_text('[{"role": "user", "content": ["w7"]}]\n')
    (tmp_path / "silent.jsonl").write_text("[]\n")
    done = call(
        capsys, "generate", model, *(argument.format(tmp=tmp_path) for argument in arguments)
    )
    assert done.status == 2
    assert expected in done.err
    assert "Traceback" not in done.err


def test_a_checkpoint_without_a_tokenizer_or_marks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_speaker(tmp_path / "c")
    write_tokenizer(path, tuple(f"w{n}" for n in range(64)))
    chat = call(capsys, "generate", path, "--prompt", "w7", "--chat")
    assert "without the marks of a conversation" in chat.err
    write_tokenizer(path, (*WORDS, "one more"))
    assert "ids below the model's 64" in call(capsys, "generate", path, "--prompt", "w7").err
    (path / "tokenizer.json").unlink()
    assert "tokenizer.json = " in call(capsys, "generate", path, "--prompt", "w7").err


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_ends_it_cleanly(model: Path, tmp_path: Path) -> None:
    endless = shutil.copytree(model, tmp_path / "endless")
    (endless / "generation_config.json").write_text('{"eos_token_id": []}')
    command = [sys.executable, "-m", "degarble.harness.cli.main", "generate", str(endless)]
    line = [*command, "--prompt", "w7", "--max-new-tokens", "100000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    try:
        running = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert running.stdout is not None
        assert running.stdout.read(8)  # it speaks
        time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=HANG_SECONDS)
    finally:
        running.kill()
    assert running.returncode == 130, err
    assert out.endswith(b"\n")
    assert err.decode().strip().endswith("degarble: interrupted")
    assert b"Traceback" not in err


# --------------------------------------------------------------------------------------------------
# Talking turn by turn: what stays in the history, and what never ends the talk.

LINE = ("--interactive", "--max-new-tokens", 3, "--numerics", "definition")


@pytest.fixture(scope="module")
def dialogue_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_speaker(tmp_path_factory.mktemp("dialogue") / "model")
    write_tokenizer(folder, (*WORDS[:-1], "?"))  # it has an id for what it does not know
    return folder


@pytest.fixture(scope="module")
def opened(dialogue_model: Path) -> Iterator[Any]:
    with open_model(dialogue_model, "definition") as made:
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
    question = dialogue.add_user_message("w7 w8")
    with pytest.raises(KeyboardInterrupt):
        dialogue.answer(question, said_until(2))
    following = dialogue.add_user_message("w9")
    assert following.ids[: len(question.ids)] == question.ids
    if chat:
        assert [message["role"] for message in following.messages] == ["user", "assistant", "user"]
        assert len(following.messages[1]["content"].split()) == 2
    else:
        assert len(following.ids) == len(question.ids) + 2 + 1
    fresh = talker(opened, chat=chat).generation()
    alone = Continuation(list(following.ids))
    fresh.run([alone])
    assert dialogue.answer(following).ids == alone.ids


def test_one_stream_of_random_numbers_goes_through_all_turns(opened: Any) -> None:
    dialogue = Dialogue(talker(opened, sampling=Sampling(1.0, 1.0, 5)))
    spoken = [dialogue.send("w7 w8").ids, dialogue.send("w9").ids]
    again = Dialogue(talker(opened, sampling=Sampling(1.0, 1.0, 5)))
    assert [again.send("w7 w8").ids, again.send("w9").ids] == spoken
    assert dialogue._sampler.drawn == sum(map(len, spoken))


def test_what_cannot_be_read_is_refused_and_changes_nothing(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogitsModel, "context", property(lambda _self: 12))
    lines: list[str] = []
    generator = TextGenerator(opened, GenerationOptions(limits=Limits(2)), lines.append)
    dialogue = Dialogue(generator)
    dialogue.send("w7 w8")  # begin, two words, two new
    with pytest.raises(InvalidArgument, match="12"):
        dialogue.add_user_message("w9 " * 20)
    assert len(dialogue.add_user_message("w9").ids) == 6
    assert not lines
    anew = dialogue.add_user_message("w9 " * 8)
    assert len(anew.ids) == 9
    assert lines == ["(the context of 12 tokens is full: starting anew)"]
    fresh = Continuation(list(anew.ids))
    generator.generation().run([fresh])
    assert dialogue.answer(anew).ids == fresh.ids


def test_a_line_that_is_no_text_does_not_end_the_talk(
    dialogue_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"w7\nw\xff8\n \nw9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", lines)
    done = call(capsys, "generate", dialogue_model, *LINE)
    assert done.status == 0
    assert len(done.out.splitlines()) == 2
    assert done.err.count("text in UTF-8 (character 2 is none)") == 1


def test_unknown_words_are_reported_once_by_name_and_count(
    dialogue_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = LINE[1:]
    done = call(capsys, "generate", dialogue_model, "--prompt", "w7 frog w8 frog toad ?", *limits)
    assert done.status == 0
    assert "3 words are unknown to the tokenizer" in done.err
    assert "'frog' (2 times), 'toad'" in done.err
    assert (
        "unknown" not in call(capsys, "generate", dialogue_model, "--prompt", "w7 ?", *limits).err
    )
    (tmp_path / "text.txt").write_text("w7 newt w8")
    evaluated = call(capsys, "generate", dialogue_model, "--perplexity", tmp_path / "text.txt")
    assert "warning: 1 word is unknown" in evaluated.err
    assert "'newt'" in evaluated.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("frog\nfrog w7\ntoad\n"))
    talk = call(capsys, "generate", dialogue_model, *LINE)
    assert talk.err.count("'frog'") == 1
    assert talk.err.count("'toad'") == 1


def test_lines_of_a_file_are_counted_from_one(
    dialogue_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("[", "3"):
        (tmp_path / "prompts.jsonl").write_text(f'"w7"\n\n{wrong}\n')
        done = call(capsys, "generate", dialogue_model, "--prompts", tmp_path / "prompts.jsonl")
        assert done.status == 2
        assert "prompts.jsonl: line 3 = " in done.err
