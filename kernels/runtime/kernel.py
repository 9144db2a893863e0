"""Describe a kernel once: its operands by name, the choice of its form, its entry's arguments.

Compiling, refusals, allocation and the launch of every described kernel are derived here. An entry
gets one tuple of pointers in the order of `operands`, then the numbers, the form, and the stream.
A caller names operands and never relies on that order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice, UnknownName
from degarble.kernels.runtime.compiling import any_stream, compile_kernel, current_stream
from degarble.kernels.runtime.operands import (
    pointer,
    processors_of,
    require_device,
    require_tensor,
)
from degarble.kernels.runtime.plain import to_plain
from degarble.kernels.runtime.targets import TARGETS, target_of_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings
    from degarble.kernels.runtime.targets import Target

    Kinds = tuple[Any, ...]  # DSL number types, also in nested tuples

PREPARED_PROBLEMS = 512  # of a kernel
Operands = Mapping[str, "torch.Tensor | None"]
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
    assumed: int = 0  # the alignment that its pointer states, if that is less


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


def as_given(_problem: Any, tensors: Operands, _settings: CompileSettings) -> Operands:
    """Return the operands of a kernel that reads what its caller gives."""
    return tensors


def nothing_more(_problem: Any, _tensors: Operands, _settings: CompileSettings) -> None:
    """Leave the outputs of a kernel as its launch does."""


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
    address_of: str = ""  # the operand that lends an absent one its address
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

    def expected(self, problem: P) -> ExpectedOperand[P]:
        """Return what a problem expects of it."""
        present = self.present.test(problem)
        storage = self.stored(problem) if present else None
        return ExpectedOperand(
            self,
            self.name,
            present,
            storage.dtype if storage else torch.bool,
            self.shape(problem) if present else (),
            storage.alignment if storage else 1,
            self.memory_of(problem),
        )

    def pointers(self, form: Any) -> tuple[tuple[Any, int], ...]:
        """Return element and alignment of the pointers that the entry of a form takes."""
        if not self.passed and not self.present.test(form):
            return ()
        kind = self.stored(form)
        return ((kind.element, kind.assumed or kind.alignment), *kind.views)


@dataclass(frozen=True, eq=False)
class ExpectedOperand(Generic[P]):
    """An operand of one problem, computed once, so that checking a tensor costs comparisons."""

    operand: Operand[P]
    name: str
    present: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    alignment: int
    memory_of: str

    def require(self, problem: P, tensor: Tensor | None) -> None:
        """Raise unless the tensor is what the problem says."""
        if tensor is None and not self.present:
            return
        view = tensor if tensor is None else self.operand.checked(tensor)
        if (
            view is None
            or not self.present
            or view.dtype is not self.dtype
            or view.shape != self.shape
            or not view.is_contiguous()
            or view.data_ptr() % self.alignment
        ):
            self.operand.require(problem, tensor)  # names what is wrong, and knows ANY

    def allocate(self, device: torch.device, like: Tensor | None) -> Tensor | None:
        """Allocate memory that the kernel fills; None where the problem has no such operand."""
        if not self.present:
            return None
        shape = self.shape if like is None else like.shape
        return torch.empty(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, eq=False)
class PreparedProblem(Generic[P, F]):
    """What a kernel's host code computes from a problem alone."""

    operands: tuple[ExpectedOperand[P], ...]
    inputs: tuple[ExpectedOperand[P], ...]
    outputs: tuple[ExpectedOperand[P], ...]
    returned: tuple[str, ...]
    has_work: bool
    forms: dict[str, F]  # by target, as launches ask for them


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
    fit_form: Callable[[F, P, int], F] | None = None  # to a number of multiprocessors
    target: Target | None = None  # the only one, of a kernel that is written for one
    refuse: Callable[[P, Operands], None] = lambda _problem, _tensors: None  # operands together
    refuse_form: Callable[[P, F], None] = lambda _problem, _form: None
    takes_form: bool = True  # whether the entry does
    # What a run does around its launch: make what that reads, and finish the outputs.
    before: Callable[[P, Operands, CompileSettings], Operands] = as_given
    after: Callable[[P, Operands, CompileSettings], None] = nothing_more

    @cached_property
    def compile_form(self) -> Callable[[F, CompileSettings], CompiledKernel]:
        """Compile a form, once in a process; needs no GPU."""

        def compile_form(form: F, settings: CompileSettings) -> CompiledKernel:
            return compile_kernel(
                self.entry,
                self._compile_arguments(form),
                TARGETS[_target(form)],
                settings,
                request_of(self, form),
            )

        return cache(compile_form)

    def require(self, problem: P, tensors: Operands) -> None:
        """Raise on tensors that the kernel would misread."""
        for operand in self.prepared(problem).operands:
            operand.require(problem, tensors.get(operand.name))
        self.refuse(problem, tensors)

    def allocate(self, problem: P, device: torch.device) -> dict[str, Any]:
        """Allocate the outputs; a launch writes every byte of them."""
        return {
            output.name: output.allocate(device, None) for output in self.prepared(problem).outputs
        }

    def run(
        self,
        problem: P,
        settings: CompileSettings,
        form: F | None = None,
        /,
        **given: Tensor | None,
    ) -> dict[str, Any]:
        """Check, allocate the outputs that are not named, and launch; return the outputs.

        An output that is absent from the problem is None. A form replaces the chosen one.
        """
        _require_known(given, self.names)
        prepared = self.prepared(problem)
        for operand in prepared.inputs:
            operand.require(problem, given.get(operand.name))
        tensors = _with_outputs(given, prepared.outputs)
        for operand in prepared.outputs:
            operand.require(problem, tensors[operand.name])
        self.refuse(problem, tensors)
        place = require_device(tensors.values())
        self.run_checked(problem, settings, form, place, tensors)
        return {name: tensors[name] for name in prepared.returned}

    def run_checked(
        self,
        problem: P,
        settings: CompileSettings,
        form: F | None,
        place: int,
        tensors: Operands,
    ) -> None:
        """Launch on checked tensors of a GPU, with what belongs around the launch."""
        if self.prepared(problem).has_work:
            target = self.target_of(place)
            form = form or self._chosen_form(problem, target, place)
            self.refuse_form(problem, form)
            ready = self.before(problem, tensors, settings)
            self.launch(self.compile_form(form, settings), form, problem, ready)
        self.after(problem, tensors, settings)

    def run_one(
        self,
        problem: P,
        settings: CompileSettings,
        form: F | None = None,
        /,
        **given: Tensor | None,
    ) -> Tensor:
        """Run a kernel that makes one output for this problem; return that."""
        made = self.run(problem, settings, form, **given).values()
        out: Tensor
        (out,) = (tensor for tensor in made if tensor is not None)
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
        device = next(tensor.device for tensor in tensors.values() if tensor is not None).index or 0
        tactic = tactic or self.choose_tactic(problem)
        numbers = self.numbers(LaunchContext(problem, form, tactic, device, tensors))
        for name, lender in self._borrowers:
            if tensors.get(name) is None:
                tensors = {**tensors, name: tensors.get(lender)}
        pointers = self._pointers(form, tensors)
        compiled(pointers, *_typed(self._kinds(form), numbers), current_stream(device))

    @cached_property
    def prepared(self) -> Callable[[P], PreparedProblem[P, F]]:
        """Prepare a problem; the latest ones are kept."""

        def prepare(problem: P) -> PreparedProblem[P, F]:
            operands = tuple(operand.expected(problem) for operand in self.operands)
            outputs = tuple(operand for operand in operands if operand.operand.written(problem))
            return PreparedProblem(
                operands,
                tuple(operand for operand in operands if operand not in outputs),
                outputs,
                tuple(output.name for output in outputs if not output.operand.scratch),
                bool(self.work(problem)),
                {},
            )

        return lru_cache(maxsize=PREPARED_PROBLEMS)(prepare)

    def _chosen_form(self, problem: P, target: str, place: int) -> F:
        forms = self.prepared(problem).forms
        form = forms.get(target)
        if form is None:
            form = forms[target] = self.choose_form(problem, target)
        return form if self.fit_form is None else self.fit_form(form, problem, processors_of(place))

    def target_of(self, place: int) -> str:
        """Return the target of a GPU; raise if the kernel was written for another one."""
        target = target_of_device(place)
        if self.target is not None and target is not self.target:
            remedy = "Use the kernel that was written for this GPU."
            raise MissingDevice("target", target.name, self.target.name, remedy)
        return target.name

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the operands."""
        return tuple(operand.name for operand in self.operands)

    @cached_property
    def _borrowers(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (operand.name, operand.address_of) for operand in self.operands if operand.address_of
        )

    @cached_property
    def _places(self) -> Callable[[F], tuple[tuple[str, Any, int], ...]]:
        """Return operand, element and alignment of every pointer that a form's entry takes."""

        def places(form: F) -> tuple[tuple[str, Any, int], ...]:
            return tuple((of.name, *view) for of in self.operands for view in of.pointers(form))

        return cache(places)

    def _kinds(self, form: F) -> Kinds:
        return self.kinds if isinstance(self.kinds, tuple) else self.kinds(form)

    def _compile_arguments(self, form: F) -> tuple[Any, ...]:
        ones = _ones(self._kinds(form))
        constant = (form,) if self.takes_form else ()
        return (self._pointers(form, {}), *ones, *constant, any_stream())

    def _pointers(self, form: F, tensors: Operands) -> tuple[Any, ...]:
        return tuple(
            [
                pointer(element, tensors.get(name), alignment)
                for name, element, alignment in self._places(form)
            ]
        )


