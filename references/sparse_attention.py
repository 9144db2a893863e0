"""Choose what sparse attention reads: the lightning indexer, and V4's compressed entries.

Sources: DeepSeek-V4 inference/model.py (Compressor, Indexer), and V3.2-Exp's
(Indexer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.references import elementary
from degarble.references.numerics import cast

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.types import Rope
    from degarble.references.numerics import Numerics


# --------------------------------------------------------------------------------------------------
# V4's compressor: windows of m tokens become one latent entry each
#
# Legend: T new tokens of one sequence, m tokens a window, c overlap factor (2 where windows
# overlap, else 1), E entry width, R = c * m state rows, W windows completed by this call.
# Entry w pools window w and, with overlap, the first half of window w - 1's projections; its
# position is the first token of the window. The state rows are the official ones: with overlap rows
# 0..m-1 hold the previous window and rows m..2m-1 the current one, without overlap only the current
# one.


@dataclass(frozen=True)
class PoolFacts:
    """Window length, overlap, entry width, norm epsilon and the rotary embedding of the entries."""

    ratio: int
    overlap: bool
    width: int
    epsilon: float
    rope: Rope

    @property
    def state_rows(self) -> int:
        """Return the rows of carried state for one sequence."""
        return 2 * self.ratio if self.overlap else self.ratio


@dataclass(frozen=True)
class PoolState:
    """Carried projections of one sequence [R, c*E], in the working dtype; the gate includes ape."""

    latent: Tensor
    gate: Tensor


def pool_windows(
    new: tuple[Tensor, Tensor],
    state: PoolState,
    start: int,
    norm_E: Tensor,
    facts: PoolFacts,
    numerics: Numerics,
) -> tuple[Tensor, PoolState]:
    """Return entries [W, E] that rows `new` (latent, gate) from `start` on complete, and the state.

    The state of position 0 may hold anything: no row of it is read.
    """
    ratio, partial, first = facts.ratio, start % facts.ratio, start // facts.ratio
    windows = (partial + new[0].shape[0]) // ratio
    if not windows:
        return new[0].new_empty(0, facts.width, dtype=numerics.store), _filled(
            state, new, partial, facts
        )
    # With overlap the previous window's m rows precede those of the current window.
    base = ratio if facts.overlap else 0
    latent = torch.cat((state.latent[base : base + partial], new[0]))
    gate = torch.cat((state.gate[base : base + partial], new[1]))
    # `latent` and `gate` [partial + T, c*E] start at the first token of window `first`.
    complete = windows * ratio
    slots = slots_of((latent[:complete], gate[:complete]), state, first, facts)
    entries = _entries(slots, first, norm_E, facts, numerics)
    kept = PoolState(
        _remainder(latent, complete, facts),
        _remainder(gate, complete, facts),
    )
    return entries, kept


def slots_of(
    rows: tuple[Tensor, Tensor], state: PoolState, first: int, facts: PoolFacts
) -> tuple[Tensor, Tensor]:
    """Return latents and gates [W, R, E] of windows `first` onward, of the rows [W * m, c * E]."""
    ratio = facts.ratio
    window_latent, window_gate = (part.reshape(-1, ratio, part.shape[1]) for part in rows)
    if not facts.overlap:
        return window_latent, window_gate
    before_gate = state.gate[:ratio]
    if first == 0:
        # Trap: window 0 has no predecessor; a zero gate would still take weight.
        before_gate = torch.full_like(before_gate, -torch.inf)
    before_latent = state.latent[:ratio] if first else torch.zeros_like(state.latent[:ratio])
    return (
        _overlapping(window_latent, before_latent, facts.width),
        _overlapping(window_gate, before_gate, facts.width),
    )


def _overlapping(windows_WmF: Tensor, before_mF: Tensor, width: int) -> Tensor:
    """Return slots [W, 2m, E]: first half of the window before, then second half of this window."""
    # F = 2E columns a token: the first E serve the next window's entry, the last E its own.
    before = torch.cat((before_mF[None], windows_WmF[:-1]))
    return torch.cat((before[..., :width], windows_WmF[..., width:]), dim=1)


def _entries(
    slots: tuple[Tensor, Tensor],
    first: int,
    norm_E: Tensor,
    facts: PoolFacts,
    numerics: Numerics,
) -> Tensor:
    """Return entries: softmax over slots per channel, weighted sum, norm, rotation."""
    latent_WSE, gate_WSE = slots
    weight_WSE = torch.softmax(gate_WSE, dim=1)
    if numerics.switches.pooling_in_storage_dtype:
        product = cast(weight_WSE, numerics.store) * cast(latent_WSE, numerics.store)
        pooled = product.sum(dim=1)
    else:
        pooled = (weight_WSE * latent_WSE).sum(dim=1)
    if numerics.switches.entry_rounded_in_between:
        pooled = cast(pooled, numerics.store)
        normed = elementary.rms_norm(pooled, norm_E, facts.epsilon, numerics)
    else:
        normed = elementary.rms_norm_unrounded(pooled, norm_E, facts.epsilon, numerics)
    windows = torch.arange(first, first + latent_WSE.shape[0], device=normed.device)
    table = elementary.rotation_table(facts.rope, windows * facts.ratio, numerics)
    return elementary.rotate_tail(cast(normed, numerics.work), table).to(numerics.store)


def _filled(
    state: PoolState, new: tuple[Tensor, Tensor], partial: int, facts: PoolFacts
) -> PoolState:
    """Add rows to the current window, which stays incomplete."""
    begin = partial + (facts.ratio if facts.overlap else 0)
    made = []
    for old, rows in ((state.latent, new[0]), (state.gate, new[1])):
        kept = old.clone()
        kept[begin : begin + rows.shape[0]] = rows
        made.append(kept)
    return PoolState(made[0], made[1])


def _remainder(rows: Tensor, complete: int, facts: PoolFacts) -> Tensor:
    """Carry the last complete window (with overlap) and the tokens of the incomplete one."""
    kept = rows.new_zeros(facts.state_rows, rows.shape[1])
    rest = rows[complete:]
    if facts.overlap:
        kept[: facts.ratio] = rows[complete - facts.ratio : complete]
        kept[facts.ratio : facts.ratio + rest.shape[0]] = rest
    else:
        kept[: rest.shape[0]] = rest
    return kept


# --------------------------------------------------------------------------------------------------
# The lightning indexer: scores and top-k of the entries or tokens that a query may attend to
#
# Legend: T tokens, N indexer heads, I indexer head width, W entries, K chosen entries.
# Score of entry w for token t: sum over heads of ReLU(q . k) * weight; entries not yet complete are
# -inf. Ties go to the lower index (the official code leaves them open). -1 marks "no entry".

_SCORE_BYTES = 64 << 20  # bounds the products [T, N, W] of one step; no result depends on it


def visible_entries(positions_T: Tensor, ratio: int) -> Tensor:
    """Return how many entries are complete after token t: floor((t + 1) / ratio)."""
    return torch.div(positions_T + 1, ratio, rounding_mode="floor")


def indexer_scores(
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
        _indexer_part(
            cast(q_TNI[i : i + step], work), keys_IW, cast(weights_TN[i : i + step], work), rounded
        )
        for i in range(0, q_TNI.shape[0], step)
    ]
    score_TW = parts[0] if len(parts) == 1 else torch.cat(parts)
    if visible_T is None:
        return score_TW
    entry_W = torch.arange(entries, device=score_TW.device)
    return score_TW.masked_fill(entry_W >= visible_T[:, None], -torch.inf)


def _indexer_part(q_TNI: Tensor, keys_IW: Tensor, weights_TN: Tensor, rounded: Numerics) -> Tensor:
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
