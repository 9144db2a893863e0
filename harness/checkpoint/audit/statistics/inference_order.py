"""Infer the packing order of nibbles along K from energies by column.

Swapping nibbles moves codes inside their block of 16, so no statistic of one matrix alone shows it.
But matrices that read the same input share its channels: where a channel is large or small, it is
so in all of them. So the profile of a packed matrix (energy by column) is compared, inside blocks,
with profiles of known order: linears on the same input that are not packed; the norm before it; the
rows of the linear that produces the input. For the last two the sign of the relation is unknown; it
is taken from the means of blocks, which no order inside a block changes.

A matrix without outstanding channels, or without a reference profile, is undecided. Derivation,
power and limits: docs/design-notes/audit_statistics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit.statistics.inferred import FAR, Inferred, best_of, undecided
from degarble.harness.formats.number_formats import NibbleOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BLOCK = 16
ABOUT = "packing order"
_FEWEST_COLUMNS = 128
# Where the codes of a block lie when read low nibble first: position of each logical index.
_EVEN = np.arange(BLOCK)
ORDERS = {
    NibbleOrder.LOW_EVEN.value: _EVEN,
    NibbleOrder.HIGH_EVEN.value: _EVEN ^ 1,
    # Low nibbles hold the first half of a block, high ones the second: GGUF's packing of FP4.
    "halves": np.concatenate([_EVEN[::2], _EVEN[1::2]]),
}
ORDER_NAMES = tuple(ORDERS)


class Kinship(StrEnum):
    """Relation of a reference profile to a packed matrix."""

    SIBLING = "linears on the same input that are not packed"
    NORM = "the norm in front"
    PRODUCER = "the rows of what makes its input"
    EXPERTS = "the rows of what makes the inputs of all experts of its layer, taken together"
    PACKED = "packed linears on the same input"  # shows a difference, not which of them is right


@dataclass(frozen=True, eq=False)
class Reference:
    """A profile of known order: one logarithm for each column."""

    kinship: Kinship
    logs: NDArray[np.float64]

    @cached_property
    def templates(self) -> NDArray[np.float64]:
        """The profile as each order would show it, read low nibble first; unit length."""
        blocks = _inside(self.logs).reshape(-1, BLOCK)
        # argsort(p) inverts `p`: the logical index of the code at each stored position.
        stacked = np.stack([blocks[:, np.argsort(p)].reshape(-1) for p in ORDERS.values()])
        return _of_length_one(stacked)

    @cached_property
    def means(self) -> NDArray[np.float64]:
        """Means of blocks, at unit length."""
        return _of_length_one(_means(self.logs))


def logs_of(energies: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return binary logarithms of a profile; zero columns take its smallest value."""
    wide = energies.astype(np.float64)
    positive = wide[(wide > 0) & np.isfinite(wide)]
    if not len(positive):
        return np.zeros(len(wide))
    kept = np.clip(np.nan_to_num(wide, posinf=positive.max()), positive.min(), None)
    logs: NDArray[np.float64] = np.log2(kept)
    return logs


def infer_order(columns: NDArray[np.float32], references: Sequence[Reference]) -> Inferred:
    """Infer the packing order from a profile read low nibble first; the best reference counts."""
    fitting = [each for each in references if len(each.logs) == len(columns)]
    if len(columns) < _FEWEST_COLUMNS or len(columns) % BLOCK:
        return undecided(ABOUT, f"{len(columns)} columns are too few")
    if not fitting:
        return undecided(ABOUT, "no profile of known order for this input")
    profile = logs_of(columns)
    found = [_judge(profile, each) for each in fitting]
    return max(found, key=lambda each: (each.is_decided, max(each.evidence.values(), default=0.0)))


def infer_shared_order(
    columns: Sequence[NDArray[np.float32]], references: Sequence[Reference]
) -> Inferred:
    """Infer the common order of several matrices, each with a reference of its own.

    Each is weak evidence; together they form one long profile. Matrices have equal weight: a dead
    expert, whose logarithms are wide on both sides, must not decide for all of them.
    """
    pairs = [
        (_standard(logs_of(ours)), _standard(each.logs))
        for ours, each in zip(columns, references, strict=True)
        if len(ours) == len(each.logs) and len(ours) % BLOCK == 0
    ]
    if sum(len(ours) for ours, _ in pairs) < _FEWEST_COLUMNS:
        return undecided(ABOUT, "too few columns, even of all experts")
    profile, theirs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return _judge(profile, Reference(Kinship.EXPERTS, theirs))


def _standard(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a profile with mean 0 and deviation 1; a nearly constant one becomes zero."""
    return _of_length_one(logs - logs.mean()) * math.sqrt(len(logs))


def _judge(profile: NDArray[np.float64], reference: Reference) -> Inferred:
    sign = 1.0
    if reference.kinship not in (Kinship.SIBLING, Kinship.PACKED):
        means = _of_length_one(_means(profile))
        # Both vectors have unit length: the product is a correlation, here in standard deviations.
        between = float(reference.means @ means) * math.sqrt(len(means))
        if abs(between) < FAR:
            because = f"blocks show no relation to {reference.kinship} ({between:+.1f} deviations)"
            return undecided(ABOUT, because)
        sign = math.copysign(1.0, between)
    # Correlations, in their standard deviations under chance.
    inside = _of_length_one(_inside(profile))
    found = sign * math.sqrt(len(inside)) * (reference.templates @ inside)
    return best_of(ABOUT, dict(zip(ORDERS, map(float, found), strict=True)), str(reference.kinship))


def _means(profile: NDArray[np.float64]) -> NDArray[np.float64]:
    means: NDArray[np.float64] = profile.reshape(-1, BLOCK).mean(1)
    centred: NDArray[np.float64] = means - means.mean()
    return centred


def _inside(profile: NDArray[np.float64]) -> NDArray[np.float64]:
    blocks = profile.reshape(-1, BLOCK)
    centred: NDArray[np.float64] = blocks - blocks.mean(1, keepdims=True)
    return centred.reshape(-1)


def _of_length_one(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale vectors to length 1; nearly constant ones become zero."""
    lengths = np.sqrt((vectors * vectors).sum(-1, keepdims=True))
    scaled: NDArray[np.float64] = np.where(lengths > 1e-6, vectors / np.maximum(lengths, 1e-6), 0.0)
    return scaled
