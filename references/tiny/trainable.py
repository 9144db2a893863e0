"""DeepSeek-V4 for training: whole batches, dense masks, gradients through everything.

Legend: B sequences, T tokens (a multiple of the window), D hidden, S streams, H heads, L latent
width, N indexer heads, I indexer width, W entries, E experts, n window length, C window chunks.
The same formulas as the components, laid out for a GPU; suites/references/tiny proves that the two
agree. Top-k passes no gradient, so the indexer learns from its own loss: the divergence of its
softmax from the attention that the heads really paid to the entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from degarble.harness.anatomy.parameters import parameters
from degarble.harness.anatomy.types import Kind, LayerType, MlpType
from degarble.references import elementary, mixing, routing
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.anatomy.config import V4Config
    from degarble.harness.anatomy.types import Block

NUMERICS = Numerics.definition(torch.float32)


@dataclass(frozen=True)
class Ablation:
    """What is taken away to prove that it works."""

    window_only: bool = False
    random_indexer: bool = False
    dense_entries: bool = False  # all visible entries instead of the indexer's choice


class TrainableV4(nn.Module):
    """Parameters by their logical names (dots become underscores inside torch)."""

    def __init__(self, config: V4Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.ablation = Ablation()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for parameter in parameters(config):
            value = _initial(parameter.name, parameter.shape, parameter.kind, config, generator)
            trained = value.is_floating_point() and not parameter.name.endswith("gate.bias")
            self.weights[_key(parameter.name)] = nn.Parameter(value, requires_grad=trained)
        self.loads: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self.weights[_key(name)]
        return weight

    def named(self) -> dict[str, Tensor]:
        """Every parameter by its logical name."""
        return {p.name: self[p.name].detach() for p in parameters(self.config)}

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and the indexers' loss."""
        batch, length = ids_BT.shape
        h = self["embed"][ids_BT].flatten(0, 1)
        streams = mixing.expand(h, self.config.hc_mult)
        extra = h.new_zeros(())
        for block in self.config.layers:
            for half in ("attn", "ffn"):
                weights = self._mixing(f"{block.prefix}.hc_{half}")
                u, post, mix = mixing.mixing_pre(streams, weights, self._facts(), NUMERICS)
                x = self._norm(u, f"{block.prefix}.{half}_norm")
                if half == "attn":
                    v, loss = self._attention(block, x.unflatten(0, (batch, length)))
                    extra = extra + loss
                    v = v.flatten(0, 1)
                else:
                    v = self._ffn(block, x, ids_BT.flatten())
                streams = mixing.mixing_post(v, streams, post, mix, NUMERICS)
        y = mixing.collapse(streams, self._mixing("hc_head"), self._facts(), NUMERICS)
        logits = self._norm(y, "norm") @ self["head"].T
        return logits.unflatten(0, (batch, length)), extra

    def _facts(self) -> mixing.MixingFacts:
        c = self.config
        return mixing.MixingFacts(c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def _mixing(self, stem: str) -> mixing.MixingWeights:
        return mixing.MixingWeights(*(self[f"{stem}_{part}"] for part in ("fn", "base", "scale")))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return elementary.rms_norm(x, self[name], self.config.rms_norm_eps, NUMERICS)

    def _attention(self, block: Block, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        c, p = self.config, f"{block.prefix}.attn."
        positions = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        table = elementary.rotation_table(c.rope(block), positions, NUMERICS)
        qr = self._norm(x_BTD @ self[f"{p}wq_a"].T, f"{p}q_norm")
        q = (qr @ self[f"{p}wq_b"].T).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = elementary.head_rms(q, c.rms_norm_eps, NUMERICS)
        q = elementary.rotate_tail(q, elementary.over_heads(table))
        kv = self._norm(x_BTD @ self[f"{p}wkv"].T, f"{p}kv_norm")
        kv = elementary.rotate_tail(kv, table)
        entries = bias = None
        loss = x_BTD.new_zeros(())
        sparse = block.layer_type is LayerType.SPARSE
        if block.ratio and not self.ablation.window_only:
            entries = self._pooled(block, f"{p}compressor.", x_BTD)
            bias = self._visible(block, positions, entries.shape[1])
            if sparse:
                index = self._index_scores(block, x_BTD, qr, table)
                bias = self._chosen(index, bias)
        o, mass = self._attend(q, kv, entries, bias, self[f"{p}attn_sink"])
        if sparse and mass is not None:
            visible = self._visible(block, positions, mass.shape[-1])
            loss = _index_loss(index, mass, visible)
        o = elementary.rotate_tail(o, elementary.over_heads(table), inverse=True)
        z = o.unflatten(2, (c.o_groups, -1)).flatten(-2)
        wo_a = self[f"{p}wo_a"].unflatten(0, (c.o_groups, -1))
        z = torch.einsum("btgk,gok->btgo", z, wo_a).flatten(-2)
        return z @ self[f"{p}wo_b"].T, loss

    def _pooled(self, block: Block, prefix: str, x_BTD: Tensor) -> Tensor:
        """Entries [B, W, E] of all complete windows."""
        ratio = block.ratio
        latent = (x_BTD @ self[f"{prefix}wkv"].T).unflatten(1, (-1, ratio))
        gate = (x_BTD @ self[f"{prefix}wgate"].T).unflatten(1, (-1, ratio)) + self[f"{prefix}ape"]
        if self.config.coff(block.index) == 2:
            width = latent.shape[-1] // 2
            before = functional.pad(latent[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            unseen = functional.pad(gate[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-torch.inf)
            latent = torch.cat((before, latent[..., width:]), dim=2)
            gate = torch.cat((unseen, gate[..., width:]), dim=2)
        pooled = (torch.softmax(gate, dim=2) * latent).sum(2)
        entries = self._norm(pooled, f"{prefix}norm")
        start = torch.arange(entries.shape[1], device=entries.device) * ratio
        return elementary.rotate_tail(
            entries, elementary.rotation_table(self.config.rope(block), start, NUMERICS)
        )

    def _visible(self, block: Block, positions: Tensor, count: int) -> Tensor:
        """0 where the entry is complete at the token, -inf elsewhere: [T, W]."""
        number = torch.arange(count, device=positions.device)
        hidden = number >= torch.div(positions + 1, block.ratio, rounding_mode="floor")[:, None]
        return torch.zeros(hidden.shape, device=positions.device).masked_fill(hidden, -torch.inf)

    def _index_scores(
        self, block: Block, x_BTD: Tensor, qr: Tensor, table: elementary.Table
    ) -> Tensor:
        # The indexer learns from its own loss alone: nothing of it reaches the rest of the model.
        x_BTD, qr = x_BTD.detach(), qr.detach()
        c, p = self.config, f"{block.prefix}.attn.indexer."
        q = (qr @ self[f"{p}wq_b"].T).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        q = elementary.rotate_tail(q, elementary.over_heads(table))
        keys = self._pooled(block, f"{p}compressor.", x_BTD)
        weights = x_BTD @ self[f"{p}weights_proj"].T
        weights = weights * (c.index_n_heads * c.index_head_dim) ** -0.5
        dots = torch.relu(torch.einsum("btni,bwi->bntw", q, keys))
        return torch.einsum("bntw,btn->btw", dots, weights)

    def _chosen(self, index_BTW: Tensor, bias_TW: Tensor) -> Tensor:
        """The visibility with everything but the indexer's top-k at -inf: [B, T, W]."""
        if self.ablation.dense_entries:
            return bias_TW.expand(index_BTW.shape)
        score = index_BTW.detach()
        if self.ablation.random_indexer:
            score = torch.rand(score.shape, device=score.device)
        count = min(self.config.index_topk, score.shape[-1])
        best = (score + bias_TW).topk(count, dim=-1).indices
        kept = torch.full_like(score, -torch.inf).scatter_(-1, best, 0.0)
        return kept + bias_TW

    def _attend(
        self,
        q_BTHL: Tensor,
        kv_BTL: Tensor,
        entries: Tensor | None,
        bias: Tensor | None,
        sink_H: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, T, H, L] and the mass [B, T, W] that all visible entries would receive."""
        n = self.config.sliding_window
        scale = self.config.head_dim**-0.5
        half = torch.bfloat16 if q_BTHL.is_cuda else q_BTHL.dtype
        q = q_BTHL.to(half).unflatten(1, (-1, n))
        chunk = kv_BTL.to(half).unflatten(1, (-1, n))
        near = torch.cat((functional.pad(chunk[:, :-1], (0, 0, 0, 0, 1, 0)), chunk), dim=2)
        logit = torch.einsum("bcthl,bcnl->bchtn", q, near).float() * scale
        logit = logit + _band(n, logit.shape[1], logit.device)[:, None]
        parts = [logit]
        far = mass = None
        if entries is not None and bias is not None:
            far = torch.einsum("bcthl,bwl->bchtw", q, entries.to(half)).float() * scale
            shaped = bias.unflatten(-2, (-1, n)).unsqueeze(-3)  # [.., C, 1, n, W]
            if bias.ndim == 3:
                mass = _dense_mass(far.detach(), n)
            parts.append(far + shaped)
        sink = sink_H.view(1, 1, -1, 1, 1).expand(*logit.shape[:-1], 1)
        weight = torch.softmax(torch.cat((*parts, sink), -1), -1).to(half)
        out = torch.einsum("bchtn,bcnl->bcthl", weight[..., : 2 * n], near)
        if far is not None and entries is not None:
            seen = weight[..., 2 * n : 2 * n + far.shape[-1]]
            out = out + torch.einsum("bchtw,bwl->bcthl", seen, entries.to(half))
        return out.float().flatten(1, 2), mass

    def _ffn(self, block: Block, x_TD: Tensor, ids_T: Tensor) -> Tensor:
        c, p = self.config, f"{block.prefix}.ffn."
        score = routing.sqrt_softplus(x_TD @ self[f"{p}gate"].T)
        if block.mlp_type is MlpType.HASH:
            chosen = self[f"{p}gate.tid2eid"][ids_T]
        else:
            biased = score.detach() + self[f"{p}gate.bias"]
            chosen = biased.topk(c.num_experts_per_tok, -1).indices
            self.loads[block.prefix] = torch.bincount(
                chosen.flatten(), minlength=c.n_routed_experts
            )
        weight = routing.weights(score, chosen, c.routed_scaling_factor, 0.0)
        share = torch.zeros_like(score).scatter(-1, chosen, weight)
        act = partial(elementary.swiglu, limit=c.swiglu_limit or None)
        stacked = {
            part: torch.stack([self[f"{p}experts.{e}.{part}"] for e in range(c.n_routed_experts)])
            for part in ("w1", "w2", "w3")
        }
        gate = torch.einsum("td,efd->tef", x_TD, stacked["w1"])
        up = torch.einsum("td,efd->tef", x_TD, stacked["w3"])
        routed = torch.einsum("tef,edf->td", act(gate, up) * share[..., None], stacked["w2"])
        names = {part: self[f"{p}shared_experts.{part}"] for part in ("w1", "w2", "w3")}
        shared = act(x_TD @ names["w1"].T, x_TD @ names["w3"].T) @ names["w2"].T
        return routed + shared


def _key(name: str) -> str:
    return name.replace(".", "__")


def _band(n: int, chunks: int, device: torch.device) -> Tensor:
    """0 where a key of this and the previous chunk is in the window, -inf elsewhere: [C, n, 2n]."""
    query = torch.arange(n, device=device)[:, None] + n
    key = torch.arange(2 * n, device=device)[None]
    seen = (key <= query) & (key > query - n)
    band = seen.expand(chunks, n, 2 * n).clone()
    band[0, :, :n] = False  # nothing precedes the first chunk
    return torch.zeros(band.shape, device=device).masked_fill(~band, -torch.inf)


@torch.no_grad()
def _dense_mass(far: Tensor, n: int) -> Tensor:
    """Mean over heads of the softmax over all visible entries: [B, T, W]."""
    length, count = far.shape[1] * n, far.shape[-1]
    number = torch.arange(count, device=far.device)
    position = torch.arange(length, device=far.device)
    hidden = number >= torch.div(position + 1, length // count, rounding_mode="floor")[:, None]
    masked = far.masked_fill(hidden.unflatten(0, (-1, 1, n)), -torch.inf)
    return torch.softmax(masked, -1).nan_to_num(0.0).mean(2).flatten(1, 2)


def _index_loss(index_BTW: Tensor, mass_BTW: Tensor, visible_TW: Tensor) -> Tensor:
    """Divergence of the indexer's softmax from the mass that the heads paid, where any is seen."""
    some = torch.isfinite(visible_TW).any(-1)
    # Trap: the softmax of nothing is NaN, and its gradient stays NaN although the row is left out.
    bias_TW = torch.where(some[:, None], visible_TW, torch.zeros_like(visible_TW))
    logp = torch.log_softmax(index_BTW + bias_TW, -1)
    term = mass_BTW * (torch.log(mass_BTW.clamp(min=1e-9)) - logp.clamp(min=-1e4))
    loss: Tensor = (term.sum(-1) * some).sum() / (some.sum() * term.shape[0]).clamp(min=1)
    return loss


def _initial(
    name: str, shape: tuple[int, ...], kind: Kind, config: V4Config, generator: torch.Generator
) -> Tensor:
    """Starting value of one parameter."""
    if name.endswith("tid2eid"):
        ids = [
            torch.randperm(config.n_routed_experts, generator=generator)[: shape[1]]
            for _ in range(shape[0])
        ]
        return torch.stack(ids)
    if kind is Kind.NORM:
        return torch.ones(shape)
    if name.endswith(("_scale",)):
        return torch.full(shape, 0.1)
    if name.endswith("_base"):
        return _initial_base(shape, config.hc_mult)
    if name.endswith(("attn_sink", "gate.bias", "ape")):
        return torch.zeros(shape)
    drawn = torch.randn(shape, generator=generator)
    if kind is Kind.EMBEDDING:
        return drawn * 0.5
    return drawn.mul(0.7 * shape[-1] ** -0.5)


def _initial_base(shape: tuple[int, ...], streams: int) -> Tensor:
    """Pre near one stream's share, post near one, mix near the identity."""
    base = torch.zeros(shape)
    if shape[0] == streams:
        return base - 1.0
    base[:streams] = -1.0
    base[2 * streams :] = (torch.eye(streams) * 4.0).flatten()
    return base
