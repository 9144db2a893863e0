"""Run `degarble check`: compare a capture with its twin and the BF16 reference, and find the cause.

The twin's checkpoint is the one that the capture names, identified by its fingerprint and never by
its path. For `--backend` the prompts of the capture run again on other kernels first.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from degarble.harness.backends.registry import require_backend
from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnreadableFile
from degarble.harness.base.gpu import refusing_failures
from degarble.harness.capture.capture import CaptureSettings, capture
from degarble.harness.capture.files.reader import Capture, require_usable_inputs
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.options import CaptureFilter as Filter
from degarble.harness.capture.recorded_tensors import Coverage
from degarble.harness.chat.tokenizer import IncrementalDecoder, Tokenizer
from degarble.harness.checkpoint.audit.structure.manifest_check import ReferenceHashes
from degarble.harness.checkpoint.view.view import fingerprint
from degarble.harness.commands.audit.audit import identity_of
from degarble.harness.engine.conventions.registry import CONTRADICTED, REGISTRY, conventions_in
from degarble.harness.engine.diagnose.attribute import Shares, recorded_throughout, shares_of
from degarble.harness.engine.diagnose.minimal_reproducer import shrunk
from degarble.harness.engine.localise.localise import During, Localised, localise
from degarble.harness.inference.devices import CPU, RecentTensors, require_device, run_on_device
from degarble.harness.inference.generation import Continuation, Generation, Limits
from degarble.harness.inference.model import ARITHMETICS, HELD_VALUES, OpenModel, open_model
from degarble.harness.inference.processes import usable_cores, usable_workers
from degarble.harness.model.components import components
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.family import family_of
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.page import MANIFEST
from degarble.harness.report.progress import size
from degarble.harness.report.replay_record import PromptTexts, TextRecord
from degarble.harness.report.verdict import AnswerLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.harness.backends.registry import AskedBackend
    from degarble.harness.capture.capture import Watch
    from degarble.harness.engine.diagnose.diagnose import Diagnosed
    from degarble.harness.engine.diagnose.representatives import Representatives
    from degarble.harness.engine.localise.answers import JudgedElsewhere, JudgingTask
    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.engine.localise.judged_run import Looked
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.engine.recover.described import Described
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.report.verdict import Verdict
    from degarble.references.binding import BoundModel


_HASHING = 4  # of so many cores one verifies the reference meanwhile

# --------------------------------------------------------------------------------------------------
# The text panel of a check: the model's answers and its twin's answers to the same prompts.
#
# A few short prompts are shown. Tokens come from the capture's own record of prompts and answers if
# it has one, else from its steps. The twin continues the same token ids greedily, for as many
# tokens. With streamed weights the twin generates nothing: each token would read the whole
# checkpoint from disk. What cannot be shown becomes a note.

PROMPTS = 4  # shown at most
LENGTH = 2048  # tokens of a prompt at most, so that the twin's answer stays cheap
NEW_TOKENS = 64


def texts_of(run: RecordedRun, model: OpenModel) -> TextRecord:
    """Return the texts of candidate and twin."""
    spoken = captured_texts(run)
    notes = []
    if len(spoken) > PROMPTS:
        notes.append(f"The first {PROMPTS} of {len(spoken):,} prompts.")
    if "tokens" in run.facts.get("unknown", ()):
        notes.append("The capture does not state its tokens, so no text is shown.")
    short = [pair for pair in spoken[:PROMPTS] if len(pair[0]) <= LENGTH]
    if len(short) < len(spoken[:PROMPTS]):
        notes.append(f"Prompts of more than {LENGTH:,} tokens are left out.")
    checkpoint = model.checkpoint
    try:
        vocabulary = model.config.vocab_size
        tokenizer = Tokenizer.of_checkpoint(checkpoint.root, checkpoint.config, vocabulary)
    except DegarbleError:
        tokenizer = None
        notes.append("The checkpoint has no tokenizer: tokens are shown as their numbers.")
    if model.streamed is not None:
        notes.append("The weights are streamed, so the twin's text was not generated.")
    said = [_said(pair, model, tokenizer) for pair in short]
    return TextRecord(tuple(said), tuple(notes))


def captured_texts(run: RecordedRun) -> list[tuple[list[int], list[int]]]:
    """Return each sequence's prompt and the tokens after it."""
    if "tokens" in run.facts.get("unknown", ()):
        return []
    stated = run.facts.get("sequences")
    if isinstance(stated, list):
        pairs = [_stated(each) for each in stated]
        return [pair for pair in pairs if pair is not None]
    prompts: dict[int, list[int]] = {}
    behind: dict[int, list[int]] = {}
    for step in run.steps:
        side = prompts if step.phase is Phase.PREFILL else behind
        for token, owner in zip(step.tokens, step.sequences, strict=True):
            side.setdefault(owner, []).append(token)
    return [(ids, behind.get(owner, [])) for owner, ids in prompts.items()]


