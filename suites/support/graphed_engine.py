"""Imitate an engine that decodes by CUDA graphs: both of vLLM's model runners, padding, a cache.

The model is that of engine_stand_in; attention has a cache of fixed shape, so that a decoding step
is the same sequence of operations at fixed addresses. On a GPU the graphs are torch's own; on the
CPU `CpuGraph` records the operations of a pass and repeats them, so that no module is called.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from degarble.harness.vllm.capture import CaptureWorker
from degarble.suites.support.engine_stand_in import engine_models

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

SIZES = (1, 2, 4)  # rows of the graphs
_SLOTS, _LENGTH, _ROWS = 9, 64, 128  # sequences, the last for padding; tokens of each; of a batch


class _Recorder(TorchDispatchMode):
    """Runs operations and keeps them, with the tensors that they read and made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        # By address, as a graph holds them: a parameter that is given other memory is not seen.
        self.calls.append(
            (func, *tree_map_only(torch.Tensor, torch.detach, (args, kwargs or {})), made)
        )
        return made


class CpuGraph:
    """A recorded pass: `replay` repeats its operations on the same memory."""

    def capture_begin(self) -> None:
        self._recorder = _Recorder()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        for func, args, kwargs, made in self._recorder.calls:
            again = func(*args, **kwargs)
            olds, news = (x if isinstance(x, (tuple, list)) else (x,) for x in (made, again))
            for old, new in zip(olds, news, strict=True):
                # A view, and what was written in place, is there already.
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


@contextmanager
def recorded(graph: Any) -> Iterator[None]:
    """Record into a graph of either kind."""
    if isinstance(graph, torch.cuda.CUDAGraph):
        with torch.cuda.graph(graph):
            yield
        return
    graph.capture_begin()
    yield
    graph.capture_end()


class SlotAttention(nn.Module):
    """Causal attention over a cache of fixed shape; rows say in which slot they lie."""

    def __init__(self, width: int, rows: SimpleNamespace) -> None:
        super().__init__()
        self._width, self._rows = width, rows
        self._cache: list[Tensor] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(len(x), -1, self._width) for x in (q, k, v))
        if not self._cache:
            shape = (_SLOTS, _LENGTH, *k.shape[1:])
            self._cache = [torch.zeros(shape, dtype=k.dtype, device=k.device) for _ in "kv"]
        slots, positions = self._rows.slots, self._rows.positions
        for cache, new in zip(self._cache, (k, v), strict=True):
            cache[slots, positions] = new
        many = q.shape[1] // k.shape[1]
        keys, values = (x[slots].double().repeat_interleave(many, 2) for x in self._cache)
        scores = torch.einsum("qhd,qkhd->hqk", q.double(), keys) * self._width**-0.5
        seen = torch.arange(_LENGTH, device=q.device) <= positions[:, None]
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,qkhd->qhd", shares, values).to(q.dtype).reshape(len(q), -1)


