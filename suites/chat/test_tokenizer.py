"""Tokenizers: text to ids and back, incremental decoding, stop strings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Codec
from tokenizers import decoders, models, pre_tokenizers, trainers

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.chat import special_tokens as marks
from degarble.harness.chat.tokenizer import IncrementalDecoder, Stops, Tokenizer
from degarble.harness.commands.tiny_release import tokenizer_files

if TYPE_CHECKING:
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Tokenizers: byte-level and by words, special tokens, ids at both ends, text id by id.

TEXTS = ["", "hello world", "  two  blanks\n", "日本語 und Ümläute", "🦊🦊 fox", "a\x00b"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As DeepSeek's: byte-level BPE, with marks as added tokens."""
    codec = Codec(models.BPE())
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = decoders.ByteLevel()
    special = [marks.BOS, marks.EOS, marks.USER, marks.ASSISTANT, marks.THINK, marks.END_THINK]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    codec.train_from_iterator(["hello world hello fox"], trainer)
    folder = tmp_path_factory.mktemp("bytes")
    codec.save(str(folder / "tokenizer.json"))
    return folder


def load(folder: Path, vocabulary: int = 512, **config: Any) -> Tokenizer:
    return Tokenizer.of_checkpoint(folder, config, vocabulary)


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(byte_level: Path, text: str) -> None:
    tokenizer = load(byte_level)
    assert tokenizer.decode(tokenizer.encode(text, begin=False)) == text
    assert tokenizer.encode(text)[:1] == [tokenizer.begin]


def test_marks_are_single_tokens_and_bos_stands_once(byte_level: Path) -> None:
    tokenizer = load(byte_level)
    ids = tokenizer.encode(f"{marks.BOS}{marks.USER}fox{marks.ASSISTANT}{marks.END_THINK}")
    assert ids[:2] == [0, 2]
    assert ids[-2:] == [3, 5]
    assert ids.count(0) == 1
    assert tokenizer.knows(marks.USER, marks.THINK)
    assert not tokenizer.knows(marks.USER, marks.REMINDER)


@pytest.mark.parametrize("text", [*TEXTS, "🦊 " * 50, "hello " * 60, marks.THINK + "x"])
def test_a_text_grows_by_whole_characters(byte_level: Path, text: str) -> None:
    tokenizer = load(byte_level)
    growing, pieces = IncrementalDecoder(tokenizer), []
    for number in tokenizer.encode(text, begin=False):
        piece = growing.add(number)
        assert "\N{REPLACEMENT CHARACTER}" not in piece
        pieces.append(piece)
    assert "".join(pieces) + growing.rest() == text


def test_half_a_character_comes_out_at_the_end(byte_level: Path) -> None:
    tokenizer = load(byte_level)
    growing = IncrementalDecoder(tokenizer)
    first = tokenizer.encode("🦊", begin=False)[:2]
    assert [growing.add(number) for number in first] == ["", ""]
    assert growing.rest() == tokenizer.decode(first) != ""


def test_words_grow_with_their_blanks(tmp_path: Path) -> None:
    for name, raw in tokenizer_files().items():
        (tmp_path / name).write_bytes(raw)
    tokenizer = load(tmp_path)
    assert tokenizer.begin == 0
    assert tokenizer.ends == {1}
    text = " ".join(["anna paints blue ."] * 40)
    growing = IncrementalDecoder(tokenizer)
    pieces = [growing.add(number) for number in tokenizer.encode(text, begin=False)]
    assert pieces[:3] == ["anna", " paints", " blue"]
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("config", "generation", "begin", "ends"),
    [
        ({"bos_token_id": 7, "eos_token_id": [8, 9]}, {}, 7, {8, 9}),
        ({}, {"bos_token_id": 7, "eos_token_id": 8}, 7, {8}),
        ({"eos_token_id": 3}, {"eos_token_id": 8}, 0, {3}),
        ({}, {}, 0, {1}),
    ],
)
def test_ids_at_both_ends(
    byte_level: Path, tmp_path: Path, config: Any, generation: Any, begin: int, ends: set[int]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = load(tmp_path, **config)
    assert tokenizer.begin == begin
    assert tokenizer.ends == ends


def test_what_is_no_tokenizer_is_refused_by_name(byte_level: Path, tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match=r"tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UnreadableFile, match=r"tokenizer\.json"):
        load(tmp_path)
    with pytest.raises(InvalidArgument, match="below the model's 64"):
        load(byte_level, vocabulary=64)
    (tmp_path / "tokenizer.json").write_bytes((byte_level / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UnreadableFile, match="generation_config"):
        load(tmp_path)


# --------------------------------------------------------------------------------------------------
# Stops, wherever the pieces of a text are cut.


def through(text: str, stops: list[str], size: int) -> tuple[str, str | None]:
    made, out = Stops(stops), ""
    for begin in range(0, len(text), size):
        out += made.add(text[begin : begin + size])
        assert not any(stop in out for stop in stops)
        if made.hit is not None:
            return out, made.hit
    return out + made.rest(), None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stops", "shown", "hit"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four"], "one two three", None),
        ("aaab", ["aab"], "a", "aab"),
        ("ends with a beginning: tw", ["two"], "ends with a beginning: tw", None),
        ("x\n\nUser: y", ["\nUser:", "User"], "x\n\n", "User"),
        ("abc", ["c", "bc"], "a", "bc"),
    ],
)
def test_nothing_of_a_stop_is_shown(
    text: str, stops: list[str], shown: str, hit: str | None, size: int
) -> None:
    assert through(text, stops, size) == (shown, hit)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--stop"):
        Stops(["x", ""])
