"""DeepSeek-V3.2 for training: whole batches, dense masks, gradients through everything.

Legend: B sequences, T tokens, D hidden, H heads, C latent width, P rotated width, n nope width,
v value width, N indexer heads, I indexer width, E experts.
The same formulas as the components in MLA's naive form. The indexer learns from its own loss, as in
V4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.harness.model.types import MlpType
from degarble.references import elementary, latent_attention, routing
from degarble.references.tiny.trainable.common import (
    NUMERICS,
    Trainable,
    Turn,
    chosen_bias,
    index_loss,
    index_scores,
    narrow,
    turn_tail,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.types import Block


class TrainableV32(Trainable):
    """The whole model; `forward` returns logits and the indexers' loss."""

    def __init__(self, config: V32Config, seed: int = 0) -> None:
        self.config = config
        super().__init__(config, seed)

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, V] and the indexers' loss."""
        batch, length = ids_BT.shape
        h = self["embed"][ids_BT]
        extra = h.new_zeros(())
        visible = _causal(length, h.device)
        for block in self.config.layers:
            turns = tuple(
                self.turn(rope, length, 1, h.device)
                for rope in (self.config.rope(block), self.config.indexer_rope())
            )
            x = self.norm(h, f"{block.prefix}.attn_norm")
            out, loss = self._attention(block, x, turns, visible)
            h, extra = h + out, extra + loss
            x = self.norm(h, f"{block.prefix}.ffn_norm").flatten(0, 1)
            h = h + self._ffn(block, x).unflatten(0, (batch, length))
        return self.norm(h, "norm") @ self["head"].T, extra

    def _attention(
        self, block: Block, x_BTD: Tensor, turns: tuple[Turn, ...], visible_TT: Tensor
    ) -> tuple[Tensor, Tensor]:
        c, p = self.config, f"{block.prefix}.attn."
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        qr = self.norm(x_BTD @ self[f"{p}wq_a"].T, f"{p}q_norm")
        q = (qr @ self[f"{p}wq_b"].T).unflatten(-1, (heads, c.qk_head_dim))
        q = narrow(turn_tail(q, turns[0].over_heads()))
        raw = x_BTD @ self[f"{p}wkv_a"].T
        latent = self.norm(raw[..., : c.kv_lora_rank], f"{p}kv_norm")
        key = turn_tail(raw[..., c.kv_lora_rank :], turns[0])
        both = functional.linear(narrow(latent), narrow(self[f"{p}wkv_b"]))
        both = both.unflatten(-1, (heads, nope + c.v_head_dim))
        shared = narrow(key).unsqueeze(2).expand(-1, -1, heads, -1)
        k = torch.cat((both[..., :nope], shared), dim=-1)
        logit = torch.einsum("bthd,bshd->bhts", q, k).float() * latent_attention.softmax_scale(c)
        index = self._index_scores(block, x_BTD, qr, turns[1])
        bias = chosen_bias(index, visible_TT, c.index_topk, self.ablation)
        if self.ablation.window_only:
            bias = bias + _far(x_BTD.shape[1], x_BTD.device)
        with torch.no_grad():
            mass = torch.softmax(logit.detach() + visible_TT, -1).mean(1)
        weight = torch.softmax(logit + bias.unsqueeze(1), -1).to(both.dtype)
        out = torch.einsum("bhts,bshv->bthv", weight, both[..., nope:]).flatten(-2)
        return out.float() @ self[f"{p}wo"].T, index_loss(index, mass, visible_TT)

    def _index_scores(self, block: Block, x_BTD: Tensor, qr: Tensor, turn: Turn) -> Tensor:
        # The indexer learns from its own loss alone: nothing of it reaches the rest of the model.
        x_BTD, qr = x_BTD.detach(), qr.detach()
        c, p = self.config, f"{block.prefix}.attn.indexer."
        q = (qr @ self[f"{p}wq_b"].T).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        norm = (self[f"{p}k_norm"], self[f"{p}k_norm.bias"])
        keys = elementary.layer_norm(
            x_BTD @ self[f"{p}wk"].T, *norm, INDEXER_NORM_EPSILON, NUMERICS
        )
        weights = x_BTD @ self[f"{p}weights_proj"].T
        scaled = weights * (c.index_n_heads * c.index_head_dim) ** -0.5
        return index_scores(_turn_first(q, turn.over_heads()), _turn_first(keys, turn), scaled)

    def _ffn(self, block: Block, x_TD: Tensor) -> Tensor:
        c, p = self.config, f"{block.prefix}.ffn."
        if block.mlp_type is MlpType.DENSE:
            return self.dense(x_TD, p, None)
        score = torch.sigmoid(x_TD @ self[f"{p}gate"].T)
        biased = score.detach() + self[f"{p}gate.bias"]
        kept = routing.grouped_scores(biased, routing.GroupFacts(c.n_group, c.topk_group))
        chosen = kept.topk(c.num_experts_per_tok, -1).indices
        self.loads[block.prefix] = self.load(chosen)
        routed = self.routed(x_TD, p, self.share(score, chosen), None)
        return routed + self.dense(x_TD, f"{p}shared_experts.", None)


def _turn_first(x: Tensor, turn: Turn) -> Tensor:
    """Rotate the FIRST dims in halves (i, i + P): the convention of this indexer."""
    width = turn.cos.shape[-1]
    first, second = x[..., :width], x[..., width : 2 * width]
    turned = (first * turn.cos - second * turn.sin, first * turn.sin + second * turn.cos)
    return torch.cat((*turned, x[..., 2 * width :]), dim=-1)


def _causal(length: int, device: torch.device) -> Tensor:
    """Return 0 up to the token itself, -inf after it: [T, T]."""
    return torch.full((length, length), -torch.inf, device=device).triu(1)


def _far(length: int, device: torch.device) -> Tensor:
    """Return -inf where a key is 128 tokens or more back: [T, T]."""
    return torch.full((length, length), -torch.inf, device=device).tril(-128)
