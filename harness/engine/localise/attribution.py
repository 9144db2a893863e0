"""Assign each discrepancy to one component or edge; the record of a discrepancy.

An output that is wrong for right inputs belongs to its component. An input that is wrong although
its producers' outputs are right belongs to the consumer's edge. Memory is the exception: rows,
entries and state kept by an earlier call or a cache are attributed to the component that writes
them. The site always says where the wrong value was recorded. The fault museum states its expected
answers by the same function.
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
    """What is wrong at a site."""

    OUTPUT = "output"  # it comes out wrong, given what went in
    EDGE = "edge"  # it arrives wrong, given what its producers put out
    CHANGED = "changed"  # the component wrote into its inputs
    MISSING = "missing"  # it did not run where it should have
    FORM = "form"  # a tensor that is absent, of another shape or another dtype
    FALLBACK = "fallback"  # a quantised product that ran with unquantised operands


@dataclass(frozen=True, eq=False)
class Trouble:
    """One discrepancy, and the call that shows it best.

    `component` is attributed. `site` is where the value was recorded (an output, or a consumer's
    input), and `scene` is the component of that site. `where` narrows it down. `more` are calls of
    other steps with the same discrepancy. A missing call has no sight.
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
        """Return the name of the output, or of the input on an edge."""
        return self.site.name or "out"


def source_of(component: Component, name: str) -> Site | None:
    """Return the site that an input comes from, even through memory; None for model inputs."""
    own = next(each for each in component.inputs if each.name == name)
    if own.sources:
        return own.sources[0]
    if not name.startswith(_STATE):
        return None
    # State that the component writes itself, in an earlier call.
    if name in component.outputs:
        return Site(component.name, Port.OUT, name)
    # state_X holds earlier rows of the input X, so X's producer wrote them.
    kept = name.removeprefix(_STATE)
    return next((e.sources[0] for e in component.inputs if e.name == kept and e.sources), None)


def is_memory(component: Component, name: str) -> bool:
    """Tell whether an input was kept between calls: state of earlier calls, or rows of a cache."""
    source = source_of(component, name)
    if source is None:
        return False
    return name.startswith(_STATE) or source.component.endswith(_WRITERS)


def blamed_on_edge(component: Component, name: str) -> str:
    """Return the component to attribute a wrong input to, where its producers are right."""
    source = source_of(component, name)
    if source is not None and is_memory(component, name):
        return source.component
    return component.name
