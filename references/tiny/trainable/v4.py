"""DeepSeek-V4 for training: whole batches, dense masks, gradients through everything.

Legend: B sequences, T tokens (a multiple of the window), D hidden, S streams, H heads, L latent
width, N indexer heads, I indexer width, W entries, E experts, n window length, C window chunks.
The same formulas as the components, laid out for a GPU. Top-k passes no gradient, so the indexer
learns from its own loss: the divergence of its softmax from the attention mass that the heads put
on the entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from degarble.harness.model.types import LayerType, MlpType
from degarble.references import elementary, mixing, routing
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

    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block, Kind

_Turns = tuple[Turn, Turn]  # of the tokens, and of the entries


class TrainableV4(Trainable):
    """The whole model; `forward` returns logits and the indexers' loss."""

    def __init__(self, config: V4Config, seed: int = 0) -> None:
        self.config = config
        super().__init__(config, seed)

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, V] and the indexers' loss."""
        batch, length = ids_BT.shape
        h = self["embed"][ids_BT].flatten(0, 1)
        streams = mixing.expand(h, self.config.hc_mult)
        extra = h.new_zeros(())
        for block in self.config.layers:
            for half in ("attn", "ffn"):
                weights = self._mixing(f"{block.prefix}.hc_{half}")
                u, post, mix = mixing_pre(streams, weights, self._facts())
                x = self.norm(u, f"{block.prefix}.{half}_norm")
                if half == "attn":
                    x_BTD = x.unflatten(0, (batch, length))
                    v, loss = self._attention(block, x_BTD, self._turned(block, x_BTD))
                    extra = extra + loss
                    v = v.flatten(0, 1)
                else:
                    v = self._ffn(block, x, ids_BT.flatten())
                streams = mixing.mixing_post(v, streams, post, mix, NUMERICS)
        y = mixing.collapse(streams, self._mixing("hc_head"), self._facts(), NUMERICS)
        logits = self.norm(y, "norm") @ self["head"].T
        return logits.unflatten(0, (batch, length)), extra

    def _facts(self) -> mixing.MixingFacts:
        c = self.config
        return mixing.MixingFacts(c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def _mixing(self, stem: str) -> mixing.MixingWeights:
        return mixing.MixingWeights(*(self[f"{stem}_{part}"] for part in ("fn", "base", "scale")))

    def _turned(self, block: Block, x_BTD: Tensor) -> _Turns:
        rope, length = self.config.rope(block), x_BTD.shape[1]
        tokens = self.turn(rope, length, 1, x_BTD.device)
        ratio = block.ratio or 1
        return tokens, self.turn(rope, length // ratio, ratio, x_BTD.device)

    def _attention(self, block: Block, x_BTD: Tensor, turns: _Turns) -> tuple[Tensor, Tensor]:
        c, p, tokens = self.config, f"{block.prefix}.attn.", turns[0]
        qr = self.norm(x_BTD @ self[f"{p}wq_a"].T, f"{p}q_norm")
        q = functional.linear(narrow(qr), narrow(self[f"{p}wq_b"]))
        q = q.unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = elementary.head_rms(q, c.rms_norm_eps, NUMERICS)
        q = narrow(turn_tail(q, tokens.over_heads()))
        kv = self.norm(x_BTD @ self[f"{p}wkv"].T, f"{p}kv_norm")
        kv = narrow(turn_tail(kv, tokens))
        entries = bias = index = None
        loss = x_BTD.new_zeros(())
        if block.ratio and not self.ablation.window_only:
            entries = narrow(self._pooled(block, f"{p}compressor.", x_BTD, turns[1]))
            visible = bias = self._visible(block, x_BTD.shape[1], entries)
            if block.layer_type is LayerType.SPARSE:
                index = self._index_scores(block, x_BTD, qr, turns)
                bias = chosen_bias(index, visible, c.index_topk, self.ablation)
        o, mass = self._attend(q, kv, entries, bias, self[f"{p}attn_sink"])
        if index is not None and mass is not None:
            loss = index_loss(index, mass, visible)
        o = narrow(turn_tail(o.float(), tokens.over_heads(), inverse=True))
        z = o.unflatten(2, (c.o_groups, -1)).flatten(-2)
        wo_a = narrow(self[f"{p}wo_a"]).unflatten(0, (c.o_groups, -1))
        z = torch.einsum("btgk,gok->btgo", z, wo_a).flatten(-2)
        return z.float() @ self[f"{p}wo_b"].T, loss

    def _pooled(self, block: Block, prefix: str, x_BTD: Tensor, turn: Turn) -> Tensor:
        """Return entries [B, W, E] of all complete windows."""
        ratio = block.ratio
        latent = (x_BTD @ self[f"{prefix}wkv"].T).unflatten(1, (-1, ratio))
        gate = (x_BTD @ self[f"{prefix}wgate"].T).unflatten(1, (-1, ratio)) + self[f"{prefix}ape"]
        if self.config.coff(block.index) == 2:
            # As compressor._overlapping: the first half serves the next window's entry.
            width = latent.shape[-1] // 2
            before = functional.pad(latent[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            # Window 0 has no predecessor: its gates are -inf, so they take no weight.
            unseen = functional.pad(gate[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-torch.inf)
            latent = torch.cat((before, latent[..., width:]), dim=2)
            gate = torch.cat((unseen, gate[..., width:]), dim=2)
        pooled = (torch.softmax(gate, dim=2) * latent).sum(2)
        return turn_tail(self.norm(pooled, f"{prefix}norm"), turn)

    def _visible(self, block: Block, length: int, entries: Tensor) -> Tensor:
        """Return 0 where the entry is complete at the token, -inf elsewhere: [T, W]."""
        positions = torch.arange(length, device=entries.device)
        number = torch.arange(entries.shape[1], device=entries.device)
        hidden = number >= torch.div(positions + 1, block.ratio, rounding_mode="floor")[:, None]
        return torch.zeros(hidden.shape, device=entries.device).masked_fill(hidden, -torch.inf)

    def _index_scores(self, block: Block, x_BTD: Tensor, qr: Tensor, turns: _Turns) -> Tensor:
        # The indexer learns from its own loss alone: nothing of it reaches the rest of the model.
        x_BTD, qr = x_BTD.detach(), qr.detach()
        c, p = self.config, f"{block.prefix}.attn.indexer."
        q = (qr @ self[f"{p}wq_b"].T).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        q = turn_tail(q, turns[0].over_heads())
        keys = self._pooled(block, f"{p}compressor.", x_BTD, turns[1])
        weights = x_BTD @ self[f"{p}weights_proj"].T
        return index_scores(q, keys, weights * (c.index_n_heads * c.index_head_dim) ** -0.5)

    def _attend(
        self,
        q_BTHL: Tensor,
        kv_BTL: Tensor,
        entries: Tensor | None,
        bias: Tensor | None,
        sink_H: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, T, H, L] and the mass [B, T, W] that all visible entries would get."""
        n = self.config.sliding_window
        scale = self.config.head_dim**-0.5
        q = q_BTHL.unflatten(1, (-1, n))
        chunk = kv_BTL.unflatten(1, (-1, n))
        # [B, C, 2n, L]: a window of n reaches at most into the previous chunk.
        near = torch.cat((functional.pad(chunk[:, :-1], (0, 0, 0, 0, 1, 0)), chunk), dim=2)
        logit = torch.einsum("bcthl,bcnl->bchtn", q, near).float() * scale
        logit = logit + _band(n, logit.shape[1], logit.device)[:, None]
        parts = [logit]
        far = mass = None
        if entries is not None and bias is not None:
            far = torch.einsum("bcthl,bwl->bchtw", q, entries).float() * scale
            shaped = bias.unflatten(-2, (-1, n)).unsqueeze(-3)  # [.., C, 1, n, W]
            if bias.ndim == 3:
                mass = _dense_mass(far.detach(), n)
            parts.append(far + shaped)
        # The sink is one more logit without a value: it takes part in the sum only.
        sink = sink_H.view(1, 1, -1, 1, 1).expand(*logit.shape[:-1], 1)
        weight = torch.softmax(torch.cat((*parts, sink), -1), -1).to(q.dtype)
        out = torch.einsum("bchtn,bcnl->bcthl", weight[..., : 2 * n], near)
        if far is not None and entries is not None:
            seen = weight[..., 2 * n : 2 * n + far.shape[-1]]
            out = out + torch.einsum("bchtw,bwl->bcthl", seen, entries)
        return out.flatten(1, 2), mass

    def _ffn(self, block: Block, x_TD: Tensor, ids_T: Tensor) -> Tensor:
        c, p = self.config, f"{block.prefix}.ffn."
        score = routing.sqrt_softplus(x_TD @ self[f"{p}gate"].T)
        if block.mlp_type is MlpType.HASH:
            chosen = self[f"{p}gate.tid2eid"][ids_T]
        else:
            # Top-k passes no gradient; the bias is balanced outside of the loss.
            biased = score.detach() + self[f"{p}gate.bias"]
            chosen = biased.topk(c.num_experts_per_tok, -1).indices
            self.loads[block.prefix] = self.load(chosen)
        limit = c.swiglu_limit or None
        routed = self.routed(x_TD, p, self.share(score, chosen), limit)
        return routed + self.dense(x_TD, f"{p}shared_experts.", limit)

    def initial(
        self, name: str, shape: tuple[int, ...], kind: Kind, generator: torch.Generator
    ) -> Tensor:
        """Return the starting value of one parameter."""
        if name.endswith("tid2eid"):
            ids = [
                torch.randperm(self.config.n_routed_experts, generator=generator)[: shape[1]]
                for _ in range(shape[0])
            ]
            return torch.stack(ids)
        if name.endswith("_scale"):
            return torch.full(shape, 0.1)
        if name.endswith("_base"):
            return _initial_base(shape, self.config.hc_mult)
        if name.endswith(("attn_sink", "ape")):
            return torch.zeros(shape)
        return super().initial(name, shape, kind, generator)


def mixing_pre(
    x_TSD: Tensor, weights: mixing.MixingWeights, facts: mixing.MixingFacts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return collapsed input, post and mix as the component does; a graph can hold the calls."""
    count, flat = facts.streams, x_TSD.flatten(1)
    rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + facts.norm_epsilon)
    parts = ((flat @ weights.fn.T) * rho).split([count, count, count * count], dim=1)
    base = weights.base.split([count, count, count * count])
    pre, post, logits = (
        m * weights.scale[i] + b for i, (m, b) in enumerate(zip(parts, base, strict=True))
    )
    mix = mixing.sinkhorn(logits.unflatten(1, (count, count)), facts.iterations, facts.epsilon)
    share = torch.sigmoid(pre) + facts.epsilon
    return (share.unsqueeze(-1) * x_TSD).sum(1), torch.sigmoid(post) * 2.0, mix


def _band(n: int, chunks: int, device: torch.device) -> Tensor:
    """Return 0 for keys of this or the previous chunk in the window, else -inf: [C, n, 2n]."""
    # Indices within the two chunks: queries are in the second, keys in both.
    query = torch.arange(n, device=device)[:, None] + n
    key = torch.arange(2 * n, device=device)[None]
    seen = (key <= query) & (key > query - n)
    band = seen.expand(chunks, n, 2 * n).clone()
    band[0, :, :n] = False  # nothing precedes the first chunk
    return torch.zeros(band.shape, device=device).masked_fill(~band, -torch.inf)


@torch.no_grad()
def _dense_mass(far: Tensor, n: int) -> Tensor:
    """Return the mean over heads of the softmax over all visible entries: [B, T, W]."""
    length, count = far.shape[1] * n, far.shape[-1]
    number = torch.arange(count, device=far.device)
    position = torch.arange(length, device=far.device)
    hidden = number >= torch.div(position + 1, length // count, rounding_mode="floor")[:, None]
    masked = far.masked_fill(hidden.unflatten(0, (-1, 1, n)), -torch.inf)
    # The softmax of a token without visible entries is NaN; its mass is 0.
    return torch.softmax(masked, -1).nan_to_num(0.0).mean(2).flatten(1, 2)


def _initial_base(shape: tuple[int, ...], streams: int) -> Tensor:
    """Pre near one stream's share, post near one, mix near the identity."""
    base = torch.zeros(shape)
    if shape[0] == streams:
        return base - 1.0
    base[:streams] = -1.0
    base[2 * streams :] = (torch.eye(streams) * 4.0).flatten()
    return base
