"""Capture from vLLM: a worker extension, a switch on the API server, and a run without a server.

    DEGARBLE_CAPTURES=DIR vllm serve CKPT
        --compilation-config '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
        --worker-extension-cls degarble.harness.vllm.capture.CaptureWorker
        --middleware degarble.harness.vllm.capture.CaptureSwitch

What is used of vLLM is public, or looked up by name when a capture opens: collective_rpc of the
worker, the model runner's model, and the batch that it prepares. vLLM's files are not changed, and
nothing of ours is installed while no capture is open. vLLM is imported only to run it here.

Of an engine that replays CUDA graphs, copies are recorded into the graphs (graphs.py); one that is
compiled calls no module and is rejected, as are pipeline stages. --enforce-eager works as well.
Ran in vLLM 0.26 on an H200 (docs/vllm.md).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError, InvalidArgument, MissingDependency
from degarble.harness.vllm.graphs import GRAPH_OPTIONS, record_again, records_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from degarble.harness.capture.capture import CaptureSettings
    from degarble.harness.capture.engine.graphs import GraphCopies, RecordedGraph
    from degarble.harness.capture.engine.session import Scheduled
    from degarble.harness.capture.options import CaptureRequest

PATH = "/degarble/capture"
FOLDER_VARIABLE, TOKEN_VARIABLE = "DEGARBLE_CAPTURES", "DEGARBLE_CAPTURE_TOKEN"
EXTENSION = "degarble.harness.vllm.capture.CaptureWorker"
SWITCH = "degarble.harness.vllm.capture.CaptureSwitch"
GRAPH_CLASS: Any = None  # None: torch.cuda.CUDAGraph
_MOST_BODY = 64 << 10


class CaptureWorker:
    """Methods that vLLM mixes into its worker. Their names are called by collective_rpc."""

    def degarble_capture_open(self, spec: str) -> dict[str, Any]:
        """Open a capture on this rank; `spec` is JSON: folder and options."""
        raw = json.loads(spec)
        return _told(lambda: _Rank.open(self, Path(raw["folder"]), raw["asked"]))

    def degarble_capture_state(self) -> dict[str, Any]:
        """Return the progress of this rank."""
        rank: _Rank | None = vars(self).get(_Rank.NAME)
        return {"open": False} if rank is None else {"open": True} | rank.capture.state

    def degarble_capture_close(self) -> dict[str, Any]:
        """Close it, and take everything of ours away."""
        rank: _Rank | None = vars(self).pop(_Rank.NAME, None)
        if rank is None:
            return _refusal("none is open on this rank", "Open one first.")
        return _told(rank.close)


def _told(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Give a refusal back instead of raising it: an exception would end vLLM's engine."""
    try:
        return work()
    except DegarbleError as error:
        value = error.value if isinstance(error.value, (int, str)) else str(error.value)
        return {"refused": [error.name, value, error.expectation, error.remedy]}
    except OSError as error:
        return _refusal(str(error), "See docs/capture-engine.md.")


def _refusal(value: str, remedy: str) -> dict[str, Any]:
    return {"refused": ["capture", value, "one that is open and can be written", remedy]}


