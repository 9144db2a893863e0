"""Parse the filters of a capture (layers, components, tokens) and select what they name.

    --layers      0-3,17,mtp.0,ends      blocks; `ends` are the components outside all blocks
    --components  attn.*,ffn.gate        names within a block, or full names; * and ? as in a shell
    --tokens      0-15,100               positions within each sequence

A filter of tokens drops rows of tensors that have one row a token. State from earlier calls and
pooled entries stay whole. A filter that selects nothing of the model is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.model.components import OUTSIDE
from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.model.components import Component

ENDS = "ends"
_BLOCK = re.compile(r"(?:(layers|mtp)\.)?(\d{1,6})(?:-(\d{1,6}))?")
_SPAN = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")
# One row an entry that is complete, however many tokens there were.
_POOLED = (".compressor.pool", ".compressor.write")
_ENTRIES = frozenset({"compressed", "entry_offsets"})


@dataclass(frozen=True)
class Wanted:
    """A filter; None means all."""

    blocks: frozenset[str] | None = None  # layers.3, mtp.0, ends
    components: tuple[str, ...] | None = None  # patterns
    tokens: tuple[range, ...] | None = None  # positions

    @classmethod
    def of(
        cls, layers: str | None = None, components: str | None = None, tokens: str | None = None
    ) -> Wanted:
        """Read the words of the command line."""
        patterns = None if components is None else tuple(_words("--components", components))
        spans = None
        if tokens is not None:
            spans = tuple(_span("--tokens", word) for word in _words("--tokens", tokens))
        return cls(None if layers is None else _blocks(layers), patterns, spans)

    def takes(self, component: str) -> bool:
        """Return whether a component is captured."""
        site = Site(component, Port.OUT)
        if self.blocks is not None and (site.block or ENDS) not in self.blocks:
            return False
        if self.components is None:
            return True
        names = (site.role, component)
        return any(fnmatchcase(name, each) for each in self.components for name in names)

    def rows(self, positions: Iterable[int]) -> tuple[int, ...] | None:
        """Which tokens of a step are captured; None where it is all of them."""
        if self.tokens is None:
            return None
        return tuple(n for n, at in enumerate(positions) if any(at in span for span in self.tokens))

    def require_choosing(self, components: Iterable[str]) -> None:
        """Refuse a word that chooses nothing of a model, and words that together do so."""
        names = tuple(components)
        sites = [Site(name, Port.OUT) for name in names]
        known = {site.block or ENDS for site in sites}
        for block in sorted(self.blocks or ()):
            if block not in known:
                raise UnknownName.among("--layers", block, known)
        for pattern in self.components or ():
            if not Wanted(components=(pattern,)).any_of(names):
                roles = {site.role for site in sites}
                raise UnknownName.among("--components", pattern, roles)
        if not self.any_of(names):
            raise InvalidArgument(
                "--layers and --components", "no component", "a component that both choose",
                "Leave one of them out.",
            )  # fmt: skip

    def any_of(self, components: Iterable[str]) -> bool:
        """Whether it chooses anything."""
        return any(self.takes(name) for name in components)

    def document(self) -> dict[str, list[str] | None]:
        """Return the filter as a JSON document."""
        spans = None
        if self.tokens is not None:
            spans = [f"{each.start}-{each.stop - 1}" for each in self.tokens]
        return {
            "layers": None if self.blocks is None else sorted(self.blocks),
            "components": None if self.components is None else list(self.components),
            "tokens": spans,
        }


def whole_sites(component: Component) -> frozenset[str]:
    """Return the inputs and outputs of a component that do not have one row a token."""
    state = {each.name for each in component.inputs if each.via in OUTSIDE[2:]}
    carried = {name for name in component.outputs if name.startswith("state_")}
    pooled = set(component.outputs) if component.role.endswith(_POOLED) else set()
    keys = {
        each.name
        for each in component.inputs
        if any(source.component.endswith(_POOLED) for source in each.sources)
    }
    return frozenset(state | carried | pooled | keys | _ENTRIES)


def _words(name: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise InvalidArgument(name, text, "words with commas between them", "Remove a comma.")
    return words


def _blocks(text: str) -> frozenset[str]:
    found: set[str] = set()
    for word in _words("--layers", text):
        match = _BLOCK.fullmatch(word)
        if word == ENDS:
            found.add(ENDS)
        elif match is None:
            raise _unread("--layers", word, f"0-3, 17, mtp.0 or {ENDS}")
        else:
            span = _ordered("--layers", word, int(match[2]), int(match[3] or match[2]))
            found |= {f"{match[1] or 'layers'}.{number}" for number in span}
    return frozenset(found)


def _span(name: str, word: str) -> range:
    match = _SPAN.fullmatch(word)
    if match is None:
        raise _unread(name, word, "5 or 0-15")
    return _ordered(name, word, int(match[1]), int(match[2] or match[1]))


def _ordered(name: str, word: str, first: int, last: int) -> range:
    if last < first:
        raise _unread(name, word, "the smaller number first")
    return range(first, last + 1)


def _unread(name: str, word: str, expectation: str) -> InvalidArgument:
    return InvalidArgument(name, word, expectation, "Separate several by commas.")
