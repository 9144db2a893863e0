"""Judge all calls of one component against its twin, and report what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN, DegarbleError, InvalidArgument
from degarble.harness.base.sums import PairSums
from degarble.harness.capture.files.records import site_of
from degarble.harness.engine.budget.budget import OutputResult, nearer_than_the_twin
from degarble.harness.engine.budget.judging import is_joint, judge_outputs
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.budget.rules import JudgeableCall as Judgeable
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
from degarble.harness.engine.localise.discrepancy import (
    DifferenceLocation,
    Discrepancy,
    DiscrepancyKind,
    beyond,
    locate_difference,
    location_in_steps,
    row_positions,
)
from degarble.harness.engine.localise.judgeable_rows import (
    OVERFLOW,
    finite_part,
    is_finite,
    part_without,
    rows_out_of_range,
)
from degarble.harness.engine.localise.recorded_run import is_in_part
from degarble.harness.engine.localise.replay import Batch, Replay, maker_of, replayed
from degarble.harness.engine.localise.tensor_forms import (
    NOT_FINITE,
    NonFiniteOutput,
    aligned,
    count_equal,
    earlier_of,
    is_poisoned,
    non_finite_of,
    poisoned,
    same_values,
    wrong_forms,
)
from degarble.harness.model.sites import Port
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict
from degarble.references.linears import X_LOOSE, decode_activations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep
    from degarble.harness.engine.localise.judgeable_rows import JudgeablePart
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.engine.localise.replay import TwinComponents
    from degarble.harness.model.components import Component
    from degarble.references.binding import BoundModel


# --------------------------------------------------------------------------------------------------
# Judging, and the three cosines.
#
# A linear after a quantisation is given to the BF16 reference with the values before quantisation.
# Rows that a NaN or infinity can reach are left out and counted; for these only one question is
# judged: is the candidate finite where its twin is? An output without a budget is UNDECIDED.

if TYPE_CHECKING:
    Tensors = Mapping[str, Tensor]
    Looked = Callable[[Replay, Mapping[str, OutputResult]], None]  # tensors still in memory

_MAKERS = 4  # quantisations whose inputs are kept
PAIRS = ("candidate and twin", "candidate and reference", "twin and reference")


@dataclass(frozen=True, eq=False)
class _View:
    """The judged part of a batch: all of it, or the remaining rows."""

    replay: Replay
    judged: Mapping[str, OutputResult]
    part: JudgeablePart | None = None
    why: str = ""  # rows were left out


@dataclass(frozen=True, eq=False)
class JudgedBatch:
    """A replay of some calls, and the result for each of its outputs."""

    replay: Replay
    judged: Mapping[str, OutputResult]
    plain: Tensor | None = None  # values before quantisation, if known
    meant: Tensors = field(default_factory=dict)  # the BF16 reference's outputs on its inputs


@dataclass(eq=False)
class OutputRow:
    """One output of one component over the whole run: a row of the table."""

    component: Component
    output: str
    verdict: Verdict = Verdict.AGREES
    judged: OutputResult | None = None  # the worst
    undecided: str = ""
    budgetless: bool = False  # it could be replayed, but has no budget
    calls: int = 0
    elements: int = 0
    identical: int = 0
    flips: int = 0
    choices: int = 0
    left_out: int = 0  # rows that were not judged, of outputs judged in part
    judged_rows: int = 0  # in the calls that have such rows
    why_left_out: str = ""
    cosines: dict[str, PairSums] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Return the worst difference in units of budget; NaN where nothing is claimed."""
        if self.verdict is Verdict.UNDECIDED:
            return math.nan
        return self.judged.ratio if self.judged else 0.0

    @property
    def partly(self) -> str:
        """Return how many rows were not judged, and why; empty where all were."""
        if not self.left_out:
            return ""
        every = self.left_out + self.judged_rows
        return f"{self.left_out} of {every} rows were left out: {self.why_left_out}"

    def leave_out(self, part: JudgeablePart, why: str) -> None:
        """Count rows that were not judged."""
        self.left_out += part.left_out
        self.judged_rows += len(part.kept)
        self.why_left_out = self.why_left_out or why

    def take(self, judged: OutputResult, *, replayed_at_all: bool) -> None:
        """Add the result of some calls."""
        self.flips += judged.flips.count
        self.choices += judged.flips.total
        if judged.verdict is Verdict.UNDECIDED:
            self.undecided = self.undecided or judged.undecided
            self.budgetless |= replayed_at_all
            if self.verdict is Verdict.AGREES:
                self.verdict = Verdict.UNDECIDED
            return
        if self.judged is None or judged.ratio > self.judged.ratio:
            self.judged = judged
        if judged.verdict is Verdict.DIFFERS:
            self.verdict = Verdict.DIFFERS


