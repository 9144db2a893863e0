"""Define the error classes of degarble, one for each cause, and mask passwords in their texts.

DegarbleError
├── Refused                    the input is wrong: exit status 2, nothing half-written
│   ├── InvalidArgument        a value out of its range, or of the wrong type
│   ├── UnknownName            a name that no registry knows (format, dialect, recipe, tensor, ...)
│   ├── ShapeMismatch          extents that do not fit each other
│   ├── DtypeMismatch          the right shape in the wrong number format
│   ├── LayoutMismatch         bytes in another order than the consumer reads
│   │   └── PartnersMismatch   partners that do not fit into one tensor
│   ├── DialectMismatch        two producers' scale rules mixed
│   ├── ScaleDirectionMismatch a decode scale where an encode scale is expected, or the reverse
│   ├── UnreadableFile         missing, truncated or hostile file
│   ├── UnwritablePath         an output that cannot be made: read-only, full, in the way
│   ├── MissingDependency      an optional package or system program is absent
│   ├── MissingDevice          the requested GPU is absent
│   ├── WorkerLost             a worker process ended before its task did
│   ├── UnusableServer         a server does not answer as its interface says
│   └── NotBuilt               a command of the contract that this version does not have yet
└── Undecided                  the comparison cannot be made; exit status 2 as well
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


# --------------------------------------------------------------------------------------------------
# Passwords in addresses are masked, so that no message, page or report shows one.

MASK = "***"
_NAMED = r"(?<![A-Za-z_])(?:pg)?(?:pass(?:word|wd|phrase)?|pwd|secret|token|api_?key)"
# To the last @ of the line: a password may hold one, and blanks as well. Remedies show an example.
_SIGNED_IN = re.compile(r"(?<=//)(?!USER:PASSWORD@).*(?:@|%40)(?=[^\s'\"])", re.IGNORECASE)
# user:secret@host, also with the colon or the @ as percent signs write them
_BARE = re.compile(
    r"(?!USER:PASSWORD@)\b[^\s'\"/:=@]+(?::(?!//)|%3a)[^\s'\"]*(?:@|%40)(?=[^\s'\"])",
    re.IGNORECASE,
)
_PAIR = re.compile(rf"({_NAMED}\s*=\s*)('(?:[^'\\]|\\.)*'|\"[^\"]*\"|[^\s&;'\"]+)", re.IGNORECASE)
_DATABASES = r"(?:postgre\w*|pgsql|psql|psycopg\w*|sqlite\w*|mysql\w*|mariadb|oracle|mssql|jdbc)"
_ADDRESS = re.compile(
    rf"""^\s*{_DATABASES}(?:\+\w*)?\s*(?:[:;]|%3a|//)    # a known scheme, also a mistyped one
    | ^\s*\w[\w+.-]+:/                                    # any other scheme
    | (?::|%3a).*(?:@|%40)                                # who signs in
    | {_NAMED}\s*=
    | ^\s*(?:host|hostaddr|port|user|dbname|service|server|data\ source)\s*=\s*[^/]*$
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


def looks_like_address(text: str) -> bool:
    """Return whether a text may be the address of a server, however mistyped, and not a file."""
    return "://" in text or _ADDRESS.search(text) is not None


def masked(text: str) -> str:
    """Replace the user part of an address, and every value that is named as a password."""
    if not {"@", "=", "%"} & set(text):
        return text
    text = _SIGNED_IN.sub(f"{MASK}@", text)
    text = _BARE.sub(f"{MASK}@", text)
    return _PAIR.sub(rf"\1{MASK}", text)


# --------------------------------------------------------------------------------------------------
# Error classes

EXIT_AGREES = 0
EXIT_DIFFERS = 1
EXIT_REFUSED = 2

_VALUE_LIMIT = 200
_REPR_LIMIT = 1900
_MASKED = 4 * _VALUE_LIMIT  # characters in which a password is looked for: the rest is not shown
_FEW = 5  # names that are listed where a name is expected, in place of their number
_MANY = 100  # names that a remedy lists: of all components of a checkpoint nobody reads more


def _shown(value: object) -> str:
    """Return `value` as one bounded, printable line; control characters are escaped."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  a hostile __repr__ must not hide the error
        text = f"<unprintable {type(value).__name__}: {type(error).__name__}>"
    return printable(masked(text[:_MASKED]), _VALUE_LIMIT)


def printable(text: str, longest: int) -> str:
    """Return external text as one line of at most `longest`; control characters are escaped."""
    shown = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


class DegarbleError(Exception):
    """Base of all errors of this project. Catch it at the edge only.

    An error carries name, value, expectation and remedy; its text is built from these four.
    """

    exit_status = EXIT_REFUSED

    def __init__(self, name: str, value: object, expectation: str, remedy: str) -> None:
        self.name = masked(name)
        self.value = value
        self.expectation = masked(expectation)
        self.remedy = masked(remedy)
        super().__init__(name, value, expectation, remedy)

    @property
    def shown_value(self) -> str:
        """The value as one bounded, printable line."""
        return _shown(self.value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({printable(str(self), _REPR_LIMIT)!r})"

    def __str__(self) -> str:
        return f"{self.name} = {self.shown_value}: expected {self.expectation}. {self.remedy}"


class Refused(DegarbleError):
    """The input is wrong: a typo, a file of another tool, options that exclude each other."""


class InvalidArgument(Refused):
    """A value out of its range or of the wrong type."""


class UnknownName(Refused):
    """A name that no registry knows. The remedy lists the nearest known names."""

    @classmethod
    def among(cls, name: str, value: object, known: Iterable[str]) -> UnknownName:
        """Return an error for `value` that suggests the nearest of `known`."""
        names = sorted(known)
        near = get_close_matches(str(value), names, n=3, cutoff=0.5)
        remedy = f"Did you mean {', '.join(near)}?" if near else "Use one of these names."
        if not near and len(names) > _FEW:
            more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
            remedy = f"Known: {', '.join(names[:_MANY])}{more}."
        few = len(names) <= _FEW
        expectation = " or ".join(names) if few else f"one of the {len(names)} known names"
        return cls(name, value, expectation, remedy)


class ShapeMismatch(Refused):
    """Extents that do not fit each other, or that a format cannot hold."""


class DtypeMismatch(Refused):
    """A tensor in another number format than the one that is read. Never cast silently."""


class LayoutMismatch(Refused):
    """Bytes in another order than the consumer reads. Convert with harness.formats.layouts."""


class PartnersMismatch(LayoutMismatch):
    """Partners that a layout fuses, but that do not fit into one tensor as they are stored."""


class DialectMismatch(Refused):
    """Two producers' scale rules mixed. Convert by decoding and quantising again."""


class ScaleDirectionMismatch(Refused):
    """A decode scale where an encode scale belongs, or the reverse: off by its square."""


class UnreadableFile(Refused):
    """A file that is missing, truncated, or not what its name claims."""


class UnwritablePath(Refused):
    """An output that cannot be made: a read-only place, a full disk, a file in the way."""


class MissingDependency(Refused):
    """An optional package or a system program is absent."""


class MissingDevice(Refused):
    """The requested accelerator is absent."""


class WorkerLost(Refused):
    """A worker process that ended before its task did: killed, crashed, or out of memory."""


class UnusableServer(Refused):
    """A server that does not answer, or not as its interface says."""


class NotBuilt(Refused):
    """A command of the contract that this version does not have yet."""


class Undecided(DegarbleError):
    """The comparison cannot be made, so nothing is claimed."""


# What a component, a fault or a budget raises over operands that it does not fit.
CANNOT_RUN = (DegarbleError, RuntimeError, IndexError, KeyError, ValueError)
