"""All faults that this version can plant and name, by id. A new family is one file and one line."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.engine.faults import (
    m01_scale_direction,
    m02_scale_count,
    m10_nibble_order,
    m11_scale_layout,
)
from degarble.harness.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.engine.faults.family import Fault

_FAMILIES = (m01_scale_direction, m02_scale_count, m10_nibble_order, m11_scale_layout)

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.id: fault for family in _FAMILIES for fault in family.FAULTS}
)


def fault_named(name: str) -> Fault:
    """Look a fault up by its id."""
    if name not in FAULTS:
        raise UnknownName.among("fault", name, FAULTS)
    return FAULTS[name]