def _stated(raw: Any) -> tuple[list[int], list[int]] | None:
    """Return a capture's own record of one sequence; None without one."""
    if not isinstance(raw, dict):
        return None
    sides = raw.get("prompt"), raw.get("new")
    if not all(isinstance(side, list) and all(type(n) is int for n in side) for side in sides):
        return None
    return list(sides[0] or []), list(sides[1] or [])


def _said(
    pair: tuple[list[int], list[int]], model: OpenModel, tokenizer: Tokenizer | None
) -> PromptTexts:
    prompt, new = pair
    voices = [("Candidate", pieces(new, tokenizer))]
    if model.streamed is None and prompt and new:
        continuation = Continuation(list(prompt))
        limits = Limits(min(len(new), NEW_TOKENS))
        try:
            Generation(model.logits_model, None, None, limits).run([continuation])
            voices.insert(0, ("Twin", pieces(continuation.ids, tokenizer)))
        except (DegarbleError, RuntimeError, ValueError, IndexError):
            pass  # ids that the model cannot take: the candidate's words stand alone
    return PromptTexts("".join(pieces(prompt, tokenizer)), tuple(voices))


def pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Return a piece of text for each token; its number if there is no tokenizer."""
    if tokenizer is None:
        return tuple(f"{number} " for number in ids)
    growing = IncrementalDecoder(tokenizer)
    try:
        found = [growing.add(number) for number in ids]
        rest = growing.rest()
    except (OverflowError, ValueError, TypeError):
        return tuple(f"{number} " for number in ids)
    return (*found[:-1], found[-1] + rest) if found else ()


# --------------------------------------------------------------------------------------------------
# The twin's checkpoint is the one that the capture names, identified by its fingerprint and never
# by its path alone; its weights come from disk, since what a patched candidate held is the suspect.
# The order is: localise, diagnose every origin, compute how much of the final difference each
# explains, write a minimal reproducer. A reference whose content does not match its manifest is
# refused, because its damage would be attributed to the run.

SEARCHED = 8  # origins whose cause is searched; on the others only the causes of these are tried
DIAGNOSED = 64  # origins whose cause is looked for in either way
_BLOCK = re.compile(r"^(layers|mtp)\.\d+\.")
ATTRIBUTED = 6  # origins whose share of the final difference is measured
NO_REFERENCE = "none, so quality was not judged"
UNNAMED = "No known fault explains this"


@dataclass(frozen=True)
class CheckSettings:
    """The options of a check."""

    capture: Path
    reference: Path | None  # quality is not judged without one
    checkpoint: Path | None = None
    held_values: int = HELD_VALUES
    device: str = CPU  # where twin and reference are computed
    sharing: int = 1  # processes that compute on this device
    partial: bool = False  # judge what there is of a capture whose run was killed
    conventions: Mapping[str, Any] = field(default_factory=dict)  # go before the capture's own
    screen: bool = False  # look at sampled rows first


@dataclass(frozen=True, eq=False)
class DiagnosedOrigin:
    """One origin: the discrepancy, its diagnosis, and the command that reproduces it alone.

    `share` is how much of the difference of the final logits it explains.
    """

    discrepancy: Discrepancy
    diagnosed: Diagnosed | None = None
    share: float | None = None
    reproducer: str = ""
    stretch: tuple[str, ...] = ()  # components that are judged as one here
    dump_next: tuple[str, ...] = ()  # components whose results would place it closer

    @property
    def level(self) -> AnswerLevel:
        """Return how much is known of the cause."""
        if self.diagnosed is not None and self.diagnosed.named:
            return AnswerLevel.NAMED
        return AnswerLevel.PLACED if self._described is None else AnswerLevel.DESCRIBED

    @property
    def _described(self) -> Described | None:
        return None if self.diagnosed is None else self.diagnosed.described

    @property
    def cause(self) -> str:
        """Return the cause as text: of the fault, or of what the component computed with."""
        if self.diagnosed is None or not self.diagnosed.named:
            return UNNAMED if self._described is None else self._described.sentence.rstrip(".")
        return " and ".join(fault.title for fault in self.diagnosed.named[0].faults)

    @property
    def remedy(self) -> str:
        """Return what to do about it."""
        if self.diagnosed is not None and self.diagnosed.named:
            return " ".join(fault.remedy for fault in self.diagnosed.named[0].faults)
        told = [] if self._described is None else [self._described.remedy]
        if self.stretch:
            told.append(
                f"It is one of {len(self.stretch)} components, recorded at their ends alone. To"
                f" place it closer, dump {', '.join(self.dump_next)}."
            )
        if not told:
            told = ["Look at this component first: what it was given is right."]
            told += [self.diagnosed.wanted] if self.diagnosed and self.diagnosed.wanted else []
        return " ".join(told)


@dataclass(frozen=True, eq=False)
class CheckResult:
    """The result of a check."""

    name: str
    capture: Capture
    recipe: Recipe
    localised: Localised
    origins: tuple[DiagnosedOrigin, ...]
    shares: Shares | None = None
    notes: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    coverage: Coverage | None = None  # of a run that recorded few tensors

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the whole run."""
        return self.localised.verdict


