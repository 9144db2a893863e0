"""Judge all calls of one component against its twin, and compute the three cosines.

A linear after a quantisation is given to the BF16 reference with the values before quantisation.
Rows that a NaN or infinity can reach are left out and counted; for these only one question is
judged: is the candidate finite where its twin is? An output without a budget is UNDECIDED.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN, InvalidArgument
from degarble.harness.engine.budget.judging import Judged, is_joint, judge_outputs
from degarble.harness.engine.localise.float32_range import OVERFLOW, rows_out_of_range
from degarble.harness.engine.localise.judgeable_rows import finite_part, is_finite, part_without
from degarble.harness.engine.localise.output_forms import (
    NOT_FINITE,
    NonFinite,
    aligned,
    earlier_of,
    equal_elements,
    is_poisoned,
    non_finite_of,
    poisoned,
    same_values,
    wrong_forms,
)
from degarble.harness.engine.localise.replay import Batch, Replay, maker_of, replayed
from degarble.harness.report.verdict import Verdict
from degarble.references.linears import decode_activations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.localise.judgeable_rows import Part
    from degarble.harness.engine.localise.replay import Known
    from degarble.harness.model.components import Component
    from degarble.references.binding import Bound

    Tensors = Mapping[str, Tensor]
    Look = Callable[[Replay, Mapping[str, Judged]], None]  # tensors still in memory
    Looked = Callable[[Replay, Mapping[str, Judged]], None]  # tensors still in memory

_MAKERS = 4  # quantisations whose inputs are kept
PAIRS = ("candidate and twin", "candidate and reference", "twin and reference")


@dataclass
class Sums:
    """Sums of products of two tensors, accumulated over calls."""

    ab: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    dd: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a pair of flat, finite float64 tensors."""
        self.ab += float(a @ b)
        self.aa += float(a @ a)
        self.bb += float(b @ b)
        d = a - b
        self.dd += float(d @ d)

    def add_equal(self, a: Tensor) -> None:
        """Add a tensor that both sides share."""
        square = float(a @ a)
        self.ab, self.aa, self.bb = self.ab + square, self.aa + square, self.bb + square

    @property
    def cosine(self) -> float:
        """Return the cosine of the angle; NaN where a side is zero."""
        length = math.sqrt(self.aa) * math.sqrt(self.bb)
        return max(-1.0, min(1.0, self.ab / length)) if length else math.nan

    @property
    def relative_l2(self) -> float:
        """Return the difference's length over that of the second; NaN where that is zero."""
        return math.sqrt(self.dd / self.bb) if self.bb else math.nan


@dataclass(frozen=True, eq=False)
class _View:
    """The judged part of a batch: all of it, or the remaining rows."""

    replay: Replay
    judged: Mapping[str, Judged]
    part: Part | None = None
    why: str = ""  # rows were left out


@dataclass(frozen=True, eq=False)
class Piece:
    """A replay of some calls, and the result for each of its outputs."""

    replay: Replay
    judged: Mapping[str, Judged]
    plain: Tensor | None = None  # values before quantisation, if known
    meant: Tensors = field(default_factory=dict)  # the BF16 reference's outputs on its inputs


@dataclass(eq=False)
class Row:
    """One output of one component over the whole run: a row of the table."""

    component: Component
    output: str
    verdict: Verdict = Verdict.AGREES
    judged: Judged | None = None  # the worst
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
    cosines: dict[str, Sums] = field(default_factory=dict)

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

    def leave_out(self, part: Part, why: str) -> None:
        """Count rows that were not judged."""
        self.left_out += part.left_out
        self.judged_rows += len(part.kept)
        self.why_left_out = self.why_left_out or why

    def take(self, judged: Judged, *, replayed_at_all: bool) -> None:
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
    rows: dict[str, Row] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)  # those with an output that differs
    non_finite: NonFinite | None = None
    steps: set[int] = field(default_factory=set)  # in which something of it was judged

    @property
    def differs(self) -> list[Row]:
        """Return the outputs that differ, the worst first."""
        found = [row for row in self.rows.values() if row.verdict is Verdict.DIFFERS]
        return sorted(found, key=lambda row: -row.ratio)


