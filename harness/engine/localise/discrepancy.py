"""The record of a discrepancy: whose it is (a component or an edge), and where in a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.harness.capture.files.records import Phase
from degarble.harness.engine.budget.budget import HEADROOM, DifferenceEvidence, spacing
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.compare.compare import TILE
from degarble.harness.engine.faults.model_faults import RowPositions
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.model.family import family_of
from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedStep
    from degarble.harness.engine.budget.budget import OutputResult
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.localise.replay import Batch
    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Attribution to one component or edge.
#
# An output that is wrong for right inputs belongs to its component. An input that is wrong although
# its producers' outputs are right belongs to the consumer's edge. Memory is the exception: rows,
# entries and state kept by an earlier call or a cache are attributed to the component that writes
# them. The site always says where the wrong value was recorded. The fault museum states its
# expected answers by the same function.

_WRITERS = (".kv_write", ".compressor.write")
_STATE = "state_"


class DiscrepancyKind(StrEnum):
    """What is wrong at a site."""

    OUTPUT = "output"  # it comes out wrong, given what went in
    EDGE = "edge"  # it arrives wrong, given what its producers put out
    CHANGED = "changed"  # the component wrote into its inputs
    MISSING = "missing"  # it did not run where it should have
    FORM = "form"  # a tensor that is absent, of another shape or another dtype
    FALLBACK = "fallback"  # a quantised product that ran with unquantised operands


@dataclass(frozen=True, eq=False)
class Discrepancy:
    """One discrepancy, and the call that shows it best.

    `component` is attributed. `site` is where the value was recorded (an output, or a consumer's
    input), and `context` is the component of that site. `where` narrows it down. `more` are calls
    of other steps with the same discrepancy. A missing call has no record.
    """

    kind: DiscrepancyKind
    component: str
    context: ComponentContext
    site: Site
    sentence: str
    record: CallRecord | None = None
    judged: OutputResult | None = None
    where: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    steps: tuple[int, ...] = ()
    more: tuple[CallRecord, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the output, or of the input on an edge."""
        return self.site.name or "out"


def source_of(component: Component, name: str) -> Site | None:
    """Return the site that an input comes from, even through memory; None for model inputs."""
    own = next(each for each in component.inputs if each.name == name)
    if own.sources:
        return own.sources[0]
    if not name.startswith(_STATE):
        return None
    # State that the component writes itself, in an earlier call.
    if name in component.outputs:
        return Site(component.name, Port.OUT, name)
    # state_X holds earlier rows of the input X, so X's producer wrote them.
    kept = name.removeprefix(_STATE)
    found = (e for e in component.inputs if e.name == kept and e.sources)
    return next((each.sources[0] for each in found), None)


def is_memory(component: Component, name: str) -> bool:
    """Tell whether an input was kept between calls: state of earlier calls, or rows of a cache."""
    source = source_of(component, name)
    if source is None:
        return False
    return name.startswith(_STATE) or source.component.endswith(_WRITERS)


def blamed_on_edge(component: Component, name: str) -> str:
    """Return the component to attribute a wrong input to, where its producers are right."""
    source = source_of(component, name)
    if source is not None and is_memory(component, name):
        return source.component
    return component.name


# --------------------------------------------------------------------------------------------------
# Location in a tensor: phase, sequence, first position, head, expert, columns.
#
# A part is named only if it is a strict part of the tensor, so `where` is empty for a difference
# that is everywhere. A first position at a constant of the config is given with that constant's
# name: the sliding window (128), a compress ratio (4). A difference that is exact at position 0
# only suggests RoPE.
#
# Shape letters: R rows (tokens), W columns.

if TYPE_CHECKING:
    Where = dict[str, str | int | float]

_AXES = MappingProxyType(
    {
        "attn.q_head_norm_rope": "head", "attn.attend": "head", "attn.indexer.q": "head",
        "attn.indexer.weights_proj": "head", "attn.hc_post": "stream", "ffn.hc_post": "stream",
        "ffn.experts.w13": "slot", "ffn.experts.w2": "slot", "ffn.experts.act_quant": "slot",
    }
)  # fmt: skip
_KINDS_WITH_HEADS = frozenset({"traced.attention", "traced.rotation"})
_HALVES = ("w13",)
_MOST_SPANS = 4  # ranges that are written out; more are counted


