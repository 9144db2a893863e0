"""Compose DeepSeek-V4 and V3.2 from their components: wiring, caches, sequence state.

Nothing is computed here: every number comes from a component call through BoundModel, so a backend
may replace any of them and an observer gets all of them. A call needs tokens, one sequence for
each token list, and no sequence twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.model.config.config import compressor_windows
from degarble.harness.model.types import LayerType, MlpType
from degarble.references import mixing
from degarble.references.components.common import side_by_side

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from degarble.harness.model.config.config import Config, V4Config, V32Config
    from degarble.harness.model.types import Block
    from degarble.references.binding import BoundModel


# --------------------------------------------------------------------------------------------------
# State of a sequence between calls: cached rows, entries, compressor state, position
#
# Legend: L latent width, n rows so far, R state rows, T tokens.


class RowBuffer:
    """Rows appended in order, in one buffer that doubles when it is full; `keep` bounds them.

    They are held in `dtype`, the one in which they will be read; it must represent them exactly.
    """

    def __init__(self, keep: int | None = None, dtype: torch.dtype | None = None) -> None:
        self._buffer: Tensor | None = None
        self._keep = keep
        self._dtype = dtype
        self.count = 0  # rows in the buffer

    def append(self, rows: Tensor) -> None:
        """Add rows at the end; old ones beyond `keep` go when the buffer is full."""
        new = rows.shape[0]
        if self._buffer is None:
            extents = (max(16, 2 * new), *rows.shape[1:])
            self._buffer = rows.new_empty(extents, dtype=self._dtype or rows.dtype)
        if self.count + new > self._buffer.shape[0]:
            kept = self.last(self.count if self._keep is None else self._keep)
            grown = self._buffer.new_empty(2 * (kept.shape[0] + new), *self._buffer.shape[1:])
            grown[: kept.shape[0]] = kept
            self._buffer, self.count = grown, kept.shape[0]
        self._buffer[self.count : self.count + new] = rows
        self.count += new

    def last(self, count: int) -> Tensor:
        """Return the last `count` rows, or all there are."""
        assert self._buffer is not None, "rows are written before they are read"
        return self._buffer[max(0, self.count - count) : self.count]

    def all(self) -> Tensor:
        """Return every row that is kept."""
        return self.last(self.count if self._keep is None else self._keep)

    def copy(self) -> RowBuffer:
        """Make an independent copy."""
        buffer = RowBuffer(self._keep, self._dtype)
        buffer.count = self.count
        buffer._buffer = None if self._buffer is None else self._buffer[: self.count].clone()
        return buffer


@dataclass
class BlockState:
    """State of one block for one sequence.

    `rows`: V4 the window, V3.2 every cached row; `entries`: V4's compressed rows, V3.2's expanded
    keys and values (naive form); `keys`: the indexer's.
    """

    rows: RowBuffer = field(default_factory=RowBuffer)
    entries: RowBuffer = field(default_factory=RowBuffer)
    keys: RowBuffer = field(default_factory=RowBuffer)
    pool: tuple[Tensor, Tensor] | None = None
    key_pool: tuple[Tensor, Tensor] | None = None

    def copy(self) -> BlockState:
        """Make an independent copy; pools are replaced, never written to."""
        rows, entries, keys = self.rows.copy(), self.entries.copy(), self.keys.copy()
        return replace(self, rows=rows, entries=entries, keys=keys)


@dataclass
class Sequence:
    """State of one sequence: how many tokens it has, and the state of each block."""

    length: int = 0
    blocks: dict[str, BlockState] = field(default_factory=dict)
    drafted: dict[int, int] = field(default_factory=dict)  # tokens that each drafter has seen
    traced: dict[str, RowBuffer] = field(default_factory=dict)  # of a traced model, by input

    def block(
        self, prefix: str, dtype: torch.dtype | None = None, window: int | None = None
    ) -> BlockState:
        """Return the state of one block, made on first use; rows beyond `window` may go."""
        if prefix not in self.blocks:
            buffers = (RowBuffer(window, dtype), RowBuffer(dtype=dtype), RowBuffer(dtype=dtype))
            self.blocks[prefix] = BlockState(*buffers)
        return self.blocks[prefix]

    def copy(self) -> Sequence:
        """Make an independent copy, for trying continuations."""
        blocks = {name: state.copy() for name, state in self.blocks.items()}
        return Sequence(self.length, blocks, dict(self.drafted))


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one call: ids and positions [T], and where each sequence begins [B+1]."""

    tokens: Tensor
    positions: Tensor
    token_offsets: Tensor
    spans: tuple[slice, ...]
    starts: tuple[int, ...]  # first position of each sequence

    @classmethod
    def from_sequences(cls, starts: list[int], tokens: list[Tensor]) -> TokenBatch:
        """Lay the new tokens of each sequence one after the other."""
        if len(starts) != len(tokens) or not tokens:
            raise InvalidArgument(
                "token lists", len(tokens), f"one for each of {len(starts)} sequences",
                "Leave out sequences that have no new tokens.",
            )  # fmt: skip
        spans, begin = [], 0
        for number, new in enumerate(tokens):
            if new.ndim != 1 or not len(new):
                raise InvalidArgument(
                    f"tokens of sequence {number}", tuple(new.shape), "one id at least, in a row",
                    "Leave out sequences that have no new tokens.",
                )  # fmt: skip
            spans.append(slice(begin, begin + len(new)))
            begin += len(new)
        device, ends = (
            tokens[0].device,
            [start + len(new) for start, new in zip(starts, tokens, strict=True)],
        )
        # Trap: tensors made under inference have no version; tables of such positions go unkept.
        with torch.inference_mode(mode=False):
            parts = [torch.arange(*each, device=device) for each in zip(starts, ends, strict=True)]
            positions = parts[0] if len(parts) == 1 else torch.cat(parts)
            offsets = torch.tensor([0, *(span.stop for span in spans)], device=device)
        ids = torch.cat(tokens).to(torch.int64)
        return cls(ids, positions, offsets, tuple(spans), tuple(starts))


