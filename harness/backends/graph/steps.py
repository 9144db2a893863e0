"""The parts of a decoding step that V4 and V3.2 share: lanes, tables, norms, router, experts.

Each row of a step has a token, a position and an owner (its lane) on the device. A row is a token
of a step; a lane is a sequence's memory; in decoding their numbers are equal. Trap: no Python
decision may depend on values of tensors, because a CUDA graph would keep that decision.

Shape letters: B rows, S streams, D hidden, N indexer heads, T rows of `through`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.graph.matrices import Experts, multiply, widely
from degarble.harness.backends.graph.memory import Room, Tables, tables_of
from degarble.harness.backends.graph.weights import table_of_turns
from degarble.kernels.cache.problem import SlotsProblem
from degarble.kernels.moe.problem import AFTER_W2, MoeProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.problem import NormProblem, ScaleProblem
from degarble.kernels.rows.router_problem import RouterProblem

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.backends.graph.weights import Gated, Norm, Routed
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.types import Rope
    from degarble.references.numerics import Switches

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
    def of(cls, rows: int, streams: int, device: Any) -> Lanes:
        """Return lanes with all rows resting."""
        count = torch.arange(rows + 1, dtype=torch.int32)
        made = (
            torch.zeros(rows, dtype=torch.int64), torch.zeros(rows * streams, dtype=torch.int64),
            torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -1, dtype=torch.int32),
            count[:-1].clone(), count[:-1].long(), count, torch.zeros(rows, 1, dtype=torch.int32),
            torch.ones(rows, 1),
        )  # fmt: skip
        return cls(*(each.to(device) for each in made))

    def tell(self, tokens: Many[int | None], positions: Many[int], owners: Many[int]) -> None:
        """Copy a step's tokens, positions and owners to the device; None lets a row rest."""
        streams = len(self.repeated) // len(tokens)
        ids = torch.tensor([0 if each is None else each for each in tokens])
        rests = torch.tensor([each is None for each in tokens])
        lanes = torch.tensor(owners, dtype=torch.int32)
        self.tokens.copy_(ids)
        self.repeated.copy_(ids.repeat_interleave(streams))
        self.positions.copy_(torch.tensor(positions).masked_fill(rests, 0))
        self.owners.copy_(lanes.masked_fill(rests, -1))
        self.members.copy_(lanes)


class Steps(ABC):
    """Layers of one model over one memory; `rows` are tokens of a step."""

    def __init__(
        self, kernels: Kernels, config: Config, switches: Switches, room: Room, rows: int
    ) -> None:
        self.kernels, self.room, self.rows = kernels, room, rows
        self.switches = switches
        self.lanes = Lanes.of(rows, getattr(config, "hc_mult", 1), kernels.device)
        self._of = config
        self._tables: dict[int, Tables] = {}
        self._turns: dict[Rope, Tensor] = {}

    @abstractmethod
    def through(
        self, ends: Any, layers: Many[Any], memories: Many[Any], embedded: Tensor
    ) -> Tensor:
        """Run all layers on embedded rows; return the head's raw input."""

    @abstractmethod
    def behind(self, ends: Any, hidden: Tensor) -> Tensor:
        """Return the head's input BF16 [T, D] for rows that `through` returned."""

    # ---- where things lie ------------------------------------------------------------------------

    def tables(self, ratio: int) -> Tables:
        """Return where a lane's window (0) or entries are."""
        if ratio not in self._tables:
            self._tables[ratio] = tables_of(self.room, ratio, self.kernels.device)
        return self._tables[ratio]

    def turns(self, rope: Rope) -> Tensor:
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
        made = self.kernels.run(
            "simt_slots", problem, positions=self.lanes.positions, owners=self.lanes.owners,
            table=self.tables(ratio).slots, numbers=numbers,
        )  # fmt: skip
        return made[0], made[1] if len(made) > 1 else None

    # ---- parts that every layer has --------------------------------------------------------------

    def normed(self, norm: Norm, x: Tensor, epsilon: float | None = None) -> Tensor:
        """Apply RMSNorm, with the config's epsilon unless another is given."""
        rows, columns = x.shape
        under_root = self._of.rms_norm_eps if epsilon is None else epsilon
        problem = NormProblem(rows, columns, under_root, norm.kind)
        return self.kernels.run("simt_rmsnorm", problem, values=x, weight=norm.weight)[0]

    def scaled(self, x: Tensor, factor: float, out: torch.dtype) -> Tensor:
        """Multiply by a factor, in a dtype."""
        if x.dtype is out and factor == 1:
            return x
        problem = ScaleProblem(x.numel(), factor, _KINDS[x.dtype], _KINDS[out])
        return self.kernels.run("simt_scale", problem, values=x)[0]

    def routed(
        self,
        w: Routed,
        x: Tensor,
        shared: Tensor,
        limit: float | None,
        groups: tuple[int, int] = (1, 1),
    ) -> Tensor:
        """Compute routed experts of every row, with the shared expert's output in the sum."""
        c, rows = self._of, len(x)
        table = w.source.dtype is torch.int64
        router = RouterProblem(
            rows, c.n_routed_experts, c.num_experts_per_tok, c.scoring_func,
            scale=c.routed_scaling_factor, epsilon=self.switches.routing_epsilon,
            vocabulary=len(w.source) if table else 0, groups=groups[0], groups_kept=groups[1],
        )  # fmt: skip
        ids = self.lanes.tokens if table else None
        experts, weights = self.kernels.run(
            "simt_router", router, logits=widely(self.kernels, w.gate, x), source=w.source, ids=ids
        )
        counts = (c.n_routed_experts, c.num_experts_per_tok, c.n_routed_experts)
        sizes = (rows, c.hidden_size, c.moe_intermediate_size)
        problem = MoeProblem(*sizes, *counts, limit, AFTER_W2)
        return self.kernels.run(
            "sm90_moe_nvfp4", problem, x=x, experts=experts, weights=weights, shared=shared,
            **w.experts.tensors,
        )[0]  # fmt: skip

    def gated(self, w: Gated, x: Tensor, width: int, limit: float | None) -> Tensor:
        """Compute a shared expert or dense layer: one NVFP4 kernel, or product, SwiGLU, product."""
        rows, hidden = x.shape
        if isinstance(w, Experts):
            problem = MoeProblem(rows, hidden, width, 1, 1, 1, limit, AFTER_W2)
            told = {"experts": self.lanes.first, "weights": self.lanes.whole}
            return self.kernels.run("sm90_shared_expert", problem, x=x, **told, **w.tensors)[0]
        *first, second = w
        made = [multiply(self.kernels, each, x) for each in first]
        # Trap: halves that do not stack are joined by torch.
        halves = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        act = QuantiseProblem(rows, width, "linear", "swiglu", keeps_values=True, limit=limit)
        values = self.kernels.run(
            "simt_quantise_nvfp4", act, values=halves, decode_scale=self.lanes.whole[0]
        )[2]
        return multiply(self.kernels, second, values)


def widened(parts: list[Tensor]) -> Tensor:
    """Concatenate BF16 tensors as float32. Trap: by torch; none of our kernels concatenates."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).float()
