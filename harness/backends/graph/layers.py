"""One decoding step of a V4 or V3.2 layer by our kernels, without host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.attention import by_head
from degarble.harness.backends.graph.matrices import (
    TILES,
    VERY_FEW_ROWS,
    CodedGroups,
    ExpertRows,
    added_up,
    coded_product,
    gemv_turned,
)
from degarble.harness.backends.graph.steps import (
    CACHE,
    CHOICE,
    KEYS,
    PAGE,
    STEP,
    DecoderSteps,
    Normed,
    widened,
)
from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.kernels.attention import heads_problem
from degarble.kernels.attention.heads_problem import HeadsProblem
from degarble.kernels.attention.problem import (
    AttentionProblem,
    KeyList,
    QueryProblem,
    choose_splits,
    merges_apart,
)
from degarble.kernels.cache.problem import CHOSEN, ENTRIES, WINDOW, PoolProblem
from degarble.kernels.gemm.gemv_problem import inner_held
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.indexer.problem import KeyPages, OperandProblem, ScoresProblem, TopkProblem
from degarble.kernels.primitives.kv_problem import ROTATED, WIDTH, WITH_KEY, Pages, WriteProblem
from degarble.kernels.rows import mhc_few_problem
from degarble.kernels.rows.mhc_few_problem import MhcNormProblem, OnwardProblem
from degarble.kernels.rows.mhc_problem import MhcMixProblem, ProjectProblem
from degarble.kernels.rows.problem import InverseRopeProblem, QNormRopeProblem, ResidualProblem
from degarble.references.attention import softmax_scale

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.backends.graph.matrices import Matrix
    from degarble.harness.backends.graph.steps import LatentMemory, LayerMemory, MemorySize
    from degarble.harness.backends.graph.weights import (
        AttentionWeights,
        Compressing,
        EndWeights,
        FfnWeights,
        Indexing,
        KeyIndexing,
        LatentEnds,
        LatentLayer,
        LatentWeights,
        LayerWeights,
        MhcLayout,
        MlpWeights,
        NormWeight,
    )
    from degarble.harness.model.config.config import V4Config, V32Config
    from degarble.references.numerics import Switches


# --------------------------------------------------------------------------------------------------
# One decoding step of a V4 layer by our kernels, without host synchronisation.
#
# Tokens, positions and owners are on the device, so that a step captured in a CUDA graph follows
# them at every replay. Each sublayer (attention, then experts) has mHC mixing and a norm before it
# and mHC spreading after it. Attention writes the token into its window's ring and its compressor's
# ring, writes a completed entry to its page, and lists the slots to attend to on the device.
# Kernels alone compute: torch allocates, views, and widens latents after NVFP4 compressors
# (`widened`).
#
# Shape letters: B lanes (a token each), S streams, D hidden, H heads, L latent width, N indexer
# heads.


@dataclass(frozen=True)
class Lists:
    """Slots that a step's layers share: the window's, the tokens' own, those of all entries."""

    window: Tensor
    own: Tensor
    visible: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Unspread:
    """Streams, and what a sublayer made of them: the next one's first launch spreads it."""

    streams: Tensor  # BF16 [B, S, D], before
    made: Tensor | ExpertRows
    post: Tensor  # float32 [B, S]
    mix: Tensor  # float32 [B, S, S]
    role: str  # of the component that spreads


