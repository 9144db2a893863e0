"""Run `degarble compare`: two captures against each other, site by site, without a checkpoint.

Steps that got the same tokens are paired. If the same prompts were split into other steps, outputs
are paired token by token.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import InvalidArgument, Undecided
from degarble.harness.base.sums import PairSums
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.imports.importing import KINDS
from degarble.harness.engine.localise.tensor_forms import equal_elements
from degarble.harness.report.blocks import (
    Column,
    ColumnKind,
    Fact,
    Facts,
    Points,
    Sentence,
    Table,
    Tone,
)
from degarble.harness.report.number_text import number
from degarble.harness.report.page import Page, PageFinding, Panel, PanelKind, Subject
from degarble.harness.report.verdict import Origin, Verdict
from degarble.reports.replay_panel import layer_ticks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep, CapturedTensor
    from degarble.harness.report.blocks import Block
    from degarble.harness.report.page import Provenance


# --------------------------------------------------------------------------------------------------
# Compare two captures token by token when the same prompts were split into different steps.
#
# Tokens are paired by sequence and position, where prompts agree but their prefills were split
# otherwise (in chunks, or batched with others). Compared are outputs that have a row a token in
# every call. An output is an origin at a token if all input rows of its sequence up to that token
# are equal: a component's memory consists of those. Outputs without a row a token (entries of a
# compressor, offsets) are left out and counted, and so is any component that reads them other than
# as memory.

Token = tuple[int, int]  # sequence and position
_MEMORY = "state_"


class CapturedTokens(NamedTuple):
    """A capture, and the step and row of every token."""

    capture: Capture
    calls: Mapping[str, Sequence[CapturedCall]]
    steps: Mapping[int, CapturedStep]


@dataclass(eq=False)
class ComparedTokens:
    """One output over the common tokens; `first` and `own` are tokens."""

    component: str
    output: str
    calls: int = 0
    elements: int = 0
    identical: int = 0
    sums: PairSums = field(default_factory=PairSums)
    measured: bool = True
    first: Token | None = None
    own: Token | None = None


def tokens_in_common(first: Capture, second: Capture) -> tuple[Token, ...]:
    """Return the common tokens if the prompts are equal and were split otherwise; else none."""
    cuts = [[_fed(step) for step in capture.steps if step.phase is Phase.PREFILL]
            for capture in (first, second)]  # fmt: skip
    if cuts[0] == cuts[1]:
        return ()
    one, other = (_by_sequence(capture.steps) for capture in (first, second))
    prompts = [_by_sequence(s for s in capture.steps if s.phase is Phase.PREFILL)
               for capture in (first, second)]  # fmt: skip
    if any(prompts[0].get(name) != prompts[1].get(name) for name in {**prompts[0], **prompts[1]}):
        return ()
    return tuple(
        (name, position)
        for name in one
        for position, _ in takewhile(
            lambda pair: pair[1][0] == pair[1][1],
            enumerate(zip(one[name], other.get(name, []), strict=False)),
        )
    )


def _fed(step: CapturedStep) -> tuple[tuple[int, ...], ...]:
    return step.tokens, step.positions, step.sequences


def _by_sequence(steps: Iterable[CapturedStep]) -> dict[int, list[int]]:
    """Return the tokens of each sequence in order of position, up to the first gap."""
    found: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for owner, position, token in zip(step.sequences, step.positions, step.tokens, strict=True):
            if position == len(found[owner]):
                found[owner].append(token)
    return dict(found)


def compare_by_tokens(
    captures: tuple[Capture, Capture], tokens: Sequence[Token]
) -> tuple[list[ComparedTokens], int]:
    """Return every output with a row a token on both sides, and the number of those without."""
    sides = [_side(capture) for capture in captures]
    made, left = [], 0
    for component in sides[0].calls.keys() & sides[1].calls.keys():
        calls = [side.calls[component] for side in sides]
        names = calls[0][0].outputs.keys() & calls[1][0].outputs.keys()
        alike = _alike_until(component, sides, tokens)
        for name in sorted(names):
            pair = _pair(sides, component, "outputs", name)
            if pair is None or _form(pair[0]) != _form(pair[1]):
                left += 1
                continue
            made.append(_beside(component, name, pair, tokens, alike))
    order = list(sides[0].calls)
    return sorted(made, key=lambda compared_tokens: order.index(compared_tokens.component)), left


def _side(capture: Capture) -> CapturedTokens:
    calls: dict[str, list[CapturedCall]] = defaultdict(list)
    for call in capture.calls:
        calls[call.component].append(call)
    return CapturedTokens(capture, calls, {step.number: step for step in capture.steps})


def _rows(side: CapturedTokens, component: str, port: str, name: str) -> dict[Token, Tensor] | None:
    """Return the row of every token at a site; None if a call has other rows, or no bytes."""
    found: dict[Token, Tensor] = {}
    for call in side.calls[component]:
        kept: CapturedTensor | None = getattr(call, port).get(name)
        step = side.steps[call.step]
        if kept is None or kept.at is None or not kept.shape:
            return None
        rows = kept.rows if kept.rows is not None else range(len(step.tokens))
        if kept.shape[0] != len(rows) or any(row >= len(step.tokens) for row in rows):
            return None
        tensor = side.capture.tensor(kept)
        for at, row in enumerate(rows):
            found[step.sequences[row], step.positions[row]] = tensor[at]
    return found


def _pair(
    sides: Sequence[CapturedTokens], component: str, port: str, name: str
) -> tuple[dict[Token, Tensor], dict[Token, Tensor]] | None:
    """Return the rows of both; pad scores and choices, whose width is that of the memory."""
    one, other = (_rows(side, component, port, name) for side in sides)
    if one is None or other is None:
        return None
    widths = {each.shape[0] for side in (one, other) for each in side.values() if each.ndim == 1}
    if len(widths) > 1:
        for side in (one, other):
            for token, tensor in side.items():
                none = -torch.inf if tensor.is_floating_point() else -1
                more = (0, max(widths) - tensor.shape[0])
                side[token] = torch.nn.functional.pad(tensor, more, value=none)
    return one, other


def _form(rows: Mapping[Token, Tensor]) -> set[tuple[torch.dtype, torch.Size]]:
    return {(row.dtype, row.shape) for row in rows.values()}


def _alike_until(
    component: str, sides: Sequence[CapturedTokens], tokens: Sequence[Token]
) -> dict[int, int] | None:
    """Return how many leading tokens of each sequence have equal inputs; None if unknown."""
    first = [side.calls[component][0] for side in sides]
    names = {name for call in first for name in call.inputs if not name.startswith(_MEMORY)}
    kept = {name: call.inputs[name] for call in first for name in call.inputs}
    ends: dict[int, int] = {}
    for owner, position in tokens:
        ends[owner] = max(ends.get(owner, 0), position + 1)
    for name in names:
        pair = _pair(sides, component, "inputs", name)
        if pair is None:
            if kept[name].dtype[0] in "IU" and len(kept[name].shape) == 1:
                continue  # offsets: they say how the tokens were cut
            return None
        for owner, position in tokens:
            one, other = (side.get((owner, position)) for side in pair)
            if one is None or other is None or not _same(one, other):
                ends[owner] = min(ends[owner], position)
    return ends


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(equal_elements(one, other).all())


def _beside(
    component: str,
    name: str,
    pair: tuple[dict[Token, Tensor], dict[Token, Tensor]],
    tokens: Sequence[Token],
    alike: Mapping[int, int] | None,
) -> ComparedTokens:
    line = ComparedTokens(component, name)
    common = [token for token in tokens if token in pair[0] and token in pair[1]]
    line.calls = len(common)
    if not common:
        return line
    one, other = (torch.stack([side[token] for token in common]) for side in pair)
    same = equal_elements(one, other)
    line.elements, line.identical = same.numel(), int(same.sum())
    odd = (~same.reshape(len(common), -1).all(1)).nonzero().flatten().tolist()
    if not odd:
        return line
    line.first = common[odd[0]]
    own = (common[at] for at in odd if alike is not None and common[at][1] < alike[common[at][0]])
    line.own = next(own, None)
    if one.is_floating_point() and one.dtype.itemsize > 1:
        a, b = one.double().flatten(), other.double().flatten()
        known = a.isfinite() & b.isfinite()
        line.sums.add(b[known], a[known])
    else:
        line.measured = False
    return line


# --------------------------------------------------------------------------------------------------
# Steps that got the same tokens are paired; where prompts were split otherwise, outputs
# are paired token by token. Hashes decide equality, and only unequal tensors are read. Without a
# checkpoint there is no budget, so equal means bit for bit. A component with equal inputs and
# unequal outputs is an origin; later differences are inherited. Two runs of the same weights (by
# hash) with the same code that differ are UNSTABLE.

MOST_ORIGINS = 100
_SHOWN = 6  # origins on the screen
# What makes two captures runs of one candidate; versions and machine are part of it.
_EXTENTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "n_routed_experts",
    "vocab_size",
)
_ENGINES = ("vllm", *KINDS)  # they hold weights of their own
_SAME = (
    *("model", "weights", "backend", "arithmetic", "form", "sums", "recipe", "versions", "patch"),
)


@dataclass(eq=False)
class ComparedOutput:
    """One output of one component over the common steps."""

    component: str
    output: str
    calls: int = 0
    elements: int = 0
    identical: int = 0
    sums: PairSums = field(default_factory=PairSums)
    measured: bool = True  # False where only hashes are there
    first: tuple[int, int] | None = None  # step and row of the first difference
    own: tuple[int, int] | None = None  # the same, of the first call with equal inputs
    words: str = ""
    place: tuple[str, str] = ("step", "row")  # what first and own count; or sequence and position
    equal_calls: list[tuple[Capture, CapturedTensor]] = field(
        default_factory=list
    )  # read if others differ

    @property
    def equal(self) -> bool:
        """Return whether every element has the same bits."""
        return self.first is None


@dataclass(frozen=True, eq=False)
class RunComparison:
    """The result of comparing two captures."""

    captures: tuple[Capture, Capture]
    lines: tuple[ComparedOutput, ...]
    steps: int
    same_candidate: bool
    notes: tuple[str, ...] = ()
    tokens: int = 0  # that were compared one by one, since the runs were cut otherwise

    @property
    def origins(self) -> list[ComparedOutput]:
        """Return the outputs that differ though all inputs were equal."""
        return [line for line in self.lines if line.own is not None]

    @property
    def verdict(self) -> Verdict:
        """Return AGREES if bit-equal, UNSTABLE if one candidate gave two results, else DIFFERS."""
        if all(line.equal for line in self.lines):
            return Verdict.AGREES
        asked_alike = self.same_candidate and not self.tokens
        return Verdict.UNSTABLE if asked_alike else Verdict.DIFFERS

    @property
    def extent(self) -> str:
        """Describe what was compared."""
        count, noun = (self.tokens, "token") if self.tokens else (self.steps, "step")
        return f"{count:,} {noun}{'' if count == 1 else 's'}"

    @property
    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        apart = [line for line in self.lines if not line.equal]
        if not apart:
            return f"Both runs are equal to the bit: {len(self.lines):,} outputs, {self.extent}."
        unstable = self.verdict is Verdict.UNSTABLE
        who = "One candidate gave two answers" if unstable else "The runs differ"
        if not self.origins:
            return f"{who}: {len(apart):,} outputs, none of them on equal inputs."
        first = self.origins[0]
        return f"{who}: {first.component} has another output on equal inputs."


def compare_runs(first: Path, second: Path, *, partial: bool = False) -> RunComparison:
    """Open and compare two captures; with `partial` also the steps of a killed run."""
    captures = (Capture.open(first), Capture.open(second))
    for each in captures if not partial else ():
        each.require_complete()
    _require_one_model(*captures)
    for capture in captures:  # equal hashes say nothing of bytes that changed since
        capture.require_undamaged()
    notes = [
        f"The {name} capture is incomplete: its run ended before its time."
        for name, each in zip(("first", "second"), captures, strict=True)
        if not each.complete
    ]
    tokens = tokens_in_common(*captures)
    if tokens:
        return _by_tokens(captures, tokens, notes)
    common = _common_steps(*captures)
    steps = max(len(each.steps) for each in captures)
    if common < steps:
        notes.append(f"Tokens differ after step {common - 1}: {steps - common} steps are left out.")
    calls = [{(c.step, c.component): c for c in each.calls if c.step < common} for each in captures]
    only = calls[0].keys() ^ calls[1].keys()
    if only:
        _, name = min(only)
        notes.append(f"{len(only):,} calls are in one capture only, such as {name}.")
    lines: dict[tuple[str, str], ComparedOutput] = {}
    for key, call in calls[0].items():
        other = calls[1].get(key)
        if other is not None:
            for name in call.outputs.keys() & other.outputs.keys():
                line = lines.setdefault(
                    (call.component, name), ComparedOutput(call.component, name)
                )
                _add(line, captures, (call, other), name)
    for line in lines.values():
        _complete(line)
    return _compared(captures, list(lines.values()), common, notes)


def _by_tokens(
    captures: tuple[Capture, Capture], tokens: tuple[Token, ...], notes: list[str]
) -> RunComparison:
    """Compare runs that got the same tokens in other steps."""
    found, left = compare_by_tokens(captures, tokens)
    notes.append("The runs were split differently: their outputs for each token are compared.")
    if left:
        notes.append(f"{left:,} outputs have no row for each token, and are left out.")
    lines = [
        ComparedOutput(**vars(compared_tokens), place=("sequence", "position"))
        for compared_tokens in found
        if compared_tokens.calls
    ]
    return replace(_compared(captures, lines, 0, notes), tokens=len(tokens))


def _compared(
    captures: tuple[Capture, Capture], lines: list[ComparedOutput], common: int, notes: list[str]
) -> RunComparison:
    if not lines:
        raise Undecided(
            "calls in common", 0, "one component at least that both captures have",
            "Capture both runs with the same filters.",
        )  # fmt: skip
    return RunComparison(captures, tuple(lines), common, _one_candidate(*captures), tuple(notes))


def _require_one_model(first: Capture, second: Capture) -> None:
    """Raise if no output can match: another family, or other extents, where stated."""
    sides = []
    for capture in (first, second):
        config = capture.facts.get("config")
        extents = config if isinstance(config, dict) else {}
        fields = {"family": capture.facts.get("family")}
        sides.append(fields | {name: extents.get(name) for name in _EXTENTS})
    for name, one in sides[0].items():
        other = sides[1][name]
        if one is not None and other is not None and one != other:
            raise InvalidArgument(
                f"captures: {name}", [one, other], "two runs of one model",
                "Choose captures of the same model; quantised and unquantised ones may meet.",
            )  # fmt: skip


def _common_steps(first: Capture, second: Capture) -> int:
    """Return how many leading steps got the same tokens of the same sequences."""
    common = 0
    for one, other in zip(first.steps, second.steps, strict=False):
        if (one.tokens, one.positions, one.sequences) != (
            other.tokens, other.positions, other.sequences,
        ):  # fmt: skip
            break
        common += 1
    if not common:
        raise Undecided(
            "steps in common", 0, "the same tokens in the first step of both captures",
            "Capture both runs with the same prompts.",
        )  # fmt: skip
    return common


def _one_candidate(first: Capture, second: Capture) -> bool:
    """Return whether the same weights ran with the same code, so that a difference is a race.

    If a capture does not state its weights, the runs can only differ, not be UNSTABLE.
    """
    if _weights_that_ran(first) != _weights_that_ran(second) or _weights_that_ran(first) is None:
        return False
    return all(first.facts.get(name) == second.facts.get(name) for name in _SAME)


def _weights_that_ran(capture: Capture) -> tuple[Any, ...] | None:
    """Return the hash of the weights, or of all that the checkpoint holds; None if unstated.

    A fingerprint alone does not count: of large files it covers samples. Nor does the checkpoint of
    a run in an engine, whose loader may have made something else of it.
    """
    source = capture.facts.get("source")
    stated = source if isinstance(source, dict) else {}
    if capture.facts.get("backend") in _ENGINES:
        stated = {}
    found = capture.facts.get("weights"), stated.get("content")
    return None if found == (None, None) else (*found, stated.get("fingerprint"))


def _add(
    line: ComparedOutput,
    captures: tuple[Capture, Capture],
    calls: tuple[CapturedCall, CapturedCall],
    name: str,
) -> None:
    kept = (calls[0].outputs[name], calls[1].outputs[name])
    line.calls += 1
    size = _elements(kept[0])
    line.elements += size
    if _alike(*kept):
        line.identical += size
        line.equal_calls.append((captures[0], kept[0]))
        return
    row = 0
    if kept[0].at is None or kept[1].at is None:
        line.measured = False
    elif kept[0].dtype != kept[1].dtype or kept[0].shape != kept[1].shape:
        line.measured = False
        line.words = (
            f"{kept[0].dtype} {list(kept[0].shape)} beside {kept[1].dtype} {list(kept[1].shape)}"
        )
    else:
        row = _measure(line, captures, kept)
    at = (calls[0].step, row)
    line.first = line.first or at
    if line.own is None and _same_inputs(*calls):
        line.own = at


def _measure(
    line: ComparedOutput,
    captures: tuple[Capture, Capture],
    kept: tuple[CapturedTensor, CapturedTensor],
) -> int:
    """Add the sums of two unequal tensors; return the first unequal row."""
    one, other = (capture.tensor(tensor) for capture, tensor in zip(captures, kept, strict=True))
    same = equal_elements(one, other)
    line.identical += int(same.sum())
    if one.is_floating_point() and one.dtype.itemsize > 1:
        a, b = one.double().flatten(), other.double().flatten()
        known = a.isfinite() & b.isfinite()
        line.sums.add(b[known], a[known])
    else:
        line.measured = False
    if not one.ndim:
        return 0
    odd = (~same).reshape(same.shape[0], -1).any(1).nonzero()
    return int(odd[0]) if len(odd) else 0


def _complete(line: ComparedOutput) -> None:
    """Add equal tensors to the sums of an output that differs elsewhere."""
    if line.equal or not line.measured:
        return
    for capture, kept in line.equal_calls:
        if kept.at is None:
            line.measured = False
            return
        flat = capture.tensor(kept).double().flatten()
        known = flat[flat.isfinite()]
        line.sums.add(known, known)


def _elements(kept: CapturedTensor) -> int:
    size = 1
    for extent in kept.shape:
        size *= extent
    return size


def _alike(one: CapturedTensor, other: CapturedTensor) -> bool:
    return (one.sha256, one.dtype, one.shape) == (other.sha256, other.dtype, other.shape)


def _same_inputs(one: CapturedCall, other: CapturedCall) -> bool:
    return one.inputs.keys() == other.inputs.keys() and all(
        _alike(tensor, other.inputs[name]) for name, tensor in one.inputs.items()
    )


def compared_document(compared: RunComparison) -> dict[str, Any]:
    """Return the comparison as plain data."""
    return {
        "verdict": compared.verdict,
        "origins": [_origin(line) for line in compared.origins[:MOST_ORIGINS]],
        "cosines": [_line(line) for line in compared.lines],
        "sentence": compared.sentence,
        "captures": [capture.hash for capture in compared.captures],
        "same_candidate": compared.same_candidate,
        "steps": compared.steps,
        "tokens": compared.tokens,
        "notes": list(compared.notes),
    }


def _split(component: str) -> tuple[int | None, str]:
    kind, _, rest = component.partition(".")
    place, _, role = rest.partition(".")
    return (int(place), role) if kind == "layers" and place.isdecimal() else (None, component)


def _numbers(line: ComparedOutput) -> tuple[float | None, float | None]:
    if line.equal:
        return 1.0, 0.0
    cosine, apart = line.sums.cosine, line.sums.relative_l2
    known = line.measured and cosine == cosine  # noqa: PLR0124  NaN
    return (cosine, apart) if known else (None, None)


def _line(line: ComparedOutput) -> dict[str, Any]:
    layer, role = _split(line.component)
    cosine, apart = _numbers(line)
    return {
        "layer": layer,
        "component": role,
        "output": line.output,
        "cosine": cosine,
        "relative_l2": apart,
        "identical": line.identical / line.elements if line.elements else None,
        "first": None if line.first is None else _at(line, line.first),
    }


def _at(line: ComparedOutput, place: tuple[int, int]) -> dict[str, int]:
    return dict(zip(line.place, place, strict=True))


def _origin(line: ComparedOutput) -> Origin:
    layer, role = _split(line.component)
    cosine, apart = _numbers(line)
    where = _at(line, line.own or (0, 0))
    port = "out" if line.output == "out" else f"out.{line.output}"
    return Origin(
        layer, role, f"{line.component}.{port}", where, None, cosine, apart,
        evidence=_evidence(line),
    )  # fmt: skip


def _evidence(line: ComparedOutput) -> str:
    if line.words:
        return line.words
    share = line.identical / line.elements if line.elements else 0.0
    cosine, apart = _numbers(line)
    text = f"{100 * share:.2f} % of its elements are equal"
    if cosine is not None and apart is not None:
        text += f", relative difference {number(apart)}"
    at = ", ".join(f"{n} {k}" for n, k in _at(line, line.own or line.first or (0, 0)).items())
    return f"{text}; first in {at}, on equal inputs"


def compared_lines(compared: RunComparison) -> Iterator[str]:
    """Return the comparison as a few lines of text."""
    yield f"{compared.verdict}  {compared.sentence}"
    names = " and ".join(_name(capture) for capture in compared.captures)
    yield f"  captures    {names}, {compared.extent} in common"
    apart = [line for line in compared.lines if not line.equal]
    yield f"  outputs     {len(compared.lines):,}, of which {len(apart):,} differ"
    for note in compared.notes:
        yield f"  note        {note}"
    for line in compared.origins[:_SHOWN]:
        yield f"  origin      {line.component}.{line.output}: {_evidence(line)}"
    more = len(compared.origins) - _SHOWN
    if more > 0:
        yield f"  and         {more:,} more"


def _name(capture: Capture) -> str:
    """Return the label that its user gave it, and its hash."""
    label = capture.facts.get("label")
    return f"{label} ({capture.hash[:12]})" if isinstance(label, str) else capture.hash[:12]


def compared_page(compared: RunComparison, provenance: Provenance) -> Page:
    """Return a separate page: a comparison belongs to no checkpoint."""
    hashes = [capture.hash for capture in compared.captures]
    # A page's name holds the first 12 digits: both captures are in them.
    key = "".join(part for at in (slice(6), slice(6, 32)) for part in (h[at] for h in hashes))
    remedy = (
        "Run it again and look at this component: races, stale memory, unwritten output."
        if compared.verdict is Verdict.UNSTABLE
        else "Judge both runs with degarble check: it says which of them is wrong, and why."
    )
    findings = tuple(
        PageFinding(
            f"{line.component} returns other values for equal inputs", remedy, _origin(line)
        )
        for line in compared.origins[:_SHOWN]
    )
    subject = Subject("comparison", "Two captures", key)
    panel = Panel(PanelKind.COMPARE, compared.sentence, compared.verdict, tuple(_blocks(compared)))
    return Page(subject, provenance, compared.verdict, compared.sentence, findings, (panel,))


_LISTED = 200  # outputs that differ, in the table


def _blocks(compared: RunComparison) -> Iterator[Block]:
    """Yield what was compared, the whole run as a plot, and every output that differs."""
    names = tuple(
        Fact(f"{place} capture", _name(capture))
        for place, capture in zip(("First", "Second"), compared.captures, strict=True)
    )
    yield Facts((*names, Fact("In common", compared.extent)))
    yield from (Sentence(note, Tone.NOTE) for note in compared.notes)
    apart = [line for line in compared.lines if not line.equal]
    if not apart:
        return
    yield _plot(compared)
    columns = (
        Column("output", ColumnKind.CODE),
        Column("inputs"),
        Column("equal elements", ColumnKind.SHARE),
        Column("relative difference", ColumnKind.NUMBER),
        Column("cosine", ColumnKind.NUMBER, 6),
        Column("first in"),
    )
    rows = tuple(
        (
            f"{line.component}.{line.output}",
            "equal" if line.own is not None else "differ",
            line.identical / line.elements if line.elements else None,
            _numbers(line)[1],
            _numbers(line)[0],
            ", ".join(f"{name} {at}" for name, at in _at(line, line.first or (0, 0)).items()),
        )
        for line in apart[:_LISTED]
    )
    more = f"; {len(apart) - len(rows):,} more are in --json" if len(apart) > len(rows) else ""
    yield Table(f"Outputs that differ, in the order of the run{more}", columns, rows)


def _plot(compared: RunComparison) -> Points:
    values = [_numbers(line)[1] for line in compared.lines]
    marked = tuple(at for at, line in enumerate(compared.lines) if line.own is not None)
    apart = sum(not line.equal for line in compared.lines)
    layers = [_split(line.component)[0] for line in compared.lines]
    ticks = layer_ticks(["ends" if layer is None else str(layer) for layer in layers])
    return Points(
        "Every output in the order of the run: stems mark where equal inputs gave other outputs; "
        "equal ones are not drawn",
        "layer" if ticks else "outputs in the order of the run",
        "relative difference",
        tuple(values),
        f"{len(values):,} outputs, {apart:,} differ, {len(marked):,} of them on equal inputs.",
        marked,
        ticks,
    )
