"""Text gates of a nightly run: perplexity, KL divergence, answer length, known-answer echo."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

import torch

from degarble.harness.backends.registry import AskedBackend, use_backend
from degarble.harness.base.errors import Undecided
from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.check.check import captured_texts
from degarble.harness.engine.localise.recorded_run import forward_again
from degarble.harness.history.ledger import Failure
from degarble.harness.history.records import TEXT
from degarble.harness.inference.generation import Continuation, Finish, Generation, Limits
from degarble.harness.inference.model import LogitsModel, open_model
from degarble.harness.nightly.metamorphic import prompts_of
from degarble.harness.nightly.night import NightConfig, StepResult
from degarble.harness.nightly.steps import folders_of
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence as SequenceState
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.inference.model import OpenModel


# --------------------------------------------------------------------------------------------------
# Judge a text statistic over prompts: paired differences, confidence interval, detectable drift.
#
# Each prompt gives one number for candidate, twin and BF16 reference; the drift is the mean of
# candidate minus twin. The healthy range follows from twin minus reference: a candidate may stray
# from its twin by less than the format itself does from BF16 (that mean with its own interval), or
# by one BF16 step of the statistic if that is more. A gate is red only if the drift's whole
# interval lies outside. A gate that could not detect a drift that matters decides nothing.
#
# Student's quantile is Wallace's closed form (1959), within 1 % from 5 prompts on.

FEWEST = 4  # prompts
CONFIDENCE = 0.999
POWER = 0.8
_STEP = 2.0**-8  # of BF16: what rounding alone may do to a statistic


@dataclass(frozen=True)
class TextGate:
    """One statistic over the prompts: `low` to `high` is the interval of the drift."""

    name: str
    unit: str
    prompts: int
    candidate: float
    twin: float
    reference: float
    low: float
    high: float
    healthy: float
    smallest: float  # smallest drift that these prompts detect with probability POWER
    matters: float  # drift that a gate must detect
    finite: bool = True

    @property
    def drift(self) -> float:
        """Return the mean of candidate minus twin."""
        return self.candidate - self.twin

    @property
    def verdict(self) -> Verdict:
        """Return DIFFERS only if the whole interval lies outside the healthy range."""
        if not self.finite or self.low > self.healthy or self.high < -self.healthy:
            return Verdict.DIFFERS
        return Verdict.UNDECIDED if self.smallest > self.matters else Verdict.AGREES

    @property
    def sentence(self) -> str:
        """Return drift, interval, healthy range and detectable drift as text."""
        if not self.finite:
            return f"{self.name} of the candidate is not finite."
        shown = [number(each, 3) for each in (self.drift, self.low, self.high, self.healthy)]
        text = (
            f"{self.name}: drift {shown[0]} {self.unit} [{shown[1]}, {shown[2]}], healthy up to "
            f"{shown[3]}; {self.prompts} prompts show a drift of {number(self.smallest, 3)} "
            f"{100 * POWER:.0f} times in 100."
        )
        if self.verdict is not Verdict.UNDECIDED:
            return text
        return f"{text} A drift of {number(self.matters, 3)} has to be seen: {self._advice}"

    @property
    def _advice(self) -> str:
        if abs(self.twin - self.reference) >= self.matters:
            return "the format alone costs more, so this statistic cannot judge it."
        # The detectable drift falls with the square root of the number of prompts.
        wanted = math.ceil(self.prompts * (self.smallest / self.matters) ** 2)
        return f"give about {wanted:,} prompts."


def gate(
    name: str,
    unit: str,
    candidate: Sequence[float],
    twin: Sequence[float],
    reference: Sequence[float],
    matters: float,
) -> TextGate:
    """Judge one statistic, a number a prompt; `matters` is the drift that must be detectable."""
    count = len(candidate)
    if count < FEWEST:
        raise Undecided("prompts of a text gate", count, f"{FEWEST} at least", "Give more prompts.")
    for voice, numbers in (("twin", twin), ("reference", reference)):
        wild = sum(not math.isfinite(each) for each in numbers)
        if wild:
            raise Undecided(
                f"{name} of the {voice}", f"not finite on {wild} of {count} prompts", "numbers",
                "The text gates need a twin and a reference that can be measured: check these.",
            )  # fmt: skip
    if not all(map(math.isfinite, candidate)):
        unknown = math.nan
        means = (math.nan, fmean(twin), fmean(reference))
        blank = (unknown, unknown, unknown, unknown, matters)
        return TextGate(name, unit, count, *means, *blank, finite=False)
    own, of_format = _differences(candidate, twin), _differences(twin, reference)
    # Two-sided Student interval of the mean paired difference.
    wide = quantile(count - 1, (1 + CONFIDENCE) / 2)
    half = wide * stdev(own) / math.sqrt(count)
    of_format_half = wide * stdev(of_format) / math.sqrt(count)
    healthy = max(abs(fmean(of_format)) + of_format_half, abs(fmean(twin)) * _STEP)
    # Drift beyond the healthy range that these prompts detect with probability POWER.
    more = quantile(count - 1, POWER) * stdev(own) / math.sqrt(count)
    middle = fmean(own)
    means = (fmean(candidate), fmean(twin), fmean(reference))
    seen = (middle - half, middle + half, healthy, healthy + half + more)
    return TextGate(name, unit, count, *means, *seen, matters)


def _differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [mine - theirs for mine, theirs in zip(first, second, strict=True)]


def quantile(degrees: int, probability: float) -> float:
    """Return Student's quantile by Wallace's approximation, for probabilities from one half on."""
    # Wallace (1959), solved for t: z (8 n + 3) / (8 n + 1) = sqrt(n ln(1 + t^2 / n)).
    z = NormalDist().inv_cdf(probability) * (8 * degrees + 3) / (8 * degrees + 1)
    return math.sqrt(degrees * math.expm1(z * z / degrees))


# --------------------------------------------------------------------------------------------------
# Text gates of a nightly run: perplexity, KL divergence, answer length, known-answer echo.
#
# Measured on each prompt, for candidate, twin and BF16 reference: surprise at the prompt in nats a
# token, KL divergence from the reference at each position, the number of tokens in an answer, and
# the share of a prompt's second copy that is predicted (its own words are the answers, so any
# prompt file will do). If the checkpoint runs here the candidate computes in the arithmetic of
# engines; captures of another program have only the logits after each prompt and each new token.
# `gate` decides whether a drift is significant; fewer prompts than it needs are UNDECIDED.

NEW_TOKENS = 24
PROMPTS = 32
UNITS = {
    "perplexity": "nats",
    "divergence": "nats",
    "length": "tokens",
    "echo": "of the tokens",
}
_PROBABILITIES = ("perplexity", "divergence")
# The drift that a gate has to see: perplexity doubled, half of an answer, half of the known words.
MATTERS = {
    "perplexity": math.log(2),
    "divergence": math.log(2),
    "length": NEW_TOKENS / 2,
    "echo": 0.5,
}


@dataclass(frozen=True)
class TextStatistics:
    """One model's statistics on each prompt; None where not measured."""

    perplexity: list[float]
    divergence: list[float]
    length: list[float] | None = None
    echo: list[float] | None = None


