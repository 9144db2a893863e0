"""Write conversion_report.json: how each weight was quantised, and its error above the floor.

Each NVFP4 weight lists its method, its scales, its relative error, its error divided by the
format's floor (nvfp4_scales), and its input scale with origin and tokens. Copied tensors are only
counted. Entries that need a human's attention come first. Equal inputs give equal bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from degarble.harness.checkpoint.transform.quantise.calibration import ScaleOrigin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.transform.nvfp4_scales import Errors, Exponents
    from degarble.harness.checkpoint.transform.quantise.calibration import InputScale

REPORT = "conversion_report.json"
SCHEMA = 1
WORST = 20


class GroupScale(NamedTuple):
    """The tensor scale of partners; `exponents` where MXFP4 is taken over exactly."""

    scale: float
    amax: float | None
    exact: bool
    exponents: Exponents | None
    why_not: str


@dataclass
class ShardFacts:
    """The facts of one shard for the report."""

    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    rounded: dict[str, int] = field(default_factory=dict)

    def add_plain(self, name: str, action: str, source: str, target: str, rounded: int) -> None:
        """Record a parameter that did not become NVFP4."""
        self.counts[f"{action}: {source} to {target}" if source != target else action] += 1
        if rounded:
            self.rounded[name] = rounded

    def add_nvfp4(
        self, name: str, source: str, elements: int, group: GroupScale, errors: Errors
    ) -> None:
        """Record a weight that became NVFP4."""
        action = "lossless" if group.exact else "quantised"
        self.counts[f"{action}: {source} to NVFP4"] += 1
        fields: dict[str, Any] = {
            "from": source,
            "action": action,
            "elements": elements,
            "weight_scale_2": group.scale,
            "relative_error": errors.relative,
            "over_floor": errors.over_floor,
        }
        if group.amax is not None:
            fields["amax"] = group.amax
        if group.why_not:
            fields["not_lossless"] = group.why_not
        self.weights.setdefault(name, {}).update(fields)

    def add_input(self, name: str, scale: InputScale) -> None:
        """Record an input scale."""
        fields = {
            "input_scale": scale.scale,
            "input_amax": scale.amax,
            "input_from": str(scale.origin),
            "tokens": scale.tokens,
        }
        self.weights.setdefault(name, {}).update(fields)

    def to_bytes(self) -> bytes:
        """Return the facts as bytes for the process that finishes the job."""
        raw = {"weights": self.weights, "counts": self.counts, "rounded": self.rounded}
        return json.dumps(raw, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Read the facts again; None where the bytes are not what a shard writes."""
        try:
            raw = json.loads(data)
            parts = [raw[name] for name in ("weights", "counts", "rounded")]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        sound = all(isinstance(each, dict) for each in (*parts, *_values(parts[0])))
        counts = all(type(n) is int for part in parts[1:] for n in _values(part))
        return cls(parts[0], Counter(parts[1]), parts[2]) if sound and counts else None


def _values(raw: Any) -> Iterable[Any]:
    return raw.values() if isinstance(raw, dict) else ()


def report_bytes(fields: Mapping[str, Any], facts: Iterable[ShardFacts]) -> bytes:
    """Return the report's content."""
    whole = ShardFacts()
    for shard_facts in facts:
        for (
            name,
            told_of,
        ) in shard_facts.weights.items():  # a weight and its input scale may lie apart
            whole.weights.setdefault(name, {}).update(told_of)
        whole.counts.update(shard_facts.counts)
        whole.rounded.update(shard_facts.rounded)
    raw = {
        "schema": SCHEMA,
        **fields,
        "counts": dict(sorted(whole.counts.items())),
        "lossless": _lossless(whole.weights),
        "flagged": _flagged(whole),
        "worst": _worst(whole.weights),
        # Sorted within as well: facts that travelled through a file come back in another order.
        "weights": {name: dict(sorted(w.items())) for name, w in sorted(whole.weights.items())},
    }
    return (json.dumps(raw, indent=1, ensure_ascii=False) + "\n").encode()


def _lossless(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Count the MXFP4 weights, and those that became NVFP4 exactly, every block compared."""
    asked = [w for w in weights.values() if w["action"] == "lossless" or "not_lossless" in w]
    exact = [w for w in asked if w["action"] == "lossless"]
    elements = sum(w["elements"] for w in asked)
    share = sum(w["elements"] for w in exact) / elements if elements else None
    return {"weights": len(asked), "exact": len(exact), "share_of_elements": share}


def _flagged(whole: ShardFacts) -> dict[str, Any]:
    weights = whole.weights
    return {
        "unreached_experts": sorted(
            name
            for name, weight in weights.items()
            if weight.get("input_from") == ScaleOrigin.UNREACHED
        ),
        "not_lossless": {
            n: w["not_lossless"] for n, w in sorted(weights.items()) if "not_lossless" in w
        },
        "zero_weights": sorted(n for n, w in weights.items() if w.get("amax") == 0),
        "rounded_to_a_narrower_dtype": dict(sorted(whole.rounded.items())),
    }


def _worst(weights: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List the weights whose error exceeds the format's floor by most."""
    judged = [(w["over_floor"], name) for name, w in weights.items() if w["over_floor"] is not None]
    return [
        {"weight": name, "over_floor": over, "relative_error": weights[name]["relative_error"]}
        for over, name in sorted(judged, key=lambda each: (-each[0], each[1]))[:WORST]
    ]
