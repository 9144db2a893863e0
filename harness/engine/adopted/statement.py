"""State a description as data: what a verdict's JSON carries, and what is adopted from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.adopted.data import NotStatable, general_words, weight_key, written
from degarble.harness.engine.faults.model_faults import facts_at, has_facts
from degarble.harness.model.family import family_of

if TYPE_CHECKING:
    from degarble.harness.engine.diagnose.conditions import ActiveCondition
    from degarble.harness.engine.faults.model_faults import ComponentContext
    from degarble.harness.engine.recover.described import Described

REFUSED = "refused"


def statement_of(
    described: Described | None, condition: ActiveCondition | None = None
) -> dict[str, Any]:
    """Return what a file of an adopted fault states; or why none can, under `refused`."""
    if described is None or described.context is None:
        return {}
    context = described.context
    try:
        change = written(described.variant.apply, context)
    except NotStatable as error:
        return {REFUSED: str(error)}
    component = context.component
    return {
        "sentence": general_words(context, described.sentence),
        "remedy": described.remedy,
        "families": [family_of(context.bound.config).name],
        "kind": component.kind,
        "components": ["*" if component.kind else context.role],
        "words": general_words(context, described.variant.words),
        "change": change,
        "condition": {} if condition is None else dict(condition.where),
        "origin": {
            "component": context.name,
            "evidence": described.evidence,
            "weights": _weights(context),
            "inputs": _input_formats(context),
        },
    }


def _input_formats(context: ComponentContext) -> dict[str, str]:
    """Return the format in which the input in front of each weight is quantised; empty: in none."""
    if not has_facts(context):
        return {}
    formats = {name: facts_at(context).activation(name) for name in context.weights}
    return {weight_key(context, name): form or "" for name, form in formats.items()}


def _weights(context: ComponentContext) -> dict[str, dict[str, Any]]:
    """Return extents and formats of a component's weights: what a plant elsewhere has to have."""
    try:
        weights = dict(context.weights)
    except CANNOT_RUN:
        return {}
    return {
        weight_key(context, name): {
            "shape": list(weight.shape),
            "format": "" if weight.storage is None else weight.storage.format.name,
        }
        for name, weight in weights.items()
    }
