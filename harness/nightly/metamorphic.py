"""Metamorphic tests: the same prompts batched with others, padded, and split in two pieces.

A correct model returns the same states before the head and the same logits for a prompt alone, in a
batch, with tokens after it (a causal model does not attend to them), and fed in two pieces. Bit
equality is AGREES. Where bits differ the other run is judged component by component against its
twin: sums may have another order, but each output must stay within its budget; components that do
not are named. Captures of another program cannot be rerun, so the step reports that it did not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.backends.registry import AskedBackend, use_backend
from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.generate.generate import GenerationOptions, TextGenerator, prompts_from
from degarble.harness.history.ledger import Failure
from degarble.harness.inference.model import open_model
from degarble.harness.nightly.night import NightConfig, StepResult
from degarble.harness.nightly.steps import prompts_file
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import SEVERITY, Verdict
from degarble.references.model import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.inference.model import LogitsModel, OpenModel

PROMPTS = 4  # that are run in every way
LENGTH = 512  # tokens of a prompt at most
_WORDS = {
    Verdict.AGREES: "each component within its budget",
    Verdict.UNDECIDED: "the run could not be judged",
}
_PADDING = 5  # tokens after a prompt


@dataclass(frozen=True, eq=False)
class ModelOutputs:
    """States before the head for each token of a prompt, and the logits after it."""

    hidden: Tensor
    logits: Tensor


def metamorphic(config: NightConfig, _: Mapping[str, StepResult]) -> StepResult:
    """Run the relations on the checkpoint, with its backend."""
    if config.captures is not None:
        return StepResult(
            Verdict.UNDECIDED, "Captures cannot be run again: leave --captures out for this.",
            asked=False,
        )  # fmt: skip
    backend = AskedBackend(config.backend)
    with open_model(config.checkpoint, switches=backend.conventions) as model:
        use_backend(model.logits_model.bound, backend, model.recipe)
        prompts = prompts_of(model, config)
        return judged(model, prompts, config)


def prompts_of(
    model: OpenModel, config: NightConfig, notify: Callable[[str], None] | None = None
) -> list[list[int]]:
    """Return the ids of the first prompts, cut to LENGTH tokens; `notify` of unknown words."""
    prompts = prompts_from(prompts_file(config))
    chat = any(isinstance(prompt, list) for prompt in prompts)
    generator = TextGenerator(model, GenerationOptions(chat=chat), notify)
    ids = [generator.ids_of(prompt)[:LENGTH] for prompt in prompts]
    generator.warn_of_unknown_words()
    return ids


def judged(model: OpenModel, prompts: list[list[int]], config: NightConfig) -> StepResult:
    """Run each relation, and compare with the prompts alone."""
    few = prompts[:PROMPTS]
    alone = [_run(model.logits_model, [ids], [[len(ids)]])[0] for ids in few]
    rows, failures, worst = [], list[Failure](), 0.0
    for name, fed, pieces in relations(few):
        others = _run(model.logits_model, fed, pieces)
        apart = [
            _largest_difference(mine, theirs) for mine, theirs in zip(alone, others, strict=True)
        ]
        if not any(apart):
            rows.append((name, str(Verdict.AGREES), "equal to the bit"))
            continue
        worst = max(worst, *apart)
        found, verdict = _origins(model, config, fed, pieces)
        failures += found
        said = f"largest relative difference {number(max(apart), 3)}"
        within = _WORDS.get(verdict, "beyond a budget")
        rows.append((name, str(verdict), f"{said}; {within}"))
    what = ", ".join(name for name, _, _ in rows)
    unjudged = [name for name, verdict, _ in rows if verdict == Verdict.UNDECIDED]
    if failures:
        passed = (Verdict.AGREES, Verdict.UNDECIDED)
        wrong = [name for name, verdict, _ in rows if verdict not in passed]
        sentence = f"{', '.join(wrong)} moves {failures[0].component} beyond its budget."
        if unjudged:  # an entry for the others does not excuse it
            failures.append(Failure("night.metamorphic", Verdict.UNDECIDED))
        verdict = max((failure.verdict for failure in failures), key=SEVERITY.index)
        return StepResult(verdict, sentence, failures=tuple(failures), rows=tuple(rows))
    if unjudged:
        sentence = f"{', '.join(unjudged)}: bits differ, and no component could be judged."
        return StepResult(Verdict.UNDECIDED, sentence, rows=tuple(rows))
    bits = "to the bit" if not worst else f"within budgets, at most {number(worst, 3)} apart"
    sentence = f"{len(few)} prompts say the same alone, {what}: {bits}."
    return StepResult(Verdict.AGREES, sentence, rows=tuple(rows))


def relations(
    prompts: list[list[int]],
) -> Iterator[tuple[str, list[list[int]], list[list[int]]]]:
    """Yield each relation's name, its sequences, and the pieces in which they are fed."""
    yield "in a batch", prompts, [[len(ids)] for ids in prompts]
    padded = [[*ids, *[ids[-1]] * _PADDING] for ids in prompts]
    yield "with padding behind", padded, [[len(ids)] for ids in padded]
    yield "in two pieces", prompts, [_halves(len(ids)) for ids in prompts]


