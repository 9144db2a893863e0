"""The registered model families: their names, and the objects that are imported when first met.

A family is an entry point of the group `degarble.families`: its name, which its configs carry as
`family`, and `module:OBJECT`. The built-in ones come through the same door as those of other
distributions. A tree that runs without being installed anew, such as a second checkout, has its own
pyproject.toml read; its entries come before the installed ones.

This module knows no types of the model, so that the tables of structure can look a family up;
elsewhere use harness.model.family.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = "degarble.families"
_TREE = Path(__file__).resolve().parents[2] / "pyproject.toml"


@cache
def entries() -> Mapping[str, str]:
    """Return `module:OBJECT` of every family, by name."""
    own: dict[str, str] = {}
    if _TREE.is_file():
        project = tomllib.loads(_TREE.read_text(encoding="utf-8")).get("project", {})
        own = project.get("entry-points", {}).get(GROUP, {})
    installed = {point.name: point.value for point in entry_points(group=GROUP)}
    return own | {name: value for name, value in installed.items() if name not in own}


@cache
def registered(name: str) -> Any:
    """Return the family of this name: a harness.model.family.ModelFamily."""
    known = entries()
    if name not in known:
        raise UnknownName.among("model family", name, known)
    module, _, attribute = known[name].partition(":")
    return getattr(import_module(module), attribute)


def registered_for(config: object) -> Any:
    """Return the family of a config."""
    return registered(str(getattr(config, "family", type(config).__name__)))
