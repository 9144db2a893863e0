"""Group linears that share a tensor scale because vLLM fuses them into one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.model.layouts import layout_named

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.checkpoint.transform.source import Linear
    from degarble.harness.checkpoint.view.view import Checkpoint


def partner_groups(checkpoint: Checkpoint, found: Iterable[Linear]) -> list[list[Linear]]:
    """Group linears that one fused tensor of vLLM holds, expert by expert."""
    fused: dict[str, str] = {}
    if checkpoint.model is not None:
        for fusion in layout_named("vllm", checkpoint.model).fusions:
            fused |= dict.fromkeys(fusion.members, fusion.target)
    groups: dict[tuple[object, ...], list[Linear]] = {}
    for linear in found:
        parameter = linear.parameter
        key: tuple[object, ...] = (linear.name,)
        if parameter is not None and parameter.row.name in fused:
            key = (parameter.block, parameter.expert, fused[parameter.row.name])
        groups.setdefault(key, []).append(linear)
    return list(groups.values())