def texts(config: NightConfig, results: Mapping[str, StepResult]) -> StepResult:
    """Measure the three models, and compare each statistic with its healthy range."""
    notes: list[str] = []
    if config.captures is not None:
        if results["captures"].verdict is not Verdict.AGREES:
            return StepResult(Verdict.UNDECIDED, "There is no capture to judge.")
        voices = _captured(config, Capture.open(folders_of(results)[0]))
    else:
        voices = _generated(config, notes.append)
    gates = []
    for name, unit in UNITS.items():
        candidate, twin, reference = (getattr(voice, name) for voice in voices)
        if candidate is not None and twin is not None and reference is not None:
            gates.append(gate(name, unit, candidate, twin, reference, MATTERS[name]))
    return with_unknown_words(text_result(gates), notes)


def with_unknown_words(result: StepResult, notes: Sequence[str]) -> StepResult:
    """Name the words of the prompts that the tokenizer does not know, unless all is well.

    On unknown words a model's probabilities mean nothing, so they are the first suspect.
    """
    if result.verdict is Verdict.AGREES or not notes:
        return result
    unknown = notes[0].removeprefix("warning: ")
    return replace(result, sentence=f"{result.sentence} Look at the prompts first: {unknown}.")


def text_result(gates: list[TextGate]) -> StepResult:
    """Report the gates; the numbers go into the history.

    Nothing is decided if no gate on the model's probabilities could detect a drift that matters.
    """
    red = [text_gate for text_gate in gates if text_gate.verdict is Verdict.DIFFERS]
    blind = [text_gate for text_gate in gates if text_gate.verdict is Verdict.UNDECIDED]
    values = {f"{g.name}.{who}": value for g in gates
              for who, value in (("candidate", g.candidate), ("drift", g.drift),
                                 ("twin.reference", g.twin - g.reference))
              if value == value}  # fmt: skip  # noqa: PLR0124
    sees = any(g.name in _PROBABILITIES and g.verdict is Verdict.AGREES for g in gates)
    verdict = Verdict.DIFFERS if red else Verdict.AGREES if sees else Verdict.UNDECIDED
    if red:
        sentence = " ".join(text_gate.sentence for text_gate in red)
    elif sees:
        green = [text_gate for text_gate in gates if text_gate.verdict is Verdict.AGREES]
        sentence = f"No text statistic drifts beyond what is healthy. {green[0].sentence}"
    else:
        sentence = f"The prompts cannot show a drift that matters. {blind[0].sentence}"
    left = [name for name in UNITS if name not in {text_gate.name for text_gate in gates}]
    sentence += f" Not measured: {', '.join(left)}." if left else ""
    if blind and verdict is Verdict.AGREES:
        sentence += f" Too few prompts to judge {', '.join(text_gate.name for text_gate in blind)}."
    return StepResult(
        verdict,
        sentence,
        values={TEXT.name: values},
        failures=tuple(
            Failure(f"text.{text_gate.name}", Verdict.DIFFERS, None, text_gate.sentence)
            for text_gate in red
        ),
        judged=tuple(f"text.{text_gate.name}" for text_gate in gates if text_gate not in blind),
        rows=tuple(
            (text_gate.name, str(text_gate.verdict), text_gate.sentence) for text_gate in gates
        ),
    )


