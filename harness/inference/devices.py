"""Run components of a bound model on a GPU: move inputs and weights there, and outputs back.

Everything outside the call stays on the CPU, but for the budgets of products, which read as many
weights: judging, captures and reports see no device. Held weights stay on the device after the
first use. Of streamed ones each tensor is moved when it is read, and the last ones are kept, since
a budget reads what its component has read. What a kernel writes into its inputs on the device is
copied back, so that a recorder sees it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, cached_property, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice
from degarble.harness.base.gpu import gpu_failures
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.formats.weight import Weight
from degarble.harness.inference.processes import usable_cores
from degarble.harness.inference.weights import HeldWeight
from degarble.references.binding import CallWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.references.binding import BoundModel

    _Held = WeakKeyDictionary[Weight, Weight]

CPU, CUDA = "cpu", "cuda"
_DIGITS = 5  # of a number that int() reads
_FIELDS = (
    "value", "codes", "block_scale", "tensor_scale", "input_scale", "zero_point", "group_index",
    "channel_scale",
)  # fmt: skip
_SMALL = 1 << 20  # bytes of a tensor that one thread copies
_COUNTED = 1 << 16  # bytes that a kept tensor counts as at least
_KEPT_SHARE = 8  # of the GPU's free memory one part holds streamed weights
_KEPT_ON_CPU = 1 << 28
_PROCESSES = 8  # on one GPU, at most
_SHARE = 12 << 30  # bytes of its free memory for each of them
_WORTH = 4 << 30  # bytes of weights for which a process is started
_STAGED = 1 << 22  # bytes that one thread copies at once
_STAGES = 16
_COPYING = 8  # threads


def require_device(name: str, device: str) -> None:
    """Refuse a device that is not here."""
    if not device.startswith(CPU):
        devices_of(name, device)


def devices_of(name: str, text: str) -> tuple[str, ...]:
    """Return the devices of an option: cpu, cuda, cuda:all, or numbers such as cuda:0,2."""
    kind, colon, rest = text.partition(":")
    numbers = rest.split(",") if colon and rest != "all" else []
    if kind not in (CPU, CUDA) or (kind == CPU and colon) or not all(map(_is_number, numbers)):
        raise InvalidArgument(
            name, text, "cpu, cuda, cuda:all, or numbers such as cuda:0,2",
            "nvidia-smi -L lists the GPUs of this machine.",
        )  # fmt: skip
    if kind == CPU:
        return (CPU,)
    present = gpus()
    if not present:
        raise MissingDevice(
            name, text, "an NVIDIA GPU that torch can use",
            "Leave the option out to compute on the CPU, or install torch with CUDA.",
        )  # fmt: skip
    if rest == "all":
        return present
    beyond = [number for number in numbers if int(number) >= len(present)]
    if beyond:
        raise MissingDevice(
            name, f"cuda:{beyond[0]}", f"one of the GPUs of this machine, {', '.join(present)}",
            "Take cuda:all for all of them.",
        )  # fmt: skip
    return tuple(dict.fromkeys(present[int(number)] for number in numbers)) or (CUDA,)


def gpus() -> tuple[str, ...]:
    """Return the GPUs that torch can use."""
    if not torch.cuda.is_available():
        return ()
    return tuple(f"{CUDA}:{number}" for number in range(torch.cuda.device_count()))


def is_spread(devices: tuple[str, ...], weight_bytes: int) -> bool:
    """Return whether processes of one thread each compute on some GPUs, be there room for one."""
    return len(devices) > 1 or weight_bytes >= 2 * _WORTH


def processes_on(devices: tuple[str, ...], weight_bytes: int) -> int:
    """Return how many processes shall compute on some GPUs: one for each, or more for many weights.

    One process leaves a GPU idle nine tenths of the time: it reads, copies and launches.
    """
    memory = min(torch.cuda.mem_get_info(each)[0] for each in devices)  # free now
    most = min(_PROCESSES, memory // _SHARE, usable_cores() // (2 * len(devices)))
    return max(len(devices), min(most * len(devices), weight_bytes // _WORTH))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < _DIGITS


def run_on_device(bound: BoundModel, device: str, recent: RecentTensors | None = None) -> None:
    """Let every component of a model run on a device; on the CPU nothing is to be done.

    Models that read the same checkpoint share `recent`, so that a weight goes there once.
    """
    if device != CPU:
        wrap_calls(bound, recent or RecentTensors(device))


def wrap_calls(bound: BoundModel, recent: RecentTensors) -> None:
    """Wrap every call of a model, whatever the device."""
    device = recent.device
    place = partial(_DeviceWeights, held=WeakKeyDictionary(), recent=recent)
    bound.placed = place
    for name, call in list(bound.calls.items()):
        bound.calls[name] = _DeviceCall(call, device, place)


class _DeviceCall(CallWrapper):
    """A call that runs on a device."""

    def __init__(
        self,
        behind: ComponentCall,
        device: torch.device,
        place: Callable[[Mapping[str, Weight]], Mapping[str, Weight]],
    ) -> None:
        super().__init__(behind)
        self._device, self._place = device, place

    def __call__(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Run it there; give what came back."""
        with gpu_failures():
            return self._run(inputs, weights)

    def _run(self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> dict[str, Tensor]:
        given = {name: each.to(self._device) for name, each in inputs.items()}
        made = self.wrapped(given, self._place(weights))
        home = torch.device(CPU)
        for name, tensor in inputs.items():
            home = tensor.device
            if given[name] is not tensor:
                back = given[name].to(home)
                if not same_bits(back, tensor):
                    tensor.copy_(back)
        return {name: each.to(home) for name, each in made.items()}


class _DeviceWeights(Mapping[str, Weight]):
    """The weights of a component on a device; each goes there when it is asked for."""

    def __init__(self, weights: Mapping[str, Weight], held: _Held, recent: RecentTensors) -> None:
        self._weights, self._held, self._recent = weights, held, recent

    def __getitem__(self, key: str) -> Weight:
        weight = self._weights[key]
        if not isinstance(weight, HeldWeight):
            return _MovedWeight(weight, self._recent)
        found = self._held.get(weight)
        if found is None:
            found = self._held[weight] = HeldWeight.of_weight(_moved(weight, self._recent.device))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _moved(weight: Weight, device: torch.device) -> Weight:
    """Return the same record with its tensors on a device; decoding happens there."""
    made = Weight(storage=weight.storage, from_codes=weight.from_codes)
    for name in _FIELDS:
        held = getattr(weight, name)
        setattr(made, name, None if held is None else held.to(device))
    return made


class _MovedWeight(Weight):
    """A weight whose tensors go to the device when they are read; it keeps nothing itself."""

    def __init__(self, weight: Weight, recent: RecentTensors) -> None:
        self._weight, self._recent = weight, recent
        self.storage, self.from_codes, self._decoded = weight.storage, weight.from_codes, {}

    def __getattribute__(self, name: str) -> Any:
        if name not in _FIELDS:
            return super().__getattribute__(name)
        held = getattr(self._weight, name)
        return None if held is None else self._recent.moved(held)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values in `dtype`."""
        value = self.value
        return value if value is not None and value.dtype is dtype else self._decode(dtype)

    def without_factors(self) -> Weight:
        """Return the weight by which an input is multiplied that has its factors already."""
        return _MovedWeight(replace(self._weight, channel_scale=None, _decoded={}), self._recent)


# --------------------------------------------------------------------------------------------------
# To a GPU: a pageable tensor is copied there by several threads, through pages that stay. CUDA's
# own copy of such memory is that of one thread, and slower than a file in the page cache is read.


class RecentTensors:
    """The tensors that were moved last, by the memory that they were copied from.

    `sharing` is how many processes compute on the device.
    """

    def __init__(self, device: str, sharing: int = 1) -> None:
        self.device, self._sharing = torch.device(device), sharing
        self._held: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = OrderedDict()
        self._bytes = 0

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device."""
        if tensor.device == self.device:
            return tensor
        # The source is kept as well: no other tensor can have its memory meanwhile.
        version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
        key = (tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride())
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][1]
        made = _copied(tensor, self.device)
        self._held[key] = tensor, made
        self._bytes += max(_COUNTED, made.nbytes)
        while self._bytes > self._most and self._held:
            self._bytes -= max(_COUNTED, self._held.popitem(last=False)[1][1].nbytes)
        return made

    @cached_property
    def _most(self) -> int:
        if self.device.type == CPU:
            return _KEPT_ON_CPU
        return torch.cuda.mem_get_info(self.device)[0] // max(_KEPT_SHARE, 2 * self._sharing)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the copy is whole for what follows on the current stream."""
    if device.type != CUDA or not tensor.is_contiguous() or tensor.device.type != CPU:
        return tensor.to(device)
    made = torch.empty_like(tensor, device=device)
    source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, made))
    staging, stream = _staging(), torch.cuda.current_stream(device)
    if len(source) < _SMALL:
        staging.copy(source, target, stream)
        return made
    copies = [
        staging.pool.submit(staging.copy, source[begin : begin + _STAGED],
                            target[begin : begin + _STAGED], stream)
        for begin in range(0, len(source), _STAGED)
    ]  # fmt: skip
    for each in copies:
        each.result()
    return made


class _Staging(NamedTuple):
    """Threads, and pinned pages with the event after which each may be written again."""

    pool: ThreadPoolExecutor
    pages: SimpleQueue[tuple[Tensor, Any]]

    def copy(self, source: Tensor, target: Tensor, stream: Any) -> None:
        """Copy bytes into a page, and let the GPU fetch it."""
        page, event = self.pages.get()
        try:
            if event is not None:
                event.synchronize()
            # numpy copies without the interpreter's lock, on this thread alone.
            np.copyto(page[: len(source)].numpy(), source.numpy())
            with torch.inference_mode(), torch.cuda.stream(stream):
                target.copy_(page[: len(source)], non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
        finally:
            self.pages.put((page, event))  # without it the next copies would wait for ever


@cache
def _staging() -> _Staging:
    pages: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
    with torch.inference_mode(mode=False):
        for _ in range(_STAGES):
            pages.put((torch.empty(_STAGED, dtype=torch.uint8, pin_memory=True), None))
    return _Staging(ThreadPoolExecutor(_COPYING), pages)
