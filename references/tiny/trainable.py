"""The small models in trainable form: whole batches, dense masks, gradients through everything.

The same formulas as the components, laid out for a GPU. Top-k passes no gradient, so the indexer
learns from its own loss: the divergence of its softmax from the attention mass that the heads put
on the entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind, LayerType, MlpType
from degarble.references import attention, elementary, experts, mixing
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.config.config import V4Config, V32Config
    from degarble.harness.model.types import Block, Rope


# --------------------------------------------------------------------------------------------------
# Shared: parameters by name, rotations, experts, the indexer's loss
#
# Legend: B sequences, T tokens, D hidden, W entries or tokens that an indexer ranks, E experts.
# Rotations are written in real numbers here, because a compiler cannot fuse complex ones.

NUMERICS = Numerics.definition(torch.float32)
EXPERT_PARTS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class Ablation:
    """What is removed to prove that it matters."""

    window_only: bool = False
    random_indexer: bool = False
    dense_entries: bool = False  # all that is visible instead of the indexer's choice


class Rotation(NamedTuple):
    """Cos and sin [T, P] of the rotation angles of P pairs."""

    cos: Tensor
    sin: Tensor

    def over_heads(self) -> Rotation:
        """Return the same angles for every head."""
        return Rotation(self.cos[:, None], self.sin[:, None])


def rotate_last_dims(x: Tensor, turn: Rotation, *, inverse: bool = False) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last dims; the leading ones stay."""
    width = 2 * turn.cos.shape[-1]
    pairs = x[..., -width:].unflatten(-1, (-1, 2))
    first, second, sin = pairs[..., 0], pairs[..., 1], -turn.sin if inverse else turn.sin
    turned = torch.stack((first * turn.cos - second * sin, first * sin + second * turn.cos), -1)
    return torch.cat((x[..., :-width], turned.flatten(-2)), dim=-1)


class Trainable(nn.Module):
    """Parameters by their logical names (dots become underscores inside torch)."""

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__()
        self.ablation = Ablation()
        self._named = parameters(config)
        self._epsilon, self._taken = config.rms_norm_eps, config.num_experts_per_tok
        self._experts, self._routed_scale = config.n_routed_experts, config.routed_scaling_factor
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for parameter in self._named:
            value = self.initial(parameter.name, parameter.shape, parameter.kind, generator)
            trained = value.is_floating_point() and not parameter.name.endswith("gate.bias")
            self.weights[_key(parameter.name)] = nn.Parameter(value, requires_grad=trained)
        self.loads: dict[str, Tensor] = {}
        self._turns: dict[tuple[Rope, int, int, torch.device], Rotation] = {}

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self.weights[_key(name)]
        return weight

    def named(self) -> dict[str, Tensor]:
        """Return every parameter by its logical name."""
        return {p.name: self[p.name].detach() for p in self._named}

    def initial(
        self, name: str, shape: tuple[int, ...], kind: Kind, generator: torch.Generator
    ) -> Tensor:
        """Return the starting value of one parameter."""
        if kind is Kind.NORM:
            return torch.ones(shape)
        if name.endswith("bias"):
            return torch.zeros(shape)
        drawn = torch.randn(shape, generator=generator)
        if kind is Kind.EMBEDDING:
            return drawn * 0.5
        return drawn.mul(0.7 * shape[-1] ** -0.5)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply RMS norm with the weight of that name."""
        return elementary.rms_norm(x, self[name], self._epsilon, NUMERICS)

    def turn(self, rope: Rope, count: int, stride: int, device: torch.device) -> Rotation:
        """Return the angles at `count` positions, `stride` apart; computed once."""
        key = (rope, count, stride, device)
        if key not in self._turns:
            positions = torch.arange(count, device=device) * stride
            table = elementary.rotation_table(rope, positions, NUMERICS)
            self._turns[key] = Rotation(table.cos, table.sin)
        return self._turns[key]

    def routed(self, x_TD: Tensor, prefix: str, share_TE: Tensor, limit: float | None) -> Tensor:
        """Run all experts on all tokens, weighted by their share, which is 0 where not chosen."""
        stacked = {
            part: torch.stack([self[f"{prefix}experts.{e}.{part}"] for e in range(self._experts)])
            for part in EXPERT_PARTS
        }
        gate = torch.einsum("td,efd->tef", x_TD, stacked["w1"])
        up = torch.einsum("td,efd->tef", x_TD, stacked["w3"])
        act = elementary.swiglu(gate, up, limit) * share_TE[..., None]
        return torch.einsum("tef,edf->td", act, stacked["w2"])

    def dense(self, x_TD: Tensor, prefix: str, limit: float | None) -> Tensor:
        """Apply a dense gated layer."""
        w1, w2, w3 = (self[f"{prefix}{part}"] for part in EXPERT_PARTS)
        return elementary.swiglu(x_TD @ w1.T, x_TD @ w3.T, limit) @ w2.T

    def share(self, score_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Return each expert's weight [T, E], 0 where it is not chosen."""
        weight = experts.router_weights(score_TE, chosen_TK, self._routed_scale, 0.0)
        return torch.zeros_like(score_TE).scatter(-1, chosen_TK, weight)

    def load(self, chosen_TK: Tensor) -> Tensor:
        """Return tokens per expert. Trap: bincount synchronises, which a captured graph forbids."""
        numbers = torch.arange(self._experts, device=chosen_TK.device)
        return (chosen_TK.flatten()[:, None] == numbers).sum(0)