def _generated(
    config: NightConfig, notify: Callable[[str], None]
) -> tuple[TextStatistics, TextStatistics, TextStatistics]:
    """Run candidate, twin and reference over the prompts."""
    with open_model(config.reference, "bf16") as reference:
        with open_model(config.checkpoint) as twin:
            known = prompts_of(twin, config, notify)
            prompts = [ids for ids in known[:PROMPTS] if len(ids) > 1]
            meant = _rows(reference.logits_model, prompts)
            twins = _text_statistics(twin, prompts, meant)
        backend = AskedBackend(config.backend)
        with open_model(config.checkpoint, switches=backend.conventions) as candidate:
            _as_engines(candidate)
            use_backend(candidate.logits_model.bound, backend, candidate.recipe)
            mine = _text_statistics(candidate, prompts, meant)
        return mine, twins, _text_statistics(reference, prompts, meant)


def _as_engines(model: OpenModel) -> None:
    """Sum products in float32, as engines do."""
    if model.streamed is None and model.arithmetic == "twin":
        weights = model.logits_model.bound.weights
        switches = model.logits_model.bound.numerics.switches
        numerics = Numerics.twin(switches, products=torch.float32)
        model.logits_model = LogitsModel(BoundModel(model.config, numerics, weights, model.recipe))


def _rows(model: LogitsModel, prompts: list[list[int]]) -> list[Tensor]:
    """Return log probabilities after every token of each prompt."""
    sequences = [SequenceState() for _ in prompts]
    hidden = model.hidden(sequences, [torch.tensor(ids) for ids in prompts])
    parts = hidden.split([len(ids) for ids in prompts])
    return [model.logits(part).double().log_softmax(-1) for part in parts]


def _text_statistics(
    model: OpenModel, prompts: list[list[int]], meant: list[Tensor]
) -> TextStatistics:
    logits_model = model.logits_model
    rows = _rows(logits_model, prompts)
    twice = [[*ids, *ids[1:]] for ids in prompts]
    again = _rows(logits_model, twice)
    length = _lengths(model, prompts, [NEW_TOKENS] * len(prompts))
    return TextStatistics(
        [_surprise(row[:-1], ids[1:]) for row, ids in zip(rows, prompts, strict=True)],
        [_divergence(row, mean) for row, mean in zip(rows, meant, strict=True)],
        length,
        [_known(row, ids) for row, ids in zip(again, prompts, strict=True)],
    )


