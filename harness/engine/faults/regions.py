"""Regions to damage or to suspect: rows and columns of an output, weights and their rows."""

from __future__ import annotations

import math
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

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext


# --------------------------------------------------------------------------------------------------
# Find the regions of an output, rows by columns, in which candidate and twin differ.
#
# Faults of one tile, one head or one run of rows are proposed from these regions. An element
# differs if its gap exceeds STEPS spacings of BF16 plus FLOOR times the root mean square of its
# row. The mask only proposes places; the budget decides.
#
# Shape letters: N rows of all leading extents, F features of the last, T tokens, K slots of a
# token.

STEPS = 4 * 2.0**-8  # four spacings of BF16
_SLOT = 0.05  # of a slot's length
FLOOR = 4e-3  # of a row's root mean square
_CANCELLED = 2.0**-16  # of the largest of a row: what summing leaves where terms cancel


@dataclass(frozen=True)
class Region:
    """Half-open ranges of rows and columns in an output viewed as [N, F]."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def index(self) -> tuple[slice, slice]:
        """Return the slices that select the region from [N, F]."""
        return slice(*self.rows), slice(*self.columns)

    @property
    def where(self) -> dict[str, int]:
        """Return the first row and column, for reports."""
        return {"row": self.rows[0], "column": self.columns[0]}


def flat(x: Tensor) -> Tensor:
    """Flatten all leading extents: [N, F]."""
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)


def differing(record: CallRecord, output: str = "out") -> Tensor | None:
    """Mark the elements that differ [N, F]; None if shapes differ or nothing does."""
    if output not in record.outputs or output not in record.expected:
        return None
    c, e = record.outputs[output], record.expected[output]
    if c.shape != e.shape or not c.numel():
        return None
    found = apart(c, e)
    return found if bool(found.any()) else None


def cancelled(c: Tensor, e: Tensor) -> Tensor:
    """Mark differences of two sums that are negligible relative to the largest of their row."""
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1 or c.ndim < 2 or not c.numel():
        return torch.zeros_like(c, dtype=torch.bool)
    c, e = c.double(), e.double()
    largest = (x.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True) for x in (c, e))
    return (c - e).abs() <= torch.minimum(*largest) * _CANCELLED


def length_of_difference(record: CallRecord, output: str = "out") -> float:
    """Return the norm of the difference over that of the expected output; infinite if undefined."""
    c, e = record.outputs.get(output), record.expected.get(output)
    if c is None or e is None or c.shape != e.shape:
        return math.inf
    gap, size = float((c.double() - e.double()).norm()), float(e.double().norm())
    return gap / size if size and math.isfinite(gap / size) else math.inf


def likeness(record: CallRecord, output: str = "out") -> float:
    """Return the cosine of actual and expected output; 0 where it cannot be computed.

    A gain on parts of a sum leaves the cosine large, other operands do not.
    """
    c, e = record.outputs.get(output), record.expected.get(output)
    if c is None or e is None or c.shape != e.shape:
        return 0.0
    c, e = c.double().flatten(), e.double().flatten()
    size = float(c.norm()) * float(e.norm())
    return float(c @ e) / size if size and math.isfinite(size) else 0.0


def wrong_slots(record: CallRecord) -> Tensor | None:
    """Mark slots [T, K] that differ by more than rounding; None for calls without experts."""
    c, e, experts = (
        record.outputs.get("out"),
        record.expected.get("out"),
        record.inputs.get("experts"),
    )
    if c is None or e is None or experts is None or c.shape != e.shape:
        return None
    c, e = c.double(), e.double()
    # Relative to the longer of the two, so that either may be zero.
    far = (c - e).norm(dim=-1) > _SLOT * torch.maximum(c.norm(dim=-1), e.norm(dim=-1))
    found: Tensor = (far | ~c.isfinite().all(-1)) & (experts >= 0)
    return found


def apart(candidate: Tensor, expected: Tensor) -> Tensor:
    """Mark elements that differ by more than rounding explains [N, F]."""
    # Codes (integers, FP8) have no tolerance: they are compared as bits.
    if not expected.dtype.is_floating_point or expected.dtype.itemsize == 1:
        return flat(candidate.contiguous().view(expected.dtype) != expected)
    c, e = flat(candidate).double(), flat(expected).double()
    known = torch.where(e.isfinite(), e, 0.0)
    size = known.square().mean(1, keepdim=True).sqrt() * FLOOR
    beyond = (c - e).abs() > torch.maximum(c.abs(), e.abs()) * STEPS + size
    unlike = ~((c == e) | (c.isnan() & e.isnan())) & ~(c.isfinite() & e.isfinite())
    return torch.where(c.isfinite() & e.isfinite(), beyond, unlike)


def box(mask_NF: Tensor) -> Region:
    """Return the smallest region that contains every marked element."""
    rows, columns = mask_NF.any(1).nonzero(), mask_NF.any(0).nonzero()
    return Region((int(rows[0]), int(rows[-1]) + 1), (int(columns[0]), int(columns[-1]) + 1))


def grown(region: Region, step: tuple[int, int], shape: tuple[int, int]) -> Region:
    """Round a region outwards to whole tiles."""
    (r0, r1), (c0, c1) = region.rows, region.columns
    return Region(
        (r0 // step[0] * step[0], min(-(-r1 // step[0]) * step[0], shape[0])),
        (c0 // step[1] * step[1], min(-(-c1 // step[1]) * step[1], shape[1])),
    )


def replaced(
    outputs: Mapping[str, Tensor], output: str, region: Region, part: Tensor | float
) -> dict[str, Tensor]:
    """Return the outputs with one region of one of them overwritten."""
    made = outputs[output].clone()
    rows = flat(made)
    index = region.index
    if isinstance(part, float):
        rows[index] = part
    else:
        rows[index] = part[: rows[index].shape[0], : rows[index].shape[1]].to(made.dtype)
    return {**outputs, output: rows.reshape(made.shape)}


# --------------------------------------------------------------------------------------------------
# Choose which weights and rows of a component to damage, or to suspect.
#
# A WeightRegion is a set of weight names, perhaps with a run of rows. `plantable` lists regions for
# planting, mild ones included; `suggested` lists regions by where outputs differ, for naming. A
# suggestion only saves trials: the budget decides over all rows, so a wrong one is never named.
#
# Shape letters: T tokens or slots, N outputs.

_EXPERTS = ".experts."
_INSIDE = frozenset({"attn.attend"})  # whose matrices' rows are no columns of the output
_FEW = 4  # weights that are tried one by one
_STRONG = 16  # of a weight's columns one must differ for so many of the weight with most
_RUN = 8  # rows of a block begin and end at multiples of this
_SHARE = 2.0**-8  # of a column's length: BF16 results that fell on neighbours stay below
_STEP = 1.25 * 2.0**-7  # of an element: more than one spacing of BF16
_FINE = 2.0**-8  # of these, for results that are kept in float32
_OFTEN, _SOME = 8, 0.05  # of unequal results: columns above are no healthy ones
_MANY, _STRAY = 16, 2  # results of a column; unequal ones that say nothing by themselves
_OUTPUT_OF = {"wkv": "latent", "wgate": "gate"}


@dataclass(frozen=True)
class WeightRegion:
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


class OutputColumns(NamedTuple):
    """The columns [begin, end) of an output that one weight produces."""

    name: str
    output: str
    begin: int
    end: int


def matrices(context: ComponentContext) -> tuple[str, ...]:
    """Return the local names of the component's weights, vectors included."""
    return tuple(context.weights)


