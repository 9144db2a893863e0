"""RoPE variants: replace the rotation of any component by one with other parameters.

A `Turn` records frequencies, positions, pairing, end and direction. `turned` recovers a component's
values before their rotation, so that another one can be applied with the same roundings; norms,
Hadamard transform and later roundings remain the component's own code. With the healthy turn the
result equals the component's bit by bit.

Shape letters: N rows, H heads, F features, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.rebinding import (
    block_function,
    with_config,
    with_numerics,
)
from degarble.harness.model.types import End, Pairing
from degarble.references import elementary
from degarble.references.facts import V4Facts, spans_of
from degarble.references.numerics import HeadNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.model.types import Rope

    Tensors = Mapping[str, Tensor]
    Change = Callable[[Tensor, Tensor], Tensor]

_Q = "attn.indexer.q"
POOLS = ("attn.compressor.pool", "attn.indexer.compressor.pool")
HIDDEN = (_Q, "attn.indexer.k", "attn.indexer.compressor.pool")  # a Hadamard transform follows
ROTATING = (
    "attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope", "attn.rope", *POOLS,
    _Q, "attn.indexer.k",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One way to rotate. `times` counts rotations: 0 for none, -1 for the inverse."""

    rope: Rope
    times: int = 1
    scale: float = 1.0  # of positions
    shift: int = 0  # of positions, added after the scale
    longest: int | None = None  # positions beyond it are taken for it
    reciprocal: bool = False  # frequencies upside down
    swapped: bool = False  # the second dim of a pair taken for the first
    sine_first: bool = False  # cosine and sine in each other's place
    halves: bool = False
    first: bool = False


def turn_of(facts: Any, role: str) -> Turn:
    """Return how a component rotates."""
    if isinstance(facts, V4Facts):
        rope = facts.rope
    elif role in HIDDEN:
        rope = facts.config.indexer_rope()
    else:
        rope = facts.config.rope(facts.block)
    inverse = -1 if role == "attn.inverse_rope" else 1
    halves, first = rope.pairing is Pairing.HALVES, rope.end is End.FIRST
    return Turn(rope, inverse, halves=halves, first=first)


def rotate(x: Tensor, positions_N: Tensor, turn: Turn, numerics: Any) -> Tensor:
    """Rotate [N, F] or [N, H, F] in the working dtype."""
    if not turn.times:
        return x
    frequency_P = elementary.frequencies(turn.rope, numerics.work, positions_N.device)
    if turn.reciprocal:
        frequency_P = 1.0 / frequency_P
    at = positions_N.to(numerics.work) * turn.scale + turn.shift
    if turn.longest is not None:
        at = at.clamp(max=turn.longest)
    angle_NP = at[:, None] * frequency_P
    cos, sin = angle_NP.cos() * turn.rope.scale, angle_NP.sin() * turn.rope.scale
    if numerics.switches.rotation_in_storage_dtype:
        cos, sin = (each.to(numerics.store).to(numerics.work) for each in (cos, sin))
    if turn.sine_first:
        cos, sin = sin, cos
    table = elementary.Table(cos, sin if turn.times > 0 else -sin)
    for _ in range(abs(turn.times)):
        # More than once for faults that rotate twice.
        x = _rotated(x, table.over_heads if x.ndim == 3 else table, turn)
    return x


def _rotated(x: Tensor, table: elementary.Table, turn: Turn) -> Tensor:
    width = 2 * table.cos.shape[-1]
    begin = 0 if turn.first else x.shape[-1] - width
    part = x[..., begin : begin + width]
    if turn.swapped:
        part = _swapped(part, turn)
    pairs = elementary.rotate_halves if turn.halves else elementary.rotate_interleaved
    parts = (x[..., :begin], pairs(part, table), x[..., begin + width :])
    return torch.cat(parts, dim=-1)


def _swapped(part: Tensor, turn: Turn) -> Tensor:
    if turn.halves:
        return torch.cat(part.chunk(2, -1)[::-1], dim=-1)
    made: Tensor = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return made


def turned(
    facts: Any, role: str, inputs: Tensors, weights: Mapping[str, Any], change: Change
) -> Tensors:
    """Run a component with `change(values, positions)` in place of its rotation."""
    if role in POOLS:
        return _pooled(facts, role, inputs, weights, change)
    numerics, positions = facts.numerics, inputs["positions"]
    work, store = numerics.work, numerics.store
    if role == "attn.rope":
        q_THd = inputs["q"].reshape(len(positions), -1, facts.config.qk_head_dim).to(work)
        parts = {"q": q_THd, "key": inputs["key"].to(work)}
        return {name: change(part, positions).to(store) for name, part in parts.items()}
    if role == "attn.inverse_rope":
        return {"out": change(inputs["x"].to(work), positions).to(store).flatten(1)}
    if role in HIDDEN:
        return {"out": _hidden(facts, role, inputs, weights, change)}
    still = _unscaled(facts, role)
    if role == "attn.q_head_norm_rope" and numerics.switches.head_norm is HeadNorm.ONCE:
        still = with_numerics(still, store=work)
    # Position 0 is the identity: the component's own code then returns unrotated rows.
    at_zero = {**inputs, "positions": torch.zeros_like(positions)}
    x = block_function(facts, role)(still, at_zero, weights)["out"].to(work)
    return {"out": change(x, positions).to(store)}