def _halves(length: int) -> list[int]:
    half = length // 2
    return [half, length - half] if half else [length]


def _run(model: LogitsModel, fed: list[list[int]], pieces: list[list[int]]) -> list[ModelOutputs]:
    """Feed sequences in a batch, piece by piece."""
    sequences = [Sequence() for _ in fed]
    parts: list[list[Tensor]] = [[] for _ in fed]
    for turn in range(max(map(len, pieces))):
        at = [n for n, piece in enumerate(pieces) if turn < len(piece)]
        new = [
            # A sequence's length is the number of tokens that were fed before.
            torch.tensor(fed[n][sequences[n].length :][: pieces[n][turn]], dtype=torch.int64)
            for n in at
        ]
        hidden = model.hidden([sequences[n] for n in at], new)
        for n, part in zip(at, hidden.split([len(tensor) for tensor in new]), strict=True):
            parts[n].append(part)
    whole = [torch.cat(each) for each in parts]
    return [ModelOutputs(tensor, model.logits(tensor)) for tensor in whole]


def _largest_difference(mine: ModelOutputs, theirs: ModelOutputs) -> float:
    """Return largest difference over largest magnitude of the common tokens; 0 if bit-equal."""
    found = 0.0
    for left, right in ((mine.hidden, theirs.hidden), (mine.logits, theirs.logits)):
        right = right[: len(left)]  # noqa: PLW2901  without tokens after the prompt
        if torch.equal(left, right):
            continue
        away = (left.double() - right.double()).abs().max() / left.double().abs().max()
        found = max(found, float(away) if away.isfinite() else float("inf"))
    return found


def _origins(
    model: OpenModel, config: NightConfig, fed: list[list[int]], pieces: list[list[int]]
) -> tuple[list[Failure], Verdict]:
    """Judge the run, in the same pieces, against the twin; return components beyond budget."""
    run = InMemoryRun.again(model.logits_model.bound, steps_of(fed, pieces))
    conventions = AskedBackend(config.backend).conventions
    with open_model(config.checkpoint, model.arithmetic, switches=conventions) as twin:
        found = localise(twin.logits_model.bound, twin.recipe, run)
    failures = [
        Failure(origin.component, Verdict.DIFFERS, None, origin.sentence)
        for origin in found.origins
    ]
    failures += [
        Failure(each, Verdict.UNSTABLE, None, "two answers on equal inputs")
        for each in found.unstable
    ]
    return failures, found.verdict


def steps_of(fed: list[list[int]], pieces: list[list[int]]) -> list[CapturedStep]:
    """Return the forward passes in which `_run` feeds the sequences."""
    made, at = [], [0 for _ in fed]
    for turn in range(max(map(len, pieces))):
        ids, positions, owners = list[int](), list[int](), list[int]()
        for owner, piece in enumerate(pieces):
            if turn < len(piece):
                begin, end = at[owner], at[owner] + piece[turn]
                ids += fed[owner][begin:end]
                positions += range(begin, end)
                owners += [owner] * (end - begin)
                at[owner] = end
        made.append(CapturedStep(turn, Phase.PREFILL, tuple(ids), tuple(positions), tuple(owners)))
    return made
