"""Metrics of the server in Prometheus' text format.

Counting happens under one lock. Gauges (how many wait) are read when the metrics are requested.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Labels = tuple[tuple[str, str], ...]
    Gauges = Mapping[str, Iterable[tuple[Mapping[str, str], float]]]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_WIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0)

# name to (kind, help, bounds of a histogram)
FAMILIES: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "requests_total": ("counter", "Answers by path and status.", ()),
    "request_seconds": ("histogram", "From a request's arrival to its answer's end.", _SECONDS),
    "first_token_seconds": ("histogram", "From arrival to a sequence's first token.", _SECONDS),
    "queue_seconds": ("histogram", "A sequence's wait until it runs.", _SECONDS),
    "step_seconds": ("histogram", "One step of all running sequences.", _SECONDS),
    "step_sequences": ("histogram", "Sequences in a step.", _WIDTHS),
    "prompt_tokens_total": ("counter", "Tokens of prompts that the model took in.", ()),
    "new_tokens_total": ("counter", "Tokens that were chosen.", ()),
    "sequences_total": ("counter", "Sequences by how they ended.", ()),
    "step_failures_total": ("counter", "Steps that failed, with all sequences in them.", ()),
    "running_sequences": ("gauge", "Sequences that take part in steps.", ()),
    "waiting_sequences": ("gauge", "Sequences that wait for room.", ()),
    "memory_bytes": ("gauge", "What all requests together may take now, estimated.", ()),
    "ready": ("gauge", "1 where requests are taken.", ()),
    "info": ("gauge", "What is served, as labels.", ()),
    "component_info": ("gauge", "What computes each component, as labels.", ()),
}


class Metrics:
    """Counters and histograms."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self._buckets: dict[str, list[int]] = {}

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name, tuple(labels.items())] += by

    def observe(self, name: str, value: float) -> None:
        """Add one value to a histogram."""
        bounds = FAMILIES[name][2]
        with self._lock:
            buckets = self._buckets.setdefault(name, [0] * (len(bounds) + 1))
            buckets[bisect_left(bounds, value)] += 1
            self._counts[f"{name}_sum", ()] += value

    def text(self, gauges: Gauges) -> str:
        """Write everything; `gauges` holds the values that are read now."""
        with self._lock:
            counts, buckets = dict(self._counts), {k: list(v) for k, v in self._buckets.items()}
        lines: list[str] = []
        for name, (kind, message, bounds) in FAMILIES.items():
            lines += [f"# HELP degarble_{name} {message}", f"# TYPE degarble_{name} {kind}"]
            if kind == "histogram":
                total = counts.get((f"{name}_sum", ()), 0.0)
                lines += _histogram(name, bounds, buckets.get(name), total)
            elif kind == "gauge":
                lines += [_line(name, labels, value) for labels, value in gauges[name]]
            else:
                found = [(dict(key[1]), value) for key, value in counts.items() if key[0] == name]
                lines += [_line(name, labels, value) for labels, value in found or [({}, 0)]]
        return "\n".join(lines) + "\n"


def _histogram(
    name: str, bounds: tuple[float, ...], buckets: list[int] | None, total: float
) -> list[str]:
    made, below = [], 0
    for bound, count in zip(
        (*bounds, float("inf")), buckets or [0] * (len(bounds) + 1), strict=True
    ):
        below += count
        le = "+Inf" if bound == float("inf") else f"{bound:g}"
        made.append(_line(f"{name}_bucket", {"le": le}, below))
    return [*made, _line(f"{name}_sum", {}, total), _line(f"{name}_count", {}, below)]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    message = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    number = str(int(value)) if float(value).is_integer() else repr(float(value))
    return f"degarble_{name}{f'{{{message}}}' if message else ''} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
