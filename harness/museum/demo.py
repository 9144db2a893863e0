"""The demonstration: a small model that generates text, healthy and then with one planted fault."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.tokenizer import IncrementalDecoder, Tokenizer
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.audit import identity_of
from degarble.harness.commands.check.check import DiagnosedOrigin
from degarble.harness.commands.check.output_statistics import StatisticsCollector
from degarble.harness.commands.check.report import check_page, page_sentence, replay_record
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.model_faults import ComponentContext, Reach
from degarble.harness.engine.faults.registry import model_fault_named
from degarble.harness.engine.localise.localise import During, localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.inference.model import one_thread, open_model
from degarble.harness.model.components import components
from degarble.harness.museum.cases import ModelKey, MuseumModel, prepare
from degarble.harness.report.number_text import number
from degarble.harness.report.page import Subject
from degarble.harness.report.replay_record import PromptTexts, TextRecord
from degarble.harness.report.verdict import TOOL_WORKS, Verdict
from degarble.references import tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.report.page import Page, Provenance
    from degarble.harness.report.replay_record import ReplayRecord
    from degarble.references.binding import BoundModel


# --------------------------------------------------------------------------------------------------
# The story: a healthy run and one with a fault.
#
# The demonstration holds if the healthy run agrees and the fault is found in its component and
# named. A fault that changes no output anywhere it applies is reported as without effect.

KEY = ModelKey("v4", "nvfp4-full")
PLANTED = "M10.nibble_order"
PROMPTS = (
    (
        "recall : anna paints blue . recall : boris eats bread . the quiet fox sees a tree ."
        " recall : anna paints"
    ),
    "3 plus 4 is",
)
NEW_TOKENS = 12
JUDGED_STEPS = 4  # the prompt and three new tokens; the text is longer than what is judged
_TRIALS = 4  # places at most that are tried until the text changes
_LAYER = 3
# Where a fault is planted if it fits there, before anywhere else.
_ROLES = ("ffn.experts.w2", "ffn.experts.w13", "attn.wo_b", "attn.wq_b", "attn.attend")
_SOURCE = Path(tiny.__file__).parent / "v1" / "v4"


@dataclass(frozen=True, eq=False)
class DemoModel:
    """The quantised model, its twin, its BF16 reference, its tokenizer."""

    museum: MuseumModel
    twin: BoundModel
    reference: BoundModel
    tokenizer: Tokenizer
    identity: str

    @property
    def prompts(self) -> list[list[int]]:
        """Return the token ids of the prompts."""
        return [self.tokenizer.encode(prompt) for prompt in PROMPTS]


@dataclass(frozen=True, eq=False)
class DemoRun:
    """One run: its answer to each prompt, token by token, and its judgement."""

    answers: tuple[tuple[str, ...], ...]
    localised: Localised
    statistics: StatisticsCollector
    origins: tuple[DiagnosedOrigin, ...]


@dataclass(frozen=True, eq=False)
class DemoFault:
    """A fault, in one variant, at one component; `run` contains it."""

    fault: ModelFault
    component: str
    variant: FaultVariant
    run: InMemoryRun
    has_effect: bool


@dataclass(frozen=True, eq=False)
class Demonstration:
    """The demonstration: the expected text, the healthy run, and the run with the fault."""

    model: DemoModel
    twin_answers: tuple[tuple[str, ...], ...]
    healthy: DemoRun
    planted: DemoFault
    sick: DemoRun

    @property
    def named(self) -> bool:
        """Return whether the planted fault was found where it is, and nothing else.

        A fault on an edge may appear at several inputs of its component.
        """
        return bool(self.sick.origins) and all(map(self._is_planted, self.sick.origins))

    def _is_planted(self, origin: DiagnosedOrigin) -> bool:
        ids = [] if origin.diagnosed is None else [fault.id for fault in origin.diagnosed.named]
        return (
            origin.discrepancy.context.name == self.planted.component
            and self.planted.fault.id in ids
        )

    @property
    def holds(self) -> bool:
        """Return whether both runs were judged correctly."""
        if self.healthy.localised.verdict is not Verdict.AGREES:
            return False
        if not self.planted.has_effect:
            return self.sick.localised.verdict is Verdict.AGREES
        return self.named

    @property
    def proves(self) -> bool:
        """Return whether a fault was found that has an effect."""
        return self.holds and self.planted.has_effect


def demo_fault(identity: str | None) -> ModelFault:
    """Return the fault to plant: the requested one, or the default."""
    return model_fault_named(PLANTED if identity is None else identity)


def run_demo(fault: ModelFault, step: Callable[[str], None] = lambda _name: None) -> Demonstration:
    """Quantise, run and judge healthy, plant, run and judge again."""
    with one_thread(), tempfile.TemporaryDirectory(prefix="degarble-") as folder:
        model = demo_model(Path(folder))
        step("quantised")
        spoken = InMemoryRun.from_prompts(model.twin, model.prompts, NEW_TOKENS)
        healthy_run = InMemoryRun.from_prompts(model.museum.candidate(), model.prompts, NEW_TOKENS)
        healthy = judge_run(model, healthy_run)
        step("healthy run judged")
        planted = plant(model, fault, healthy_run)
        step(f"{fault.id} planted")
        sick = judge_run(model, planted.run)
        step("sick run judged")
        return Demonstration(model, generated_texts(model, spoken), healthy, planted, sick)


def demo_model(folder: Path) -> DemoModel:
    """Quantise the released model into a folder, and open it."""
    prepare(folder, (KEY,))
    museum = MuseumModel.open(KEY, folder)
    target = folder / KEY.folder
    with Checkpoint.open(target) as checkpoint:
        identity = identity_of(checkpoint)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.of_checkpoint(_SOURCE, config, museum.config.vocab_size)
    with open_model(_SOURCE, "bf16") as opened:
        reference = opened.logits_model.bound
        for name in reference.weights:
            reference.weights[name].values(torch.float64)  # read before the files are closed
    return DemoModel(museum, museum.twin(), reference, tokenizer, identity)


def judge_run(model: DemoModel, run: InMemoryRun) -> DemoRun:
    """Localise the first steps of a run, and diagnose the origins."""
    collector = StatisticsCollector(model.museum.config)
    found = localise(
        model.twin, model.museum.recipe, first_steps(run, JUDGED_STEPS), model.reference,
        During(looked=collector),
    )  # fmt: skip
    causes = tuple(
        DiagnosedOrigin(
            origin,
            diagnose(origin.context, [origin.record, *origin.more]) if origin.record else None,
        )
        for origin in found.origins
    )
    return DemoRun(generated_texts(model, run), found, collector, causes)


def first_steps(run: InMemoryRun, count: int) -> InMemoryRun:
    """Return the beginning of a run; calls keep their numbers."""
    calls = [call for call in run.calls if call.step < count]
    return replace(run, steps=run.steps[:count], calls=calls, logits=run.logits[:count])


def generated_texts(model: DemoModel, run: InMemoryRun) -> tuple[tuple[str, ...], ...]:
    """Return a run's answer to each prompt, one piece of text a token."""
    found = []
    for at in range(len(PROMPTS)):
        growing = IncrementalDecoder(model.tokenizer)
        ids = [int(logits[at].argmax()) for logits in run.logits]
        pieces = [growing.add(number) for number in ids]
        found.append((*pieces[:-1], pieces[-1] + growing.rest()))
    return tuple(found)


