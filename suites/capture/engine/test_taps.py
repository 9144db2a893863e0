from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.capture.engine.maps import (
    CallSide,
    ComponentMap,
    RowMeaning,
    TensorLocation,
    argument_of,
    result_of,
)
from degarble.harness.capture.engine.session import EngineCapture, Scheduled, require_calls
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.options import CaptureFilter, CaptureRequest

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class Engine(nn.Module):
    """Two fused products, a method, and rows of padding behind the tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.fused = nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(6, 3, bias=False)
        self.twice = False

    def choose(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, None]:
        return x * scale, None

    def forward(self, x: Tensor, sequences: int) -> Tensor:
        both = self.fused(x)
        if self.twice:
            self.fused(x)
        chosen, _ = self.choose(both, scale=torch.ones(len(x), 1) * 2)
        both.zero_()  # whoever keeps no copy of its own keeps this
        out: Tensor = self.head(chosen[:sequences])
        return out


MAP = [
    ComponentMap(
        "layers.0.attn.wq_a",
        {"x": argument_of("fused")},
        {"out": result_of("fused", columns=(0, 2))},
    ),
    ComponentMap(
        "layers.0.attn.wkv",
        {"x": argument_of("fused")},
        {"out": result_of("fused", columns=(2, 6))},
    ),
    ComponentMap(
        "layers.0.ffn.topk",
        {"logits": argument_of(":choose", "scale")},
        {"out": result_of(":choose")},
    ),
    ComponentMap("norm", {"x": TensorLocation("fused", CallSide.ARGUMENT, rows=RowMeaning.LAST)}),
    ComponentMap("head", outputs={"out": TensorLocation("head", rows=RowMeaning.SEQUENCES)}),
]
X = torch.arange(32.0).reshape(8, 4)
BATCH = [Scheduled("a", 0, [1, 2, 3]), Scheduled("b", 5, [4]), Scheduled("c", 0, [5, 6])]


def captured(
    folder: Path, asked: CaptureRequest, engine: Engine | None = None, sightings: Any = MAP
) -> Any:
    engine = engine or Engine()
    capture = EngineCapture(folder, engine, sightings, asked)
    with torch.no_grad():
        for _ in range(2):
            capture.batch(BATCH)
            engine(X, 3)
    found = capture.close()
    with torch.no_grad():
        engine(X, 3)  # nobody looks any more
    assert "choose" not in vars(engine)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in engine.modules())
    return found


def test_wanted_rows_are_copied_and_fused_results_taken_apart(tmp_path: Path) -> None:
    found = captured(tmp_path, CaptureRequest(requests=("a", "c")))
    assert (found["requests"], found["calls"], found["unseen"]) == (["a", "c"], 10, [])
    capture, engine = Capture.open(tmp_path), Engine()
    step = capture.steps[0]
    assert (step.tokens, step.positions) == ((1, 2, 3, 5, 6), (0, 1, 2, 0, 1))
    assert step.sequences == (0, 0, 0, 1, 1)
    rows = X[[0, 1, 2, 4, 5]]
    whole = engine.fused(rows)
    by_name = {name: calls[0] for name, calls in capture.by_component().items()}
    for name, columns in (("wq_a", slice(0, 2)), ("wkv", slice(2, 6))):
        call = by_name[f"layers.0.attn.{name}"]
        assert torch.equal(capture.inputs(call)["x"], rows)
        assert torch.allclose(capture.outputs(call)["out"], whole[:, columns])
    assert capture.inputs(by_name["layers.0.ffn.topk"])["logits"].tolist() == [[2.0]] * 5
    assert torch.equal(capture.inputs(by_name["norm"])["x"], X[[2, 5]])
    assert capture.outputs(by_name["head"])["out"].shape == (2, 3)


def test_filters_choose_components_and_positions(tmp_path: Path) -> None:
    captured(tmp_path, CaptureRequest(CaptureFilter.of("0", "attn.wkv", "1-2"), ("a",)))
    capture = Capture.open(tmp_path)
    assert {call.component for call in capture.calls} == {"layers.0.attn.wkv"}
    assert capture.calls[0].inputs["x"].rows == (1, 2)
    with pytest.raises(UnknownName, match="--layers"):
        EngineCapture(tmp_path / "b", Engine(), MAP, CaptureRequest(CaptureFilter.of("7")))
    assert not list(tmp_path.glob("b/*"))


def test_a_capture_ends_at_its_bytes_with_whole_steps(tmp_path: Path) -> None:
    found = captured(tmp_path, CaptureRequest(requests=("a",), nbytes=400))
    assert found["ended"] == "bytes"
    capture = Capture.open(tmp_path)
    assert (len(capture.steps), len(capture.calls)) == (1, 5)
    assert capture.complete


@pytest.mark.parametrize(
    ("sightings", "told"),
    [
        ([ComponentMap("head", {"x": argument_of("head", 3)})], "argument 3 of head = 'NoneType'"),
        ([ComponentMap("head", {"x": argument_of("head")})], "6 rows at least"),
        (
            [ComponentMap("head", outputs={"out": result_of("fused", columns=(3, 9))})],
            "9 columns at least",
        ),
        ([ComponentMap("head", outputs={"out": result_of("fused", 1)})], "result 1 of fused"),
    ],
)
def test_the_engine_goes_on_where_its_map_is_wrong(
    tmp_path: Path, sightings: list[ComponentMap], told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        captured(tmp_path, CaptureRequest(), sightings=sightings)


def test_a_module_that_runs_twice_is_refused(tmp_path: Path) -> None:
    engine = Engine()
    engine.twice = True
    with pytest.raises(InvalidArgument, match="ran twice"):
        captured(tmp_path, CaptureRequest(), engine)


@pytest.mark.parametrize("place", ["absent", ":absent", "fused:a.b"])
def test_places_that_are_not_there_are_refused_and_nothing_stays(
    tmp_path: Path, place: str
) -> None:
    engine, sightings = Engine(), [*MAP, ComponentMap("embed", outputs={"out": result_of(place)})]
    with pytest.raises((UnknownName, InvalidArgument), match=r"absent|fused:a\.b"):
        EngineCapture(tmp_path / "x", engine, sightings, CaptureRequest())
    assert "choose" not in vars(engine)
    assert not any(each._forward_hooks for each in engine.modules())
    assert not list(tmp_path.glob("x/*"))


def test_a_capture_without_a_call_is_refused_with_the_reason(tmp_path: Path) -> None:
    capture = EngineCapture(tmp_path / "a", Engine(), MAP, CaptureRequest(requests=("z",)))
    capture.batch(BATCH)
    with pytest.raises(InvalidArgument, match="no matching request"):
        require_calls(capture.close())
    capture = EngineCapture(tmp_path / "b", Engine(), MAP, CaptureRequest())
    capture.batch(BATCH)  # and no module is called: a recorded graph
    found = capture.close()
    assert found["unseen"] == ["fused", ":choose", "head"]
    with pytest.raises(InvalidArgument, match="--enforce-eager"):
        require_calls(found)
