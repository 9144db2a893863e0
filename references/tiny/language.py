"""The training language of the small models: 512 words, sentences, facts to recall, sums, copying.

The generator of documents and the judge of sentences are written independently: the judge parses
words and does not know how they were drawn. Everything is a function of a seed. One word is one
token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


# --------------------------------------------------------------------------------------------------
# The words, in classes, with their ids
#
# Ids follow the order of the classes. Importing this raises if a word appears twice or the count is
# not 512.

SIZE = 512


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _forms(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(entry.split("/")) for entry in text.split())


SPECIALS = ("<bos>", "<eos>", "<pad>")
MARKS = (".", ",", "?", ":", "copy", "recall", "is", "plus", "minus", "yesterday")
NUMBERS = tuple(str(n) for n in range(100))

NAMES = _words(
    """anna boris clara david elena felix greta henry irene jonas karla leon maria nora oscar paula
    quinn rosa simon tessa ulric vera walter xenia yuri zara adam bella cyril dora emil fiona gustav
    hanna ivan julia kurt lena marco nina otto petra ralf sonja tom ursula viktor wanda"""
)
COLOURS = _words("red blue green yellow purple orange white black grey pink brown golden")
FOODS = _words(
    """bread soup rice cheese apples honey fish beans cake olives nuts plums corn figs pasta
    grapes"""
)
CITIES = _words(
    """paris rome oslo cairo lima tokyo delhi quebec athens berlin madrid lisbon vienna prague
    dublin seoul"""
)
PETS = _words("cat dog parrot rabbit turtle goat pony hamster lizard ferret goose duck")
# A fact: NAME RELATION VALUE, and the values that each relation takes.
RELATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"paints": COLOURS, "eats": FOODS, "visits": CITIES, "keeps": PETS}
)

DETERMINERS_ONE = ("a", "an", "this", "every", "one")
DETERMINERS_MANY = ("these", "some", "many", "few", "several")
DETERMINERS_ANY = ("the",)
ADJECTIVES = _words(
    """old small bright quiet heavy angry empty early open ugly tall round clever lazy narrow dusty
    warm cold gentle proud"""
)
# (one, many): the noun with and without plural.
NOUNS = _forms(
    """fox/foxes tree/trees house/houses river/rivers teacher/teachers engine/engines
    artist/artists island/islands window/windows garden/gardens doctor/doctors owl/owls
    child/children letter/letters bridge/bridges farmer/farmers ship/ships stone/stones
    actor/actors uncle/uncles king/kings road/roads lamp/lamps singer/singers elephant/elephants
    orchard/orchards wolf/wolves tower/towers student/students mountain/mountains"""
)
# (with a plural subject, with a singular subject, in the past).
VERBS = _forms(
    """see/sees/saw follow/follows/followed find/finds/found help/helps/helped
    watch/watches/watched carry/carries/carried call/calls/called leave/leaves/left
    build/builds/built hear/hears/heard move/moves/moved know/knows/knew draw/draws/drew
    cross/crosses/crossed guard/guards/guarded miss/misses/missed clean/cleans/cleaned
    reach/reaches/reached choose/chooses/chose praise/praises/praised"""
)
PREPOSITIONS = ("near", "behind", "under", "beside", "above", "across", "inside", "around")
LINKS = ("and", "but", "because", "while", "although", "before")
ADVERBS = ("often", "never", "slowly", "always", "gladly", "rarely", "quickly", "calmly")

_CLASSES = (
    *(SPECIALS, MARKS, NUMBERS, NAMES, COLOURS, FOODS, CITIES, PETS, tuple(RELATIONS)),
    *(DETERMINERS_ONE, DETERMINERS_MANY, DETERMINERS_ANY, ADJECTIVES),
    *(tuple(word for pair in NOUNS for word in pair), tuple(w for triple in VERBS for w in triple)),
    *(PREPOSITIONS, LINKS, ADVERBS),
)
_KNOWN = tuple(word for words in _CLASSES for word in words)
# The rest of the 512 ids is held by words that no sentence uses.
WORDS = (*_KNOWN, *(f"<unused_{number}>" for number in range(SIZE - len(_KNOWN))))
IDS: Mapping[str, int] = MappingProxyType({word: number for number, word in enumerate(WORDS)})

assert len(IDS) == SIZE == len(WORDS), f"{len(_KNOWN)} words, {len(IDS)} different ones"
BOS, EOS, PAD = (IDS[word] for word in SPECIALS)


def encode(text: str) -> list[int]:
    """Return ids of blank-separated words."""
    return [IDS[word] for word in text.split()]


def decode(ids: list[int]) -> str:
    """Return blank-separated words of ids."""
    return " ".join(WORDS[number] for number in ids)


# --------------------------------------------------------------------------------------------------
# Sentences and documents
#
# Sentences agree in number and tense, and choose a or an by the next word. A fact is
# `recall : anna paints blue .`; it is stated once and asked for again up to 1,024 tokens later.
# Sums and differences stay below 100; `copy : w w w , w w w .` repeats a list of words.

_VOWELS = "aeiou"
_ONE = {one: n for n, (one, _) in enumerate(NOUNS)}
_MANY = {many: n for n, (_, many) in enumerate(NOUNS)}
_VERB_FORM = {
    word: form
    for triple in VERBS
    for form, word in zip(("many", "one", "past"), triple, strict=True)
}


@dataclass(frozen=True)
class Probe:
    """A position at which the model must know the answer."""

    kind: str  # recall, sum or copy
    position: int
    answer: int
    distance: int = 0  # tokens since the fact was stated


@dataclass
class Document:
    """Token ids and the probes in them."""

    ids: list[int] = field(default_factory=lambda: [BOS])
    probes: list[Probe] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Append words."""
        self.ids.extend(encode(text))