# --------------------------------------------------------------------------------------------------
# Wiring that both families share: linears after their quantisation, experts, earlier state
#
# Legend: T tokens, B sequences, R rows of a sequence.


class ForwardPass:
    """Calls to bound components that both families make, and what a forward pass has to define."""

    def __init__(self, bound: BoundModel, config: Config) -> None:
        self.bound = bound
        self._config = config

    def forward(
        self, sequences: list[Sequence], tokens: list[Tensor], *, last_only: bool = False
    ) -> Tensor:
        """Return logits of the new tokens (or each sequence's last one); advance the sequences."""
        step = TokenBatch.from_sequences([each.length for each in sequences], tokens)
        hidden = self.hidden(step, sequences)
        if last_only:
            hidden = hidden[step.token_offsets[1:] - 1]
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.length += len(new)
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits for rows of `hidden`."""
        return self.bound("head", x=self.normed(hidden))["out"]

    def buffers(self, rows: int) -> dict[str, Tensor]:
        """Return room for what stands between two layers, for a number of tokens."""
        raise NotImplementedError

    def entering(self, step: TokenBatch) -> dict[str, Tensor]:
        """Return what enters the first layer."""
        raise NotImplementedError

    def through(
        self, block: Block, state: dict[str, Tensor], step: TokenBatch, sequences: list[Sequence]
    ) -> dict[str, Tensor]:
        """Run one layer on what stands before it."""
        raise NotImplementedError

    def leaving(self, state: dict[str, Tensor]) -> Tensor:
        """Return the logits of what the last layer left."""
        raise NotImplementedError

    def hidden(self, step: TokenBatch, sequences: list[Sequence]) -> Tensor:
        """Return what is kept of every token after the last layer."""
        raise NotImplementedError

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the head's input, for rows of `hidden`."""
        return hidden

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Call one linear, after its act_quant where the recipe has one."""
        return self.bound(name, **self.quantised(name, x))["out"]

    def quantised(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """Return the input of linear `name`: values, or codes and scales."""
        if not self.bound.quantises(name):
            return {"x": x}
        return dict(self.bound(f"{name}.act_quant", x=x))

    def ffn(self, block: Block, x: Tensor, step: TokenBatch) -> Tensor:
        """Call the feed-forward half: a dense MLP, or routed experts and a shared one."""
        p, bound = f"{block.prefix}.ffn.", self.bound
        if block.mlp_type is MlpType.DENSE:
            both = self.linear(f"{p}w13", x)
            return self.linear(f"{p}w2", bound(f"{p}act", x=both)["out"])
        logits = bound(f"{p}gate", x=x)["out"]
        tokens = {"tokens": step.tokens} if block.mlp_type is MlpType.HASH else {}
        routed = bound(f"{p}topk", logits=logits, **tokens)
        experts, weights = routed["experts"], routed["weights"]
        given = {"x": x}
        if bound.quantises(f"{p}experts.w13"):
            maker = f"{p}experts.w13.act_quant"
            owned = {"experts": experts} if bound.has_input(maker, "experts") else {}
            given = dict(bound(maker, x=x, **owned))
        both = bound(f"{p}experts.w13", **given, experts=experts)["out"]
        act = bound(f"{p}experts.act_quant", x=both, experts=experts, weights=weights)
        given = {"x": act["out"]} if "out" in act else dict(act)
        down = bound(f"{p}experts.w2", **given, experts=experts)["out"]
        total = bound(f"{p}experts.combine", x=down, weights=weights)["out"]
        shared = bound(f"{p}shared.act", x=self.linear(f"{p}shared.w13", x))["out"]
        shared = self.linear(f"{p}shared.w2", shared)
        return bound(f"{p}moe_sum", routed=total, shared=shared)["out"]


def memory(name: str, rows: Iterable[RowBuffer]) -> dict[str, Tensor]:
    """Return earlier rows of all sequences as the input `name`, or nothing where there are none."""
    kept = [row.all() for row in rows if row.count]
    if not kept:
        return {}
    return {name: kept[0] if len(kept) == 1 else torch.cat(kept)}


# --------------------------------------------------------------------------------------------------
# DeepSeek-V3.2
#
# Legend: T tokens of all sequences, D hidden, C latent width, P rotated width. `absorbed` chooses
# MLA's form: the naive one expands keys and values of every row, the absorbed one attends to the
# latents. The official code expands in prefill and absorbs in decode.


class ModelV32(ForwardPass):
    """The forward pass over bound components."""

    def __init__(self, bound: BoundModel, config: V32Config, *, absorbed: bool = True) -> None:
        super().__init__(bound, config)
        self.config = config
        self.absorbed = absorbed

    def buffers(self, rows: int) -> dict[str, Tensor]:
        """Return room for x and the residual, which it was not yet added to."""
        shape, store = (rows, self.config.hidden_size), self.bound.numerics.store
        return {name: torch.empty(shape, dtype=store) for name in ("x", "residual")}

    def entering(self, step: TokenBatch) -> dict[str, Tensor]:
        """Return the embedded tokens; there is no residual yet."""
        return {"x": self.bound("embed", tokens=step.tokens)["out"]}

    def through(
        self, block: Block, state: dict[str, Tensor], step: TokenBatch, sequences: list[Sequence]
    ) -> dict[str, Tensor]:
        """Run one layer."""
        return self.block(block, state, step, sequences)

    def leaving(self, state: dict[str, Tensor]) -> Tensor:
        """Return the logits of the normed sum."""
        return self.bound("head", x=self.bound("norm", **state)["out"])["out"]

    def hidden(self, step: TokenBatch, sequences: list[Sequence]) -> Tensor:
        """Return the normed hidden states [T, D] after the last layer."""
        given = self.entering(step)
        for block in self.config.layers:
            given = self.block(block, given, step, sequences)
        return self.bound("norm", **given)["out"]

    def draft(
        self, sequences: list[Sequence], hidden: Tensor, tokens: list[Tensor], drafter: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of the MTP block: `hidden` of token t, id of t + 1."""
        block = self.config.blocks[len(self.config.layers) + drafter]
        p = f"{block.prefix}."
        step = TokenBatch.from_sequences(
            [each.drafted.get(drafter, 0) for each in sequences], tokens
        )
        h = self.bound(f"{p}embed", tokens=step.tokens)["out"]
        e = self.bound(f"{p}enorm", x=h)["out"]
        n = self.bound(f"{p}hnorm", x=hidden)["out"]
        x = self.linear(f"{p}eh_proj", self.bound(f"{p}join", e=e, h=n)["out"])
        hidden = self.bound(f"{p}norm", **self.block(block, {"x": x}, step, sequences))["out"]
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.drafted[drafter] = sequence.drafted.get(drafter, 0) + len(new)
        return self.bound(f"{p}head", x=hidden)["out"], hidden

    def block(
        self, block: Block, given: dict[str, Tensor], step: TokenBatch, sequences: list[Sequence]
    ) -> dict[str, Tensor]:
        """Run one layer; return its output `x`, and the residual that it was not yet added to."""
        p, work = f"{block.prefix}.", self.bound.numerics.work
        states = [sequence.block(block.prefix, work) for sequence in sequences]
        normed = self.bound(f"{p}attn.norm", **given)
        x = self._attention(block, normed["out"], step, states)
        normed = self.bound(f"{p}ffn.norm", x=x, residual=normed["residual"])
        return {"x": self.ffn(block, normed["out"], step), "residual": normed["residual"]}

    def _attention(
        self, block: Block, x: Tensor, step: TokenBatch, states: list[BlockState]
    ) -> Tensor:
        p, at = f"{block.prefix}.attn.", {"positions": step.positions}
        # wkv_a puts out the latent (width C), then the key that is rotated (P).
        width = self.config.kv_lora_rank
        qr = self.bound(f"{p}q_norm", x=self.linear(f"{p}wq_a", x))["out"]
        raw = self.linear(f"{p}wkv_a", x)
        q = self.linear(f"{p}wq_b", qr)
        rotated = self.bound(f"{p}rope", q=q, key=raw[:, width:], **at)
        latent = self.bound(f"{p}kv_norm", x=raw[:, :width])["out"]
        rows = self.bound(f"{p}kv_write", latent=latent, key=rotated["key"])["out"]
        given = {"rows": rows, **memory("state_rows", (state.rows for state in states))}
        if not self.absorbed:
            given |= memory("state_expanded", (state.entries for state in states))
            # From the rows as read back, so that both forms use the rounded latent.
            given["expanded"] = self.linear(f"{p}wkv_b", rows[:, :width])
        given["chosen"] = self._chosen(block, x, qr, step, states)
        out = self.bound(
            f"{p}attend", q=rotated["q"], **given, **at, token_offsets=step.token_offsets
        )["out"]
        for state, span in zip(states, step.spans, strict=True):
            state.rows.append(rows[span])
            if not self.absorbed:
                state.entries.append(given["expanded"][span])
        return self.linear(f"{p}wo", out)

    def _chosen(
        self, block: Block, x: Tensor, qr: Tensor, step: TokenBatch, states: list[BlockState]
    ) -> Tensor:
        """Return token numbers [T, K] within each token's own sequence, -1 for none."""
        p, at = f"{block.prefix}.attn.indexer.", {"positions": step.positions}
        k = self.bound(f"{p}k", x=self.linear(f"{p}wk", x), **at)["out"]
        given = memory("state_keys", (state.keys for state in states))
        scores = self.bound(
            f"{p}scores",
            q=self.bound(f"{p}q", x=self.linear(f"{p}wq_b", qr), **at)["out"],
            weights=self.bound(f"{p}weights_proj", x=x)["out"],
            keys=k,
            token_offsets=step.token_offsets,
            **given,
            **at,
        )["out"]
        for state, span in zip(states, step.spans, strict=True):
            state.keys.append(k[span])
        return self.bound(f"{p}topk", scores=scores)["out"]


