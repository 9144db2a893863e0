"""Choose which weights and rows of a component to damage, or to suspect.

A Spot is a set of weight names, perhaps with a run of rows. `plantable` lists spots for planting,
mild ones included; `suggested` lists spots by where outputs differ, for naming. A suggestion only
saves trials: the budget decides over all rows, so a wrong one is never named.

Shape letters: T tokens or slots, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

_EXPERTS = ".experts."
_INSIDE = frozenset({"attn.attend"})  # whose matrices' rows are no columns of the output
_FEW = 4  # weights that are tried one by one
_MANY = 4  # of a weight's columns one must differ for so many of the weight with most
_RUN = 8  # rows of a block begin and end at multiples of this
_SHARE = 2.0**-8  # of a column's length: BF16 results that fell on neighbours stay below
_STEP = 1.25 * 2.0**-7  # of an element: more than one spacing of BF16
_FINE = 2.0**-8  # of these, for results that are kept in float32
_OFTEN, _SOME = 8, 0.05  # of unequal results: columns above are no healthy ones
_MANY, _STRAY = 16, 2  # results of a column; unequal ones that say nothing by themselves
_OUTPUT_OF = {"wkv": "latent", "wgate": "gate"}


@dataclass(frozen=True)
class Spot:
    """Some weights of a component by local names; `rows` is a run of their rows, None for all."""

    names: tuple[str, ...]
    words: str
    rows: tuple[int, int] | None = None

    @property
    def where(self) -> dict[str, str | int | float]:
        """Return the place as data, for reports."""
        found: dict[str, str | int | float] = {"weights": self.words}
        if self.rows is not None:
            found["rows"] = f"{self.rows[0]} to {self.rows[1] - 1}"
        return found

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", rows {self.rows[0]} to {self.rows[1] - 1}"
        return self.words + rows


class Extent(NamedTuple):
    """The columns [begin, end) of an output that one weight produces."""

    name: str
    output: str
    begin: int
    end: int


def matrices(scene: Scene) -> tuple[str, ...]:
    """Return the local names of the component's weights, vectors included."""
    return tuple(scene.weights)


def is_linear(scene: Scene, name: str) -> bool:
    """Return whether a parameter is a matrix that multiplies inputs."""
    found = parameter_named(scene.bound.config, full_name(scene, name))
    return found.kind is Kind.LINEAR


def full_name(scene: Scene, name: str) -> str:
    """Return the parameter's name in the model."""
    block = scene.component.block
    if block is None or name in scene.component.weights:  # the drafter reads the model's ends
        return name
    return f"{block.prefix}.{name}"


def named_in(scene: Scene, names: Sequence[str]) -> str:
    """Describe a set of weights in few words."""
    everything = matrices(scene)
    stem = scene.name.removesuffix(".act_quant")
    if len(names) == 1:
        return full_name(scene, names[0])
    if len(names) == len(everything):
        return f"{stem} (all {len(names)} weights)"
    if not any(_EXPERTS in name for name in names):
        return " and ".join(full_name(scene, name) for name in names)
    parts = sorted({name.rpartition(".")[2] for name in names})
    known = {name.rpartition(".")[2] for name in everything}
    numbers = sorted({expert_of(name) for name in names})
    total = len({expert_of(name) for name in everything})
    which = "" if len(parts) == len(known) else f" {' and '.join(parts)}"
    if len(numbers) == total:
        return f"{stem}{which} of all experts"
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{stem}{which} of expert{'s' if len(numbers) > 1 else ''} {shown}"


def expert_of(name: str) -> int:
    """Return the number in `ffn.experts.3.w1`; -1 for other weights."""
    _, _, rest = name.partition(_EXPERTS)
    return int(rest.partition(".")[0]) if rest else -1