def plant(model: DemoModel, fault: ModelFault, healthy: InMemoryRun) -> DemoFault:
    """Plant a fault where the text changes; else where any output does; else where it applies."""
    first: DemoFault | None = None
    expected = generated_texts(model, healthy)
    for trial, (context, variant) in enumerate(_places(model, fault)):
        if trial == _TRIALS:
            break
        candidate, edges = model.museum.candidate(), dict[str, "FaultVariant"]()
        if fault.reach is Reach.EDGE:
            edges[context.name] = variant
        else:
            candidate.calls[context.name] = variant.apply(candidate.calls[context.name])
        run = InMemoryRun.from_prompts(candidate, model.prompts, NEW_TOKENS, edges)
        made = DemoFault(fault, context.name, variant, run, _has_effect(run, healthy))
        if generated_texts(model, run) != expected:
            return made
        if first is None or (made.has_effect and not first.has_effect):
            first = made
    if first is None:
        raise InvalidArgument(
            "--fault", fault.id, "a fault that the tiny V4 in NVFP4 can carry",
            "degarble faults list shows where each of them fits.",
        )  # fmt: skip
    return first


def _has_effect(run: InMemoryRun, healthy: InMemoryRun) -> bool:
    pairs = zip(run.logits, healthy.logits, strict=True)
    return any(not torch.equal(left.nan_to_num(), right.nan_to_num()) for left, right in pairs)


