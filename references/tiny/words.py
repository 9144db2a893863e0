"""The 512 words of the small language, in classes, with their ids.

One word is one token; ids follow the order of the classes. Importing this raises if a word appears
twice or the count is not 512.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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
