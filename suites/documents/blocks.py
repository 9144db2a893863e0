"""Code blocks of the documents: where they stand, and the command lines in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.suites.house.repository import documents, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(\s+#\s.*|\s{3,}\S.*)$")  # words after a command: "# why", or a column
PROGRAMS = (
    "degarble", "make", "pytest", "python", "docker", "curl", "torchrun", "sh", "pip", "vllm",
)  # fmt: skip
_ASSIGNED = re.compile(r"^(?:[A-Z_]+=(?:\"[^\"]*\"|\S*)\s+)*")
ELSEWHERE = ("CHANGELOG.md", "changelog.d/", "suites/")


@dataclass(frozen=True)
class CodeBlock:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Return page and line as an editor takes them."""
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[str]:
        """Yield the command lines, joined, without the words after them."""
        for line in self.text.replace("\\\n", " ").splitlines():
            plain = _COMMENT.sub("", line).strip()
            words = _ASSIGNED.sub("", plain).split()
            if words and words[0] in PROGRAMS:
                yield plain


def blocks() -> list[CodeBlock]:
    """Return every block of every page that people read."""
    found = []
    for path in documents():
        name, text = shown(path), path.read_text(encoding="utf-8")
        if not name.startswith(ELSEWHERE):
            for match in _FENCE.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(CodeBlock(name, line, match[1], match[2]))
    return found


def in_language(*languages: str) -> list[CodeBlock]:
    """Return the blocks that are marked so."""
    return [block for block in blocks() if block.language in languages]