@dataclass(eq=False)
class JudgedComponent:
    """The results of all calls of one component."""

    component: Component
    rows: dict[str, OutputRow] = field(default_factory=dict)
    pieces: list[JudgedBatch] = field(default_factory=list)  # those with an output that differs
    healthy: list[JudgedBatch] = field(default_factory=list)  # a few others, see `_take`
    non_finite: NonFiniteOutput | None = None
    steps: set[int] = field(default_factory=set)  # in which something of it was judged

    @property
    def differs(self) -> list[OutputRow]:
        """Return the outputs that differ, the worst first."""
        rows = [row for row in self.rows.values() if row.verdict is Verdict.DIFFERS]
        return sorted(rows, key=lambda row: -row.ratio)


class Judge:
    """Judges component after component, in the order in which they run."""

    def __init__(
        self,
        known: TwinComponents,
        reference: BoundModel | None = None,
        looked: Looked | None = None,
    ) -> None:
        self._known = known
        self._looked = looked
        self._reference = reference
        self._plain: dict[str, dict[int, Tensor]] = {}  # before quantisation, by maker and step

    def component(
        self, component: Component, found: Sequence[Batch], *, briefly: bool = False
    ) -> JudgedComponent:
        """Judge all calls of one component; `briefly`: small ones first, stop at the first finding.

        After a brief run only `differs` is valid for a component that differs.
        """
        judged_component = JudgedComponent(component)
        # Small batches are cheap and usually enough to find a difference.
        for batch in _small_first(found) if briefly else found:
            self._take(judged_component, replayed(self._known, batch))
            if briefly and judged_component.differs:
                break
        return self._cleared(judged_component)

    def replays(self, component: Component, found: Sequence[Replay]) -> JudgedComponent:
        """Judge replays of one component."""
        judged_component = JudgedComponent(component)
        for replay in found:
            self._take(judged_component, replay)
        return self._cleared(judged_component)

    def _cleared(self, judged_component: JudgedComponent) -> JudgedComponent:
        if not judged_component.differs:
            judged_component.healthy.clear()  # nobody asks for their tensors
        return judged_component

    def compared(self, component: Component, found: Sequence[Batch]) -> JudgedComponent:
        """Return a result of distances and counts alone, for as many calls as can be replayed."""
        made = JudgedComponent(component)
        for batch in _small_first(found):
            replay = replayed(self._known, batch)
            made.rows |= {
                name: OutputRow(component, name) for name in batch.outputs if name not in made.rows
            }
            self._count(made, replay)
            self._compare(made, replay)
        return made

    def _count(self, component: JudgedComponent, replay: Replay) -> None:
        store = self._known.twin.numerics.store
        for name, output in replay.batch.outputs.items():
            row, twin = component.rows.get(name), replay.expected.get(name)
            if row is None:
                continue
            row.elements += output.numel()
            if twin is not None and not wrong_forms({name: output}, {name: twin}, store):
                pair = aligned({name: output}, {name: twin})[name]
                alike = same_values(*pair)
                row.identical += output.numel() if alike else count_equal(*pair)

    def _take(self, component: JudgedComponent, replay: Replay) -> None:
        """Judge a batch, and its remaining rows where some cannot be judged."""
        batch, whole = replay.batch, self.judged(replay)
        view = self._view(replay, whole)
        poisoned_ones = [
            n
            for n, output_result in whole.items()
            if _differs(output_result) and is_poisoned(output_result)
        ]
        if self._looked is not None:
            self._looked(view.replay, view.judged)
        for name, result in whole.items():
            row = component.rows.setdefault(name, OutputRow(component.component, name))
            row.calls += len(batch.calls)
            row.take(view.judged.get(name, result), replayed_at_all=not replay.undecided)
            if view.part is not None:
                row.leave_out(view.part, view.why)
            if name in poisoned_ones:
                row.take(result, replayed_at_all=True)
        if any(
            output_result.verdict is not Verdict.UNDECIDED for output_result in view.judged.values()
        ):
            component.steps |= {call.step for call in view.replay.batch.calls}
        self._count(component, replay)
        meant = self._compare(component, replay)
        if any(map(_differs, view.judged.values())):
            component.pieces.append(
                self._piece(view, meant, self._quantised(component.component, batch))
            )
        elif poisoned_ones:
            plain = self._quantised(component.component, batch)
            component.pieces.append(JudgedBatch(replay, whole, plain, meant))
        elif all(result.verdict is Verdict.AGREES for result in whole.values()):
            known = [*component.healthy, JudgedBatch(replay, whole)]
            known.sort(key=lambda piece: -len(piece.replay.batch.step_of))
            # The largest show most rows, the smallest what is so of small calls: of decode.
            component.healthy = known[:_MORE] + known[_MORE:][-1:]
        component.non_finite = earlier_of(component.non_finite, non_finite_of(replay))

    def _piece(self, view: _View, meant: Tensors, plain: Tensor | None) -> JudgedBatch:
        part = view.part
        if part is None:
            return JudgedBatch(view.replay, view.judged, plain, meant)
        cut = {name: rows for name, t in meant.items() if (rows := part.rows_of(t)) is not None}
        some = None if plain is None else part.rows_of(plain)
        return JudgedBatch(view.replay, view.judged, some, cut)

    def _view(self, replay: Replay, whole: Mapping[str, OutputResult]) -> _View:
        """Return the judgeable part of a batch: without rows that overflow or depend on a NaN."""
        view = _View(replay, whole)
        if replay.undecided or any(map(is_poisoned, whole.values())):
            part = finite_part(self._known, replay)
            if part is not None:
                view = _View(part.replay, {**whole, **self.judged(part.replay)}, part, NOT_FINITE)
        if all(
            result.verdict is Verdict.AGREES or is_poisoned(result)
            for result in view.judged.values()
        ):
            return view
        rows = rows_out_of_range(self._known, view.replay)
        if rows is None:
            return view
        part = part_without(self._known, view.replay, rows)
        if part is None:
            why = f"all rows were left out: {OVERFLOW}"
            none = {name: OutputResult(name, Verdict.UNDECIDED, undecided=why) for name in whole}
            return _View(view.replay, none)
        kept = part if view.part is None else part.within(view.part)
        return _View(part.replay, {**view.judged, **self.judged(part.replay)}, kept, OVERFLOW)

    def judged(self, replay: Replay) -> dict[str, OutputResult]:
        """Judge every output of a replay against the twin's."""
        outputs = replay.batch.outputs
        if replay.undecided:
            return {
                name: OutputResult(name, Verdict.UNDECIDED, undecided=replay.undecided)
                for name in outputs
            }
        wrong = wrong_forms(outputs, replay.expected, self._known.twin.numerics.store)
        if wrong:
            return wrong
        both = aligned(outputs, replay.expected)
        if all(same_values(*pair) for pair in both.values()):
            return {name: OutputResult(name, Verdict.AGREES) for name in both}
        # An output that was not captured counts as the twin's: budgets read all outputs of a
        # component.
        twins = {**replay.expected, **{name: pair[1] for name, pair in both.items()}}
        candidate = {**twins, **{name: pair[0] for name, pair in both.items()}}
        call = Replay(replay.batch, twins, inputs=replay.inputs).judgeable(self._known)
        # Codes without their scales cannot be judged.
        if is_joint(call) and len(both) < len(twins):
            absent = ", ".join(name for name in twins if name not in both)
            why = f"it is judged together with what was not captured: {absent}"
            return {n: OutputResult(n, Verdict.UNDECIDED, undecided=why) for n in both}
        if is_finite(self._known, replay):
            try:
                found = judge_outputs(call, candidate)
                return {name: found[name] for name in both}
            except InvalidArgument:
                pass  # such large operands have no budget: check only finite against not finite
            except RuntimeError as error:
                # The twin accepts these extents but no derivation covers them: UNDECIDED.
                why = f"no budget fits its extents: {str(error).splitlines()[0][:200]}"
                return {n: OutputResult(n, Verdict.UNDECIDED, undecided=why) for n in both}
        return {name: poisoned(name, *pair) for name, pair in both.items()}

    def _compare(self, component: JudgedComponent, replay: Replay) -> Tensors:
        """Add the three cosines of a replay; return the reference's outputs on its inputs."""
        name, expected = component.component.name, replay.expected
        values = self._values(name, replay.batch.outputs)
        twins = self._values(name, expected)
        meant = self._meant(component.component, replay)
        for output, value in values.items():
            if output not in component.rows:
                continue
            sides = [value, twins.get(output), meant.get(output)]
            sums = component.rows[output].cosines
            for pair, found in _sums_of(
                [side if side is None or side.shape == value.shape else None for side in sides]
            ).items():
                sums.setdefault(pair, PairSums()).merge(found)
        return meant

    def _values(self, name: str, outputs: Tensors) -> dict[str, Tensor]:
        """Return outputs as numbers: decode codes, leave out choices."""
        if "codes" in outputs:
            form = self._format_made(name)
            try:
                made = None if form is None else decode_activations(outputs, form, torch.float32)
            except CANNOT_RUN:
                made = None  # codes of another form; judging reports that
            return {} if made is None else {"codes": made}
        return {n: output for n, output in outputs.items() if output.is_floating_point()}

    def _format_made(self, maker: str) -> str | None:
        linear = maker.removesuffix(".act_quant")
        linear = f"{linear}.w2" if maker.endswith("ffn.experts.act_quant") else linear
        return self._known.activation(linear)

    def _meant(self, component: Component, replay: Replay) -> Tensors:
        """Return the BF16 reference's outputs on the same inputs; empty if it has no such call."""
        reference, name, batch = self._reference, component.name, replay.batch
        if reference is self._known.twin and replay.expected and not maker_of(component):
            return replay.expected  # a twin that quantises nothing here is the reference itself
        if "codes" in batch.outputs:
            x = self._unquantised(name, batch)
            made = None if x is None else _per_slot(x, batch)
            return {} if made is None else {"codes": made}
        if reference is None or name not in reference.calls:
            return {}
        inputs = dict(batch.inputs)
        if "codes" in inputs:
            x = self._quantised(component, batch)
            if x is None:
                return {}
            for coded in ("codes", "block_scale", "tensor_scale"):
                inputs.pop(coded, None)
            inputs["x"] = x
        try:
            with torch.inference_mode():
                return dict(reference.calls[name](inputs, reference.weights_of(name)))
        except CANNOT_RUN:
            return {}

    def _unquantised(self, maker: str, batch: Batch) -> Tensor | None:
        """Return the values before quantisation; kept for the linear that runs next."""
        plain = self._known.plain
        if maker in plain.calls and "codes" in batch.inputs:
            return None  # the BF16 model takes no codes; judging reports them
        try:
            with torch.inference_mode():
                x = (
                    plain.calls[maker](batch.inputs, plain.weights_of(maker))["out"]
                    if maker in plain.calls
                    else batch.inputs["x"]
                )
        except CANNOT_RUN:
            return None
        parts = {call.step: batch.part(at, x) for at, call in enumerate(batch.calls)}
        self._plain[maker] = self._plain.pop(maker, {}) | parts
        # Drop the oldest quantisation: components run in order, so its linear has been judged.
        while len(self._plain) > _MAKERS:
            self._plain.pop(next(iter(self._plain)))
        return x

    def _quantised(self, component: Component, batch: Batch) -> Tensor | None:
        """Return the values before quantisation for these calls, if still kept."""
        if "codes" not in batch.inputs:
            return batch.inputs.get("x") if maker_of(component) else None
        held = self._plain.get(maker_of(component), {})
        parts = [held[call.step] for call in batch.calls if call.step in held]
        if len(parts) != len(batch.calls) or len({part.shape[1:] for part in parts}) != 1:
            return None  # a candidate's width may differ from call to call
        return torch.cat(parts)


