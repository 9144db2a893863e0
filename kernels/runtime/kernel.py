"""Describe a kernel once: its operands by name, the choice of its form, its entry's arguments.

Compiling, refusals, allocation and the launch of every described kernel are derived here. An entry
gets one tuple of pointers in the order of `operands`, then the numbers, the form, and the stream.
A caller names operands and never relies on that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.kernels.runtime.compiling import any_stream, compile_kernel, current_stream
from degarble.kernels.runtime.operands import (
    pointer,
    processors_of,
    require_device,
    require_tensor,
)
from degarble.kernels.runtime.targets import TARGETS, target_of_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings

    Operands = Mapping[str, "Tensor | None"]
    Kinds = tuple[Any, ...]  # DSL number types, also in nested tuples

ANY = -1  # as last extent of an operand: whatever the tensor has
P = TypeVar("P")
F = TypeVar("F")


@dataclass(frozen=True)
class Storage:
    """How memory holds an operand. Both dtypes differ where a kernel reads words of values."""

    element: Any  # of the DSL
    dtype: torch.dtype
    alignment: int  # of the address, in bytes
    views: tuple[tuple[Any, int], ...] = ()  # element and alignment of further pointers to it


@dataclass(frozen=True)
class Presence(Generic[P]):
    """When an operand is present, and the error where a caller has it otherwise.

    `test` is called with the problem and with the form, so it uses what both have.
    """

    test: Callable[[Any], bool]
    remedy: str | Callable[[P], str]
    required: str = "a tensor"
    superfluous: str = "no tensor, as the problem says"


ALWAYS = Presence[Any](lambda _of: True, "Every problem has it.")


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


def as_vector(tensor: Tensor) -> Tensor:
    """Return a tensor of no dimensions as one number in a vector."""
    return tensor.reshape(-1) if tensor.ndim == 0 else tensor


@dataclass(frozen=True)
class Operand(Generic[P]):
    """A tensor of a kernel. A function for `storage` is called as `Presence.test` is."""

    name: str
    storage: Storage | Callable[[Any], Storage]
    shape: Callable[[P], tuple[int, ...]]
    present: Presence[P] = ALWAYS
    output: bool | Callable[[P], bool] = False
    scratch: bool = False  # an output that a run does not return
    updated: bool = False  # returned like an output, but always the caller's own
    label: str = ""  # its name in errors, if that differs
    shape_of: str = ""  # an operand of as many values: an output is allocated in its shape
    memory_of: Callable[[P], str] = lambda _problem: ""  # an operand that it overwrites
    passed: bool = True  # as a null pointer, where it is absent
    checked: Callable[[Tensor], Tensor] = unchanged  # the view that has the shape

    def written(self, problem: P) -> bool:
        """Return whether the kernel writes it."""
        written = self.output if isinstance(self.output, bool) else self.output(problem)
        return written or self.updated

    def stored(self, of: Any) -> Storage:
        """Return the storage for a problem or a form."""
        return self.storage if isinstance(self.storage, Storage) else self.storage(of)

    def require(self, problem: P, tensor: Tensor | None) -> None:
        """Raise unless the tensor is what the problem says."""
        label, rule = self.label or self.name, self.present
        if (tensor is not None) != rule.test(problem):
            raise InvalidArgument(
                label,
                None if tensor is None else tuple(tensor.shape),
                rule.required if tensor is None else rule.superfluous,
                rule.remedy if isinstance(rule.remedy, str) else rule.remedy(problem),
            )
        if tensor is not None:
            kind = self.stored(problem)
            shape = self.shape(problem)
            if shape and shape[-1] == ANY:
                shape = (*shape[:-1], *tensor.shape[-1:])
            require_tensor(label, self.checked(tensor), kind.dtype, shape, kind.alignment)

    def allocate(
        self, problem: P, device: torch.device, like: Tensor | None = None
    ) -> Tensor | None:
        """Allocate memory that the kernel fills; None where the problem has no such operand."""
        if not self.present.test(problem):
            return None
        shape = self.shape(problem) if like is None else like.shape
        return torch.empty(shape, dtype=self.stored(problem).dtype, device=device)

    def pointers(self, form: Any, tensor: Tensor | None) -> tuple[Any, ...]:
        """Return the pointers of a launch; None becomes a pointer that is not read."""
        if not self.passed and not self.present.test(form):
            return ()
        kind = self.stored(form)
        views = ((kind.element, kind.alignment), *kind.views)
        return tuple(pointer(element, tensor, alignment) for element, alignment in views)


@dataclass(frozen=True)
class LaunchContext(Generic[P, F]):
    """Facts of one launch from which the entry's numbers are computed."""

    problem: P
    form: F
    tactic: Any
    device: int
    tensors: Operands

    @property
    def processors(self) -> int:
        """Return the number of multiprocessors."""
        return processors_of(self.device)


