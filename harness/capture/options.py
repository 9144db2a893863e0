"""Options of a capture: filters of layers, components and tokens, and requests to a live server."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.model.components import OUTSIDE
from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.model.components import Component


# --------------------------------------------------------------------------------------------------
# Parse the filters of a capture (layers, components, tokens) and select what they name.
#
#     --layers      0-3,17,mtp.0,ends      blocks; `ends` are the components outside all blocks
#     --components  attn.*,ffn.gate        names in a block, or full names; * and ? as in a shell
#     --tokens      0-15,100               positions within each sequence
#
# A filter of tokens drops rows of tensors that have one row a token. State from earlier calls and
# pooled entries stay whole. A filter that selects nothing of the model is an error.

ENDS = "ends"
_BLOCK = re.compile(r"(?:(layers|mtp)\.)?(\d{1,6})(?:-(\d{1,6}))?")
_SPAN = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?")
# One row an entry that is complete, however many tokens there were.
_POOLED = (".compressor.pool", ".compressor.write")
_ENTRIES = frozenset({"compressed", "entry_offsets"})


@dataclass(frozen=True)
class CaptureFilter:
    """A filter; None means all."""

    blocks: frozenset[str] | None = None  # layers.3, mtp.0, ends
    components: tuple[str, ...] | None = None  # patterns
    tokens: tuple[range, ...] | None = None  # positions
    pieces: tuple[range, ...] | None = None  # of the last position of a step, which is kept whole

    @classmethod
    def from_options(
        cls,
        layers: str | None = None,
        components: str | None = None,
        tokens: str | None = None,
        pieces: str | None = None,
    ) -> CaptureFilter:
        """Read the words of the command line; `pieces` are those of a capture's facts."""
        patterns = None if components is None else tuple(_words("--components", components))
        blocks = None if layers is None else _blocks(layers)
        return cls(blocks, patterns, _spans("--tokens", tokens), _spans("pieces", pieces))

    def includes(self, component: str) -> bool:
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
        positions = tuple(positions)
        if positions and not self.keeps_step(max(positions)):
            return ()
        if self.tokens is None:
            return None
        return tuple(n for n, at in enumerate(positions) if any(at in span for span in self.tokens))

    def keeps_step(self, last: int) -> bool:
        """Return whether a step is captured whose last position is this one."""
        return self.pieces is None or any(last in piece for piece in self.pieces)

    def require_choosing(self, components: Iterable[str]) -> None:
        """Refuse a word that chooses nothing of a model, and words that together do so."""
        names = tuple(components)
        sites = [Site(name, Port.OUT) for name in names]
        known = {site.block or ENDS for site in sites}
        for block in sorted(self.blocks or ()):
            if block not in known:
                raise UnknownName.among("--layers", block, known)
        for pattern in self.components or ():
            if not CaptureFilter(components=(pattern,)).any_of(names):
                roles = {site.role for site in sites}
                raise UnknownName.among("--components", pattern, roles)
        if not self.any_of(names):
            raise InvalidArgument(
                "--layers and --components", "no component", "a component that both choose",
                "Leave one of them out.",
            )  # fmt: skip

    def any_of(self, components: Iterable[str]) -> bool:
        """Whether it chooses anything."""
        return any(self.includes(name) for name in components)

    def document(self) -> dict[str, list[str] | None]:
        """Return the filter as a JSON document."""
        spans = None if self.tokens is None else list(map(span_text, self.tokens))
        pieces = {} if self.pieces is None else {"pieces": list(map(span_text, self.pieces))}
        return {
            "layers": None if self.blocks is None else sorted(self.blocks),
            "components": None if self.components is None else list(self.components),
            "tokens": spans,
        } | pieces


def span_text(span: range) -> str:
    """Write layers or positions as --layers and --tokens take them."""
    return f"{span.start}-{span.stop - 1}"


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


def _spans(name: str, text: str | None) -> tuple[range, ...] | None:
    return None if text is None else tuple(_span(name, word) for word in _words(name, text))


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


# --------------------------------------------------------------------------------------------------
# Parse a request to capture from a live server: request ids, filters, limits.
#
# The client sends an id as X-Request-Id, and servers add words around it. So an id matches if it is
# one or several whole words of the server's id. Without ids the next N requests are captured. A
# capture ends at its limit of bytes or seconds, or when a client closes it.

