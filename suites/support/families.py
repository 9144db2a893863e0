"""The tables of every registered family, by family and name."""

from __future__ import annotations

from degarble.harness.model.family import families

LAYOUTS = {
    (family.name, name): layout for family in families() for name, layout in family.layouts.items()
}
STYLES = {
    (family.name, name): cuts for family in families() for name, cuts in family.sharding.items()
}
