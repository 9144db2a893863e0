from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.maps import (
    TERM,
    WHOLE,
    ComponentMap,
    argument_of,
    partial_share,
    result_of,
)
from degarble.harness.capture.engine.ranks import APART, join_ranks, joined
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.capture.engine.maps import RankShare

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
    share: RankShare, tensors: list[Tensor], told: str
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


MAP = [
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
    apart = join_ranks(folders, MAP, tmp_path / "out", {"backend": "an engine"})
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
        join_ranks(folders, MAP, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
