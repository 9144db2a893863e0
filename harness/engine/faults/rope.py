"""Faults of RoPE (M28): pairing, base, direction, positions, end or count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    Reach,
    block_function,
    facts_at,
    with_config,
    with_function,
    with_inputs,
    with_numerics,
)
from degarble.harness.engine.faults.regions import differing
from degarble.harness.model.family import family_of
from degarble.harness.model.types import RopeEnd, RopePairing
from degarble.references import elementary
from degarble.references.facts import spans_of
from degarble.references.numerics import HeadNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.model.types import Rope

    Tensors = Mapping[str, Tensor]
    Change = Callable[[Tensor, Tensor], Tensor]


# --------------------------------------------------------------------------------------------------
# RoPE variants: replace the rotation of any component by one with other parameters.
#
# A `RopeVariant` records frequencies, positions, pairing, end and direction. `turned` recovers a
# component's values before their rotation, so that another one can be applied with the same
# roundings; norms, Hadamard transform and later roundings remain the component's own code. With the
# healthy turn the result equals the component's bit by bit.
#
# Shape letters: N rows, H heads, F features, P pairs.


_Q = "attn.indexer.q"
POOLS = ("attn.compressor.pool", "attn.indexer.compressor.pool")
HIDDEN = (_Q, "attn.indexer.k", "attn.indexer.compressor.pool")  # a Hadamard transform follows
ROTATING = (
    "attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope", "attn.rope", *POOLS,
    _Q, "attn.indexer.k",
)  # fmt: skip


@dataclass(frozen=True)
class RopeVariant:
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


def rope_variant_of(facts: Any, role: str) -> RopeVariant:
    """Return how a component rotates."""
    config = facts.config
    rope = config.indexer_rope(facts.block) if role in HIDDEN else config.rope(facts.block)
    inverse = -1 if role == "attn.inverse_rope" else 1
    halves, first = rope.pairing is RopePairing.HALVES, rope.end is RopeEnd.FIRST
    return RopeVariant(rope, inverse, halves=halves, first=first)


def rotate(x: Tensor, positions_N: Tensor, turn: RopeVariant, numerics: Any) -> Tensor:
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
        cos, sin = (tensor.to(numerics.store).to(numerics.work) for tensor in (cos, sin))
    if turn.sine_first:
        cos, sin = sin, cos
    table = elementary.RotationTable(cos, sin if turn.times > 0 else -sin)
    for _ in range(abs(turn.times)):
        # More than once for faults that rotate twice.
        x = _rotated(x, table.over_heads if x.ndim == 3 else table, turn)
    return x


def _rotated(x: Tensor, table: elementary.RotationTable, turn: RopeVariant) -> Tensor:
    width = 2 * table.cos.shape[-1]
    begin = 0 if turn.first else x.shape[-1] - width
    part = x[..., begin : begin + width]
    if turn.swapped:
        part = _swap_pairs(part, turn)
    pairs = elementary.rotate_halves if turn.halves else elementary.rotate_interleaved
    parts = (x[..., :begin], pairs(part, table), x[..., begin + width :])
    return torch.cat(parts, dim=-1)


def _swap_pairs(part: Tensor, turn: RopeVariant) -> Tensor:
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
    return (
        facts if rope_variant_of(facts, role).rope.scale == 1.0 else with_config(facts, yarn=None)
    )


class _NoRotation(float):
    """A RoPE base with infinite powers, so that every frequency is 0 and no pair rotates."""

    def __pow__(self, exponent: Any, _modulus: Any = None) -> Any:
        return torch.full_like(exponent, torch.inf)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


_NO_ROTATION = _NoRotation(1.0)


def _pooled(
    facts: Any, role: str, inputs: Tensors, weights: Mapping[str, Any], change: Change
) -> Tensors:
    """Rotate entries at the first position of their windows."""
    still = with_config(facts, rope_theta=_NO_ROTATION, compress_rope_theta=_NO_ROTATION, yarn=None)
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


def shift_between(candidate: Tensor, expected: Tensor, turn: RopeVariant, most: int) -> int | None:
    """Return the shift of positions, up to `most` either way, that best maps expected to candidate.

    None unless it explains nearly all of the rotated features, or if it is 0.
    """
    frequency_P = elementary.frequencies(turn.rope, torch.float64, candidate.device)
    width = 2 * len(frequency_P)
    c, e = (_complex(tensor, width, turn) for tensor in (candidate, expected))
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


def _complex(x: Tensor, width: int, turn: RopeVariant) -> Tensor:
    tail = (x[..., :width] if turn.first else x[..., x.shape[-1] - width :]).double()
    if turn.halves:
        tail = torch.stack(tail.chunk(2, -1), dim=-1).flatten(-2)
    return torch.view_as_complex(tail.reshape(*tail.shape[:-1], -1, 2).contiguous())


def changed(turn: RopeVariant, **changes: Any) -> RopeVariant:
    """Return the turn with some fields changed."""
    return replace(turn, **changes)


# --------------------------------------------------------------------------------------------------
# M28: RoPE follows another convention: pairing, base, direction, positions, end or count.
#
# All shapes fit, so nothing fails; position 0 is exact and the error grows with the position.
# Entries may be rotated at their own number instead of at their first token, layers may share a
# base that they should not share, frequencies may be inverted (mlx-lm issue 1189, sglang issue
# 30342, Primus issue 930).

THETAS = (10000.0, 160000.0, 500000.0, 1000000.0)  # of released configs
FARTHEST = 4096  # positions that a shift is looked for
_PLACED = tuple(role for role in ROTATING if role not in POOLS)


def sits(context: ComponentContext) -> bool:
    """Return whether the component rotates anything."""
    return context.role in ROTATING


def turning(
    context: ComponentContext, words: str, turn: RopeVariant, since: int = 0, **where: Any
) -> FaultVariant:
    """Return the variant that rotates otherwise, from a position on."""
    role = context.role

    def function(facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
        healthy = rope_variant_of(facts, role)

        def change(x: Tensor, positions: Tensor) -> Tensor:
            made = rotate(x, positions, turn, facts.numerics)
            if not since:
                return made
            here = (positions >= since).reshape(-1, *[1] * (x.ndim - 1))
            return torch.where(here, made, rotate(x, positions, healthy, facts.numerics))

        return turned(facts, role, inputs, weights, change)

    text = f"{words} from position {since} on" if since else words
    places = {"position": since} if since else {}
    return FaultVariant(text, with_function(context, function), {**where, **places})


def _turns(
    *choices: tuple[str, Callable[[ComponentContext, RopeVariant], RopeVariant | None]],
) -> Callable[[ComponentContext], Iterator[FaultVariant]]:
    def variants(context: ComponentContext) -> Iterator[FaultVariant]:
        healthy = rope_variant_of(facts_at(context), context.role)
        for words, change in choices:
            variant = change(context, healthy)
            if variant is not None and variant != healthy:
                yield turning(context, words, variant)

    return variants


def _pairing(_context: ComponentContext, turn: RopeVariant) -> RopeVariant:
    return changed(turn, halves=not turn.halves)


def _end(_context: ComponentContext, turn: RopeVariant) -> RopeVariant:
    return changed(turn, first=not turn.first)


def _both(context: ComponentContext, turn: RopeVariant) -> RopeVariant:
    return _end(context, _pairing(context, turn))


def _with_swapped_pairs(_context: ComponentContext, turn: RopeVariant) -> RopeVariant:
    return changed(turn, swapped=True)


def _sine_first(_context: ComponentContext, turn: RopeVariant) -> RopeVariant:
    return changed(turn, sine_first=True)


def _times(factor: int) -> Callable[[ComponentContext, RopeVariant], RopeVariant]:
    return lambda _context, turn: changed(turn, times=turn.times * factor)


def _reciprocal(_context: ComponentContext, turn: RopeVariant) -> RopeVariant:
    return changed(turn, reciprocal=True)


def _numbered(context: ComponentContext, turn: RopeVariant) -> RopeVariant | None:
    if context.role not in POOLS:
        return None
    assert context.component.block is not None, "a pool is in a block"
    return changed(turn, scale=1 / context.component.block.ratio)


def _last_token(context: ComponentContext, turn: RopeVariant) -> RopeVariant | None:
    if context.role not in POOLS:
        return None
    assert context.component.block is not None, "a pool is in a block"
    return changed(turn, shift=context.component.block.ratio - 1)


_PAIRED = _turns(
    ("the other pairing of dims", _pairing),
    ("the other end of the head", _end),
    ("the other pairing at the other end", _both),
    ("the two dims of every pair in each other's place", _with_swapped_pairs),
    ("cosine and sine in each other's place", _sine_first),
)
_COUNTED = _turns(
    ("no rotation", _times(0)),
    ("the rotation done twice", _times(2)),
    ("the rotation in the other direction", _times(-1)),
)
_UPSIDE_DOWN = _turns(("frequencies upside down", _reciprocal))
_NUMBERED = _turns(
    ("entries rotated at their number", _numbered),
    ("entries rotated at their last token", _last_token),
)


def _base_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield every other base that a config knows or a release uses, with YaRN and without."""
    config, healthy = context.bound.config, rope_variant_of(facts_at(context), context.role)
    own = family_of(config).rope_bases(config)
    seen = {healthy.rope}
    for theta, yarn in product(dict.fromkeys((*map(float, own), *THETAS)), (config.yarn, None)):
        rope = replace(healthy.rope, theta=theta, yarn=yarn)
        if rope not in seen:
            seen.add(rope)
            yield turning(context, f"rotation {_told(rope)}", changed(healthy, rope=rope))
    if healthy.rope.yarn is not None:
        steep = replace(healthy.rope.yarn, beta_fast=healthy.rope.yarn.beta_slow, beta_slow=32)
        rope = replace(healthy.rope, yarn=steep)
        yield turning(context, "YaRN with its two betas exchanged", changed(healthy, rope=rope))


