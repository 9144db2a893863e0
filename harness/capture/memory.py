"""Capture one run of any torch model in memory, without a folder.

The writer here keeps what a recorder sends, as a run that can be judged like a capture from disk.
Equal bytes are held once. Everything stays in memory, so capture large models into a folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.files.types import Call, Kept
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.capture.files.types import Step
    from degarble.harness.capture.files.writer import Sent, SentCall


@dataclass(eq=False)
class MemoryRun:
    """Steps, calls and tensors of a run; also what a recorder writes to."""

    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    _sent: list[SentCall] = field(default_factory=list)

    def step(self, step: Step) -> None:
        """Begin a forward pass."""
        self.steps.append(step)

    def call(self, call: SentCall) -> None:
        """Keep one call."""
        inputs, outputs = (
            {name: _kept(each) for name, each in side.items()}
            for side in (call.inputs, call.outputs)
        )
        number = len(self.calls)
        self.calls.append(Call(number, call.step, call.component, inputs, outputs, call.changed))
        self._sent.append(call)

    def inputs(self, call: Call) -> Mapping[str, Tensor]:
        """Return the inputs of a call, as they were before it ran."""
        return {name: _tensor(each) for name, each in self._sent[call.number].inputs.items()}

    def outputs(self, call: Call) -> Mapping[str, Tensor]:
        """Return the outputs of a call."""
        return {name: _tensor(each) for name, each in self._sent[call.number].outputs.items()}


def _kept(sent: Sent) -> Kept:
    """Return the record of a tensor in memory; its bytes are not hashed."""
    return Kept(sent.payload.dtype, sent.shape, "", "memory", sent.rows, sent.statistics)


def _tensor(sent: Sent) -> Tensor:
    dtype = TORCH_DTYPES[sent.payload.dtype]
    if not sent.payload.data:
        return torch.empty(sent.shape, dtype=dtype)
    # Trap: frombuffer shares the bytes; whoever reads a run may not write into it.
    return torch.frombuffer(sent.payload.data, dtype=dtype).reshape(sent.shape)
