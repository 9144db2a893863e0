"""The lightning indexer: scores and top-k of the entries or tokens that a query may attend to.

Legend: T tokens, N indexer heads, I indexer head width, W entries, K chosen entries.
Score of entry w for token t: sum over heads of ReLU(q . k) * weight; entries not yet complete are
-inf. Ties go to the lower index (the official code leaves them open). -1 marks "no entry".
Sources: DeepSeek-V4 and V3.2-Exp inference/model.py, Indexer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.references.numerics import cast

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.numerics import Numerics

_SCORE_BYTES = 64 << 20  # bounds the products [T, N, W] of one step; no result depends on it


def visible_entries(positions_T: Tensor, ratio: int) -> Tensor:
    """Return how many entries are complete after token t: floor((t + 1) / ratio)."""
    return torch.div(positions_T + 1, ratio, rounding_mode="floor")


def scores(
    q_TNI: Tensor, keys_WI: Tensor, weights_TN: Tensor, visible_T: Tensor | None, rounded: Numerics
) -> Tensor:
    """Return scores [T, W] in the working dtype, -inf where an entry is not visible; None: all are.

    With `indexer_in_storage_dtype` products, weighted products and their sum are stored in turn.
    """
    work, entries = rounded.work, keys_WI.shape[0]
    item = torch.finfo(work).bits // 8
    step = max(1, _SCORE_BYTES // max(1, q_TNI.shape[1] * entries * item))
    keys_IW = cast(keys_WI, work).T
    parts = [
        _part(
            cast(q_TNI[i : i + step], work), keys_IW, cast(weights_TN[i : i + step], work), rounded
        )
        for i in range(0, q_TNI.shape[0], step)
    ]
    score_TW = parts[0] if len(parts) == 1 else torch.cat(parts)
    if visible_T is None:
        return score_TW
    entry_W = torch.arange(entries, device=score_TW.device)
    return score_TW.masked_fill(entry_W >= visible_T[:, None], -torch.inf)


def _part(q_TNI: Tensor, keys_IW: Tensor, weights_TN: Tensor, rounded: Numerics) -> Tensor:
    dots_TNW = torch.relu(torch.matmul(q_TNI, keys_IW))
    if not rounded.switches.indexer_in_storage_dtype:
        return torch.matmul(weights_TN.unsqueeze(1), dots_TNW).squeeze(1)
    weighted = cast(dots_TNW, rounded.store) * cast(weights_TN, rounded.store).unsqueeze(-1)
    if not rounded.switches.indexer_sum_in_storage_dtype:
        weighted = cast(weighted, rounded.work)
    return weighted.sum(dim=1).to(rounded.work)


def top_k(score_TW: Tensor, count: int) -> Tensor:
    """Return indices [T, min(count, W)] of the largest scores, best first, ties to the lower."""
    count = min(count, score_TW.shape[1])
    # A stable descending sort keeps the lower index first among equals, on every device.
    order = torch.sort(score_TW, dim=-1, descending=True, stable=True)
    chosen, best = order.indices[:, :count], order.values[:, :count]
    return chosen.masked_fill(best == -torch.inf, -1)
