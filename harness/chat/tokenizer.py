"""A checkpoint's tokenizer: text to ids and back, incremental decoding, stop strings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, MissingDependency, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.chat import special_tokens as marks
from degarble.harness.model.config.json_file import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# tokenizer.json is loaded with the package `tokenizers`; the ids that begin and end a text come
# from config.json and generation_config.json. IncrementalDecoder returns text only up to its last
# complete character. Special tokens in a text are encoded as such, and shown when decoded, because
# the output of a garbled model is evidence. A tokenizer with ids that the model does not have is an
# error.

FILE = "tokenizer.json"
LARGEST_FILE = 64 << 20  # V4's has 7 MB
_LARGEST_CONFIG = 1 << 20
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. `begin` is None where a model's texts begin with no special token."""

    codec: Any  # tokenizers.Tokenizer
    begin: int | None
    ends: frozenset[int]

    @classmethod
    def of_checkpoint(cls, folder: Path, config: Mapping[str, Any], vocabulary: int) -> Tokenizer:
        """Load the tokenizer of a checkpoint whose model has `vocabulary` ids."""
        path = folder / FILE
        if not path.is_file():
            raise UnreadableFile(
                FILE, str(path), "the model's tokenizer in the folder of its weights",
                "Copy tokenizer.json from the model's own repository into the checkpoint.",
            )  # fmt: skip
        codec = _codec(path)
        known = codec.get_vocab(with_added_tokens=True)
        largest = max(known.values(), default=-1)
        if largest >= vocabulary:
            raise InvalidArgument(
                f"ids of {path}", largest, f"ids below the model's {vocabulary}",
                "Use the tokenizer of this very model.",
            )  # fmt: skip
        stated = _generation_config(folder) | dict(config)
        family = config.get("model_type")
        own = family in (None, *ARCHITECTURES)
        return cls(codec, _begin(stated, known) if own else _prefix(codec), _ends(stated, known))

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Return the ids of a text; BOS comes first unless the text has it, or `begin` is False."""
        try:
            ids: list[int] = self.codec.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package has no narrower class
            raise InvalidArgument(
                "text", text, f"text that the tokenizer can encode ({error})",
                "Use words that the model knows.",
            ) from error  # fmt: skip
        if begin and self.begin is not None and ids[:1] != [self.begin]:
            ids = [self.begin, *ids]
        return ids

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that become the id of unknown words, once an occurrence."""
        mark = getattr(self.codec.model, "unk_token", None)
        number = None if mark is None else self.codec.token_to_id(mark)
        if number is None:
            return []
        made = self.codec.encode(text, add_special_tokens=False)
        places = [
            place for each, place in zip(made.ids, made.offsets, strict=True) if each == number
        ]
        said = [text[begin:end] for begin, end in places]
        return [word for word in said if word.strip() != mark]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text: str = self.codec.decode(list(ids), skip_special_tokens=False)
        return text

    def knows(self, *tokens: str) -> bool:
        """Return whether each of these is one token."""
        return all(self.codec.token_to_id(token) is not None for token in tokens)


class IncrementalDecoder:
    """Incremental decoding: the text of ids that arrive one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = 0  # ids before this one are out, and no longer looked at
        self._shown = ""  # what is out of the text since then

    def add(self, number: int) -> str:
        """Take one id; return what is complete."""
        self._ids.append(number)
        text = self._tokenizer.decode(self._ids[self._from :])
        if text.endswith(_INCOMPLETE) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        if len(self._ids) - self._from > 32 and piece:
            # Trap: a decoder may treat the first id otherwise (a space), so one stays in view.
            self._from = len(self._ids) - 1
            self._shown = self._tokenizer.decode(self._ids[self._from :])
        return piece

    def rest(self) -> str:
        """Return what is left, complete or not."""
        text = self._tokenizer.decode(self._ids[self._from :])
        piece = text[len(self._shown) :]
        self._shown = text
        return piece


def _codec(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Codec  # noqa: PLC0415  only where texts are needed
    except ImportError as error:
        raise MissingDependency(
            "tokenizers", "absent", "the package that reads tokenizer.json",
            "pip install tokenizers",
        ) from error  # fmt: skip
    raw = read_small_file(path, LARGEST_FILE)
    try:
        return Codec.from_str(raw.decode())
    except Exception as error:  # whatever it is, the package refused this file
        raise UnreadableFile(
            str(path), str(error), "a tokenizer.json that the package `tokenizers` reads",
            "Copy it from the model's own repository again.",
        ) from error  # fmt: skip


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_small_file(path, _LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            str(path), str(error), "a JSON object", "Repair it, or remove it."
        ) from error
    return found if isinstance(found, dict) else {}


def _begin(stated: Mapping[str, Any], known: Mapping[str, int]) -> int | None:
    number = stated.get("bos_token_id", known.get(marks.BOS, known.get("<bos>")))
    return number if type(number) is int else None


def _prefix(codec: Any) -> int | None:
    """Return the token that a tokenizer puts before a text by itself: many configs name another."""
    ids = codec.encode("a", add_special_tokens=True).ids
    plain = codec.encode("a", add_special_tokens=False).ids
    return ids[0] if ids[:1] != plain[:1] and ids[1 : 1 + len(plain)] == plain else None


def _ends(stated: Mapping[str, Any], known: Mapping[str, int]) -> frozenset[int]:
    number = stated.get("eos_token_id", known.get(marks.EOS, known.get("<eos>")))
    several = number if isinstance(number, list) else [number]
    return frozenset(each for each in several if type(each) is int)


# --------------------------------------------------------------------------------------------------
# Stop strings in streamed text, also where they spread over several tokens. Text that may become a
# stop is held back, so that no part of a stop is ever shown. An empty stop is an error, because it
# would end every text at once.


class Stops:
    """A text that arrives in pieces and ends where the first stop begins."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidArgument("--stop", "", "a text of one character at least", "Leave it out.")
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def add(self, piece: str) -> str:
        """Take a piece; return what can no longer be the beginning of a stop."""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The one that is complete first, however the pieces are cut; of several, the longest.
            place, self.hit = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            self._held = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what was held back when no stop came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
