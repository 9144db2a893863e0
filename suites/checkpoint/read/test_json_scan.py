"""The pull parser reads what the standard decoder reads, and refuses what must not be read."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.types import LONGEST_ENTRY


def scan(text: bytes) -> dict[str, Any]:
    scanner = ObjectScanner(text, "some.json")
    found = {key: scanner.value() for key in scanner.members()}
    scanner.finish()
    return found


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=5),
    st.booleans(),
    st.sampled_from([None, 1, "\t"]),
)
def test_reads_as_the_standard_decoder(
    found: dict[str, Any], ascii_only: bool, indent: int | str | None
) -> None:
    text = json.dumps(found, ensure_ascii=ascii_only, indent=indent)
    assert scan(text.encode()) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "an object"),
        (b"[]", "an object"),
        (b"null", "an object"),
        (b'{"a":1,"a":2}', "each key once"),
        (b'{"a":1,"\\u0061":2}', "each key once"),
        (b'{"a":{"b":1,"b":2}}', "'b' is stated twice"),
        (b'{"a":1', "a comma or the end"),
        (b'{"a":1,}', "a string"),
        (b'{"a" 1}', "a colon"),
        (b"{1:1}", "a string"),
        (b'{"a":NaN}', "NaN is no JSON"),
        (b'{"a":-Infinity}', "-Infinity is no JSON"),
        (b'{"a":1}x', "the end of the JSON text"),
        (b'{"\\ud800":1}', "UTF-8"),
        (b'{"a":["\\udc00"]}', "one JSON value"),
        (b'{"a":{"\\ud800":1}}', "one JSON value"),
        (b'{"\xff":1}', "UTF-8"),
        (b'{"a":"\xff"}', "one JSON value"),
        (b'{"a\n":1}', "a string"),
        (b'{"\\x":1}', "UTF-8"),
        (b'{"a":' + b"1" * 5000 + b"}", "one JSON value"),
        (b'{"a":' + b"[" * 15000 + b"]" * 15000 + b"}", "one JSON value"),
        (b'{"a":"' + b"x" * LONGEST_ENTRY + b'"}', f"at most {LONGEST_ENTRY} bytes"),
        (b'{"' + b"x" * LONGEST_ENTRY + b'":1}', f"at most {LONGEST_ENTRY} bytes"),
    ],
)
def test_refuses_with_the_place(text: bytes, says: str) -> None:
    with pytest.raises(UnreadableFile, match=r"some\.json: .* at byte \d+") as refused:
        scan(text)
    assert says in str(refused.value)
    assert str(refused.value).isprintable()


def test_offsets_count_from_the_start_of_the_file() -> None:
    scanner = ObjectScanner(b'{"a":?}', "some.json", first=8)
    assert next(scanner.members()) == "a"
    with pytest.raises(UnreadableFile, match="at byte 13"):
        scanner.value()


def test_a_window_cuts_no_character() -> None:
    text = '{"a":"' + "€" * 100 + '","b":1}'
    for largest in range(320, 324):
        scanner = ObjectScanner(text.encode(), "some.json")
        members = scanner.members()
        next(members)
        assert scanner.value(largest) == "€" * 100
        assert next(members) == "b"


def test_a_long_text_is_refused_without_being_built() -> None:
    text = b'{"a' + b"\\n" * (4 << 20)
    tracemalloc.start()
    with pytest.raises(UnreadableFile, match="a string"):
        scan(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
