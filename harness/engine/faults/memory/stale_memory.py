"""M34: a sequence's cached state is stale, empty, shifted, or another sequence's.

A window is not refilled after a prefix cache hit, a history is empty after a split, decoding pools
its current tokens alone, the second chunk of a prompt takes the positions of the first (ATOM issue
1417, transformers issue 48721, llama.cpp issue 26509). Every component replays clean: the fault is
in its inputs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.listed_attention import FAR, by_lists, joined, without
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Reach,
    Way,
    from_ways,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.rebinding import (
    is_v4,
    with_config,
    with_facts,
    with_function,
)
from degarble.harness.model.config.config import compressor_windows
from degarble.references.facts import spans_of
from degarble.references.indexer import scores, visible_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.listed_attention import Listed
    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]
    Change = Callable[[Tensor, list[int]], Tensor]

_ATTEND, _SCORES = "attn.attend", "attn.indexer.scores"
POOLS = ("attn.compressor.pool", "attn.indexer.compressor.pool")
ROWS = ("state_window", "state_compressed", "state_rows", "state_expanded", "state_keys")
WORDS = {
    "state_window": "the window", "state_compressed": "earlier entries",
    "state_rows": "earlier rows", "state_expanded": "earlier keys and values",
    "state_keys": "earlier keys of the indexer",
}  # fmt: skip


def counts_of(scene: Scene, name: str, inputs: Tensors) -> list[int]:
    """Return how many rows of a memory belong to each sequence of a call."""
    block = scene.component.block
    starts = [span.start for span in spans_of(inputs)]
    if name == "state_window":
        reach = scene.bound.config.sliding_window - 1  # type: ignore[union-attr]
        return [min(start, reach) for start in starts]
    ratio = block.ratio if block is not None else 0
    return [start // ratio if ratio else start for start in starts]


def remembered(scene: Scene, words: str, name: str, change: Change) -> Way:
    """Return the way that changes one memory of a sequence where it is received."""

    def passed(inputs: Tensors) -> Tensors:
        if name not in inputs:
            return inputs
        return {**inputs, name: change(inputs[name], counts_of(scene, name, inputs))}

    return Way(f"{WORDS[name]}: {words}", with_inputs(passed), {"memory": name})


def by_sequence(rows: Tensor, counts: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change the rows of each sequence."""
    return torch.cat([change(part) if len(part) else part for part in rows.split(counts)])


def _zeros(rows: Tensor, _counts: list[int]) -> Tensor:
    return torch.zeros_like(rows)


def _rolled(shift: int, rows: Tensor, counts: list[int]) -> Tensor:
    return by_sequence(rows, counts, lambda part: part.roll(shift, 0))


def _last_zero(number: int, rows: Tensor, counts: list[int]) -> Tensor:
    def change(part: Tensor) -> Tensor:
        kept = part.clone()
        kept[max(0, len(part) - number) :] = 0
        return kept

    return by_sequence(rows, counts, change)


