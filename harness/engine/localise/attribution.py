"""Whose fault it is: one place for every trouble, and what a trouble is.

Owns the record of a trouble and the rule of blame. What comes out wrong on inputs that are right is
its component's. What arrives wrong, though its producers' outputs are right, is the consumer's
edge, unless it is memory: rows, entries and state that an earlier call or a cache kept are blamed
on the component that writes them; the site says in every case where the wrong value was seen.
The museum states the truth by the same function. Kept honest by
suites/engine/localise/test_attribution.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.engine.budget.judging import Judged
    from degarble.harness.engine.faults.model_faults import Scene, Sight
    from degarble.harness.model.components import Component

_WRITERS = (".kv_write", ".compressor.write")
_STATE = "state_"


class Kind(StrEnum):
    """What is wrong at a place."""

    OUTPUT = "output"  # it comes out wrong, given what went in
    EDGE = "edge"  # it arrives wrong, given what its producers put out
    CHANGED = "changed"  # the component wrote into its inputs
    MISSING = "missing"  # it did not run where it should have
    FORM = "form"  # a tensor that is absent, of another shape or another dtype
    FALLBACK = "fallback"  # a quantised product that ran with unquantised operands


@dataclass(frozen=True, eq=False)
class Trouble:
    """One place where something is wrong, and the call in which it is seen best.

    `component` is blamed; `site` is where it is seen, an output or a consumer's input, and `scene`
    is the component of that site. `where` narrows it down. `more` are calls of other steps with the
    same trouble; a missing call has no sight.
    """

    kind: Kind
    component: str
    scene: Scene
    site: Site
    sentence: str
    sight: Sight | None = None
    judged: Judged | None = None
    where: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    steps: tuple[int, ...] = ()
    more: tuple[Sight, ...] = ()

    @property
    def name(self) -> str:
        """The name of the output, or of the input on an edge."""
        return self.site.name or "out"


def source_of(component: Component, name: str) -> Site | None:
    """Where the value of an input comes from, be it by memory; None from outside the model."""
    own = next(each for each in component.inputs if each.name == name)
    if own.sources:
        return own.sources[0]
    if not name.startswith(_STATE):
        return None
    if name in component.outputs:
        return Site(component.name, Port.OUT, name)
    kept = name.removeprefix(_STATE)
    return next((e.sources[0] for e in component.inputs if e.name == kept and e.sources), None)


def is_memory(component: Component, name: str) -> bool:
    """Whether an input was kept in between: state of earlier calls, or rows of a cache."""
    source = source_of(component, name)
    if source is None:
        return False
    return name.startswith(_STATE) or source.component.endswith(_WRITERS)


def blamed_on_edge(component: Component, name: str) -> str:
    """The component that is to blame for a wrong input whose producers are right."""
    source = source_of(component, name)
    if source is not None and is_memory(component, name):
        return source.component
    return component.name
