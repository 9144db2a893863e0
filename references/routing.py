"""The MoE router: which experts a token visits, and with which weights.

Legend: T tokens, E experts, K experts per token, G expert groups.
V4: sqrt(softplus(logit)) scores; the correction bias takes part in the choice only; the first
layers choose by a table of token ids. V3.2: sigmoid scores, choice inside the best groups.
Ties go to the lower expert id (the official code leaves them open).
Sources: DeepSeek-V4 and V3.2-Exp inference/model.py, Gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.references.numerics import cast

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.numerics import Numerics


@dataclass(frozen=True)
class GroupFacts:
    """V3.2's expert groups: how many there are and how many are kept."""

    groups: int
    kept: int


def logits(x_TD: Tensor, weight_ED: Tensor, numerics: Numerics) -> Tensor:
    """Return router logits [T, E] in the working dtype; the official product is in float32."""
    made = torch.nn.functional.linear(cast(x_TD, numerics.work), cast(weight_ED, numerics.work))
    return cast(made, numerics.store) if numerics.switches.router_in_storage_dtype else made


def sqrt_softplus(logit_TE: Tensor) -> Tensor:
    """Return sqrt(log(1 + e^x)), or sqrt(x) beyond 20 as the kernels do."""
    return torch.nn.functional.softplus(logit_TE, beta=1.0, threshold=20.0).sqrt()


def largest(score_TE: Tensor, count: int) -> Tensor:
    """Return ids [T, count] of the largest scores, best first, ties to the lower id."""
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :count]


def grouped_scores(score_TE: Tensor, facts: GroupFacts) -> Tensor:
    """Return scores with all but the best groups at -inf; a group scores its two best experts."""
    score_TGe = score_TE.reshape(score_TE.shape[0], facts.groups, -1)
    worth_TG = torch.sort(score_TGe, dim=-1, descending=True).values[..., :2].sum(-1)
    kept_TK = largest(worth_TG, facts.kept)
    keep_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, kept_TK, value=True)
    return score_TGe.masked_fill(~keep_TG[..., None], -torch.inf).flatten(1)


def weights(score_TE: Tensor, expert_TK: Tensor, scale: float, epsilon: float) -> Tensor:
    """Return weights [T, K] of the chosen experts: shares of the chosen scores, times `scale`."""
    chosen_TK = score_TE.gather(1, expert_TK.long())
    return chosen_TK / (chosen_TK.sum(-1, keepdim=True) + epsilon) * scale