class _Rank:
    """One rank's capture, and the watching of its model runner."""

    NAME = "_degarble_capture"

    def __init__(
        self, capture: Any, stack: ExitStack, method: str, copies: GraphCopies | None
    ) -> None:
        self.capture, self._stack, self._method = capture, stack, method
        self._copies = copies
        self._batch: list[tuple[str, int]] = []
        self._missed = 0

    @classmethod
    def open(cls, worker: Any, folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
        """Begin on this worker."""
        # Imports torch, which vLLM's API server does without.
        import torch  # noqa: PLC0415

        from degarble.harness.capture.engine.graphs import GraphCopies  # noqa: PLC0415
        from degarble.harness.capture.engine.session import EngineCapture  # noqa: PLC0415
        from degarble.harness.capture.options import CaptureRequest  # noqa: PLC0415

        if cls.NAME in vars(worker):
            raise InvalidArgument("capture", "open already", "one at a time", "Close it first.")
        ranks, graphs = _require_plain(worker.vllm_config)
        model, runner = worker.get_model(), worker.model_runner
        places, facts = _maps(Path(_checkpoint(worker)), model, ranks)
        own, request = folder / f"rank-{worker.rank:04}", CaptureRequest.of_json(raw)
        copies = GraphCopies(request.graph_bytes, runner.device) if graphs else None
        capture = EngineCapture(own, model, places, request, facts, copies)
        stack = ExitStack()
        rank = cls(capture, stack, str(worker.vllm_config.model_config.quantization), copies)
        try:
            _watch_batches(runner, rank.note, stack)
            hook = model.register_forward_pre_hook(rank.begin, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
            if copies is not None:
                copies.on_replay = rank.replayed
                record_again(runner, copies, stack, GRAPH_CLASS or torch.cuda.CUDAGraph)
            capture.require_sound()
        except BaseException:
            stack.close()
            with suppress(Exception):  # the first error is the one to report
                capture.close()
            raise
        setattr(worker, cls.NAME, rank)
        found = {"rank": worker.rank, "ranks": ranks, "checkpoint": _checkpoint(worker)}
        return found | {"graphs": 0 if copies is None else copies.count}

    def note(self, batch: list[tuple[str, int]]) -> None:
        """Keep who is in the batch that comes, and with how many tokens."""
        self._missed += bool(self._batch) and self._copies is not None
        # Logits of a step that is not seen would count as those of the step before.
        self.capture.batch([])
        self._batch = batch

    def begin(self, _model: Any, given: Any, named: dict[str, Any]) -> None:
        """Announce a forward pass to the capture; a dummy run has no batch."""
        ids, positions = (
            named.get(name, given[n] if n < len(given) else None)
            for n, name in enumerate(("input_ids", "positions"))
        )
        if self._copies is not None and self._copies.current is not None:
            self._copies.current.inputs = ids, positions  # the graph's own, which a replay reads
            return
        self.capture.batch(self._scheduled(ids, positions))

    def replayed(self, recorded: RecordedGraph) -> None:
        """Announce a step that a graph has just computed; a drafter's graph has no inputs here."""
        if recorded.inputs is not None:
            self.capture.replayed(self._scheduled(*recorded.inputs), recorded)

    def _scheduled(self, ids: Any, positions: Any) -> list[Scheduled]:
        """Return whose rows the batch has, from the model's inputs."""
        from degarble.harness.capture.engine.session import Scheduled  # noqa: PLC0415  torch

        batch, self._batch = self._batch, []
        if not batch or ids is None or positions is None:
            return []
        count = sum(each for _, each in batch)
        tokens, places = ids[:count].tolist(), positions[:count].tolist()
        scheduled, at = [], 0
        for request, new in batch:
            scheduled.append(Scheduled(request, places[at], tokens[at : at + new]))
            at += new
        return scheduled

    def close(self) -> dict[str, Any]:
        """End it."""
        self._stack.close()
        found: dict[str, Any] = self.capture.close()
        if self._missed:
            raise InvalidArgument(
                "vLLM", f"{self._missed} steps that neither called the model nor replayed one of"
                " its graphs", "steps that can be seen", "Start it with --enforce-eager.",
            )  # fmt: skip
        return found | {"method": self._method}


def _maps(checkpoint: Path, model: Any, ranks: int) -> tuple[Any, dict[str, Any]]:
    """Return the hand-written map of a family, or one derived from the modules of any other."""
    from degarble.harness.capture.engine.maps import vllm_component_maps  # noqa: PLC0415  torch
    from degarble.harness.capture.engine.traced import maps_of_model  # noqa: PLC0415  as above

    raw = _raw_config(checkpoint)
    known = _known_config(raw)
    if known is not None:
        return vllm_component_maps(known, ranks), {}
    return maps_of_model(model, raw, ranks)


def _raw_config(checkpoint: Path) -> dict[str, Any]:
    from degarble.harness.base.files import read_small_text  # noqa: PLC0415  with the engine

    found: dict[str, Any] = json.loads(read_small_text(checkpoint / "config.json", 1 << 24))
    return found


def _known_config(raw: dict[str, Any]) -> Any:
    """Return the config of a family with a hand-written reference; None for any other."""
    from degarble.harness.model.config.json_file import config_from_dict  # noqa: PLC0415  torch

    try:
        return config_from_dict(raw)
    except DegarbleError:
        return None  # a traced family: transformers judges its config


def _require_plain(config: Any) -> tuple[int, bool]:
    """Return how many ranks share the model, and whether they replay graphs; raise otherwise."""
    graphs = records_graphs(config)
    stages = config.parallel_config.pipeline_parallel_size
    if stages != 1:
        raise InvalidArgument(
            "pipeline_parallel_size", stages, "1: a rank that has all layers",
            "Capture with tensor parallelism alone.",
        )  # fmt: skip
    return int(config.parallel_config.tensor_parallel_size), graphs


def _checkpoint(worker: Any) -> str:
    return str(worker.vllm_config.model_config.model)


def _watch_batches(
    runner: Any, note: Callable[[list[tuple[str, int]]], None], stack: ExitStack
) -> None:
    """Hear of every batch: from what the newer runner prepares, or the older one's input batch."""
    name = next((n for n in ("prepare_inputs", "_prepare_inputs") if hasattr(runner, n)), None)
    if name is None:
        raise InvalidArgument(
            "vLLM's model runner", type(runner).__name__, "prepare_inputs or _prepare_inputs",
            "Use vLLM 0.33.",
        )  # fmt: skip
    own = getattr(runner, name)

    def prepared(scheduler_output: Any, *given: Any, **named: Any) -> Any:
        made = own(scheduler_output, *given, **named)
        if hasattr(made, "req_ids"):
            counts = [int(token) for token in made.num_scheduled_tokens[: len(made.req_ids)]]
            note(list(zip(made.req_ids, counts, strict=True)))
        else:
            new = scheduler_output.num_scheduled_tokens
            note([(each, new[each]) for each in runner.input_batch.req_ids if each in new])
        return made

    setattr(runner, name, prepared)
    stack.callback(delattr, runner, name)


class CaptureSwitch:
    """Middleware of vLLM's API server: /degarble/capture, where a folder was named."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        folder, self._token = (os.environ.get(n) for n in (FOLDER_VARIABLE, TOKEN_VARIABLE))
        self._folder = Path(folder) if folder else None
        self._place: Path | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer our own path, and pass everything else on."""
        if scope["type"] != "http" or scope["path"] != PATH or self._folder is None:
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request  # noqa: PLC0415  vLLM's server has it
        from starlette.responses import JSONResponse  # noqa: PLC0415

        from degarble.harness.serve.messages import ApiError, bad_input  # noqa: PLC0415

        request = Request(scope, receive)
        try:
            self._admit(request)
            found, status = await self._read_request(request), 200
        except ApiError as error:
            found, status = error.document(), error.status
        except DegarbleError as error:
            found, status = bad_input("capture", error).document(), 400
        await JSONResponse(found, status)(scope, receive, send)

    def _admit(self, request: Any) -> None:
        """Let in who has the token, or, without one, who is on this machine."""
        from degarble.harness.serve.admission import AccessControl  # noqa: PLC0415
        from degarble.harness.serve.messages import (  # noqa: PLC0415
            LOOPBACK,
            ApiError,
        )

        client = (request.scope.get("client") or ("",))[0]
        if self._token is None and client not in LOOPBACK:
            raise ApiError(403, "captures are for this machine alone", None, "unknown_host")
        AccessControl.for_host("127.0.0.1", self._token, anyone=False).admit(PATH, request.headers)

    async def _read_request(self, request: Any) -> dict[str, Any]:
        engine = request.scope["app"].state.engine_client
        if request.method == "GET":
            return {"ranks": await engine.collective_rpc("degarble_capture_state")}
        if request.method == "POST":
            return await self._opened(engine, await request.body())
        return await self._closed(engine)

    async def _opened(self, engine: Any, body: bytes) -> dict[str, Any]:
        from degarble.harness.capture.options import CaptureRequest  # noqa: PLC0415
        from degarble.harness.serve.requests import read_object  # noqa: PLC0415

        if len(body) > _MOST_BODY or self._place is not None:
            raise InvalidArgument(
                "capture", "open already" if self._place else f"{len(body)} bytes",
                "one at a time, asked for in 64 KiB", "Close it first.",
            )  # fmt: skip
        request = CaptureRequest.of_json(read_object(body) if body else {})
        assert self._folder is not None, "the path is answered only with a folder"
        self._folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix="capture-", dir=self._folder))
        spec = json.dumps({"folder": str(place), "asked": request.document()})
        replies = await engine.collective_rpc("degarble_capture_open", args=(spec,))
        if any("refused" in reply for reply in replies):
            await engine.collective_rpc("degarble_capture_close")
            shutil.rmtree(place, ignore_errors=True)
        _require(replies)
        self._place = place
        return {"state": "open", "capture": place.name, "asked": request.document()}

    async def _closed(self, engine: Any) -> dict[str, Any]:
        place, self._place = self._place, None
        if place is None:
            raise InvalidArgument("capture", "none is open", "an open capture", "Open one first.")
        replies = await engine.collective_rpc("degarble_capture_close")
        _require(replies)
        checkpoint = Path(engine.vllm_config.model_config.model)
        apart = joined(checkpoint, place, replies[0])
        names = ("requests", "calls", "replayed", "ended", "unseen")
        fields = {name: replies[0][name] for name in names}
        return {"state": "closed", "capture": place.name, "ranks_apart": apart} | fields