@dataclass(frozen=True, eq=False)
class KernelSequence(Generic[P]):
    """Kernels that run one after the other and are called like one; a name is one tensor."""

    kernels: tuple[Kernel[Any, Any], ...]
    problems: Callable[[P, Any, Operands], tuple[Any, ...]]  # of the kernels, by a tactic
    results: Callable[[P, Mapping[str, Any]], dict[str, Any]]
    # Kernels with the same results for some problems of a target, unless a caller names what they
    # do not have, or make in another shape.
    shorter: tuple[KernelSequence[P], Callable[[P, str], bool]] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the operands."""
        return tuple(dict.fromkeys(name for kernel in self.kernels for name in kernel.names))

    def takes(
        self, problem: P, given: Operands, between: Mapping[str, ExpectedOperand[Any]]
    ) -> bool:
        """Return whether all that is named is an operand, and those `between` are the same here."""
        if not given.keys() <= set(self.names):
            return False
        if not between:
            return True
        return all(
            (operand.shape, operand.dtype) == (known.shape, known.dtype)
            for kernel, own in self._steps(problem, None, given)
            for operand in kernel.prepared(own).operands
            if (known := between.get(operand.name)) is not None
        )

    def _steps(
        self, problem: P, tactic: Any, given: Operands
    ) -> tuple[tuple[Kernel[Any, Any], Any], ...]:
        return tuple(zip(self.kernels, self.problems(problem, tactic, given), strict=True))

    def run(
        self, problem: P, settings: CompileSettings, tactic: Any = None, /, **given: Tensor | None
    ) -> dict[str, Any]:
        """Check everything, then launch; what is made and not named is allocated.

        A tactic replaces the chosen one.
        """
        _require_known(given, self.names)
        steps = self._steps(problem, tactic, given)
        made: dict[str, ExpectedOperand[Any]] = {}
        for kernel, own in steps:
            prepared = kernel.prepared(own)
            made |= {output.name: output for output in prepared.outputs}
            for operand in prepared.operands:
                if operand.name in given or operand.name not in made:
                    operand.require(own, given.get(operand.name))
            kernel.refuse(own, given)
        place = require_device(given.values())
        targets = {kernel.target_of(place) for kernel in self.kernels}
        if self.shorter is not None and tactic is None:
            sequence, serves = self.shorter
            last = {output.name for output in prepared.outputs}
            # What lies between the kernels may have another shape there.
            between = {name: made[name] for name in given.keys() & made.keys() - last}
            served = all(serves(problem, target) for target in targets)
            if served and sequence.takes(problem, given, between):
                return sequence.run(problem, settings, None, **given)
        tensors: Operands = given
        for kernel, own in steps:
            tensors = _with_outputs(tensors, kernel.prepared(own).outputs)
            kernel.run_checked(own, settings, None, place, tensors)
        return self.results(problem, tensors)


def place_of(kernel: Kernel[Any, Any]) -> str:
    """Return where a module holds a descriptor: module:NAME, or module:NAME.number in a sequence.

    Empty for one that no imported module of kernels holds.
    """
    inside = __name__.removesuffix("runtime.kernel")
    modules = [each for name, each in tuple(sys.modules.items()) if name.startswith(inside)]
    # The kernel's own module first: others may hold it under a name of theirs.
    modules.sort(key=lambda module: module.__name__ != kernel.entry.__module__)
    for module in modules:
        for name, value in tuple(vars(module).items()):
            if value is kernel:
                return f"{module.__name__}:{name}"
            if isinstance(value, KernelSequence):
                for number, held in enumerate(value.kernels):
                    if held is kernel:
                        return f"{module.__name__}:{name}.{number}"
    return ""


def request_of(kernel: Kernel[P, F], form: F) -> Mapping[str, Any] | None:
    """Return kernel and form as JSON data; None if they have no name outside of this process."""
    place = place_of(kernel)
    try:
        return {"kernel": place, "form": to_plain(form)} if place else None
    except InvalidArgument:
        return None


def renamed(kernel: Kernel[P, F], **names: str) -> Kernel[P, F]:
    """Return a kernel with other names of some operands."""
    operands = (
        replace(operand, name=names[operand.name], label=names[operand.name])
        if operand.name in names
        else operand
        for operand in kernel.operands
    )
    return replace(kernel, operands=tuple(operands))


def _require_known(given: Operands, names: tuple[str, ...]) -> None:
    for name in given:
        if name not in names:
            raise UnknownName.among("operand", name, names)


def _with_outputs(given: Operands, outputs: tuple[ExpectedOperand[P], ...]) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(given)
    device = None
    for output in outputs:
        if output.name not in tensors:
            memory = tensors.get(output.memory_of)
            if memory is None and not output.operand.updated:
                if device is None:
                    device = next(tensor.device for tensor in given.values() if tensor is not None)
                memory = output.allocate(device, tensors.get(output.operand.shape_of))
            tensors[output.name] = memory
    return tensors


def _target(form: Any) -> str:
    name: str = form.target
    return name


def _ones(kinds: Kinds) -> tuple[Any, ...]:
    return tuple(_ones(kind) if isinstance(kind, tuple) else kind(1) for kind in kinds)


def _typed(kinds: Kinds, numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        [
            _typed(kind, number) if isinstance(kind, tuple) else _number(kind, number)
            for kind, number in zip(kinds, numbers, strict=True)
        ]
    )


def _number(kind: Any, number: Any) -> Any:
    # Trap: minus zero equals zero, so a cache returns one for the other.
    return _kept_number(kind, number) if number or isinstance(number, int) else kind(number)


@lru_cache(maxsize=8192, typed=True)
def _kept_number(kind: Any, number: Any) -> Any:
    return kind(number)  # 4 us: as much as everything else that an argument costs
