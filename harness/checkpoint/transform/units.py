"""The vocabulary of conversions: options, units of work, proofs. Imports no sibling.

Owns the records. A *unit* makes one module of the target from modules of the source: it says which
tensors it makes, which ones of the source it takes in, which it leaves out and why, and how its
output is compared with its source. A conversion is the function that lists the units of a
checkpoint; what no unit takes in is copied byte by byte.

Refuses options that are unknown or of an unknown value, by name. Kept honest by
suites/checkpoint/transform/convert/test_job.py.
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
    from degarble.harness.checkpoint.view.logical import LogicalNames
    from degarble.harness.checkpoint.view.view import Checkpoint
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
    """What a conversion may be told; each one takes some of them, and the first choice by default.

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
        """Make options from names and values; what this conversion does not take is refused."""
        known = tuple(accepted)
        for name in given:
            if name not in known:
                raise UnknownName.among(f"option of {to}", name, known or ("none",))
        return replace(cls(), **given)  # type: ignore[arg-type]  # values are checked above

    def told(self, accepted: Iterable[str]) -> dict[str, object]:
        """Return what the conversion was told, as JSON holds it."""
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
    faults: tuple[str, ...] = ()  # what is wrong beside the values

    @property
    def holds(self) -> bool:
        """Whether the output is what the conversion promises."""
        return not self.beyond and not self.faults

    @property
    def is_exact(self) -> bool:
        """Whether no value changed."""
        return self.holds and not self.different


class Unit(NamedTuple):
    """One module of the target. `left_out`: source tensors that end here, with the reason."""

    key: str
    tensors: tuple[PlannedTensor, ...]
    sources: tuple[str, ...]
    make: Callable[[PlannedTensor], Iterator[Chunk]]
    check: Callable[[Checkpoint], Iterator[TensorProof]]
    left_out: tuple[tuple[str, str], ...] = ()
    formats: Mapping[str, str] = MappingProxyType({})  # logical name to format, where it changes
    require: Callable[[], object] | None = None  # refuses, before writing, what cannot be made


class Work(Protocol):
    """A conversion of one source, as those see it who write what lies beside its shards."""

    @property
    def to(self) -> str:
        """The conversion's name."""
        ...

    @property
    def options(self) -> Options:
        """What it was told."""
        ...

    @property
    def checkpoint(self) -> Checkpoint:
        """The source."""
        ...

    @property
    def conversion(self) -> Conversion:
        """The row of the registry."""
        ...

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is converted."""
        ...

    @property
    def copied(self) -> tuple[str, ...]:
        """Source tensors that stay as they are."""
        ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """Source tensors that end here, with the reason."""
        ...

    @property
    def names(self) -> TargetNames:
        """What the target's tensors are called."""
        ...


class Return(Protocol):
    """A way back, as those see it who take a layout apart."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The converted checkpoint."""
        ...

    @property
    def names(self) -> LogicalNames:
        """The names of what it was made from."""
        ...

    @property
    def options(self) -> Options:
        """What the conversion was told."""
        ...


@dataclass(frozen=True)
class Conversion:
    """A row of the registry: name, what it promises, its options, and the units it makes."""

    name: str
    promise: str
    options: tuple[str, ...]
    units: Callable[[Checkpoint, Options, TargetNames], Iterator[Unit]]
    returns: bool = False  # `back` can undo it where nothing was lost
    whole: bool = False  # the output is an engine's layout, with names of its own
