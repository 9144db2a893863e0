"""Error budgets of RoPE rotations, of the norms before them, and of rows read from the cache.

Covers query heads, V4's latent row, V3.2's query and key, the inverse rotation, and the cache's
rounding. Features that are not rotated are copied after the norm. A value stored on the way steps
only where its rounding boundary lies within the error.

Shape letters: T tokens, H heads, L row width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.bounded_values import (
    FUNCTION,
    Near,
    Turn,
    exactly,
    normed,
    stored,
    turn,
    turned,
)
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.grid import cache_grid, reach
from degarble.harness.engine.budget.rules import U, exact, output_format
from degarble.references.facts import V4Facts, V32Facts, single
from degarble.references.numerics import HeadNorm

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.call import Call
    from degarble.references.numerics import Numerics

_WORDS = (
    "angles: 8 u, and the frequency's power 2 ln(theta) u of the angle; functions 4 u",
    "two products and a sum of each pair; features that are not rotated are copied",
)


def query_heads(call: Call) -> dict[str, Budget]:
    """Return the budget of each head's weightless norm, stored as its source does, and RoPE."""
    facts, x, out = _v4(call), call.inputs["x"], call.outputs["out"]
    near = _head_norm(x.reshape(out.shape), facts.config.rms_norm_eps, facts.numerics)
    by = turn(facts.rope, call.inputs["positions"], facts.numerics, heads=True)
    words = (f"norm of {out.shape[-1]}, with what its source stores in between", *_WORDS)
    return _budget(turned(near, by), out, words)


def _head_norm(x: Tensor, epsilon: float, numerics: Numerics) -> Near:
    kind, store = numerics.switches.head_norm, numerics.store
    wide, width = x.double(), x.shape[-1]
    square = wide.square()
    if kind is HeadNorm.EACH_STEP:
        square = square.to(store).double()
    mean = square.mean(-1, keepdim=True)
    near = Near(mean, mean * (width / 2 + 2) * U)
    if kind is HeadNorm.EACH_STEP:
        near = stored(near, store)
        near = stored(Near(near.value + epsilon, near.error), store)
    else:
        near = Near(mean + epsilon, near.error)
    factor = near.value.rsqrt()
    relative = near.error / near.value / 2 + (FUNCTION + 1) * U
    made = Near(factor, factor * relative)
    if kind is HeadNorm.ONCE:
        return Near(wide * factor, (wide * factor).abs() * (relative + U))
    made = stored(made, store)
    return stored(Near(wide * made.value, wide.abs() * made.error), store)


def latent_row(call: Call) -> dict[str, Budget]:
    """Return the budget of V4's shared row: norm, stored, and rotation."""
    facts, out = _v4(call), call.outputs["out"]
    weight = single(call.weights).values(torch.float64)
    numerics = facts.numerics
    near = normed(
        exactly(call.inputs["x"]), weight, facts.config.rms_norm_eps, numerics.norm_stored_before
    )
    by = turn(facts.rope, call.inputs["positions"], numerics)
    words = (f"RMS norm of {out.shape[-1]}, fused with the rotation", *_WORDS)
    if numerics.switches.latent_rounded_before_rotation:
        near = stored(near, numerics.store)
        words = (f"RMS norm of {out.shape[-1]}, stored", *_WORDS)
    return _budget(turned(near, by), out, words)


def turned_back(call: Call) -> dict[str, Budget]:
    """Return the budget of the inverse rotation after attention."""
    facts, x = _v4(call), call.inputs["x"]
    by = turn(facts.rope, call.inputs["positions"], facts.numerics, heads=True)
    back = Turn(by.cos, Near(-by.sin.value, by.sin.error))
    return _budget(turned(exactly(x), back), call.outputs["out"], _WORDS)


def query_and_key(call: Call) -> dict[str, Budget]:
    """Return V3.2's budgets: the rotated tail of every query head, and the shared key."""
    facts = call.known_facts
    assert isinstance(facts, V32Facts), "V4 rotates behind its norms"
    assert facts.block is not None, "asked only inside a block"
    rope, positions = facts.config.rope(facts.block), call.inputs["positions"]
    q, key = call.outputs["q"], call.outputs["key"]
    heads = exactly(call.inputs["q"].reshape(q.shape))
    by = (turn(rope, positions, facts.numerics, heads=heads) for heads in (True, False))
    made = turned(heads, next(by)), turned(exactly(call.inputs["key"]), next(by))
    return {
        "q": _budget(made[0], q, _WORDS)["out"],
        "key": _budget(made[1], key, _WORDS)["out"],
    }


def cache_rows(call: Call) -> dict[str, Budget]:
    """Return the budget of cache rows as read: rotated features copied, others rounded to codes."""
    facts, out = call.known_facts, call.outputs["out"]
    x, plain, block = call.inputs.get("x"), None, 64
    if isinstance(facts, V32Facts):
        x, plain, block = call.inputs["latent"], facts.config.kv_lora_rank, 128
    elif isinstance(facts, V4Facts):
        plain = facts.config.nope_head_dim
    grid = None if facts.numerics.exact else cache_grid(facts.numerics, block)
    if grid is None or x is None:
        return {"out": exact(output_format(out), "rows are copied")}
    slack = torch.zeros(out.shape, dtype=torch.float64)
    slack[..., :plain] = reach(exactly(x[..., :plain]), out.dtype, grid)
    words = (
        f"codes of blocks of {grid.block}: the neighbour only where the quotient's slack reaches",
        "a boundary, another scale only where amax does",
        "a quotient by a power of two is exact"
        if grid.exact_quotient
        else "a quotient errs by 5 u",
        "rotated features are copied",
    )
    return {"out": Budget(output_format(out), slack, words)}


def _v4(call: Call) -> V4Facts:
    facts = call.known_facts
    assert isinstance(facts, V4Facts), "V3.2 rotates elsewhere"
    return facts


def _budget(near: Near, out: Tensor, words: tuple[str, ...]) -> dict[str, Budget]:
    return {"out": Budget(output_format(out), near.error.reshape(out.shape), words)}
