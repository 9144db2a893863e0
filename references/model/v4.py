"""DeepSeek-V4 as a composition of its components: wiring and caches, no arithmetic.

Legend: T tokens of all sequences, B sequences, S streams, D hidden, L latent width.
Every number comes from a component call through Bound, so a backend may replace any of them and an
observer gets all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.model.config.config import compressor_windows
from degarble.harness.model.types import LayerType
from degarble.references import mixing
from degarble.references.components.common import side_by_side
from degarble.references.model.common import Wiring, memory
from degarble.references.state import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block
    from degarble.references.binding import Bound
    from degarble.references.state import BlockState, Sequence


class ModelV4(Wiring):
    """The forward pass over bound components."""

    def __init__(self, bound: Bound, config: V4Config) -> None:
        super().__init__(bound, config)
        self.config = config

    def forward(
        self, sequences: list[Sequence], tokens: list[Tensor], *, last_only: bool = False
    ) -> Tensor:
        """Return logits of the new tokens (or each sequence's last one); advance the sequences."""
        step = Step.of([each.length for each in sequences], tokens)
        streams = self.streams(step, sequences)
        logits = self.logits(streams[step.token_offsets[1:] - 1] if last_only else streams)
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.length += len(new)
        return logits

    def streams(self, step: Step, sequences: list[Sequence]) -> Tensor:
        """Return the residual streams [T, S, D] after the last layer."""
        h = self.bound("embed", tokens=step.tokens)["out"]
        streams = mixing.expand(h, self.config.hc_mult)
        for block in self.config.layers:
            streams = self.block(block, streams, step, sequences)
        return streams

    def logits(self, streams: Tensor) -> Tensor:
        """Return logits from the streams after the last layer."""
        y = self.bound("hc_head", streams=streams)["out"]
        return self.bound("head", x=self.bound("norm", x=y)["out"])["out"]

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
        step = Step.of(starts, tokens)
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

    def block(self, block: Block, streams: Tensor, step: Step, sequences: list[Sequence]) -> Tensor:
        """Run one layer: attention, then experts, each between its hc_pre and hc_post."""
        window, work = self.config.sliding_window - 1, self.bound.numerics.work
        # Earlier rows that a window reaches: its length less the token itself.
        states = [each.block(block.prefix, work, window) for each in sequences]
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

    def _attention(self, block: Block, x: Tensor, step: Step, states: list[BlockState]) -> Tensor:
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
        self, block: Block, made: Mapping[str, Tensor], step: Step, states: list[BlockState]
    ) -> None:
        """Keep each sequence's window rows and entries for later calls."""
        for state, span in zip(states, step.spans, strict=True):
            state.rows.append(made["window"][span])
        if block.ratio:
            entries = self._by_sequence(block, made["compressed"], step)
            for state, own in zip(states, entries, strict=True):
                state.entries.append(own)

    def _by_sequence(self, block: Block, entries: Tensor, step: Step) -> tuple[Tensor, ...]:
        """Cut the entries of a call into those of each sequence."""
        # Entries that the call completes: whole windows up to its end, less those before it.
        counts = [
            (start + span.stop - span.start) // block.ratio - start // block.ratio
            for start, span in zip(step.starts, step.spans, strict=True)
        ]
        return torch.split(entries, counts)

    def _compressed(self, block: Block, x: Tensor, step: Step, states: list[BlockState]) -> Tensor:
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
        step: Step,
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
        self, block: Block, x: Tensor, qr: Tensor, step: Step, states: list[BlockState]
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
