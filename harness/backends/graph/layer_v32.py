"""One step of a V3.2 layer by our kernels, without host synchronisation.

A row of a step is a token. It is written into its lane's pages as latent and rotated key (656 bytes
in FP8), and so is the indexer's key; scores, choice and slots follow on the device, and attention
is absorbed. A sublayer's output is added to the residual in the launch that norms their sum.
Consecutive rows may belong to one lane: a prompt is fed in pieces through the same code. Kernels
alone compute: torch allocates, views, and copies the unrotated part of query heads.

Shape letters: B rows (tokens), D hidden, H heads, N indexer heads, K chosen tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.backends.cutedsl.latent import by_head
from degarble.harness.backends.graph.matrices import multiply, widely
from degarble.harness.backends.graph.memory import PAGE
from degarble.harness.backends.graph.steps import Steps
from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.kernels.attention.problem import AttentionProblem, KeyList, QueryProblem
from degarble.kernels.cache.problem import CHOSEN, WINDOW
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.indexer.problem import KeyPages, OperandProblem, ScoresProblem, TopkProblem
from degarble.kernels.primitives.kv_problem import ROTATED, WIDTH, WITH_KEY, WriteProblem
from degarble.kernels.rows.problem import ResidualProblem
from degarble.references.latent_attention import softmax_scale

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    import torch
    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.backends.graph.memory import LatentMemory, Room
    from degarble.harness.backends.graph.weights import Norm
    from degarble.harness.backends.graph.weights_v32 import (
        KeyIndexing,
        LatentEnds,
        LatentLayer,
        LatentWeights,
        MlpWeights,
    )
    from degarble.harness.model.config.config import V32Config
    from degarble.references.numerics import Switches

EVERY = 1  # tokens that become one entry


class LatentStepping(Steps):
    """V3.2's layers: one row a lane in decoding, any rows of any lanes in a prompt."""

    def __init__(
        self, kernels: Kernels, config: V32Config, switches: Switches, room: Room, rows: int
    ) -> None:
        super().__init__(kernels, config, switches, room, rows)
        self.config = config
        self._scale = softmax_scale(config)
        self._latent_epsilon = switches.latent_epsilon(config.rms_norm_eps)

    def through(
        self,
        ends: LatentEnds,
        layers: Many[LatentLayer],
        memories: Many[LatentMemory],
        embedded: Tensor,
    ) -> Tensor:
        """Return the normed states [B, D] after the last layer."""
        own = self.slots(WINDOW, 1, EVERY)[1]
        assert own is not None, "a window tells the rows' own slots"
        x, residual = embedded, None
        for weights, memory in zip(layers, memories, strict=True):
            x, residual = self.layer(weights, memory, own, (x, residual))
        return self.added(ends.norm, x, residual)[0]

    def behind(self, ends: LatentEnds, hidden: Tensor) -> Tensor:
        """Return the head's input, which `through` has normed already."""
        del ends
        return hidden

    def added(self, norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum; before the first layer there is no residual."""
        if residual is None:
            return self.normed(norm, x), x
        rounded = self.switches.residual_rounded_before_norm
        problem = ResidualProblem(
            x.shape[0], x.shape[1], self.config.rms_norm_eps, norm.kind, rounded
        )
        made = self.kernels.run(
            "simt_residual_norm", problem, values=x, residual=residual, weight=norm.weight
        )
        return made[0], made[1]

    def layer(
        self,
        weights: LatentLayer,
        memory: LatentMemory,
        own: Tensor,
        given: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Run one layer; sublayer output and residual in and out."""
        x, residual = self.added(weights.attn.norm, *given)
        x = self._attention(weights, memory, own, x)
        x, residual = self.added(weights.ffn.norm, x, residual)
        return self._ffn(weights.ffn, x), residual

    # ---- attention -------------------------------------------------------------------------------

    def _attention(
        self, weights: LatentLayer, memory: LatentMemory, own: Tensor, x: Tensor
    ) -> Tensor:
        w, c = weights.attn, self.config
        table = self.turns(weights.rope)
        qr = self.normed(w.q_norm, multiply(self.kernels, w.wq_a, x), self._latent_epsilon)
        heads = multiply(self.kernels, w.wq_b, qr).reshape(len(x), c.num_attention_heads, -1)
        self._write_row(w, memory, own, (multiply(self.kernels, w.wkv_a, x), table))
        chosen = self._chosen(w.indexer, memory, own, (x, qr))
        slots = self.slots(CHOSEN, chosen.shape[1], EVERY, chosen)[0]
        keys = KeyList(chosen.shape[1], self.room.pages(EVERY, WITH_KEY))
        mode = "decode" if self.rows == self.room.lanes else "prefill"
        problem = AttentionProblem(
            len(x), c.num_attention_heads, keys, mode=mode, scale=self._scale
        )
        out = self.kernels.run(
            "sm90_sparse_attention", problem, q=self._query(w, heads, table), sink=None,
            window_slots=slots, window_cache=memory.rows,
        )[0]  # fmt: skip
        return multiply(self.kernels, w.wo, by_head(self.kernels, out, w.value))

    def _query(self, w: LatentWeights, heads: Tensor, table: Tensor) -> Tensor:
        """Multiply heads by their key matrices, and append their rotated parts: [B, H, 576]."""
        rows, count, width = heads.shape
        plain = heads[..., : width - ROTATED].contiguous()
        latent = by_head(self.kernels, plain, w.key).reshape(rows, count, WIDTH)
        problem = QueryProblem(rows, count, width, len(table))
        return self.kernels.run(
            "simt_latent_query", problem, latent=latent, heads=heads, turns=table,
            positions=self.lanes.positions,
        )[0]  # fmt: skip

    def _write_row(
        self, w: LatentWeights, memory: LatentMemory, own: Tensor, given: tuple[Tensor, Tensor]
    ) -> None:
        """Norm the latent, rotate the key, and write both into the lane's pages."""
        raw, table = given
        told = (len(table), self._latent_epsilon, w.kv_norm.kind)
        problem = WriteProblem(len(raw), self.room.pages(EVERY, WITH_KEY), *told)
        self.kernels.run(
            "simt_kv_write", problem, values=raw, weight=w.kv_norm.weight, turns=table,
            positions=self.lanes.positions, slots=own, cache=memory.rows,
        )  # fmt: skip

    # ---- the indexer -----------------------------------------------------------------------------

    def _chosen(
        self, w: KeyIndexing, memory: LatentMemory, own: Tensor, given: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the indices of the chosen tokens int32 [B, K], ascending, padded with -1."""
        (x, qr), run, positions = given, self.kernels.run, self.lanes.positions
        key = multiply(self.kernels, w.wk, x)[:, None]
        more: dict[str, Any] = {"weight": w.norm, "bias": w.bias}
        keys = self.room.pages(EVERY, KEY_WIDTH, "bf16")
        run(
            "simt_kv_write", WriteProblem(len(x), keys, source="row"),
            values=self._operand(key, **more).flatten(1), slots=own, cache=memory.keys,
        )  # fmt: skip
        heads = self.config.index_n_heads
        q = multiply(self.kernels, w.wq_b, qr).reshape(len(x), heads, KEY_WIDTH)
        of_heads = widely(self.kernels, w.weights, x)
        columns, lanes = self.room.columns(EVERY), self.room.lanes
        pages = KeyPages("bf16", PAGE, keys.count)
        (scores,) = run(
            "sm90_indexer_scores", ScoresProblem(len(x), heads, columns, lanes, pages),
            queries=self._operand(q), weights=self.scaled(of_heads, w.factor, of_heads.dtype),
            positions=positions, sequences=self.lanes.members, table=self.tables(EVERY).pages,
            pages=memory.keys,
        )  # fmt: skip
        count = min(self.config.index_topk, columns)
        return run("simt_indexer_topk", TopkProblem(len(x), columns, count), scores=scores)[0]

    def _operand(self, rows: Tensor, **norm: torch.Tensor) -> Tensor:
        """Prepare indexer rows: optional norm, half-split RoPE, transform, rounding."""
        s, table = self.switches, self.turns(self.config.indexer_rope())
        problem = OperandProblem(
            rows.shape[0], rows.shape[1], "halves", str(s.indexer_format), s.indexer_hadamard,
            normed=bool(norm), positions=len(table), epsilon=INDEXER_NORM_EPSILON,
        )  # fmt: skip
        return self.kernels.run(
            "simt_indexer_operand", problem, rows=rows, turns=table,
            positions=self.lanes.positions, **norm,
        )[0]  # fmt: skip

    # ---- experts ---------------------------------------------------------------------------------

    def _ffn(self, w: MlpWeights, x: Tensor) -> Tensor:
        c = self.config
        if w.routed is None:
            return self.gated(w.gated, x, c.intermediate_size, None)
        shared = self.gated(w.gated, x, c.moe_intermediate_size, None)
        return self.routed(w.routed, x, shared, None, groups=(c.n_group, c.topk_group))
