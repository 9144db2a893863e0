"""DeepSeek-V3.2 as a composition of its components: wiring and caches, no arithmetic.

Legend: T tokens of all sequences, D hidden, C latent width, P rotated width.
`absorbed` chooses MLA's form: the naive one expands keys and values of every row, the absorbed one
attends to the latents. The official code expands in prefill and absorbs in decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.references.model.common import Wiring, memory
from degarble.references.state import Step

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.types import Block
    from degarble.references.binding import Bound
    from degarble.references.state import BlockState, Sequence


class ModelV32(Wiring):
    """The forward pass over bound components."""

    def __init__(self, bound: Bound, config: V32Config, *, absorbed: bool = True) -> None:
        super().__init__(bound, config)
        self.config = config
        self.absorbed = absorbed

    def forward(
        self, sequences: list[Sequence], tokens: list[Tensor], *, last_only: bool = False
    ) -> Tensor:
        """Return logits of the new tokens (or each sequence's last one); advance the sequences."""
        step = Step.of([each.length for each in sequences], tokens)
        hidden = self.hidden(step, sequences)
        if last_only:
            hidden = hidden[step.token_offsets[1:] - 1]
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.length += len(new)
        return self.bound("head", x=hidden)["out"]

    def hidden(self, step: Step, sequences: list[Sequence]) -> Tensor:
        """Return the normed hidden states [T, D] after the last layer."""
        given = {"x": self.bound("embed", tokens=step.tokens)["out"]}
        for block in self.config.layers:
            given = self.block(block, given, step, sequences)
        return self.bound("norm", **given)["out"]

    def draft(
        self, sequences: list[Sequence], hidden: Tensor, tokens: list[Tensor], drafter: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of the MTP block: `hidden` of token t, id of t + 1."""
        block = self.config.blocks[len(self.config.layers) + drafter]
        p = f"{block.prefix}."
        step = Step.of([each.drafted.get(drafter, 0) for each in sequences], tokens)
        h = self.bound(f"{p}embed", tokens=step.tokens)["out"]
        e = self.bound(f"{p}enorm", x=h)["out"]
        n = self.bound(f"{p}hnorm", x=hidden)["out"]
        x = self.linear(f"{p}eh_proj", self.bound(f"{p}join", e=e, h=n)["out"])
        hidden = self.bound(f"{p}norm", **self.block(block, {"x": x}, step, sequences))["out"]
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.drafted[drafter] = sequence.drafted.get(drafter, 0) + len(new)
        return self.bound(f"{p}head", x=hidden)["out"], hidden

    def block(
        self, block: Block, given: dict[str, Tensor], step: Step, sequences: list[Sequence]
    ) -> dict[str, Tensor]:
        """Run one layer; return its output `x`, and the residual that it was not yet added to."""
        p, work = f"{block.prefix}.", self.bound.numerics.work
        states = [each.block(block.prefix, work) for each in sequences]
        normed = self.bound(f"{p}attn.norm", **given)
        x = self._attention(block, normed["out"], step, states)
        normed = self.bound(f"{p}ffn.norm", x=x, residual=normed["residual"])
        return {"x": self.ffn(block, normed["out"], step), "residual": normed["residual"]}

    def _attention(self, block: Block, x: Tensor, step: Step, states: list[BlockState]) -> Tensor:
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
        self, block: Block, x: Tensor, qr: Tensor, step: Step, states: list[BlockState]
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
