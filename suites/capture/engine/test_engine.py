"""A running engine is tapped on each rank, and the captures of ranks are joined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.capture.engine.maps import (
    TERM,
    WHOLE,
    CallSide,
    ComponentMap,
    RowMeaning,
    TensorLocation,
    argument_of,
    partial_share,
    result_of,
)
from degarble.harness.capture.engine.ranks import APART, join_ranks, joined
from degarble.harness.capture.engine.session import EngineCapture, Scheduled, require_calls
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import CaptureFilter, CaptureRequest
from degarble.harness.capture.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.capture.engine.maps import CapturedRankShare


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
    folder: Path, request: CaptureRequest, engine: Engine | None = None, sightings: Any = MAP
) -> Any:
    engine = engine or Engine()
    capture = EngineCapture(folder, engine, sightings, request)
    with torch.no_grad():
        for _ in range(2):
            capture.batch(BATCH)
            engine(X, 3)
    found = capture.close()
    with torch.no_grad():
        engine(X, 3)  # nobody looks any more
    assert "choose" not in vars(engine)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in engine.modules()
    )
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
    captured(tmp_path, CaptureRequest(CaptureFilter.from_options("0", "attn.wkv", "1-2"), ("a",)))
    capture = Capture.open(tmp_path)
    assert {call.component for call in capture.calls} == {"layers.0.attn.wkv"}
    assert capture.calls[0].inputs["x"].rows == (1, 2)
    with pytest.raises(UnknownName, match="--layers"):
        EngineCapture(
            tmp_path / "b", Engine(), MAP, CaptureRequest(CaptureFilter.from_options("7"))
        )
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
    assert not any(module._forward_hooks for module in engine.modules())
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


GATE_UP = torch.arange(2 * 2 * 6).reshape(2, 12)  # 6 of gate, 6 of up


def test_parts_lie_side_by_side_slot_by_slot_without_padding() -> None:
    for ranks in (1, 2, 3):
        own = -(-6 // ranks)
        parts = [
            torch.cat([half[:, rank * own : (rank + 1) * own] for half in GATE_UP.split(6, 1)], 1)
            for rank in range(ranks)
        ]
        assert torch.equal(joined("x", partial_share(6, 6), parts), GATE_UP)
    padded = [torch.ones(1, 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]])]
    assert torch.equal(joined("x", partial_share(6), padded), torch.ones(1, 6))
    by_heads = [torch.zeros(2, 1, 5), torch.ones(2, 1, 5)]
    assert joined("x", partial_share(2, dim=1), by_heads)[:, :, 0].tolist() == [[0, 1], [0, 1]]


def test_terms_are_summed_without_another_rounding() -> None:
    one, tiny = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2**-9, dtype=torch.bfloat16)
    assert joined("x", TERM, [one, tiny]).tolist() == [1 + 2**-9]
    assert joined("x", TERM, [one]).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("share", "tensors", "told"),
    [
        (partial_share(6), [torch.ones(1, 2), torch.ones(1, 2)], r"that make \[6\]"),
        (partial_share(2, 2), [torch.ones(1, 3), torch.ones(1, 3)], "2 equal slots"),
        (TERM, [torch.ones(1, 2), torch.ones(1, 3)], "one shape on every rank"),
    ],
)
def test_ranks_that_make_no_whole_are_refused(
    share: CapturedRankShare, tensors: list[Tensor], told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        joined("x", share, tensors)


def test_shares_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="share"):
        partial_share()
    with pytest.raises(InvalidArgument, match="columns of m"):
        result_of("m", columns=(3, 3))
    with pytest.raises(InvalidArgument, match="site"):
        ComponentMap("layers.x.norm", outputs={"out": result_of("m")})


RANKS_MAP = [
    ComponentMap(
        "layers.0.attn.wq_a", {"x": argument_of("m")}, {"out": result_of("m", share=WHOLE)}
    ),
    ComponentMap(
        "layers.0.attn.wq_b",
        {"x": argument_of("n")},
        {"out": result_of("n", share=partial_share(4))},
    ),
]


def rank(folder: Path, x: Tensor, steps: int = 1) -> Path:
    with CaptureWriter(folder, {}) as writer:
        recorder = Recorder(writer)
        for _ in range(steps):
            recorder.begin(Phase.PREFILL, [1, 2], [0, 1], [0, 0])
            for name in ("wq_a", "wq_b"):
                inputs = {"x": torch.ones(2, 3)}
                taken_here = recorder.before(f"layers.0.attn.{name}", inputs)
                recorder.after(f"layers.0.attn.{name}", taken_here, inputs, {"out": x})
        writer.finish(requests=["a"], ended=None)
    return folder


def test_captures_of_ranks_are_one_and_copies_that_differ_are_reported(tmp_path: Path) -> None:
    folders = [rank(tmp_path / str(n), torch.full((2, 2), float(n))) for n in range(2)]
    apart = join_ranks(folders, RANKS_MAP, tmp_path / "out", {"backend": "an engine"})
    assert apart == ["layers.0.attn.wq_a.out: rank 1 is not as rank 0"]
    capture = Capture.open(tmp_path / "out")
    assert capture.complete
    assert capture.facts["ranks"] == 2
    assert capture.facts[APART] == apart
    assert capture.facts["requests"] == ["a"]
    whole = capture.by_component()["layers.0.attn.wq_b"][0]
    assert capture.outputs(whole)["out"].tolist() == [[0, 0, 1, 1]] * 2


def test_ranks_of_other_runs_are_refused(tmp_path: Path) -> None:
    folders = [rank(tmp_path / str(n), torch.ones(2, 2), steps=n + 1) for n in range(2)]
    with pytest.raises(InvalidArgument, match="capture of rank 1 = '2 steps, 4 calls'"):
        join_ranks(folders, RANKS_MAP, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
