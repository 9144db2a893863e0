"""Run `degarble capture`: record inputs and outputs of every component of a reference model.

The size is estimated before anything is written, and a run that fails leaves no half of a capture.
"""

from __future__ import annotations

import platform
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.pairings import Paired
from degarble.harness.backends.patching import apply_patch
from degarble.harness.backends.registry import (
    TORCH,
    TRANSFORMERS,
    AskedBackend,
    require_backend,
    use_backend,
)
from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnwritablePath
from degarble.harness.base.version import VERSION
from degarble.harness.capture.captured_size import (
    BudgetChoice,
    captured_bytes,
    choose_within,
    steps_of,
)
from degarble.harness.capture.files.reader import Capture, capture_document, capture_lines
from degarble.harness.capture.files.records import MANIFEST, Phase
from degarble.harness.capture.files.writer import MEMORY_BYTES, CaptureWriter, require_free
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.capture.recorder import Recorder
from degarble.harness.capture.transformers_model import (
    BF16,
    require_traced,
    run_by_transformers,
)
from degarble.harness.chat.tokenizer import Tokenizer
from degarble.harness.checkpoint.view.content import source_facts
from degarble.harness.engine.conventions.registry import KEY, stored_conventions
from degarble.harness.generate.generate import GenerationOptions, GenerationResult, TextGenerator
from degarble.harness.inference.devices import CPU, run_on_device
from degarble.harness.inference.generation import (
    PREFILL_TOKENS,
    Continuation,
    Generation,
    Limits,
    Sampling,
)
from degarble.harness.inference.model import HELD_VALUES, LogitsModel, open_model
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.report.files import require_folder
from degarble.harness.report.progress import size
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.references.tensor_core import WGMMA_FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.backends.patching import Patched
    from degarble.harness.inference.model import OpenModel
    from degarble.harness.inference.weights import StreamedWeights
    from degarble.references.binding import BoundModel
    from degarble.references.model import Sequence as SequenceState


# --------------------------------------------------------------------------------------------------
# Convert errors of a captured run to our own, and leave no half-written capture.
#
# A checkpoint may be rejected at its last weight, after parts were written. A foreign kernel or
# patch may return tensors that the next component cannot take, so torch raises anything; that
# becomes an error of ours. Without foreign code such an exception is our bug and passes through.


@contextmanager
def foreign_code(folder: Path, whose: Sequence[str]) -> Iterator[None]:
    """Run a capture, with foreign code by its options; what a refusal leaves is removed.

    Where the disk takes no more, the parts stay: they are whole, and the run cannot be repeated.
    """
    there = folder.exists()
    try:
        yield
    except UnwritablePath:
        if whose:
            _remove(folder, keep=there)
        raise
    except DegarbleError:
        _remove(folder, keep=there)
        raise
    except Exception as error:
        if not whose:
            raise
        _remove(folder, keep=there)
        raise InvalidArgument(
            " and ".join(whose), f"{type(error).__name__}: {error}",
            "outputs and weights that the next components can take",
            "Look at shapes and dtypes of what was replaced.",
        ) from error  # fmt: skip


def _remove(folder: Path, *, keep: bool) -> None:
    """Take the parts of a refused capture away; a folder that was there before stays."""
    for file in (*folder.glob("part-*.safetensors*"), folder / MANIFEST):
        with suppress(OSError):
            file.unlink()
    if not keep:
        with suppress(OSError):
            folder.rmdir()


# --------------------------------------------------------------------------------------------------
# Run `degarble capture`: record inputs and outputs of every component of a reference model.
#
# Prompts are followed by new tokens, one by one and greedily, so that prefill and decode are both
# recorded. Logits are those of each sequence's last token, as in generation. With a backend or a
# patch, other code runs for some components; the manifest records which.

if TYPE_CHECKING:
    # Shows how far the first pass is; nothing where the weights are held.
    Watch = Callable[[StreamedWeights | None], AbstractContextManager[Any]]

NEW_TOKENS = 4
_GREEDILY = Sampling(goes_on=True)  # logits that are not finite are what a capture is to show


