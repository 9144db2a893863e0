from __future__ import annotations

from typing import Any

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.capture.files.records import (
    CapturedCall,
    CapturedStep,
    CapturedTensor,
    Phase,
    read_json_object,
)

HASH = "0f" * 32
KEPT = CapturedTensor("BF16", (2, 3), HASH, "000000 embed.out", (4, 9), {"amax": 1.5, "nan": 0})
CALL = CapturedCall(
    3, 1, "layers.0.attn.wq_a", {"x": KEPT}, {"out": KEPT._replace(rows=None)}, ("x",)
)
STEP = CapturedStep(1, Phase.DECODE, (7, 8), (4, 0), (0, 1))


def test_what_is_spelled_is_read_again() -> None:
    assert CapturedTensor.of_json(KEPT.to_json(), "k") == KEPT
    assert CapturedCall.of_json(CALL.to_json(), "c") == CALL
    assert CapturedStep.of_json(STEP.to_json(), "s") == STEP
    assert KEPT.nbytes == 12
    places = [str(site) for site, _ in CALL.sites()]
    assert places == ["layers.0.attn.wq_a.in.x", "layers.0.attn.wq_a.out"]


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (("dtype",), "F4", "dtype"),
        (("shape",), [2, -3], "shape"),
        (("shape",), [1 << 40, 1 << 40], "shape"),
        (("shape",), [True], "shape"),
        (("sha256",), "0f", "sha256"),
        (("rows",), [1, 2, 3], "rows"),
        (("at",), 7, "at"),
        (("statistics",), {"amax": "1"}, "statistics"),
    ],
)
def test_a_damaged_tensor_is_refused_by_field(where: tuple[str], value: Any, told: str) -> None:
    raw = KEPT.to_json() | {where[0]: value}
    with pytest.raises(UnreadableFile, match=rf"k: {told} = .*Capture the run again"):
        CapturedTensor.of_json(raw, "k")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", -1),
        ("step", "0"),
        ("component", "layers.00.attn"),
        ("inputs", {"In": {}}),
        ("inputs", []),
        ("outputs", {"a.b": {}}),
        ("changed", ["y"]),
    ],
)
def test_a_damaged_call_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(UnreadableFile, match=rf"c.*: {field} = "):
        CapturedCall.of_json(CALL.to_json() | {field: value}, "c")


@pytest.mark.parametrize(("field", "value"), [("phase", "training"), ("tokens", [1]), ("x", 0)])
def test_a_damaged_step_is_refused(field: str, value: Any) -> None:
    raw = STEP.to_json() | {field: value}
    if field == "x":
        del raw["positions"]
    with pytest.raises(UnreadableFile, match=r"^s"):
        CapturedStep.of_json(raw, "s")


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":2}', b'{"a":NaN}', b"[1]", b"\xff", b"{", b"[" * 100_000]
)
def test_text_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(UnreadableFile, match="head"):
        read_json_object(text, "head")
