"""Decode a whole model by our kernels on one GPU, each step one CUDA graph.

A step goes from tokens to logits (embedding, layers, head). Every sequence has a lane; lanes
without a token rest. V4's prompts are fed token by token, V3.2's in pieces by a second graph over
the same memory. Paged caches stay on the GPU, and kernels alone compute; torch moves data. A
captured graph and an eager step launch the same kernels on the same memory.

Shape letters: B rows, S streams, D hidden, V vocabulary, T new tokens.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.graph.layers import V4Steps, V32Steps
from degarble.harness.backends.graph.matrices import FEW_ROWS, TILES, require_products
from degarble.harness.backends.graph.steps import (
    DecoderSize,
    MemorySize,
    latent_memory_of,
    memory_of,
)
from degarble.harness.backends.graph.weights import V4Layout, V32Layout
from degarble.harness.backends.pairings import Paired
from degarble.harness.base.errors import InvalidArgument, NotBuilt
from degarble.harness.inference.generation import MOST_CONCURRENT
from degarble.harness.inference.model import LogitsModel
from degarble.harness.model.family import family_of
from degarble.kernels.indexer.problem import TopkProblem
from degarble.kernels.rows.problem import EmbedProblem
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.backends.graph.steps import DecoderSteps
    from degarble.harness.inference.model import OpenModel
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel
    from degarble.references.model import Sequence
    from degarble.references.numerics import Switches

NAME = "cutedsl-graph"
POSITIONS = 4096  # that a lane has room for
PIECE = 64  # tokens of a step of prompts
_ENTRIES = {"exact": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}  # of caches, as numerics name them
_ENTRIES_V32 = {"exact": "bf16", "fp8": "fp8-v32-ue8m0", "fp8_f32": "fp8-v32"}


class Decoder:
    """Weights and memory of a model, and the step over them.

    `prompts` is a decoder over the same layers and memory whose rows are tokens of any lanes, so
    that one step takes several tokens of a prompt; None if each lane takes one token a step.
    """

    def __init__(
        self,
        stepping: DecoderSteps,
        ends: Any,
        layers: Many[Any],
        memories: Many[Any],
        prompts: Decoder | None = None,
    ) -> None:
        self.stepping, self.ends = stepping, ends
        self.layers, self.memories = tuple(layers), tuple(memories)
        self.prompts = prompts
        self._graph: Any = None
        self._made: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_model(
        cls,
        kernels: Kernels,
        bound: BoundModel,
        recipe: Recipe,
        lanes: int,
        positions: int,
        *,
        products: str = TILES,
    ) -> Decoder:
        """Lay out a bound model's weights, and allocate its memory.

        `products` says how NVFP4 activations meet NVFP4 weights: by tiles, or as few rows of at
        most 64 lanes. It is decided here, so a row's bits do not depend on its company.
        """
        require_products(products, lanes)
        if kernels.target != SM90A.name:
            raise NotBuilt(
                "target of a decoder", kernels.target, SM90A.name,
                "Leave --graph out: what a layer launches has this form.",
            )  # fmt: skip
        size = DecoderSize(lanes, positions, products)
        made: Decoder = family_of(bound.config).graph_decoder(kernels, bound, recipe, size)
        return made

    @classmethod
    def of_v4(
        cls, kernels: Kernels, bound: BoundModel, recipe: Recipe, size: DecoderSize
    ) -> Decoder:
        """Lay out a V4 model."""
        config: Any = bound.config
        switches = bound.numerics.switches
        room = MemorySize(*size[:2], config.sliding_window, entry_of(switches))
        laying = V4Layout(bound, config, recipe, kernels.device, size.products)
        layers = [laying.layer(block) for block in config.layers]
        memories = [
            memory_of(
                room, layer.block, indexes=layer.attn.indexer is not None, device=kernels.device
            )
            for layer in layers
        ]
        steps = V4Steps(kernels, config, switches, room, size.products)
        return cls(steps, laying.ends(), layers, memories)

    @classmethod
    def of_v32(
        cls, kernels: Kernels, bound: BoundModel, recipe: Recipe, size: DecoderSize
    ) -> Decoder:
        """Lay out a V3.2 model."""
        config: Any = bound.config
        switches = bound.numerics.switches
        # Every token has an entry: the window of a token is its own slot.
        room = MemorySize(*size[:2], 1, entry_of(switches, _ENTRIES_V32))
        laying = V32Layout(bound, config, recipe, kernels.device, size.products)
        layers = [laying.layer(block) for block in config.layers]
        memories = [latent_memory_of(room, kernels.device) for _ in layers]
        steps = V32Steps(kernels, config, switches, room, size.lanes, size.products)
        prompts = V32Steps(kernels, config, switches, room, PIECE)  # many rows: always tiles
        ends = laying.ends()
        return cls(steps, ends, layers, memories, cls(prompts, ends, layers, memories))

    def step(self, *, speaks: bool = True) -> tuple[Tensor, Tensor]:
        """Return the head's raw input and logits [B, V] for the current tokens of the rows.

        The first is streams [B, S, D] in V4, normed states [B, D] in V3.2. Logits are empty unless
        `speaks`.
        """
        s, table = self.stepping, self.ends.embed
        problem = EmbedProblem(len(s.lanes.repeated), *table.shape)
        (rows,) = s.kernels.run("simt_embed", problem, ids=s.lanes.repeated, table=table)
        hidden = s.run_layers(self.ends, self.layers, self.memories, rows)
        return hidden, self.logits(hidden) if speaks else hidden.new_empty(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V] for rows of the first result of `step`."""
        s = self.stepping
        return s.widely(self.ends.head, s.head_input(self.ends, hidden))

    def greedy(self, logits: Tensor) -> Tensor:
        """Return the likeliest token of each row, int32 [B]; ties go to the lowest index."""
        rows, vocabulary = logits.shape
        problem = TopkProblem(rows, vocabulary, 1)
        return self.stepping.kernels.run("simt_indexer_topk", problem, scores=logits)[0][:, 0]

    # ---- the graph -------------------------------------------------------------------------------

    def capture(self, *, speaks: bool = True) -> None:
        """Capture a step as CUDA graph; all rows rest, so that the warm-up writes nothing."""
        rows = self.stepping.rows
        self.feed([None] * rows, [0] * rows)
        # Warm up on another stream first: compilation and allocation cannot be captured.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.step(speaks=speaks)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._made = self.step(speaks=speaks)
        # Discard the launch records of warm-up and capture.
        self.stepping.kernels.take_launches()
        if self.prompts is not None:
            self.prompts.capture(speaks=False)  # only a prompt's last token needs the head

    @contextmanager
    def recaptured(self) -> Iterator[None]:
        """Capture the step anew, without the head, and take the first graph again on leaving."""
        first = self._graph, self._made
        try:
            self.capture(speaks=False)
            yield
        finally:
            self._graph, self._made = first

    def run(self) -> tuple[Tensor, Tensor]:
        """Run a step: replay the graph, which overwrites the previous results, or run eagerly."""
        if self._graph is None:
            return self.step()
        self._graph.replay()
        assert self._made is not None, "what was captured made something"
        return self._made

    @torch.inference_mode()
    def feed(
        self,
        tokens: Many[int | None],
        positions: Many[int],
        owners: Many[int] | None = None,
    ) -> None:
        """Set tokens, positions and lanes of the rows, by default row = lane; None rests a row."""
        room, rows = self.stepping.room, self.stepping.rows
        if max(positions, default=0) >= room.positions:
            raise InvalidArgument(
                "position", max(positions), f"below {room.positions}, for which there is room",
                "Make a decoder with more positions.",
            )  # fmt: skip
        if len(tokens) != rows or max(owners or [0]) >= room.lanes:
            raise InvalidArgument(
                "rows of a step", len(tokens), f"{rows}, of lanes below {room.lanes}",
                "Fill it up with None.",
            )  # fmt: skip
        if owners is None:
            owners = range(rows) if rows == room.lanes else [0] * rows
        self.stepping.lanes.copy_step(tokens, positions, owners)