@dataclass(frozen=True)
class DifferenceLocation:
    """The location of a difference, as data and as the end of a sentence."""

    where: Mapping[str, str | int | float] = field(default_factory=dict)
    sentence: str = ""


def row_positions(batch: Batch, steps: Mapping[int, CapturedStep]) -> RowPositions:
    """Look the rows up in their steps."""
    if batch.whole is not None and batch.kept is not None:
        return row_positions(batch.whole, steps).select(batch.kept)
    decode = torch.zeros(len(batch.step_of), dtype=torch.bool)
    sequence = torch.full((len(batch.step_of),), -1)
    calls = torch.full((len(batch.step_of), 3), -1)
    for call, span in zip(batch.calls, batch.spans, strict=True):
        step = steps[call.step]
        decode[span] = step.phase is Phase.DECODE
        count = span.stop - span.start
        owners = step.sequences
        # One row per sequence (the last tokens), not one per token.
        if count != len(owners):
            owners = tuple(dict.fromkeys(owners))
        calls[span] = torch.tensor((call.step, len(step.tokens), -1))
        if count == len(owners):
            sequence[span] = torch.tensor(owners)
            stops = dict(zip(step.sequences, step.positions, strict=True))
            calls[span, 2] = torch.tensor([stops[owner] + 1 for owner in owners])
    return RowPositions(batch.position_of, decode, sequence, batch.inputs.get("experts"), calls)


def locate_difference(
    config: Config,
    component: Component,
    pair: tuple[Tensor, Tensor],
    rows: RowPositions | None = None,
    slack: Tensor | None = None,
) -> DifferenceLocation:
    """Return where a candidate, the first of `pair`, differs from its twin."""
    bad, certain = beyond(*pair, slack)
    evidence = DifferenceEvidence.from_pair(pair, slack, certain=certain)
    if not bad.ndim or not bool(bad.any()):
        return DifferenceLocation()
    where: Where = {}
    words: list[str] = []
    count = bad.shape[0]
    by_row = bad.reshape(count, -1).any(1)
    if rows is not None and len(rows.position) == count:
        asked = torch.ones(count, dtype=torch.bool)
        lines: list[str] = []
        if rows.experts is not None and rows.experts.shape[:1] == (count,):
            lines, asked = _by_expert(bad, rows.experts, where, evidence)
        words += _by_part(by_row & asked, rows, where, evidence)
        if certain and _is_healthy_before(by_row & asked, asked, rows, evidence):
            words += _in_time(config, component, by_row[asked], rows.select(asked), where)
        words += lines
    words += _by_axis(component, bad, where, evidence)
    words += _by_column(config, component, bad, where, evidence)
    one = certain and count > 1 and int(by_row.sum()) == 1 and "first position" not in where
    if one and evidence.only({"in"}, {"in": by_row, "out": ~by_row}):
        where["row"] = int(by_row.nonzero()[0])
    return DifferenceLocation(where, f" ({', '.join(words)})" if words else "")


def beyond(candidate: Tensor, twin: Tensor, slack: Tensor | None) -> tuple[Tensor, bool]:
    """Return which elements exceed what one element may differ by, and whether there are any.

    If none does, return all that differ; healthy roundings are among them. Without slack each
    difference counts.
    """
    # torch cannot compare FP8: compare the codes.
    if candidate.dtype.itemsize == 1 and candidate.dtype.is_floating_point:
        candidate, twin = candidate.view(torch.uint8), twin.view(torch.uint8)
    differs = (candidate != twin) & ~(candidate.isnan() & twin.isnan())
    if slack is None or candidate.dtype not in FORMAT_OF_DTYPE:
        return differs, True
    c, t = candidate.double(), twin.double()
    known = c.isfinite() & t.isfinite()
    room = slack.double()
    step = torch.from_numpy(
        spacing((t.abs().nan_to_num(0, 0, 0) + room).numpy(), FORMAT_OF_DTYPE[candidate.dtype])
    )
    far = torch.where(known, (c - t).abs() > (room + step) / HEADROOM, differs)
    return (far, True) if bool(far.any()) else (differs, False)


