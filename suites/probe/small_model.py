"""A small transformer that an engine can serve: batches, chunks, a prefix cache, and rounding.

It computes as servers do: in BF16 or FP8 with sums whose order depends on how many rows a step has,
optionally with experts, so that a healthy one is not bit-equal over batches. Its faults are
subclasses (faults.py).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[np.float32]

_HEADS, _LAYERS, _EXPERTS = 4, 3, 6
_BLOCK = 16  # tokens of a block of the prefix cache


@dataclass(frozen=True)
class SmallConfig:
    """What a small model is. `arithmetic`: exact, bf16, fp8; `noise`: sums in any order."""

    seed: int = 0
    vocabulary: int = 64
    width: int = 64
    arithmetic: str = "bf16"
    noise: bool = False
    experts: bool = False
    chunk: int = 96  # tokens of a prompt that are computed together
    caches: bool = True
    context: int = 4096
    end: int = 1  # token that ends a text
    sharpness: float = 2.5


@dataclass
class State:
    """Keys, values and last states of one sequence, and its tokens."""

    ids: list[int] = field(default_factory=list)
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)
    shift: int = 0  # of positions, which only faults move

    def copy(self, tokens: int) -> State:
        """Copy the first tokens."""
        return State(
            self.ids[:tokens],
            [key[:tokens] for key in self.keys],
            [value[:tokens] for value in self.values],
            self.rows[:tokens],
        )


class SmallModel:
    """What harness/serve/engine.py needs of a LogitsModel."""

    def __init__(self, config: SmallConfig) -> None:
        self.small = config
        self.config: Any = None  # of the checkpoint whose words are used
        self.context = config.context
        draw = np.random.default_rng(config.seed)
        width, wide = config.width, 2 * config.width

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
            drawn = draw.normal(size=(rows, columns)) * gain / math.sqrt(rows)
            return _bf16(drawn.astype(np.float32))

        self.embedding = matrix(config.vocabulary, width, math.sqrt(config.vocabulary))
        self.layers: list[dict[str, Any]] = []
        for _ in range(_LAYERS):
            experts = _EXPERTS if config.experts else 1
            layer: dict[str, Any] = {n: matrix(width, width, g) for n, g in _GAINS.items()}
            layer["gate"] = matrix(width, experts)
            layer["up"] = [matrix(width, wide) for _ in range(experts)]
            layer["down"] = [matrix(wide, width) for _ in range(experts)]
            self.layers.append(layer)
        self.head = matrix(width, config.vocabulary, config.sharpness)
        self.head[:, config.end] *= 1.2  # texts end now and then
        self.stored: dict[Any, State] = {}
        self.uncached: set[int] = set()  # sequences whose prompts are scored
        self.draw = random.Random(config.seed)
        self.steps = 0

    # What the engine calls

    def hidden(self, sequences: list[Any], tokens: list[Tensor]) -> Tensor:
        """Return the last states of all new tokens; sequences advance."""
        self.steps += 1
        states = [self._state(sequence) for sequence in sequences]
        news = [new.tolist() for new in tokens]
        done: list[list[Array]] = [[] for _ in states]
        for place, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
            if sequence.length == 0:
                news[place], done[place] = self.begin(sequence, state, news[place])
        while any(news):
            members = [place for place, new in enumerate(news) if new]
            pieces = [news[place][: self.small.chunk] for place in members]
            rows = self.forward([states[place] for place in members], pieces)
            for place, piece, row in zip(members, pieces, rows, strict=True):
                done[place].append(row)
                states[place].rows.extend(row)
                news[place] = news[place][len(piece) :]
        for sequence, state, new in zip(sequences, states, tokens, strict=True):
            if sequence.length == 0 and len(new) > 1:
                self.store(state)
            sequence.length += len(new)
        return torch.from_numpy(np.concatenate([row for rows in done for row in rows]))

    def next_logits(self, sequences: list[Any], tokens: list[Tensor]) -> Tensor:
        """Return logits after each sequence's last new token."""
        hidden = self.hidden(sequences, tokens)
        return self.logits(hidden[torch.tensor([len(new) for new in tokens]).cumsum(0) - 1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of rows."""
        rows = hidden.numpy().astype(np.float32)
        return torch.from_numpy(self.product(_normed(rows), self.head))

    # The cache of prefixes

    def begin(self, sequence: Any, state: State, new: list[int]) -> tuple[list[int], list[Array]]:
        """Take what is stored of a prompt; return what is left of it, and the stored rows."""
        if not self.small.caches or id(sequence) in self.uncached or len(new) < 2:
            return new, []
        for blocks in range((len(new) - 1) // _BLOCK, 0, -1):
            known = self.stored.get(self.key(new[: blocks * _BLOCK]))
            if known is not None:
                self.resume(state, known.copy(blocks * _BLOCK), new)
                return new[blocks * _BLOCK :], [np.stack(known.rows[: blocks * _BLOCK])]
        return new, []

    def resume(self, state: State, known: State, new: list[int]) -> None:
        """Make a sequence begin with what is stored."""
        del new
        state.ids, state.keys, state.values, state.rows = (
            known.ids, known.keys, known.values, known.rows,
        )  # fmt: skip

    def key(self, ids: list[int]) -> Any:
        """Return what a prefix is stored under."""
        return tuple(ids)

    def store(self, state: State) -> None:
        """Store each block of a prompt."""
        if self.small.caches:
            for blocks in range(1, len(state.ids) // _BLOCK + 1):
                self.stored[self.key(state.ids[: blocks * _BLOCK])] = state

    def _state(self, sequence: Any) -> State:
        if "small" not in vars(sequence):
            vars(sequence)["small"] = self.fresh()
        found: State = vars(sequence)["small"]
        return found

    def fresh(self) -> State:
        """Return the state of a new sequence."""
        return State()

    # One step

    def forward(self, states: list[State], pieces: list[list[int]]) -> list[Array]:
        """Compute pieces of several sequences together; return their rows."""
        x = self.embedding[[token for piece in pieces for token in piece]].copy()
        ends = np.cumsum([len(piece) for piece in pieces])
        spans = [slice(end - len(piece), end) for end, piece in zip(ends, pieces, strict=True)]
        for number, layer in enumerate(self.layers):
            h = _normed(x)
            q, k, v = (self.product(h, layer[name]) for name in ("q", "k", "v"))
            mixed = np.empty_like(x)
            for state, span, piece in zip(states, spans, pieces, strict=True):
                places = self.places(state, piece)
                mixed[span] = self.attend(
                    state, number, (_rotated(q[span], places), _rotated(k[span], places), v[span])
                )
            x = self.rounded(x + self.product(mixed, layer["o"]))
            x = self.rounded(x + self.mix(layer, _normed(x)))
        for state, piece in zip(states, pieces, strict=True):
            state.ids += piece
        return [x[span] for span in spans]

    def places(self, state: State, piece: list[int]) -> NDArray[np.int64]:
        """Return the positions of new tokens."""
        return np.arange(len(state.ids), len(state.ids) + len(piece)) + state.shift

    def attend(self, state: State, number: int, qkv: tuple[Array, Array, Array]) -> Array:
        """Attend to all earlier tokens of a sequence."""
        q, k, v = qkv
        if len(state.keys) <= number:
            state.keys.append(k)
            state.values.append(v)
        else:
            state.keys[number] = np.concatenate([state.keys[number], k])
            state.values[number] = np.concatenate([state.values[number], v])
        keys, values = self.visible(state, number, len(q))
        total, new, size = len(keys), len(q), q.shape[1] // _HEADS
        scores = np.einsum(
            "qhd,khd->hqk", q.reshape(new, _HEADS, size), keys.reshape(total, _HEADS, size)
        ) / math.sqrt(size)
        scores -= _NEARNESS[:, None, None] * (
            np.arange(total - new, total)[:, None] - np.arange(total)[None, :]
        )
        late = np.arange(total)[None, :] > np.arange(total - new, total)[:, None]
        scores = np.where(late, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, values.reshape(total, _HEADS, size))
        return self.rounded(mixed.reshape(new, -1).astype(np.float32))

    def visible(self, state: State, number: int, new: int) -> tuple[Array, Array]:
        """Return the keys and values that are attended to."""
        del new
        return state.keys[number], state.values[number]

    def mix(self, layer: dict[str, Any], h: Array) -> Array:
        """Compute the experts, or the one there is."""
        scores = self.product(h, layer["gate"])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :2]
        chosen = np.take_along_axis(scores, best, 1)
        shares = np.exp(chosen - chosen.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        out = np.zeros_like(h)
        for number in range(len(layer["up"])):
            rows, column = np.nonzero(best == number)
            if len(rows):
                inner = self.product(h[rows], layer["up"][number])
                inner = self.rounded(inner / (1 + np.exp(-np.clip(inner, -60, 60))))
                made = self.product(inner, layer["down"][number])
                out[rows] += shares[rows, column, None] * made
        return out

    # Arithmetic

    def product(self, x: Array, weight: Array) -> Array:
        """Multiply; the order of sums follows from the number of rows, as in split-K kernels."""
        if self.small.arithmetic == "exact":
            return (x.astype(np.float64) @ weight.astype(np.float64)).astype(np.float32)
        x = _e4m3(x) if self.small.arithmetic == "fp8" else _bf16(x)
        rows = len(x)
        splits = (
            self.draw.choice((1, 2, 4)) if self.small.noise else 1 + (rows > 2) + 2 * (rows > 8)
        )
        columns = np.array_split(np.arange(x.shape[1]), splits)
        total = x[:, columns[0]] @ weight[columns[0]]
        for part in columns[1:]:
            total = _bf16(_bf16(total) + _bf16(x[:, part] @ weight[part]))
        return _bf16(total)

    def rounded(self, x: Array) -> Array:
        """Round as the arithmetic stores."""
        return x if self.small.arithmetic == "exact" else _bf16(x)


_NEARNESS = np.array([1.0, 0.2, 0.05, 0.0], np.float32)  # a head, how it prefers what is near
_GAINS = {"q": 1.6, "k": 1.6, "v": 1.0, "o": 1.0}


def _normed(x: Array) -> Array:
    made: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return made


def _rotated(x: Array, places: NDArray[np.int64]) -> Array:
    """Rotate pairs of columns by the position."""
    size = x.shape[1] // _HEADS
    angles = places[:, None] / 1000.0 ** (np.arange(size // 2) * 2 / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    heads = x.reshape(len(x), _HEADS, size)
    one, two = heads[..., : size // 2], heads[..., size // 2 :]
    made = np.concatenate([one * cos - two * sin, one * sin + two * cos], -1)
    return made.reshape(x.shape).astype(np.float32)


def _bf16(x: Array) -> Array:
    """Round to BF16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _e4m3(x: Array) -> Array:
    """Quantise rows to E4M3 with a scale of each, and decode."""
    scale = np.maximum(np.abs(x).max(1, keepdims=True), 1e-12) / 448.0
    codes = torch.from_numpy(x / scale).to(torch.float8_e4m3fn).float().numpy()
    made: Array = codes * scale
    return made
