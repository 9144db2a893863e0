from __future__ import annotations

from typing import Any

import pytest

from degarble.harness.base.errors import Refused
from degarble.harness.capture.options import MOST_BYTES, CaptureRequest, RequestSelection


def test_a_request_is_read_and_written_back() -> None:
    raw: dict[str, Any] = {
        "requests": ["mine", "also"], "layers": "0-1,ends", "components": "attn.*", "tokens": "0-3",
        "max_bytes": 1000, "seconds": 5,
    }  # fmt: skip
    asked = CaptureRequest.of_json(raw)
    assert asked.wanted.takes("layers.1.attn.wq_a")
    assert not asked.wanted.takes("layers.2.attn.wq_a")
    assert (asked.requests, asked.count, asked.nbytes) == (("mine", "also"), 2, 1000)
    assert CaptureRequest.of_json(asked.document()) == asked
    assert CaptureRequest.of_json({}).document()["count"] == 1


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"layer": "0"}, "capture = 'layer'"),
        ({"layers": 3}, "layers = '3'"),
        ({"layers": "x"}, "--layers"),
        ({"requests": "mine"}, "requests = 'mine'"),
        ({"requests": ["a b"]}, "requests = 'a b'"),
        ({"requests": ["a"] * 65}, "requests"),
        ({"count": 0}, "count = '0'"),
        ({"count": True}, "count = 'True'"),
        ({"max_bytes": MOST_BYTES + 1}, "max_bytes"),
        ({"seconds": float("nan")}, "seconds = 'nan'"),
    ],
)
def test_an_invalid_request_is_refused_by_name(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused, match=told):
        CaptureRequest.of_json(raw)


def test_requests_are_known_by_whole_words_of_their_ids() -> None:
    roll = RequestSelection(CaptureRequest(requests=("mine", "run-7")))
    names = ("cmpl-mine-0", "cmpl-other-0", "cmpl-mined-0", "chatcmpl-run-7", "mine", "cmpl-mine-0")
    assert [roll.owner(name) for name in names] == [0, None, None, 1, 2, 0]
    assert roll.ids == ["cmpl-mine-0", "chatcmpl-run-7", "mine"]


def test_as_many_next_requests_as_requested_are_captured() -> None:
    roll = RequestSelection(CaptureRequest(count=2))
    assert [roll.owner(name) for name in "abca"] == [0, 1, None, 0]
    late = RequestSelection(CaptureRequest(seconds=0.0))
    assert late.owner("a") is None