def _require(replies: Sequence[dict[str, Any]]) -> None:
    """Raise the first rank's refusal."""
    refused = next((reply["refused"] for reply in replies if "refused" in reply), None)
    if refused is not None:
        raise InvalidArgument(*refused)


def joined(checkpoint: Path, place: Path, state: dict[str, Any]) -> list[str]:
    """Make one capture of the ranks' in `place`; their own folders go."""
    from degarble.harness.capture.capture import CaptureSettings, facts_of  # noqa: PLC0415  imports torch
    from degarble.harness.capture.engine.maps import vllm_component_maps  # noqa: PLC0415  as above
    from degarble.harness.capture.engine.ranks import join_ranks  # noqa: PLC0415  as above
    from degarble.harness.capture.engine.session import require_calls  # noqa: PLC0415  as above
    from degarble.harness.capture.engine.traced import join_traced  # noqa: PLC0415  as above
    from degarble.harness.engine.conventions.registry import KEY  # noqa: PLC0415  as above
    from degarble.harness.inference.model import open_model  # noqa: PLC0415  as above

    require_calls(state)
    ranks = sorted(place.glob("rank-*"))
    if _known_config(_raw_config(checkpoint)) is None:
        apart = join_traced(ranks, checkpoint, place)
        for folder in (*ranks, place / "joined"):
            shutil.rmtree(folder)
        return apart
    with open_model(checkpoint) as model:
        places = vllm_component_maps(model.config, len(ranks))
        facts = facts_of(checkpoint, model, CaptureSettings()) | {
            "backend": "vllm", KEY: stated_conventions(state.get("method"))
        }  # fmt: skip
        apart = join_ranks(ranks, places, place, facts)
    for folder in ranks:
        shutil.rmtree(folder)
    return apart


