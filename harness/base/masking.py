"""Mask passwords in text, so that no message, page or report shows one.

Every error masks its texts, because an address with a password may be in any argument.
"""

from __future__ import annotations

import re

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
