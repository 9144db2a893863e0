"""Compare two captures token by token when the same prompts were split into different steps.

Tokens are paired by sequence and position, where prompts agree but their prefills were split
otherwise (in chunks, or batched with others). Compared are outputs that have a row a token in every
call. An output is an origin at a token if all input rows of its sequence up to that token are
equal: a component's memory consists of those. Outputs without a row a token (entries of a
compressor, offsets) are left out and counted, and so is any component that reads them other than as
memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.capture.files.records import Phase
from degarble.harness.engine.localise.judged_run import CosineSums
from degarble.harness.engine.localise.tensor_forms import equal_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.reader import Capture
    from degarble.harness.capture.files.records import CapturedCall, CapturedStep, CapturedTensor

Token = tuple[int, int]  # sequence and position
_MEMORY = "state_"


class Side(NamedTuple):
    """A capture, and the step and row of every token."""

    capture: Capture
    calls: Mapping[str, Sequence[CapturedCall]]
    steps: Mapping[int, CapturedStep]


@dataclass(eq=False)
class Beside:
    """One output over the common tokens; `first` and `own` are tokens."""

    component: str
    output: str
    calls: int = 0
    elements: int = 0
    identical: int = 0
    sums: CosineSums = field(default_factory=CosineSums)
    measured: bool = True
    first: Token | None = None
    own: Token | None = None


def tokens_in_common(first: Capture, second: Capture) -> tuple[Token, ...]:
    """Return the common tokens if the prompts are equal and were split otherwise; else none."""
    cuts = [[_fed(step) for step in each.steps if step.phase is Phase.PREFILL]
            for each in (first, second)]  # fmt: skip
    if cuts[0] == cuts[1]:
        return ()
    one, other = (_by_sequence(each.steps) for each in (first, second))
    prompts = [_by_sequence(s for s in each.steps if s.phase is Phase.PREFILL)
               for each in (first, second)]  # fmt: skip
    if any(prompts[0].get(name) != prompts[1].get(name) for name in {**prompts[0], **prompts[1]}):
        return ()
    return tuple(
        (name, position)
        for name in one
        for position, _ in takewhile(
            lambda pair: pair[1][0] == pair[1][1],
            enumerate(zip(one[name], other.get(name, []), strict=False)),
        )
    )


def _fed(step: CapturedStep) -> tuple[tuple[int, ...], ...]:
    return step.tokens, step.positions, step.sequences


def _by_sequence(steps: Iterable[CapturedStep]) -> dict[int, list[int]]:
    """Return the tokens of each sequence in order of position, up to the first gap."""
    found: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for owner, position, token in zip(step.sequences, step.positions, step.tokens, strict=True):
            if position == len(found[owner]):
                found[owner].append(token)
    return dict(found)


def beside_by_tokens(
    captures: tuple[Capture, Capture], tokens: Sequence[Token]
) -> tuple[list[Beside], int]:
    """Return every output with a row a token on both sides, and the number of those without."""
    sides = [_side(each) for each in captures]
    made, left = [], 0
    for component in sides[0].calls.keys() & sides[1].calls.keys():
        calls = [side.calls[component] for side in sides]
        names = calls[0][0].outputs.keys() & calls[1][0].outputs.keys()
        alike = _alike_until(component, sides, tokens)
        for name in sorted(names):
            pair = _pair(sides, component, "outputs", name)
            if pair is None or _form(pair[0]) != _form(pair[1]):
                left += 1
                continue
            made.append(_beside(component, name, pair, tokens, alike))
    order = list(sides[0].calls)
    return sorted(made, key=lambda each: order.index(each.component)), left


def _side(capture: Capture) -> Side:
    calls: dict[str, list[CapturedCall]] = defaultdict(list)
    for call in capture.calls:
        calls[call.component].append(call)
    return Side(capture, calls, {step.number: step for step in capture.steps})


def _rows(side: Side, component: str, port: str, name: str) -> dict[Token, Tensor] | None:
    """Return the row of every token at a site; None if a call has other rows, or no bytes."""
    found: dict[Token, Tensor] = {}
    for call in side.calls[component]:
        kept: CapturedTensor | None = getattr(call, port).get(name)
        step = side.steps[call.step]
        if kept is None or kept.at is None or not kept.shape:
            return None
        rows = kept.rows if kept.rows is not None else range(len(step.tokens))
        if kept.shape[0] != len(rows) or any(row >= len(step.tokens) for row in rows):
            return None
        tensor = side.capture.tensor(kept)
        for at, row in enumerate(rows):
            found[step.sequences[row], step.positions[row]] = tensor[at]
    return found


def _pair(
    sides: Sequence[Side], component: str, port: str, name: str
) -> tuple[dict[Token, Tensor], dict[Token, Tensor]] | None:
    """Return the rows of both; pad scores and choices, whose width is that of the memory."""
    one, other = (_rows(side, component, port, name) for side in sides)
    if one is None or other is None:
        return None
    widths = {each.shape[0] for side in (one, other) for each in side.values() if each.ndim == 1}
    if len(widths) > 1:
        for side in (one, other):
            for token, each in side.items():
                none = -torch.inf if each.is_floating_point() else -1
                more = (0, max(widths) - each.shape[0])
                side[token] = torch.nn.functional.pad(each, more, value=none)
    return one, other


def _form(rows: Mapping[Token, Tensor]) -> set[tuple[torch.dtype, torch.Size]]:
    return {(each.dtype, each.shape) for each in rows.values()}


def _alike_until(
    component: str, sides: Sequence[Side], tokens: Sequence[Token]
) -> dict[int, int] | None:
    """Return how many leading tokens of each sequence have equal inputs; None if unknown."""
    first = [side.calls[component][0] for side in sides]
    names = {name for call in first for name in call.inputs if not name.startswith(_MEMORY)}
    kept = {name: call.inputs[name] for call in first for name in call.inputs}
    ends: dict[int, int] = {}
    for owner, position in tokens:
        ends[owner] = max(ends.get(owner, 0), position + 1)
    for name in names:
        pair = _pair(sides, component, "inputs", name)
        if pair is None:
            if kept[name].dtype[0] in "IU" and len(kept[name].shape) == 1:
                continue  # offsets: they say how the tokens were cut
            return None
        for owner, position in tokens:
            one, other = (side.get((owner, position)) for side in pair)
            if one is None or other is None or not _same(one, other):
                ends[owner] = min(ends[owner], position)
    return ends


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(equal_elements(one, other).all())


def _beside(
    component: str,
    name: str,
    pair: tuple[dict[Token, Tensor], dict[Token, Tensor]],
    tokens: Sequence[Token],
    alike: Mapping[int, int] | None,
) -> Beside:
    line = Beside(component, name)
    common = [token for token in tokens if token in pair[0] and token in pair[1]]
    line.calls = len(common)
    if not common:
        return line
    one, other = (torch.stack([side[token] for token in common]) for side in pair)
    same = equal_elements(one, other)
    line.elements, line.identical = same.numel(), int(same.sum())
    odd = (~same.reshape(len(common), -1).all(1)).nonzero().flatten().tolist()
    if not odd:
        return line
    line.first = common[odd[0]]
    own = (common[at] for at in odd if alike is not None and common[at][1] < alike[common[at][0]])
    line.own = next(own, None)
    if one.is_floating_point() and one.dtype.itemsize > 1:
        a, b = one.double().flatten(), other.double().flatten()
        known = a.isfinite() & b.isfinite()
        line.sums.add(b[known], a[known])
    else:
        line.measured = False
    return line
