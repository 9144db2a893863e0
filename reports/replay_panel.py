"""Build the replay and text panels of a page, and the plot of a whole run."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from degarble.harness.report.blocks import (
    Code,
    Column,
    ColumnKind,
    Details,
    Fact,
    Facts,
    Files,
    JudgedCell,
    JudgedMap,
    Look,
    Looks,
    ModelText,
    Points,
    Profile,
    Sentence,
    Tab,
    Table,
    Tabs,
    TextComparison,
    Tone,
)
from degarble.harness.report.number_text import number, share
from degarble.harness.report.page import Panel, PanelKind
from degarble.harness.report.replay_record import PAIRS, worst_first
from degarble.harness.report.verdict import Verdict
from degarble.reports.words import near_one

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from degarble.harness.report.blocks import Block
    from degarble.harness.report.replay_record import (
        CloseLook,
        Histogram,
        JudgedOutput,
        ReplayRecord,
        TextRecord,
    )


# --------------------------------------------------------------------------------------------------
# The whole run against its budgets, in its order.

_TICKS = 5  # of many layers every fifth is named
_FEW_LAYERS = 12


def run_chart(record: ReplayRecord) -> Points:
    """Draw every judged output in the order of the run, by its difference in budgets."""
    known = [
        output
        for output in record.outputs
        if output.ratio is not None and not math.isnan(output.ratio)
    ]
    beyond = tuple(at for at, each in enumerate(known) if each.verdict is Verdict.DIFFERS)
    worst = max(known, key=lambda output: output.ratio or 0.0, default=None)
    said = f"{len(known):,} outputs in the order of the run, {len(beyond):,} beyond their budget"
    if worst is not None:
        said += f"; the furthest is {worst.site} at {number(worst.ratio or 0.0, 3)} budgets"
    return Points(
        "Every output in the order of the run: the first one above the line is where it began; "
        "equal ones are not drawn",
        "layer",
        "budgets (1 is what a correct kernel may differ)",
        tuple(output.ratio for output in known),
        f"{said}.",
        beyond,
        layer_ticks([output.column for output in known]),
        1.0,
    )


def _course(record: ReplayRecord) -> tuple[Block, ...]:
    """Return the chart of the run; a sentence where every output equals its twin's."""
    ratios = [output.ratio for output in record.outputs if output.ratio is not None]
    if ratios and not any(ratios):  # a chart would have a frame and no point
        text = (
            f"Each of the {len(ratios):,} outputs with a budget equals its twin's: nothing to draw."
        )
        return (Sentence(text),)
    return (run_chart(record),) if record.outputs else ()