class CheckRun:
    """A check with its models open: enter it as a context, then read the result."""

    def __init__(self, settings: CheckSettings, *, verify: bool = True) -> None:
        self.settings = settings
        self._verifying = verify  # the reference, against its manifest
        self._hashes: ReferenceHashes | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._bind()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _bind(self) -> None:
        wanted = self.settings
        require_device("--device", wanted.device)
        self.capture = Capture.open(wanted.capture)
        if not wanted.partial:
            self.capture.require_complete()
        _require_tensors(self.capture)
        self.source = source_of(self.capture, wanted.checkpoint)
        stated = self.capture.facts.get("arithmetic")
        arithmetic = stated if stated in ARITHMETICS else None
        conventions = conventions_in(self.capture.facts) | dict(wanted.conventions)
        model = open_model(
            self.source, arithmetic, held_values=wanted.held_values, switches=conventions
        )
        self.model: OpenModel = self._open.enter_context(model)
        require_captured(self.capture, self.model, self.source)
        self.twin: BoundModel = as_recorded(self.model.logits_model.bound, self.capture)
        config, recipe = self.twin.config, self.model.recipe
        require_usable_inputs(self.capture, components(config, recipe), config.vocab_size)
        recent = RecentTensors(wanted.device, wanted.sharing)
        run_on_device(self.twin, wanted.device, recent)
        plain = self.model.arithmetic != "twin"
        self.recipe = recipe_named("bf16", self.model.config) if plain else self.model.recipe
        self._reference_model = self.model
        own = wanted.reference or self.source
        same = own.resolve() == self.source.resolve()
        if plain and same:
            self.reference = self.twin
            self._verify(self.model)
            return
        held_values = wanted.held_values
        reference = open_model(self.model if same else own, "bf16", held_values=held_values)
        self._open.enter_context(reference)
        self._reference_model = reference
        require_same_model(self.model.config, reference.config, own)
        self._verify(reference)
        self.reference = as_recorded(reference.logits_model.bound, self.capture)
        run_on_device(self.reference, wanted.device, recent)

    def _verify(self, reference: OpenModel) -> None:
        """Begin to compare the reference with its manifest, which goes on while a run is judged."""
        if self._verifying and self.settings.reference is not None:
            threads = max(usable_workers(), usable_cores() // _HASHING)
            hashes = ReferenceHashes(reference.checkpoint, threads)
            self._hashes = self._open.enter_context(hashes)

    def require_verified(self) -> bool:
        """Wait until the reference is verified; raise if it does not match its manifest."""
        return self._hashes is not None and self._hashes.require()

    def is_verified(self) -> bool:
        """Whether nothing is left to verify; raise if the reference is known to differ."""
        finished = self._hashes is None or self._hashes.finished
        if finished:
            self.require_verified()
        return finished

    @property
    def reference_fingerprint(self) -> str:
        """Return the fingerprint of the reference."""
        return fingerprint(self._reference_model.checkpoint)

    def files(self) -> list[list[object]]:
        """Return sizes and times of all files that are read, because a fingerprint samples them."""
        checkpoints = self.model.checkpoint, self._reference_model.checkpoint
        paths = [shard.file for each in checkpoints for shard in each.shards]
        paths += [part.path for part in self.capture.parts]
        states = [(path.name, path.stat()) for path in dict.fromkeys(paths)]
        return [[name, state.st_size, state.st_mtime_ns] for name, state in states]

    def weight_bytes(self) -> int:
        """Return how many bytes the shards of the checkpoint have."""
        return sum(shard.file_size for shard in self.model.checkpoint.shards)

    def place_on_disk(self, task: JudgingTask) -> tuple[str, int]:
        """Return where the first weight of some components lies: its file, and where it begins."""
        weights = (name for each in task.names for name in self._weights.get(each, ()))
        known = (self._places[name] for name in weights if name in self._places)
        return min(known, default=("", 0))

    @cached_property
    def _weights(self) -> dict[str, tuple[str, ...]]:
        return {each.name: each.weights for each in components(self.twin.config, self.recipe)}

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        """Where each parameter lies on the disk."""
        checkpoint = self.model.checkpoint
        found: dict[str, tuple[str, int]] = {}
        if checkpoint.names is not None:
            for name in checkpoint.names.present:
                parts = checkpoint.stored(name).form.parts.values()
                found[name] = min((part.file.name, part.begin) for part in parts)
            return found
        for entry in checkpoint.entries.values():
            name = self.model.stored.get(entry.name.rpartition(".")[0], entry.name)
            place = (entry.file.name, entry.begin)
            found[name] = min(found.get(name, place), place)
        return found

    def judge(
        self,
        look: Looked | None = None,
        report: Callable[[str], None] = lambda _step: None,
        cases: Path | None = None,
        elsewhere: JudgedElsewhere | None = None,
    ) -> CheckResult:
        """Localise, diagnose, attribute; reproducers are written into the folder `cases`."""
        with refusing_failures("--device", self.settings.device):
            return self._judged(look, report, cases, elsewhere)

    def _judged(
        self,
        look: Looked | None,
        report: Callable[[str], None],
        cases: Path | None,
        elsewhere: JudgedElsewhere | None,
    ) -> CheckResult:
        def reporting(step: str) -> None:
            self.is_verified()
            report(step)

        during = During(reporting, look, elsewhere, screen=self.settings.screen)
        try:
            found = localise(self.twin, self.recipe, self.capture, self.reference, during)
        except DegarbleError:
            self.require_verified()  # a reference that is damaged may be why
            raise
        self.require_verified()
        if found.twin is not None:
            self.twin = found.twin  # by the conventions that were learned
        notes = _notes_of(self.capture, found)
        if len(found.origins) > DIAGNOSED:
            notes.append(
                f"Causes were looked for in the first {DIAGNOSED} of {len(found.origins)} origins."
            )
        coverage = Coverage.from_facts(self.capture.facts)
        origins = [_in_stretch(each, coverage) for each in _all_diagnosed(found)]
        shares = None
        run, first = found.run or self.capture, found.origins[:ATTRIBUTED]
        if origins and self.model.streamed is not None:
            notes.append("Shares of the final difference need all weights in memory; left out.")
        elif origins and not any(
            recorded_throughout(run, each.context.component.name) for each in first
        ):
            notes.append(
                "Shares of the final difference need all steps and rows of an origin; left out."
            )
        elif origins:
            shares = shares_of(self.twin, run, first)
            origins = [
                replace(origin, share=None if shares is None else shares.share_of(number))
                for number, origin in enumerate(origins)
            ]
        if cases is not None:
            origins = [_with_case(origin, cases, n) for n, origin in enumerate(origins)]
        return CheckResult(
            self.source.resolve().name,
            self.capture,
            self.recipe,
            found,
            tuple(origins),
            shares,
            tuple(notes),
            self._facts(found),
            coverage,
        )

    def _facts(self, found: Localised) -> dict[str, str]:
        facts, named = self.capture.facts, self.settings.reference
        fields = {"backend": facts.get("backend"), "arithmetic": self.model.arithmetic}
        fields |= {
            "reference": NO_REFERENCE if named is None else named.resolve().name,
            "capture": self.capture.hash,
        }
        checkpoint = self.model.checkpoint
        fields |= {"fingerprint": fingerprint(checkpoint), MANIFEST: identity_of(checkpoint)}
        fields |= {"the reference's hashes": "verified" if self.require_verified() else None}
        fields |= {
            "conventions": "; ".join(convention.sentence for convention in found.conventions)
        }
        coverage = Coverage.from_facts(facts)
        fields["recorded coarsely"] = "; ".join(coverage.lines()) if coverage else None
        fields |= _computed(facts, self.settings.device)
        return {name: str(value) for name, value in fields.items() if value}


def _computed(facts: Mapping[str, Any], device: str) -> dict[str, str]:
    """Return which backend computed what, unless it was all torch on the CPU."""
    told = {}
    taken, fallen = (facts.get(name) for name in ("by_backend", "fell_to_torch"))
    if isinstance(taken, list) and isinstance(fallen, list):
        told["computed by the backend"] = _by_role(taken)
        told["fell to torch"] = _by_role(fallen)
    if facts.get("fraction_bits"):
        cut = facts["fraction_bits"]
        told["FP8 sums cut by the tensor core"] = _by_role(list(cut))
    if facts.get("device"):
        told["device of the candidate"] = str(facts["device"])
    kind = device.partition(":")[0]
    return told if kind == CPU else told | {"device of the twin": kind}


def _by_role(components: Sequence[object]) -> str:
    roles = dict.fromkeys(_BLOCK.sub("", str(component)) for component in components)
    return f"{len(components)}: {', '.join(roles)}" if components else "none"


def as_recorded(bound: BoundModel, capture: Capture) -> BoundModel:
    """Return the model of a run that may have recorded few tensors."""
    recorded = capture.facts.get("recorded")
    return bound.coarsened(recorded) if isinstance(recorded, list) and recorded else bound


_MOSTLY = 4  # components with weights, of which more than half differ


def left_out_of(capture: Capture) -> str:
    """Say which part of a run was captured, and so judged; empty where it is all."""
    stated = capture.facts.get("budget")
    if not stated:
        chosen = capture.facts.get("filters") or {}
        words = {"layers": "", "components": "", "tokens": "tokens "}
        parts = [word + ", ".join(own) for name, word in words.items() if (own := chosen.get(name))]
        return f"Captured, and so judged, were only {'; '.join(parts)}." if parts else ""
    blocks, tokens = (stated[f"{name}_left_out"] for name in ("layers", "tokens"))
    sides = (("layers", blocks), ("tokens", tokens))
    parts = [f"{word} {', '.join(side)}" for word, side in sides if side]
    if not parts:
        return ""
    kept, whole = (size(stated[name]) for name in ("estimate", "whole"))
    return f"A budget kept {kept} of {whole}. Not captured, so not judged: {'; '.join(parts)}."


def _notes_of(capture: Capture, found: Localised) -> list[str]:
    notes = [left_out_of(capture)] if left_out_of(capture) else []
    if not capture.complete:
        notes.append("The capture is incomplete: its run ended before its time.")
    left_out = capture.facts.get("left_out")
    if isinstance(left_out, list) and left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        notes.append(f"Not recorded with all tensors in every step: {left_out[0]}{more}.")
    wrong = {origin.component for origin in found.origins}
    weighed = [row.component.name for row in found.rows if row.component.weights]
    if capture.facts.get("recorded") and sum(name in wrong for name in weighed) > max(
        _MOSTLY, len(weighed) // 2
    ):
        notes.append(
            "Most components differ: is this the checkpoint that the engine loaded? A dump does"
            " not state it."
        )
    return notes


def _in_stretch(origin: DiagnosedOrigin, coverage: Coverage | None) -> DiagnosedOrigin:
    """Add what would place an origin closer, where several components are judged as one."""
    name = origin.discrepancy.component
    if coverage is None or name not in coverage.wide:
        return origin
    return replace(origin, stretch=coverage.wide[name], dump_next=coverage.dump_next[name])


def _all_diagnosed(found: Localised) -> list[DiagnosedOrigin]:
    if not found.origins:
        return []
    # All families of faults; a healthy run does without them.
    from degarble.harness.engine.diagnose.representatives import Representatives  # noqa: PLC0415

    known = Representatives(SEARCHED)
    return [
        DiagnosedOrigin(
            discrepancy, _diagnosed(discrepancy, found, known) if number < DIAGNOSED else None
        )
        for number, discrepancy in enumerate(found.origins)
    ]


def _diagnosed(
    discrepancy: Discrepancy, found: Localised, known: Representatives
) -> Diagnosed | None:
    if discrepancy.record is None:
        return None
    from degarble.harness.engine.diagnose.diagnose import Diagnosed  # noqa: PLC0415

    for convention in found.conventions:
        if (
            convention.source == CONTRADICTED
            and discrepancy.context.role in REGISTRY[convention.name].roles
        ):
            return Diagnosed((), (), 0, f"{convention.sentence}. Declare that, or mend the kernel.")
    return known.diagnose(discrepancy)


def _with_case(origin: DiagnosedOrigin, folder: Path, number: int) -> DiagnosedOrigin:
    """Write the minimal reproducer of an origin."""
    told = origin.diagnosed
    variant = told.named[0].variant if told is not None and told.named else None
    described = told.described.variant if told is not None and told.described else None
    case = shrunk(origin.discrepancy, variant, described) if number < SEARCHED else None
    if case is None:
        return origin
    script = case.write(
        folder / f"{number + 1}-{origin.discrepancy.site.component.replace('.', '-')}"
    )
    return replace(origin, reproducer=str(script))


def source_of(capture: Capture, checkpoint: Path | None) -> Path:
    """Return the folder of the quantised checkpoint: the one requested, else the capture's own."""
    if checkpoint is not None:
        return checkpoint
    stated = _source(capture).get("path")
    if not isinstance(stated, str):
        raise InvalidArgument(
            "--checkpoint", None, "the checkpoint of the twin: the capture names none",
            "Pass --checkpoint CKPT.",
        )  # fmt: skip
    path = Path(stated)
    if not path.exists():
        raise UnreadableFile(
            "checkpoint of the capture", path.name, "the folder that was captured",
            "It has been moved: pass --checkpoint CKPT with the place where it is now.",
        )  # fmt: skip
    return path


def _source(capture: Capture) -> dict[str, Any]:
    found = capture.facts.get("source")
    return found if isinstance(found, dict) else {}


def require_captured(capture: Capture, model: OpenModel, path: Path) -> None:
    """Raise if the checkpoint is not the capture's, because then every weight could differ."""
    stated = _source(capture).get("fingerprint")
    found = fingerprint(model.checkpoint)
    if isinstance(stated, str) and stated != found:
        raise InvalidArgument(
            f"fingerprint of {path.name}", found[:16], f"{stated[:16]}, that of the capture",
            "Check against the checkpoint that was captured, or capture this one.",
        )  # fmt: skip
    config = capture.facts.get("config")
    if isinstance(config, dict):
        mine = config_to_dict(model.config)
        for name, value in config.items():
            if name in mine and mine[name] != value:
                raise InvalidArgument(
                    f"{name} of {path.name}", mine[name], f"{value}, that of the capture",
                    "Check against the checkpoint that was captured.",
                )  # fmt: skip


_CACHED_BY = (".k_scale", ".v_scale")
_SHAPES = ("hidden_size", "num_hidden_layers", "vocab_size", "n_routed_experts", "q_lora_rank")


def require_same_model(config: Config, other: Config, path: Path) -> None:
    """Raise if the reference is of another model."""
    if any(family_of(each).known_by_parameters for each in (config, other)):
        _require_same_parameters(config, other, path)
        return
    if config.family != other.family:
        raise InvalidArgument(
            f"family of {path.name}", other.family, config.family, "Pass the BF16 source."
        )
    for name in _SHAPES:
        mine, theirs = (getattr(each, name, None) for each in (config, other))
        if mine != theirs:
            raise InvalidArgument(
                f"{name} of {path.name}", theirs, f"{mine}, that of the captured model",
                "Pass the BF16 (or official) checkpoint that was quantised.",
            )  # fmt: skip


def _require_same_parameters(config: Config, other: Config, path: Path) -> None:
    """Raise if a reference that transformers describes has other parameters."""
    sides = [
        # A reference caches its rows as they are.
        {each.name: each.shape for each in parameters(side) if not each.name.endswith(_CACHED_BY)}
        for side in (config, other)
    ]
    known, found = sides
    for name in [*known, *found]:
        if known.get(name) != found.get(name):
            raise InvalidArgument(
                f"{name} of {path.name}", found.get(name, "missing"),
                f"{known.get(name, 'no such parameter')}, as in the captured model",
                "Pass the BF16 checkpoint that was quantised.",
            )  # fmt: skip


def _require_tensors(capture: Capture) -> None:
    kept = [tensor for call in capture.calls for _, tensor in call.sites()]
    if not kept:
        raise InvalidArgument(
            "calls of the capture", 0, "one call at least", "Capture the run again."
        )
    if not any(tensor.at for tensor in kept):
        raise InvalidArgument(
            "tensors of the capture", "statistics only", "the bytes of inputs and outputs",
            "Capture again without --statistics-only.",
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Rerun the prompts of a capture on other kernels, for `degarble check --backend`.
#
# The new run uses the capture's token ids, number of new tokens, filters and checkpoint. It is
# captured into a temporary folder; `degarble capture --backend` writes one that stays. The old
# capture's tensors are not read, so one with statistics only is sufficient. Captures that lack the
# beginning of a prompt are refused.


@contextmanager
def run_again(
    wanted: CheckSettings, backend: AskedBackend, watch: Watch, report: Callable[..., None]
) -> Iterator[CheckSettings]:
    """Run the prompts of `wanted.capture` on a backend; yield the options to check that run."""
    require_device("--device", wanted.device)
    require_backend(backend.name)
    seen = Capture.open(wanted.capture)
    if not wanted.partial:
        seen.require_complete()
    source = source_of(seen, wanted.checkpoint)
    prompts, new_tokens = prompts_of(seen)
    with open_model(source, held_values=wanted.held_values) as model:
        require_captured(seen, model, source)
    capture_settings = CaptureSettings(
        filter_of(seen),
        new_tokens,
        held_values=wanted.held_values,
        backend=backend.name,
        strict=backend.strict,
        settings=backend.settings,
        device=wanted.device,
        conventions=wanted.conventions,
    )
    with TemporaryDirectory(prefix="degarble-check-") as made:
        folder = Path(made) / "capture"
        with refusing_failures("--device", wanted.device):
            done = capture(source, list(prompts), folder, watch, capture_settings)
        report(*done.paired.lines())
        yield replace(wanted, capture=folder, checkpoint=source)


def prompts_of(seen: Capture) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return the token ids of every prompt, and the number of new tokens in the longest answer."""
    begun = {
        owner
        for step in seen.steps
        for owner, position in zip(step.sequences, step.positions, strict=True)
        if position == 0
    }
    owners = {owner for step in seen.steps for owner in step.sequences}
    prompts = tuple(tuple(ids) for ids, _ in captured_texts(seen))
    if not prompts or not all(prompts) or owners - begun:
        raise InvalidArgument(
            "prompts of the capture", sorted(owners - begun)[:5] or "none",
            "sequences whose first token was captured", "Capture a run from its beginning.",
        )  # fmt: skip
    decoded = [step.sequences for step in seen.steps if step.phase is Phase.DECODE]
    most = max((sum(owner in step for step in decoded) for owner in owners), default=0)
    return prompts, most + 1


def filter_of(seen: Capture) -> Filter:
    """Return the filter that a capture was made with."""
    stated = seen.facts.get("filters")
    if not isinstance(stated, dict):
        return Filter()
    words = [stated.get(name) for name in ("layers", "components", "tokens", "pieces")]
    lists = [word if isinstance(word, list) else [] for word in words]
    return Filter.from_options(*(",".join(map(str, each)) if each else None for each in lists))