def entry_of(switches: Switches, known: Mapping[str, str] = _ENTRIES) -> str:
    """Return the cache's entry format; raise NotBuilt if no kernel writes it."""
    kind = str(switches.kv_cache)
    if kind not in known or switches.cache_scale_floored:
        text = f"{kind}{', scales floored' if switches.cache_scale_floored else ''}"
        raise NotBuilt("cache of a decoder", text, " or ".join(known), "Choose another cache.")
    return known[kind]


@dataclass
class IncomingTokens:
    """One sequence's new tokens: lane, first position, and results so far."""

    lane: int
    start: int
    ids: list[int]
    results: list[Tensor] = field(default_factory=list)


class DecoderLogitsModel(LogitsModel):
    """A speaker whose sequences are in a decoder's lanes; their own blocks stay empty."""

    def __init__(self, bound: BoundModel, decoder: Decoder) -> None:
        super().__init__(bound)
        self.decoder = decoder
        self._lanes: dict[int, int] = {}  # of sequences, the one that spoke last at the end
        self._free = list(range(decoder.stepping.room.lanes))[::-1]

    @property
    def context(self) -> int:
        """Return how many positions the memory has room for."""
        return min(super().context, self.decoder.stepping.room.positions)

    @torch.inference_mode()
    def hidden(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return the head's raw input for every new token, and advance the sequences."""
        speaking = {id(each) for each in sequences}
        coming = [
            IncomingTokens(self._lane(each, speaking), each.length, new.tolist())
            for each, new in zip(sequences, tokens, strict=True)
        ]
        if self.decoder.prompts is None:
            self._token_by_token(coming)
        else:
            # Chosen by the sequence's own length, so that batching does not change its kernels.
            self._by_pieces([each for each in coming if len(each.ids) > 1])
            self._token_by_token([each for each in coming if len(each.ids) == 1])
        for sequence, incoming_tokens in zip(sequences, coming, strict=True):
            sequence.length += len(incoming_tokens.ids)
        return torch.stack([row for each in coming for row in each.results])

    def _token_by_token(self, coming: list[IncomingTokens]) -> None:
        """Feed one token a step for every sequence, in the row of its lane."""
        every = len(self._lanes) + len(self._free)
        for number in range(max((len(each.ids) for each in coming), default=0)):
            ids: list[int | None] = [None] * every
            positions = [0] * every
            now = [each for each in coming if number < len(each.ids)]
            for incoming_tokens in now:
                ids[incoming_tokens.lane], positions[incoming_tokens.lane] = (
                    incoming_tokens.ids[number],
                    incoming_tokens.start + number,
                )
            self.decoder.feed(ids, positions)
            # The next replay overwrites the graph's outputs.
            made = self.decoder.run()[0].clone()
            for incoming_tokens in now:
                incoming_tokens.results.append(made[incoming_tokens.lane])

    def _by_pieces(self, coming: list[IncomingTokens]) -> None:
        """Fill a step's rows with consecutive tokens of any sequences."""
        prompts = self.decoder.prompts
        assert prompts is not None, "asked where there is one"
        told = [
            (each, token, each.start + number)
            for each in coming
            for number, token in enumerate(each.ids)
        ]
        size = prompts.stepping.rows
        for begin in range(0, len(told), size):
            now = told[begin : begin + size]
            rest = size - len(now)
            prompts.feed(
                [token for _, token, _ in now] + [None] * rest,
                [position for *_, position in now] + [0] * rest,
                [each.lane for each, *_ in now] + [0] * rest,
            )
            # As above: the next replay overwrites the outputs.
            made = prompts.run()[0].clone()
            for (incoming_tokens, *_), row in zip(now, made, strict=False):
                incoming_tokens.results.append(row)

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """Return the head's input for rows of `hidden`."""
        return self.decoder.stepping.head_input(self.decoder.ends, hidden.contiguous())

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits for rows of `hidden`."""
        return self.decoder.logits(hidden.contiguous())

    def _lane(self, sequence: Sequence, speaking: set[int]) -> int:
        """Return a sequence's lane; a new one may take the lane that was idle longest."""
        known = self._lanes.pop(id(sequence), None)
        if known is None:
            silent = [name for name in self._lanes if name not in speaking]
            if sequence.length or not (self._free or silent):
                raise InvalidArgument(
                    "sequence", f"{sequence.length} tokens, {len(self._free)} lanes free",
                    "a new sequence, and a lane for it",
                    "Begin it here, and let fewer speak at once.",
                )  # fmt: skip
            known = self._free.pop() if self._free else self._lanes.pop(silent[0])
            weakref.finalize(sequence, self._release, id(sequence))
        self._lanes[id(sequence)] = known
        return known

    def _release(self, name: int) -> None:
        lane = self._lanes.pop(name, None)
        if lane is not None:
            self._free.append(lane)


def speak_by_layers(model: OpenModel, kernels: Kernels, lanes: int = MOST_CONCURRENT) -> Paired:
    """Make a model decode by whole layers of kernels; return it as a backend's record.

    Resting lanes also read experts' weights, so there are no more lanes than sequences, and these
    are few rows.
    """
    if model.streamed is not None:
        raise NotBuilt(
            "--graph", "a checkpoint that is streamed", "weights that fit into memory",
            "Leave --graph out: components run one by one.",
        )  # fmt: skip
    bound = model.logits_model.bound
    reach = min(model.logits_model.context, POSITIONS)
    lanes = min(lanes, MOST_CONCURRENT)
    decoder = Decoder.from_model(kernels, bound, model.recipe, lanes, reach, products=FEW_ROWS)
    if kernels.device.type == "cuda":
        decoder.capture(speaks=False)  # a speaker asks for the logits of the rows that speak
    model.logits_model = DecoderLogitsModel(bound, decoder)
    return Paired(NAME, tuple(bound.calls))
