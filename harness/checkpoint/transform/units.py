"""Records of conversions: options, units of work, proofs.

A *unit* makes one module of the target from modules of the source. It lists the tensors it makes,
the source tensors it takes in, those it leaves out and why, and compares its output with its
source. A conversion is a function that lists the units of a checkpoint; tensors that no unit takes
are copied byte by byte. Imports no sibling.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from degarble.harness.base.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.transform.names import TargetNames
    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
    from degarble.harness.checkpoint.write.plan import PlannedTensor

    Chunk = bytes | memoryview | Tensor

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "scale": ("ue8m0", "fp32"),
        "per": ("block", "tensor"),
        "gpu": ("sm100", "sm90"),
        "direction": ("decode", "encode"),
        "backend": ("loader", "trtllm", "cutedsl", "flashinfer-cutlass", "vllm-cutlass"),
    }
)


@dataclass(frozen=True)
class Options:
    """Options of all conversions; each one accepts some of them. Defaults are the first choices.

    `only`: patterns of logical or stored names; empty: all that the conversion is for.
    """

    only: tuple[str, ...] = ()
    scale: str = "ue8m0"
    per: str = "block"
    gpu: str = "sm100"
    direction: str = "decode"  # of the stored block scale: what codes are multiplied by
    backend: str = "loader"  # whose kernels read the experts; loader: as vLLM's loader fills them

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UnknownName.among(name, getattr(self, name), known)

    @classmethod
    def of(cls, given: Mapping[str, object], accepted: Iterable[str], to: str) -> Options:
        """Return options from names and values; raise for one that this conversion lacks."""
        known = tuple(accepted)
        for name in given:
            if name not in known:
                raise UnknownName.among(f"option of {to}", name, known or ("none",))
        return replace(cls(), **given)  # type: ignore[arg-type]  # values are checked above

    def told(self, accepted: Iterable[str]) -> dict[str, object]:
        """Return the accepted options as JSON values."""
        taken = set(accepted)
        return {
            each.name: list(value) if isinstance(value, tuple) else value
            for each in fields(self)
            if each.name in taken
            for value in [getattr(self, each.name)]
        }


class Worst(NamedTuple):
    """The element that is furthest from its source, in units of its bound."""

    coordinate: tuple[int, ...]
    source: float
    output: float
    bound: float


class TensorProof(NamedTuple):
    """One output compared with its source, element by element."""

    tensor: str
    sources: tuple[str, ...]
    elements: int
    different: int  # not equal to the source's value
    beyond: int  # further from it than the bound
    bound: str  # what was allowed, in words
    worst: Worst | None = None
    faults: tuple[str, ...] = ()  # what is wrong apart from the values

    @property
    def holds(self) -> bool:
        """Whether the output is what the conversion promises."""
        return not self.beyond and not self.faults

    @property
    def is_exact(self) -> bool:
        """Whether no value changed."""
        return self.holds and not self.different


class Unit(NamedTuple):
    """One module of the target. `left_out`: source tensors that are left out, with the reason."""

    key: str
    tensors: tuple[PlannedTensor, ...]
    sources: tuple[str, ...]
    make: Callable[[PlannedTensor], Iterator[Chunk]]
    check: Callable[[Checkpoint], Iterator[TensorProof]]
    left_out: tuple[tuple[str, str], ...] = ()
    formats: Mapping[str, str] = MappingProxyType({})  # logical name to format, where it changes
    require: Callable[[], object] | None = None  # refuses, before writing, what cannot be made


class Work(Protocol):
    """A conversion of one source, as the writers of its configs use it."""

    @property
    def to(self) -> str:
        """The conversion's name."""
        ...

    @property
    def options(self) -> Options:
        """The options of the conversion."""
        ...

    @property
    def checkpoint(self) -> Checkpoint:
        """The source."""
        ...

    @property
    def conversion(self) -> Conversion:
        """The conversion, from the registry."""
        ...

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of the conversion."""
        ...

    @property
    def copied(self) -> tuple[str, ...]:
        """The source tensors that are copied."""
        ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """The source tensors that are left out, with the reason."""
        ...

    @property
    def names(self) -> TargetNames:
        """The names of the target's tensors."""
        ...


class Return(Protocol):
    """The inverse of a conversion, as the code that takes a layout apart uses it."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The converted checkpoint."""
        ...

    @property
    def names(self) -> LogicalNames:
        """The names of the conversion's source."""
        ...

    @property
    def options(self) -> Options:
        """The options of the conversion."""
        ...


@dataclass(frozen=True)
class Conversion:
    """A row of the registry: name, promise, options, and the function that lists its units."""

    name: str
    promise: str
    options: tuple[str, ...]
    units: Callable[[Checkpoint, Options, TargetNames], Iterator[Unit]]
    returns: bool = False  # `back` can undo it where nothing was lost
    whole: bool = False  # the output is an engine's layout, with names of its own
