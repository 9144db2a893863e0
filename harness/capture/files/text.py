"""Summarise a capture in a few lines of text, without torch and without its checkpoint.

The first line says whether the capture is complete.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from degarble.harness.capture.files.types import Phase
from degarble.harness.report.number_text import visible
from degarble.harness.report.progress import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.capture.files.reader import Capture


def capture_lines(capture: Capture) -> list[str]:
    """Summarise a capture: source, steps, size."""
    kept = [each for call in capture.calls for _, each in call.sites()]
    stored = {each.at: each.nbytes for each in kept if each.at is not None}
    components = {call.component for call in capture.calls}
    steps = Counter(step.phase for step in capture.steps)
    tokens = Counter[Phase]()
    for step in capture.steps:
        tokens[step.phase] += len(step.tokens)
    lines = [
        _state(capture),
        f"  run         {_run(capture.facts)}",
        f"  steps       {_steps(steps, tokens)}",
        f"  calls       {len(capture.calls):,} of {len(components):,} components",
        f"  tensors     {len(kept):,}, {len(stored):,} stored: {size(sum(stored.values()))}",
    ]
    changed = [call for call in capture.calls if call.changed]
    if changed:
        names = f"{changed[0].component} ({', '.join(changed[0].changed)})"
        lines.append(f"  changed     {len(changed):,} calls wrote into their inputs, first {names}")
    return lines


def capture_document(capture: Capture) -> dict[str, Any]:
    """Return the same summary as a JSON document."""
    return {
        "complete": capture.complete,
        "hash": capture.hash,
        "steps": len(capture.steps),
        "calls": len(capture.calls),
        "components": len({call.component for call in capture.calls}),
        "changed": sum(bool(call.changed) for call in capture.calls),
        "facts": dict(capture.facts),
    }


def _state(capture: Capture) -> str:
    if capture.complete:
        return f"Capture {capture.hash[:12]}, complete, by degarble {capture.tool_version}"
    return f"Capture, incomplete: its run ended before its time, by degarble {capture.tool_version}"


def _run(facts: Mapping[str, Any]) -> str:
    source = facts.get("source")
    name = source.get("name") if isinstance(source, dict) else None
    told = [name, facts.get("family"), facts.get("backend"), facts.get("arithmetic")]
    return visible(", ".join(str(each) for each in told if each)) or "not told"


def _steps(steps: Counter[Phase], tokens: Counter[Phase]) -> str:
    told = [
        f"{steps[phase]:,} of {phase} ({tokens[phase]:,} tokens)" for phase in Phase if steps[phase]
    ]
    return ", ".join(told) or "none"