def _places(model: DemoModel, fault: ModelFault) -> Iterator[tuple[ComponentContext, FaultVariant]]:
    """Yield where a fault applies, preferred roles and layers first."""
    candidate = model.museum.candidate()
    found = {
        component.name: component
        for component in components(model.museum.config, model.museum.recipe)
        if component.name in candidate.calls
    }

    def liked(name: str) -> tuple[int, int]:
        role = found[name].role
        block = found[name].block
        far = 0 if block is not None and block.index == _LAYER else 1
        return (_ROLES.index(role) if role in _ROLES else len(_ROLES)), far

    for name in sorted(found, key=liked):
        context = ComponentContext(candidate, found[name], model.museum.recipe)
        if fault.applies_to(context):
            variants = list(fault.variants(context))
            yield from ((context, variant) for variant in sorted(variants, key=_breadth)[:2])


def _breadth(variant: FaultVariant) -> int:
    """Rank variants: one whole weight first; milder ones may leave the text unchanged."""
    fields: Mapping[str, object] = variant.where
    weights = str(fields.get("weights", ""))
    return int("all " in weights or " of experts " in weights) + 2 * int("rows" in fields)


# --------------------------------------------------------------------------------------------------
# The page: that of any check, with an introduction.


def demo_result(demonstration: Demonstration, provenance: Provenance) -> tuple[Page, ReplayRecord]:
    """Return a demonstration's page, and the data of its replay panel."""
    command = f"degarble demo --fault {demonstration.planted.fault.id}"
    sick = demonstration.sick
    origins = [replace(origin, reproducer=command) for origin in sick.origins]
    record = replay_record(
        sick.localised, origins, sick.statistics,
        f"{_lead(demonstration)} {page_sentence(sick.localised, origins)}",
        _facts(demonstration), (_healthy(demonstration), _planted(demonstration)),
    )  # fmt: skip
    subject = Subject("tiny V4, nvfp4-full", "Demonstration", demonstration.model.identity)
    page = check_page(subject, provenance, record, origins, _texts(demonstration))
    if demonstration.proves:
        # The page shows a fault that was wanted: what it says of the tool stands first.
        page = replace(page, verdict=Verdict.AGREES, word=TOOL_WORKS)
    return page, record


def _lead(demonstration: Demonstration) -> str:
    healthy = demonstration.healthy.localised.verdict is Verdict.AGREES
    first = "The healthy run agrees" if healthy else "The healthy run raises a false alarm"
    if not demonstration.planted.has_effect:
        return f"{first}; the fault planted on purpose has no effect here."
    if demonstration.named:
        return f"{first}; the fault planted on purpose is found and named."
    return f"{first}; the fault planted on purpose is not named."


def _healthy(demonstration: Demonstration) -> str:
    rows = demonstration.healthy.localised.rows
    worst = max((row.ratio for row in rows if row.ratio == row.ratio), default=0.0)
    verdict = demonstration.healthy.localised.verdict
    return (
        f"Before: the healthy run of the same model is {verdict}, {len(rows):,} outputs, the "
        f"furthest at {number(worst, 3)} of its budget."
    )


def _planted(demonstration: Demonstration) -> str:
    planted = demonstration.planted
    return (
        f"Planted on purpose: {planted.fault.id}, {planted.variant.words}, in {planted.component}."
    )


def _texts(demonstration: Demonstration) -> TextRecord:
    voices = (
        ("The twin: what it should say", demonstration.twin_answers),
        ("Candidate, healthy", demonstration.healthy.answers),
        (f"Candidate with {demonstration.planted.fault.id}", demonstration.sick.answers),
    )
    return TextRecord(
        tuple(
            PromptTexts(prompt, tuple((name, texts[at]) for name, texts in voices))
            for at, prompt in enumerate(PROMPTS)
        )
    )


def _facts(demonstration: Demonstration) -> tuple[tuple[str, str], ...]:
    museum = demonstration.model.museum
    return (
        ("Model", "the released tiny V4, references/tiny/v1/v4"),
        ("Recipe", museum.key.recipe),
        ("Candidate", "backend torch, products summed in float32"),
        ("Twin", "the same operands, products summed in float64"),
        ("Reference", "the same model in BF16"),
        ("Judged", f"{len(PROMPTS)} prompts, {JUDGED_STEPS} steps, on the CPU"),
    )