MOST_BYTES = 1 << 30  # of tensors, on each rank
MOST_REQUESTS = 64
MOST_SECONDS = 3600.0
MOST_GRAPH_BYTES = 64 << 30  # of static buffers on a GPU, for copies within CUDA graphs
_BYTES, _SECONDS, _GRAPH_BYTES = 256 << 20, 600.0, 1 << 30
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_WORDS = ("layers", "components", "tokens")


@dataclass(frozen=True)
class CaptureRequest:
    """Options of one capture of a live server. `requests`: ids; if empty, the next `count` ones."""

    wanted: CaptureFilter = field(default_factory=CaptureFilter)
    requests: tuple[str, ...] = ()
    count: int = 1
    nbytes: int = _BYTES
    seconds: float = _SECONDS
    graph_bytes: int = _GRAPH_BYTES

    @classmethod
    def of_json(cls, raw: Mapping[str, Any]) -> CaptureRequest:
        """Read what a client asks for."""
        known = {"requests", "count", "max_bytes", "seconds", "graph_bytes", *_WORDS}
        strange = sorted(raw.keys() - known)
        if strange:
            raise _wrong("capture", strange[0], f"one of {', '.join(sorted(known))}")
        words = []
        for name in _WORDS:
            said = raw.get(name)
            if said is not None and not (isinstance(said, str) and len(said) <= 1000):
                raise _wrong(name, said, "a text as --layers, --components and --tokens take")
            words.append(said)
        requests = raw.get("requests") or []
        if not isinstance(requests, list) or len(requests) > MOST_REQUESTS:
            raise _wrong("requests", requests, f"a list of at most {MOST_REQUESTS} ids")
        for request in requests:
            if not (isinstance(request, str) and REQUEST_ID.fullmatch(request)):
                raise _wrong("requests", request, "ids of letters, digits, and . _ : -")
        return cls(
            CaptureFilter.from_options(*words),
            tuple(dict.fromkeys(requests)),
            int(_number(raw, "count", len(requests) or 1, 1, MOST_REQUESTS)),
            int(_number(raw, "max_bytes", _BYTES, 1, MOST_BYTES)),
            _number(raw, "seconds", _SECONDS, 1, MOST_SECONDS),
            int(_number(raw, "graph_bytes", _GRAPH_BYTES, 1, MOST_GRAPH_BYTES)),
        )

    def document(self) -> dict[str, Any]:
        """Return the options as JSON, as of_json reads them."""
        found: dict[str, Any] = {
            name: None if words is None else ",".join(words)
            for name, words in self.wanted.document().items()
        }
        found |= {"requests": list(self.requests), "count": self.count}
        found |= {"max_bytes": self.nbytes, "seconds": self.seconds}
        return found | {"graph_bytes": self.graph_bytes}


class RequestSelection:
    """Which requests are captured, in the order in which they came."""

    def __init__(self, request: CaptureRequest) -> None:
        self.asked = request
        self.ids: list[str] = []
        self._ends = time.monotonic() + request.seconds

    @property
    def late(self) -> bool:
        """Return whether the time limit is exceeded."""
        return time.monotonic() > self._ends

    def owner(self, request: str) -> int | None:
        """Return the sequence number of a request, or None if it is not to be captured."""
        if request in self.ids:
            return self.ids.index(request)
        if self.late or len(self.ids) >= self._room or not self._matches(request):
            return None
        self.ids.append(request)
        return len(self.ids) - 1

    @property
    def _room(self) -> int:
        return MOST_REQUESTS if self.asked.requests else self.asked.count

    def _matches(self, request: str) -> bool:
        if not self.asked.requests:
            return True
        return any(
            re.search(rf"(?:^|-){re.escape(each)}(?:-|$)", request) for each in self.asked.requests
        )


def _number(raw: Mapping[str, Any], name: str, usual: float, low: float, high: float) -> float:
    found = raw.get(name)
    if found is None:
        return usual
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not low <= found <= high:
        raise _wrong(name, found, f"a number from {low:g} to {high:g}")
    return found


def _wrong(name: str, value: object, expectation: str) -> InvalidArgument:
    return InvalidArgument(name, str(value)[:200], expectation, "See docs/capture.md.")