def _hidden(
    facts: Any, role: str, inputs: Tensors, weights: Mapping[str, Any], change: Change
) -> Tensor:
    """Rotate the indexer's queries, or V3.2's keys after their norm."""
    x, positions = inputs["x"], inputs["positions"]
    if role == _Q:
        heads = x.reshape(len(positions), -1, facts.config.index_head_dim)
        return _behind(facts, change(heads.to(facts.numerics.work), positions))
    work = facts.numerics.work
    by_part = {name.rpartition(".")[2]: weights[name].values(work) for name in weights}
    epsilon = facts.norm_epsilon("attn.indexer.k_norm")
    normed = elementary.layer_norm(x, by_part["k_norm"], by_part["bias"], epsilon, facts.numerics)
    return _behind(facts, change(normed.to(work), positions)).squeeze(1)


def _behind(facts: Any, rotated: Tensor) -> Tensor:
    """Apply what the indexer does after a rotation, by running its queries at position 0."""
    zeros = torch.zeros(len(rotated), dtype=torch.int64)
    given = {"x": rotated.to(facts.numerics.store).flatten(1), "positions": zeros}
    found: Tensor = block_function(facts, _Q)(_unscaled(facts, _Q), given, {})["out"]
    return found


def _unscaled(facts: Any, role: str) -> Any:
    """Return facts for which position 0 is the identity; YaRN may scale rows even there."""
    return facts if turn_of(facts, role).rope.scale == 1.0 else with_config(facts, yarn=None)


class _Still(float):
    """A RoPE base with infinite powers, so that every frequency is 0 and no pair rotates."""

    def __pow__(self, exponent: Any, _modulus: Any = None) -> Any:
        return torch.full_like(exponent, torch.inf)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


_STILL = _Still(1.0)


def _pooled(
    facts: Any, role: str, inputs: Tensors, weights: Mapping[str, Any], change: Change
) -> Tensors:
    """Rotate entries at the first position of their windows."""
    still = with_config(facts, rope_theta=_STILL, compress_rope_theta=_STILL, yarn=None)
    outputs = dict(block_function(facts, POOLS[0])(still, inputs, weights))
    entries, numerics = outputs["out"], facts.numerics
    if not len(entries):
        return outputs
    rotated = change(entries.to(numerics.work), entry_positions(facts, inputs))
    if role in HIDDEN:
        return {**outputs, "out": _behind(facts, rotated).squeeze(1)}
    return {**outputs, "out": rotated.to(numerics.store)}


def entry_positions(facts: Any, inputs: Tensors) -> Tensor:
    """Return the first position of every window that a call completes."""
    ratio = facts.decoder_block.ratio
    return torch.cat(
        [torch.arange(span.start // ratio, span.stop // ratio) * ratio for span in spans_of(inputs)]
    )


def shift_between(candidate: Tensor, expected: Tensor, turn: Turn, most: int) -> int | None:
    """Return the shift of positions, up to `most` either way, that best maps expected to candidate.

    None unless it explains nearly all of the rotated features, or if it is 0.
    """
    frequency_P = elementary.frequencies(turn.rope, torch.float64, candidate.device)
    width = 2 * len(frequency_P)
    c, e = (_complex(each, width, turn) for each in (candidate, expected))
    # A shift by s positions multiplies pair p by exp(i * s * frequency).
    cross_P = (c * e.conj()).flatten(0, -2).sum(0)
    size = float((c.abs() * e.abs()).sum())
    shifts = torch.arange(-most, most + 1)
    angle = shifts[:, None].double() * frequency_P * turn.times
    score = (cross_P * torch.polar(torch.ones_like(angle), -angle)).real.sum(-1)
    best = int(score.argmax())
    if not size or float(score[best]) < 0.98 * size or not int(shifts[best]):
        return None
    return int(shifts[best])


def _complex(x: Tensor, width: int, turn: Turn) -> Tensor:
    tail = (x[..., :width] if turn.first else x[..., x.shape[-1] - width :]).double()
    if turn.halves:
        tail = torch.stack(tail.chunk(2, -1), dim=-1).flatten(-2)
    return torch.view_as_complex(tail.reshape(*tail.shape[:-1], -1, 2).contiguous())


def changed(turn: Turn, **changes: Any) -> Turn:
    """Return the turn with some fields changed."""
    return replace(turn, **changes)