def _noun_phrase(rng: random.Random, *, many: bool) -> list[str]:
    noun = rng.choice(NOUNS)[1 if many else 0]
    rest = [noun] if rng.random() < 0.5 else [rng.choice(ADJECTIVES), noun]
    kind = DETERMINERS_MANY if many else DETERMINERS_ONE
    determiner = rng.choice((*kind, *DETERMINERS_ANY))
    if determiner in ("a", "an"):
        determiner = "an" if rest[0][0] in _VOWELS else "a"
    return [determiner, *rest]


def _clause(rng: random.Random, *, past: bool) -> list[str]:
    many = rng.random() < 0.5
    verb = rng.choice(VERBS)[2 if past else (0 if many else 1)]
    words = _noun_phrase(rng, many=many)
    if rng.random() < 0.25:
        words.append(rng.choice(ADVERBS))
    words += [verb, *_noun_phrase(rng, many=rng.random() < 0.5)]
    if rng.random() < 0.35:
        words += [rng.choice(PREPOSITIONS), *_noun_phrase(rng, many=rng.random() < 0.5)]
    return words


def sentence(rng: random.Random) -> str:
    """Return one sentence, with its full stop."""
    past = rng.random() < 0.3
    words = ["yesterday"] if past else []
    words += _clause(rng, past=past)
    if rng.random() < 0.3:
        words += [rng.choice(LINKS), *_clause(rng, past=past)]
    return " ".join([*words, "."])


