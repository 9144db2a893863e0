"""A recorded run: steps, calls and tensors, from a capture on disk or recorded in memory.

RecordedRun is the protocol that judging needs; `capture_reader.Capture` satisfies it. InMemoryRun
records a bound model's run without a disk: prompts, then greedily generated tokens, or the exact
steps of another run. A wrapper put around a component's call before the run is recorded as part of
the component. Wrappers passed as `edges` are applied outside the recorder, so that the run records
the damaged input.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from degarble.harness.capture.files.records import (
    CapturedCall,
    CapturedStep,
    CapturedTensor,
    Phase,
    malformed,
)
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.model.family import family_of
from degarble.references.model import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import FaultVariant
    from degarble.harness.formats.weight import Weight
    from degarble.references.binding import BoundModel

_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}
_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RecordedRun(Protocol):
    """The protocol of a run; tensors are read on demand."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the facts that the run states about itself."""
        ...

    @property
    def steps(self) -> Many[CapturedStep]:
        """Return the forward passes, in order."""
        ...

    @property
    def calls(self) -> Many[CapturedCall]:
        """Return the component calls, in order; a call's number is its index here."""
        ...

    def inputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return a call's inputs, as they were before it ran."""
        ...

    def outputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return a call's outputs."""
        ...


def by_component(run: RecordedRun) -> dict[str, list[CapturedCall]]:
    """Return the calls of each component, in the order in which they ran."""
    found: dict[str, list[CapturedCall]] = defaultdict(list)
    for call in run.calls:
        found[call.component].append(call)
    return dict(found)


def is_in_part(facts: Mapping[str, Any]) -> bool:
    """Return whether a filter chose what was captured."""
    return any((facts.get("filters") or {}).values())


def require_sound(run: RecordedRun) -> None:
    """Raise for a run whose record contradicts itself, before any tensor is read."""
    filters = run.facts.get("filters")
    if filters is not None and not isinstance(filters, dict):
        raise malformed("facts: filters", filters, "a JSON object")
    counts = {step.number: len(step.tokens) for step in run.steps}
    for call in run.calls:
        for site, kept in call.sites():
            rows = kept.rows or ()
            if any(row >= counts.get(call.step, 0) for row in rows):
                name = f"call {call.number}: {site}: rows"
                raise malformed(name, max(rows), f"tokens of step {call.step}")


def word_of(dtype: torch.dtype) -> str:
    """Return safetensors' word for a dtype; torch's own for one that it has no word for."""
    return _WORDS.get(dtype, str(dtype))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors hold the same codes: a NaN equals itself, 0 is not -0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    code = _CODES[left.dtype.itemsize]
    return torch.equal(left.contiguous().view(code), right.contiguous().view(code))


