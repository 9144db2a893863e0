"""Copies within graphs: any dtype and layout, buffers within their block, watched replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.graphs import GraphCopies, RecordedGraph
from degarble.suites.support.graphed_engine import CpuGraph

DTYPES = (
    torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e8m0fnu,
)  # fmt: skip


def recorded(copies: GraphCopies, *tensors: torch.Tensor) -> CpuGraph:
    graph = CpuGraph()
    with copies.recording(CpuGraph):
        graph.capture_begin()
        for number, tensor in enumerate(tensors):
            copies.keep(number, tensor)
        graph.capture_end()
    return graph


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_replay_copies_what_the_tensor_holds_then(dtype: torch.dtype) -> None:
    codes = torch.arange(24, dtype=torch.uint8).remainder(2)
    wide = codes.repeat_interleave(dtype.itemsize)
    source = wide.view(dtype).reshape(6, 4).T  # not contiguous
    copies, read = GraphCopies(4096, "cpu"), []
    copies.on_replay = lambda graph: read.append(graph.copies[0].clone())
    graph = recorded(copies, source)
    for _ in range(2):
        wide.copy_(1 - wide)
        graph.replay()
        assert torch.equal(read[-1].view(torch.uint8), source.contiguous().view(torch.uint8))
    assert not torch.equal(read[0].view(torch.uint8), read[1].view(torch.uint8))
    copies.close()
    graph.replay()
    assert len(read) == 2, "nobody watches any more"


def test_graphs_share_a_sites_buffer_and_a_replay_says_whose_it_is() -> None:
    copies, seen = GraphCopies(512, "cpu"), []
    copies.on_replay = lambda graph: seen.append((graph, graph.copies[0].clone()))
    four, two = torch.arange(4.0), torch.arange(2.0) + 10
    large, small = recorded(copies, four), recorded(copies, two)
    assert copies.count == 2
    large.replay()
    small.replay()
    large.replay()
    assert [graph.graph for graph, _ in seen] == [large, small, large]
    assert [rows.tolist() for _, rows in seen] == [[0, 1, 2, 3], [10, 11], [0, 1, 2, 3]]
    ends = {graph.copies[0].data_ptr() for graph, _ in seen}
    assert len(ends) == 1


def test_a_site_that_grows_gets_another_buffer_and_an_empty_one_none() -> None:
    copies = GraphCopies(1024, "cpu")
    found: list[Any] = []
    copies.on_replay = lambda graph: found.append(graph.copies[0].clone())
    small, large = recorded(copies, torch.ones(2)), recorded(copies, torch.ones(100))
    recorded(copies, torch.ones(0, 3)).replay()
    small.replay()
    large.replay()
    assert [tuple(each.shape) for each in found] == [(0, 3), (2,), (100,)]


def test_what_does_not_fit_is_refused_and_watches_nothing() -> None:
    copies = GraphCopies(512, "cpu")
    with pytest.raises(InvalidArgument, match="768: 3 sites of up to 5 rows, of which 2 fit"):
        recorded(copies, torch.ones(5), torch.ones(1), torch.ones(1))
    assert copies.count == 1
    copies.current = RecordedGraph(None)
    copies.keep("x", torch.ones(0))
    with pytest.raises(InvalidArgument, match="ran twice in one graph"):
        copies.keep("x", torch.ones(0))


def test_a_recording_that_fails_leaves_the_class_as_it_was() -> None:
    begin, end = CpuGraph.capture_begin, CpuGraph.capture_end
    copies = GraphCopies(512, "cpu")
    with pytest.raises(RuntimeError, match="of CUDA"), copies.recording(CpuGraph):
        raise RuntimeError("of CUDA")
    assert (CpuGraph.capture_begin, CpuGraph.capture_end) == (begin, end)
    assert copies.current is None