def _differs(judged: OutputResult) -> bool:
    return judged.verdict is Verdict.DIFFERS


def _sums_of(sides: list[Tensor | None]) -> dict[str, PairSums]:
    """Return the sums of each of PAIRS, over elements that are finite in every side there is."""
    flat: list[Tensor | None] = []
    for at, side in enumerate(sides):
        # Equal sides are one object, which is widened and multiplied once.
        like = next((n for n in range(at) if _are_equal(sides[n], side)), None)
        wide = None if side is None else side.detach().double().flatten()
        flat.append(wide if like is None else flat[like])
    made = _sums_of_flat(flat)
    if all(math.isfinite(sums.cc + sums.rr + sums.dd) for sums in made.values()):
        return made
    every = {id(side): side for side in flat if side is not None}
    known = torch.stack([side.isfinite() for side in every.values()]).all(0)
    cut = {number: side[known] for number, side in every.items()}
    return _sums_of_flat([None if side is None else cut[id(side)] for side in flat])


def _are_equal(side: Tensor | None, other: Tensor | None) -> bool:
    if side is None or other is None:
        return False
    return side is other or (side.dtype is other.dtype and torch.equal(side, other))


def _sums_of_flat(flat: Sequence[Tensor | None]) -> dict[str, PairSums]:
    found: dict[tuple[int, int], PairSums] = {}
    made = {}
    for pair, (a, b) in zip(PAIRS, ((0, 1), (0, 2), (1, 2)), strict=True):
        candidate, reference = flat[a], flat[b]
        if candidate is None or reference is None:
            continue
        sums = found.get((id(candidate), id(reference)))
        if sums is None:
            sums = found[id(candidate), id(reference)] = PairSums()
            sums.add(candidate, reference)
        made[pair] = sums
    return made