@dataclass(eq=False)
class InMemoryRun:
    """A run recorded in memory; `logits` are those after each step's last tokens."""

    steps: list[CapturedStep] = field(default_factory=list)
    calls: list[CapturedCall] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)
    _tensors: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = field(default_factory=list)

    @classmethod
    def from_prompts(
        cls,
        bound: BoundModel,
        prompts: Many[Many[int]],
        new_tokens: int = 2,
        edges: Mapping[str, FaultVariant] = MappingProxyType({}),
        *,
        absorbed: bool = True,
    ) -> Self:
        """Run prompts in one batch, then decode greedily; the prefill gives the first new token."""
        run, model = cls(), _model(bound, absorbed=absorbed)
        sequences = [Sequence() for _ in prompts]
        tokens = [torch.tensor(list(ids), dtype=torch.int64) for ids in prompts]
        with run._recording(bound, edges):
            for number in range(new_tokens):
                run._step(model, sequences, tokens, Phase.DECODE if number else Phase.PREFILL)
                tokens = list(run.logits[-1].argmax(-1, keepdim=True))
        return run

    @classmethod
    def again(
        cls,
        bound: BoundModel,
        steps: Many[CapturedStep],
        edges: Mapping[str, FaultVariant] = MappingProxyType({}),
        *,
        absorbed: bool = True,
    ) -> Self:
        """Run the exact steps of another run, with its tokens."""
        run, model = cls(), _model(bound, absorbed=absorbed)
        known: dict[int, Sequence] = {}
        with run._recording(bound, edges):
            for step in steps:
                run._step(model, *_fed(step, known), step)
        return run

    def inputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return a call's inputs, as they were before it ran."""
        return self._tensors[call.number][0]

    def outputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return a call's outputs."""
        return self._tensors[call.number][1]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return every token that was fed, step after step."""
        return tuple(token for step in self.steps for token in step.tokens)

    def _step(
        self,
        model: Any,
        sequences: list[Sequence],
        tokens: list[Tensor],
        like: Phase | CapturedStep,
    ) -> None:
        if isinstance(like, CapturedStep):
            self.steps.append(like)
        else:
            ids: list[int] = []
            positions: list[int] = []
            owners: list[int] = []
            for number, (sequence, new) in enumerate(zip(sequences, tokens, strict=True)):
                ids += new.tolist()
                positions += range(sequence.length, sequence.length + len(new))
                owners += [number] * len(new)
            made = (tuple(ids), tuple(positions), tuple(owners))
            self.steps.append(CapturedStep(len(self.steps), like, *made))
        with torch.inference_mode():
            self.logits.append(model.forward(sequences, tokens, last_only=True))

    @contextmanager
    def _recording(self, bound: BoundModel, edges: Mapping[str, FaultVariant]) -> Iterator[None]:
        plain = dict(bound.calls)
        try:
            for name, call in plain.items():
                seen: ComponentCall = partial(self._run, name, call)
                bound.calls[name] = edges[name].apply(seen) if name in edges else seen
            yield
        finally:
            bound.calls.update(plain)

    def _run(
        self,
        name: str,
        call: ComponentCall,
        inputs: Mapping[str, Tensor],
        weights: Mapping[str, Weight],
    ) -> Mapping[str, Tensor]:
        # Copies, to detect a component that writes into its inputs.
        before = {key: tensor.clone() for key, tensor in inputs.items()}
        outputs = dict(call(inputs, weights))
        changed = tuple(key for key, tensor in inputs.items() if not same_bits(tensor, before[key]))
        kept = [{key: _kept(tensor) for key, tensor in side.items()} for side in (before, outputs)]
        number, step = len(self.calls), self.steps[-1].number
        self.calls.append(CapturedCall(number, step, name, kept[0], kept[1], changed))
        self._tensors.append((before, {key: output.clone() for key, output in outputs.items()}))
        return outputs


def forward_again(
    bound: BoundModel, steps: Many[CapturedStep], *, absorbed: bool = True
) -> list[Tensor]:
    """Return logits after each sequence's last token for another run's steps, without recording."""
    model, known, made = _model(bound, absorbed=absorbed), dict[int, Sequence](), []
    for step in steps:
        sequences, tokens = _fed(step, known)
        with torch.inference_mode():
            made.append(model.forward(sequences, tokens, last_only=True))
    return made


def _fed(step: CapturedStep, known: dict[int, Sequence]) -> tuple[list[Sequence], list[Tensor]]:
    """Return the sequences of a step with their new tokens."""
    owned: dict[int, list[int]] = {}
    for token, owner in zip(step.tokens, step.sequences, strict=True):
        owned.setdefault(owner, []).append(token)
    sequences = [known.setdefault(owner, Sequence()) for owner in owned]
    return sequences, [torch.tensor(ids) for ids in owned.values()]


def _model(bound: BoundModel, *, absorbed: bool) -> Any:
    return family_of(bound.config).forward(bound, absorbed=absorbed)


def _kept(tensor: Tensor) -> CapturedTensor:
    """Return the record of a tensor in memory; its bytes are not hashed."""
    return CapturedTensor(word_of(tensor.dtype), tuple(tensor.shape), "", "memory")