@dataclass(frozen=True)
class CaptureSettings:
    """Options of one capture."""

    wanted: CaptureFilter = field(default_factory=CaptureFilter)
    new_tokens: int = NEW_TOKENS
    budget: int | None = None  # bytes of tensors, within which layers and steps are chosen
    statistics_only: bool = False
    memory_bytes: int = MEMORY_BYTES
    held_values: int = HELD_VALUES
    backend: str = TORCH
    strict: bool = False  # refuses a mixture of the backend's components and torch's
    settings: CompileSettings = field(default_factory=CompileSettings)  # of our own kernels
    patch: Path | None = None  # a Python file: it is executed
    plant: Callable[[OpenModel], Patched] | None = None  # puts a fault of the catalogue in
    device: str = CPU
    graph_bytes: int = 0  # of buffers that CUDA graphs of decoding write; 0: no graphs
    share: Callable[[OpenModel], BoundModel] | None = None  # of one rank of several
    # Beside those of the backend: what a patch's kernels follow.
    conventions: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def asked(self) -> AskedBackend:
        """What is asked of the backend."""
        return AskedBackend(self.backend, self.strict, self.settings)

    @property
    def foreign(self) -> list[str]:
        """The options that bring code which is not ours."""
        found = [f"--backend {self.backend}"] if self.backend != TORCH else []
        found += ["--fault"] if self.plant is not None else []
        return found + ([f"--patch {self.patch.name}"] if self.patch is not None else [])


@dataclass(frozen=True)
class CaptureSummary:
    """Summary of a written capture."""

    folder: Path
    capture: Capture
    spoken: GenerationResult
    paired: Paired = field(default_factory=Paired)
    patched: Patched | None = None

    def lines(self) -> list[str]:
        """Summarise the capture in a few lines."""
        changed = [] if self.patched is None else self.patched.lines()
        lines = [*capture_lines(self.capture), *self.paired.lines(), *changed]
        return [*lines, f"Wrote {self.folder}"]

    def document(self) -> dict[str, Any]:
        """Return the summary as a JSON document."""
        made: dict[str, Any] = {"verdict": None, "origins": [], "cosines": []}
        made["capture"] = str(self.folder)
        made["backend"] = self.paired.document()
        made["patch"] = None if self.patched is None else self.patched.document()
        return made | capture_document(self.capture)


class RecordingLogitsModel(LogitsModel):
    """A speaker that tells a recorder of every forward pass."""

    def __init__(self, bound: BoundModel, recorder: Recorder) -> None:
        super().__init__(bound)
        self._recorder = recorder
        self._numbers: dict[int, int] = {}
        self._alive: list[SequenceState] = []  # so that no two sequences have one id

    def hidden(self, sequences: list[SequenceState], tokens: list[Tensor]) -> Tensor:
        """Begin a step, and run it."""
        ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        phase = Phase.DECODE
        for sequence, new in zip(sequences, tokens, strict=True):
            if not sequence.length or len(new) > 1:
                phase = Phase.PREFILL
            ids += new.tolist()
            positions += range(sequence.length, sequence.length + len(new))
            owners += [self._number(sequence)] * len(new)
        self._recorder.begin(phase, ids, positions, owners)
        return super().hidden(sequences, tokens)

    def _number(self, sequence: SequenceState) -> int:
        if id(sequence) not in self._numbers:
            self._alive.append(sequence)
        return self._numbers.setdefault(id(sequence), len(self._numbers))


