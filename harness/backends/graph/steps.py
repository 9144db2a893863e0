"""Memory of a decoder, and the parts of a step that V4 and V3.2 share.

Memory: pages, rings and slot tables for a fixed number of lanes. Parts:
lanes, norms, router, experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.backends.graph.matrices import (
    BF16,
    FEW_ROWS,
    TILES,
    VERY_FEW_ROWS,
    W4A16,
    ExpertRows,
    Experts,
    by_gemv,
    dense_product,
    experts_by_row,
    few_rows_expert,
    few_rows_kernel,
    few_rows_product,
    multiply,
    require_products,
    rows_of_experts,
    widely,
)
from degarble.harness.backends.graph.weights import table_of_turns
from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.attention.problem import few_token_splits
from degarble.kernels.cache.problem import SlotsProblem, overlaps, rows_of_ring
from degarble.kernels.gemm.gemv_problem import inner_held
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.moe.problem import AFTER_W2, MoeProblem
from degarble.kernels.primitives.kv_problem import WIDTH, WITH_KEY, Pages
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.problem import NormProblem, ScaleProblem
from degarble.kernels.rows.router_problem import RouterProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.backends.graph.matrices import Matrix
    from degarble.harness.backends.graph.weights import Gated, NormWeight, RoutedWeights
    from degarble.harness.model.types import Block, Rope
    from degarble.kernels.attention.problem import KeyList
    from degarble.references.numerics import Switches


# --------------------------------------------------------------------------------------------------
# KV caches of a decoder for a fixed number of lanes: pages, rings and slot tables.
#
# A lane is a row of every step: one sequence, or none. The window is a ring of slots. A lane's
# entries are in pages of its own, whose order in memory is the reverse of their numbers. Nothing
# has to be cleared for a new sequence: what a token does not see is never read.
#
# Shape letters: B lanes, C columns of a table, R rows of a ring, F columns of a compressor.

PAGE = 64  # entries


@dataclass(frozen=True)
class MemorySize:
    """The number of lanes, positions of each, and the cache's entry format."""

    lanes: int
    positions: int
    window: int
    entry: str = "bf16"  # of the paged caches

    def __post_init__(self) -> None:
        for name in ("lanes", "positions", "window"):
            if getattr(self, name) < 1:
                raise InvalidArgument(
                    f"{name} of a decoder", getattr(self, name), "1 at least", "Ask for more."
                )

    def pages_of_lane(self, ratio: int) -> int:
        """Return the number of pages of a lane's window (ratio 0) or entries."""
        rows = self.window if ratio == 0 else ceil_div(self.positions, ratio)
        found: int = ceil_div(rows, PAGE)
        return found

    def columns(self, ratio: int) -> int:
        """Return the number of slots of a lane."""
        return self.pages_of_lane(ratio) * PAGE

    def pages(self, ratio: int, width: int = WIDTH, entry: str | None = None) -> Pages:
        """Describe the cache of all lanes; by default latent rows in the room's own format."""
        return Pages(entry or self.entry, PAGE, self.lanes * self.pages_of_lane(ratio), width=width)


class DecoderSize(NamedTuple):
    """What a decoder is built for: lanes, positions of each, and how it multiplies NVFP4."""

    lanes: int
    positions: int
    products: str = TILES


@dataclass(frozen=True)
class Tables:
    """Pages of every lane int32 [B, pages], and their slots int32 [B, C]."""

    pages: Tensor
    slots: Tensor


def tables_of(room: MemorySize, ratio: int, device: Any) -> Tables:
    """Assign pages to lanes, the last ones in memory first."""
    count = room.lanes * room.pages_of_lane(ratio)
    pages = torch.arange(count - 1, -1, -1, dtype=torch.int32).reshape(room.lanes, -1)
    within = torch.arange(PAGE, dtype=torch.int32)
    slots = (pages[:, :, None] * PAGE + within).reshape(room.lanes, -1)
    return Tables(pages.contiguous().to(device), slots.contiguous().to(device))