def stated_conventions(method: str | None) -> dict[str, Any]:
    """Return the conventions that vLLM and our plugin follow where sources disagree."""
    from degarble.harness.vllm.installed import NAME  # noqa: PLC0415  with the engine
    from degarble.references.numerics import SOURCES, Switches  # noqa: PLC0415  imports torch

    theirs, official = SOURCES["vllm"], Switches()
    if method == NAME:  # each expert keeps its own input scale
        theirs = replace(theirs, input_scale_shared=False)
    each = {name: getattr(theirs, name) for name in sorted(official.__dataclass_fields__)}
    return {
        name: str(value) if isinstance(value, StrEnum) else value
        for name, value in each.items()
        if value != getattr(official, name)
    }


def capture_vllm(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    capture_settings: CaptureSettings,
    make: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Run token ids through vLLM in this process, on one rank, and capture every request.

    With `graph_bytes` it decodes by recorded CUDA graphs, and else by calls of its modules.
    """
    from degarble.harness.capture.options import MOST_BYTES, CaptureRequest  # noqa: PLC0415
    from degarble.harness.report.files import require_folder  # noqa: PLC0415

    require_folder("--out", folder)
    request: CaptureRequest = replace(
        CaptureRequest(capture_settings.wanted), count=len(prompts), nbytes=MOST_BYTES
    )
    graphs = capture_settings.graph_bytes
    # Graphs of no more rows than there are prompts: the largest one decides what buffers take.
    rows = -(-len(prompts) // 8) * 8
    how = {"compilation_config": GRAPH_OPTIONS, "max_num_seqs": rows} if graphs else {}
    request = replace(request, graph_bytes=graphs or request.graph_bytes)
    engine = (make or _engine())(
        model=str(checkpoint), enforce_eager=not graphs, worker_extension_cls=EXTENSION, **how
    )
    spec = json.dumps({"folder": str(folder), "asked": request.document()})
    _require(engine.collective_rpc("degarble_capture_open", args=(spec,)))
    engine.generate_ids([list(prompt) for prompt in prompts], capture_settings.new_tokens)
    replies = engine.collective_rpc("degarble_capture_close")
    _require(replies)
    found: dict[str, Any] = replies[0]
    return found | {"ranks_apart": joined(checkpoint, folder, found)}


@dataclass(frozen=True)
class FromVllm:
    """Summary of a capture by `degarble capture --backend vllm`."""

    folder: Path
    state: dict[str, Any]

    def lines(self) -> list[str]:
        """Summarise the capture in a few lines."""
        from degarble.harness.capture.files.reader import (  # noqa: PLC0415  as above
            Capture,
            capture_lines,
        )

        apart = self.state["ranks_apart"]
        lines = [f"{len(apart)} copies differ between ranks, such as {apart[0]}"] if apart else []
        return [*capture_lines(Capture.open(self.folder)), *lines, f"Wrote {self.folder}"]

    def document(self) -> dict[str, Any]:
        """Return the summary as a JSON document."""
        made: dict[str, Any] = {"verdict": None, "origins": [], "cosines": []}
        return made | {"capture": str(self.folder), "backend": "vllm", "engine": self.state}


def from_vllm(
    checkpoint: Path, prompts: Sequence[Any], folder: Path, capture_settings: CaptureSettings
) -> FromVllm:
    """Capture what vLLM makes of prompts: texts, or conversations in the official encoding."""
    wrong = "--patch" if capture_settings.patch is not None else "--statistics-only"
    if capture_settings.patch is not None or capture_settings.statistics_only:
        raise InvalidArgument(
            wrong, "with --backend vllm", "an engine as it is, and its tensors",
            f"Leave {wrong} out.",
        )  # fmt: skip
    make = _engine()
    # Imports torch, which a refusal does without.
    from degarble.harness.generate.generate import GenerationOptions, TextGenerator  # noqa: PLC0415
    from degarble.harness.inference.model import open_model  # noqa: PLC0415

    with open_model(checkpoint) as model:
        chat = any(isinstance(prompt, list) for prompt in prompts)
        generator = TextGenerator(model, GenerationOptions(chat=chat))
        ids = [generator.ids_of(prompt) for prompt in prompts]
    return FromVllm(folder, capture_vllm(checkpoint, ids, folder, capture_settings, make))


def _engine() -> Callable[..., Any]:
    try:
        import vllm  # noqa: PLC0415  heavy, and another environment's
    except ImportError as error:
        raise MissingDependency(
            "--backend vllm", "vllm", "vLLM 0.33 in this environment",
            "Install it, or capture a running server: docs/capture-engine.md.",
        ) from error  # fmt: skip

    class Engine(vllm.LLM):  # type: ignore[misc]  # its classes are Any here
        def generate_ids(self, prompts: list[list[int]], new: int) -> list[list[int]]:
            """Continue prompts greedily; return the new tokens of each."""
            how = vllm.SamplingParams(temperature=0.0, max_tokens=new)
            made = self.generate([{"prompt_token_ids": prompt} for prompt in prompts], how)
            return [list(each.outputs[0].token_ids) for each in made]

    return Engine
