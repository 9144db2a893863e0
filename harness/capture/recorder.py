"""Record the component calls of a bound model, into a folder or in memory.

Equal bytes are copied once; a recorder changes nothing that it records.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from degarble.harness.base.errors import DtypeMismatch
from degarble.harness.capture.files.records import (
    CapturedCall,
    CapturedStep,
    CapturedTensor,
    Phase,
    run_text,
)
from degarble.harness.capture.files.writer import Payload, PendingCall, PendingTensor
from degarble.harness.capture.options import CaptureFilter, whole_sites
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.model.components import components

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.formats.weight import Weight
    from degarble.references.binding import BoundModel


# --------------------------------------------------------------------------------------------------
# Copy tensors for a capture, share the copies of equal bytes, and compute statistics.
#
# A tensor at the same address with the same bytes is the same snapshot, so what one component
# returns and the next takes is copied once. Bytes decide; the address only says where to look. The
# cache of copies is bounded. Statistics are float64 and cover finite values only.

KEPT_BYTES = 256 << 20  # copies that are kept to be recognised

WORDS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16",
        torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint32: "U32",
        torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64", torch.int64: "I64",
        torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
)  # fmt: skip
_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_Place = tuple[object, ...]


class Snapshot(NamedTuple):
    """Bytes of a tensor at one moment, with the writer's record of them."""

    codes: Tensor  # flat integers; a NaN equals itself
    payload: Payload


class Snapshots:
    """Takes snapshots and recognises tensors."""

    def __init__(self, *, stored: bool = True, kept_bytes: int = KEPT_BYTES) -> None:
        self._stored = stored
        self._room = kept_bytes
        self._held: OrderedDict[_Place, Snapshot] = OrderedDict()

    def take(self, tensor: Tensor) -> Snapshot:
        """Return the snapshot of a tensor's present bytes."""
        place = _place(tensor)
        # Taken out here and put back below: the order is that of last use, for eviction.
        snapshot = self._held.pop(place, None)
        if snapshot is None or not same(snapshot, tensor):
            if snapshot is not None:
                self._room += snapshot.payload.nbytes
            snapshot = self._copied(tensor)
            self._room -= snapshot.payload.nbytes
        self._held[place] = snapshot
        while self._room < 0 and self._held:
            _, old = self._held.popitem(last=False)
            self._room += old.payload.nbytes
        return snapshot

    def _copied(self, tensor: Tensor) -> Snapshot:
        flat = torch.empty(tensor.numel(), dtype=_code_type(tensor))
        flat.copy_(_codes(tensor).reshape(-1))
        # As a list of bytes, so that the writer needs no torch.
        data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        payload = Payload(WORDS[tensor.dtype], tuple(tensor.shape), data, self._stored)
        return Snapshot(flat, payload)


def same(snapshot: Snapshot, tensor: Tensor) -> bool:
    """Return whether a tensor still holds the bytes of a snapshot."""
    codes, kept = _codes(tensor).reshape(-1).to("cpu"), snapshot.codes
    if codes.dtype is not kept.dtype or codes.numel() != kept.numel():
        return False
    # A fifth of the time of torch.equal, and it wakes no threads that the captured run needs.
    return not _memcmp(codes.data_ptr(), kept.data_ptr(), kept.nbytes)


def statistics_of(tensor: Tensor) -> dict[str, float]:
    """Count, what is not finite, and the size of the rest."""
    found: dict[str, float] = {"count": tensor.numel()}
    if not tensor.numel() or tensor.dtype is torch.float8_e8m0fnu:
        return found
    x = tensor.detach().to(torch.float64)
    if tensor.dtype.is_floating_point:
        finite = x[x.isfinite()]
        found |= {"nan": int(x.isnan().sum()), "inf": int(x.isinf().sum())}
        x = finite
    if not x.numel():
        return found
    low, high = x.aminmax()
    return found | {
        "zeros": int((x == 0).sum()),
        "min": float(low),
        "max": float(high),
        "mean": float(x.mean()),
        # Trap: squares of finite float64 may overflow; scaled by the largest they do not.
        "rms": _rms(x),
    }


def _rms(x: Tensor) -> float:
    largest = float(x.abs().max())
    return largest * float((x / largest).square().mean().sqrt()) if largest else 0.0


def _place(tensor: Tensor) -> _Place:
    """Return a tensor's address and layout; contiguous rows are the same in any shape."""
    if tensor.is_contiguous():
        return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.numel()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _code_type(tensor: Tensor) -> torch.dtype:
    if tensor.dtype not in WORDS:
        raise DtypeMismatch(
            "captured tensor", str(tensor.dtype), "a dtype that safetensors can spell",
            "View it as integers of its width, or leave its component out.",
        )  # fmt: skip
    return _CODES[tensor.dtype.itemsize]


def _codes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_code_type(tensor))


# --------------------------------------------------------------------------------------------------
# Record the component calls of a bound model: inputs before a call, outputs and writes after it.
#
# Kernels that replaced a component are recorded as well. A recorder changes nothing that it
# records. An error of the writer is raised at the next call. The statistics-only mode keeps no
# tensors.


class Sink(Protocol):
    """Receiver of steps and calls: a CaptureWriter, or a run in memory."""

    def step(self, step: CapturedStep) -> None:
        """Begin a forward pass."""
        ...

    def call(self, call: PendingCall) -> None:
        """Take one call."""
        ...


class CopiedTensor(NamedTuple):
    """A tensor on its way to the writer, and the copy that it is compared with later."""

    sent: PendingTensor
    snapshot: Snapshot


