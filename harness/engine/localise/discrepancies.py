"""Report discrepancies of single components: wrong outputs, missing calls, unstable results.

For each component it selects the output furthest beyond its budget and the call that shows most. It
also detects a silent fallback: the outputs of a quantised linear agree with unquantised operands
within the budget of such a product, so they are too good.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.harness.capture.files.records import site_of
from degarble.harness.engine.budget.budget import nearer_than_the_twin
from degarble.harness.engine.budget.call import Call as Judgeable
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.roles import budgets_of
from degarble.harness.engine.faults.model_faults import Scene, Sight
from degarble.harness.engine.localise.attribution import Kind, Trouble
from degarble.harness.engine.localise.difference_location import (
    Onset,
    RowsOf,
    beyond,
    onset_of,
    when,
)
from degarble.harness.engine.localise.output_forms import aligned
from degarble.harness.model.sites import Port
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep
    from degarble.harness.engine.localise.judged_run import JudgedComponent, Piece, Row
    from degarble.harness.engine.localise.recorded_run import SeenRun
    from degarble.harness.engine.localise.replay import Known

_CHOOSING = ("ffn.topk", "attn.indexer.topk")
_MORE = 2  # further calls that a discrepancy keeps


def of_outputs(known: Known, made: JudgedComponent, steps: Mapping[int, CapturedStep]) -> Trouble:
    """Return the discrepancy of a component whose outputs differ from its twin's."""
    row = made.differs[0]
    # A malformed run may leave no number to compare; then no single call differs by itself.
    pieces = [p for p in made.pieces if _differs(p, row.output)] or list(made.pieces)
    # The largest batch shows most; among equal ones, the worst ratio.
    best = max(pieces, key=lambda p: (p.replay.batch.outputs[row.output].numel(), _ratio(p, row)))
    judged, component = best.judged[row.output], made.component
    form = _level(best, row).startswith(("shape", "dtype"))
    where: dict[str, str | int | float] = {}
    words = ""
    wrong = {n for piece in pieces for n in _wrong_steps(known, piece, row.output)}
    if not form:
        onset = _onset(known, best, row.output, steps)
        time = when(steps, wrong, made.steps)
        if "phase" in onset.where and "phase" in time.where:
            time = Onset()
        where |= {**time.where, **onset.where}
        words = onset.sentence
        if time.sentence:
            words = f" ({time.sentence}{', ' if words else ''}{words[2:] or ')'}"
    plain = None if form else _plain_form(known, best, row.output) or _too_good(best, row.output)
    site = site_of(component.name, Port.OUT, row.output)
    if plain:
        where["operands"] = "unquantised"
    return Trouble(
        Kind.FORM if form else Kind.FALLBACK if plain else Kind.OUTPUT,
        component.name,
        Scene(known.twin, component, known.recipe),
        site,
        plain or f"{site}: {_told(judged.worst)}{words}",
        _sight(best, steps),
        judged,
        where,
        tuple(sorted(wrong)),
        tuple(_sight(piece, steps) for piece in pieces if piece is not best)[:_MORE],
    )


def beside_prefill(trouble: Trouble) -> Trouble:
    """Reword a discrepancy whose calls were judged as one prefill; its rows cannot be separated."""
    sights = [replace(each, rows=()) for each in (trouble.sight, *trouble.more) if each]
    return replace(
        trouble,
        sentence=f"{trouble.sentence}; judged beside one prefill of the same rows, for what wrote "
        "its memory was not captured",
        sight=sights[0],
        more=tuple(sights[1:]),
        where={**trouble.where, "beside": "one prefill"},
    )


def _differs(piece: Piece, output: str) -> bool:
    """Tell whether these calls show it; a call may lack an output."""
    return output in piece.judged and piece.judged[output].verdict is Verdict.DIFFERS


def _ratio(piece: Piece, row: Row) -> float:
    return piece.judged[row.output].ratio


def _level(piece: Piece, row: Row) -> str:
    worst = piece.judged[row.output].worst
    return worst.level if worst else ""