def chosen_bias(score_BTW: Tensor, bias_TW: Tensor, count: int, ablation: Ablation) -> Tensor:
    """Return the visibility with everything but the top-k at -inf: [B, T, W]."""
    if ablation.dense_entries:
        return bias_TW.expand(score_BTW.shape)
    score = score_BTW.detach()
    if ablation.random_indexer:
        score = torch.rand(score.shape, device=score.device)
    best = _largest(score + bias_TW, min(count, score.shape[-1]))
    kept = torch.full_like(score, -torch.inf).scatter_(-1, best, 0.0)
    return kept + bias_TW


def _largest(score_BTW: Tensor, count: int) -> Tensor:
    """Return the indices of the largest scores. Ties go to the lower index as in the reference.

    They are frequent, since ReLU makes zeros; a GPU, where models are only trained, leaves them
    open, because that is much faster.
    """
    if score_BTW.is_cuda:
        return score_BTW.topk(count, dim=-1).indices
    return torch.sort(score_BTW, dim=-1, descending=True, stable=True).indices[..., :count]


def index_loss(index_BTW: Tensor, mass_BTW: Tensor, visible_TW: Tensor) -> Tensor:
    """Return the divergence of the indexer's softmax from the heads' attention mass."""
    some = torch.isfinite(visible_TW).any(-1)
    # Trap: the softmax of nothing is NaN, and its gradient stays NaN although the row is left out.
    bias_TW = torch.where(some[:, None], visible_TW, torch.zeros_like(visible_TW))
    logp = torch.log_softmax(index_BTW + bias_TW, -1)
    term = mass_BTW * (torch.log(mass_BTW.clamp(min=1e-9)) - logp.clamp(min=-1e4))
    loss: Tensor = (term.sum(-1) * some).sum() / (some.sum() * term.shape[0]).clamp(min=1)
    return loss


def index_scores(q_BTNI: Tensor, keys_BWI: Tensor, weights_BTN: Tensor) -> Tensor:
    """Return the indexer's scores [B, T, W]: sum over heads of ReLU(q . k) * weight."""
    dots = torch.relu(torch.einsum("btni,bwi->bntw", narrow(q_BTNI), narrow(keys_BWI)))
    return torch.einsum("bntw,btn->btw", dots, narrow(weights_BTN)).float()


def narrow(x: Tensor) -> Tensor:
    """Cast to BF16 on a GPU, where memory traffic bounds attention; elsewhere change nothing."""
    return x.to(torch.bfloat16) if x.is_cuda else x


def _key(name: str) -> str:
    return name.replace(".", "__")


# --------------------------------------------------------------------------------------------------
# DeepSeek-V3.2, in MLA's naive form
#
# Legend: B sequences, T tokens, D hidden, H heads, C latent width, P rotated width, n nope width,
# v value width, N indexer heads, I indexer width, E experts.


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
        self, block: Block, x_BTD: Tensor, turns: tuple[Rotation, ...], visible_TT: Tensor
    ) -> tuple[Tensor, Tensor]:
        c, p = self.config, f"{block.prefix}.attn."
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        qr = self.norm(x_BTD @ self[f"{p}wq_a"].T, f"{p}q_norm")
        q = (qr @ self[f"{p}wq_b"].T).unflatten(-1, (heads, c.qk_head_dim))
        q = narrow(rotate_last_dims(q, turns[0].over_heads()))
        raw = x_BTD @ self[f"{p}wkv_a"].T
        latent = self.norm(raw[..., : c.kv_lora_rank], f"{p}kv_norm")
        key = rotate_last_dims(raw[..., c.kv_lora_rank :], turns[0])
        both = functional.linear(narrow(latent), narrow(self[f"{p}wkv_b"]))
        both = both.unflatten(-1, (heads, nope + c.v_head_dim))
        shared = narrow(key).unsqueeze(2).expand(-1, -1, heads, -1)
        k = torch.cat((both[..., :nope], shared), dim=-1)
        logit = torch.einsum("bthd,bshd->bhts", q, k).float() * attention.softmax_scale(c)
        index = self._index_scores(block, x_BTD, qr, turns[1])
        bias = chosen_bias(index, visible_TT, c.index_topk, self.ablation)
        if self.ablation.window_only:
            bias = bias + _far_rows(x_BTD.shape[1], x_BTD.device)
        with torch.no_grad():
            mass = torch.softmax(logit.detach() + visible_TT, -1).mean(1)
        weight = torch.softmax(logit + bias.unsqueeze(1), -1).to(both.dtype)
        out = torch.einsum("bhts,bshv->bthv", weight, both[..., nope:]).flatten(-2)
        return out.float() @ self[f"{p}wo"].T, index_loss(index, mass, visible_TT)

    def _index_scores(self, block: Block, x_BTD: Tensor, qr: Tensor, turn: Rotation) -> Tensor:
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
        return index_scores(
            _rotate_first_dims(q, turn.over_heads()), _rotate_first_dims(keys, turn), scaled
        )

    def _ffn(self, block: Block, x_TD: Tensor) -> Tensor:
        c, p = self.config, f"{block.prefix}.ffn."
        if block.mlp_type is MlpType.DENSE:
            return self.dense(x_TD, p, None)
        score = torch.sigmoid(x_TD @ self[f"{p}gate"].T)
        biased = score.detach() + self[f"{p}gate.bias"]
        kept = experts.grouped_scores(biased, experts.GroupFacts(c.n_group, c.topk_group))
        chosen = kept.topk(c.num_experts_per_tok, -1).indices
        self.loads[block.prefix] = self.load(chosen)
        routed = self.routed(x_TD, p, self.share(score, chosen), None)
        return routed + self.dense(x_TD, f"{p}shared_experts.", None)