class _Wrapper:
    """The older runner's wrapper of a model, as far as it is looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.runnable = model
        self.concrete_cudagraph_entries: dict[int, Any] = {}


class GraphRunner:
    """A model runner: prepares a batch, pads it to a graph's rows, replays or calls the model."""

    def __init__(self, source: nn.Module, graph_class: Any, device: str) -> None:
        (self.inner,) = engine_models(source)
        self.device, self._graph_class = torch.device(device), graph_class
        names = ("ids", "positions", "slots")
        self._input = {n: torch.zeros(_ROWS, dtype=torch.long, device=device) for n in names}
        self.rows = SimpleNamespace()
        for name, module in list(self.inner.named_modules()):
            if name.endswith("self_attn"):
                module.attn = _named_attention(SlotAttention(module._width, self.rows))
                module.rotary_emb._frequencies = module.rotary_emb._frequencies.to(device)
        self.inner.to(device)
        self._hold_graphs()
        self.replays = 0
        self._slots: dict[str, int] = {}
        self._done: dict[str, int] = {}
        config: Any = source.config
        shape = (_ROWS, config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.capture_model()

    graphs: dict[int, Any]

    def _hold_graphs(self) -> None:
        raise NotImplementedError

    def _store(self, size: int, graph: Any) -> None:
        raise NotImplementedError

    def _prepare(self, scheduler_output: Any) -> None:
        raise NotImplementedError

    def _replay(self, size: int) -> None:
        raise NotImplementedError

    @torch.inference_mode()
    def capture_model(self) -> None:
        """Record a graph for each number of rows, the largest first."""
        for size in sorted(SIZES, reverse=True):
            assert size not in self.graphs
            self._input["slots"][:size] = _SLOTS - 1
            self._passed(size)
            graph = self._graph_class()
            with recorded(graph):
                self._passed(size)
            self._store(size, graph)

    def forget(self) -> None:
        """Forget all sequences."""
        self._slots, self._done = {}, {}

    def _passed(self, size: int) -> None:
        self.rows.slots = self._input["slots"][:size]
        self.rows.positions = self._input["positions"][:size]
        hidden = self.inner(input_ids=self._input["ids"][:size], positions=self.rows.positions)
        self.hidden[:size].copy_(hidden)

    @torch.inference_mode()
    def execute_model(self, pieces: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Compute new tokens of several requests; return the next one of each."""
        counts = {name: len(piece) for name, piece in pieces.items()}
        self._prepare(SimpleNamespace(num_scheduled_tokens=counts))
        slots: list[int] = []
        positions: list[int] = []
        for name, count in counts.items():
            slots += [self._slots.setdefault(name, len(self._slots))] * count
            begin = self._done.get(name, 0)
            positions += range(begin, begin + count)
            self._done[name] = begin + count
        size = self._sized(counts)
        rows = size or len(slots)
        ids = [token for piece in pieces.values() for token in piece]
        for name, values, pad in (
            ("ids", ids, 0), ("positions", positions, 0), ("slots", slots, _SLOTS - 1),
        ):  # fmt: skip
            padded = torch.tensor([*values, *[pad] * (rows - len(values))])
            self._input[name][:rows] = padded.to(self.device)
        if size:
            self._replay(size)
            self.replays += 1
        else:
            self._passed(rows)
        last = torch.tensor([*counts.values()]).cumsum(0) - 1
        states = self.hidden[last.to(self.device)]
        logits = self.inner.logits_processor(self.inner.lm_head, states)
        return {name: int(row.argmax()) for name, row in zip(counts, logits, strict=True)}

    def _sized(self, counts: Mapping[str, int]) -> int | None:
        """Return the rows of the graph for a batch; None of one that computes prompts."""
        if any(count != 1 for count in counts.values()):
            return None
        return next((size for size in SIZES if size >= len(counts)), None)


class NewerRunner(GraphRunner):
    """As vllm/v1/worker/gpu/model_runner.py: a manager holds the graphs."""

    def _hold_graphs(self) -> None:
        self.model, self.cudagraph_manager = self.inner, SimpleNamespace(graphs={})

    @property
    def graphs(self) -> dict[int, Any]:  # type: ignore[override]  # looked up each time
        found: dict[int, Any] = self.cudagraph_manager.graphs
        return found

    def _store(self, size: int, graph: Any) -> None:
        self.graphs[size] = graph

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        return SimpleNamespace(req_ids=[*counts], num_scheduled_tokens=[*counts.values()])

    def _prepare(self, scheduler_output: Any) -> None:
        self.prepare_inputs(scheduler_output)

    def _replay(self, size: int) -> None:
        self.graphs[size].replay()


class OlderRunner(GraphRunner):
    """As vllm/v1/worker/gpu_model_runner.py: a wrapper of the model holds the graphs."""

    def _hold_graphs(self) -> None:
        self.model = _Wrapper(self.inner)

    @property
    def graphs(self) -> dict[int, Any]:  # type: ignore[override]  # looked up each time
        return self.model.concrete_cudagraph_entries

    def _store(self, size: int, graph: Any) -> None:
        self.graphs[size] = SimpleNamespace(cudagraph=graph)

    def _prepare_inputs(self, scheduler_output: Any) -> None:
        self.input_batch = SimpleNamespace(req_ids=[*scheduler_output.num_scheduled_tokens])

    def _prepare(self, scheduler_output: Any) -> None:
        self._prepare_inputs(scheduler_output)

    def _replay(self, size: int) -> None:
        self.graphs[size].cudagraph.replay()


def _named_attention(attention: SlotAttention) -> nn.Module:
    # The map of an engine's modules goes by the names of classes.
    attention.__class__ = type("Attention", (SlotAttention,), {})
    return attention


class GraphedWorker(CaptureWorker):
    """A worker with the extension mixed in, and the engine that calls it."""

    def __init__(
        self,
        checkpoint: str,
        source: nn.Module,
        graph_class: Any = CpuGraph,
        device: str = "cpu",
        runner: type[GraphRunner] = NewerRunner,
    ) -> None:
        self.rank, self.model_runner = 0, runner(source, graph_class, device)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model=checkpoint, enforce_eager=False, quantization=None),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, pipeline_parallel_size=1, use_ubatching=False
            ),
            compilation_config=SimpleNamespace(mode="NONE", cudagraph_mode="FULL_DECODE_ONLY"),
        )

    def get_model(self) -> nn.Module:
        return self.model_runner.inner

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        return [getattr(self, method)(*args)]

    def generate_ids(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Continue prompts greedily, all in one batch."""
        texts = [list(prompt) for prompt in prompts]
        first = len(self.model_runner._slots)
        pieces = {str(first + n): list(prompt) for n, prompt in enumerate(prompts)}
        for _ in range(new):
            said = self.model_runner.execute_model(pieces)
            for text, token in zip(texts, said.values(), strict=True):
                text.append(token)
            pieces = {name: [token] for name, token in said.items()}
        return texts
