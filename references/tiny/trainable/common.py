"""What the trainable models share: parameters by name, rotations, experts, the indexer's loss.

Legend: B sequences, T tokens, D hidden, W entries or tokens that an indexer ranks, E experts.
Rotations are written in real numbers here, because a compiler cannot fuse complex ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind
from degarble.references import elementary, routing
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.config.config import V4Config, V32Config
    from degarble.harness.model.types import Rope

NUMERICS = Numerics.definition(torch.float32)
EXPERT_PARTS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class Ablation:
    """What is removed to prove that it matters."""

    window_only: bool = False
    random_indexer: bool = False
    dense_entries: bool = False  # all that is visible instead of the indexer's choice


class Turn(NamedTuple):
    """Cos and sin [T, P] of the rotation angles of P pairs."""

    cos: Tensor
    sin: Tensor

    def over_heads(self) -> Turn:
        """Return the same angles for every head."""
        return Turn(self.cos[:, None], self.sin[:, None])


def turn_tail(x: Tensor, turn: Turn, *, inverse: bool = False) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last dims; the leading ones stay."""
    width = 2 * turn.cos.shape[-1]
    pairs = x[..., -width:].unflatten(-1, (-1, 2))
    first, second, sin = pairs[..., 0], pairs[..., 1], -turn.sin if inverse else turn.sin
    turned = torch.stack((first * turn.cos - second * sin, first * sin + second * turn.cos), -1)
    return torch.cat((x[..., :-width], turned.flatten(-2)), dim=-1)


class Trainable(nn.Module):
    """Parameters by their logical names (dots become underscores inside torch)."""

    def __init__(self, config: V4Config | V32Config, seed: int) -> None:
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
        self._turns: dict[tuple[Rope, int, int, torch.device], Turn] = {}

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

    def turn(self, rope: Rope, count: int, stride: int, device: torch.device) -> Turn:
        """Return the angles at `count` positions, `stride` apart; computed once."""
        key = (rope, count, stride, device)
        if key not in self._turns:
            positions = torch.arange(count, device=device) * stride
            table = elementary.rotation_table(rope, positions, NUMERICS)
            self._turns[key] = Turn(table.cos, table.sin)
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
        weight = routing.weights(score_TE, chosen_TK, self._routed_scale, 0.0)
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