class Judge:
    """Judges component after component, in the order in which they run."""

    def __init__(
        self, known: Known, reference: Bound | None = None, looked: Looked | None = None
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
        made = JudgedComponent(component)
        # Small batches are cheap and usually enough to find a difference.
        for batch in sorted(found, key=lambda each: len(each.step_of)) if briefly else found:
            self._take(made, replayed(self._known, batch))
            if briefly and made.differs:
                break
        return made

    def _take(self, made: JudgedComponent, replay: Replay) -> None:
        """Judge a batch, and its remaining rows where some cannot be judged."""
        batch, whole = replay.batch, self.judged(replay)
        view = self._view(replay, whole)
        poisoned_ones = [n for n, each in whole.items() if _differs(each) and is_poisoned(each)]
        if self._looked is not None:
            self._looked(view.replay, view.judged)
        for name, each in whole.items():
            row = made.rows.setdefault(name, Row(made.component, name))
            row.calls += len(batch.calls)
            row.take(view.judged.get(name, each), replayed_at_all=not replay.undecided)
            if view.part is not None:
                row.leave_out(view.part, view.why)
            if name in poisoned_ones:
                row.take(each, replayed_at_all=True)
        if any(each.verdict is not Verdict.UNDECIDED for each in view.judged.values()):
            made.steps |= {call.step for call in view.replay.batch.calls}
        _count(made, replay)
        meant = self._compare(made, replay)
        if any(map(_differs, view.judged.values())):
            made.pieces.append(self._piece(view, meant, self._quantised(made.component, batch)))
        elif poisoned_ones:
            plain = self._quantised(made.component, batch)
            made.pieces.append(Piece(replay, whole, plain, meant))
        made.non_finite = earlier_of(made.non_finite, non_finite_of(replay))

    def _piece(self, view: _View, meant: Tensors, plain: Tensor | None) -> Piece:
        part = view.part
        if part is None:
            return Piece(view.replay, view.judged, plain, meant)
        cut = {name: rows for name, t in meant.items() if (rows := part.rows_of(t)) is not None}
        some = None if plain is None else part.rows_of(plain)
        return Piece(view.replay, view.judged, some, cut)

    def _view(self, replay: Replay, whole: Mapping[str, Judged]) -> _View:
        """Return the judgeable part of a batch: without rows that overflow or depend on a NaN."""
        view = _View(replay, whole)
        if replay.undecided or any(map(is_poisoned, whole.values())):
            part = finite_part(self._known, replay)
            if part is not None:
                view = _View(part.replay, {**whole, **self.judged(part.replay)}, part, NOT_FINITE)
        if all(
            each.verdict is Verdict.AGREES or is_poisoned(each) for each in view.judged.values()
        ):
            return view
        rows = rows_out_of_range(self._known, view.replay)
        if rows is None:
            return view
        part = part_without(self._known, view.replay, rows)
        if part is None:
            why = f"all rows were left out: {OVERFLOW}"
            none = {name: Judged(name, Verdict.UNDECIDED, undecided=why) for name in whole}
            return _View(view.replay, none)
        kept = part if view.part is None else part.within(view.part)
        return _View(part.replay, {**view.judged, **self.judged(part.replay)}, kept, OVERFLOW)

    def judged(self, replay: Replay) -> dict[str, Judged]:
        """Judge every output of a replay against the twin's."""
        outputs = replay.batch.outputs
        if replay.undecided:
            return {
                name: Judged(name, Verdict.UNDECIDED, undecided=replay.undecided)
                for name in outputs
            }
        wrong = wrong_forms(outputs, replay.expected)
        if wrong:
            return wrong
        both = aligned(outputs, replay.expected)
        if all(same_values(*pair) for pair in both.values()):
            return {name: Judged(name, Verdict.AGREES) for name in both}
        # An output that was not captured counts as the twin's: budgets read all outputs of a
        # component.
        twins = {**replay.expected, **{name: pair[1] for name, pair in both.items()}}
        candidate = {**twins, **{name: pair[0] for name, pair in both.items()}}
        call = Replay(replay.batch, twins, inputs=replay.inputs).judgeable(self._known)
        # Codes without their scales cannot be judged.
        if is_joint(call) and len(both) < len(twins):
            absent = ", ".join(name for name in twins if name not in both)
            why = f"it is judged together with what was not captured: {absent}"
            return {n: Judged(n, Verdict.UNDECIDED, undecided=why) for n in both}
        if is_finite(self._known, replay):
            try:
                found = judge_outputs(call, candidate)
                return {name: found[name] for name in both}
            except InvalidArgument:
                pass  # such large operands have no budget: check only finite against not finite
            except RuntimeError as error:
                # The twin accepts these extents but no derivation covers them: UNDECIDED.
                why = f"no budget fits its extents: {str(error).splitlines()[0][:200]}"
                return {n: Judged(n, Verdict.UNDECIDED, undecided=why) for n in both}
        return {name: poisoned(name, *pair) for name, pair in both.items()}

    def _compare(self, made: JudgedComponent, replay: Replay) -> Tensors:
        """Add the three cosines of a replay; return the reference's outputs on its inputs."""
        name, expected = made.component.name, replay.expected
        values = self._values(name, replay.batch.outputs)
        twins = self._values(name, expected)
        meant = self._meant(made.component, replay.batch)
        for output, value in values.items():
            if output not in made.rows:
                continue
            sides = [value, twins.get(output), meant.get(output)]
            flat = _numbers(
                [each if each is None or each.shape == value.shape else None for each in sides]
            )
            sums = made.rows[output].cosines
            for pair, (a, b) in zip(PAIRS, ((0, 1), (0, 2), (1, 2)), strict=True):
                left, right = flat[a], flat[b]
                if left is None or right is None:
                    continue
                held = sums.setdefault(pair, Sums())
                # One object: candidate and twin are equal, so the difference is 0.
                if left is right:
                    held.add_equal(left)
                else:
                    held.add(left, right)
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
        return {n: each for n, each in outputs.items() if each.is_floating_point()}

    def _format_made(self, maker: str) -> str | None:
        linear = maker.removesuffix(".act_quant")
        linear = f"{linear}.w2" if maker.endswith("ffn.experts.act_quant") else linear
        return self._known.activation(linear)

    def _meant(self, component: Component, batch: Batch) -> dict[str, Tensor]:
        """Return the BF16 reference's outputs on the same inputs; empty if it has no such call."""
        reference, name = self._reference, component.name
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


def _differs(judged: Judged) -> bool:
    return judged.verdict is Verdict.DIFFERS


def _numbers(sides: list[Tensor | None]) -> list[Tensor | None]:
    """Return flat float64 sides, only where all are finite; equal sides share one object."""
    candidate, twin, _ = sides
    found = [None if each is None else each.detach().double().flatten() for each in sides]
    if candidate is not None and twin is not None and torch.equal(candidate, twin):
        found[1] = found[0]
    known = torch.stack([each.isfinite() for each in found if each is not None]).all(0)
    if bool(known.all()):
        return found
    cut = [None if each is None else each[known] for each in found]
    if found[1] is found[0]:
        cut[1] = cut[0]
    return cut


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


def _count(made: JudgedComponent, replay: Replay) -> None:
    for name, each in replay.batch.outputs.items():
        row, twin = made.rows.get(name), replay.expected.get(name)
        if row is None:
            continue
        row.elements += each.numel()
        if twin is not None and not wrong_forms({name: each}, {name: twin}):
            row.identical += int(equal_elements(*aligned({name: each}, {name: twin})[name]).sum())
