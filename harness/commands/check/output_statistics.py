"""Collect statistics of every judged output while its tensors are in memory.

Kept are sums along positions, heads, experts and tiles, a histogram of ULP distances, and the worst
element with its codes: a few numbers an output, whatever the size of the run. Outputs that are no
numbers (chosen rows, packed codes) are compared code by code.

Shape letters: R rows, W columns, N all elements, E experts, H heads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.engine.compare.compare import values_of_any
from degarble.harness.engine.localise.tensor_forms import aligned, wrong_forms
from degarble.harness.formats.codec import FORMAT_OF_DTYPE, codes_of, value_ulp_distance
from degarble.harness.report.replay_record import (
    AxisProfile,
    CloseLook,
    Histogram,
    JudgedPlace,
    MeasuredOutput,
    WorstElement,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.sums import ErrorSums
    from degarble.harness.engine.budget.budget import OutputResult
    from degarble.harness.engine.localise.replay import Batch, Replay
    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import Config

# Upper ends of the bins of distances; beyond the last one stands everything else.
_BINS = (0, 1, 2, 4, 8, 16, 64, 256, 4096)
_MOST = 192  # values of a profile; more are joined
_LEVELS = 10  # levels that are listed
_AXES = {"attn.hc_post": "stream", "ffn.hc_post": "stream", "ffn.experts": "slot"}


@dataclass
class _Sums:
    """Sums of squares of the difference and of the twin, by label."""

    dd: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tt: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, labels: Tensor, dd: Tensor, tt: Tensor) -> None:
        for label, d, t in zip(labels.tolist(), dd.tolist(), tt.tolist(), strict=True):
            self.dd[label] += d
            self.tt[label] += t

    def along(self, name: str) -> AxisProfile | None:
        """Return relative differences in the order of labels; None with fewer than two labels."""
        labels = sorted(self.dd)
        if len(labels) < 2:
            return None
        size = -(-len(labels) // _MOST)
        groups = [labels[at : at + size] for at in range(0, len(labels), size)]
        names = [str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups]
        values = [_relative(sum(self.dd[k] for k in g), sum(self.tt[k] for k in g)) for g in groups]
        return AxisProfile(name, tuple(names), tuple(values))


def _relative(dd: float, tt: float) -> float | None:
    if not dd:
        return 0.0
    return math.sqrt(dd / tt) if tt else math.inf


@dataclass
class _OutputStatistics:
    """The statistics of one output."""

    along: dict[str, _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BINS) + 2))
    unit: str = "ulps"
    ratio: float = -1.0
    judged: OutputResult | None = None
    worst: WorstElement | None = None


class StatisticsCollector:
    """A callback for every replay that collects statistics of each output."""

    def __init__(self, config: Config, store: torch.dtype = torch.bfloat16) -> None:
        self._config, self._store = config, store
        self._statistics: dict[str, dict[str, _OutputStatistics]] = {}
        self._told: dict[str, dict[str, MeasuredOutput]] = {}  # of components judged elsewhere

    def forget(self, component: str) -> None:
        """Drop the statistics of a component that is judged again, under another convention."""
        self._statistics.pop(component, None)
        self._told.pop(component, None)

    def take(self, component: str, measured: Sequence[MeasuredOutput]) -> None:
        """Take the details of a component that was judged elsewhere."""
        self._told[component] = {each.output: each for each in measured}

    def measured(self, component: str) -> tuple[MeasuredOutput, ...]:
        """Return the details of a component's outputs."""
        return tuple(
            self.measured_output(component, n) for n in self._statistics.get(component, {})
        )

    def __call__(self, replay: Replay, judged: Mapping[str, OutputResult]) -> None:
        """Add one replay."""
        if replay.undecided:
            return
        outputs, expected = replay.batch.outputs, replay.expected
        kept = {name: tensor for name, tensor in expected.items() if name in outputs}
        broken = wrong_forms(outputs, kept, self._store)
        sound = {name: tensor for name, tensor in kept.items() if name not in broken}
        pairs = aligned(outputs, sound)
        for name, result in judged.items():
            outputs_seen = self._statistics.setdefault(replay.batch.component.name, {})
            seen = outputs_seen.setdefault(name, _OutputStatistics())
            worse = (result.ratio if not math.isnan(result.ratio) else 0.0) > seen.ratio
            if worse:
                seen.ratio, seen.judged = result.ratio, result.settled()
            if name in pairs:
                self._take(seen, replay.batch, name, pairs[name])
                if worse:
                    seen.worst = _worst_of(result, pairs[name])

    def _take(
        self, seen: _OutputStatistics, batch: Batch, name: str, pair: tuple[Tensor, Tensor]
    ) -> None:
        candidate, twin = (side.detach() for side in pair)
        if not candidate.numel() or not candidate.ndim:
            return
        distance, odd = _distances(seen, candidate, twin)
        if candidate.dtype in FORMAT_OF_DTYPE and candidate.dtype.itemsize > 1:
            known = candidate.isfinite() & twin.isfinite()
            c, t = candidate.double(), twin.double()
            d_N = torch.where(known, c - t, 0.0) ** 2
            t_N = torch.where(known, t, 0.0) ** 2
        else:
            d_N, t_N = distance.double(), torch.ones(distance.shape, dtype=torch.float64)
        _count(seen, distance, odd)
        for axis, (labels, dd, tt) in self._axes(batch, name, d_N, t_N).items():
            seen.along[axis].add(labels, dd, tt)

    def _axes(
        self, batch: Batch, name: str, d_N: Tensor, t_N: Tensor
    ) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return sums along every axis that is known by name."""
        found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        count, component = d_N.shape[0], batch.component
        by_row = d_N.reshape(count, -1).sum(1), t_N.reshape(count, -1).sum(1)
        tokens = len(batch.position_of) == count and int(batch.position_of.min()) >= 0
        rows = batch.position_of if tokens else torch.arange(count)
        found["position" if tokens else "row"] = (rows, *by_row)
        experts = batch.inputs.get("experts")
        if experts is not None and d_N.ndim > 2 and d_N.shape[:2] == experts.shape:
            d_E, t_E = (
                tensor.reshape(*experts.shape, -1).sum(-1).flatten() for tensor in (d_N, t_N)
            )
            found["expert"] = (experts.flatten(), d_E, t_E)
        elif d_N.ndim == 3:
            axis = torch.arange(d_N.shape[1])
            found[_axis_of(component)] = (axis, d_N.sum((0, 2)), t_N.sum((0, 2)))
        heads = getattr(self._config, "num_attention_heads", 0)
        if component.role == "attn.wq_b" and name == "out" and d_N.shape[-1] % heads == 0:
            d_H, t_H = (
                tensor.reshape(-1, heads, tensor.shape[-1] // heads) for tensor in (d_N, t_N)
            )
            found["head"] = (torch.arange(heads), d_H.sum((0, 2)), t_H.sum((0, 2)))
        return found

    def measured_output(self, component: str, output: str) -> MeasuredOutput:
        """Return the details of one output."""
        told = self._told.get(component, {}).get(output)
        if told is not None:
            return told
        seen = self._statistics.get(component, {}).get(output)
        judged = None if seen is None else seen.judged
        difference = budget = None
        if judged is not None and judged.comparison is not None:
            difference = _number_or_none(float(judged.comparison.total.relative_l2))
            budget = _number_or_none(judged.relative_budget)
        look = CloseLook() if seen is None else self._look(seen)
        return MeasuredOutput(output, look, difference, budget)

    def look(self, component: str, output: str) -> CloseLook:
        """Return the statistics of one output."""
        return self.measured_output(component, output).look

    def _look(self, seen: _OutputStatistics) -> CloseLook:
        judged = seen.judged
        along = [
            profile for n, sums in seen.along.items() if (profile := sums.along(n)) is not None
        ]
        compared = None if judged is None else judged.comparison
        tiles = _tiles(judged)
        gain = bias = None
        if compared is not None:
            gain, bias = _finite(float(compared.total.gain)), compared.rounding_bias_sigmas
        return CloseLook(
            seen.worst,
            _places(judged),
            (*along, tiles) if tiles else tuple(along),
            _histogram(seen),
            () if judged is None else judged.derivation,
            gain,
            bias,
        )


def histogram_of(candidate: Tensor, twin: Tensor) -> Histogram | None:
    """Return how many elements of one output lie how far from the twin's."""
    seen = _OutputStatistics()
    distance, odd = _distances(seen, candidate.detach(), twin.detach())
    _count(seen, distance, odd)
    return _histogram(seen)


