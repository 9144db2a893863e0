"""vLLM's worker, runner and API server stood in for: the switch opens, captures and joins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from torch import distributed, nn

from degarble.harness.base.errors import InvalidArgument, MissingDependency
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.check.check import CheckRun, CheckSettings
from degarble.harness.engine.conventions.registry import conventions_in
from degarble.harness.inference.model import open_model
from degarble.harness.model.sharding import plan
from degarble.harness.report.verdict import Verdict
from degarble.harness.vllm import capture as plugin
from degarble.references.model import Sequence, TokenBatch
from degarble.references.numerics import HeadNorm
from degarble.references.sharded import ShardedModel, Teams
from degarble.suites.commands.calls import call
from degarble.suites.serve.proven_cases import TINY
from degarble.suites.vllm.vllm_stand_in import StandIn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PADDING = 3  # rows that an engine puts behind a batch


class Top(nn.Module):
    """The causal model, as a runner calls it."""

    def __init__(self, engine: StandIn) -> None:
        super().__init__()
        self.model, self.logits_processor = engine.tree.model, engine.tree.logits_processor
        self.under: Any = None

    def forward(self, *, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(positions)
        streams: torch.Tensor = self.model(*self.under)
        return streams


class Runner:
    """Vllm's newer runner, as far as a capture sees it: it orders the batch by itself."""

    def __init__(self, engine: StandIn) -> None:
        self.engine, self.model = engine, Top(engine)
        self.sequences: dict[str, Sequence] = {}

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        new = scheduler_output.num_scheduled_tokens
        names = sorted(new, key=new.__getitem__)
        counts = np.array([new[name] for name in names], dtype=np.int32)
        return SimpleNamespace(req_ids=names, num_scheduled_tokens=counts)

    def execute_model(self, pieces: dict[str, list[int]]) -> dict[str, int]:
        new = {name: len(piece) for name, piece in pieces.items()}
        batch = self.prepare_inputs(SimpleNamespace(num_scheduled_tokens=new))
        sequences = [self.sequences.setdefault(name, Sequence()) for name in batch.req_ids]
        given = [torch.tensor(pieces[name]) for name in batch.req_ids]
        step = TokenBatch.from_sequences([each.length for each in sequences], given)
        self.model.under = step, sequences
        padded = (nn.functional.pad(t, (0, PADDING)) for t in (step.tokens, step.positions))
        with torch.inference_mode():
            streams = self.model(input_ids=next(padded), positions=next(padded))
            hidden = self.model.model.norm(self.engine.bound("hc_head", streams=streams)["out"])
            logits = self.model.logits_processor(None, hidden[step.token_offsets[1:] - 1])
        for sequence, span in zip(sequences, step.spans, strict=True):
            sequence.length += span.stop - span.start
        return {n: int(row.argmax()) for n, row in zip(batch.req_ids, logits, strict=True)}


class Worker(plugin.CaptureWorker):
    """Vllm's worker with the extension mixed in; also the client that calls it."""

    def __init__(self, engine: StandIn, *, eager: bool = True) -> None:
        self.rank, self.model_runner = 0, Runner(engine)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(TINY), enforce_eager=eager, quantization="deepseek_v4_fp8"
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
            compilation_config=SimpleNamespace(
                mode="VLLM_COMPILE", cudagraph_mode="FULL_AND_PIECEWISE"
            ),
        )

    def get_model(self) -> nn.Module:
        return self.model_runner.model

    def serve(self, prompts: dict[str, list[int]], new: int = 2) -> None:
        pieces = dict(prompts)
        for _ in range(new):
            said = self.model_runner.execute_model(pieces)
            pieces = {name: [said[name]] for name in pieces}


