"""List the roles of components to which each fault applies, for `degarble faults list`.

Config and recipe suffice: both small models are bound in every recipe of the museum, without
weights, which `sits` does not need.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.model_faults import Scene
from degarble.harness.model.components import components
from degarble.harness.model.recipes import recipe_named
from degarble.harness.museum.models import RECIPES
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics, switches_of
from degarble.references.tiny.configs import TINY_V4, TINY_V32

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault


def roles_of(fault: ModelFault) -> list[str]:
    """Return the roles in the order in which they run; V4's first."""
    return list(dict.fromkeys(scene.role for scene in _scenes() if fault.sits(scene)))


@cache
def _scenes() -> tuple[Scene, ...]:
    """Yield one component of each role in each kind of layer, of both models in every recipe."""
    found: dict[tuple[object, ...], Scene] = {}
    for config, source in ((TINY_V4, "official-v4"), (TINY_V32, "official-v32")):
        for name in RECIPES:
            recipe = recipe_named(name, config)
            bound = Bound(config, Numerics.twin(switches_of(source)), {}, recipe)
            for each in components(config, recipe):
                if each.name in bound.calls:
                    kind = (each.block.layer_type, each.block.mlp_type) if each.block else ()
                    key = (source, name, each.role, *kind)
                    found.setdefault(key, Scene(bound, each, recipe))
    return tuple(found.values())
