"""Format numbers as text, alike everywhere, and escape text from outside. Imports no sibling.

Shares are never rounded up to 100 % or down to 0 %: "100.0 %" means all.
"""

from __future__ import annotations

import math
import unicodedata


def number(value: float, digits: int = 4) -> str:
    """Write `value` with `digits` significant digits; integers are grouped and never rounded."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    leading = 0 if whole else -math.floor(math.log10(abs(value))) - 1
    return f"{value:,.{max(0, digits - whole + leading)}f}"


def budgets(ratio: float, budget: str = "its budget") -> str:
    """Write a difference in units of its budget: a part of it, or how many times it."""
    return f"{number(ratio)} {'of' if ratio <= 1 else 'times'} {budget}"


def shortened(text: str, longest: int = 2000) -> str:
    """Return at most `longest` characters of a text, and say how much is left out."""
    if len(text) <= longest:
        return text
    ending = f"\n... {len(text) - longest + 40:,} more characters"
    return text[: longest - 40] + ending


def share(value: float) -> str:
    """Write a share of 1 in percent; 100 % and 0 % mean exactly all and exactly none."""
    if not math.isfinite(value):
        return str(value)
    for places in (1, 2, 3, 4, 6, 8):
        text = f"{value * 100:.{places}f}"
        if value in (0, 1) or float(text) not in (0.0, 100.0):
            return f"{text} %"
    return "just under 100 %" if value > 0.5 else "just over 0 %"


def span(indices: list[int], total: int) -> str:
    """Write which of `total` things are meant: all, one run of them, or their number and ends."""
    if len(indices) == total:
        return f"0 to {total - 1} (all)"
    first, last = indices[0], indices[-1]
    if len(indices) == last - first + 1:
        return f"{first}" if first == last else f"{first} to {last}"
    return f"{len(indices):,} between {first} and {last}"


def visible(text: str) -> str:
    """Return `text` with every character that has no look of its own as its escape sequence."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _invisible(c) else f"\\u{ord(c):04x}" for c in text)


def _invisible(character: str) -> bool:
    # control, format (bidirectional overrides, zero width), surrogate, private, unassigned, breaks
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