class Recorder:
    """Sends calls to a writer. `begin` a step before its first call."""

    def __init__(
        self,
        writer: Sink,
        wanted: CaptureFilter | None = None,
        *,
        statistics_only: bool = False,
    ) -> None:
        self._writer = writer
        self._wanted = wanted or CaptureFilter()
        self._statistics_only = statistics_only
        self._snapshots = Snapshots(stored=not statistics_only)
        self._whole: dict[str, frozenset[str]] = {}
        self._steps = 0
        self._tokens = 0
        self._rows: tuple[int, ...] | None = None

    def wrap(self, bound: BoundModel) -> None:
        """See every wanted call of a model from now on."""
        for component in components(bound.config):
            self._whole[component.name] = whole_sites(component)
        for name, call in list(bound.calls.items()):
            if self._wanted.includes(name):
                bound.calls[name] = partial(self._run, name, call)

    def begin(
        self, phase: Phase, tokens: Sequence[int], positions: Sequence[int], owners: Sequence[int]
    ) -> None:
        """Begin a forward pass; `owners` is the sequence of each token."""
        step = CapturedStep(self._steps, phase, tuple(tokens), tuple(positions), tuple(owners))
        self._steps += 1
        self._tokens = len(tokens)
        chosen = self._wanted.rows(positions)
        # A step with all of its rows is whole: components whose rows meet can be judged.
        self._rows = None if chosen is not None and len(chosen) == len(tokens) > 0 else chosen
        self._writer.step(step)

    @property
    def idle(self) -> bool:
        """Return whether the filter drops all of this step."""
        return self._rows == ()

    def chooses(self, component: str) -> bool:
        """Return whether the filter includes this component."""
        return self._wanted.includes(component)

    def before(self, component: str, inputs: Mapping[str, Tensor]) -> dict[str, CopiedTensor]:
        """Take what a component is given."""
        return {name: self._taken(component, name, tensor) for name, tensor in inputs.items()}

    def after(
        self,
        component: str,
        taken: dict[str, CopiedTensor],
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        """Take what it returned, and see whether its inputs are still what they were."""
        changed = tuple(
            n for n, tensor in inputs.items() if not self._kept(component, n, tensor, taken)
        )
        made = {name: self._taken(component, name, output) for name, output in outputs.items()}
        both = [{name: tensor.sent for name, tensor in side.items()} for side in (taken, made)]
        self._writer.call(PendingCall(self._steps - 1, component, both[0], both[1], changed))

    def _run(
        self,
        name: str,
        call: ComponentCall,
        inputs: Mapping[str, Tensor],
        weights: Mapping[str, Weight],
    ) -> Mapping[str, Tensor]:
        if self.idle:
            return call(inputs, weights)
        taken = self.before(name, inputs)
        outputs = call(inputs, weights)
        self.after(name, taken, inputs, outputs)
        return outputs

    def _taken(self, component: str, name: str, tensor: Tensor) -> CopiedTensor:
        chosen, rows = self._chosen(component, name, tensor)
        fields = statistics_of(chosen) if self._statistics_only else None
        snapshot = self._snapshots.take(chosen)
        return CopiedTensor(
            PendingTensor(snapshot.payload, tuple(chosen.shape), rows, fields), snapshot
        )

    def _kept(
        self, component: str, name: str, tensor: Tensor, taken: Mapping[str, CopiedTensor]
    ) -> bool:
        chosen, _ = self._chosen(component, name, tensor)
        return same(taken[name].snapshot, chosen)

    def _chosen(
        self, component: str, name: str, tensor: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Return the rows of the chosen tokens; a tensor without one row a token stays whole."""
        rows = self._rows
        whole = name in self._whole.get(component, ())
        if rows is None or whole or not tensor.ndim or tensor.shape[0] != self._tokens:
            return tensor, None
        return tensor[torch.tensor(rows, device=tensor.device)], rows


# --------------------------------------------------------------------------------------------------
# Capture one run of any torch model in memory, without a folder.
#
# The writer here keeps what a recorder sends, as a run that can be judged like a capture from disk.
# Equal bytes are held once. Everything stays in memory, so capture large models into a folder.


@dataclass(eq=False, repr=False)
class MemoryRun:
    """Steps, calls and tensors of a run; also what a recorder writes to."""

    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[CapturedStep] = field(default_factory=list)
    calls: list[CapturedCall] = field(default_factory=list)
    _sent: list[PendingCall] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"MemoryRun({run_text(self)})"

    def step(self, step: CapturedStep) -> None:
        """Begin a forward pass."""
        self.steps.append(step)

    def call(self, call: PendingCall) -> None:
        """Keep one call."""
        inputs, outputs = (
            {name: _kept(tensor) for name, tensor in side.items()}
            for side in (call.inputs, call.outputs)
        )
        number = len(self.calls)
        self.calls.append(
            CapturedCall(number, call.step, call.component, inputs, outputs, call.changed)
        )
        self._sent.append(call)

    def inputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return the inputs of a call, as they were before it ran."""
        return {name: _tensor(tensor) for name, tensor in self._sent[call.number].inputs.items()}

    def outputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return the outputs of a call."""
        return {name: _tensor(output) for name, output in self._sent[call.number].outputs.items()}


def _kept(sent: PendingTensor) -> CapturedTensor:
    """Return the record of a tensor in memory; its bytes are not hashed."""
    return CapturedTensor(sent.payload.dtype, sent.shape, "", "memory", sent.rows, sent.statistics)


def _tensor(sent: PendingTensor) -> Tensor:
    dtype = TORCH_DTYPES[sent.payload.dtype]
    if not sent.payload.data:
        return torch.empty(sent.shape, dtype=dtype)
    # Trap: frombuffer shares the bytes; whoever reads a run may not write into it.
    return torch.frombuffer(sent.payload.data, dtype=dtype).reshape(sent.shape)