def _small_first(found: Sequence[Batch]) -> list[Batch]:
    return sorted(found, key=lambda each: len(each.step_of))


def _per_slot(x: Tensor, batch: Batch) -> Tensor | None:
    """Repeat a token's values for each of its codes: one per slot if scales belong to experts.

    None where the codes have other extents.
    """
    codes = batch.outputs.get("codes")
    if codes is None or codes.ndim == x.ndim:
        return x
    if (x.ndim, codes.ndim) != (2, 3):
        return None
    return x.unsqueeze(1).expand(-1, codes.shape[1], -1)


# --------------------------------------------------------------------------------------------------
# Discrepancies of a component: wrong outputs, missing calls, unstable results.
#
# Of each component the output furthest beyond its budget is reported, with the call that shows
# most. A silent fallback is detected as well: the outputs of a quantised linear agree with
# unquantised operands within the budget of such a product, so they are too good.

_CHOOSING = ("ffn.topk", "attn.indexer.topk")
_MORE = 2  # further calls that a discrepancy keeps


def discrepancy_of_outputs(
    known: TwinComponents, judged_component: JudgedComponent, steps: Mapping[int, CapturedStep]
) -> Discrepancy:
    """Return the discrepancy of a component whose outputs differ from its twin's."""
    row = judged_component.differs[0]
    # A malformed run may leave no number to compare; then no single call differs by itself.
    pieces = [p for p in judged_component.pieces if _output_differs(p, row.output)] or list(
        judged_component.pieces
    )
    # The largest batch shows most; among equal ones, the worst ratio.
    best = max(pieces, key=lambda p: (p.replay.batch.outputs[row.output].numel(), _ratio(p, row)))
    judged, component = best.judged[row.output], judged_component.component
    form = _level(best, row).startswith(("shape", "dtype"))
    where: dict[str, str | int | float] = {}
    words = ""
    wrong = {n for piece in pieces for n in _wrong_steps(known, piece, row.output)}
    if not form:
        onset = _onset(known, best, row.output, steps)
        time = location_in_steps(steps, wrong, judged_component.steps)
        if "phase" in onset.where and "phase" in time.where:
            time = DifferenceLocation()
        where |= {**time.where, **onset.where}
        words = onset.sentence
        if time.sentence:
            words = f" ({time.sentence}{', ' if words else ''}{words[2:] or ')'}"
    plain = None if form else _plain_form(known, best, row.output) or _too_good(best, row.output)
    site = site_of(component.name, Port.OUT, row.output)
    if plain:
        where["operands"] = "unquantised"
    return Discrepancy(
        DiscrepancyKind.FORM
        if form
        else DiscrepancyKind.FALLBACK
        if plain
        else DiscrepancyKind.OUTPUT,
        component.name,
        ComponentContext(known.twin, component, known.recipe),
        site,
        plain or f"{site}: {_told(judged.worst)}{words}",
        _sight(best, steps),
        judged,
        where,
        tuple(sorted(wrong)),
        tuple(_sight(piece, steps) for piece in _others(judged_component, pieces, best)),
    )


