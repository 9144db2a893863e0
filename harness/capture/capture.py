"""Run `degarble capture`: record inputs and outputs of every component of a reference model.

Prompts are followed by new tokens, one by one and greedily, so that prefill and decode are both
recorded. Logits are those of each sequence's last token, as in generation. With a backend or a
patch, other code runs for some components; the manifest records which.
"""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.pairings import Paired
from degarble.harness.backends.patching import apply_patch
from degarble.harness.backends.registry import (
    TORCH,
    AskedBackend,
    require_backend,
    use_backend,
)
from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnwritablePath
from degarble.harness.base.version import VERSION
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.text import capture_document, capture_lines
from degarble.harness.capture.files.types import Phase
from degarble.harness.capture.files.writer import MEMORY_BYTES, CaptureWriter, require_free
from degarble.harness.capture.filter import Wanted
from degarble.harness.capture.foreign import foreign_code
from degarble.harness.capture.recorder import Recorder
from degarble.harness.capture.size import captured_bytes, steps_of
from degarble.harness.chat.tokenizer import Tokenizer
from degarble.harness.checkpoint.view.view import fingerprint
from degarble.harness.checkpoint.write.manifest import MANIFEST as CHECKPOINT_MANIFEST
from degarble.harness.checkpoint.write.manifest import Manifest
from degarble.harness.engine.budget.tensor_core import HOPPER_FP8_BITS
from degarble.harness.engine.conventions.registry import KEY, stored_conventions
from degarble.harness.generate.generate import Manner, Spoken, Talker
from degarble.harness.inference.devices import CPU, put_on
from degarble.harness.inference.generation import PIECE, Generation, Limits, Speech
from degarble.harness.inference.model import HELD_VALUES, open_model
from degarble.harness.inference.sampling import Sampling
from degarble.harness.inference.speaker import Speaker
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.report.files import require_folder
from degarble.harness.report.progress import size
from degarble.kernels.runtime.settings import CompileSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.backends.patching import Patched
    from degarble.harness.inference.model import OpenModel
    from degarble.harness.inference.streamed_weights import StreamedWeights
    from degarble.references.binding import Bound
    from degarble.references.state import Sequence

    # Shows how far the first pass is; nothing where the weights are held.
    Watch = Callable[[StreamedWeights | None], AbstractContextManager[Any]]

NEW_TOKENS = 4
_GREEDILY = Sampling(goes_on=True)  # logits that are not finite are what a capture is to show


@dataclass(frozen=True)
class How:
    """Options of one capture."""

    wanted: Wanted = field(default_factory=Wanted)
    new_tokens: int = NEW_TOKENS
    statistics_only: bool = False
    memory_bytes: int = MEMORY_BYTES
    held_values: int = HELD_VALUES
    backend: str = TORCH
    strict: bool = False  # refuses a mixture of the backend's components and torch's
    settings: CompileSettings = field(default_factory=CompileSettings)  # of our own kernels
    patch: Path | None = None  # a Python file: it is executed
    device: str = CPU
    share: Callable[[OpenModel], Bound] | None = None  # of one rank of several
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
        return found + ([f"--patch {self.patch.name}"] if self.patch is not None else [])


@dataclass(frozen=True)
class Captured:
    """Summary of a written capture."""

    folder: Path
    capture: Capture
    spoken: Spoken
    paired: Paired = field(default_factory=Paired)
    patched: Patched | None = None

    def lines(self) -> list[str]:
        """Summarise the capture in a few lines."""
        changed = [] if self.patched is None else self.patched.lines()
        told = [*capture_lines(self.capture), *self.paired.lines(), *changed]
        return [*told, f"Wrote {self.folder}"]

    def document(self) -> dict[str, Any]:
        """Return the summary as a JSON document."""
        made: dict[str, Any] = {"verdict": None, "origins": [], "cosines": []}
        made["capture"] = str(self.folder)
        made["backend"] = self.paired.document()
        made["patch"] = None if self.patched is None else self.patched.document()
        return made | capture_document(self.capture)


