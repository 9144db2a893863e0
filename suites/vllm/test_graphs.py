"""Captures of decoding by graphs, on the imitation of both of vLLM's model runners."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.files.reader import Capture
from degarble.harness.vllm import capture as plugin
from degarble.harness.vllm.graphs import GRAPH_OPTIONS, OPTION_LINE, records_graphs
from degarble.suites.commands.calls import call
from degarble.suites.support.graphed_engine import (
    CpuGraph,
    GraphedWorker,
    GraphRunner,
    NewerRunner,
    OlderRunner,
)
from degarble.suites.vllm import any_model, graph_capture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.needs("transformers")
PROMPTS = graph_capture.PROMPTS
RUNNERS = (NewerRunner, OlderRunner)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("models") / "ckpt"
    return folder, any_model.write("llama", folder)


@pytest.fixture(autouse=True)
def _graphs_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin, "GRAPH_CLASS", CpuGraph)
    begin, end = CpuGraph.capture_begin, CpuGraph.capture_end
    yield
    assert (CpuGraph.capture_begin, CpuGraph.capture_end) == (begin, end)


def opened(worker: GraphedWorker, folder: Path, **fields: Any) -> dict[str, Any]:
    spec = {"folder": str(folder), "asked": {"count": 3, "max_bytes": 1 << 30, **fields}}
    return worker.degarble_capture_open(json.dumps(spec))


def captured(written: tuple[Path, nn.Module], out: Path, runner: type[GraphRunner]) -> Capture:
    worker = GraphedWorker(str(written[0]), written[1], CpuGraph, runner=runner)
    how = CaptureSettings(new_tokens=4, graph_bytes=1 << 24)
    plugin.capture_vllm(written[0], PROMPTS, out, how, lambda **_: worker)
    return Capture.open(out)


@pytest.mark.parametrize("runner", RUNNERS)
def test_prompts_are_called_and_decoding_is_replayed(
    tmp_path: Path, written: tuple[Path, nn.Module], runner: type[GraphRunner]
) -> None:
    worker = GraphedWorker(str(written[0]), written[1], CpuGraph, runner=runner)
    plain = worker.generate_ids(PROMPTS, 4)
    worker = GraphedWorker(str(written[0]), written[1], CpuGraph, runner=runner)
    first = dict(worker.model_runner.graphs)
    assert opened(worker, tmp_path / "a")["graphs"] == 3
    assert not first.items() & worker.model_runner.graphs.items()
    assert worker.generate_ids(PROMPTS, 4) == plain
    found = worker.degarble_capture_close()
    assert (found["replayed"], found["unseen"]) == (3, [])
    assert worker.model_runner.graphs == first, "the graphs of before are those of after"
    assert worker.degarble_capture_state() == {"open": False}


def test_what_was_replayed_equals_what_was_called(
    tmp_path: Path, written: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = captured(written, tmp_path / "a", NewerRunner)
    assert replayed.facts["replayed"] == [1, 2, 3]
    monkeypatch.setattr(GraphRunner, "_sized", lambda *_: None)
    called = captured(written, tmp_path / "b", NewerRunner)
    assert "replayed" not in called.facts
    assert replayed.steps == called.steps
    for one, other in zip(replayed.calls, called.calls, strict=True):
        assert one.component == other.component
        for side in ("inputs", "outputs"):
            both = [getattr(run, side)(at) for run, at in ((replayed, one), (called, other))]
            assert both[0].keys() == both[1].keys()
            # Torch may sum four rows in another order than three.
            for name, tensor in both[0].items():
                torch.testing.assert_close(tensor, both[1][name], rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", graph_capture.TORCH_RUNS)
def test_a_fault_is_placed_also_where_graphs_alone_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = graph_capture.TORCH_RUNS[name]
    source = any_model.write("llama", tmp_path / "llama")
    place = tmp_path / "out"
    found = graph_capture.capture_torch(tmp_path / "llama", source, place, name, CpuGraph, "cpu")
    assert found == {"replayed": graph_capture.NEW_TOKENS - 1, "same": True}
    document = call(capsys, *any_model.check_words(place, tmp_path / "llama")).document
    assert run.holds(document), document
    words = call(capsys, "check", place, "--reference", tmp_path / "llama").out
    assert "decoding was captured inside CUDA graphs" in words
    assert "7 of 8 steps" in words


@pytest.mark.vllm
@pytest.mark.gpu
def test_vllm_itself_holds(tmp_path: Path) -> None:
    assert graph_capture.in_vllm(tmp_path, sys.executable, (), []) == 0


@pytest.mark.gpu
def test_graphs_of_torch_hold(tmp_path: Path) -> None:
    assert graph_capture.in_torch(tmp_path, sys.executable) == 0


@pytest.mark.h200
@pytest.mark.needs("cutlass")
def test_graphs_of_our_kernels_hold(tmp_path: Path) -> None:
    assert graph_capture.in_ours(tmp_path, sys.executable) == 0


def test_rows_of_other_requests_are_not_copied(
    tmp_path: Path, written: tuple[Path, nn.Module]
) -> None:
    worker = GraphedWorker(str(written[0]), written[1])
    opened(worker, tmp_path / "a", requests=["1"])
    texts = worker.generate_ids(PROMPTS, 3)
    found = worker.degarble_capture_close()
    assert (found["requests"], found["replayed"]) == (["1"], 2)
    capture = Capture.open(tmp_path / "a" / "rank-0000")
    assert [step.tokens for step in capture.steps] == [
        PROMPTS[1], *((token,) for token in texts[1][len(PROMPTS[1]) : -1])
    ]  # fmt: skip
    rows = {tensor.shape[0] for one in capture.calls for tensor in one.outputs.values()}
    assert rows == {len(PROMPTS[1]), 1}
    # Nobody is wanted any more: graphs with copies run on, and nothing is read.
    opened(worker, tmp_path / "b", requests=["nobody"])
    worker.generate_ids(PROMPTS, 3)
    assert worker.degarble_capture_close()["calls"] == 0


def test_buffers_that_do_not_fit_are_refused_and_the_engine_goes_on(
    tmp_path: Path, written: tuple[Path, nn.Module]
) -> None:
    worker = GraphedWorker(str(written[0]), written[1])
    first = dict(worker.model_runner.graphs)
    name, room, expectation, remedy = opened(worker, tmp_path / "a", graph_bytes=20_000)["refused"]
    assert (name, room) == ("graph_bytes", 20_000)
    needed = int(expectation.partition(":")[0])
    assert needed > 20_000
    assert "sites of up to 4 rows, of which" in expectation
    assert "Ask for more" in remedy
    assert worker.model_runner.graphs == first
    assert len(worker.generate_ids(PROMPTS, 2)) == 3
    # What the refusal names is enough, and a byte less is not.
    assert "refused" in opened(worker, tmp_path / "b", graph_bytes=needed - 256)
    assert opened(worker, tmp_path / "c", graph_bytes=needed)["graphs"] == 3
    worker.degarble_capture_close()


def test_a_site_that_a_graph_does_not_have_is_not_read_from_its_buffer(
    tmp_path: Path, written: tuple[Path, nn.Module]
) -> None:
    worker = GraphedWorker(str(written[0]), written[1])
    runner = worker.model_runner
    opened(worker, tmp_path / "a")
    worker.generate_ids(PROMPTS, 3)
    recorded = worker.__dict__["_degarble_capture"]._copies._graphs
    four = next(each for each in recorded if each.graph is runner.graphs[4])
    name = "model.layers.1.self_attn.o_proj"
    for source in [each for each in four.copies if each.module == name]:
        del four.copies[source]  # its buffer still holds the rows of the steps before
    runner.execute_model({name: [1] for name in "012"})
    assert worker.degarble_capture_close()["replayed"] == 3
    capture = Capture.open(tmp_path / "a" / "rank-0000")
    steps = [one.step for one in capture.calls if one.component.endswith("1.self_attn.o_proj")]
    assert steps == [0, 1, 2]
    assert len(capture.steps) == 4


def test_a_step_that_was_not_seen_refuses_the_capture(
    tmp_path: Path, written: tuple[Path, nn.Module]
) -> None:
    worker = GraphedWorker(str(written[0]), written[1])
    runner = worker.model_runner
    first = dict(runner.graphs)
    opened(worker, tmp_path / "a")
    runner.graphs.update(first)  # as graphs that were recorded without copies
    worker.generate_ids(PROMPTS, 3)
    refused = worker.degarble_capture_close()["refused"]
    assert "neither called the model nor replayed" in refused[1]
    assert refused[3] == "Start it with --enforce-eager."


def test_a_recording_that_fails_leaves_the_first_graphs(
    tmp_path: Path, written: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = GraphedWorker(str(written[0]), written[1])
    first = dict(worker.model_runner.graphs)

    def fails() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(worker.model_runner, "capture_model", fails, raising=False)
    refused = opened(worker, tmp_path / "a")["refused"]
    assert refused[:2] == ["vLLM's graphs", "CUDA error: out of memory"]
    assert worker.model_runner.graphs == first
    monkeypatch.setattr(worker.model_runner, "capture_model", lambda: None)
    assert "records graphs while hooks" in opened(worker, tmp_path / "b")["refused"][2]
    vars(worker.model_runner).pop("cudagraph_manager")
    assert "vLLM 0.26's runners" in opened(worker, tmp_path / "c")["refused"][2]


@pytest.mark.parametrize(
    ("mode", "graphs", "more", "told"),
    [
        ("VLLM_COMPILE", "FULL_AND_PIECEWISE", {}, "vLLM's compilation mode = 'VLLM_COMPILE'"),
        ("STOCK_TORCH_COMPILE", "NONE", {}, "vLLM's compilation mode"),
        ("NONE", "PIECEWISE", {}, "vLLM's cudagraph_mode = 'PIECEWISE'"),
        ("NONE", "FULL", {"use_ubatching": True}, "--enable-dbo"),
    ],
)
def test_what_cannot_have_copies_is_refused_with_what_to_type(
    mode: str, graphs: str, more: dict[str, bool], told: str
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=graphs),
        parallel_config=SimpleNamespace(**{"use_ubatching": False, **more}),
    )
    with pytest.raises(InvalidArgument) as caught:
        records_graphs(config)
    assert told in str(caught.value)
    assert OPTION_LINE in str(caught.value) or "Start it without --enable-dbo." in str(caught.value)
    config.model_config.enforce_eager = True
    assert not records_graphs(config)


def test_options_of_the_remedy_are_those_that_record() -> None:
    options = json.loads(OPTION_LINE.partition("'")[2].rstrip("'"))
    assert options == GRAPH_OPTIONS
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(mode="NONE", cudagraph_mode=options["cudagraph_mode"]),
        parallel_config=SimpleNamespace(use_ubatching=False),
    )
    assert records_graphs(config)
    config.compilation_config.cudagraph_mode = "NONE"
    assert not records_graphs(config)