def _take_noun_phrase(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the number of the leading noun phrase and the rest, or None where there is none."""
    if not words:
        return None
    determiner, rest = words[0], words[1:]
    adjective = bool(rest) and rest[0] in ADJECTIVES
    at = 1 if adjective else 0
    if len(rest) <= at:
        return None
    noun = rest[at]
    number = "one" if noun in _ONE else "many" if noun in _MANY else None
    fits = {
        "one": (*DETERMINERS_ONE, *DETERMINERS_ANY),
        "many": (*DETERMINERS_MANY, *DETERMINERS_ANY),
    }
    if number is None or determiner not in fits[number]:
        return None
    if determiner in ("a", "an") and (determiner == "an") != (rest[0][0] in _VOWELS):
        return None
    return number, rest[at + 1 :]


def _take_clause(words: list[str], *, past: bool) -> list[str] | None:
    """Return what follows the leading clause, or None where there is none."""
    subject = _take_noun_phrase(words)
    if subject is None:
        return None
    number, rest = subject
    if rest and rest[0] in ADVERBS:
        rest = rest[1:]
    if not rest or _VERB_FORM.get(rest[0]) != ("past" if past else number):
        return None
    found = _take_noun_phrase(rest[1:])
    if found is None:
        return None
    rest = found[1]
    if rest and rest[0] in PREPOSITIONS:
        found = _take_noun_phrase(rest[1:])
        return None if found is None else found[1]
    return rest


def is_sentence(text: str) -> bool:
    """Return whether `text`, with its full stop, is a sentence of the grammar."""
    words = text.split()
    if not words or words[-1] != ".":
        return False
    words = words[:-1]
    past = words[:1] == ["yesterday"]
    rest = _take_clause(words[1:] if past else words, past=past)
    if rest and rest[0] in LINKS:
        rest = _take_clause(rest[1:], past=past)
    return rest == []


def _sum(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer."""
    first, second = rng.randrange(50), rng.randrange(50)
    if rng.random() < 0.5:
        return f"{first} plus {second} is", str(first + second)
    first, second = max(first, second), min(first, second)
    return f"{first} minus {second} is", str(first - second)


_COPIED = (*COLOURS, *FOODS, *CITIES, *PETS, *ADJECTIVES)


@dataclass(frozen=True)
class Mixture:
    """The length of a document, how many facts it states, and how often each kind of item comes.

    `single` is the share of documents whose facts have one relation, so that only the name tells
    them apart: training against models that look at relations alone.
    """

    length: int = 1280
    facts: int = 16
    sentences: float = 0.4
    recalls: float = 0.45
    sums: float = 0.08
    copies: float = 0.07
    farthest: int = 1024
    single: float = 0.0


class _Writer:
    """One document in the making."""

    def __init__(self, rng: random.Random, mixture: Mixture) -> None:
        self.rng = rng
        self.mixture = mixture
        self.document = Document()
        relations = list(RELATIONS)
        if mixture.single and rng.random() < mixture.single:
            relations = [rng.choice(relations)]
        keys = [(name, relation) for name in NAMES for relation in relations]
        self.unstated = [
            (name, relation, rng.choice(RELATIONS[relation]))
            for name, relation in rng.sample(keys, mixture.facts)
        ]
        self.stated: dict[tuple[str, str, str], int] = {}

    def write(self) -> Document:
        """Write items until the length is reached; facts come early, questions about them later."""
        spread = self.mixture.length // 4
        while len(self.document.ids) < self.mixture.length:
            here = len(self.document.ids)
            due = here * (self.mixture.facts + 1) // max(1, spread)
            if self.unstated and len(self.stated) < min(due, self.mixture.facts):
                self._state()
            else:
                self._item()
        return self.document

    def _state(self) -> None:
        name, relation, value = self.unstated.pop()
        self.document.add(f"{name} {relation} {value} .")
        self.stated[name, relation, value] = len(self.document.ids) - 2

    def _item(self) -> None:
        kinds = ("sentences", "recalls", "sums", "copies")
        shares = [getattr(self.mixture, kind) for kind in kinds]
        (kind,) = self.rng.choices(kinds, shares)
        getattr(self, f"_{kind}")()

    def _sentences(self) -> None:
        self.document.add(sentence(self.rng))

    def _recalls(self) -> None:
        """Ask for the fact whose last mention is nearest to a drawn distance."""
        here = len(self.document.ids) + 4
        farthest = self.mixture.farthest
        near = 8.0 * (farthest / 8.0) ** self.rng.random()  # evenly in octaves
        wanted = near if self.rng.random() < 0.4 else self.rng.uniform(128.0, farthest)
        known = [f for f, at in self.stated.items() if here - at <= self.mixture.farthest]
        if not known:
            self._sentences()
            return
        fact = min(known, key=lambda f: abs(here - self.stated[f] - wanted))
        name, relation, value = fact
        self.document.add(f"recall : {name} {relation}")
        self._probe("recall", value, len(self.document.ids) - self.stated[fact])
        # Asking is a mention too: what follows is measured from here.
        self.stated[fact] = len(self.document.ids) - 1
        self.document.add(".")

    def _sums(self) -> None:
        question, answer = _sum(self.rng)
        self.document.add(question)
        self._probe("sum", answer)
        self.document.add(".")

    def _copies(self) -> None:
        items = [self.rng.choice(_COPIED) for _ in range(self.rng.randint(3, 8))]
        self.document.add(f"copy : {' '.join(items)} ,")
        for item in items:
            self._probe("copy", item)
        self.document.add(".")

    def _probe(self, kind: str, word: str, distance: int = 0) -> None:
        answer = IDS[word]
        self.document.probes.append(Probe(kind, len(self.document.ids), answer, distance))
        self.document.ids.append(answer)


def document(seed: int, mixture: Mixture | None = None) -> Document:
    """Return one document of at least the mixture's length, a function of the seed alone."""
    return _Writer(random.Random(seed), mixture or Mixture()).write()  # noqa: S311  no secrets
