"""How a part of the golden set is kept: canonical JSON, compared as text, written by one command.

Everything that may differ between two right runs is masked here, by name and for a reason.
"""

from __future__ import annotations

import json
from difflib import unified_diff
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(__file__).parent
MASK = "<masked>"
SHOWN = 60  # lines of a difference
# Key of a record to the reason why its value is left out.
MASKED: Mapping[str, str] = {
    "capture": "the digest of a capture, which holds the time",
    "created": "the time",
    "started": "the time",
    "seconds": "how long it took",
    "machine": "the processor that ran it",
    "versions": "of Python, torch and others",
    "version": "degarble's own",
    "report": "a path",
    "reproducer": "a path, where it is one",
    "run": "the digest of a history's row, which holds the machine",
}


def masked(value: Any, key: str = "") -> Any:
    """Return plain data without what legitimately varies."""
    if key in MASKED and value is not None:
        return MASK
    if isinstance(value, dict):
        return {name: masked(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return value


def rounded(value: Any, digits: int) -> Any:
    """Return plain data whose numbers keep so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits - 1}e}")
    if isinstance(value, dict):
        return {name: rounded(inner, digits) for name, inner in value.items()}
    return [rounded(inner, digits) for inner in value] if isinstance(value, list) else value


def as_text(value: Any) -> str:
    """Return the text of a file: one value a line, in the order in which it was made."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def difference(file: str, text: str) -> str:
    """Return the first differences from a kept file, or nothing."""
    path = FOLDER / file
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if kept == text:
        return ""
    lines = list(
        unified_diff(kept.splitlines(), text.splitlines(), "kept", "now", lineterm="", n=4)
    )
    rest = f"\n... and {len(lines) - SHOWN} lines more" if len(lines) > SHOWN else ""
    return "\n".join(islice(lines, SHOWN)) + rest


def require_equal(files: Mapping[str, Any]) -> None:
    """Raise with the first differences of every file whose value is not the kept one."""
    lines = [
        f"suites/golden/{file} differs; if it is meant, run "
        f"`python -m degarble.suites.golden.write {Path(file).stem}` and say why in the commit\n"
        f"{found}"
        for file, value in files.items()
        if (found := difference(file, as_text(value)))
    ]
    if lines:
        raise AssertionError("\n\n".join(lines))


def write(file: str, value: Any) -> None:
    """Write a kept file anew."""
    path = FOLDER / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(as_text(value), encoding="utf-8")