def _told(rope: Rope) -> str:
    yarn = "without YaRN" if rope.yarn is None else f"with YaRN by {rope.yarn.factor:g}"
    return f"of base {rope.theta:g} {yarn}"


def _shifted(context: ComponentContext, shift: int, since: int = 0) -> FaultVariant:
    healthy = rope_variant_of(facts_at(context), context.role)
    variant = changed(healthy, shift=shift)
    return turning(context, f"positions {shift:+d}", variant, since, shift=shift)


def _shift_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for shift in (1, -1, 7):
        yield _shifted(context, shift)
    yield _shifted(context, 1, since=8)


def _onset(context: ComponentContext, record: CallRecord) -> int:
    """Return the position of the first row that differs."""
    name = "q" if context.role == "attn.rope" else "out"
    mask = differing(record, name)
    positions = record.inputs["positions"]
    if context.role in POOLS:
        positions = entry_positions(facts_at(context), record.inputs)
    if mask is None or not len(positions):
        return 0
    rows = mask.any(1).reshape(len(positions), -1).any(1)
    return int(positions[rows].min()) if bool(rows.any()) else 0


def _shift(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    healthy, since = rope_variant_of(facts_at(context), context.role), _onset(context, record)
    found: dict[int, None] = dict.fromkeys((1, -1))
    if context.role in HIDDEN:
        found.update(dict.fromkeys((2, -2, 7)))
    else:
        name = "q" if context.role == "attn.rope" else "out"
        c, e = record.outputs[name], record.expected[name]
        if context.role == "attn.inverse_rope":
            c, e = (tensor.reshape(record.inputs["x"].shape) for tensor in (c, e))
        if c.shape == e.shape and len(c):
            best = shift_between(c, e, healthy, FARTHEST)
            found.update({} if best is None else {best: None})
    for shift in found:
        yield _shifted(context, shift)
        if since > 1:
            yield _shifted(context, shift, since)


def _held(context: ComponentContext, longest: int) -> FaultVariant:
    healthy = rope_variant_of(facts_at(context), context.role)
    words = f"a table of angles that ends at position {longest}"
    return turning(context, words, changed(healthy, longest=longest), longest=longest)


def _held_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for longest in (3, 16, 127):
        yield _held(context, longest)


def _held_too_long(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    since = _onset(context, record)
    if since:
        ratio = context.component.block.ratio if context.component.block else 0
        steps = range(1, ratio + 1) if context.role in POOLS else (1,)
        for back in steps if len(steps) < 8 else (1, ratio):
            yield _held(context, since - back)
    known = (3, 16, 127, 2048, 4096, 65536)
    yield from (_held(context, longest) for longest in known if longest != since - 1)


def _arriving(
    context: ComponentContext, words: str, change: Callable[[Tensor], Tensor], **where: Any
) -> FaultVariant:
    del context

    def passed(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, "positions": change(inputs["positions"])}

    return FaultVariant(words, with_inputs(passed), where)


def _plus(shift: int, positions: Tensor) -> Tensor:
    return positions + shift


def _arrival_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for shift in (1, -1, 2):
        yield _arriving(context, f"positions {shift:+d} arrive", partial(_plus, shift), shift=shift)
    yield _arriving(context, "positions of 0 arrive", torch.zeros_like)
    yield _arriving(context, "positions arrive that begin at 0 in every call", _from_zero)


def _from_zero(positions: Tensor) -> Tensor:
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[1:] = positions[1:] != positions[:-1] + 1
    numbers = torch.arange(len(positions))
    first = torch.where(begins, numbers, 0).cummax(0).values
    return numbers - first


def _arrivals(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    arrived, implied = record.inputs.get("positions"), record.implied.get("positions")
    if arrived is None or implied is None or arrived.shape != implied.shape:
        return
    gaps = (arrived - implied).unique().tolist()
    if len(gaps) == 1 and gaps[0]:
        shift = gaps[0]
        yield _arriving(context, f"positions {shift:+d} arrive", partial(_plus, shift), shift=shift)
    yield from list(_arrival_variants(context))[3:]


def _fault(
    name: str,
    title: str,
    variants: Callable[[ComponentContext], Iterator[FaultVariant]],
    remedy: str,
) -> Any:
    return ModelFault(
        id=f"M28.{name}",
        title=title,
        effect="exact at position 0, wrong beyond it; attention loses its sense of place",
        remedy=remedy,
        applies_to=sits,
        variants=variants,
    )


_NUMBER = _fault(
    "entry_number", "Compressed entries are rotated at another position than their first token",
    _NUMBERED, "Rotate entry w at position w * ratio.",
)  # fmt: skip

ROPE_CONVENTION_FAULTS = (
    _fault(
        "pairing", "A rotation pairs other dims", _PAIRED,
        "V4 and MLA pair (2i, 2i + 1) of the last dims, V3.2's indexer (i, i + 32) of the first.",
    ),
    _fault(
        "count", "A rotation is missing, done twice, or done in the other direction", _COUNTED,
        "Rotate queries, keys and entries once, and turn attention's output back once.",
    ),
    _fault(
        "base", "A rotation has another base, or YaRN where there is none", _base_variants,
        "Take base and YaRN from the config by layer type: sliding layers have their own.",
    ),
    _fault(
        "reciprocal", "Frequencies are upside down", _UPSIDE_DOWN,
        "Multiply positions by inverse frequencies, or divide by frequencies; not the other way.",
    ),
    replace(_NUMBER, applies_to=lambda context: context.role in POOLS),
    ModelFault(
        id="M28.position",
        title="A rotation takes other positions than those of the tokens",
        effect="attention sees tokens nearer or farther than they are",
        remedy="Count positions from 0, and of the whole sequence.",
        applies_to=sits,
        variants=_shift_variants,
        signature=_shift,
    ),
    ModelFault(
        id="M28.table_ends",
        title="The table of angles ends before the sequence does",
        effect="exact up to a position, wrong beyond it",
        remedy="Make the table as long as the longest sequence.",
        applies_to=sits,
        variants=_held_variants,
        signature=_held_too_long,
    ),
    ModelFault(
        id="M28.positions_arrive",
        title="Other positions arrive at a rotation than the step has",
        effect="the rotation is right and its positions are not",
        remedy="Look at who makes the positions of a step: prefill, decode, splits.",
        applies_to=lambda context: context.role in _PLACED,
        variants=_arrival_variants,
        signature=_arrivals,
        reach=Reach.EDGE,
    ),
)  # fmt: skip
