"""What judgements say: documents and pages of the demo, of healthy runs, of audits.

Each is taken apart into what never changes (keys, ids, places, verdicts), into sentences, whose
digits are not counted, and into numbers. Float32 products are summed in another order by another
processor or torch, so numbers are kept with the machine that they hold for.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.report.page import machine
from degarble.suites.golden.checkpoints import quantised
from degarble.suites.golden.commands import RELEASED, ran
from degarble.suites.golden.store import MASK, masked, rounded

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER = "<number>"
SENTENCE = "<sentence>"
_DIGITS = 9  # of numbers: more than float32 has
_NUMBERS = re.compile(r"(?<![\w.])[-+−]?\d[\d.,]*(?:e[-+]?\d+)?")
# How long a reading took, the machine, the time.
_UNSTEADY = re.compile(r"read in .*?/s\)|CPU: .*?, Linux|[\d-]{10} [\d:]{5} UTC")
_CODES = re.compile(r"\b(?:0x[0-9a-f]+|[0-9a-f]{16,})\b")  # bits of numbers, digests of files
_LISTED = re.compile(r"#: #(?:, #: #)+")  # as many as experts or heads differ
_VOID = frozenset(("meta", "link", "img", "input", "br", "hr", "path", "use", "rect", "line"))
_SAID = ("title", "aria-label", "alt", "data-label", "content")  # attributes that hold sentences


def here() -> dict[str, str]:
    """Return what numbers depend on."""
    processor = machine().partition(",")[0].removeprefix("CPU: ")
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": processor, "vectors": capability, "torch": torch.__version__.split("+")[0]}


@dataclass
class Parts:
    """A judgement, taken apart."""

    data: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, document: dict[str, Any]) -> None:
        """Add a document and the page that it names."""
        said: dict[str, None] = {}
        numbers: dict[str, float] = {}
        page = Path(document["report"]).read_text(encoding="utf-8")
        self.data[name] = _apart(rounded(masked(document), _DIGITS), "", said, numbers)
        reader = PageReader()
        reader.feed(page)
        self.data[f"{name}, page"] = sorted(reader.places)
        self.texts[name] = list(said)
        self.texts[f"{name}, page"] = list(reader.said)
        self.numbers[name] = numbers
        self.numbers[f"{name}, page"] = dict(sorted(reader.elements.items()))


def _apart(value: Any, where: str, said: dict[str, None], numbers: dict[str, float]) -> Any:
    """Return plain data with marks for sentences and numbers, which are collected."""
    if isinstance(value, dict):
        return {k: _apart(v, f"{where}.{k}", said, numbers) for k, v in value.items()}
    if isinstance(value, list):
        inner = [_apart(v, f"{where}[{n}]", said, numbers) for n, v in enumerate(value)]
        return inner if len(inner) != inner.count(NUMBER) or not inner else f"{len(inner)} numbers"
    if isinstance(value, float):
        numbers[where.removeprefix(".")] = value
        return NUMBER
    if isinstance(value, str) and " " in value:
        said[without_digits(value)] = None
        return SENTENCE
    return value


def without_digits(text: str) -> str:
    """Return a sentence in which every number is the same."""
    text = _CODES.sub("#", _UNSTEADY.sub(MASK, " ".join(text.split())))
    return _LISTED.sub("#: #", _NUMBERS.sub("#", text))


class PageReader(HTMLParser):
    """The places of a page (element and class, below its nearest section), and its sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.places: set[str] = set()
        self.said: dict[str, None] = {}
        self.elements: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = {name: value or "" for name, value in attrs}
        kind = ".".join([tag, *held.get("class", "").split()])
        self.places.add(" ".join([*self.stack[-1:], kind, *sorted(set(held) - {"class"})]))
        self.elements[kind] += 1
        for name in _SAID:
            if " " in held.get(name, ""):
                self._say(held[name])
        if tag not in _VOID:
            self.stack.append(kind)

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop().partition(".")[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self.stack[-1] if self.stack else ""
        if inside.startswith(("style", "script")) or not data.strip():
            return
        self._say(data)

    def _say(self, text: str) -> None:
        if " " in text.strip():  # one word is a name, which other parts hold
            self.said[without_digits(text)] = None


def demo(folder: Path) -> Parts:
    """Tell the story of the demonstration."""
    parts = Parts()
    parts.add("demo", ran("demo", "--out", folder / "demo"))
    return parts


def faults(folder: Path) -> Parts:
    """Tell the story of other faults: of a scale, of a layout, of attention."""
    parts = Parts()
    for fault in ("M02.missing", "M11.read_unswizzled", "M29.scale"):
        parts.add(fault, ran("demo", "--fault", fault, "--out", folder / fault))
    return parts


def healthy(folder: Path) -> Parts:
    """Capture and check both small models, and audit them."""
    parts = Parts()
    for family in ("v4", "v32"):
        checkpoint = quantised(family, "nvfp4-full", folder)
        capture, reports = folder / f"capture-{family}", folder / f"reports-{family}"
        reports.mkdir()
        asked = ("--prompt", "3 plus 4 is", "--max-new-tokens", 2)
        ran("capture", checkpoint, "--out", capture, *asked)
        checked = ran("check", capture, "--reference", RELEASED / family, "--report", reports)
        parts.add(f"healthy {family}", checked)
        (folder / f"audits-{family}").mkdir()
        audited = ran("audit", checkpoint, "--report", folder / f"audits-{family}")
        parts.add(f"audit {family}", audited)
    return parts


JUDGED: dict[str, Callable[[Path], Parts]] = {"healthy": healthy, "demo": demo, "faults": faults}


def as_files(part: str, made: Parts) -> dict[str, Any]:
    """Return what each file of a part holds."""
    return {
        f"data/{part}.json": made.data,
        f"texts/{part}.json": made.texts,
        f"numbers/{part}.json": {"holds for": here(), "numbers": made.numbers},
    }


def of_one_machine(part: str) -> set[str]:
    """Return the files that hold where they were written: numbers, and what is said of wrong ones.

    Which rows are the worst, and the text that a broken model says, depend on last digits.
    """
    return {f"numbers/{part}.json", *([] if part == "healthy" else [f"texts/{part}.json"])}
