"""Find which heads of keys and values the query heads of attention met, and other angles of RoPE.

Every head of keys is given to all query heads in turn, so that each of these shows whose outputs it
has. Angles are looked up in the tables that the model's own rotary components make: rows are
rotated by those of a position so many away.

Shape letters: T tokens, H query heads, G heads of keys, D width, P positions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.diagnose.trial import make
from degarble.harness.engine.faults.model_faults import FaultVariant, with_inputs
from degarble.harness.engine.faults.traced.operations import others_of
from degarble.harness.engine.recover.stated import operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.recover.maps import Sides

    Tensors = Mapping[str, Tensor]

ATTENTION, ROTATION, ROTARY = "traced.attention", "traced.rotation", "traced.rotary"
OPERANDS = (("key", "value"), ("key",), ("value",))
MOST_HEADS = 64  # of keys
LISTED = 4  # query heads in a sentence
POSITIONS = 1 << 12  # of a table of angles
FAR = 2.0**-6  # of a cosine: a row that is farther from all of a table is not one of it
STEPS = (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16, 32, -32, 64, -64, 128, -128)


# ---- heads of keys -------------------------------------------------------------------------------


def other_heads(
    context: ComponentContext, record: CallRecord, sides: Sequence[Sides]
) -> Iterator[FaultVariant]:
    """Yield the heads of keys and values that query heads met, where each shows one alone."""
    if context.component.kind != ATTENTION or len(sides) != 1:
        return
    heads, groups = record.inputs["query"].shape[1], record.inputs["key"].shape[1]
    if not 1 < groups <= MOST_HEADS or heads % groups:
        return
    side = sides[0]
    seen, allowed = (x.reshape(-1, heads, side.seen.shape[-1]) for x in (side.seen, side.allowed))
    own = [head * groups // heads for head in range(heads)]
    for names in OPERANDS:
        holds = torch.zeros(groups, heads, dtype=torch.bool)
        for group in range(groups):
            variant = _with_heads(names, (group,) * heads)
            made = make(context, record, variant)
            if made is None or made.outputs[side.output].numel() != seen.numel():
                return
            other = made.outputs[side.output].double().reshape(seen.shape)
            holds[group] = side.equal(seen, other, allowed).all(2).all(0)
        used = [_met(holds[:, head], own[head]) for head in range(heads)]
        if None not in used and used != own:
            yield _with_heads(names, tuple(at for at in used if at is not None), own)


def _met(holds: Tensor, own: int) -> int | None:
    """Return the head that gives what a query head put out; None where none does, or several do."""
    found = holds.nonzero().flatten().tolist()
    if own in found:
        return own
    return found[0] if len(found) == 1 else None


def _with_heads(
    names: tuple[str, ...], used: tuple[int, ...], own: Sequence[int] = ()
) -> FaultVariant:
    changed = [head for head, group in enumerate(own) if used[head] != group]
    what = " and ".join(f"{name}s" for name in names)
    listed = ", ".join(map(str, changed[:LISTED])) + (", ..." if changed[LISTED:] else "")
    met = ", ".join(str(used[head]) for head in changed[:LISTED])
    met += ", ..." if changed[LISTED:] else ""
    if len(changed) == 1:
        words = f"query head {listed} meets head {met} of {what}, not {own[changed[0]]}"
    else:
        words = f"query heads {listed} meet heads {met} of {what}"
    return FaultVariant(words, with_inputs(partial(_heads_taken, names, used)))


@operation
def _heads_taken(names: tuple[str, ...], used: tuple[int, ...], inputs: Tensors) -> Tensors:
    """Return the inputs of attention in which every query head has its own head of keys."""
    heads, groups = inputs["query"].shape[1], inputs["key"].shape[1]
    if len(used) != heads or max(used) >= groups:
        return inputs  # of another extent
    plain = [head * groups // heads for head in range(heads)]
    return {
        **inputs,
        **{
            name: inputs[name][:, list(used) if name in names else plain]
            for name in ("key", "value")
        },
    }


# ---- angles of other positions -------------------------------------------------------------------


def other_angles(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield rotations by the angles of positions so many away."""
    if context.component.kind != ROTATION or not {"cos", "sin"} <= record.inputs.keys():
        return
    given = torch.cat([record.inputs["cos"], record.inputs["sin"]], -1).double()
    for table in _tables(context, record):
        if given.ndim != 2 or given.shape[-1] != 2 * table.shape[-1]:
            continue
        if bool((_nearest(table, given)[1] > FAR).any()):
            continue
        for step in STEPS:
            side = "after" if step > 0 else "before"
            far = f"{abs(step)} position{'s' if abs(step) > 1 else ''}"
            words = f"rows are rotated by the angles of {far} {side} their own"
            yield FaultVariant(words, with_inputs(partial(_at_other_angles, table, step)))
        return


def _tables(context: ComponentContext, record: CallRecord) -> Iterator[Tensor]:
    """Yield cosines and sines [2, P, D] of the model's rotary components."""
    for other in others_of(context):
        if other.component.kind != ROTARY:
            continue
        positions = torch.arange(POSITIONS)
        try:
            made = other.call({"positions": positions}, other.weights)
        except CANNOT_RUN:
            continue
        if {"cos", "sin"} <= made.keys() and made["cos"].shape == made["sin"].shape:
            both = torch.stack([made["cos"], made["sin"]]).to(record.inputs["cos"].dtype)
            yield both


def _nearest(table: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions [T] whose angles are nearest to those of rows, and how far they are."""
    known = torch.cat([table[0], table[1]], -1).double()
    far = torch.cdist(given.reshape(-1, given.shape[-1]), known, p=torch.inf)
    gap, at = far.min(1)
    return at, gap


@operation
def _at_other_angles(table: Tensor, step: int, inputs: Tensors) -> Tensors:
    given = torch.cat([inputs["cos"], inputs["sin"]], -1).double()
    at = (_nearest(table, given)[0] + step).clamp(0, table.shape[1] - 1)
    return {**inputs, "cos": table[0][at], "sin": table[1][at]}
