"""Run `degarble capture --amax-only`: record the largest absolute input of every linear and expert.

The prompts run in BF16 arithmetic, where no activation is quantised. V3.2 runs in its naive form,
because the absorbed form has no input for wkv_b. The file format is in docs/calibration.md; the
file is written whole or not at all, and the same command finishes what was interrupted. Experts
that no token reached are recorded with 0 tokens and reported.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, UnwritablePath
from degarble.harness.capture.files.writer import require_no_checkpoint
from degarble.harness.checkpoint.transform.quantise.calibration import FILE, Amax, Calibration
from degarble.harness.checkpoint.view.view import fingerprint
from degarble.harness.checkpoint.write.finished_parts import FinishedParts
from degarble.harness.checkpoint.write.manifest import UNFINISHED
from degarble.harness.generate.generate import GenerationOptions, TextGenerator
from degarble.harness.inference.model import HELD_VALUES, open_model
from degarble.harness.inference.traced import TracedWeights
from degarble.harness.model.components import components
from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind
from degarble.harness.report.files import usable_folder, write_text
from degarble.references.linears import InputQuantiser
from degarble.references.model import Sequence
from degarble.references.traced.family import (
    ComponentParameters,
    TracedFacts,
    computed,
    logical_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.inference.model import OpenModel
    from degarble.harness.inference.weights import StreamedWeights
    from degarble.harness.model.config.config import Config
    from degarble.references.binding import BoundModel

    # Shows how far the first pass is; nothing where the weights are held.
    Watch = Callable[[StreamedWeights | None], AbstractContextManager[Any]]

EXPERTS = "traced.experts"
_LISTED = 8  # linears without a token that are named
_SEEN = "ranges"  # the part that is kept between groups of prompts
STEP = 8192  # tokens that go through the layers together


class InputRanges:
    """An observer: the largest magnitude in front of every linear, and its tokens."""

    def __init__(self, config: Config) -> None:
        self._linear = linear = {
            each.name: each.shape for each in parameters(config) if each.kind is Kind.LINEAR
        }
        self._largest: dict[str, float] = {}
        self._tokens: dict[str, int] = defaultdict(int)
        self._linears: dict[str, tuple[str, ...]] = {}
        self._experts: dict[str, dict[int, list[str]]] = {}
        for component in components(config):
            names = tuple(name for name in component.weights if name in linear)
            if component.kind == EXPERTS:
                continue  # one component for all experts: `watch_experts` looks inside
            if ".experts." in component.name:
                by_number: dict[int, list[str]] = defaultdict(list)
                for name in names:
                    by_number[int(name.split(".experts.")[1].split(".")[0])].append(name)
                self._experts[component.name] = dict(by_number)
            self._linears[component.name] = names

    def __call__(
        self, component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        """Look at the input of a component that reads linears."""
        del outputs
        names = self._linears.get(component, ())
        if not names or "x" not in inputs:
            return
        x_T = inputs["x"].abs().amax(-1).float()
        if not bool(x_T.isfinite().all()):
            raise InvalidArgument(
                f"input of {component}", f"{int((~x_T.isfinite()).sum())} rows not finite",
                "finite activations", "Audit the checkpoint: degarble audit CKPT.",
            )  # fmt: skip
        if component not in self._experts:
            for name in names:
                self._see(name, float(x_T.max()), x_T.shape[0])
            return
        experts_TK = inputs["experts"]
        x_TK = x_T if x_T.ndim == 2 else x_T[:, None].expand(-1, experts_TK.shape[1])
        for number in experts_TK.unique().tolist():
            own = x_TK[experts_TK == number]
            for name in self._experts[component].get(number, ()):
                self._see(name, float(own.max()), len(own))

    def watch_experts(self, bound: BoundModel, weights: TracedWeights) -> None:
        """Look at what each matrix of a traced model's experts is multiplied with."""
        for component in components(bound.config):
            if component.kind != EXPERTS:
                continue
            stacks = [name for name in component.weights if name in self._linear]
            names = {n: weights.by_expert(n, self._linear[n][0]) for n in stacks}
            self._experts[component.name] = {
                number: [module for each in by_matrix for module in each]
                for number, by_matrix in enumerate(zip(*names.values(), strict=True))
            }
            facts: Any = bound.bound_to(component.name)[1]
            known = {each.name: getattr(facts, each.name) for each in fields(facts)}
            watched = _WatchedFacts(**known, seen=partial(self._see_expert, names))
            bound.calls[component.name] = partial(computed, watched)

    def _see_expert(
        self, names: Mapping[str, tuple[tuple[str, ...], ...]], weight: str, expert: int, x: Tensor
    ) -> None:
        largest = float(x.abs().amax())
        for module in names[weight][expert]:
            self._see(module, largest, len(x))

    def _see(self, name: str, amax: float, tokens: int) -> None:
        self._largest[name] = max(self._largest.get(name, 0.0), amax)
        self._tokens[name] += tokens

    def state(self) -> list[list[Any]]:
        """Return what was seen so far, as plain numbers."""
        return [[name, self._largest[name], tokens] for name, tokens in self._tokens.items()]

    def resume(self, state: list[list[Any]]) -> None:
        """Go on from what another run has seen."""
        self._largest = {name: float(amax) for name, amax, _ in state}
        self._tokens = defaultdict(int, {name: int(tokens) for name, _, tokens in state})

    def calibration(self) -> Calibration:
        """Return the records; experts of a layer that ran without a token have 0 tokens."""
        records = {name: Amax(self._largest[name], self._tokens[name]) for name in self._tokens}
        for by_number in self._experts.values():
            names = [name for group in by_number.values() for name in group]
            if any(name in records for name in names):
                records |= {name: Amax(0.0, 0) for name in names if name not in records}
        return Calibration.from_records(records)


