"""The training language of the small models: sentences, facts to recall, arithmetic, copying.

The generator of documents and the judge of sentences are written independently: the judge parses
words and does not know how they were drawn. Everything is a function of a seed.

Sentences agree in number and tense, and choose a or an by the next word. A fact is `recall : anna
paints blue .`; it is stated once and asked for again up to 1,024 tokens later. Sums and differences
stay below 100; `copy : w w w , w w w .` repeats a list of words.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from degarble.references.tiny import words as w

_VOWELS = "aeiou"
_ONE = {one: n for n, (one, _) in enumerate(w.NOUNS)}
_MANY = {many: n for n, (_, many) in enumerate(w.NOUNS)}
_VERB_FORM = {
    word: form
    for triple in w.VERBS
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

    ids: list[int] = field(default_factory=lambda: [w.BOS])
    probes: list[Probe] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Append words."""
        self.ids.extend(w.encode(text))


def _noun_phrase(rng: random.Random, *, many: bool) -> list[str]:
    noun = rng.choice(w.NOUNS)[1 if many else 0]
    rest = [noun] if rng.random() < 0.5 else [rng.choice(w.ADJECTIVES), noun]
    kind = w.DETERMINERS_MANY if many else w.DETERMINERS_ONE
    determiner = rng.choice((*kind, *w.DETERMINERS_ANY))
    if determiner in ("a", "an"):
        determiner = "an" if rest[0][0] in _VOWELS else "a"
    return [determiner, *rest]


def _clause(rng: random.Random, *, past: bool) -> list[str]:
    many = rng.random() < 0.5
    verb = rng.choice(w.VERBS)[2 if past else (0 if many else 1)]
    words = _noun_phrase(rng, many=many)
    if rng.random() < 0.25:
        words.append(rng.choice(w.ADVERBS))
    words += [verb, *_noun_phrase(rng, many=rng.random() < 0.5)]
    if rng.random() < 0.35:
        words += [rng.choice(w.PREPOSITIONS), *_noun_phrase(rng, many=rng.random() < 0.5)]
    return words


def sentence(rng: random.Random) -> str:
    """Return one sentence, with its full stop."""
    past = rng.random() < 0.3
    words = ["yesterday"] if past else []
    words += _clause(rng, past=past)
    if rng.random() < 0.3:
        words += [rng.choice(w.LINKS), *_clause(rng, past=past)]
    return " ".join([*words, "."])


def _take_noun_phrase(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the number of the leading noun phrase and the rest, or None where there is none."""
    if not words:
        return None
    determiner, rest = words[0], words[1:]
    adjective = bool(rest) and rest[0] in w.ADJECTIVES
    at = 1 if adjective else 0
    if len(rest) <= at:
        return None
    noun = rest[at]
    number = "one" if noun in _ONE else "many" if noun in _MANY else None
    fits = {
        "one": (*w.DETERMINERS_ONE, *w.DETERMINERS_ANY),
        "many": (*w.DETERMINERS_MANY, *w.DETERMINERS_ANY),
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
    if rest and rest[0] in w.ADVERBS:
        rest = rest[1:]
    if not rest or _VERB_FORM.get(rest[0]) != ("past" if past else number):
        return None
    found = _take_noun_phrase(rest[1:])
    if found is None:
        return None
    rest = found[1]
    if rest and rest[0] in w.PREPOSITIONS:
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
    if rest and rest[0] in w.LINKS:
        rest = _take_clause(rest[1:], past=past)
    return rest == []


def _sum(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer."""
    first, second = rng.randrange(50), rng.randrange(50)
    if rng.random() < 0.5:
        return f"{first} plus {second} is", str(first + second)
    first, second = max(first, second), min(first, second)
    return f"{first} minus {second} is", str(first - second)


_COPIED = (*w.COLOURS, *w.FOODS, *w.CITIES, *w.PETS, *w.ADJECTIVES)


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
        relations = list(w.RELATIONS)
        if mixture.single and rng.random() < mixture.single:
            relations = [rng.choice(relations)]
        keys = [(name, relation) for name in w.NAMES for relation in relations]
        self.unstated = [
            (name, relation, rng.choice(w.RELATIONS[relation]))
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
        answer = w.IDS[word]
        self.document.probes.append(Probe(kind, len(self.document.ids), answer, distance))
        self.document.ids.append(answer)


def document(seed: int, mixture: Mixture | None = None) -> Document:
    """Return one document of at least the mixture's length, a function of the seed alone."""
    return _Writer(random.Random(seed), mixture or Mixture()).write()  # noqa: S311  no secrets
