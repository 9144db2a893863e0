"""List partners: linears that engines fuse, so that their formats and scales must agree.

The list is read off the engine's fused tensors (harness/model/layouts.py). Gate and up are fused by
every engine, other partners by some. Partners whose formats differ in the released model (V3.2's
indexer.wk and weights_proj) are left out: no engine fuses them without converting them.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.structure.inventory import Found, Inventory
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter

_ENGINE = "vllm"
# w1 is the gate, w3 the up projection, of dense, shared and routed experts alike.
_GATE_AND_UP = (".w1", ".w3")


class Fusable(NamedTuple):
    """Rows of the parameter table that are partners. `always`: every engine fuses them."""

    rows: tuple[str, ...]
    always: bool


class Partners(NamedTuple):
    """The partners of one block, or of one expert, in the order of their fusion."""

    members: tuple[Found, ...]
    always: bool


@lru_cache(maxsize=8)
def fusable(config: Config) -> tuple[Fusable, ...]:
    """Return the rows that are partners in a family."""
    recipe = recipe_named("official", config)
    formats = {each.row.name: recipe.format_of(each) for each in _one_a_row(config)}
    found = []
    for fusion in layout_named(_ENGINE, config).fusions:
        rows = tuple(row for row in fusion.members if row in formats)
        # Partners that the release stores in different formats are not comparable.
        if len(rows) > 1 and len({formats[row] for row in rows}) == 1:
            found.append(Fusable(rows, all(row.endswith(_GATE_AND_UP) for row in rows)))
    return tuple(found)


def _one_a_row(config: Config) -> list[Parameter]:
    rows = {each.row.name: each for each in parameters(config) if each.expert in (None, 0)}
    return list(rows.values())


def partners(inventory: Inventory) -> list[Partners]:
    """Return all groups of partners of which at least two are present."""
    groups: dict[tuple[object, int | None, int], list[Found]] = defaultdict(list)
    kinds = fusable(inventory.config)
    place = {row: (i, j) for i, kind in enumerate(kinds) for j, row in enumerate(kind.rows)}
    for found in inventory.found:
        parameter = found.parameter
        if parameter.row.name in place and found.weight is not None:
            kind, _ = place[parameter.row.name]
            groups[parameter.block, parameter.expert, kind].append(found)
    return [
        Partners(
            tuple(sorted(members, key=lambda each: place[each.parameter.row.name])),
            kinds[kind].always,
        )
        for (_, _, kind), members in groups.items()
        if len(members) > 1
    ]
