"""Derive a recipe from the formats that the linears have after a conversion.

Linears of one row of the parameter table share a rule where all are alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.model.recipes import BF16, Recipe, Rule
from degarble.harness.model.storage import Part
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.transform.units import Work
    from degarble.harness.checkpoint.view.view import LogicalNames


class Stored(NamedTuple):
    """The format of one linear, and whether its inputs have a calibrated scale."""

    weight: str
    scaled: bool


def stored_formats(names: LogicalNames) -> dict[str, Stored]:
    """Return the format that each linear of a checkpoint is stored in, by logical name."""
    found = {}
    for name, parameter in names.present.items():
        if parameter.kind is Kind.LINEAR:
            form = names.table.form(names.module_of(parameter))
            scaled = Part.INPUT_SCALE in form.parts
            found[name] = Stored(form.format.name if form.format else BF16, scaled)
    return found


def formats_after(job: Work) -> dict[str, Stored]:
    """Return the format of each linear of a known model after a conversion."""
    names = job.checkpoint.names
    assert names is not None, "a known model"
    formats = stored_formats(names)
    for unit in job.units:
        formats |= {name: Stored(word, scaled=False) for name, word in unit.formats.items()}
    return formats


def recipe_of(formats: Mapping[str, Stored], names: LogicalNames) -> Recipe:
    """Return formats as a recipe; a linear unlike the rest of its row gets its own rule, first."""
    rows: dict[tuple[str, str], dict[str, Stored]] = defaultdict(dict)
    for name, stored in formats.items():
        parameter = names.present[name]
        rows[parameter.block.scope if parameter.block else "", parameter.row.name][name] = stored
    single, common = [], []
    for (scope, row), members in rows.items():
        usual, _ = Counter(members.values()).most_common(1)[0]
        pattern = f"{scope}.*.{row}" if scope else row
        common.append(_rule(pattern.replace("{e}", "*"), usual))
        single += [_rule(name, own) for name, own in members.items() if own != usual]
    return Recipe("as converted", (*single, *common))


def _rule(match: str, stored: Stored) -> Rule:
    return Rule(match, stored.weight, stored.weight if stored.scaled else BF16)