@dataclass(frozen=True)
class LayerMemory:
    """One V4 layer's memory: window pages; entries, index keys and rings if it compresses."""

    window: Tensor
    entries: Tensor | None = None
    ring: Tensor | None = None  # float32 [B, R, 2 F]
    keys: Tensor | None = None
    key_ring: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that exist."""
        every = (self.window, self.entries, self.ring, self.keys, self.key_ring)
        return tuple(tensor for tensor in every if tensor is not None)


@dataclass(frozen=True)
class LatentMemory:
    """One V3.2 layer's memory: pages of latent and key rows, and of the indexer's keys."""

    rows: Tensor
    keys: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return both tensors."""
        return self.rows, self.keys


def latent_memory_of(room: MemorySize, device: Any) -> LatentMemory:
    """Allocate one layer's memory, an entry a token, zeroed."""
    rows, keys = room.pages(1, WITH_KEY), room.pages(1, KEY_WIDTH, "bf16")
    return LatentMemory(empty_pages(rows, device), empty_pages(keys, device))


def empty_pages(of: Pages, device: Any) -> Tensor:
    """Allocate zeroed pages."""
    return torch.zeros(of.count, of.stride, dtype=torch.uint8, device=device)


def memory_of(room: MemorySize, block: Block, *, indexes: bool, device: Any) -> LayerMemory:
    """Allocate one layer's memory, zeroed."""

    def pages(ratio: int, width: int = WIDTH, entry: str | None = None) -> Tensor:
        return empty_pages(room.pages(ratio, width, entry), device)

    def ring(width: int) -> Tensor:
        # Latents and gates, each twice if windows overlap.
        columns = 2 * width * (2 if overlaps(block.ratio) else 1)
        shape = (room.lanes, rows_of_ring(block.ratio), columns)
        return torch.zeros(shape, dtype=torch.float32, device=device)

    if not block.ratio:
        return LayerMemory(pages(0))
    tensors = pages(0), pages(block.ratio), ring(WIDTH)
    if not indexes:
        return LayerMemory(*tensors)
    return LayerMemory(*tensors, pages(block.ratio, KEY_WIDTH, "bf16"), ring(KEY_WIDTH))


# --------------------------------------------------------------------------------------------------
# The parts of a decoding step that V4 and V3.2 share: lanes, tables, norms, router, experts.
#
# Each row of a step has a token, a position and an owner (its lane) on the device. A row is a token
# of a step; a lane is a sequence's memory; in decoding their numbers are equal. Trap: no Python
# decision may depend on values of tensors, because a CUDA graph would keep that decision.
#
# Shape letters: B rows, S streams, D hidden, N indexer heads, T rows of `through`.

_KINDS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Lanes:
    """A step's inputs on the device: a token for each row; a resting row's owner is -1."""

    tokens: Tensor  # int64 [B]
    repeated: Tensor  # int64 [B S], each token once a stream
    positions: Tensor  # int64 [B]
    owners: Tensor  # int32 [B], the lane in whose memory a row is
    members: Tensor  # int32 [B], the same, and some lane for rows that rest
    places: Tensor  # int64 [B], 0, 1, ...
    offsets: Tensor  # int32 [B + 1], 0, 1, ...
    first: Tensor  # int32 [B, 1] of zeros: the shared expert of every token
    whole: Tensor  # float32 [B, 1] of ones: its weight

    @classmethod
    def at_rest(cls, rows: int, streams: int, device: Any) -> Lanes:
        """Return lanes with all rows resting."""
        count = torch.arange(rows + 1, dtype=torch.int32)
        tensors = (
            torch.zeros(rows, dtype=torch.int64), torch.zeros(rows * streams, dtype=torch.int64),
            torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -1, dtype=torch.int32),
            count[:-1].clone(), count[:-1].long(), count, torch.zeros(rows, 1, dtype=torch.int32),
            torch.ones(rows, 1),
        )  # fmt: skip
        return cls(*(tensor.to(device) for tensor in tensors))

    def copy_step(self, tokens: Many[int | None], positions: Many[int], owners: Many[int]) -> None:
        """Copy a step's tokens, positions and owners to the device; None lets a row rest."""
        streams = len(self.repeated) // len(tokens)
        ids = torch.tensor([0 if token is None else token for token in tokens])
        rests = torch.tensor([token is None for token in tokens])
        lanes = torch.tensor(owners, dtype=torch.int32)
        self.tokens.copy_(ids)
        self.repeated.copy_(ids.repeat_interleave(streams))
        self.positions.copy_(torch.tensor(positions).masked_fill(rests, 0))
        self.owners.copy_(lanes.masked_fill(rests, -1))
        self.members.copy_(lanes)