class Client:
    """The engine's client of the API server."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.vllm_config = worker, worker.vllm_config

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
        await asyncio.sleep(0)
        return [getattr(self.worker, method)(*args)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    meeting = f"file://{tmp_path_factory.mktemp('gloo')}/store"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    with open_model(TINY) as model:
        sharding_plan = plan(model.config)
        teams = Teams.from_plan(sharding_plan)
        assert teams is not None
        bound = model.logits_model.bound
        yield StandIn(ShardedModel(sharding_plan, teams, bound.numerics, bound.weights), 0)
    distributed.destroy_process_group()


def served(worker: Worker, client: str = "127.0.0.1") -> TestClient:
    app = Starlette(routes=[Route("/v1/models", lambda _request: PlainTextResponse("models"))])
    app.add_middleware(plugin.CaptureSwitch)
    app.state.engine_client = Client(worker)
    return TestClient(app, base_url="http://127.0.0.1", client=(client, 5000))


def test_a_live_server_is_captured_by_request_and_judged(
    tmp_path: Path, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(plugin, "stated_conventions", lambda _: {})  # the stand-in is official
    worker = Worker(engine)
    api = served(worker)
    assert api.get("/v1/models").text == "models"
    opened = api.post(plugin.PATH, json={"requests": ["mine"]})
    assert opened.status_code == 200, opened.text
    assert api.post(plugin.PATH, json={}).status_code == 400  # one at a time
    worker.serve({"cmpl-other-0": [1, 2, 3, 4], "cmpl-mine-0": [5, 6, 7]})
    assert api.get(plugin.PATH).json()["ranks"][0]["requests"] == ["cmpl-mine-0"]
    closed = api.delete(plugin.PATH).json()
    assert (closed["unseen"], closed["ranks_apart"]) == ([], [])
    assert "prepare_inputs" not in vars(worker.model_runner)
    assert not worker.get_model()._forward_pre_hooks
    folder = tmp_path / closed["capture"]
    capture = Capture.open(folder)
    assert capture.facts["backend"] == "vllm"
    assert capture.steps[0].tokens == (5, 6, 7)
    assert not list(folder.glob("rank-*"))
    with CheckRun(CheckSettings(folder, TINY)) as run:
        assert run.judge().verdict is Verdict.AGREES


def test_vllms_side_of_the_sources_is_stated() -> None:
    theirs, ours = (plugin.stated_conventions(each) for each in ("deepseek_v4_fp8", "degarble"))
    assert conventions_in({"conventions": theirs})["head_norm"] is HeadNorm.ONCE
    assert not theirs["routing_weight_before_w2"]
    assert theirs["input_scale_shared"]
    assert ours == {name: each for name, each in theirs.items() if name != "input_scale_shared"}


def test_requests_without_permission_are_refused(
    tmp_path: Path, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(engine)
    assert served(worker).get(plugin.PATH).status_code == 404  # no folder was named
    monkeypatch.setenv(plugin.FOLDER_VARIABLE, str(tmp_path))
    assert served(worker, client="10.0.0.7").get(plugin.PATH).status_code == 403
    monkeypatch.setenv(plugin.TOKEN_VARIABLE, "0123456789abcdef")
    api = served(worker, client="10.0.0.7")
    assert api.get(plugin.PATH).status_code == 401
    head = {"authorization": "Bearer 0123456789abcdef"}
    assert api.get(plugin.PATH, headers=head).json() == {"ranks": [{"open": False}]}


@pytest.mark.parametrize(
    ("spoil", "fields", "told"),
    [
        ({"eager": False}, {}, "compilation-config"),
        ({}, {"layers": "99"}, "--layers"),
        ({}, {"folder": "x"}, "capture = 'folder'"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_leaves_nothing(
    tmp_path: Path, engine: StandIn, monkeypatch: pytest.MonkeyPatch, spoil: Any, fields: Any,
    told: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(plugin.FOLDER_VARIABLE, str(tmp_path))
    found = served(Worker(engine, **spoil)).post(plugin.PATH, json=fields)
    assert found.status_code == 400
    assert told in found.text
    assert not list(tmp_path.iterdir())


def test_prompts_run_through_an_engine_in_this_process(tmp_path: Path, engine: StandIn) -> None:
    class Engine(Worker):
        def __init__(self, **how: Any) -> None:
            assert how["enforce_eager"]
            assert how["worker_extension_cls"] == plugin.EXTENSION
            super().__init__(engine)

        def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
            return [getattr(self, method)(*args)]

        def generate_ids(self, prompts: list[list[int]], new: int) -> None:
            self.serve({str(n): prompt for n, prompt in enumerate(prompts)}, new)

    found = plugin.capture_vllm(
        TINY, [[1, 2], [3, 4, 5]], tmp_path / "a", CaptureSettings(new_tokens=2), Engine
    )
    assert len(found["requests"]) == 2
    assert Capture.open(tmp_path / "a").complete


def test_without_vllm_it_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match=r"vLLM 0\.33"):
        plugin.capture_vllm(TINY, [[1]], tmp_path / "a", CaptureSettings())
    with pytest.raises(InvalidArgument, match="prepare_inputs"):
        plugin._watch_batches(object(), lambda _batch: None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "--backend vllm = 'vllm'"),
        (("--statistics-only",), "--statistics-only"),
        (("--patch", __file__), "--patch"),
    ],
)
def test_the_command_without_vllm_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], told: str
) -> None:
    line = ("--out", tmp_path / "a", "--backend", "vllm", "--prompt", "anna paints", *more)
    done = call(capsys, "capture", TINY, *line)
    assert done.status == 2
    assert told in done.err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (("--graph",), "--graph = '--backend torch'"),
        (("--graph", "--backend", "transformers"), "--graph = '--backend transformers'"),
        (("--graph", "--backend", "vllm", "--patch", __file__), "--graph and --patch"),
        (("--graph-memory", "0", "--backend", "vllm"), "--graph-memory = 0"),
    ],
)
def test_graphs_where_there_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: tuple[str, ...], told: str
) -> None:
    done = call(capsys, "capture", TINY, "--out", tmp_path / "a", "--prompt", "anna", *line)
    assert done.status == 2
    assert told in done.err
