"""Record copies of an engine's tensors into its CUDA graphs, so that replays can be captured.

A replay calls no module, so no hook runs. While a graph is being recorded hooks do run, and a copy
that one of them issues becomes a node of the graph: every replay then writes the tensor again into
a static buffer. Each site has one buffer, which all graphs share; it is read in the stream's order
after the replay that wrote it, and only if the graph that was replayed has a node for that site.
Buffers lie in one block of a stated size, so recording never takes more memory than was allowed.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import Tensor

_ALIGNMENT = 256  # bytes: any dtype may begin there, and copies are as fast as they can be


@dataclass(eq=False)
class RecordedGraph:
    """One graph with nodes of ours: its buffers by source, and the modules that were called."""

    graph: Any
    copies: dict[Hashable, Tensor] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)
    inputs: tuple[Tensor | None, Tensor | None] | None = None  # the model's token ids and positions


class GraphCopies:
    """Static buffers of one capture, and the graphs that write them."""

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        try:
            # Allocated before any recording: inside one it would stay in the graphs' own pool.
            self._block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise InvalidArgument(
                "graph_bytes", nbytes, f"memory that is free on {device}",
                "Ask for less, or start the engine with a smaller --gpu-memory-utilization.",
            ) from error  # fmt: skip
        self._buffers: dict[Hashable, Tensor] = {}
        self._needed: dict[Hashable, int] = {}
        self._missing: set[Hashable] = set()
        self._used, self._rows = 0, 0
        self._graphs: list[RecordedGraph] = []
        self.current: RecordedGraph | None = None
        self.on_replay: Callable[[RecordedGraph], None] = lambda _graph: None

    @property
    def count(self) -> int:
        """Return how many graphs write buffers."""
        return len(self._graphs)

    @contextmanager
    def recording(self, graph_class: Any = torch.cuda.CUDAGraph) -> Iterator[None]:
        """Add copies to every graph of a class that is recorded in here; watch their replays."""
        begin, end = graph_class.capture_begin, graph_class.capture_end

        def begun(graph: Any, *given: Any, **named: Any) -> None:
            begin(graph, *given, **named)
            self.current = RecordedGraph(graph)

        def ended(graph: Any) -> None:
            recorded, self.current = self.current, None
            end(graph)
            if recorded is not None and recorded.copies:
                self._watch(recorded)

        graph_class.capture_begin, graph_class.capture_end = begun, ended
        try:
            yield
        finally:
            graph_class.capture_begin, graph_class.capture_end = begin, end
            self.current = None
        self._require_room()

    def keep(self, source: Hashable, tensor: Tensor) -> None:
        """Copy a tensor into its buffer, as a node of the graph that is being recorded."""
        assert self.current is not None, "copies are nodes of a graph"
        if source in self.current.copies:
            raise InvalidArgument(
                str(source), "ran twice in one graph", "one run a pass", "Correct the engine's map."
            )
        nbytes = tensor.numel() * tensor.element_size()
        self._rows = max(self._rows, *tensor.shape[:1], 0)
        room = self._room(source, nbytes)
        if room is None:
            return  # counted: the refusal says how much all sites need
        buffer = room[:nbytes].view(tensor.dtype).view(tensor.shape)
        buffer.copy_(tensor)
        self.current.copies[source] = buffer

    def close(self) -> None:
        """Leave the graphs as they were replayed before, and release the buffers."""
        for recorded in self._graphs:
            vars(recorded.graph).pop("replay", None)
        self._graphs, self._buffers = [], {}
        self._block = self._block[:0].clone()

    def _room(self, source: Hashable, nbytes: int) -> Tensor | None:
        """Return a site's buffer. Engines record their largest graph first: it fits the others."""
        known = self._buffers.get(source)
        if known is not None and known.numel() >= nbytes:
            return known
        whole = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._needed[source] = max(self._needed.get(source, 0), whole)
        begin, self._used = self._used, self._used + whole
        if self._used > self._block.numel():
            self._used = begin
            self._missing.add(source)
            return None
        self._buffers[source] = self._block[begin : self._used]
        return self._buffers[source]

    def _watch(self, recorded: RecordedGraph) -> None:
        own = recorded.graph.replay

        def replay() -> None:
            own()
            self.on_replay(recorded)

        # Of this one object: every other graph of the process replays as before.
        recorded.graph.replay = replay
        self._graphs.append(recorded)

    def _require_room(self) -> None:
        if self._missing:
            needed, fit = sum(self._needed.values()), len(self._needed) - len(self._missing)
            sites = f"{len(self._needed)} sites of up to {self._rows} rows"
            raise InvalidArgument(
                "graph_bytes", self._block.numel(), f"{needed}: {sites}, of which {fit} fit",
                "Ask for more, name fewer layers or components, or start the engine with fewer"
                " sequences in a batch.",
            )  # fmt: skip
