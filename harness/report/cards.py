"""Cards: a result as a notebook shows it, of the same blocks as the panels of a page.

What renders a card is registered by the Python surface, because reports are read without an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.report.blocks import Block
    from degarble.harness.report.verdict import Verdict


@dataclass(frozen=True)
class Card:
    """A verdict with its sentence, and blocks below it."""

    verdict: Verdict
    sentence: str
    blocks: tuple[Block, ...] = ()


_RENDERERS: list[Callable[[Card], str]] = []


def render_cards_with(renderer: Callable[[Card], str]) -> None:
    """Register what turns a card into HTML, in the place of an earlier one."""
    _RENDERERS[:] = [renderer]


class ShownAsCard:
    """A result that notebooks show as a card."""

    def card(self) -> Card:
        """Return the card."""
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        return _RENDERERS[0](self.card()) if _RENDERERS else None
