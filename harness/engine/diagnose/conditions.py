"""Find when a fault acts: the simplest rules that separate wrong rows from healthy ones.

A row (or the slot of an expert) is struck if one of its elements exceeds its budget. It is spared
if it is healthy although the cause would change it visibly; where the cause would not, it says
nothing. A rule holds if it covers every struck row and no spared one. If several rules hold, the
data cannot tell which is meant, and they are said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.diagnose.trial import is_by_row, make, rows_of
from degarble.harness.engine.localise.discrepancy import outputs_beyond, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import (
        CallRecord,
        ComponentContext,
        FaultVariant,
    )

FEWEST = 2  # rows on either side
FEWEST_APART = 3  # positions that are so many apart: any two are
SHOWN = 3  # rules that are said
_STRAY = 0.05  # of the struck rows, that a cause may miss by roundings of its own
_MOST_PLACES = 4  # sequences or experts that are listed
_EXTENTS = {
    "tokens": ("only in calls of {} tokens or more", "only in calls of {} tokens or fewer"),
    "length": ("only on sequences of {} tokens or more", "only on sequences of up to {} tokens"),
    "position": ("only from position {} on", "only up to position {}"),
}


@dataclass(frozen=True)
class WhenRule:
    """Where a fault acts: one feature of rows and its values; `words` end a sentence.

    `unknown` are values between those that were struck and those that were spared: no row shows
    whether it acts there.
    """

    feature: str
    values: str
    words: str
    holds: Callable[[int], bool]  # of a row's feature
    unknown: range = range(0)


@dataclass(frozen=True)
class ActiveCondition:
    """The rules that separate struck rows from spared ones, the simplest first."""

    rules: tuple[WhenRule, ...]
    struck: int
    spared: int

    @property
    def sentence(self) -> str:
        """Return when the fault acts, and how many rows speak against its acting elsewhere."""
        first, *others = self.rules
        more = ""
        if others:
            listed = " or ".join(rule.words for rule in others[: SHOWN - 1])
            more = f" (or {listed}: this run cannot tell which)"
        return f"{first.words}{more}, while {self.spared} other rows are healthy"

    @property
    def where(self) -> Mapping[str, str]:
        """Return the first rule as data, and the others that hold as well."""
        first, *others = self.rules
        found = {first.feature: first.values}
        if others:
            found["or"] = "; ".join(f"{each.feature} {each.values}" for each in others)
        return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Features of rows [N], by name, and which of them are struck, or spared."""

    features: Mapping[str, Tensor]
    struck: Tensor
    spared: Tensor


def condition_of(
    context: ComponentContext, records: Sequence[CallRecord], cause: FaultVariant
) -> ActiveCondition | None:
    """Return when a cause acts; None where it acts in all rows, or no rule separates them."""
    labels = [rows for record in records if (rows := _labelled(context, record, cause)) is not None]
    if not labels:
        return None
    names = set.intersection(*(set(rows.features) for rows in labels))
    features = {name: torch.cat([rows.features[name] for rows in labels]) for name in names}
    struck = torch.cat([rows.struck for rows in labels])
    spared = torch.cat([rows.spared for rows in labels])
    if int(struck.sum()) < FEWEST or int(spared.sum()) < FEWEST:
        return None
    rules = tuple(_rules(_Rows(features, struck, spared)))
    return ActiveCondition(rules, int(struck.sum()), int(spared.sum())) if rules else None


def struck_rows(context: ComponentContext, record: CallRecord) -> CallRecord | None:
    """Return the rows of a call that are beyond their budgets; None where all are, or none."""
    if record.implied or not is_by_row(context, record):
        return None
    bad = _beyond(context, record, record.outputs)
    if bad is None:
        return None
    rows = torch.stack([mask.flatten(1).any(1) for mask in bad.values()]).any(0)
    count = int(rows.sum())
    return rows_of(record, rows) if 0 < count < len(rows) else None


def _labelled(context: ComponentContext, record: CallRecord, cause: FaultVariant) -> _Rows | None:
    places = record.places
    if places is None or places.calls is None or record.implied:
        return None
    made = make(context, record, cause)
    bad = _beyond(context, record, record.outputs)
    would = None if made is None else _beyond(context, record, made.outputs)
    if bad is None or would is None:
        return None
    count, experts = len(places.position), record.inputs.get("experts")
    slots = experts is not None and all(mask.shape[:2] == experts.shape for mask in bad.values())
    kept = 2 if slots else 1
    if any(mask.shape[:1] != (count,) for mask in bad.values()):
        return None
    struck, visible = (
        torch.stack([mask.flatten(kept).any(kept) if mask.ndim > kept else mask
                     for mask in side.values()]).any(0)
        for side in (bad, would)
    )  # fmt: skip
    # What was found in some rows may mean others where all are given.
    missed = None if made is None else _beyond(
        context, replace(record, expected=made.outputs), record.outputs
    )  # fmt: skip
    if missed is None or _share(missed, struck, kept) > _STRAY:
        return None
    features = {
        "decode": places.decode.long(), "step": places.calls[:, 0], "tokens": places.calls[:, 1],
        "length": places.calls[:, 2], "sequence": places.sequence, "position": places.position,
    }  # fmt: skip
    if slots and experts is not None:
        features = {n: t[:, None].expand(experts.shape).flatten() for n, t in features.items()}
        features["expert"] = experts.flatten()
    return _Rows(features, struck.flatten(), (visible & ~struck).flatten())


