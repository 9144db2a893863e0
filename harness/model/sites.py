"""The grammar of sites: named places in a model, which exist without a run.

    site      = component "." ( "out" [ "." name ] | "in" "." name )
    component = [ ( "layers" | "mtp" ) "." number "." ] name { "." name }
    name      = letter { letter | digit | "_" }        lower case; never "in" or "out"
    number    = "0" | digit without leading zero

`layers.17.attn.q_norm.out` is the output of a component, `layers.17.attn.hc_pre.out.post` one of
several outputs, `layers.17.attn.attend.in.q` the input called q. Parsing and printing are inverse
to each other. components.site_named checks that a config has a site.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from degarble.harness.base.errors import InvalidArgument

SCOPES = ("layers", "mtp")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_LONGEST = 200


class Port(StrEnum):
    """Inputs or outputs of a component."""

    IN = "in"
    OUT = "out"


@dataclass(frozen=True)
class Site:
    """One place. `name` is empty for a component's first or only output."""

    component: str  # full: layers.17.attn.q_norm
    port: Port
    name: str = ""

    def __post_init__(self) -> None:
        _split(str(self))  # exactly one word `in` or `out`, so the parts come back as they are

    def __str__(self) -> str:
        return f"{self.component}.{self.port}" + (f".{self.name}" if self.name else "")

    @property
    def layer(self) -> int | None:
        """Return the decoder layer; None for an end of the model and for a drafter block."""
        scope, number = self._block()
        return number if scope == "layers" else None

    @property
    def block(self) -> str:
        """Return `layers.17` or `mtp.0`; empty for an end of the model."""
        scope, number = self._block()
        return f"{scope}.{number}" if scope else ""

    @property
    def role(self) -> str:
        """Return the component's name within its block: `attn.q_norm`."""
        return self.component.removeprefix(f"{self.block}.") if self.block else self.component

    def _block(self) -> tuple[str, int | None]:
        scope, *rest = self.component.split(".")
        return (scope, int(rest[0])) if scope in SCOPES else ("", None)


def parse_site(text: str) -> Site:
    """Parse a site; an error names the part that is malformed."""
    return Site(*_split(text))


def _split(text: str) -> tuple[str, Port, str]:
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST:
        raise _malformed(text, f"text of 1 to {_LONGEST} characters")
    words = text.split(".")
    at = [i for i, word in enumerate(words) if word in {Port.IN, Port.OUT}]
    if len(at) != 1:
        raise _malformed(text, "exactly one word `in` or `out`")
    port, names = Port(words[at[0]]), words[at[0] + 1 :]
    if len(names) > 1 or (port is Port.IN and not names):
        raise _malformed(text, "one name after `in`, at most one after `out`")
    owner = words[: at[0]]
    if owner and owner[0] in SCOPES:
        if len(owner) < 2 or not _NUMBER.fullmatch(owner[1]):
            raise _malformed(text, f"a number after `{owner[0]}`, without leading zeros")
        inner = owner[2:]
    else:
        inner = owner
    if not inner:
        raise _malformed(text, "the name of a component")
    for word in (*inner, *names):
        if not _NAME.fullmatch(word):
            raise _malformed(text, f"a lower-case name instead of {word!r}")
    return ".".join(owner), port, names[0] if names else ""


def _malformed(text: object, expectation: str) -> InvalidArgument:
    return InvalidArgument(
        "site", text, expectation, "Write it as layers.17.attn.q_norm.out or COMPONENT.in.NAME."
    )
