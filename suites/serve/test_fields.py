"""Bodies: strict JSON, fields by name, and nothing that goes unheard."""

from __future__ import annotations

import math

import pytest

from degarble.harness.serve.messages import ApiError
from degarble.harness.serve.requests import RequestFields, read_object, shown


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe{}", "no UTF-8 at byte 0"),
        (b"[]", "a JSON object"),
        (b'"text"', "a JSON object"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": {"b": 1, "b": 2}}', "twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"a": 1} x', "no JSON"),
    ],
    ids=range(11),
)
def test_a_body_that_is_no_object_is_refused(body: bytes, told: str) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        read_object(body)
    assert caught.value.status == 400
    assert caught.value.document()["error"]["code"] == "invalid_json"
    assert len(caught.value.message) < 300


def test_a_good_body_is_read() -> None:
    assert read_object('{"a": ["\\ud800", "ß", 1e3]}'.encode()) == {"a": ["\ud800", "ß", 1000.0]}


@pytest.mark.parametrize(
    "value", [True, "1", [], {}, math.inf, -math.inf, math.nan, -0.1, 2.1, 10**400]
)
def test_numbers_out_of_their_range_are_refused(value: object) -> None:
    with pytest.raises(ApiError, match=r"^temperature: ") as caught:
        RequestFields({"temperature": value}).number("temperature", 1.0, 0, 2)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 0, 11, 10**400])
def test_whole_numbers_out_of_their_range_are_refused(value: object) -> None:
    with pytest.raises(ApiError, match=r"^max_tokens: "):
        RequestFields({"max_tokens": value}).whole("max_tokens", 1, 10)


def test_fields_are_taken_once_and_the_rest_is_refused() -> None:
    fields = RequestFields({"n": 3, "t": 0, "stop": "a", "gone": None, "on": True})
    assert fields.whole("n", 1, 4) == 3
    assert fields.number("t", 1.0, 0, 2) == 0.0
    assert fields.texts("stop", 4) == ("a",)
    assert fields.flag("on") is True
    fields.end()  # null is absent
    with pytest.raises(ApiError, match=r"^top_k: is not supported") as caught:
        RequestFields({"top_k": 1}).end()
    assert caught.value.code == "unsupported_parameter"
    inner = RequestFields({"a": {"b": 1}}).inner("a")
    assert inner is not None
    with pytest.raises(ApiError, match=r"^a\.b: "):
        inner.end()


@pytest.mark.parametrize("value", [["a", 1], ["a"] * 5, "", ["a", ""], 7, {"a": 1}])
def test_stops_that_are_no_texts_are_refused(value: object) -> None:
    with pytest.raises(ApiError, match=r"^stop: "):
        RequestFields({"stop": value}).texts("stop", 4)


def test_a_value_without_effect_passes_and_another_is_refused_by_name() -> None:
    RequestFields({"best_of": 1, "penalty": 0.0}).only("best_of", 1)
    RequestFields({"penalty": 0.0}).only("penalty", 0, 0.0)
    with pytest.raises(ApiError, match=r"penalty: 0\.5 is not supported; leave it out or give 0"):
        RequestFields({"penalty": 0.5}).only("penalty", 0, 0.0)
    with pytest.raises(ApiError, match="best_of: True"):
        RequestFields({"best_of": True}).only("best_of", 1)


def test_values_are_shown_short_and_printable() -> None:
    assert shown("a\n\u202e\ud800") == "'a\\n\\u202e\\ud800'"
    assert len(shown("x" * 1000)) < 90
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a value nested deeply"