class Normed(NamedTuple):
    """Normed rows, and what they are once they are quantised and decoded, scale by scale."""

    values: Tensor
    decoded: tuple[Tensor, ...] = ()

    def decoded_at(self, place: int) -> Tensor | None:
        """Return the rows decoded with one of the scales, if that was done."""
        return self.decoded[place] if self.decoded else None


STEP = "step"  # shown in front of a step's first layer
# What attention launches beside its query: the cache's rows, the indexer's keys, and its choice.
CACHE, KEYS, CHOICE = BRANCHES = ("cache", "keys", "choice")
# Of their thread blocks, where several could be next: the chain that attention waits for longest
# goes first. Torch's lowest is 0.
PRIORITIES = {CACHE: 0, KEYS: -1, CHOICE: -2}


def _unwatched(component: str, **tensors: Tensor) -> None:
    """Ignore a step's tensors."""


class DecoderSteps(ABC):
    """Layers of one model over one memory; `rows` are tokens of a step."""

    def __init__(
        self,
        kernels: Kernels,
        config: Any,
        switches: Switches,
        room: MemorySize,
        rows: int,
        products: str = TILES,
    ) -> None:
        require_products(products, rows)
        self.kernels, self.room, self.rows = kernels, room, rows
        self.products = products  # how NVFP4 is multiplied by NVFP4: matrices.PRODUCTS
        self.few = few_rows_kernel(rows) if products == FEW_ROWS else ""
        self.by_row = products == FEW_ROWS and rows <= VERY_FEW_ROWS
        self.switches = switches
        self.lanes = Lanes.at_rest(rows, getattr(config, "hc_mult", 1), kernels.device)
        self._of = config
        # Receives what a step computes, by component; a capture puts its hooks here.
        self.show: Callable[..., None] = _unwatched
        self.prefix = ""  # of the layer that runs
        self._tables: dict[int, Tables] = {}
        self._turns: dict[Rope, Tensor] = {}
        # Launches that do not wait for each other: branches of a graph.
        on_gpu = kernels.device.type == "cuda"
        self.streams = {
            branch: torch.cuda.Stream(kernels.device, priority=priority)
            for branch, priority in PRIORITIES.items()
            if on_gpu
        }
        self._apart: set[str] = set()  # branches that nothing has waited for

    @abstractmethod
    def run_layers(
        self, ends: Any, layers: Many[Any], memories: Many[Any], embedded: Tensor
    ) -> Tensor:
        """Run all layers on embedded rows; return the head's raw input."""

    @abstractmethod
    def head_input(self, ends: Any, hidden: Tensor) -> Tensor:
        """Return the head's input BF16 [T, D] for rows that `run_layers` returned."""

    def shown(self, role: str, **tensors: Tensor) -> None:
        """Show the tensors of a component of the layer that runs."""
        self.show(f"{self.prefix}.{role}", **tensors)

    # ---- branches --------------------------------------------------------------------------------

    @contextmanager
    def aside(self, branch: str) -> Iterator[None]:
        """Launch what is inside beside what follows, until `meet`; it waits for all before it.

        Trap: a tensor that is made outside and read inside has to live until then.
        """
        if not self.streams:
            yield
            return
        stream = self.streams[branch]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._apart.add(branch)
        with torch.cuda.stream(stream):
            yield

    def meet(self, *branches: str) -> None:
        """Let what follows wait for branches, or for all that nothing has waited for."""
        for branch in sorted(self._apart.intersection(branches or BRANCHES)):
            stream = self.streams[branch]
            torch.cuda.current_stream(stream.device).wait_stream(stream)
            self._apart.remove(branch)

    # ---- where things lie ------------------------------------------------------------------------

    def tables(self, ratio: int) -> Tables:
        """Return where a lane's window (0) or entries are."""
        if ratio not in self._tables:
            self._tables[ratio] = tables_of(self.room, ratio, self.kernels.device)
        return self._tables[ratio]

    def rope_table(self, rope: Rope) -> Tensor:
        """Return the RoPE table of every position that there is room for."""
        if rope not in self._turns:
            reach = self.room.positions
            self._turns[rope] = table_of_turns(rope, reach, self.kernels.device)
        return self._turns[rope]

    def slots(
        self, kind: str, width: int, ratio: int, numbers: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return slots of rows in their lanes' memory; for a window also the rows' own slots."""
        lanes, columns = self.room.lanes, self.room.columns(ratio)
        problem = SlotsProblem(self.rows, width, kind, lanes, columns, max(1, ratio))
        tensors = self.kernels.run(
            "simt_slots", problem, positions=self.lanes.positions, owners=self.lanes.owners,
            table=self.tables(ratio).slots, numbers=numbers,
        )  # fmt: skip
        return tensors[0], tensors[1] if len(tensors) > 1 else None

    # ---- parts that every layer has --------------------------------------------------------------

    def scale_decoded(self, matrix: Matrix) -> Tensor | None:
        """Return the scale of the rows that a matrix multiplies decoded; None where it does not."""
        return matrix.input_scale if self.few and matrix.factor is not None else None

    def multiply(
        self, matrix: Matrix, x: Tensor, decoded: Tensor | None = None, *, spared: int = 0
    ) -> Tensor:
        """Multiply rows by a matrix, NVFP4 as the graph was built to; they may be decoded.

        The GEMV leaves `spared` multiprocessors to other branches.
        """
        if decoded is not None:
            return few_rows_product(self.kernels, matrix, decoded, self.few)
        if matrix.kernel.kernel == BF16 and self.takes_gemv(x.shape[1]):
            return by_gemv(self.kernels, matrix.operands["b"], x, "bf16", spared)
        return multiply(self.kernels, matrix, x, self.few)

    def takes_gemv(self, inner: int) -> bool:
        """Tell whether BF16 rows of so many values are multiplied by the GEMV."""
        return self.by_row and inner <= inner_held(1)

    def dense(self, weight: Tensor, x: Tensor) -> Tensor:
        """Multiply BF16 rows by a BF16 weight."""
        if self.takes_gemv(weight.shape[1]):
            return by_gemv(self.kernels, weight, x, "bf16")
        return dense_product(self.kernels, weight, x)

    def widely(self, weight: Tensor, x: Tensor) -> Tensor:
        """Multiply BF16 rows by a BF16 weight into float32."""
        return widely(self.kernels, weight, x, few=self.rows <= VERY_FEW_ROWS)

    def splits(self, heads: int, *lists: KeyList) -> int:
        """Return into how many parts a decoding step's keys are divided; 0: as the kernel does."""
        return few_token_splits(lists, heads, most=self.by_row) if self.few == W4A16 else 0

    def normed(self, norm: NormWeight, x: Tensor, epsilon: float | None = None) -> Tensor:
        """Apply RMSNorm, with the config's epsilon unless another is given."""
        rows, columns = x.shape
        under_root = self._of.rms_norm_eps if epsilon is None else epsilon
        problem = NormProblem(rows, columns, under_root, norm.kind)
        return self.kernels.run("simt_rmsnorm", problem, values=x, weight=norm.weight)[0]

    def normed_for(
        self, matrix: Matrix | None, norm: NormWeight, x: Tensor, epsilon: float | None = None
    ) -> Normed:
        """Apply RMSNorm; in a graph of very few rows decode as well what a matrix multiplies so."""
        scale = self.scale_decoded(matrix) if matrix is not None and self.by_row else None
        if scale is None:
            return Normed(self.normed(norm, x, epsilon))
        rows, columns = x.shape
        under_root = self._of.rms_norm_eps if epsilon is None else epsilon
        problem = NormProblem(rows, columns, under_root, norm.kind, decoded=True)
        values, decoded = self.kernels.run(
            "simt_rmsnorm", problem, values=x, weight=norm.weight, decode_scale=scale
        )
        return Normed(values, (decoded,))

    def scaled(self, x: Tensor, factor: float, out: torch.dtype) -> Tensor:
        """Multiply by a factor, in a dtype."""
        if x.dtype is out and factor == 1:
            return x
        problem = ScaleProblem(x.numel(), factor, _KINDS[x.dtype], _KINDS[out])
        return self.kernels.run("simt_scale", problem, values=x)[0]

    def routed(
        self,
        w: RoutedWeights,
        x: Tensor,
        shared: Tensor | None,
        limit: float | None,
        groups: tuple[int, int] = (1, 1),
        *,
        summed_later: bool = False,
    ) -> Tensor | ExpertRows:
        """Compute routed experts of every row, with the shared expert's output in the sum.

        Without that output the shared expert is computed with them: see `rides`.
        """
        c, rows = self._of, len(x)
        table = w.source.dtype is torch.int64
        router = RouterProblem(
            rows, c.n_routed_experts, c.num_experts_per_tok, c.scoring_func,
            scale=c.routed_scaling_factor, epsilon=self.switches.routing_epsilon,
            vocabulary=len(w.source) if table else 0, groups=groups[0], groups_kept=groups[1],
        )  # fmt: skip
        given = {"table": w.source, "ids": self.lanes.tokens} if table else {"bias": w.source}
        logits = self.widely(w.gate, x)
        self.shown("ffn.gate", x=x, out=logits)
        tokens = {"tokens": self.lanes.tokens} if table else {}
        counts = (c.n_routed_experts, c.num_experts_per_tok, c.n_routed_experts)
        sizes = (rows, c.hidden_size, c.moe_intermediate_size)
        problem = MoeProblem(*sizes, *counts, limit, AFTER_W2)
        experts, weights = self.kernels.run("simt_router", router, logits=logits, **given)
        self.shown("ffn.topk", logits=logits, experts=experts, weights=weights, **tokens)
        of_tokens = {"x": x, "experts": experts, "weights": weights, "shared": shared}
        if summed_later:
            return rows_of_experts(self.kernels, w.experts, problem, of_tokens)
        if self.by_row:
            return experts_by_row(self.kernels, w.experts, problem, of_tokens)
        return self.kernels.run("sm90_moe_nvfp4", problem, **of_tokens, **w.experts.routed)[0]

    def rides(self, w: RoutedWeights, *, alike: bool = True) -> bool:
        """Return whether the shared expert is computed with the routed ones, if clamped `alike`."""
        return self.by_row and w.experts.with_shared and alike

    def gated(self, w: Gated, x: Tensor, width: int, limit: float | None) -> Tensor:
        """Compute a shared expert or dense layer: one NVFP4 kernel, or product, SwiGLU, product."""
        rows, hidden = x.shape
        if isinstance(w, Experts) and self.few:
            return few_rows_expert(self.kernels, w.alone, x, limit, self.few)
        if isinstance(w, Experts):
            problem = MoeProblem(rows, hidden, width, 1, 1, 1, limit, AFTER_W2)
            fields = {"experts": self.lanes.first, "weights": self.lanes.whole}
            return self.kernels.run("sm90_shared_expert", problem, x=x, **fields, **w.tensors)[0]
        *first, second = w
        tensors = [self.multiply(matrix, x) for matrix in first]
        # Trap: halves that do not stack are joined by torch.
        halves = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        act = QuantiseProblem(rows, width, "linear", "swiglu", keeps_values=True, limit=limit)
        values = self.kernels.run(
            "simt_quantise_nvfp4", act, values=halves, decode_scale=self.lanes.whole[0]
        )[2]
        return self.multiply(second, values)


def widened(parts: list[Tensor]) -> Tensor:
    """Concatenate BF16 tensors as float32. Trap: by torch; none of our kernels concatenates."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).float()