def _told(worst: object) -> str:
    return str(worst) if worst else "differs"


def _sight(piece: Piece, steps: Mapping[int, CapturedStep]) -> Sight:
    """Return the recorded tensors; calls that were replayed together are one sight.

    Rows with a legal flip of a choice are left out: no cause has to explain them.
    """
    batch = piece.replay.batch
    inputs = piece.replay.inputs or batch.inputs
    rows = tuple(span.stop - span.start for span in batch.spans)
    step = batch.calls[0].step
    sides = [inputs, batch.outputs, piece.replay.expected]
    owners = RowsOf.of(batch, steps).sequence
    kept = _without_flips(piece)
    if kept is not None:
        sides = [
            {n: t[kept] if t.ndim and len(t) == len(kept) else t for n, t in side.items()}
            for side in sides
        ]
        rows = tuple(count for span in batch.spans if (count := int(kept[span].sum())))
        owners = owners[kept]
    known = tuple(owners.tolist()) if bool((owners >= 0).all()) else ()
    return Sight(sides[0], sides[1], sides[2], step=step, rows=rows, owners=known)


def _without_flips(piece: Piece) -> Tensor | None:
    """Return a mask of the rows with the twin's choice; None if these are all rows, or none."""
    flipped = {
        row
        for each in piece.judged.values()
        if each.verdict is Verdict.AGREES and each.flips.count
        for row in each.flips.rows
    }
    count = len(piece.replay.batch.step_of)
    if not flipped or piece.replay.batch.component.role not in _CHOOSING:
        return None
    kept = torch.ones(count, dtype=torch.bool)
    kept[[row for row in flipped if row < count]] = False
    return kept if bool(kept.any()) else None


def _onset(known: Known, piece: Piece, output: str, steps: Mapping[int, CapturedStep]) -> Onset:
    batch = piece.replay.batch
    sides = aligned(batch.outputs, piece.replay.expected)[output]
    slack = _slack(known, piece, output, sides)
    return onset_of(known.twin.config, batch.component, sides, RowsOf.of(batch, steps), slack)


def _slack(known: Known, piece: Piece, output: str, sides: tuple[Tensor, Tensor]) -> Tensor | None:
    """Return the bound of an output; None where there is none, and every difference counts."""
    try:
        budget = budgets_of(piece.replay.judgeable(known)).get(output)
        if budget is not None and sides[0].is_floating_point():
            return budget.slack.expand(sides[1].shape)
    except (DegarbleError, RuntimeError):
        pass
    return None


def _wrong_steps(known: Known, piece: Piece, output: str) -> set[int]:
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


def _plain_form(known: Known, piece: Piece, output: str) -> str:
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
        call = Judgeable.of(twin, name, inputs)
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


_CODED = ("codes", "block_scale", "tensor_scale")


def _too_good(piece: Piece, output: str) -> str:
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


def missing_calls(known: Known, run: SeenRun) -> Iterator[Trouble]:
    """Yield components that did not run in a step in which the rest of their block did."""
    if run.facts.get("filters") and any(dict(run.facts["filters"]).values()):
        return
    ran: dict[int, set[str]] = {step.number: set() for step in run.steps}
    for call in run.calls:
        ran[call.step].add(call.component)
    every = {name for names in ran.values() for name in names}
    ever = {known.components[name].role for name in every & known.components.keys()}
    blocks = {s: {_block(n) for n in names} for s, names in ran.items()}
    # The last step of an interrupted capture may be incomplete.
    last = None if getattr(run, "complete", True) else max(ran, default=None)
    found: dict[str, list[int]] = {}
    for step, names in ran.items():
        for name, component in known.components.items():
            if component.block is None or step == last or component.role not in ever:
                continue
            if name not in names and _block(name) in blocks[step]:
                found.setdefault(name, []).append(step)
    for name, at in found.items():
        component = known.components[name]
        yield Trouble(
            Kind.MISSING,
            name,
            Scene(known.twin, component, known.recipe),
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
