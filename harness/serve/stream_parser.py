"""Split a streamed assistant turn into reasoning, content and tool calls.

No part of a mark that may still be completed is shown. Calls are shown when the turn is whole and
parses; a text that leaves the encoding is shown unchanged, with the reason. The pieces add up to
what parsing the whole turn gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Refused
from degarble.harness.chat.special_tokens import DSML, END_THINK
from degarble.harness.chat.stopping import Stops
from degarble.harness.chat.turns import THINKING

if TYPE_CHECKING:
    from degarble.harness.chat.chat import Chat
    from degarble.harness.chat.dsml import ToolCall

REASONING, CONTENT, CALLS = "reasoning_content", "content", "calls"


@dataclass
class Parted:
    """The fields that a piece adds to. `problem`: where the turn left the encoding."""

    said: dict[str, str] = field(default_factory=dict)  # field of a message to text
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None

    def add(self, where: str, text: str) -> None:
        """Append to a field."""
        if text:
            self.said[where] = self.said.get(where, "") + text


class Parting:
    """The parser of one turn."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._whole = ""
        self._opening = f"\n\n<{DSML}{chat.family.CALLS}"
        thinks = chat.style.mode == THINKING
        self._where = REASONING if thinks else CONTENT
        self._mark = END_THINK if thinks else self._opening
        self._stops = Stops((self._mark,))
        self._shown = 0  # characters that are out, marks included
        self._unsaid = ""  # the text of calls, and their opening

    def add(self, piece: str) -> Parted:
        """Take a piece; return what is certain."""
        made = Parted()
        self._whole += piece
        while self._where != CALLS:
            said = self._stops.add(piece)
            made.add(self._where, said)
            self._shown += len(said)
            if self._stops.hit is None:
                return made
            piece = self._whole[self._shown + len(self._mark) :]
            if self._where == CONTENT:
                self._where, self._unsaid = CALLS, self._mark
                break
            self._where, self._shown = CONTENT, self._shown + len(self._mark)
            self._mark = self._opening
            self._stops = Stops((self._mark,))
        self._unsaid += piece
        return made

    def end(self) -> Parted:
        """Return what was held back, and the calls, or why the turn cannot be parsed."""
        made = Parted()
        if self._where != CALLS:
            made.add(self._where, self._stops.rest())
        try:
            made.calls = self._chat.parse(self._whole, whole=False).calls
        except Refused as error:
            made.problem = str(error)
        if not made.calls:
            made.add(CONTENT, self._unsaid)
        return made
