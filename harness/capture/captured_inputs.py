"""Validate the indices in a capture that come from outside the model: token ids, positions, bounds.

The twin uses them as indices, so one that is out of range would crash it. No kernel computed them,
so a capture that holds such a value is rejected, naming call and input. What components compute is
judged whatever it holds; engine/localise/recorded_forms.py checks its shape and dtype.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from degarble.harness.capture.files.types import malformed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from degarble.harness.capture.files.reader import Capture
    from degarble.harness.capture.files.types import Call, Kept
    from degarble.harness.model.components import Component

_INTEGERS = ("I64", "I32", "I16", "I8", "U32", "U16", "U8")
_FROM_OUTSIDE = ("tokens", "positions", "offsets")
_MOST = 1 << 31


def require_usable_inputs(
    capture: Capture, components: Iterable[Component], vocabulary: int
) -> None:
    """Refuse a call whose inputs no run of its component can have had."""
    known = {component.name: component for component in components}
    for call in capture.calls:
        component = known.get(call.component)
        if component is None:
            continue
        for each in component.inputs:
            kept = call.inputs.get(each.name)
            if kept is not None and each.via in _FROM_OUTSIDE:
                most = vocabulary if each.via == "tokens" else _MOST
                _require_indices(capture, call, each.name, kept, most)
        # A filter of tokens cuts what has a row for each, and nothing else.
        if not any(kept.rows is not None for kept in call.inputs.values()):
            _require_offsets(capture, call)


def _require_indices(capture: Capture, call: Call, name: str, kept: Kept, most: int) -> None:
    if kept.dtype not in _INTEGERS or len(kept.shape) != 1:
        found = f"{kept.dtype} {list(kept.shape)}"
        raise malformed(_named(call, name), found, "integers in one row")
    values = _values(capture, kept)
    if values is None or not len(values):
        return
    least, largest = int(values.min()), int(values.max())
    if least < 0 or largest >= most:
        told = f"numbers from 0 and below {most}"
        raise malformed(_named(call, name), (least, largest), told)


def _require_offsets(capture: Capture, call: Call) -> None:
    """Refuse sequences that do not follow each other over all rows."""
    offsets, positions = call.inputs.get("token_offsets"), call.inputs.get("positions")
    values = None if offsets is None else _values(capture, offsets)
    if values is None or positions is None:
        return
    found = values.tolist()
    ends = len(found) > 1 and (found[0], found[-1]) == (0, positions.shape[0])
    if not ends or any(a >= b for a, b in pairwise(found)):
        told = f"from 0 up to {positions.shape[0]}, each larger than the one in front"
        raise malformed(_named(call, "token_offsets"), found[:8], told)


def _values(capture: Capture, kept: Kept) -> Tensor | None:
    return None if kept.at is None else capture.tensor(kept)


def _named(call: Call, name: str) -> str:
    return f"call {call.number} ({call.component}): {name}"
