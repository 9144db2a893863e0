"""Error budgets of the compressor: pooled entries and the carried state.

Errors are propagated through the whole chain: gates with their position's bias, softmax over the
slots of a window, weighted sum, stored; norm, stored; rotation, stored; for the indexer also
Hadamard, stored, and rounding to codes. The state is copied plus one float32 sum, hence exact.
State rows that no later call reads may hold anything and are not judged.

Shape letters: W windows, R slots, E width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.bounded_values import (
    FUNCTION,
    Near,
    normed,
    stored,
    turn,
    turned,
)
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.indexer import operand
from degarble.harness.engine.budget.rules import U, exact, output_format
from degarble.references import compressor
from degarble.references.facts import V4Facts, spans_of

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.call import Call
    from degarble.references.compressor import PoolFacts
    from degarble.references.facts import Span
    from degarble.references.numerics import Numerics

_COPIED = "carried rows are copied, gates with one exact sum: nothing may differ"
_WORDS = (
    "shares of slots: the exponential's argument rounds once (2 u of it), functions 4 u",
    "weighted sum of the slots in any order, stored: near a rounding boundary it may step",
    "norm of the entry, stored; rotation, stored; each step is carried on",
)


def pooled(call: Call) -> dict[str, Budget]:
    """Return budgets of the entries, their offsets, and the carried rows."""
    facts = call.known_facts
    assert isinstance(facts, V4Facts), "only V4 compresses"
    numerics, outputs = facts.numerics, call.outputs
    by_part = {
        name.rpartition(".")[2]: weight.values(torch.float64)
        for name, weight in call.weights.items()
    }
    how = facts.pool(by_part["norm"].shape[0])
    bias = by_part["ape"][call.inputs["positions"] % how.ratio]
    made, unread = [], []
    for number, span in enumerate(spans_of(call.inputs)):
        slots, first = _slots(call, number, span, bias, how)
        if slots is not None:
            made.append(_entries(slots, first, by_part["norm"], how, numerics))
        unread.append(_unread(span, how))
    state = {
        name: Budget(
            output_format(outputs[name]), torch.zeros(()), (_COPIED,),
            free=torch.stack(unread)[..., None],
        )
        for name in ("state_latent", "state_gate")
    }  # fmt: skip
    offsets = exact(output_format(torch.zeros(())), "entry_offsets are whole numbers")
    out = exact(output_format(outputs["out"]), "no window was completed")
    if made:
        near = Near(*(torch.cat(parts) for parts in zip(*made, strict=True)))
        words: tuple[str, ...] = _WORDS
        if "indexer" in call.role:
            near = stored(near, numerics.store)  # as the main compressor's entries
            near, more = operand(near, outputs["out"].dtype, numerics)
            words = (*words, *more)
        out = Budget(output_format(outputs["out"]), near.error, words)
    return {"out": out, "entry_offsets": offsets, **state}


def _slots(
    call: Call, number: int, span: Span, bias: Tensor, how: PoolFacts
) -> tuple[tuple[Tensor, Tensor] | None, int]:
    """Return latents and gates [W, R, E] of completed windows, and the first window's number."""
    # Tokens of the incomplete window that earlier calls left in the state, and its number.
    partial, first = span.start % how.ratio, span.start // how.ratio
    complete = (partial + span.count) // how.ratio * how.ratio
    if not complete:
        return None, first
    state = compressor.PoolState(
        call.inputs["state_latent"][number].double(), call.inputs["state_gate"][number].double()
    )
    base = how.ratio if how.overlap else 0
    new = (
        call.inputs["latent"][span.tokens].double(),
        (call.inputs["gate"][span.tokens].double() + bias[span.tokens]),
    )
    latent, gate = (
        torch.cat((old[base : base + partial], rows))[:complete]
        for old, rows in zip((state.latent, state.gate), new, strict=True)
    )
    return compressor.slots_of((latent, gate), state, first, how), first


def _entries(
    slots: tuple[Tensor, Tensor], first: int, norm_E: Tensor, how: PoolFacts, numerics: Numerics
) -> Near:
    latent_WRE, gate_WRE = slots
    share = torch.softmax(gate_WRE, dim=1)
    below = torch.where(share > 0, gate_WRE.amax(1, keepdim=True) - gate_WRE, 0.0)
    size = torch.where(share > 0, gate_WRE.abs(), 0.0)
    relative = U * (2 * below + 2 * size + FUNCTION + 2)
    relative = relative + (share * relative).sum(1, keepdim=True) + U * (share.shape[1] + FUNCTION)
    weight, rows = Near(share, share * relative), latent_WRE
    if numerics.switches.pooling_in_storage_dtype:
        weight, rows = stored(weight, numerics.store), latent_WRE.to(numerics.store).double()
    terms = Near(weight.value * rows, weight.error * rows.abs())
    if numerics.switches.pooling_in_storage_dtype:
        terms = stored(terms, numerics.store)
    added = U * (share.shape[1] + 1) * terms.value.abs().sum(1)
    in_between = numerics.switches.entry_rounded_in_between
    total = Near(terms.value.sum(1), terms.error.sum(1) + added)
    if in_between or numerics.switches.pooling_in_storage_dtype:
        total = stored(total, numerics.store)
    entry = normed(total, norm_E, how.epsilon, numerics.norm_stored_before)
    if in_between:
        entry = stored(entry, numerics.store)
    positions = torch.arange(first, first + len(share)) * how.ratio
    return turned(entry, turn(how.rope, positions, numerics))


def _unread(span: Span, how: PoolFacts) -> Tensor:
    """Return which rows of the carried state no later call reads [R]."""
    free = torch.ones(how.state_rows, dtype=torch.bool)
    base = how.ratio if how.overlap else 0
    # Rows of the window that is still incomplete are read by the next call.
    free[base : base + span.stop % how.ratio] = False
    # With overlapping windows the previous complete window is read again.
    if how.overlap and span.stop >= how.ratio:
        free[: how.ratio] = False
    return free
