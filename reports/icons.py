"""SVG symbols of a page, drawn once, referred to by name, told apart by shape and not by colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.reports.markup import h

if TYPE_CHECKING:
    from degarble.reports.markup import Element

# Strokes in a box of 16; each name is a verdict, a tone or the brand.
_PATHS = {
    "agrees": "M2.5 8.5 6.2 12.2 13.5 4",
    "differs": "M3 6h10M3 10h10M10.5 3 5.5 13",
    "unstable": "M1.5 8c1.5-5 3.2-5 4.5 0s3 5 4.5 0 2.7-4 4-2",
    "undecided": "M5.5 6a2.5 2.5 0 1 1 3.7 2.2C8.3 8.700 8 9.200 8 10.200M8 12.900v.1",
    "refused": "M8 2.200a5.800 5.800 0 1 0 0 11.600A5.800 5.800 0 1 0 8 2.200M4 12 12 4",
    "absent": "M4 8h8",
    "note": "M8 2.200a5.800 5.800 0 1 0 0 11.600A5.800 5.800 0 1 0 8 2.200M8 7.500v3.300M8 5v.1",
    "good": "M2.5 8.5 6.2 12.2 13.5 4",
    "warning": "M8 2.500 14.200 13.300H1.800zM8 6.700v3M8 11.500v.1",
    "bad": "M4 4l8 8M12 4l-8 8",
    "brand": "M2.500 5.500h11M2.500 10.500h11M10.400 2.300 5.600 13.700",
}


def sprite() -> Element:
    """Return every symbol in one hidden element."""
    symbols = [
        h(
            "symbol",
            {"id": f"icon-{name}", "viewBox": "0 0 16 16"},
            h("path", {"d": path, "fill": "none", "stroke": "currentColor", "stroke-width": "1.9"}),
        )
        for name, path in _PATHS.items()
    ]
    return h(
        "svg", {"class": "sprite", "aria-hidden": "true", "width": "0", "height": "0"}, symbols
    )