def _others(
    component: JudgedComponent, pieces: Sequence[JudgedBatch], best: JudgedBatch
) -> list[JudgedBatch]:
    """Return a few other calls, those with other inputs first, and a few healthy ones.

    A cause has to hold with memory as well, and must not harm what is healthy.
    """
    given = best.replay.batch.inputs.keys()
    rest = [piece for piece in pieces if piece is not best]
    rest.sort(key=lambda piece: piece.replay.batch.inputs.keys() == given)
    return [*rest[:_MORE], *component.healthy]


def discrepancy_from_prefill(discrepancy: Discrepancy) -> Discrepancy:
    """Reword a discrepancy whose calls were judged as one prefill; its rows cannot be separated."""
    records = [
        replace(record, rows=()) for record in (discrepancy.record, *discrepancy.more) if record
    ]
    return replace(
        discrepancy,
        sentence=f"{discrepancy.sentence}; judged against one prefill of the same rows, because "
        "what wrote its memory was not captured",
        record=records[0],
        more=tuple(records[1:]),
        where={**discrepancy.where, "beside": "one prefill"},
    )


def _output_differs(piece: JudgedBatch, output: str) -> bool:
    """Tell whether these calls show it; a call may lack an output."""
    return output in piece.judged and piece.judged[output].verdict is Verdict.DIFFERS