# --------------------------------------------------------------------------------------------------
# DeepSeek-V4
#
# Legend: T tokens of all sequences, B sequences, S streams, D hidden, L latent width.


class ModelV4(ForwardPass):
    """The forward pass over bound components."""

    def __init__(self, bound: BoundModel, config: V4Config) -> None:
        super().__init__(bound, config)
        self.config = config

    def buffers(self, rows: int) -> dict[str, Tensor]:
        """Return room for the streams [T, S, D]."""
        shape = rows, self.config.hc_mult, self.config.hidden_size
        return {"streams": torch.empty(shape, dtype=self.bound.numerics.store)}

    def entering(self, step: TokenBatch) -> dict[str, Tensor]:
        """Return the embedded tokens, one copy a stream."""
        h = self.bound("embed", tokens=step.tokens)["out"]
        return {"streams": mixing.expand(h, self.config.hc_mult)}

    def through(
        self, block: Block, state: dict[str, Tensor], step: TokenBatch, sequences: list[Sequence]
    ) -> dict[str, Tensor]:
        """Run one layer."""
        return {"streams": self.block(block, state["streams"], step, sequences)}

    def leaving(self, state: dict[str, Tensor]) -> Tensor:
        """Return the logits of the streams."""
        return self.logits(state["streams"])

    def hidden(self, step: TokenBatch, sequences: list[Sequence]) -> Tensor:
        """Return the streams [T, S, D]: they are collapsed and normed for the rows that speak."""
        return self.streams(step, sequences)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the head's input [T, D] for streams."""
        return self.bound("norm", x=self.bound("hc_head", streams=hidden)["out"])["out"]

    def streams(self, step: TokenBatch, sequences: list[Sequence]) -> Tensor:
        """Return the residual streams [T, S, D] after the last layer."""
        streams = self.entering(step)["streams"]
        for block in self.config.layers:
            streams = self.block(block, streams, step, sequences)
        return streams

    def draft(
        self, sequences: list[Sequence], streams: Tensor, tokens: list[Tensor], drafter: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return logits and streams of the MTP block: `streams` of token t, id of token t + 1.

        Call it with the streams of a forward pass, one id a row. Its state is separate from that of
        the layers; positions continue where its last call ended.
        """
        p = f"{self.config.blocks[len(self.config.layers) + drafter].prefix}."
        # The drafter's positions: they continue where its own last call ended.
        starts = [each.drafted.get(drafter, 0) for each in sequences]
        step = TokenBatch.from_sequences(starts, tokens)
        h = self.bound(f"{p}embed", tokens=step.tokens, positions=step.positions)["out"]
        e = self.linear(f"{p}e_proj", self.bound(f"{p}enorm", x=h)["out"])
        n = self.linear(f"{p}h_proj", self.bound(f"{p}hnorm", x=streams)["out"])
        streams = self.bound(f"{p}join", e=e, h=n)["out"]
        block = self.config.blocks[len(self.config.layers) + drafter]
        streams = self.block(block, streams, step, sequences)
        y = self.bound(f"{p}hc_head", streams=streams)["out"]
        logits = self.bound(f"{p}head", x=self.bound(f"{p}norm", x=y)["out"])["out"]
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.drafted[drafter] = sequence.drafted.get(drafter, 0) + len(new)
        return logits, streams

    def block(
        self, block: Block, streams: Tensor, step: TokenBatch, sequences: list[Sequence]
    ) -> Tensor:
        """Run one layer: attention, then experts, each between its hc_pre and hc_post."""
        window, work = self.config.sliding_window - 1, self.bound.numerics.work
        # Earlier rows that a window reaches: its length less the token itself.
        states = [sequence.block(block.prefix, work, window) for sequence in sequences]
        for half in ("attn", "ffn"):
            p = f"{block.prefix}.{half}"
            pre = self.bound(f"{p}.hc_pre", streams=streams)
            x = self.bound(f"{p}.norm", x=pre["out"])["out"]
            v = (
                self._attention(block, x, step, states)
                if half == "attn"
                else self.ffn(block, x, step)
            )
            streams = self.bound(
                f"{p}.hc_post", x=v, streams=streams, post=pre["post"], mix=pre["mix"]
            )["out"]
        return streams

    def _attention(
        self, block: Block, x: Tensor, step: TokenBatch, states: list[BlockState]
    ) -> Tensor:
        p, at = f"{block.prefix}.attn.", {"positions": step.positions}
        qr = self.bound(f"{p}q_norm", x=self.linear(f"{p}wq_a", x))["out"]
        q = self.bound(f"{p}q_head_norm_rope", x=self.linear(f"{p}wq_b", qr), **at)["out"]
        latent = self.bound(f"{p}kv_norm_rope", x=self.linear(f"{p}wkv", x), **at)["out"]
        given = memory("state_window", (state.rows for state in states))
        given["window"] = self.bound(f"{p}kv_write", x=latent)["out"]
        if block.ratio:
            given |= memory("state_compressed", (state.entries for state in states))
            given["compressed"] = self._compressed(block, x, step, states)
        if block.layer_type is LayerType.SPARSE:
            given["chosen"] = self._chosen(block, x, qr, step, states)
        o = self.bound(f"{p}attend", q=q, **given, **at, token_offsets=step.token_offsets)["out"]
        self._remember(block, given, step, states)
        o = self.bound(f"{p}inverse_rope", x=o, **at)["out"]
        return self.linear(f"{p}wo_b", self.linear(f"{p}wo_a", o))

    def _remember(
        self, block: Block, made: Mapping[str, Tensor], step: TokenBatch, states: list[BlockState]
    ) -> None:
        """Keep each sequence's window rows and entries for later calls."""
        for state, span in zip(states, step.spans, strict=True):
            state.rows.append(made["window"][span])
        if block.ratio:
            entries = self._by_sequence(block, made["compressed"], step)
            for state, own in zip(states, entries, strict=True):
                state.entries.append(own)

    def _by_sequence(self, block: Block, entries: Tensor, step: TokenBatch) -> tuple[Tensor, ...]:
        """Cut the entries of a call into those of each sequence."""
        # Entries that the call completes: whole windows up to its end, less those before it.
        counts = [
            (start + span.stop - span.start) // block.ratio - start // block.ratio
            for start, span in zip(step.starts, step.spans, strict=True)
        ]
        return torch.split(entries, counts)

    def _compressed(
        self, block: Block, x: Tensor, step: TokenBatch, states: list[BlockState]
    ) -> Tensor:
        p = f"{block.prefix}.attn.compressor."
        made = self._pooled(block, p, x, step, [state.pool for state in states])
        for number, state in enumerate(states):
            state.pool = (made["state_latent"][number], made["state_gate"][number])
        return self.bound(f"{p}write", x=made["out"])["out"]

    def _pooled(
        self,
        block: Block,
        prefix: str,
        x: Tensor,
        step: TokenBatch,
        carried: list[tuple[Tensor, Tensor] | None],
    ) -> Mapping[str, Tensor]:
        projected = self.bound(f"{prefix}proj", **self.quantised(f"{prefix}proj", x))
        rows = block.ratio * compressor_windows(block)
        if None in carried:
            # A kernel may project into BF16; what is carried stays in the working dtype.
            latent, work = projected["latent"], self.bound.numerics.work
            empty = latent.new_zeros(rows, latent.shape[1], dtype=work)
            carried = [pair or (empty, empty) for pair in carried]
        pairs = [pair for pair in carried if pair is not None]
        return self.bound(
            f"{prefix}pool",
            latent=projected["latent"],
            gate=projected["gate"],
            positions=step.positions,
            token_offsets=step.token_offsets,
            state_latent=side_by_side([pair[0] for pair in pairs]),
            state_gate=side_by_side([pair[1] for pair in pairs]),
        )

    def _chosen(
        self, block: Block, x: Tensor, qr: Tensor, step: TokenBatch, states: list[BlockState]
    ) -> Tensor:
        """Return entry numbers [T, K] within each token's own sequence, -1 for none."""
        p, at = f"{block.prefix}.attn.indexer.", {"positions": step.positions}
        made = self._pooled(block, f"{p}compressor.", x, step, [s.key_pool for s in states])
        given = memory("state_keys", (state.keys for state in states))
        scores = self.bound(
            f"{p}scores",
            q=self.bound(f"{p}q", x=self.linear(f"{p}wq_b", qr), **at)["out"],
            weights=self.bound(f"{p}weights_proj", x=x)["out"],
            keys=made["out"],
            token_offsets=step.token_offsets,
            **given,
            **at,
        )["out"]
        keys = self._by_sequence(block, made["out"], step)
        for number, (state, own) in enumerate(zip(states, keys, strict=True)):
            state.keys.append(own)
            state.key_pool = (made["state_latent"][number], made["state_gate"][number])
        return self.bound(f"{p}topk", scores=scores)["out"]