def _rotate_first_dims(x: Tensor, turn: Rotation) -> Tensor:
    """Rotate the FIRST dims in halves (i, i + P): the convention of this indexer."""
    width = turn.cos.shape[-1]
    first, second = x[..., :width], x[..., width : 2 * width]
    turned = (first * turn.cos - second * turn.sin, first * turn.sin + second * turn.cos)
    return torch.cat((*turned, x[..., 2 * width :]), dim=-1)


def _causal(length: int, device: torch.device) -> Tensor:
    """Return 0 up to the token itself, -inf after it: [T, T]."""
    return torch.full((length, length), -torch.inf, device=device).triu(1)


def _far_rows(length: int, device: torch.device) -> Tensor:
    """Return -inf where a key is 128 tokens or more back: [T, T]."""
    return torch.full((length, length), -torch.inf, device=device).tril(-128)


# --------------------------------------------------------------------------------------------------
# DeepSeek-V4
#
# Legend: B sequences, T tokens (a multiple of the window), D hidden, S streams, H heads, L latent
# width, N indexer heads, I indexer width, W entries, E experts, n window length, C window chunks.

_Rotations = tuple[Rotation, Rotation]  # of the tokens, and of the entries


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

    def _turned(self, block: Block, x_BTD: Tensor) -> _Rotations:
        rope, length = self.config.rope(block), x_BTD.shape[1]
        tokens = self.turn(rope, length, 1, x_BTD.device)
        ratio = block.ratio or 1
        return tokens, self.turn(rope, length // ratio, ratio, x_BTD.device)

    def _attention(self, block: Block, x_BTD: Tensor, turns: _Rotations) -> tuple[Tensor, Tensor]:
        c, p, tokens = self.config, f"{block.prefix}.attn.", turns[0]
        qr = self.norm(x_BTD @ self[f"{p}wq_a"].T, f"{p}q_norm")
        q = functional.linear(narrow(qr), narrow(self[f"{p}wq_b"]))
        q = q.unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = elementary.head_rms(q, c.rms_norm_eps, NUMERICS)
        q = narrow(rotate_last_dims(q, tokens.over_heads()))
        kv = self.norm(x_BTD @ self[f"{p}wkv"].T, f"{p}kv_norm")
        kv = narrow(rotate_last_dims(kv, tokens))
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
        o = narrow(rotate_last_dims(o.float(), tokens.over_heads(), inverse=True))
        z = o.unflatten(2, (c.o_groups, -1)).flatten(-2)
        wo_a = narrow(self[f"{p}wo_a"]).unflatten(0, (c.o_groups, -1))
        z = torch.einsum("btgk,gok->btgo", z, wo_a).flatten(-2)
        return z.float() @ self[f"{p}wo_b"].T, loss

    def _pooled(self, block: Block, prefix: str, x_BTD: Tensor, turn: Rotation) -> Tensor:
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
        return rotate_last_dims(self.norm(pooled, f"{prefix}norm"), turn)

    def _visible(self, block: Block, length: int, entries: Tensor) -> Tensor:
        """Return 0 where the entry is complete at the token, -inf elsewhere: [T, W]."""
        positions = torch.arange(length, device=entries.device)
        number = torch.arange(entries.shape[1], device=entries.device)
        hidden = number >= torch.div(positions + 1, block.ratio, rounding_mode="floor")[:, None]
        return torch.zeros(hidden.shape, device=entries.device).masked_fill(hidden, -torch.inf)

    def _index_scores(self, block: Block, x_BTD: Tensor, qr: Tensor, turns: _Rotations) -> Tensor:
        # The indexer learns from its own loss alone: nothing of it reaches the rest of the model.
        x_BTD, qr = x_BTD.detach(), qr.detach()
        c, p = self.config, f"{block.prefix}.attn.indexer."
        q = (qr @ self[f"{p}wq_b"].T).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        q = rotate_last_dims(q, turns[0].over_heads())
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
        score = experts.sqrt_softplus(x_TD @ self[f"{p}gate"].T)
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