def capture(
    source: Path,
    prompts: list[Any],
    folder: Path,
    watch: Watch,
    capture_settings: CaptureSettings | None = None,
    report: Callable[[int], None] = lambda _nbytes: None,
) -> CaptureSummary:
    """Run prompts through a checkpoint's reference, and write what its components saw.

    A prompt is a text, a conversation (a list), or the token ids of another run (a tuple).
    `report` hears the estimate of bytes before anything is written.
    """
    capture_settings = capture_settings or CaptureSettings()
    require_backend(capture_settings.backend)
    require_free(folder)
    require_folder("--out", folder)
    conventions = {**capture_settings.asked.conventions, **capture_settings.conventions}
    arithmetic = BF16 if capture_settings.backend == TRANSFORMERS else None
    with open_model(
        source, arithmetic, held_values=capture_settings.held_values, switches=conventions
    ) as model:
        if capture_settings.share is not None:
            model.logits_model = LogitsModel(capture_settings.share(model))
        bound = model.logits_model.bound
        capture_settings.wanted.require_choosing(bound.calls)
        paired, patched = _changed(model, capture_settings)
        generator = _talker(model, prompts, capture_settings)
        choice = _within_budget(generator, prompts, capture_settings)
        if choice is not None:
            capture_settings = replace(capture_settings, wanted=choice.wanted)
        estimate = _estimate(generator, prompts, capture_settings)
        _require_room(folder, estimate)
        report(estimate)
        facts = facts_of(source, model, capture_settings) | _facts_of_change(
            paired, patched, conventions
        )
        if choice is not None:
            facts["budget"] = choice.document()
        with (
            foreign_code(folder, capture_settings.foreign),
            CaptureWriter(folder, facts, capture_settings.memory_bytes) as writer,
            watch(model.streamed),
        ):
            recorder = Recorder(
                writer, capture_settings.wanted, statistics_only=capture_settings.statistics_only
            )
            with _recorded(model, recorder, capture_settings.backend):
                spoken = generator.speak(prompts)
            writer.finish(
                sequences=[_sequence(speech) for speech in spoken.speeches],
                **_facts_of_kernels(paired),
            )
    return CaptureSummary(folder, Capture.open(folder), spoken, paired, patched)


@contextmanager
def _recorded(model: OpenModel, recorder: Recorder, backend: str) -> Iterator[None]:
    """Record what an open model computes: its components, or transformers in their place."""
    if backend == TRANSFORMERS:
        with run_by_transformers(model, recorder):
            yield
        return
    recorder.wrap(model.logits_model.bound)
    model.logits_model = RecordingLogitsModel(model.logits_model.bound, recorder)
    yield