def is_linear(context: ComponentContext, name: str) -> bool:
    """Return whether a parameter is a matrix that multiplies inputs."""
    parameter = parameter_named(context.bound.config, full_name(context, name))
    return parameter.kind is Kind.LINEAR


def full_name(context: ComponentContext, name: str) -> str:
    """Return the parameter's name in the model."""
    block = context.component.block
    if block is None or name in context.component.weights:  # the drafter reads the model's ends
        return name
    return f"{block.prefix}.{name}"


def named_in(context: ComponentContext, names: Sequence[str]) -> str:
    """Describe a set of weights in few words."""
    everything = matrices(context)
    stem = context.name.removesuffix(".act_quant")
    if len(names) == 1:
        return full_name(context, names[0])
    if len(names) == len(everything):
        return f"{stem} (all {len(names)} weights)"
    if not any(_EXPERTS in name for name in names):
        return " and ".join(full_name(context, name) for name in names)
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
    """Return the number in `ffn.experts.3.w1`; -1 for other weights, a stack of experts too."""
    _, _, rest = name.partition(_EXPERTS)
    number = rest.partition(".")[0]
    return int(number) if number.isdigit() else -1


def plantable(context: ComponentContext) -> tuple[WeightRegion, ...]:
    """List spots to plant: all weights, one part, one expert, half of them, one run of rows."""
    names = matrices(context)
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
    spots = [WeightRegion(group, named_in(context, group)) for group in dict.fromkeys(groups)]
    first = groups[1] if len(numbers) > 1 else names
    height = context.weights[first[0]].shape[0]
    for begin, end in ((height // 2, height), (height // 4, height // 4 + height // 8)):
        run = begin // _RUN * _RUN, end // _RUN * _RUN
        seen = is_linear(context, first[0]) and context.role not in _INSIDE
        if seen and run[1] - run[0] >= _RUN:
            spots.append(WeightRegion(first[:1], named_in(context, first[:1]), run))
    return tuple(spots)


_SUGGESTED: WeakKeyDictionary[CallRecord, tuple[WeightRegion, ...]] = WeakKeyDictionary()


def suggested(context: ComponentContext, record: CallRecord) -> tuple[WeightRegion, ...]:
    """List spots by where outputs differ: all weights, those concerned, their rows."""
    known = _SUGGESTED.get(record)
    if known is None:
        known = _SUGGESTED[record] = _suggest(context, record)
    return known


def _suggest(context: ComponentContext, record: CallRecord) -> tuple[WeightRegion, ...]:
    names = matrices(context)
    if not names:
        return ()
    spots = [WeightRegion(names, named_in(context, names))]
    concerned: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    for extent, differs_N in _columns_that_differ(context, record):
        at = differs_N.nonzero().flatten()
        if len(at):
            counts[extent.name] = len(at)
            height = extent.end - extent.begin
            begin = int(at[0]) // _RUN * _RUN
            concerned[extent.name] = begin, min(height, -(-(int(at[-1]) + 1) // _RUN) * _RUN)
    if not concerned:
        # Nothing tells the weights apart: each of few by itself.
        alone = names if 1 < len(names) <= _FEW else ()
        return (*spots, *(WeightRegion((name,), named_in(context, (name,))) for name in alone))
    chosen = tuple(concerned)
    if chosen != names:
        spots.append(WeightRegion(chosen, named_in(context, chosen)))
    # A few columns of a healthy weight may fall on neighbours: those with most are tried alone.
    strong = tuple(name for name in chosen if counts[name] * _STRONG >= max(counts.values()))
    if strong != chosen:
        spots.append(WeightRegion(strong, named_in(context, strong)))
    begin = min(run[0] for run in concerned.values())
    end = max(run[1] for run in concerned.values())
    if (begin, end) != (0, context.weights[chosen[0]].shape[0]):
        spots.append(WeightRegion(chosen, named_in(context, chosen), (begin, end)))
    return tuple(spots)


def _columns_that_differ(
    context: ComponentContext, record: CallRecord
) -> list[tuple[OutputColumns, Tensor]]:
    """Mark, for each weight, the outputs that differ by more than one BF16 spacing."""
    if "experts" in record.inputs and context.role.startswith("ffn.experts.w"):
        return _by_expert(context, record)
    pairs = []
    for extent in extents(context, record):
        c, e = (
            side[extent.output].double().flatten(1)[:, extent.begin : extent.end]
            for side in (record.outputs, record.expected)
        )
        pairs.append((extent, c, e))
    return _judged(pairs, {name: _unit(output) for name, output in record.outputs.items()})


def _judged(
    pairs: list[tuple[OutputColumns, Tensor, Tensor]], units: Mapping[str, float]
) -> list[tuple[OutputColumns, Tensor]]:
    """Compare each weight's columns with the healthiest of all weights."""
    # A healthy weight's share of unequal results is what rounding alone produces.
    usual = min((_usual(c, e) for _, c, e in pairs), default=0.0)
    return [(x, differing_columns(c, e, units[x.output], usual)) for x, c, e in pairs]


def extents(context: ComponentContext, record: CallRecord) -> list[OutputColumns]:
    """Return which outputs each weight produces; empty if outputs do not map to rows of weights."""
    linear = [name for name in matrices(context) if is_linear(context, name)]
    if len(linear) != len(matrices(context)) or not linear or "experts" in record.inputs:
        return []
    heights = [context.weights[name].shape[0] for name in linear]
    if "out" in record.expected:
        width = record.expected["out"].flatten(1).shape[1]
        ends = [sum(heights[: n + 1]) for n in range(len(heights))]
        if ends[-1] != width:
            return []
        return [
            OutputColumns(name, "out", end - height, end)
            for name, height, end in zip(linear, heights, ends, strict=True)
        ]
    outputs = [_OUTPUT_OF.get(name.rpartition(".")[2], "") for name in linear]
    if not all(output in record.expected for output in outputs):
        return []
    return [
        OutputColumns(name, output, 0, height)
        for name, output, height in zip(linear, outputs, heights, strict=True)
    ]


def _by_expert(context: ComponentContext, record: CallRecord) -> list[tuple[OutputColumns, Tensor]]:
    """Mark outputs of routed experts: slots of each expert, and the halves of w13."""
    pairs = []
    slots = record.inputs["experts"].flatten()
    c, e = (side["out"].double().flatten(0, 1) for side in (record.outputs, record.expected))
    by_number = {
        number: list(group) for number, group in groupby(matrices(context), key=expert_of)
    }  # fmt: skip
    for number in slots[slots >= 0].unique().tolist():
        own = slots == number
        begin = 0
        for name in by_number[number]:
            end = begin + context.weights[name].shape[0]
            part = slice(begin, end)
            extent = OutputColumns(name, "out", begin, end)
            pairs.append((extent, c[own][:, part], e[own][:, part]))
            begin = end
    return _judged(pairs, {"out": _unit(record.outputs["out"])})


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
