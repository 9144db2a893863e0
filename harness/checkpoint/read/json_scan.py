"""A pull parser for JSON objects in untrusted files: bounded memory, no repeated keys.

The object is never built as a whole, so memory follows what the caller keeps, not what a file
claims. Small values are parsed by the standard decoder from a window of bounded size. These raise
an error with file and byte offset: repeated keys, bad UTF-8, lone surrogates, NaN and infinities,
values larger than their window, nesting that exhausts the stack, and text after the end.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.read.types import LONGEST_ENTRY

if TYPE_CHECKING:
    from collections.abc import Iterator

# Possessive quantifiers: no backtracking on hostile text.
_BLANK = re.compile(rb"[ \t\n\r]*+")
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"', re.DOTALL)
_UTF8 = codecs.getincrementaldecoder("utf-8")


class ObjectScanner:
    """A scanner of the JSON text in `data[begin:end]`; `position` is the next byte.

    Messages use `file` and `first`, the offset of `data[0]` in the file.
    """

    def __init__(self, data: bytes, file: str, first: int = 0) -> None:
        self.data = data
        self.file = file
        self.first = first
        self.position = 0

    def refuse(self, what: str, value: object, expectation: str) -> NoReturn:
        """Raise an error at the current position."""
        raise UnreadableFile(
            f"{self.file}: {what} at byte {self.first + self.position}",
            value,
            expectation,
            "Download or write the file again; do not repair it by hand.",
        )

    def members(self, seen: set[str] | None = None) -> Iterator[str]:
        """Yield the keys of the object here; consume each value before asking for the next key.

        Whoever consumes further members with a value adds their keys to `seen`.
        """
        self._expect(b"{", "an object")
        seen = set() if seen is None else seen
        if self._next() == b"}":
            self.position += 1
            return
        while True:
            key = self.string()
            if key in seen:
                self.refuse("key", key, "each key once")
            seen.add(key)
            self._expect(b":", "a colon")
            yield key
            if self._next() != b",":
                break
            self.position += 1
        self._expect(b"}", "a comma or the end of the object")

    def string(self) -> str:
        """Read one string."""
        self._next()
        match = _STRING.match(self.data, self.position, self.position + LONGEST_ENTRY)
        if match is None:
            self.refuse("text", self._shown(), f"a string of at most {LONGEST_ENTRY} bytes")
        text = self._decoded(match.group())
        self.position = match.end()
        return text

    def value(self, largest: int = LONGEST_ENTRY) -> Any:
        """Read one value whole, out of at most `largest` bytes."""
        self._next()
        window = self.data[self.position : self.position + largest]
        try:
            # The window may end within a character; the incremental decoder leaves that one out.
            text = _UTF8().decode(window)
            found, stop = _DECODER.raw_decode(text)
            if "\\u" in text[:stop]:
                # Trap: an escaped lone surrogate is no text, and the decoder lets it pass.
                json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            self.refuse("value", reason, f"one JSON value of at most {largest} bytes")
        # raw_decode counts characters, positions count bytes.
        self.position += len(text[:stop].encode())
        return found

    def finish(self) -> None:
        """Raise for anything but blanks up to the end."""
        if self._next():
            self.refuse("text", self._shown(), "the end of the JSON text")

    def _decoded(self, quoted: bytes) -> str:
        try:
            text = quoted.decode()
            plain = text[1:-1] if "\\" not in text else json.loads(text)
            plain.encode()  # Trap: as in value()
        except ValueError as error:
            self.refuse("text", str(error), "a string in UTF-8")
        assert isinstance(plain, str)
        return plain

    def _next(self) -> bytes:
        """Skip blanks; return the next byte, or nothing at the end."""
        blank = _BLANK.match(self.data, self.position)
        assert blank is not None
        self.position = blank.end()
        return self.data[self.position : self.position + 1]

    def _expect(self, sign: bytes, what: str) -> None:
        if self._next() != sign:
            self.refuse("text", self._shown(), f"{what}: {sign.decode()}")
        self.position += 1

    def _shown(self) -> bytes:
        return self.data[self.position : self.position + 40]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            message = f"key {key!r} is stated twice"
            raise ValueError(message)
        made[key] = value
    return made


def _no_constant(name: str) -> NoReturn:
    message = f"{name} is no JSON"
    raise ValueError(message)


def _number(text: str) -> int | float:
    """Return a number; minus zero is a float, as the safetensors package reads it and refuses."""
    return -0.0 if text == "-0" else int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_number
)
