"""Plant one fault of the catalogue in a model that is about to be captured: `capture --fault`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.backends.patching import Patched
from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.engine.faults.model_faults import ComponentContext, Reach
from degarble.harness.engine.faults.registry import plantable_faults
from degarble.harness.model.components import component_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.inference.model import OpenModel


def planting(text: str) -> Callable[[OpenModel], Patched]:
    """Return what plants `ID@COMPONENT`; refuse a text without these parts, or an unknown fault."""
    identity, _, name = text.partition("@")
    if not identity or not name:
        raise InvalidArgument(
            "--fault", text, "ID@COMPONENT, such as M10.nibble_order@layers.1.ffn.experts.w2",
            f"degarble faults show {identity or 'ID'} lists the components that it can be in.",
        )  # fmt: skip
    known = plantable_faults()
    if identity not in known:
        raise UnknownName.among("--fault", identity, known)
    fault = known[identity]
    if fault.reach is Reach.EDGE:
        raise InvalidArgument(
            "--fault", identity, "a fault of what a component computes, not of what it is given",
            "degarble faults run ID plants the others.",
        )  # fmt: skip

    def plant(model: OpenModel) -> Patched:
        bound = model.logits_model.bound
        if name not in bound.calls:
            raise UnknownName.among("component of --fault", name, bound.calls)
        context = ComponentContext(
            bound, component_named(bound.config, name, model.recipe), model.recipe
        )
        variant = next(iter(fault.variants(context)), None) if fault.applies_to(context) else None
        if variant is None:
            raise InvalidArgument(
                "--fault", text, f"a component that {identity} can be in",
                f"degarble faults show {identity} lists them.",
            )  # fmt: skip
        bound.calls[name] = variant.apply(bound.calls[name])
        for other, wrap in variant.companions.items():
            bound.calls[other] = wrap(bound.calls[other])
        return Patched(f"the fault {identity}, {variant.words}", "", components=(name,))

    return plant
