"""Run components of a bound model on a GPU: move inputs and weights there, and outputs back.

Everything outside the call stays on the CPU: judging, captures and reports see no device. Held
weights stay on the device after the first use; streamed ones are moved for one call. What a kernel
writes into its inputs on the device is copied back, so that a recorder sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.formats.weight import Weight
from degarble.harness.inference.weights import HeldWeight
from degarble.references.binding import CallWrapper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.references.binding import BoundModel

    _Held = WeakKeyDictionary[Weight, Weight]

CPU, CUDA = "cpu", "cuda"
_DIGITS = 5  # of a number that int() reads
_FIELDS = ("value", "codes", "block_scale", "tensor_scale", "input_scale")


class GpuLost(BaseException):
    """A GPU that failed. It is no Exception, so that nobody takes it for a finding."""

    def refusal(self, name: str, device: str) -> MissingDevice:
        """Return the error for whoever chose the GPU."""
        return MissingDevice(
            name, f"{device}: {self}", "a GPU that answers",
            "Look at nvidia-smi, and leave this GPU out, such as --device cuda:1.",
        )  # fmt: skip


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


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < _DIGITS


def run_on_device(bound: BoundModel, device: str) -> None:
    """Let every component of a model run on a device; on the CPU nothing is to be done."""
    if device != CPU:
        wrap_calls(bound, torch.device(device))


def wrap_calls(bound: BoundModel, device: torch.device) -> None:
    """Wrap every call of a model, whatever the device."""
    held: _Held = WeakKeyDictionary()
    for name, call in list(bound.calls.items()):
        bound.calls[name] = _DeviceCall(call, device, held)


class _DeviceCall(CallWrapper):
    """A call that runs on a device."""

    def __init__(self, behind: ComponentCall, device: torch.device, held: _Held) -> None:
        super().__init__(behind)
        self._device, self._held = device, held

    def __call__(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Run it there; give what came back."""
        try:
            return self._run(inputs, weights)
        except torch.AcceleratorError as error:
            raise GpuLost(str(error).strip().partition("\n")[0]) from error

    def _run(self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> dict[str, Tensor]:
        given = {name: each.to(self._device) for name, each in inputs.items()}
        made = self.wrapped(given, _DeviceWeights(weights, self._device, self._held))
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

    def __init__(
        self,
        weights: Mapping[str, Weight],
        device: torch.device,
        held: _Held,
    ) -> None:
        self._weights, self._device, self._held = weights, device, held

    def __getitem__(self, key: str) -> Weight:
        weight = self._weights[key]
        if not isinstance(weight, HeldWeight):
            return _moved(weight, self._device)
        found = self._held.get(weight)
        if found is None:
            found = self._held[weight] = HeldWeight.of_weight(_moved(weight, self._device))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _moved(weight: Weight, device: torch.device) -> Weight:
    """Return the same record with its tensors on a device; decoding happens there."""
    made = Weight(storage=weight.storage)
    for name in _FIELDS:
        held = getattr(weight, name)
        setattr(made, name, None if held is None else held.to(device))
    return made