def outputs_beyond(
    context: ComponentContext, record: CallRecord, outputs: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, bool]] | None:
    """Return `beyond` of each output by the healthy twin's budget; None where none is known."""
    call = JudgeableCall.from_twin(context.bound, context.name, record.inputs, record.expected)
    try:
        budgets = budgets_of(call)
    except (DegarbleError, RuntimeError):
        return None
    found = {}
    for name, right in record.expected.items():
        output, budget = outputs.get(name), budgets.get(name)
        if output is None or output.shape != right.shape or not right.ndim:
            return None
        slack = None
        if budget is not None and right.is_floating_point() and right.dtype.itemsize > 1:
            slack = budget.slack.expand(right.shape)
        found[name] = beyond(output.to(right.dtype), right, slack)
    return found


def _by_part(
    by_row: Tensor, rows: RowPositions, where: Where, evidence: DifferenceEvidence
) -> Iterator[str]:
    """Yield words for phase and sequence."""
    struck = {"decode" if each else "prefill" for each in rows.decode[by_row].unique().tolist()}
    phases = {"prefill": ~rows.decode, "decode": rows.decode}
    if all(bool(tensor.any()) for tensor in phases.values()):
        for phase in evidence.only(struck, phases):
            where["phase"] = phase
            yield f"only in {phase}"
    owners = rows.sequence.unique().tolist()
    if len(owners) > 1 and min(owners) >= 0:
        of_bad = set(rows.sequence[by_row].unique().tolist())
        found = evidence.only(of_bad, {owner: rows.sequence == owner for owner in owners})
        if found:
            where["sequence"] = spans(found)
            yield f"only sequence {where['sequence']} of {len(owners)}"


def _is_healthy_before(
    by_row: Tensor, asked: Tensor, rows: RowPositions, evidence: DifferenceEvidence
) -> bool:
    """Tell whether the rows before the first differing one are healthy together."""
    if not bool(by_row.any()):
        return False
    before = asked & (rows.position < int(rows.position[by_row].min()))
    return not bool(before.any()) or bool(evidence.only({"on"}, {"on": by_row, "before": before}))


def _in_time(
    config: Config, component: Component, by_row: Tensor, rows: RowPositions, where: Where
) -> Iterator[str]:
    """Yield words for the first position."""
    positions = rows.position
    if not len(positions) or int(positions.min()) < 0:
        return
    first = int(positions[by_row].min())
    before = positions < first
    if bool(before.any()) and first > 0:
        where["first position"] = first
        named = constant_at(config, component, first)
        if int(by_row.sum()) == 1:
            yield f"only position {first}" + (f", {named}" if named else "")
        elif bool(before[positions == 0].any()) and first <= 1:
            yield "exact at position 0"
        elif "phase" not in where or named:
            yield f"from position {first} on" + (f", {named}" if named else "")


def constant_at(config: Config, component: Component, position: int) -> str:
    """Return the config's constant that a position equals; empty where it is none."""
    known = family_of(config).named_positions(config, component)
    if position in known:
        return known[position]
    if position and position % TILE[0] == 0:
        return f"{position // TILE[0]} x {TILE[0]}"
    return ""


def _by_expert(
    bad: Tensor, experts: Tensor, where: Where, evidence: DifferenceEvidence
) -> tuple[list[str], Tensor]:
    """Return words for the experts, and the rows routed to them; only those rows tell more."""
    # Row masks [T]; `bad` is [T, K, ...], `experts` [T, K].
    everyone = torch.ones(len(bad), dtype=torch.bool)
    if bad.ndim < 3 or bad.shape[:2] != experts.shape:
        return [], everyone
    hit = bad.reshape(*experts.shape, -1).any(-1)
    visited, hurt = experts.unique().tolist(), experts[hit].unique().tolist()
    struck = evidence.only(hurt, {number: experts == number for number in visited})
    if not struck:
        return [], everyone
    where["expert"] = struck[0] if len(struck) == 1 else spans(struck)
    clean = sorted(set(visited) - set(struck))
    words = f"only expert {where['expert']} of the {len(visited)} that were visited"
    # Shorter to name the one healthy expert.
    if len(clean) == 1:
        words = f"expert {clean[0]} exact"
    return [words], torch.isin(experts, torch.tensor(struck)).any(1)


def axis_of(component: Component) -> str:
    """Return what the middle one of three axes of an output counts; empty where nobody knows."""
    of_kind = "head" if component.kind in _KINDS_WITH_HEADS else ""
    return _AXES.get(component.role, of_kind)


