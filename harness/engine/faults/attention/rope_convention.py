"""M28: RoPE follows another convention: pairing, base, direction, positions, end or count.

All shapes fit, so nothing fails; position 0 is exact and the error grows with the position. Entries
may be rotated at their own number instead of at their first token, layers may share a base that
they should not share, frequencies may be inverted (mlx-lm issue 1189, sglang issue 30342, Primus
issue 930).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.activation_regions import differing
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Reach,
    Way,
    from_ways,
    with_inputs,
)
from degarble.harness.engine.faults.rebinding import facts_at, with_function
from degarble.harness.engine.faults.rope_variants import (
    HIDDEN,
    POOLS,
    ROTATING,
    changed,
    entry_positions,
    rotate,
    shift_between,
    turn_of,
    turned,
)
from degarble.harness.model.config.config import V4Config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight
    from degarble.harness.engine.faults.rope_variants import Turn
    from degarble.harness.model.types import Rope

THETAS = (10000.0, 160000.0, 500000.0, 1000000.0)  # of released configs
FARTHEST = 4096  # positions that a shift is looked for
_PLACED = tuple(role for role in ROTATING if role not in POOLS)


def sits(scene: Scene) -> bool:
    """Return whether the component rotates anything."""
    return scene.role in ROTATING


def turning(scene: Scene, words: str, turn: Turn, since: int = 0, **where: Any) -> Way:
    """Return the way that rotates otherwise, from a position on."""
    role = scene.role

    def function(facts: Any, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
        healthy = turn_of(facts, role)

        def change(x: Tensor, positions: Tensor) -> Tensor:
            made = rotate(x, positions, turn, facts.numerics)
            if not since:
                return made
            here = (positions >= since).reshape(-1, *[1] * (x.ndim - 1))
            return torch.where(here, made, rotate(x, positions, healthy, facts.numerics))

        return turned(facts, role, inputs, weights, change)

    told = f"{words} from position {since} on" if since else words
    places = {"position": since} if since else {}
    return Way(told, with_function(scene, function), {**where, **places})


def _turns(
    *choices: tuple[str, Callable[[Scene, Turn], Turn | None]],
) -> Callable[[Scene], Iterator[Way]]:
    def ways(scene: Scene) -> Iterator[Way]:
        healthy = turn_of(facts_at(scene), scene.role)
        for words, change in choices:
            found = change(scene, healthy)
            if found is not None and found != healthy:
                yield turning(scene, words, found)

    return ways


def _pairing(_scene: Scene, turn: Turn) -> Turn:
    return changed(turn, halves=not turn.halves)


def _end(_scene: Scene, turn: Turn) -> Turn:
    return changed(turn, first=not turn.first)


def _both(scene: Scene, turn: Turn) -> Turn:
    return _end(scene, _pairing(scene, turn))


def _swapped(_scene: Scene, turn: Turn) -> Turn:
    return changed(turn, swapped=True)


def _sine_first(_scene: Scene, turn: Turn) -> Turn:
    return changed(turn, sine_first=True)


def _times(factor: int) -> Callable[[Scene, Turn], Turn]:
    return lambda _scene, turn: changed(turn, times=turn.times * factor)


def _reciprocal(_scene: Scene, turn: Turn) -> Turn:
    return changed(turn, reciprocal=True)


def _numbered(scene: Scene, turn: Turn) -> Turn | None:
    if scene.role not in POOLS:
        return None
    assert scene.component.block is not None, "a pool is in a block"
    return changed(turn, scale=1 / scene.component.block.ratio)


def _last_token(scene: Scene, turn: Turn) -> Turn | None:
    if scene.role not in POOLS:
        return None
    assert scene.component.block is not None, "a pool is in a block"
    return changed(turn, shift=scene.component.block.ratio - 1)


_PAIRED = _turns(
    ("the other pairing of dims", _pairing),
    ("the other end of the head", _end),
    ("the other pairing at the other end", _both),
    ("the two dims of every pair in each other's place", _swapped),
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


def _base_ways(scene: Scene) -> Iterator[Way]:
    """Yield every other base that a config knows or a release uses, with YaRN and without."""
    config, healthy = scene.bound.config, turn_of(facts_at(scene), scene.role)
    own = [config.rope_theta]
    if isinstance(config, V4Config):
        own.append(config.compress_rope_theta)
    seen = {healthy.rope}
    for theta, yarn in product(dict.fromkeys((*map(float, own), *THETAS)), (config.yarn, None)):
        rope = replace(healthy.rope, theta=theta, yarn=yarn)
        if rope not in seen:
            seen.add(rope)
            yield turning(scene, f"rotation {_told(rope)}", changed(healthy, rope=rope))
    if healthy.rope.yarn is not None:
        steep = replace(healthy.rope.yarn, beta_fast=healthy.rope.yarn.beta_slow, beta_slow=32)
        rope = replace(healthy.rope, yarn=steep)
        yield turning(scene, "YaRN with its two betas exchanged", changed(healthy, rope=rope))


def _told(rope: Rope) -> str:
    yarn = "without YaRN" if rope.yarn is None else f"with YaRN by {rope.yarn.factor:g}"
    return f"of base {rope.theta:g} {yarn}"


def _shifted(scene: Scene, shift: int, since: int = 0) -> Way:
    healthy = turn_of(facts_at(scene), scene.role)
    found = changed(healthy, shift=shift)
    return turning(scene, f"positions {shift:+d}", found, since, shift=shift)


def _shift_ways(scene: Scene) -> Iterator[Way]:
    for shift in (1, -1, 7):
        yield _shifted(scene, shift)
    yield _shifted(scene, 1, since=8)


def _onset(scene: Scene, sight: Sight) -> int:
    """Return the position of the first row that differs."""
    name = "q" if scene.role == "attn.rope" else "out"
    mask = differing(sight, name)
    positions = sight.inputs["positions"]
    if scene.role in POOLS:
        positions = entry_positions(facts_at(scene), sight.inputs)
    if mask is None or not len(positions):
        return 0
    rows = mask.any(1).reshape(len(positions), -1).any(1)
    return int(positions[rows].min()) if bool(rows.any()) else 0


def _shift(scene: Scene, sight: Sight) -> Iterator[Way]:
    healthy, since = turn_of(facts_at(scene), scene.role), _onset(scene, sight)
    found: dict[int, None] = dict.fromkeys((1, -1))
    if scene.role in HIDDEN:
        found.update(dict.fromkeys((2, -2, 7)))
    else:
        name = "q" if scene.role == "attn.rope" else "out"
        c, e = sight.outputs[name], sight.expected[name]
        if scene.role == "attn.inverse_rope":
            c, e = (each.reshape(sight.inputs["x"].shape) for each in (c, e))
        if c.shape == e.shape and len(c):
            best = shift_between(c, e, healthy, FARTHEST)
            found.update({} if best is None else {best: None})
    for shift in found:
        yield _shifted(scene, shift)
        if since > 1:
            yield _shifted(scene, shift, since)


def _held(scene: Scene, longest: int) -> Way:
    healthy = turn_of(facts_at(scene), scene.role)
    words = f"a table of angles that ends at position {longest}"
    return turning(scene, words, changed(healthy, longest=longest), longest=longest)


def _held_ways(scene: Scene) -> Iterator[Way]:
    for longest in (3, 16, 127):
        yield _held(scene, longest)


def _held_too_long(scene: Scene, sight: Sight) -> Iterator[Way]:
    since = _onset(scene, sight)
    if since:
        ratio = scene.component.block.ratio if scene.component.block else 0
        steps = range(1, ratio + 1) if scene.role in POOLS else (1,)
        for back in steps if len(steps) < 8 else (1, ratio):
            yield _held(scene, since - back)
    known = (3, 16, 127, 2048, 4096, 65536)
    yield from (_held(scene, longest) for longest in known if longest != since - 1)


def _arriving(scene: Scene, words: str, change: Callable[[Tensor], Tensor], **where: Any) -> Way:
    del scene

    def passed(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, "positions": change(inputs["positions"])}

    return Way(words, with_inputs(passed), where)


def _plus(shift: int, positions: Tensor) -> Tensor:
    return positions + shift


def _arrival_ways(scene: Scene) -> Iterator[Way]:
    for shift in (1, -1, 2):
        yield _arriving(scene, f"positions {shift:+d} arrive", partial(_plus, shift), shift=shift)
    yield _arriving(scene, "positions of 0 arrive", torch.zeros_like)
    yield _arriving(scene, "positions arrive that begin at 0 in every call", _from_zero)


def _from_zero(positions: Tensor) -> Tensor:
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[1:] = positions[1:] != positions[:-1] + 1
    numbers = torch.arange(len(positions))
    first = torch.where(begins, numbers, 0).cummax(0).values
    return numbers - first


def _arrivals(scene: Scene, sight: Sight) -> Iterator[Way]:
    arrived, implied = sight.inputs.get("positions"), sight.implied.get("positions")
    if arrived is None or implied is None or arrived.shape != implied.shape:
        return
    gaps = (arrived - implied).unique().tolist()
    if len(gaps) == 1 and gaps[0]:
        shift = gaps[0]
        yield _arriving(scene, f"positions {shift:+d} arrive", partial(_plus, shift), shift=shift)
    yield from list(_arrival_ways(scene))[3:]


def _fault(name: str, title: str, ways: Callable[[Scene], Iterator[Way]], remedy: str) -> Any:
    return ModelFault(
        id=f"M28.{name}",
        title=title,
        effect="exact at position 0, wrong beyond it; attention loses its sense of place",
        remedy=remedy,
        sits=sits,
        ways=ways,
        signature=from_ways(ways),
    )


_NUMBER = _fault(
    "entry_number", "Compressed entries are rotated at another position than their first token",
    _NUMBERED, "Rotate entry w at position w * ratio.",
)  # fmt: skip

MODEL_FAULTS = (
    _fault(
        "pairing", "A rotation pairs other dims", _PAIRED,
        "V4 and MLA pair (2i, 2i + 1) of the last dims, V3.2's indexer (i, i + 32) of the first.",
    ),
    _fault(
        "count", "A rotation is missing, done twice, or done in the other direction", _COUNTED,
        "Rotate queries, keys and entries once, and turn attention's output back once.",
    ),
    _fault(
        "base", "A rotation has another base, or YaRN where there is none", _base_ways,
        "Take base and YaRN from the config by layer type: sliding layers have their own.",
    ),
    _fault(
        "reciprocal", "Frequencies are upside down", _UPSIDE_DOWN,
        "Multiply positions by inverse frequencies, or divide by frequencies; not the other way.",
    ),
    replace(_NUMBER, sits=lambda scene: scene.role in POOLS),
    ModelFault(
        id="M28.position",
        title="A rotation takes other positions than those of the tokens",
        effect="attention sees tokens nearer or farther than they are",
        remedy="Count positions from 0, and of the whole sequence.",
        sits=sits,
        ways=_shift_ways,
        signature=_shift,
    ),
    ModelFault(
        id="M28.table_ends",
        title="The table of angles ends before the sequence does",
        effect="exact up to a position, wrong beyond it",
        remedy="Make the table as long as the longest sequence.",
        sits=sits,
        ways=_held_ways,
        signature=_held_too_long,
    ),
    ModelFault(
        id="M28.positions_arrive",
        title="Other positions arrive at a rotation than the step has",
        effect="the rotation is right and its positions are not",
        remedy="Look at who makes the positions of a step: prefill, decode, splits.",
        sits=lambda scene: scene.role in _PLACED,
        ways=_arrival_ways,
        signature=_arrivals,
        reach=Reach.EDGE,
    ),
)  # fmt: skip