def plantable(scene: Scene) -> tuple[Spot, ...]:
    """List spots to plant: all weights, one part, one expert, half of them, one run of rows."""
    names = matrices(scene)
    if not names:
        return ()
    groups = [names]
    numbers = sorted({expert_of(name) for name in names})
    parts = sorted({name.rpartition(".")[2] for name in names})
    if len(numbers) > 1:
        middle = numbers[len(numbers) // 2]
        groups.append(tuple(name for name in names if expert_of(name) == middle))
        groups.append(tuple(name for name in names if expert_of(name) % 2 == 0))
    if len(parts) > 1:
        groups += [tuple(name for name in names if name.endswith(f".{part}")) for part in parts]
    spots = [Spot(group, named_in(scene, group)) for group in dict.fromkeys(groups)]
    first = groups[1] if len(numbers) > 1 else names
    height = scene.weights[first[0]].shape[0]
    for begin, end in ((height // 2, height), (height // 4, height // 4 + height // 8)):
        run = begin // _RUN * _RUN, end // _RUN * _RUN
        seen = is_linear(scene, first[0]) and scene.role not in _INSIDE
        if seen and run[1] - run[0] >= _RUN:
            spots.append(Spot(first[:1], named_in(scene, first[:1]), run))
    return tuple(spots)


_SUGGESTED: WeakKeyDictionary[Sight, tuple[Spot, ...]] = WeakKeyDictionary()


def suggested(scene: Scene, sight: Sight) -> tuple[Spot, ...]:
    """List spots by where outputs differ: all weights, those concerned, their rows."""
    known = _SUGGESTED.get(sight)
    if known is None:
        known = _SUGGESTED[sight] = _suggest(scene, sight)
    return known


def _suggest(scene: Scene, sight: Sight) -> tuple[Spot, ...]:
    names = matrices(scene)
    if not names:
        return ()
    spots = [Spot(names, named_in(scene, names))]
    concerned: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    for extent, differs_N in _columns_that_differ(scene, sight):
        at = differs_N.nonzero().flatten()
        if len(at):
            counts[extent.name] = len(at)
            height = extent.end - extent.begin
            begin = int(at[0]) // _RUN * _RUN
            concerned[extent.name] = begin, min(height, -(-(int(at[-1]) + 1) // _RUN) * _RUN)
    if not concerned:
        # Nothing tells the weights apart: each of few by itself.
        alone = names if 1 < len(names) <= _FEW else ()
        return (*spots, *(Spot((name,), named_in(scene, (name,))) for name in alone))
    chosen = tuple(concerned)
    if chosen != names:
        spots.append(Spot(chosen, named_in(scene, chosen)))
    # A few columns of a healthy weight may fall on neighbours: those with most are tried alone.
    strong = tuple(name for name in chosen if counts[name] * _MANY >= max(counts.values()))
    if strong != chosen:
        spots.append(Spot(strong, named_in(scene, strong)))
    begin = min(run[0] for run in concerned.values())
    end = max(run[1] for run in concerned.values())
    if (begin, end) != (0, scene.weights[chosen[0]].shape[0]):
        spots.append(Spot(chosen, named_in(scene, chosen), (begin, end)))
    return tuple(spots)


def _columns_that_differ(scene: Scene, sight: Sight) -> list[tuple[Extent, Tensor]]:
    """Mark, for each weight, the outputs that differ by more than one BF16 spacing."""
    if "experts" in sight.inputs and scene.role.startswith("ffn.experts.w"):
        return _by_expert(scene, sight)
    pairs = []
    for extent in extents(scene, sight):
        c, e = (
            side[extent.output].double().flatten(1)[:, extent.begin : extent.end]
            for side in (sight.outputs, sight.expected)
        )
        pairs.append((extent, c, e))
    return _judged(pairs, {name: _unit(each) for name, each in sight.outputs.items()})


def _judged(
    pairs: list[tuple[Extent, Tensor, Tensor]], units: Mapping[str, float]
) -> list[tuple[Extent, Tensor]]:
    """Compare each weight's columns with the healthiest of all weights."""
    # A healthy weight's share of unequal results is what rounding alone produces.
    usual = min((_usual(c, e) for _, c, e in pairs), default=0.0)
    return [(x, differing_columns(c, e, units[x.output], usual)) for x, c, e in pairs]


def extents(scene: Scene, sight: Sight) -> list[Extent]:
    """Return which outputs each weight produces; empty if outputs do not map to rows of weights."""
    linear = [name for name in matrices(scene) if is_linear(scene, name)]
    if len(linear) != len(matrices(scene)) or not linear or "experts" in sight.inputs:
        return []
    heights = [scene.weights[name].shape[0] for name in linear]
    if "out" in sight.expected:
        width = sight.expected["out"].flatten(1).shape[1]
        ends = [sum(heights[: n + 1]) for n in range(len(heights))]
        if ends[-1] != width:
            return []
        return [
            Extent(name, "out", end - height, end)
            for name, height, end in zip(linear, heights, ends, strict=True)
        ]
    outputs = [_OUTPUT_OF.get(name.rpartition(".")[2], "") for name in linear]
    if not all(output in sight.expected for output in outputs):
        return []
    return [
        Extent(name, output, 0, height)
        for name, output, height in zip(linear, outputs, heights, strict=True)
    ]


def _by_expert(scene: Scene, sight: Sight) -> list[tuple[Extent, Tensor]]:
    """Mark outputs of routed experts: slots of each expert, and the halves of w13."""
    pairs = []
    slots = sight.inputs["experts"].flatten()
    c, e = (side["out"].double().flatten(0, 1) for side in (sight.outputs, sight.expected))
    by_number = {
        number: list(group) for number, group in groupby(matrices(scene), key=expert_of)
    }  # fmt: skip
    for number in slots[slots >= 0].unique().tolist():
        own = slots == number
        begin = 0
        for name in by_number[number]:
            end = begin + scene.weights[name].shape[0]
            part = slice(begin, end)
            extent = Extent(name, "out", begin, end)
            pairs.append((extent, c[own][:, part], e[own][:, part]))
            begin = end
    return _judged(pairs, {"out": _unit(sight.outputs["out"])})


def differing_columns(
    c_TN: Tensor, e_TN: Tensor, unit: float = 1.0, usual: float | None = None
) -> Tensor:
    """Mark columns [N] that differ by more than rounding; `unit` is in spacings of BF16.

    `usual` is the share of unequal results in healthy columns, of this weight or of others.
    """
    d, size = (c_TN - e_TN).abs(), e_TN.abs()
    odd = ~(d.isfinite() & size.isfinite())
    d, size = d.masked_fill(odd, 0.0), size.masked_fill(odd, 0.0)
    length = size.square().sum(0).sqrt()
    floor = length.square().mean().sqrt() / 4
    share = _SHARE if len(d) >= _MANY else _STEP  # of few results one on a neighbour is much
    far = d.square().sum(0).sqrt() > share * unit * torch.maximum(length, floor)
    rough = size.square().mean(1, keepdim=True).sqrt() * 2.0**-10
    counted = ((d > 0) | odd).double()
    unequal = counted.mean(0)
    healthy = _usual(c_TN, e_TN) if usual is None else usual
    often = (unequal > _OFTEN * healthy + _SOME) & (counted.sum(0) > _STRAY)
    apart = (d > (_STEP * size + rough) * unit) | (odd & _unlike(c_TN, e_TN))
    differs: Tensor = far | often | apart.any(0)
    return differs


def _usual(c_TN: Tensor, e_TN: Tensor) -> float:
    """Return the share of unequal results in the better quarter of columns."""
    return float((c_TN != e_TN).double().mean(0).quantile(0.25))


def _unit(output: Tensor) -> float:
    """Return the rounding step relative to BF16; float32 sums err by several steps of their own."""
    return _FINE if output.dtype.itemsize > 2 else 1.0


def _unlike(c: Tensor, e: Tensor) -> Tensor:
    """Mark elements that differ, with NaN equal to NaN."""
    return ~((c == e) | (c.isnan() & e.isnan()))