def _ratio(piece: JudgedBatch, row: OutputRow) -> float:
    return piece.judged[row.output].ratio


def _level(piece: JudgedBatch, row: OutputRow) -> str:
    worst = piece.judged[row.output].worst
    return worst.level if worst else ""


def _told(worst: object) -> str:
    return str(worst) if worst else "differs"


def _sight(piece: JudgedBatch, steps: Mapping[int, CapturedStep]) -> CallRecord:
    """Return the recorded tensors; calls that were replayed together are one record.

    Rows with a legal flip of a choice are left out: no cause has to explain them.
    """
    batch = piece.replay.batch
    inputs = piece.replay.inputs or batch.inputs
    rows = tuple(span.stop - span.start for span in batch.spans)
    step = batch.calls[0].step
    sides = [inputs, batch.outputs, piece.replay.expected]
    places = row_positions(batch, steps)
    kept = _without_flips(piece)
    if kept is not None:
        sides = [
            {n: t[kept] if t.ndim and len(t) == len(kept) else t for n, t in side.items()}
            for side in sides
        ]
        rows = tuple(count for span in batch.spans if (count := int(kept[span].sum())))
        places = places.select(kept)
    known = tuple(places.sequence.tolist()) if bool((places.sequence >= 0).all()) else ()
    return CallRecord(
        sides[0], sides[1], sides[2], step=step, rows=rows, owners=known, places=places
    )