class SteppingSpeaker(Speaker):
    """A speaker that tells a recorder of every forward pass."""

    def __init__(self, bound: Bound, recorder: Recorder) -> None:
        super().__init__(bound)
        self._recorder = recorder
        self._numbers: dict[int, int] = {}
        self._alive: list[Sequence] = []  # so that no two sequences have one id

    def hidden(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
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

    def _number(self, sequence: Sequence) -> int:
        if id(sequence) not in self._numbers:
            self._alive.append(sequence)
        return self._numbers.setdefault(id(sequence), len(self._numbers))


def capture(
    source: Path,
    prompts: list[Any],
    folder: Path,
    watch: Watch,
    how: How | None = None,
    told: Callable[[int], None] = lambda _nbytes: None,
) -> Captured:
    """Run prompts through a checkpoint's reference, and write what its components saw.

    A prompt is a text, a conversation (a list), or the token ids of another run (a tuple).
    `told` hears the estimate of bytes before anything is written.
    """
    how = how or How()
    require_backend(how.backend)
    require_free(folder)
    require_folder("--out", folder)
    conventions = {**how.asked.conventions, **how.conventions}
    with open_model(source, held_values=how.held_values, switches=conventions) as model:
        if how.share is not None:
            model.speaker = Speaker(how.share(model))
        bound = model.speaker.bound
        how.wanted.require_choosing(bound.calls)
        paired, patched = _changed(model, how)
        talker = _talker(model, prompts, how)
        estimate = _estimate(talker, prompts, how)
        _require_room(folder, estimate)
        told(estimate)
        facts = facts_of(source, model, how) | _facts_of_change(paired, patched, conventions)
        with (
            foreign_code(folder, how.foreign),
            CaptureWriter(folder, facts, how.memory_bytes) as writer,
            watch(model.streamed),
        ):
            recorder = Recorder(writer, how.wanted, statistics_only=how.statistics_only)
            recorder.wrap(bound)
            model.speaker = SteppingSpeaker(bound, recorder)
            spoken = talker.speak(prompts)
            writer.finish(
                sequences=[_sequence(each) for each in spoken.speeches],
                **_facts_of_kernels(paired),
            )
    return Captured(folder, Capture.open(folder), spoken, paired, patched)


class _Repeater:
    """Continues prompts that another run recorded as token ids; words are told where they are."""

    def __init__(self, model: OpenModel, how: How) -> None:
        self.model = model
        self._limits = Limits(how.new_tokens)
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

    def speak(self, prompts: list[Any]) -> Spoken:
        """Continue every prompt, greedily."""
        speeches = [Speech(list(each)) for each in prompts]
        generation = Generation(self.model.speaker, self.tokenizer, _GREEDILY, self._limits)
        generation.run(speeches)
        return Spoken(tuple(prompts), tuple(speeches), generation.pace, None)


def _talker(model: OpenModel, prompts: list[Any], how: How) -> Talker | _Repeater:
    if any(isinstance(prompt, tuple) for prompt in prompts):
        return _Repeater(model, how)
    chat = any(isinstance(prompt, list) for prompt in prompts)
    return Talker(model, Manner(_GREEDILY, Limits(how.new_tokens), chat=chat))


def _changed(model: OpenModel, how: How) -> tuple[Paired, Patched | None]:
    """Put a backend's kernels in, then let a patch change what it wants."""
    bound = model.speaker.bound
    paired, patched = use_backend(bound, how.asked, model.recipe), None
    if how.patch is not None:
        names = model.checkpoint.names
        assert names is not None, "an open model has all of its parameters"
        patched = apply_patch(how.patch, bound, model.checkpoint.weights, names)
    put_on(bound, how.device)
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
    return {"kernels": table.document(), "fraction_bits": dict.fromkeys(cut, HOPPER_FP8_BITS)}


def _estimate(talker: Talker | _Repeater, prompts: list[Any], how: How) -> int:
    """Bytes of tensors; prompts that generating refuses are refused there."""
    lengths = [len(talker.ids_of(prompt)) for prompt in prompts]
    last = max(lengths, default=0) + how.new_tokens - 2  # the last new token is never fed
    if all(lengths) and how.wanted.rows(range(last + 1)) == ():
        raise InvalidArgument(
            "--tokens", "no position of this run", f"some of 0 to {last}",
            "Choose positions that the prompts or their new tokens have.",
        )  # fmt: skip
    if how.statistics_only or not all(lengths):
        return 0
    steps = steps_of(lengths, how.new_tokens, PIECE)
    return captured_bytes(talker.model.speaker.bound, steps, how.wanted)


def _require_room(folder: Path, estimate: int) -> None:
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if estimate > free:
        raise UnwritablePath(
            "--out", f"{folder}: {size(free)} free", f"room for about {size(estimate)}",
            "Make room, or capture less: --layers, --components, --tokens, --statistics-only.",
        )  # fmt: skip


def facts_of(source: Path, model: OpenModel, how: How) -> dict[str, Any]:
    """Return the manifest's facts about the run."""
    checkpoint = model.checkpoint
    stated = (checkpoint.root / CHECKPOINT_MANIFEST).exists()
    return {
        "source": {
            "name": source.name,
            "path": str(source.resolve()),
            "fingerprint": fingerprint(checkpoint),
            "content": Manifest.read(checkpoint.root).content if stated else None,
        },
        "family": model.config.family,
        "config": config_to_dict(model.config),
        "recipe": [
            {"match": rule.match, "weight": rule.weight, "activation": rule.activation}
            for rule in model.recipe.rules
        ],
        "arithmetic": model.arithmetic,
        "form": "absorbed",
        "sums": str(model.speaker.bound.numerics.products).removeprefix("torch."),
        "filters": how.wanted.document(),
        "statistics_only": how.statistics_only,
        **({} if how.device == CPU else {"device": how.device}),
        "new_tokens": how.new_tokens,
        "versions": {
            "degarble": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
    }


def _sequence(speech: Any) -> dict[str, Any]:
    told = {"prompt": speech.prompt, "new": speech.ids, "text": speech.text}
    return told | {"finish": speech.finish}