def _distances(seen: _OutputStatistics, candidate: Tensor, twin: Tensor) -> tuple[Tensor, int]:
    """Return the distances of finite elements, and how many others are no match."""
    if candidate.dtype not in FORMAT_OF_DTYPE or candidate.dtype.itemsize == 1:
        seen.unit = "codes that differ"
        return (_bytes(candidate) != _bytes(twin)).to(torch.int64), 0
    known = candidate.isfinite() & twin.isfinite()
    odd = int((~known & ~(candidate.isnan() & twin.isnan())).sum())
    return value_ulp_distance(candidate, twin)[known], odd


def _axis_of(component: Component) -> str:
    role = component.role
    named = (axis for begin, axis in _AXES.items() if role.startswith(begin))
    return next(named, "head" if role.startswith("attn.") else "part")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _count(seen: _OutputStatistics, distance: Tensor, odd: int) -> None:
    edges = np.array([*(end + 1 for end in _BINS)])
    bins = np.searchsorted(edges, distance.flatten().numpy(), side="right")
    for at, count in enumerate(np.bincount(bins, minlength=len(_BINS) + 1)):
        seen.counts[at] += int(count)
    seen.counts[-1] += odd


def _histogram(seen: _OutputStatistics) -> Histogram | None:
    if not sum(seen.counts):
        return None
    if seen.unit != "ulps":
        return Histogram(seen.unit, ("equal", "other"), (seen.counts[0], sum(seen.counts[1:])))
    labels = ["0"]
    for before, end in pairwise(_BINS):
        labels.append(str(end) if end == before + 1 else f"{before + 1}-{end}")
    labels += [f"> {_BINS[-1]}", "not finite"]
    last = max(at for at, count in enumerate(seen.counts) if count)
    return Histogram(seen.unit, tuple(labels[: last + 1]), tuple(seen.counts[: last + 1]))


