"""Report parameters whose names no known loader reads.

A layout is compared as a whole: if some loader knows the checkpoint's spelling there is no finding
here, and absent or surplus tensors are reported as missing or unexpected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import FindingLocation
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.consumers import LOADERS

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.findings import Findings
    from degarble.harness.checkpoint.audit.structure.inventory import Found, Inventory
    from degarble.harness.model.layouts import Layout

_EXAMPLES = 8


def report_unread_names(inventory: Inventory, findings: Findings) -> None:
    """Report all parameters that no known loader reads as one finding, by their spelling."""
    config = inventory.config
    if any(loader.knows(inventory.layout, config) for loader in LOADERS):
        return
    known = [layout for loader in LOADERS for layout in loader.layouts(config)]
    # Of the nearest one: names that several loaders know between them are read by none.
    unread = min((_unread(inventory, layout) for layout in known), key=len)
    if not unread:
        return
    formats = {each.weight for each in inventory.linears}
    # A silent loader leaves unknown names at random instead of failing.
    silent = [each for each in LOADERS if each.is_silent and formats <= each.formats]
    first, count = unread[0].module, len({each.module for each in unread})
    findings.add(
        rules.NAME_UNREAD if silent else rules.NAME_UNREAD_QUANTISED,
        FindingLocation(None, first),
        f"No known loader reads {shown(first)}"
        + (f" and {count - 1} modules more" if count > 1 else "")
        + (f"; {silent[0].name} leaves them at random." if silent else "."),
        "Write the names of the release: `degarble convert CKPT OUT --to bf16 --prove` does, for"
        " quantised sources; else rename them.",
        modules=count,
        loaders=[each.what for each in LOADERS if each.layouts(config)],
        examples=[shown(each.module) for each in unread[:_EXAMPLES]],
    )


def _unread(inventory: Inventory, layout: Layout) -> list[Found]:
    """Return the parameters whose module differs from the one in a layout."""
    config = inventory.config
    # A fused row lies in its fusion's tensor, not under its own path.
    fused = {row: each.target for each in layout.fusions for row in each.members}
    return [
        each
        for each in inventory.found
        if each.module
        != layout.path_of(each.parameter, config, fused.get(each.parameter.row.name, ""))
    ]