@dataclass(frozen=True)
class _WatchedInput(InputQuantiser):
    """Passes on the input of an expert's matrix as it is, and shows it."""

    seen: Callable[[Tensor], None] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the input."""
        if self.seen is not None and len(x):
            self.seen(x)
        return x


@dataclass(frozen=True)
class _WatchedFacts(TracedFacts):
    """Facts of experts whose inputs are looked at."""

    seen: Callable[[str, int, Tensor], None] | None = None

    def parameter(self, weights: Mapping[str, Weight]) -> ComponentParameters:
        """Return the parameters, with an observer in front of each expert's."""
        return _WatchedParameters(self, weights)


class _WatchedParameters(ComponentParameters):
    def quantiser(self, name: str, expert: int | None = None) -> InputQuantiser | None:
        """Return what shows the input of a weight, of one of its experts."""
        facts: Any = self._facts
        if expert is None:
            return None
        seen, store = partial(facts.seen, logical_name(name), expert), facts.numerics.store
        return _WatchedInput("", seen=lambda x: seen(x.to(store)))


@dataclass(frozen=True)
class AmaxSummary:
    """Path and contents of a written amax file."""

    folder: Path
    tokens: int
    calibration: Calibration

    @property
    def unreached(self) -> list[str]:
        """Linears of the experts that no token reached."""
        return sorted(
            name for name, record in self.calibration.records.items() if not record.tokens
        )

    def lines(self) -> list[str]:
        """Summarise the result in a few lines."""
        records = self.calibration.records
        first = f"Wrote {len(records):,} amax records of {self.tokens:,} tokens: {self.folder}"
        if not self.unreached:
            return [first]
        listed = ", ".join(self.unreached[:_LISTED])
        more = ", ..." if len(self.unreached) > _LISTED else ""
        text = f"  {len(self.unreached):,} flagged: no token reached them: {listed}{more}"
        return [first, text, "  Calibrate with more tokens."]

    def document(self) -> dict[str, Any]:
        """Return the result as a JSON document."""
        seen = [record.tokens for n, record in self.calibration.records.items() if ".experts." in n]
        return {
            "verdict": None,
            "origins": [],
            "cosines": [],
            "capture": str(self.folder),
            "tokens": self.tokens,
            "linears": len(self.calibration.records),
            "fewest_tokens_of_an_expert": min(seen, default=None),
            "unreached": self.unreached,
            "fingerprint": self.calibration.fingerprint,
        }


def capture_amax(
    source: Path,
    prompts: list[Any],
    folder: Path,
    watch: Watch,
    held_values: int = HELD_VALUES,
) -> AmaxSummary:
    """Run prompts through a checkpoint's reference, and write the records into `folder`.

    What was seen is kept there after each group of prompts, and the same call goes on from it.
    """
    require_no_checkpoint(folder)
    usable_folder("--out", folder)
    unfinished = folder / UNFINISHED
    if (folder / FILE).exists() and not unfinished.exists():
        raise UnwritablePath(
            "--out", str(folder / FILE), "a folder without amax records", "Choose another folder."
        )
    with open_model(source, "bf16", absorbed=False, held_values=held_values) as model:
        ranges = InputRanges(model.config)
        bound = model.logits_model.bound
        bound.observer = ranges
        if isinstance(model.weights, TracedWeights):
            ranges.watch_experts(bound, model.weights)
        chat = any(isinstance(prompt, list) for prompt in prompts)
        generator = TextGenerator(model, GenerationOptions(chat=chat))
        ids = [generator.ids_of(prompt) for prompt in prompts]
        _require_fitting(ids, model.logits_model.context)
        parts = FinishedParts(unfinished, _depends_on(model, ids))
        known = parts.read(_SEEN) or {"groups": 0, "state": []}
        ranges.resume(known["state"])
        with watch(model.streamed):
            for number, group in enumerate(_groups(ids), 1):
                if number > known["groups"]:
                    _run(generator, ranges, group)
                    parts.add(_SEEN, {"groups": number, "state": ranges.state()})
    calibration = ranges.calibration()
    write_text(folder / FILE, calibration.to_bytes().decode())
    parts.close()
    return AmaxSummary(folder, sum(len(each) for each in ids), calibration)


def _depends_on(model: OpenModel, ids: list[list[int]]) -> dict[str, Any]:
    """Return everything that the ranges depend on."""
    return {
        "checkpoint": fingerprint(model.checkpoint),
        "prompts": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "streamed": model.streamed is not None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _require_fitting(ids: list[list[int]], context: int) -> None:
    for number, each in enumerate(ids):
        if not 0 < len(each) <= context:
            raise InvalidArgument(
                f"prompt {number}", f"{len(each)} tokens", f"1 to {context}, the model's context",
                "Split the prompt, or leave it out.",
            )  # fmt: skip


def _groups(ids: list[list[int]]) -> Iterator[list[list[int]]]:
    """Prompts that go through the layers together; a long one goes alone."""
    group: list[list[int]] = []
    for each in ids:
        if group and sum(map(len, group)) + len(each) > STEP:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _run(generator: TextGenerator, ranges: InputRanges, group: list[list[int]]) -> None:
    model, sequences = generator.model.logits_model, [Sequence() for _ in group]
    longest = max(len(each) for each in group)
    for begin in range(0, longest, STEP):
        some = [n for n, each in enumerate(group) if len(each) > begin]
        tokens = [torch.tensor(group[n][begin : begin + STEP]) for n in some]
        hidden = model.hidden([sequences[n] for n in some], tokens)
        # The head's product is not needed, only what goes into it.
        ranges("head", {"x": model.normed(hidden)}, {})