def _by_axis(
    component: Component, bad: Tensor, where: Where, evidence: DifferenceEvidence
) -> Iterator[str]:
    axis = _AXES.get(component.role)
    if axis is None or bad.ndim != 3 or "expert" in where:
        return
    hit = bad.any(2).any(0)
    places = torch.eye(len(hit), dtype=torch.bool)[:, None].expand(-1, len(bad), -1)
    struck = evidence.only(hit.nonzero().flatten().tolist(), dict(enumerate(places)))
    if struck:
        where[axis] = struck[0] if len(struck) == 1 else spans(struck)
        yield f"only {axis} {where[axis]} of {len(hit)}"


def _by_column(
    config: Config, component: Component, bad: Tensor, where: Where, evidence: DifferenceEvidence
) -> Iterator[str]:
    """Yield words for heads or halves that are concatenated, else for a range of columns."""
    width = bad.shape[-1]
    struck = bad.reshape(-1, width).any(0).nonzero().flatten().tolist()
    if bad.ndim < 2 or (evidence.certain and len(struck) == width):
        return
    column = torch.arange(width)
    if component.role.endswith(_HALVES) and width % 2 == 0:
        places = {"gate": column < width // 2, "up": column >= width // 2}
        halves = {("gate", "up")[at * 2 // width] for at in struck}
        for half in evidence.only(halves, places, columns=True):
            where["half"] = half
            yield f"only the {half} half"
    heads = getattr(config, "num_attention_heads", 0)
    if component.role == "attn.wq_b" and heads and width % heads == 0:
        # [W] head of each column
        of_head = column * heads // width
        hit = {at * heads // width for at in struck}
        found = evidence.only(hit, {n: of_head == n for n in range(heads)}, columns=True)
        if found:
            where["head"] = found[0] if len(found) == 1 else spans(found)
            yield f"only head {where['head']} of {heads}"
            return
    whole = struck == list(range(struck[0], struck[-1] + 1))
    if not evidence.certain or not (whole or len(struck) <= _MOST_SPANS):
        return
    inside = torch.isin(column, torch.tensor(struck))
    if evidence.only({"in"}, {"in": inside, "out": ~inside}, columns=True) == ["in"]:
        where["columns"] = spans(struck)
        yield f"only columns {where['columns']} of {width}"


def location_in_steps(
    steps: Mapping[int, CapturedStep], wrong: set[int], judged: set[int]
) -> DifferenceLocation:
    """Return the simplest rule that separates the steps that differ from the others."""
    right = judged - wrong
    if not right or not wrong:
        return DifferenceLocation()
    phases = [{steps[n].phase for n in side} for side in (wrong, right)]
    if len(phases[0]) == 1 and not phases[0] & phases[1]:
        phase = str(next(iter(phases[0])))
        return DifferenceLocation({"phase": phase}, f"only in {phase}")
    if len(wrong) == 1:
        return DifferenceLocation({"step": min(wrong)}, f"only in step {min(wrong)}")
    if min(wrong) > max(right):
        return DifferenceLocation({"steps": f"from {min(wrong)}"}, f"from step {min(wrong)} on")
    if max(wrong) < min(right):
        return DifferenceLocation({"steps": f"to {max(wrong)}"}, f"up to step {max(wrong)}")
    tokens = [[len(steps[n].tokens) for n in side] for side in (wrong, right)]
    if min(tokens[0]) > max(tokens[1]):
        return DifferenceLocation(
            {"tokens": f">= {min(tokens[0])}"}, f"in calls of {min(tokens[0])} tokens on"
        )
    if max(tokens[0]) < min(tokens[1]):
        most = max(tokens[0])
        return DifferenceLocation({"tokens": f"<= {most}"}, f"in calls of {most} tokens at most")
    listed = spans(sorted(wrong))
    return DifferenceLocation({"steps": listed}, f"only in steps {listed}")


def spans(numbers: list[int]) -> str:
    """Write numbers as ranges (0-3, 7); count them where there are many ranges."""
    found = sorted(set(numbers))
    breaks = [0, *(at for at in range(1, len(found)) if found[at] != found[at - 1] + 1), len(found)]
    parts = [(found[a], found[b - 1]) for a, b in pairwise(breaks)]
    if len(parts) > _MOST_SPANS:
        return f"{len(found)} from {found[0]} to {found[-1]}"
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