def _older_half_zero(rows: Tensor, counts: list[int]) -> Tensor:
    def change(part: Tensor) -> Tensor:
        kept = part.clone()
        kept[: (len(part) + 1) // 2] = 0
        return kept

    return by_sequence(rows, counts, change)


def _first_repeated(rows: Tensor, counts: list[int]) -> Tensor:
    return by_sequence(rows, counts, lambda part: part[:1].expand(part.shape).contiguous())


def _of_other(rows: Tensor, counts: list[int]) -> Tensor:
    """Return the next sequence's rows, repeated or cut to the required number."""
    parts = rows.split(counts)
    made = []
    for number, count in enumerate(counts):
        other = parts[(number + 1) % len(parts)]
        taken = other if len(other) else parts[number]
        made.append(taken.repeat(-(-count // max(1, len(taken))), *[1] * (rows.ndim - 1))[:count])
    return torch.cat(made)


_CHANGES: tuple[tuple[str, Change], ...] = (
    ("never refilled, zeros", _zeros),
    ("shifted by one row", partial(_rolled, 1)),
    ("shifted by one row the other way", partial(_rolled, -1)),
    ("the last row not written yet", partial(_last_zero, 1)),
    ("the last 4 rows not written yet", partial(_last_zero, 4)),
    ("the older half empty", _older_half_zero),
    ("the first row everywhere", _first_repeated),
    ("that of the next sequence", _of_other),
)


def _memories(scene: Scene) -> list[str]:
    return [each.name for each in scene.component.inputs if each.name in ROWS]


def _row_ways(scene: Scene) -> Iterator[Way]:
    for name in _memories(scene):
        for words, change in _CHANGES:
            yield remembered(scene, words, name, change)


def _rows(scene: Scene, sight: Sight) -> Iterator[Way]:
    for way in _row_ways(scene):
        name = str(way.where["memory"])
        if differs(sight, name):
            yield way
    for name in _memories(scene):
        if differs(sight, name):
            yield from _earlier(sight, name)


def _earlier(sight: Sight, name: str) -> Iterator[Way]:
    """Return the same rows as in an earlier call."""
    for other in sight.earlier[::-1]:
        old = other.inputs.get(name)
        if old is not None and old.shape == sight.inputs[name].shape:
            yield Way(
                f"{WORDS[name]}: as they were in step {other.step}",
                with_inputs(partial(_put, name, old)),
                {"memory": name, "step": other.step},
            )


def _put(name: str, value: Tensor, inputs: Tensors) -> Tensors:
    return {**inputs, name: value}


def differs(sight: Sight, name: str) -> bool:
    """Return whether an input is not what its producers imply."""
    arrived, implied = sight.inputs.get(name), sight.implied.get(name)
    if arrived is None or implied is None or arrived.shape != implied.shape:
        return False
    return not torch.equal(arrived, implied)


def _pool_state(words: str, change: Callable[[Tensors, int], Tensors], before: int) -> Way:
    return Way(words, with_inputs(lambda inputs: {**inputs, **change(inputs, before)}))


def _pool_ways(scene: Scene) -> Iterator[Way]:
    block = scene.component.block
    assert block is not None, "a pool is in a block"
    before = block.ratio if compressor_windows(block) == 2 else 0
    if before:
        yield _pool_state("only the current tokens pooled", _without_before, before)
        yield _pool_state("the previous window's state not moved", _not_moved, before)
    yield _pool_state("a state of zeros", _zero_state, before)
    yield _pool_state("a state whose gates see nothing", _blind_state, before)
    yield _pool_state("a state shifted by one row", _rolled_state, before)
    yield _pool_state("the state of the next sequence", _other_state, before)
    yield _pool_state("latents of the state without their gates", _gates_zero, before)


def _without_before(inputs: Tensors, before: int) -> Tensors:
    latent, gate = inputs["state_latent"].clone(), inputs["state_gate"].clone()
    latent[:, :before], gate[:, :before] = 0.0, -torch.inf
    return {"state_latent": latent, "state_gate": gate}


def _not_moved(inputs: Tensors, before: int) -> Tensors:
    made = {}
    for name in ("state_latent", "state_gate"):
        state = inputs[name].clone()
        state[:, :before] = inputs[name][:, before:]
        made[name] = state
    return made


def _zero_state(inputs: Tensors, _before: int) -> Tensors:
    return {name: torch.zeros_like(inputs[name]) for name in ("state_latent", "state_gate")}


def _blind_state(inputs: Tensors, _before: int) -> Tensors:
    return {"state_gate": torch.full_like(inputs["state_gate"], -torch.inf)}


def _rolled_state(inputs: Tensors, _before: int) -> Tensors:
    return {name: inputs[name].roll(1, 1) for name in ("state_latent", "state_gate")}


def _other_state(inputs: Tensors, _before: int) -> Tensors:
    return {name: inputs[name].roll(1, 0) for name in ("state_latent", "state_gate")}


def _gates_zero(inputs: Tensors, _before: int) -> Tensors:
    return {"state_gate": torch.zeros_like(inputs["state_gate"])}


def _pools(scene: Scene, sight: Sight) -> Iterator[Way]:
    if differs(sight, "state_latent") or differs(sight, "state_gate"):
        yield from _pool_ways(scene)


def _seen_ways(scene: Scene) -> Iterator[Way]:
    """Yield ways with another count of visible rows."""
    if scene.role == _SCORES:
        yield Way("the newest entry not visible yet", with_outputs(_newest_masked))
        yield Way("the oldest entry not visible", with_outputs(_oldest_masked))
        yield Way("nothing visible", with_outputs(_all_masked))
        if is_v4(scene):
            words = "an entry visible before its window is full"
            yield Way(words, with_function(scene, _one_early))
    elif is_v4(scene):
        window = scene.bound.config.sliding_window  # type: ignore[union-attr]
        for other in (window - 1, max(1, window // 2), 1):
            words = f"a window of {other} and not {window}"
            yield Way(words, _windowed(scene, other), {"window": other})
        for words, gone in (
            ("the token itself not visible", _itself),
            ("the last place of every list not visible", _last_places),
        ):
            change = partial(by_lists, partial(without, gone))
            yield Way(words, with_function(scene, change))


def _itself(listed: Listed) -> Tensor:
    return listed.place == listed.near - 1


def _last_places(listed: Listed) -> Tensor:
    return _itself(listed) | (listed.place == FAR + listed.far - 1)


def _one_early(facts: Any, inputs: Tensors, _weights: Any) -> Tensors:
    """Make one entry too many visible; an entry not yet written is zeros."""
    ratio, spans = facts.decoder_block.ratio, spans_of(inputs)
    counts = [(each.entries_before(ratio), each.entries_made(ratio)) for each in spans]
    keys = joined(inputs, "keys", counts)
    widest, made = max(map(len, keys)), []
    for span, own in zip(spans, keys, strict=True):
        some = span.tokens
        filled = torch.nn.functional.pad(own, (0, 0, 0, widest - len(own)))
        seen = visible_entries(inputs["positions"][some], ratio) + 1
        part = scores(inputs["q"][some], filled, inputs["weights"][some], seen, facts.numerics)
        made.append(part)
    return {"out": torch.cat(made)}


def _newest_masked(_inputs: Tensors, outputs: Tensors) -> Tensors:
    out = outputs["out"]
    last = out.isfinite().sum(-1, keepdim=True) - 1
    number = torch.arange(out.shape[1])
    return {**outputs, "out": out.masked_fill(number == last, -torch.inf)}


def _oldest_masked(_inputs: Tensors, outputs: Tensors) -> Tensors:
    out = outputs["out"].clone()
    out[:, :1] = -torch.inf
    return {**outputs, "out": out}


def _all_masked(_inputs: Tensors, outputs: Tensors) -> Tensors:
    return {**outputs, "out": torch.full_like(outputs["out"], -torch.inf)}


def _windowed(scene: Scene, window: int) -> Any:
    """Take another window size; of the received memory only that span is left."""
    own = with_facts(scene, partial(with_config, sliding_window=window))

    def trimmed(inputs: Tensors) -> Tensors:
        if "state_window" not in inputs:
            return inputs
        counts = counts_of(scene, "state_window", inputs)
        parts = inputs["state_window"].split(counts)
        kept = [part[max(0, len(part) - window + 1) :] for part in parts]
        return {**inputs, "state_window": torch.cat(kept)}

    trim = with_inputs(trimmed)
    return lambda call: trim(own(call))


MODEL_FAULTS = (
    ModelFault(
        id="M34.rows",
        title="Rows that earlier calls left are stale, empty, shifted, or another sequence's",
        effect="tokens attend to what was never said; a first call is exact",
        remedy="Compare cold and warm runs; refill what the prefix cache does not hold.",
        sits=lambda scene: scene.role in (_ATTEND, _SCORES),
        ways=_row_ways,
        signature=_rows,
        reach=Reach.EDGE,
    ),
    ModelFault(
        id="M34.pool_state",
        title="The compressor's carried state is empty, stale, or another sequence's",
        effect="entries of windows that a call begins in the middle of are wrong",
        remedy="Carry latents and gates of both windows over every split.",
        sits=lambda scene: scene.role in POOLS,
        ways=_pool_ways,
        signature=_pools,
        reach=Reach.EDGE,
    ),
    ModelFault(
        id="M34.visible",
        title="Tokens see other rows than they may",
        effect="the newest or oldest rows are missing, or one is seen too early",
        remedy="Count what is visible by floor((t + 1) / ratio), and the token into its window.",
        sits=lambda scene: scene.role == _SCORES or (scene.role == _ATTEND and is_v4(scene)),
        ways=_seen_ways,
        signature=from_ways(_seen_ways),
    ),
)