class _Repeater:
    """Continues prompts that another run recorded as token ids; words are told where they are."""

    def __init__(self, model: OpenModel, capture_settings: CaptureSettings) -> None:
        self.model = model
        self._limits = Limits(capture_settings.new_tokens)
        checkpoint = model.checkpoint
        try:
            self.tokenizer: Tokenizer | None = Tokenizer.of_checkpoint(
                checkpoint.root, checkpoint.config, model.config.vocab_size
            )
        except DegarbleError:
            self.tokenizer = None  # a capture of ids needs no words

    def ids_of(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the token ids of a prompt."""
        return list(prompt)

    def speak(self, prompts: list[Any]) -> GenerationResult:
        """Continue every prompt, greedily."""
        continuations = [Continuation(list(prompt)) for prompt in prompts]
        generation = Generation(self.model.logits_model, self.tokenizer, _GREEDILY, self._limits)
        generation.run(continuations)
        return GenerationResult(tuple(prompts), tuple(continuations), generation.pace, None)


def _talker(
    model: OpenModel, prompts: list[Any], capture_settings: CaptureSettings
) -> TextGenerator | _Repeater:
    if any(isinstance(prompt, tuple) for prompt in prompts):
        return _Repeater(model, capture_settings)
    chat = any(isinstance(prompt, list) for prompt in prompts)
    return TextGenerator(
        model, GenerationOptions(_GREEDILY, Limits(capture_settings.new_tokens), chat=chat)
    )


def _changed(model: OpenModel, capture_settings: CaptureSettings) -> tuple[Paired, Patched | None]:
    """Put a backend's kernels in, then let a patch change what it wants."""
    bound = model.logits_model.bound
    if capture_settings.backend == TRANSFORMERS:
        require_traced(bound)
        paired = Paired(TRANSFORMERS, tuple(bound.calls))
    else:
        paired = use_backend(bound, capture_settings.asked, model.recipe)
    patched = None
    if capture_settings.patch is not None:
        patched = apply_patch(capture_settings.patch, bound, model.weights, model.stored)
    elif capture_settings.plant is not None:
        patched = capture_settings.plant(model)
    run_on_device(bound, capture_settings.device)
    return paired, patched


def _facts_of_change(
    paired: Paired, patched: Patched | None, conventions: Mapping[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {"backend": paired.backend}
    if conventions:
        found[KEY] = stored_conventions(conventions)
    if paired.backend != TORCH:
        found |= {"by_backend": list(paired.taken), "fell_to_torch": list(paired.fallen)}
    return found if patched is None else found | {"patch": patched.document()}


def _facts_of_kernels(paired: Paired) -> dict[str, Any]:
    """Which kernels computed what, and whose sums a tensor core cut: known behind the run only."""
    table = paired.table
    if table is None:
        return {}
    cut = table.components_by("sm90_gemm_fp8_block")
    return {
        "kernels": table.document(),
        "fraction_bits": dict.fromkeys(cut, WGMMA_FP8.fraction_bits),
    }


def _within_budget(
    generator: TextGenerator | _Repeater, prompts: list[Any], capture_settings: CaptureSettings
) -> BudgetChoice | None:
    """Choose what a budget keeps; prompts that generating refuses are refused there."""
    lengths = [len(generator.ids_of(prompt)) for prompt in prompts]
    if capture_settings.budget is None or not all(lengths):
        return None
    bound, new_tokens = generator.model.logits_model.bound, capture_settings.new_tokens
    return choose_within(
        bound, lengths, new_tokens, capture_settings.wanted, capture_settings.budget
    )


def _estimate(
    generator: TextGenerator | _Repeater, prompts: list[Any], capture_settings: CaptureSettings
) -> int:
    """Bytes of tensors; prompts that generating refuses are refused there."""
    lengths = [len(generator.ids_of(prompt)) for prompt in prompts]
    last = (
        max(lengths, default=0) + capture_settings.new_tokens - 2
    )  # the last new token is never fed
    if all(lengths) and capture_settings.wanted.rows(range(last + 1)) == ():
        raise InvalidArgument(
            "--tokens", "no position of this run", f"some of 0 to {last}",
            "Choose positions that the prompts or their new tokens have.",
        )  # fmt: skip
    if capture_settings.statistics_only or not all(lengths):
        return 0
    steps = steps_of(lengths, capture_settings.new_tokens, PREFILL_TOKENS)
    return captured_bytes(generator.model.logits_model.bound, steps, capture_settings.wanted)


def _require_room(folder: Path, estimate: int) -> None:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if estimate > free:
        raise UnwritablePath(
            "--out", f"{folder}: {size(free)} free", f"room for about {size(estimate)}",
            "Make room, or capture less: --layers, --components, --tokens, --statistics-only.",
        )  # fmt: skip


def facts_of(source: Path, model: OpenModel, capture_settings: CaptureSettings) -> dict[str, Any]:
    """Return the manifest's facts about the run."""
    checkpoint = model.checkpoint
    return {
        "source": {
            "name": source.name,
            "path": str(source.resolve()),
            **source_facts(checkpoint),
        },
        "family": model.config.family,
        "config": config_to_dict(model.config),
        "recipe": [
            {"match": rule.match, "weight": rule.weight, "activation": rule.activation}
            for rule in model.recipe.rules
        ],
        "arithmetic": model.arithmetic,
        "form": "absorbed",
        "sums": str(model.logits_model.bound.numerics.products).removeprefix("torch."),
        "filters": capture_settings.wanted.document(),
        "statistics_only": capture_settings.statistics_only,
        **({} if capture_settings.device == CPU else {"device": capture_settings.device}),
        "new_tokens": capture_settings.new_tokens,
        "versions": {
            "degarble": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
    }


def _sequence(speech: Any) -> dict[str, Any]:
    fields = {"prompt": speech.prompt, "new": speech.ids, "text": speech.text}
    return fields | {"finish": speech.finish}