def layer_ticks(columns: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Return where each layer begins; of many layers every fifth."""
    starts: dict[str, int] = {}
    for at, name in enumerate(columns):
        starts.setdefault(name, at)
    named = [(at, name) for name, at in starts.items() if name != "ends"]
    if len(named) <= _FEW_LAYERS:
        return tuple(named)
    return tuple((at, name) for at, name in named if name.isdecimal() and not int(name) % _TICKS)


# --------------------------------------------------------------------------------------------------
# Build the replay and text panels of a page from the records of harness.report.replay_record.
#
# The panels hold maps of layer x component (difference in budgets, three cosines), a close look at
# each cell, the distances from the budgets, and texts side by side. A sentence counts what is left
# out for its number; the tables in the page's folder have all of it.

if TYPE_CHECKING:
    Cells = Mapping[tuple[str, str], Sequence[JudgedOutput]]

CARDS = 5  # findings on the first screen
LOOKS = 400  # close looks on a page; a model of 61 layers has some 2,600 outputs
MAP = "replay-map"
_FEW_LEVELS = 3  # of an output that agrees
_FIRST = 3  # close looks that are open, and that are printed
_LISTED = 40  # outputs of a kind that are listed by name
BUDGET_STEPS = (1.0, 2.0, 5.0, 10.0, 100.0, 1e3, 1e4, 1e6)  # a difference within 1 has no colour
_COSINE_STEPS = (1 - 1e-8, 1 - 1e-6, 1 - 1e-5, 1 - 1e-4, 0.999, 0.99, 0.9, 0.5)
_LEGEND = ((Tone.BAD, "differs"), (Tone.WARNING, "undecided"))


def replay_panel(
    record: ReplayRecord, files: tuple[tuple[str, str], ...] = (), most: int = LOOKS
) -> Panel:
    """Make the panel; `files` are in the page's folder, `most` limits its close looks.

    Findings that are cards on the first screen are not repeated here.
    """
    chosen = worst_first(record.outputs)[:most]
    anchors = {id(output): f"look-{at}" for at, output in enumerate(chosen)}
    blocks: list[Block] = [
        *(Sentence(text, Tone.NOTE) for text in record.preface),
        *(Sentence(text, Tone.BAD) for text in record.findings[CARDS:]),
        *_course(record),
        *_maps(record, anchors),
    ]
    if chosen:
        blocks.append(_looks(record, chosen))
    if len(chosen) < len(record.outputs):
        text = f"{len(chosen):,} of {len(record.outputs):,} outputs can be looked at closely here, "
        blocks.append(Sentence(f"{text}the worst ones; the tables have all of them.", Tone.NOTE))
    if files:
        blocks.append(Files("The same as tables", files))
    blocks += [*_flips(record), *_undecided(record), *_notes(record)]
    if record.facts:
        facts = tuple(Fact(name, value, code=True) for name, value in record.facts)
        blocks.append(Facts(facts, "What ran, on what, and where"))
    return Panel(PanelKind.REPLAY, record.sentence, record.verdict, tuple(blocks))


def text_panel(record: TextRecord, replayed: Verdict) -> Panel:
    """Make the panel of generated texts; `replayed` is the verdict of the model's components.

    Texts alone are no verdict: where every component agrees, a near tie may fall either way.
    """
    apart = [prompt_texts for prompt_texts in record.said if prompt_texts.parting is not None]
    if not record.said:
        sentence = "No text was captured."
    elif not apart:
        sentence = "Candidate and twin say the same."
    else:
        first = min(
            prompt_texts.parting for prompt_texts in apart if prompt_texts.parting is not None
        )
        count = f"{len(apart)} of {len(record.said)} prompts"
        sentence = f"They part on {count}, first at new token {first + 1}."
        if replayed is Verdict.AGREES:
            sentence += " Every component agrees: of two likely words, rounding chose the other."
    blocks: list[Block] = [
        TextComparison(
            prompt_texts.prompt,
            tuple(ModelText(*voice) for voice in prompt_texts.voices),
            prompt_texts.parting,
        )
        for prompt_texts in record.said
    ]
    blocks += [Sentence(text, Tone.NOTE) for text in record.notes]
    verdict = replayed if apart else Verdict.AGREES if record.said else Verdict.UNDECIDED
    return Panel(PanelKind.TEXT, sentence, verdict, tuple(blocks))


def _maps(record: ReplayRecord, anchors: Mapping[int, str]) -> list[Block]:
    cells: dict[tuple[str, str], list[JudgedOutput]] = defaultdict(list)
    for output in record.outputs:
        cells[output.role, output.column].append(output)
    if not cells:
        return []
    rows = _roles(record.outputs)
    columns = tuple(
        dict.fromkeys(judged_output.column for judged_output in _by_layer(record.outputs))
    )

    def view(title: str, unit: str, chosen: Callable[[JudgedOutput], float | None]) -> JudgedMap:
        cosine = not unit
        readings = tuple(
            tuple(_reading(cells.get((row, column), ()), chosen, anchors) for column in columns)
            for row in rows
        )
        steps = _COSINE_STEPS if cosine else BUDGET_STEPS
        return JudgedMap(
            title, "component", "layer", rows, columns, readings, steps, unit, cosine, _LEGEND
        )

    def cosine_of(at: int) -> Callable[[JudgedOutput], float | None]:
        return lambda judged_output: judged_output.cosines[at]

    budget = view(
        "How far each component's worst output is from its twin's, on the same inputs",
        "budgets (1 is what a correct kernel may differ)",
        lambda judged_output: judged_output.ratio,
    )
    tabs = [Tab("Difference in budgets", (budget,))]
    for at, pair in enumerate(PAIRS):
        if any(judged_output.cosines[at] is not None for judged_output in record.outputs):
            shown = view(f"Cosine of {pair}, on the same inputs", "", cosine_of(at))
            tabs.append(Tab(f"Cosine: {pair}", (shown,)))
    return [Tabs("Layer by component", tuple(tabs), MAP)]


def _roles(outputs: Sequence[JudgedOutput]) -> tuple[str, ...]:
    """Return components in run order; what only some layers have stands where it runs."""
    by_layer: dict[str, list[str]] = defaultdict(list)
    for output in outputs:
        if output.role not in by_layer[output.column]:
            by_layer[output.column].append(output.role)
    ends = by_layer.pop("ends", [])
    order: list[str] = []
    # The layer with the most components first: the others are merged into its order.
    for roles in sorted(by_layer.values(), key=len, reverse=True):
        at = 0
        for role in roles:
            if role in order:
                at = order.index(role) + 1
            else:
                order.insert(at, role)
                at += 1
    front = ends[: ends.index("embed") + 1] if "embed" in ends else []
    return (*front, *order, *(role for role in ends if role not in front))


def _by_layer(outputs: Sequence[JudgedOutput]) -> list[JudgedOutput]:
    """Order by layer, drafters after them, the ends last."""
    # Greater than every layer: outputs without a layer come last.
    far = 1 << 30

    def place(output: JudgedOutput) -> tuple[bool, int]:
        return output.component.startswith("mtp."), far if output.layer is None else output.layer

    return sorted(outputs, key=place)


def _reading(
    outputs: Sequence[JudgedOutput],
    chosen: Callable[[JudgedOutput], float | None],
    anchors: Mapping[int, str],
) -> JudgedCell | None:
    """Return the worst output of a component in a layer."""
    if not outputs:
        return None
    worst = worst_first(tuple(outputs))[0]
    values = [(value, output) for output in outputs if (value := chosen(output)) is not None]
    value = chosen(worst)
    if values and (value is None or not _is_ratio(worst, value)):
        value = min(pair[0] for pair in values)  # of cosines the lowest
    tone = {Verdict.DIFFERS: Tone.BAD, Verdict.UNSTABLE: Tone.BAD, Verdict.UNDECIDED: Tone.WARNING}
    note = worst.undecided if worst.verdict is Verdict.UNDECIDED else ""
    meant = tone.get(worst.verdict, Tone.PLAIN)
    return JudgedCell(value, meant, anchors.get(id(worst), ""), note)


def _is_ratio(worst: JudgedOutput, value: float) -> bool:
    return worst.ratio is not None and (value == worst.ratio or math.isnan(value))


def _looks(record: ReplayRecord, chosen: Sequence[JudgedOutput]) -> Looks:
    differing = [output for output in chosen if output.verdict is Verdict.DIFFERS][:_FIRST]
    began = [output for output in chosen if output.site in record.origins][:_FIRST]
    first = {id(output) for output in began or differing}
    looks = tuple(
        Look(f"look-{at}", output.site, _close(output), first=id(output) in first)
        for at, output in enumerate(chosen)
    )
    return Looks("A cell of the map, looked at closely: choose one.", looks, MAP)


def _close(output: JudgedOutput) -> tuple[Block, ...]:
    look = output.look
    blocks: list[Block] = [_output_sentence(output), _figures(output)]
    if look.worst is not None:
        blocks.append(_worst(look))
    if output.verdict is not Verdict.AGREES:  # of the others the tables have them
        blocks += [
            Profile(f"Relative difference by {a.name}", a.labels, a.values)
            for a in look.along
            if a.values
        ]
    if look.histogram is not None and output.identical != 1:
        blocks.append(distances(look.histogram, "the twin"))
    if look.places:
        blocks.append(_places(look, _FEW_LEVELS if output.verdict is Verdict.AGREES else None))
    if look.derivation:
        blocks.append(Code("\n".join(look.derivation), "How the budget comes about"))
    return tuple(blocks)


def distances(histogram: Histogram, other: str) -> Profile:
    """Return the distribution of the candidate's distances from another side."""
    counts = tuple(float(count) for count in histogram.counts)
    caption = f"Elements by distance from {other}, in {histogram.unit}"
    return Profile(caption, histogram.labels, counts, "elements", None, logarithmic=True)


def _output_sentence(output: JudgedOutput) -> Sentence:
    if output.verdict is Verdict.UNDECIDED:
        return Sentence(
            f"Nothing is claimed: {output.undecided or 'it has no budget'}.", Tone.WARNING
        )
    at = "" if output.ratio is None else f", at {number(output.ratio, 3)} of its budget"
    if output.verdict is Verdict.AGREES:
        exact = output.identical == 1
        return Sentence("Equal to its twin's, bit for bit." if exact else f"Agrees{at}.", Tone.GOOD)
    far = "" if output.ratio is None else f": {number(output.ratio, 3)} times its budget"
    return Sentence(f"Differs from its twin's{far}.", Tone.BAD)


def _figures(output: JudgedOutput) -> Facts:
    look = output.look
    rows = [
        *(
            Fact(f"Cosine, {pair}", near_one(value))
            for pair, value in zip(PAIRS, output.cosines, strict=True)
            if value is not None
        ),
        *_number("Relative difference", output.difference),
        *_number("Budget of the whole", output.budget),
        *_number("Gain", look.gain),
        *_number("Rounding bias, in standard deviations", look.rounding_bias),
    ]
    if output.identical is not None:
        rows.append(Fact("Equal codes", f"{share(output.identical)} of {output.elements:,}"))
    if output.choices:
        rows.append(Fact("Near ties decided otherwise", f"{output.flips:,} of {output.choices:,}"))
    rows.append(Fact("Calls", f"{output.calls:,}"))
    return Facts(tuple(rows))


def _number(name: str, value: float | None) -> list[Fact]:
    return [] if value is None else [Fact(name, number(value))]


def _worst(look: CloseLook) -> Table:
    worst = look.worst
    assert worst is not None
    steps = None if worst.steps is None else worst.steps
    return Table(
        "The worst element",
        (
            Column("place"),
            Column("candidate's code", ColumnKind.CODE),
            Column("twin's code", ColumnKind.CODE),
            Column("candidate", ColumnKind.NUMBER),
            Column("twin", ColumnKind.NUMBER),
            Column("ulps apart", ColumnKind.NUMBER),
        ),
        (
            (
                worst.place, worst.candidate_code, worst.twin_code, worst.candidate, worst.twin,
                steps,
            ),
        ),
    )  # fmt: skip


def _places(look: CloseLook, most: int | None) -> Table:
    columns = (
        Column("level"),
        Column("worst place"),
        Column("difference", ColumnKind.NUMBER),
        Column("budget", ColumnKind.NUMBER),
        Column("in budgets", ColumnKind.NUMBER),
    )
    rows = tuple((p.level, p.place, p.measured, p.allowed, p.ratio) for p in look.places[:most])
    return Table("Level by level: the worst place of each, in its own unit", columns, rows)


def _flips(record: ReplayRecord) -> list[Block]:
    outputs = [output for output in record.outputs if output.flips]
    if not outputs:
        return []
    columns = (
        Column("site", ColumnKind.CODE),
        Column("decided otherwise", ColumnKind.NUMBER),
        Column("of", ColumnKind.NUMBER),
    )
    rows = tuple((output.site, output.flips, output.choices) for output in outputs[:_LISTED])
    caption = "Near ties that fell the other way, legally: no difference of the arithmetic"
    return [Details(_count(len(outputs), "output", "near ties"), (Table(caption, columns, rows),))]


def _undecided(record: ReplayRecord) -> list[Block]:
    outputs = [output for output in record.outputs if output.verdict is Verdict.UNDECIDED]
    if not outputs:
        return []
    columns = (Column("site", ColumnKind.CODE), Column("reason"))
    rows = tuple((output.site, output.undecided) for output in outputs[:_LISTED])
    table = Table("Of these nothing is claimed", columns, rows)
    return [Details(_count(len(outputs), "output", "no judgement"), (table,))]


def _notes(record: ReplayRecord) -> list[Block]:
    return [Sentence(text, Tone.NOTE) for text in record.notes[:_LISTED]]


def _count(count: int, noun: str, what: str) -> str:
    return f"{count:,} {noun if count == 1 else f'{noun}s'} with {what}"