def _lengths(model: OpenModel, prompts: list[list[int]], limits: list[int]) -> list[float] | None:
    """Return how many tokens follow each prompt, up to its limit."""
    if model.streamed is not None:  # a token would cost a pass over the disk
        return None
    continuations = [Continuation(list(ids)) for ids in prompts]
    Generation(model.logits_model, None, None, Limits(max(limits))).run(continuations)
    return [float(min(len(e.ids), most)) for e, most in zip(continuations, limits, strict=True)]


def _surprise(row: Tensor, targets: list[int]) -> float:
    """Return nats a token."""
    return -float(row.gather(1, torch.tensor(targets)[:, None]).mean())


def _divergence(row: Tensor, meant: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence from the reference, in nats a position."""
    return float((meant.exp() * (meant - row)).sum(-1).mean())


def _known(row: Tensor, ids: list[int]) -> float:
    """Return the predicted share of a prompt's second copy, without its first word."""
    again = torch.tensor(ids[2:] or ids[1:])
    begin = len(row) - 1 - len(again)
    return float((row[begin : begin + len(again)].argmax(-1) == again).double().mean())


def _captured(
    config: NightConfig, run: Capture
) -> tuple[TextStatistics, TextStatistics, TextStatistics]:
    """Return the three models on a capture's steps: after each prompt and each new token."""
    head = {call.step: call for call in run.calls if call.component == "head"}
    steps = [step for step in run.steps if step.number in head]
    mine = [run.outputs(head[step.number])["out"].double() for step in steps]
    owners = [list(dict.fromkeys(step.sequences)) for step in steps]
    place = {step.number: number for number, step in enumerate(run.steps)}
    at = [place[step.number] for step in steps]
    spoken = captured_texts(run)
    new = {number: ids for number, (_, ids) in enumerate(spoken)}
    rows = [_by_owner(mine, owners)]
    known = [owner for owner in rows[0] if new.get(owner)]
    limits = limits_of(run, known, new)
    lengths = [[float(len(new[o])) for o in limits] or None]
    prompts = [spoken[o][0] for o in limits]
    for checkpoint, arithmetic in ((config.checkpoint, None), (config.reference, "bf16")):
        with open_model(checkpoint, arithmetic) as model:
            again = forward_again(model.logits_model.bound, run.steps)
            rows.append(_by_owner([again[n].double() for n in at], owners))
            lengths.append(_lengths(model, prompts, list(limits.values())) if limits else None)
    voices = [
        TextStatistics(
            [_surprise(side[o][: len(new[o])], new[o][: len(side[o])]) for o in known],
            [_divergence(side[o], rows[-1][o]) for o in known],
            length if None not in lengths else None,
        )
        for side, length in zip(rows, lengths, strict=True)
    ]
    return voices[0], voices[1], voices[2]


def limits_of(run: Capture, known: list[int], new: Mapping[int, list[int]]) -> dict[int, int]:
    """Return how many tokens the twin may answer, for sequences whose end the capture states.

    If the candidate stopped at its limit, the twin gets that limit; if it ended by itself, the
    longest answer's length; broken-off answers are left out. Only a run that states its answers
    counts their last tokens, which were never fed again.
    """
    stated = run.facts.get("sequences")
    ends = [each.get("finish") if isinstance(each, dict) else None
            for each in (stated if isinstance(stated, list) else ())]  # fmt: skip
    most = max((NEW_TOKENS, *(len(new[owner]) for owner in known)))
    found = {
        owner: len(new[owner]) if ends[owner] == Finish.LENGTH else most
        for owner in known
        if owner < len(ends) and ends[owner] in (Finish.LENGTH, Finish.END)
    }
    return found if len(found) >= FEWEST else {}


def _by_owner(side: list[Tensor], owners: list[list[int]]) -> dict[int, Tensor]:
    """Return the logits of each sequence, step after step, as log probabilities."""
    found: dict[int, list[Tensor]] = {}
    for logits, who in zip(side, owners, strict=True):
        for owner, row in zip(who, logits, strict=True):
            found.setdefault(owner, []).append(row)
    return {owner: torch.stack(each).log_softmax(-1) for owner, each in found.items()}