def _number_or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _places(judged: OutputResult | None) -> tuple[JudgedPlace, ...]:
    if judged is None:
        return ()
    return tuple(
        JudgedPlace(f.level, ", ".join(map(str, f.place)), f.measured, f.allowed, f.ratio)
        for f in judged.findings[:_LEVELS]
    )


def _tiles(judged: OutputResult | None) -> AxisProfile | None:
    """Return the error map by tiles of the worst call; None for a single tile."""
    if judged is None or judged.comparison is None:
        return None
    error_sums = judged.comparison.tiles
    if error_sums.rr.ndim != 2 or error_sums.rr.size < 2:
        return None
    tall, wide = judged.comparison.places.tile
    at = [(r, c) for r in range(error_sums.rr.shape[0]) for c in range(error_sums.rr.shape[1])][
        :_MOST
    ]
    labels = tuple(f"{r * tall}, {c * wide}" for r, c in at)
    return AxisProfile(
        "tile (its first row and column)",
        labels,
        tuple(_relative(*_both(error_sums, each)) for each in at),
    )


def _both(sums: ErrorSums, at: tuple[int, int]) -> tuple[float, float]:
    return float(sums.dd[at]), float(sums.rr[at])


def _worst_of(judged: OutputResult, pair: tuple[Tensor, Tensor]) -> WorstElement | None:
    """Return the element that the judgement names, with both codes."""
    named = next((f for f in judged.findings if f.level == "element" and f.measured), None)
    candidate, twin = pair
    if named is None or len(named.place) != 2 or not candidate.ndim:
        return None
    width = candidate.shape[-1]
    row, column = named.place
    flat = [side.detach().reshape(-1, width) for side in (candidate, twin)]
    if row >= len(flat[0]) or column >= width:
        return None
    cells = [side[row : row + 1, column : column + 1] for side in flat]
    values = [float(values_of_any(cell).item()) for cell in cells]
    steps = None
    if candidate.dtype in FORMAT_OF_DTYPE:
        digits = 2 * candidate.dtype.itemsize
        mask = (1 << (8 * candidate.dtype.itemsize)) - 1
        codes = [f"0x{int(codes_of(cell)) & mask:0{digits}x}" for cell in cells]
        if all(map(math.isfinite, values)):
            steps = int(value_ulp_distance(*cells))
    else:
        codes = [f"0x{int(cell) & ((1 << 64) - 1):x}" for cell in cells]
    place = f"row {row}, column {column}"
    return WorstElement(place, codes[0], codes[1], values[0], values[1], steps)
