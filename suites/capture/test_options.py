"""Filters select what they name, and requests to a live server are read or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName
from degarble.harness.capture.options import (
    MOST_BYTES,
    CaptureFilter,
    CaptureRequest,
    RequestSelection,
    whole_sites,
)
from degarble.harness.model.components import component_named, components
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32

NAMES = tuple(component.name for component in components(TINY_V4))


def taken(**words: str) -> set[str]:
    wanted = CaptureFilter.from_options(**words)
    wanted.require_choosing(NAMES)
    return {name for name in NAMES if wanted.includes(name)}


def test_words_choose() -> None:
    assert taken() == set(NAMES)
    assert taken(layers="ends") == {n for n in NAMES if not n.startswith(("layers.", "mtp."))}
    two = taken(layers="0-1")
    assert two == {n for n in NAMES if n.startswith(("layers.0.", "layers.1."))}
    assert taken(layers="layers.1, 0") == two
    assert taken(layers="1", components="attn.w*") == {
        f"layers.1.attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
    }
    assert taken(components="layers.0.ffn.gate,hc_h?ad", layers="0,ends") == {
        "layers.0.ffn.gate",
        "hc_head",
    }


def test_rows_are_those_of_the_positions() -> None:
    wanted = CaptureFilter.from_options(tokens="1-2,7")
    assert wanted.rows([0, 1, 2, 3, 0, 1]) == (1, 2, 5)
    assert wanted.rows([8]) == ()
    assert CaptureFilter.from_options().rows([8]) is None
    assert wanted.document() == {"layers": None, "components": None, "tokens": ["1-2", "7-7"]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"layers": "x"}, "--layers"),
        ({"layers": "3-1"}, "smaller number first"),
        ({"layers": "1,"}, "Remove a comma"),
        ({"layers": "99"}, r"--layers = 'layers\.99'"),
        ({"components": "attn.wq"}, r"--components = 'attn\.wq'.*Did you mean"),
        ({"layers": "0", "components": "head"}, "a component that both choose"),
        ({"tokens": "-1"}, "--tokens"),
        ({"tokens": "1-"}, "--tokens"),
    ],
)
def test_words_that_choose_nothing_are_refused(words: dict[str, str], told: str) -> None:
    with pytest.raises(Refused, match=told) as caught:
        taken(**words)
    assert isinstance(caught.value, (InvalidArgument, UnknownName))


def test_what_has_no_row_a_token_stays_whole() -> None:
    """Shapes alone would mislead: three entries beside three tokens are not their rows."""
    attend = next(n for n in NAMES if n.endswith("attn.attend") and _compresses(n))
    whole = whole_sites(component_named(TINY_V4, attend))
    assert {"state_window", "state_compressed", "compressed", "token_offsets"} <= whole
    assert not {"q", "window", "positions", "out"} & whole
    pool = component_named(TINY_V4, attend.replace("attend", "compressor.pool"))
    assert {"out", "state_latent", "state_gate"} <= whole_sites(pool)
    assert not {"latent", "gate", "positions"} & whole_sites(pool)
    rows = component_named(TINY_V32, "layers.0.attn.attend")
    assert whole_sites(rows) & {each.name for each in rows.inputs} == {
        "state_rows", "state_expanded", "token_offsets",
    }  # fmt: skip


def _compresses(attend: str) -> bool:
    inputs = component_named(TINY_V4, attend).inputs
    return any(each.name == "compressed" for each in inputs)


def test_a_request_is_read_and_written_back() -> None:
    raw: dict[str, Any] = {
        "requests": ["mine", "also"], "layers": "0-1,ends", "components": "attn.*", "tokens": "0-3",
        "max_bytes": 1000, "seconds": 5,
    }  # fmt: skip
    request = CaptureRequest.of_json(raw)
    assert request.wanted.includes("layers.1.attn.wq_a")
    assert not request.wanted.includes("layers.2.attn.wq_a")
    assert (request.requests, request.count, request.nbytes) == (("mine", "also"), 2, 1000)
    assert CaptureRequest.of_json(request.document()) == request
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