def _without_flips(piece: JudgedBatch) -> Tensor | None:
    """Return a mask of the rows with the twin's choice; None if these are all rows, or none."""
    flipped = {
        row
        for result in piece.judged.values()
        if result.verdict is Verdict.AGREES and result.flips.count
        for row in result.flips.rows
    }
    count = len(piece.replay.batch.step_of)
    if not flipped or piece.replay.batch.component.role not in _CHOOSING:
        return None
    kept = torch.ones(count, dtype=torch.bool)
    kept[[row for row in flipped if row < count]] = False
    return kept if bool(kept.any()) else None


def _onset(
    known: TwinComponents, piece: JudgedBatch, output: str, steps: Mapping[int, CapturedStep]
) -> DifferenceLocation:
    batch = piece.replay.batch
    sides = aligned(batch.outputs, piece.replay.expected)[output]
    slack = _slack(known, piece, output, sides)
    return locate_difference(
        known.twin.config, batch.component, sides, row_positions(batch, steps), slack
    )


def _slack(
    known: TwinComponents, piece: JudgedBatch, output: str, sides: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Return the bound of an output; None where there is none, and every difference counts."""
    try:
        budget = budgets_of(piece.replay.judgeable(known)).get(output)
        if budget is not None and sides[0].is_floating_point():
            return budget.slack.expand(sides[1].shape)
    except (DegarbleError, RuntimeError):
        pass
    return None


def _wrong_steps(known: TwinComponents, piece: JudgedBatch, output: str) -> set[int]:
    """Return the steps of a piece that differ; all of them, if no single row exceeds its budget."""
    batch = piece.replay.batch
    every = {call.step for call in batch.calls}
    sides = aligned(batch.outputs, piece.replay.expected).get(output)
    if len(every) == 1 or sides is None or sides[0].shape != sides[1].shape:
        return every
    if sides[0].shape[:1] != batch.step_of.shape:
        return every
    bad, certain = beyond(*sides, _slack(known, piece, output, sides))
    by_row = bad.flatten(1).any(1) if bad.ndim > 1 else bad
    return set(batch.step_of[by_row].tolist()) if certain else every


def _plain_form(known: TwinComponents, piece: JudgedBatch, output: str) -> str:
    """Return a sentence if unquantised operands explain a quantised linear's output, else ""."""
    replay = piece.replay
    if "codes" not in replay.inputs or "codes" in replay.batch.outputs:
        return ""
    x = piece.plain
    if x is None:
        return ""
    name, twin = replay.batch.component.name, known.plain
    inputs = {n: t for n, t in replay.inputs.items() if n not in _CODED} | {"x": x}
    try:
        call = Judgeable.from_twin(twin, name, inputs)
        candidate = aligned(replay.batch.outputs, call.outputs)[output][0]
        judged = judge_outputs(call, {output: candidate})[output]
    except (DegarbleError, RuntimeError, KeyError, IndexError):
        return ""
    if judged.verdict is not Verdict.AGREES:
        return ""
    return (
        f"{name} ran on unquantised activations ({number(judged.ratio)} of that budget): its twin "
        "quantises them, so it is nearer to the BF16 model than it can be"
    )


_CODED = ("codes", "block_scale", "tensor_scale", X_LOOSE)


def _too_good(piece: JudgedBatch, output: str) -> str:
    """Return a sentence if an output is nearer to the BF16 reference than quantisation allows."""
    meant, name = piece.meant.get(output), piece.replay.batch.component.name
    sides = aligned(piece.replay.batch.outputs, piece.replay.expected).get(output)
    judged = piece.judged[output]
    if meant is None or sides is None or not meant.is_floating_point():
        return ""
    candidate, twin = sides
    if meant.numel() != twin.numel() or not judged.allowed_length < math.inf:
        return ""
    known = candidate.isfinite() & twin.isfinite() & meant.reshape(twin.shape).isfinite()
    if not bool(known.all()):
        return ""
    near = nearer_than_the_twin(judged, candidate, twin, meant.reshape(twin.shape).to(twin.dtype))
    # Trap: shrinking a noisy output also brings it nearer, but leaves its direction unchanged.
    apart = _turned(twin, meant) - _turned(candidate, meant)
    if near.ratio <= 1 or apart <= judged.allowed_length:
        return ""
    return (
        f"{name} is nearer to the BF16 reference than its twin is by {number(near.measured)}, "
        f"{number(near.ratio)} of what rounding allows: it ran on unquantised operands"
    )


def _turned(side: Tensor, meant: Tensor) -> float:
    """Return the distance from a reference that remains after the best gain."""
    a, b = side.double().flatten(), meant.double().flatten()
    square = float(a @ a)
    # Least-squares gain of the side.
    along = float(a @ b) / square if square else 0.0
    return float((along * a - b).norm())


def missing_calls(known: TwinComponents, run: RecordedRun) -> Iterator[Discrepancy]:
    """Yield components that did not run in a step in which the rest of their block did."""
    if is_in_part(run.facts):
        return
    ran: dict[int, set[str]] = {step.number: set() for step in run.steps}
    for call in run.calls:
        ran[call.step].add(call.component)
    every = {name for names in ran.values() for name in names}
    ever = {known.components[name].role for name in every & known.components.keys()}
    blocks = {s: {_block(n) for n in names} for s, names in ran.items()}
    stated = run.facts.get("left_out")  # an engine's run: without all tensors in some step
    left_out = frozenset(stated if isinstance(stated, list) else ())
    # The last step of an interrupted capture may be incomplete.
    last = None if getattr(run, "complete", True) else max(ran, default=None)
    found: dict[str, list[int]] = {}
    for step, names in ran.items():
        for name, component in known.components.items():
            if component.block is None or step == last or component.role not in ever:
                continue
            if name in left_out:
                continue
            if name not in names and _block(name) in blocks[step]:
                found.setdefault(name, []).append(step)
    for name, at in found.items():
        component = known.components[name]
        yield Discrepancy(
            DiscrepancyKind.MISSING,
            name,
            ComponentContext(known.twin, component, known.recipe),
            site_of(name, Port.OUT, component.outputs[0]),
            f"{name} did not run in step {at[0]}, though the rest of its block did",
            steps=tuple(at),
        )


def _block(name: str) -> str:
    return ".".join(name.split(".")[:2])


def repeats_apart(calls: Sequence[CapturedCall]) -> bool:
    """Tell whether two calls on identical inputs returned different outputs."""
    known: dict[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = {}
    for call in calls:
        sides = [
            tuple(sorted((name, kept.sha256) for name, kept in side.items()))
            for side in (call.inputs, call.outputs)
        ]
        # Without hashes, or without inputs, nothing can be said.
        if not all(digest for side in sides for _, digest in side) or not sides[0]:
            return False
        if known.setdefault(sides[0], sides[1]) != sides[1]:
            return True
    return False