@dataclass(frozen=True, eq=False)
class Kernel(Generic[P, F]):
    """A kernel and its host code."""

    entry: Callable[..., Any]  # cute.jit
    operands: tuple[Operand[P], ...]
    choose_form: Callable[[P, str], F]
    kinds: Kinds | Callable[[F], Kinds]  # types of `numbers`
    numbers: Callable[[LaunchContext[P, F]], tuple[Any, ...]]
    work: Callable[[P], int]  # 0: nothing to launch
    choose_tactic: Callable[[P], Any] = lambda _problem: None
    refuse: Callable[[P, Operands], None] = lambda _problem, _tensors: None  # operands together
    takes_form: bool = True  # whether the entry does

    @cached_property
    def compile_form(self) -> Callable[[F, CompileSettings], CompiledKernel]:
        """Compile a form, once in a process; needs no GPU."""

        def compile_form(form: F, settings: CompileSettings) -> CompiledKernel:
            return compile_kernel(
                self.entry, self._compile_arguments(form), TARGETS[_target(form)], settings
            )

        return cache(compile_form)

    def outputs(self, out: Sequence[Tensor | None] | Tensor | None) -> dict[str, Tensor | None]:
        """Return results that a caller provides by name: all in their order, or none."""
        if out is None:
            return {}
        given = (out,) if isinstance(out, torch.Tensor) else out
        names = [operand.name for operand in self.operands if operand.output is True]
        return dict(zip(names, given, strict=True))

    def require(self, problem: P, tensors: Operands) -> None:
        """Raise on tensors that the kernel would misread."""
        for operand in self.operands:
            operand.require(problem, tensors.get(operand.name))
        self.refuse(problem, tensors)

    def allocate(self, problem: P, device: torch.device) -> dict[str, Any]:
        """Allocate the outputs; a launch writes every byte of them."""
        outputs = self._outputs(problem)
        return {name: operand.allocate(problem, device) for name, operand in outputs.items()}

    def run(self, problem: P, settings: CompileSettings, **given: Tensor | None) -> dict[str, Any]:
        """Check, allocate the outputs that are not named, and launch; return the outputs.

        An output that is absent from the problem is None.
        """
        for name in given:
            if name not in self._names:
                raise UnknownName.among("operand", name, self._names)
        outputs = self._outputs(problem)
        for operand in self.operands:
            if operand.name not in outputs:
                operand.require(problem, given.get(operand.name))
        tensors = self._with_outputs(problem, given, outputs)
        for name, operand in outputs.items():
            operand.require(problem, tensors[name])
        self.refuse(problem, tensors)
        place = require_device(tensors.values())
        if self.work(problem):
            form = self.choose_form(problem, target_of_device(place).name)
            self.launch(self.compile_form(form, settings), form, problem, tensors)
        return {name: tensors[name] for name, of in outputs.items() if not of.scratch}

    def run_one(self, problem: P, settings: CompileSettings, **given: Tensor | None) -> Tensor:
        """Run a kernel of one output; return that."""
        (made,) = self.run(problem, settings, **given).values()
        assert made is not None, "the only output of a kernel is always present"
        out: Tensor = made
        return out

    def launch(
        self,
        compiled: CompiledKernel,
        form: F,
        problem: P,
        tensors: Operands,
        tactic: Any = None,
    ) -> None:
        """Launch on checked tensors, with the problem's own tactic if none is given."""
        device = next(each.device for each in tensors.values() if each is not None).index or 0
        tactic = tactic or self.choose_tactic(problem)
        numbers = self.numbers(LaunchContext(problem, form, tactic, device, tensors))
        pointers = self._pointers(form, tensors)
        compiled(pointers, *_typed(self._kinds(form), numbers), current_stream(device))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands)

    def _with_outputs(
        self, problem: P, given: Operands, outputs: Mapping[str, Operand[P]]
    ) -> dict[str, Any]:
        tensors: dict[str, Any] = dict(given)
        device = next(each.device for each in given.values() if each is not None)
        for name, operand in outputs.items():
            if name not in tensors:
                tensors[name] = tensors.get(operand.memory_of(problem))
                if tensors[name] is None and not operand.updated:
                    like = tensors.get(operand.shape_of)
                    tensors[name] = operand.allocate(problem, device, like)
        return tensors

    def _outputs(self, problem: P) -> dict[str, Operand[P]]:
        return {each.name: each for each in self.operands if each.written(problem)}

    def _kinds(self, form: F) -> Kinds:
        return self.kinds if isinstance(self.kinds, tuple) else self.kinds(form)

    def _compile_arguments(self, form: F) -> tuple[Any, ...]:
        ones = _ones(self._kinds(form))
        constant = (form,) if self.takes_form else ()
        return (self._pointers(form, {}), *ones, *constant, any_stream())

    def _pointers(self, form: F, tensors: Operands) -> tuple[Any, ...]:
        return tuple(
            made for of in self.operands for made in of.pointers(form, tensors.get(of.name))
        )


def _target(form: Any) -> str:
    name: str = form.target
    return name


def _ones(kinds: Kinds) -> tuple[Any, ...]:
    return tuple(_ones(kind) if isinstance(kind, tuple) else kind(1) for kind in kinds)


def _typed(kinds: Kinds, numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        _typed(kind, number) if isinstance(kind, tuple) else kind(number)
        for kind, number in zip(kinds, numbers, strict=True)
    )