def _share(missed: Mapping[str, Tensor], struck: Tensor, kept: int) -> float:
    """Return the share of struck rows, or slots, with an element that was missed."""
    rows = torch.stack([mask.flatten(kept).any(kept) if mask.ndim > kept else mask
                        for mask in missed.values()]).any(0)  # fmt: skip
    return float(rows[struck].double().mean()) if bool(struck.any()) else 0.0


def _beyond(
    context: ComponentContext, record: CallRecord, outputs: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return which elements are beyond the budget for certain; None where no budget is known."""
    found = outputs_beyond(context, record, outputs)
    if found is None:
        return None
    return {name: bad if sure else torch.zeros_like(bad) for name, (bad, sure) in found.items()}


# ---- rules ---------------------------------------------------------------------------------------


def _rules(rows: _Rows) -> list[WhenRule]:
    """Return the rules that hold, the simplest first."""
    found = [
        *_of_phase(rows), *_of_places(rows, "expert"), *_of_places(rows, "sequence"),
        *_of_steps(rows),
    ]  # fmt: skip
    for feature, words in _EXTENTS.items():
        found += _of_extent(rows, feature, words)
    return found or [*_of_some_steps(rows), *_of_some_positions(rows)]


def _values(rows: _Rows, feature: str) -> tuple[list[int], list[int]] | None:
    """Return the values of a feature of struck and of spared rows; None where it is not known."""
    known = rows.features.get(feature)
    if known is None:
        return None
    sides = [known[mask].unique().tolist() for mask in (rows.struck, rows.spared)]
    return None if min(map(min, sides)) < 0 else (sides[0], sides[1])


def _of_phase(rows: _Rows) -> Iterator[WhenRule]:
    sides = _values(rows, "decode")
    if sides is not None and len(sides[0]) == 1 and not set(sides[0]) & set(sides[1]):
        phase = "decode" if sides[0][0] else "prefill"
        wanted = sides[0][0]
        yield WhenRule("phase", phase, f"only in {phase}", lambda value: value == wanted)


def _of_places(rows: _Rows, feature: str) -> Iterator[WhenRule]:
    sides = _values(rows, feature)
    if sides is None or set(sides[0]) & set(sides[1]) or len(sides[0]) > _MOST_PLACES:
        return
    struck, listed = frozenset(sides[0]), spans(sides[0])
    words = f"only on {feature}{'' if len(struck) == 1 else 's'} {listed}"
    yield WhenRule(feature, listed, words, struck.__contains__)


def _of_steps(rows: _Rows) -> Iterator[WhenRule]:
    sides = _values(rows, "step")
    if sides is None:
        return
    struck, spared = sides
    first, last = min(struck), max(struck)
    if len(struck) == 1 and first not in spared:
        yield WhenRule("step", str(first), f"only in step {first}", lambda step: step == first)
    elif first > max(spared):
        between = range(max(spared) + 1, first)
        words = f"only from step {first} on{_unseen(between)}"
        yield WhenRule("steps", f"from {first}", words, lambda step: step >= first, between)
    elif last < min(spared):
        between = range(last + 1, min(spared))
        words = f"only up to step {last}{_unseen(between)}"
        yield WhenRule("steps", f"to {last}", words, lambda step: step <= last, between)


def _unseen(unknown: range) -> str:
    """Say in which steps no row shows whether it acts; empty where there are none."""
    if not unknown:
        return ""
    steps = f"step {unknown[0]}" if len(unknown) == 1 else f"steps {unknown[0]} to {unknown[-1]}"
    return f" (rows of {steps} do not show it)"


def _of_some_steps(rows: _Rows) -> Iterator[WhenRule]:
    sides = _values(rows, "step")
    if sides is not None and not set(sides[0]) & set(sides[1]):
        struck, listed = frozenset(sides[0]), spans(sides[0])
        yield WhenRule("steps", listed, f"only in steps {listed}", struck.__contains__)


def _of_some_positions(rows: _Rows) -> Iterator[WhenRule]:
    """Yield every so many positions, or a few that are listed."""
    sides = _values(rows, "position")
    if sides is None or set(sides[0]) & set(sides[1]):
        return
    struck, spared = sides
    apart = gcd(*(at - struck[0] for at in struck))
    first = struck[0] % apart if apart else 0
    if len(struck) >= FEWEST_APART and apart > 1 and all(at % apart != first for at in spared):
        words = f"only at every {apart}. position, {first} first"
        values = f"{first} modulo {apart}"
        yield WhenRule("position", values, words, lambda at: at % apart == first)
    elif len(struck) <= _MOST_PLACES:
        listed = spans(struck)
        words = f"only at position{'' if len(struck) == 1 else 's'} {listed}"
        yield WhenRule("position", listed, words, frozenset(struck).__contains__)


def _of_extent(rows: _Rows, feature: str, words: tuple[str, str]) -> Iterator[WhenRule]:
    """Yield a rule of a number that has to be large, or small."""
    sides = _values(rows, feature)
    if sides is None:
        return
    (least, most), (low, high) = (min(sides[0]), max(sides[0])), (min(sides[1]), max(sides[1]))
    if least > high:
        text = words[0].format(least)
        yield WhenRule(feature, f">= {least}", text, lambda value: value >= least)
    elif most < low:
        yield WhenRule(feature, f"<= {most}", words[1].format(most), lambda value: value <= most)
