"""Report matrices that are stored twice: identical, or with their rows in another order.

Digests of rows are compared. Constant tensors, small ones and vectors may agree by right and are
left out. Equal embeddings, heads and their copies in a drafter may be tied and give a note.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.numbers.judging import Judging, indices
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Matrices below these sizes may agree by right.
FEWEST_ELEMENTS = 4096
FEWEST_ROWS = 16


def check_copies(judging: Judging) -> None:
    """Report matrices that hold the same rows."""
    table = judging.table
    named = np.array([unit.kind is not None for unit in table.units], np.bool_)
    tied = np.array([_may_be_tied(unit.kind, unit.role) for unit in table.units], np.bool_)
    judged = (judging.linear | tied | ~named) & ~table.of_format("integers")
    judged &= (table["elements"] >= FEWEST_ELEMENTS) & (table["height"] >= FEWEST_ROWS)
    judged &= (table["common_byte"] < 0.999) & (table["zeros"] < table["elements"])
    for members in _groups(judging, judged):
        first = table.units[members[0]].name
        for index in members[1:]:
            same = table["digest"][index] == table["digest"][members[0]]
            _report(judging, index, first, is_same=bool(same), is_tied=bool(tied[members].all()))


def _may_be_tied(kind: Kind | None, role: str) -> bool:
    last = role.rpartition(".")[2]
    return kind is Kind.EMBEDDING or last in ("embed", "head", "lm_head", "embed_tokens")


def _groups(judging: Judging, judged: NDArray[np.bool_]) -> list[list[int]]:
    table = judging.table
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index in indices(judged):
        key = (table["format"][index], table["elements"][index], table["row_digest"][index])
        groups[key].append(index)
    return [members for members in groups.values() if len(members) > 1]


def _report(judging: Judging, index: int, first: str, *, is_same: bool, is_tied: bool) -> None:
    remedy = "See who copied it; restore the real one from the source."
    # `row_digest` groups matrices with the same rows in any order; `digest` compares the order.
    if is_same:
        rule = rules.IDENTICAL_TIED if is_tied else rules.IDENTICAL
        message = f"holds the same codes as {shown(first)}, in every row."
        judging.report(rule, index, message, remedy, same_as=first)
    else:
        message = f"holds the rows of {shown(first)} in another order."
        judging.report(rules.PERMUTED, index, message, remedy, same_as=first)