class V4Steps(DecoderSteps):
    """V4's layers, one row a lane."""

    def __init__(
        self,
        kernels: Kernels,
        config: V4Config,
        switches: Switches,
        room: MemorySize,
        products: str = TILES,
    ) -> None:
        super().__init__(kernels, config, switches, room, room.lanes, products)
        self.config = config
        # Whether streams are spread by the launch that projects them next.
        self.spreads_later = self.by_row and mhc_few_problem.serves(self.rows, config.hidden_size)
        for ratio in sorted({block.ratio for block in config.layers}):
            self.tables(ratio)  # made here: several branches read it

    def run_layers(
        self,
        ends: EndWeights,
        layers: Many[LayerWeights],
        memories: Many[LayerMemory],
        embedded: Tensor,
    ) -> Tensor:
        """Return the streams [B, S, D] after the last layer."""
        del ends
        self.show(STEP)
        streams: Tensor | Unspread = embedded.reshape(self.rows, -1, embedded.shape[1])
        # Layers without an indexer see all entries: one slot list a ratio serves them all.
        seen = {w.block.ratio for w in layers if w.block.ratio and w.attn.indexer is None}
        lists = self.lists(tuple(sorted(seen)))
        for weights, memory in zip(layers, memories, strict=True):
            streams = self.layer(weights, memory, lists, streams)
        return self.spread_out(streams)

    def head_input(self, ends: EndWeights, hidden: Tensor) -> Tensor:
        """Mix the streams for the head, and norm the result."""
        return self.normed(ends.norm, self.mixed(ends.mixing, hidden, "head")[0])

    def lists(self, ratios: tuple[int, ...]) -> Lists:
        """Compute slots for all layers of a step; layers with these `ratios` see every entry."""
        window, own = self.slots(WINDOW, self.room.window, 0)
        visible = {
            ratio: self.slots(ENTRIES, self.room.columns(ratio), ratio)[0] for ratio in ratios
        }
        assert own is not None, "a window tells the tokens' own slots"
        return Lists(window, own, visible)

    # ---- parts that every layer has --------------------------------------------------------------

    def mixed(self, mixing: MhcLayout, streams: Tensor, part: str) -> tuple[Tensor, ...]:
        """Apply mHC before a sublayer ("all"), or before the head ("head")."""
        kind = "head" if part == "head" else "layer"
        products, squares = self.kernels.run(
            "simt_mhc_project", ProjectProblem(streams.shape[0], streams.shape[2], kind),
            streams=streams, split=mixing.split,
        )  # fmt: skip
        return self.kernels.run(
            "simt_mhc", self._mix(streams, part), streams=streams, products=products,
            squares=squares, base=mixing.base, scale=mixing.scale,
        )  # fmt: skip

    def spread_out(self, given: Tensor | Unspread) -> Tensor:
        """Return the streams, spread by a launch of their own if they have not been."""
        if isinstance(given, torch.Tensor):
            return given
        made = given.made
        x = added_up(self.kernels, made) if isinstance(made, ExpertRows) else made
        out = self.spread(x, given.streams, (given.post, given.mix, x))
        self._show_spread(given, x, out)
        return out

    def _show_spread(self, given: Unspread, x: Tensor, out: Tensor) -> None:
        self.show(
            given.role, x=x, streams=given.streams, post=given.post, mix=given.mix, out=out
        )  # fmt: skip

    def _onward(self, given: Unspread, split: Tensor) -> tuple[Tensor, Tensor]:
        """Spread a sublayer's output, and project the new streams: those, and partial sums."""
        (rows, _, width), made = given.streams.shape, given.made
        given_tensors = {"streams": given.streams, "post": given.post, "mix": given.mix}
        if isinstance(made, ExpertRows):
            experts, moe = made.problem, made.problem.moe
            problem = OnwardProblem(rows, width, "rows", moe.chosen, experts.rows, experts.shared)
            out, partials, x = self.kernels.run(
                "simt_mhc_onward", problem, **given_tensors, split=split, made=made.products,
                places=made.places, weights=made.weights, shared=made.shared,
            )  # fmt: skip
        else:
            problem, x = OnwardProblem(rows, width), made
            out, partials = self.kernels.run(
                "simt_mhc_onward", problem, **given_tensors, split=split, made=made
            )
        self._show_spread(given, x, out)
        return out, partials

    def _entered(
        self,
        weights: AttentionWeights | FfnWeights,
        given: Tensor | Unspread,
        scales: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...], Normed]:
        """Return a sublayer's streams, what mHC makes of them, and that normed, for NVFP4 as well.

        Of mHC: post, mix, the collapsed streams. Scales are those of the products that follow.
        """
        norm = weights.norm
        if isinstance(given, torch.Tensor):
            pre = self.mixed(weights.mixing, given, "all")
            return given, pre, Normed(self.normed(norm, pre[2]))
        streams, partials = self._onward(given, weights.mixing.split)
        c, mixing = self.config, weights.mixing
        told = (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)
        rows, _, width = streams.shape
        problem = MhcNormProblem(rows, width, *told, norm.kind, len(scales))
        of_scales = {f"decode_scale{number}": scale for number, scale in enumerate(scales)}
        post, mix, x, normed, *decoded = self.kernels.run(
            "simt_mhc_norm", problem, streams=streams, partials=partials, base=mixing.base,
            scale=mixing.scale, weight=norm.weight, **of_scales,
        )  # fmt: skip
        return streams, (post, mix, x), Normed(normed, tuple(decoded))

    def spread(self, x: Tensor, streams: Tensor, pre: tuple[Tensor, ...]) -> Tensor:
        """Apply mHC after a sublayer."""
        post, mix, _ = pre
        return self.kernels.run(
            "simt_mhc", self._mix(streams, "post"), streams=streams, layer=x, post=post, mix=mix
        )[0]

    def _mix(self, streams: Tensor, part: str) -> MhcMixProblem:
        c = self.config
        told = (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)
        return MhcMixProblem(streams.shape[0], streams.shape[2], part, *told)

    # ---- a layer ---------------------------------------------------------------------------------

    def layer(
        self,
        weights: LayerWeights,
        memory: LayerMemory,
        lists: Lists,
        given: Tensor | Unspread,
    ) -> Tensor | Unspread:
        """Run one layer: streams [B, S, D] in and out, or what is to be spread over them."""
        self.prefix = weights.block.prefix

        def attended(x: Normed) -> Tensor:
            return self._attention(weights, memory, lists, x)

        attn = weights.attn
        both = tuple(self.scale_decoded(matrix) for matrix in (attn.wq_a, attn.wkv))
        scales = tuple(scale for scale in both if scale is not None)
        scales = scales if len(scales) == len(both) else ()
        given = self._sublayer("attn", attn, given, attended, scales)
        return self._sublayer("ffn", weights.ffn, given, partial(self._ffn, weights.ffn))

    def _sublayer(
        self,
        name: str,
        weights: AttentionWeights | FfnWeights,
        given: Tensor | Unspread,
        compute: Callable[[Normed], Tensor | ExpertRows],
        scales: tuple[Tensor, ...] = (),
    ) -> Tensor | Unspread:
        streams, (post, mix, x), normed = self._entered(weights, given, scales)
        self.shown(f"{name}.hc_pre", streams=streams, out=x, post=post, mix=mix)
        self.shown(f"{name}.norm", x=x, out=normed.values)
        made = compute(normed)
        unspread = Unspread(streams, made, post, mix, f"{self.prefix}.{name}.hc_post")
        return unspread if self.spreads_later else self.spread_out(unspread)

    def _ffn(self, w: FfnWeights, normed: Normed) -> Tensor | ExpertRows:
        limit, clamped = self.config.swiglu_limit or None, self.switches.shared_expert_clamped
        width, x = self.config.moe_intermediate_size, normed.values
        of_shared = limit if clamped else None
        shared = None
        if not self.rides(w.routed, alike=of_shared == limit):
            shared = self.gated(w.shared, x, width, of_shared)
        return self.routed(w.routed, x, shared, limit, summed_later=self.spreads_later)

    def _attention(
        self, weights: LayerWeights, memory: LayerMemory, lists: Lists, normed: Normed
    ) -> Tensor:
        w, run, c, x = weights.attn, self.kernels.run, self.config, normed.values
        table, positions = self.rope_table(weights.rope), self.lanes.positions
        with self.aside(CACHE):
            latent = self._product("attn.wkv", w.wkv, x, normed.decoded_at(1))
            self._write_latent(weights, memory, lists, latent)
            self._advance(weights, memory, x)
        head_weights = None
        if w.indexer is not None:
            with self.aside(KEYS):
                head_weights = self._write_keys(weights, w.indexer, memory, x)
        low = self._product("attn.wq_a", w.wq_a, x, normed.decoded_at(0))
        of_query = self.normed_for(w.wq_b, w.q_norm, low)
        qr = of_query.values
        self.shown("attn.q_norm", x=low, out=qr)
        near, far = KeyList(self.room.window, self.room.pages(0)), None
        more = {"window_slots": lists.window, "window_cache": memory.window}
        ratio = weights.block.ratio
        if ratio:
            with self.aside(CHOICE):
                slots = self._visible(weights, memory, lists, (qr, head_weights))
            assert memory.entries is not None, "a layer that compresses has entries"
            far = KeyList(slots.shape[1], self.room.pages(ratio))
            more |= {"entries_slots": slots, "entries_cache": memory.entries}
        heads = self._product("attn.wq_b", w.wq_b, qr, of_query.decoded_at(0))
        heads = heads.reshape(len(x), -1, WIDTH)
        of_heads = QNormRopeProblem(len(x), heads.shape[1], len(table), c.rms_norm_eps)
        (q,) = run("simt_qnorm_rope", of_heads, heads=heads, turns=table, positions=positions)
        self.meet()
        count = heads.shape[1]
        splits = self.splits(count, near, far) if far else self.splits(count, near)
        problem = AttentionProblem(len(x), count, near, far, "decode", splits=splits)
        out = run("sm90_sparse_attention", problem, q=q, sink=w.sink, **more)[0]
        low, *of_low = self._turned_back(w, out, table)
        return self._product("attn.wo_b", w.wo_b, low, *of_low)

    def _product(
        self, role: str, matrix: Matrix, x: Tensor, decoded: Tensor | None = None
    ) -> Tensor:
        out = self.multiply(matrix, x, decoded)
        self.shown(role, x=x, out=out)
        return out

    def _turned_back(self, w: AttentionWeights, out: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        """Apply inverse RoPE and wo_a: one kernel, or more if groups are narrow.

        The result may be followed by itself quantised for wo_b and decoded.
        """
        lanes, heads = out.shape[:2]
        positions, groups = self.lanes.positions, w.wo_a
        if isinstance(groups, CodedGroups):
            return (coded_product(self.kernels, groups, out, (table, positions)),)
        if self.by_row and groups.weight.shape[1] <= inner_held(VERY_FEW_ROWS):
            scale = self.scale_decoded(w.wo_b)
            return gemv_turned(self.kernels, groups, out, (table, positions), scale)
        if groups.dense:
            back = InverseRopeProblem(lanes, heads, len(table))
            (turned,) = self.kernels.run(
                "simt_inverse_rope", back, heads=out, turns=table, positions=positions
            )
            return (self.dense(groups.weight, turned.flatten(1)),)
        columns, inner = groups.weight.shape[0] // groups.groups, groups.weight.shape[1]
        problem = GroupedProblem(lanes, groups.groups, columns, inner, WIDTH, len(table))
        return self.kernels.run(
            "sm90_gemm_grouped", problem, a=out.flatten(1), b=groups.weight, turns=table,
            positions=positions,
        )  # fmt: skip

    def _write_latent(
        self, weights: LayerWeights, memory: LayerMemory, lists: Lists, latent: Tensor
    ) -> None:
        """Norm, rotate and write the token's row into the window's ring."""
        norm, table = weights.attn.kv_norm, self.rope_table(weights.rope)
        told = (len(table), self.config.rms_norm_eps, norm.kind)
        self.kernels.run(
            "simt_kv_write", WriteProblem(len(latent), self.room.pages(0), *told), values=latent,
            weight=norm.weight, turns=table, positions=self.lanes.positions, slots=lists.own,
            cache=memory.window,
        )  # fmt: skip

    # ---- compressed entries ----------------------------------------------------------------------

    def _advance(self, weights: LayerWeights, memory: LayerMemory, x: Tensor) -> None:
        """Take the tokens into the compressor, and write completed entries."""
        w, ratio = weights.attn, weights.block.ratio
        if not ratio:
            return
        assert w.compressor is not None, "a layer with a ratio compresses"
        assert memory.ring is not None, "and carries rows"
        assert memory.entries is not None, "into entries"
        tensors = self._pooled("attn", w.compressor, memory.ring, ratio, x)
        pages = self.room.pages(ratio)
        self._write_entries(weights, w.compressor, tensors, memory.entries, pages)

    def _visible(
        self,
        weights: LayerWeights,
        memory: LayerMemory,
        lists: Lists,
        given: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """Return slots of the entries that each token attends to."""
        indexer, ratio = weights.attn.indexer, weights.block.ratio
        if indexer is None:
            return lists.visible[ratio]
        qr, of_heads = given
        assert of_heads is not None, "an indexer weighs its heads"
        chosen = self._chosen(weights, indexer, memory, (qr, of_heads))
        return self.slots(CHOSEN, chosen.shape[1], ratio, chosen)[0]

    def _pooled(
        self, part: str, weights: Compressing, ring: Tensor, ratio: int, x: Tensor
    ) -> tuple[Tensor, ...]:
        lanes, width = len(x), weights.ape.shape[1] // (ring.shape[1] // ratio)
        told, table = self.lanes, self.tables(ratio).slots
        projected = self._projected(weights, x)
        latent, gate = projected.chunk(2, 1)
        self.shown(f"{part}.compressor.proj", x=x, latent=latent, gate=gate)
        return self.kernels.run(
            "simt_compressor", PoolProblem(lanes, lanes, lanes, lanes, ratio, width),
            projected=projected, ape=weights.ape, rings=ring,
            closing=told.members, owners=told.members, starts=told.positions,
            offsets=told.offsets, ring_of=told.owners, table=table,
        )  # fmt: skip

    def _projected(self, weights: Compressing, x: Tensor) -> Tensor:
        """Return latents, then gates, in float32."""
        if weights.joined is not None:
            return self.widely(weights.joined, x)
        return widened([self.multiply(matrix, x) for matrix in weights.apart])

    def _write_entries(
        self,
        weights: LayerWeights,
        of: Compressing,
        tensors: tuple[Tensor, ...],
        cache: Tensor,
        pages: Pages,
    ) -> None:
        """Norm, rotate at the window's first position, and write completed entries."""
        values, positions, slots = tensors
        table = self.rope_table(weights.rope)
        told = (len(table), self.config.rms_norm_eps, of.norm.kind)
        self.kernels.run(
            "simt_kv_write", WriteProblem(len(values), pages, *told), values=values,
            weight=of.norm.weight, turns=table, positions=positions, slots=slots, cache=cache,
        )  # fmt: skip

    def _chosen(
        self, weights: LayerWeights, w: Indexing, memory: LayerMemory, given: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the indices of the chosen entries, ascending, padded with -1."""
        (qr, of_heads), ratio, run = given, weights.block.ratio, self.kernels.run
        assert memory.keys is not None, "an indexer has keys"
        heads, table = w.weights.shape[0], self.rope_table(weights.rope)
        product = self._product("attn.indexer.wq_b", w.wq_b, qr)
        q = product.reshape(len(qr), heads, KEY_WIDTH)
        operand = self._operand(len(qr), heads, "interleaved", len(table))
        positions = self.lanes.positions
        (q,) = run("simt_indexer_operand", operand, rows=q, turns=table, positions=positions)
        stored = self.switches.indexer_in_storage_dtype
        columns, lanes = self.room.columns(ratio), self.room.lanes
        pages = KeyPages("bf16", PAGE, len(memory.keys))
        arithmetic = "stored" if stored else "float32"
        problem = ScoresProblem(len(qr), heads, columns, lanes, pages, ratio, arithmetic)
        self.meet(KEYS)
        (scores,) = run(
            "sm90_indexer_scores", problem, queries=q,
            weights=of_heads, positions=positions,
            sequences=self.lanes.members, table=self.tables(ratio).pages, pages=memory.keys,
        )  # fmt: skip
        count = min(self.config.index_topk, columns)
        return run("simt_indexer_topk", TopkProblem(len(qr), columns, count), scores=scores)[0]

    def _write_keys(
        self, weights: LayerWeights, w: Indexing, memory: LayerMemory, x: Tensor
    ) -> Tensor:
        """Pool, norm, rotate and transform on a temporary page, then write the lane's pages.

        Returns the weights of the indexer's heads.
        """
        keys, ring, lanes = memory.keys, memory.key_ring, len(x)
        assert keys is not None, "an indexer has keys"
        assert ring is not None, "and carries rows"
        values, positions, slots = self._pooled(
            "attn.indexer", w.compressor, ring, weights.block.ratio, x
        )
        aside = Pages("bf16", PAGE, -(-lanes // PAGE), width=KEY_WIDTH)
        page = torch.empty(aside.count, aside.stride, dtype=torch.uint8, device=x.device)
        of_page = values, positions, self.lanes.places
        self._write_entries(weights, w.compressor, of_page, page, aside)
        # The temporary page is contiguous BF16 rows, so that the transform reads it directly.
        rows = page.view(torch.bfloat16).reshape(-1, 1, KEY_WIDTH)[:lanes]
        operand = self._operand(lanes, 1, "none", 0)
        (made,) = self.kernels.run("simt_indexer_operand", operand, rows=rows)
        pages = Pages("bf16", PAGE, len(keys), width=KEY_WIDTH)
        self.kernels.run(
            "simt_kv_write", WriteProblem(lanes, pages, source="row"), values=made.flatten(1),
            slots=slots, cache=keys,
        )  # fmt: skip
        return self.scaled(
            self.dense(w.weights, x), w.factor,
            torch.bfloat16 if self.switches.indexer_weights_in_storage_dtype else torch.float32,
        )  # fmt: skip

    def _operand(self, tokens: int, heads: int, pairing: str, positions: int) -> OperandProblem:
        s = self.switches
        told = (str(s.indexer_format), s.indexer_hadamard)
        return OperandProblem(tokens, heads, pairing, *told, positions=positions)


# --------------------------------------------------------------------------------------------------
# One step of a V3.2 layer by our kernels, without host synchronisation.
#
# A row of a step is a token. It is written into its lane's pages as latent and rotated key (656
# bytes in FP8), and so is the indexer's key; scores, choice and slots follow on the device, and
# attention is absorbed. A sublayer's output is added to the residual in the launch that norms their
# sum. Consecutive rows may belong to one lane: a prompt is fed in pieces through the same code.
# Kernels alone compute: torch allocates, views, and copies the unrotated part of query heads.
#
# Shape letters: B rows (tokens), D hidden, H heads, N indexer heads, K chosen tokens.

EVERY = 1  # tokens that become one entry
# Multiprocessors that one token's query leaves to the choice of keys beside it. Measured:
# docs/design-notes/decoder_layer.md.
SPARED = 32


class V32Steps(DecoderSteps):
    """V3.2's layers: one row a lane in decoding, any rows of any lanes in a prompt."""

    def __init__(
        self,
        kernels: Kernels,
        config: V32Config,
        switches: Switches,
        room: MemorySize,
        rows: int,
        products: str = TILES,
    ) -> None:
        super().__init__(kernels, config, switches, room, rows, products)
        self.config = config
        self._scale = softmax_scale(config)
        self._latent_epsilon = switches.latent_epsilon(config.rms_norm_eps)
        self.rope_table(config.indexer_rope())  # made here: several branches read it

    def run_layers(
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

    def head_input(self, ends: LatentEnds, hidden: Tensor) -> Tensor:
        """Return the head's input, which `run_layers` has normed already."""
        del ends
        return hidden

    def added(self, norm: NormWeight, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum; before the first layer there is no residual."""
        if residual is None:
            return self.normed(norm, x), x
        rounded = self.switches.residual_rounded_before_norm
        problem = ResidualProblem(
            x.shape[0], x.shape[1], self.config.rms_norm_eps, norm.kind, rounded
        )
        tensors = self.kernels.run(
            "simt_residual_norm", problem, values=x, residual=residual, weight=norm.weight
        )
        return tensors[0], tensors[1]

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
        table = self.rope_table(weights.rope)
        with self.aside(CACHE):
            self._write_row(w, memory, own, (self.multiply(w.wkv_a, x), table))
        with self.aside(KEYS):
            of_heads = self._write_key(w.indexer, memory, own, x)
        qr = self.normed(w.q_norm, self.multiply(w.wq_a, x), self._latent_epsilon)
        # In front of the query's own product, whose thread blocks would keep it waiting.
        product = self.multiply(w.indexer.wq_b, qr) if self.by_row else None
        with self.aside(CHOICE):
            chosen = self._chosen(w.indexer, memory, of_heads, (qr, product))
            slots = self.slots(CHOSEN, chosen.shape[1], EVERY, chosen)[0]
        heads = self.multiply(w.wq_b, qr, spared=SPARED if self.rows == 1 else 0)
        q = self._query(w, heads.reshape(len(x), c.num_attention_heads, -1), table)
        self.meet()
        return self._attended(w, q, {"window_slots": slots, "window_cache": memory.rows})

    def _attended(self, w: LatentWeights, q: Tensor, listed: dict[str, Tensor]) -> Tensor:
        """Attend to listed keys, multiply heads by their value matrices, and all of them by wo."""
        tokens, count, columns = len(q), q.shape[1], len(w.value) // q.shape[1]
        keys = KeyList(listed["window_slots"].shape[1], self.room.pages(EVERY, WITH_KEY))
        # A piece of a prompt as well: prefill sums in another order, and a token of a piece has to
        # have the bits that it has in a step of its own.
        splits = self.splits(count, keys)
        problem = AttentionProblem(
            tokens, count, keys, mode="decode", splits=splits, scale=self._scale
        )
        given = {"q": q, "sink": None} | listed
        alone = w.value.shape[1] == WIDTH
        if not (self.by_row and alone and heads_problem.serves(columns, WIDTH)):
            out = self.kernels.run("sm90_sparse_attention", problem, **given)[0]
            return self.multiply(w.wo, by_head(self.kernels, out, w.value))
        scale = self.scale_decoded(w.wo)
        values = HeadsProblem(tokens, count, columns, WIDTH, WIDTH, decoded=scale is not None)
        if merges_apart(problem):
            splits = choose_splits(problem)
            parts = {
                name: q.new_empty(tokens, splits, count, each, dtype=torch.float32)
                for name, each in (("sums", WIDTH), ("stats", 2))
            }
            self.kernels.run("sm90_sparse_attention.SPLITS", problem, **given, **parts)
            values = replace(values, splits=splits)
        else:
            parts = {"x": self.kernels.run("sm90_sparse_attention", problem, **given)[0]}
        made = self.kernels.run(
            "sm90_latent_heads", values, **parts, weight=w.value, decode_scale=scale
        )[0].flatten(1)
        return self.multiply(w.wo, made, made if scale is not None else None)

    def _query(self, w: LatentWeights, heads: Tensor, table: Tensor) -> Tensor:
        """Multiply heads by their key matrices, and append their rotated parts: [B, H, 576]."""
        rows, count, width = heads.shape
        plain = width - ROTATED
        # Trap: a matrix may be several BF16 ones side by side, which only `by_head` adds up.
        alone = w.key.shape[1] == plain and width % heads_problem.STEP == 0
        if self.by_row and alone and heads_problem.serves(WIDTH, plain):
            keys = HeadsProblem(rows, count, WIDTH, plain, width, len(table))
            return self.kernels.run(
                "sm90_latent_heads", keys, x=heads, weight=w.key, turns=table,
                positions=self.lanes.positions,
            )[0]  # fmt: skip
        values = heads[..., :plain].contiguous()
        latent = by_head(self.kernels, values, w.key).reshape(rows, count, WIDTH)
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

    def _write_key(self, w: KeyIndexing, memory: LatentMemory, own: Tensor, x: Tensor) -> Tensor:
        """Write the indexer's key into the lane's pages; return the weights of its heads."""
        key = self.multiply(w.wk, x)[:, None]
        more: dict[str, Any] = {"weight": w.norm, "bias": w.bias}
        keys = self.room.pages(EVERY, KEY_WIDTH, "bf16")
        self.kernels.run(
            "simt_kv_write", WriteProblem(len(x), keys, source="row"),
            values=self._operand(key, **more).flatten(1), slots=own, cache=memory.keys,
        )  # fmt: skip
        of_heads = self.widely(w.weights, x)
        return self.scaled(of_heads, w.factor, of_heads.dtype)

    def _chosen(
        self,
        w: KeyIndexing,
        memory: LatentMemory,
        of_heads: Tensor,
        given: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """Return the indices of the chosen tokens int32 [B, K], ascending, padded with -1."""
        run, positions = self.kernels.run, self.lanes.positions
        keys = self.room.pages(EVERY, KEY_WIDTH, "bf16")
        heads, (qr, product) = self.config.index_n_heads, given
        product = self.multiply(w.wq_b, qr) if product is None else product
        q = product.reshape(len(qr), heads, KEY_WIDTH)
        columns, lanes = self.room.columns(EVERY), self.room.lanes
        pages = KeyPages("bf16", PAGE, keys.count)
        queries = self._operand(q)
        self.meet(KEYS)
        (scores,) = run(
            "sm90_indexer_scores", ScoresProblem(len(qr), heads, columns, lanes, pages),
            queries=queries, weights=of_heads,
            positions=positions, sequences=self.lanes.members, table=self.tables(EVERY).pages,
            pages=memory.keys,
        )  # fmt: skip
        count = min(self.config.index_topk, columns)
        return run("simt_indexer_topk", TopkProblem(len(qr), columns, count), scores=scores)[0]

    def _operand(self, rows: Tensor, **norm: torch.Tensor) -> Tensor:
        """Prepare indexer rows: optional norm, half-split RoPE, transform, rounding."""
        s, table = self.switches, self.rope_table(self.config.indexer_rope())
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
        shared = None
        if not self.rides(w.routed):
            shared = self.gated(w.gated, x, c.moe_intermediate_size, None)
        made = self.routed(w.routed, x, shared, None, (c.n_group, c.topk_group))
        assert isinstance(made, torch.Tensor), "rows of experts are added up"
        return made
