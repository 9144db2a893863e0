"""The small language: every drawn sentence parses, spoilt ones do not, answers are right."""

from __future__ import annotations

import random

import pytest

from degarble.references.tiny import words
from degarble.references.tiny.language import Mixture, document, is_sentence, sentence


def test_drawn_sentences_parse(seed: int) -> None:
    rng = random.Random(seed)
    drawn = [sentence(rng) for _ in range(500)]
    assert all(is_sentence(text) for text in drawn)
    assert len(set(drawn)) > 450


@pytest.mark.parametrize(
    "spoilt",
    [
        "the fox see a tree .",
        "the foxes sees a tree .",
        "a owl sees the tree .",
        "an fox sees the tree .",
        "these fox see the tree .",
        "yesterday the fox sees the tree .",
        "the fox saw the tree .",
        "the fox sees the .",
        "the fox sees the tree",
        "the fox sees the tree and .",
        "the quickly fox sees the tree .",
        "fox the sees the tree .",
        ".",
        "",
    ],
)
def test_what_the_grammar_forbids_does_not_parse(spoilt: str) -> None:
    assert is_sentence("the fox sees an old tree near the river .")
    assert not is_sentence(spoilt)


def test_a_document_is_a_function_of_its_seed(seed: int) -> None:
    assert document(seed) == document(seed)
    assert document(seed).ids != document(seed + 1).ids


def test_answers_stand_where_probes_say_and_follow_from_the_text(seed: int) -> None:
    made = document(seed, Mixture(length=1500))
    text = [words.WORDS[number] for number in made.ids]
    kinds = {probe.kind for probe in made.probes}
    assert kinds == {"recall", "sum", "copy"}
    for probe in made.probes:
        assert made.ids[probe.position] == probe.answer
        at = probe.position
        if probe.kind == "recall":
            mention = at - probe.distance
            assert text[at - 2 : at + 1] == text[mention - 2 : mention + 1]
            assert 0 < probe.distance <= 1024
        if probe.kind == "sum":
            first, sign, second = text[at - 4 : at - 1]
            total = int(first) + (1 if sign == "plus" else -1) * int(second)
            assert text[at] == str(total)
    assert any(probe.distance > 512 for probe in made.probes)


def test_words_are_512_and_distinct() -> None:
    assert len(set(words.WORDS)) == words.SIZE == 512
    assert words.decode(words.encode("anna paints blue .")) == "anna paints blue ."
