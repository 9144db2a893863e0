"""Types of the facts that a capture's manifest records about its run.

A capture may hold other facts, and lack any of these or leave it null. A fact of a wrong type is
rejected when the capture is opened, so readers need no check of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.capture.files.types import malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Test = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _object_of(test: Test) -> Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _is_source(value: Any) -> bool:
    texts = ("name", "path", "fingerprint", "content")
    return _is_object(value) and all(isinstance(value.get(n), str | None) for n in texts)


def _is_filter(value: Any) -> bool:
    """Return whether each entry is absent or a list of names, numbers and ranges."""
    entry = _list_of(lambda each: isinstance(each, str | int) or _list_of(_is_count)(each))
    return _object_of(lambda each: each is None or entry(each))(value)


def _is_sequence(value: Any) -> bool:
    ids = _list_of(_is_count)
    return _is_object(value) and all(ids(value.get(name, [])) for name in ("prompt", "new"))


FACTS: Mapping[str, tuple[Test, str]] = {
    "source": (_is_source, "an object of texts"),
    "config": (_is_object, "an object"),
    "recipe": (_list_of(_object_of(_is_text)), "a list of rules"),
    "filters": (_is_filter, "an object of lists"),
    "statistics_only": (lambda value: isinstance(value, bool), "true or false"),
    "new_tokens": (_is_count, "a count"),
    "versions": (_object_of(_is_text), "an object of texts"),
    "conventions": (_is_object, "an object"),
    "by_backend": (_list_of(_is_text), "a list of components"),
    "fell_to_torch": (_list_of(_is_text), "a list of components"),
    "fraction_bits": (_object_of(_is_count), "an object of counts"),
    "sequences": (_list_of(_is_sequence), "a list of prompts with their new tokens"),
    **dict.fromkeys(
        ("family", "backend", "arithmetic", "form", "sums", "device"), (_is_text, "a text")
    ),
}


def require_known_types(facts: Mapping[str, Any]) -> None:
    """Refuse the first fact of another type than readers rely on."""
    for name, (test, expectation) in FACTS.items():
        value = facts.get(name)
        if value is not None and not test(value):
            raise malformed(f"facts: {name}", value, expectation)
