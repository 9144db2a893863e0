"""Records of conversions: options, units of work, names in the target, proofs.

A *unit* makes one module of the target from modules of the source. It lists the tensors it makes,
the source tensors it takes in, those it leaves out and why, and it proves its own output.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import UnknownName
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.consumers import consumer_of
from degarble.harness.model.layouts import Spelling
from degarble.harness.model.tensors import PartKind, suffixes_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
    from degarble.harness.checkpoint.write.plan import PlannedTensor
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.layouts import Layout


# --------------------------------------------------------------------------------------------------
# Names, as the consumer that the target is written for reads them.
#
# A source whose spelling the consumer knows keeps it. Any other is renamed as a whole, copied
# tensors included, because no loader reads a checkpoint in two spellings. NVFP4 uses ModelOpt's
# suffixes in every spelling. FP8 scales are `.scale` in DeepSeek's and `.weight_scale_inv`
# elsewhere.


class TargetNames:
    """The names of one conversion's target, by those of its source.

    `source` None: a model that no config describes; its names stay.
    """

    def __init__(self, source: LogicalNames | None, to: str) -> None:
        self._source = source
        self._to = to

    @cached_property
    def layout(self) -> Layout | None:
        """The layout that spells the target, with the source's suffixes for scales."""
        names = self._source
        if names is None:
            return None
        consumer = consumer_of(self._to, names.config.family)
        known = consumer.layouts(names.config)
        if not known or names.layout.fusions or consumer.knows(names.layout, names.config):
            return names.layout  # what is fused, and a family it does not read, is refused by name
        return replace(known[0], fusions=())

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        names, layout = self._source, self.layout
        if names is None or layout is None or layout.spelling is names.layout.spelling:
            return {}
        return {
            names.module_of(parameter): layout.path_of(parameter, names.config)
            for parameter in names.present.values()
        }

    @cached_property
    def _tensors(self) -> Mapping[str, str]:
        """Map source tensor to target tensor, for every module whose path or suffix changes."""
        names, layout = self._source, self.layout
        if names is None or layout is None:
            return {}
        found = {}
        theirs = suffixes_named(layout.suffixes)
        for before, after in self._modules.items():
            form = names.table.form(before)
            weight = form.format.name if form.format else "BF16"
            for part, entry in form.parts.items():
                suffix = entry.name.removeprefix(before)
                if part is PartKind.BLOCK_SCALE:  # FP8's alone differs, and packed ones keep theirs
                    suffix = theirs.suffix(part, weight)
                found[entry.name] = after + suffix
        return found

    def module(self, name: str) -> str:
        """Return the target's name of a module of the source."""
        return self._modules.get(name, name)

    def tensor(self, name: str) -> str:
        """Return the target's name of a copied tensor."""
        return self._tensors.get(name, name)

    def sibling(self, module: str, name: str) -> str:
        """Return the name of a new module that shares the parent of one of the source."""
        return f"{self.module(module).rpartition('.')[0]}.{name}"

    def parts(self, module: str, fmt: BlockFormat | None) -> Mapping[PartKind, str]:
        """Name the tensors of a target module that is written in a format; None: BF16."""
        spelling = self.layout.spelling if self.layout else Spelling.HUGGINGFACE
        table = suffixes_named("deepseek" if spelling is Spelling.DEEPSEEK else "huggingface")
        parts = [PartKind.VALUE] if fmt is None else [PartKind.CODES, PartKind.BLOCK_SCALE]
        if fmt is not None and fmt.tensor_scale:
            parts.append(PartKind.TENSOR_SCALE)
        weight = "BF16" if fmt is None else fmt.name
        return {part: module + table.suffix(part, weight) for part in parts}


# --------------------------------------------------------------------------------------------------
# Options, units, proofs. A conversion is a function that lists the units of a checkpoint; tensors
# that no unit takes are copied byte by byte.

if TYPE_CHECKING:
    Chunk = bytes | memoryview | Tensor

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "scale": ("ue8m0", "fp32"),
        "per": ("block", "tensor"),
        "gpu": ("sm100", "sm90"),
        "direction": ("decode", "encode"),
        "tensor_scales": ("exact", "nearest"),
        "backend": ("loader", "trtllm", "cutedsl", "flashinfer-cutlass", "vllm-cutlass"),
    }
)


@dataclass(frozen=True)
class ConversionOptions:
    """Options of all conversions; each one accepts some of them. Defaults are the first choices.

    `only`: patterns of logical or stored names; empty: all that the conversion is for.
    """

    only: tuple[str, ...] = ()
    scale: str = "ue8m0"
    per: str = "block"
    gpu: str = "sm100"
    direction: str = "decode"  # of the stored block scale: what codes are multiplied by
    tensor_scales: str = "exact"  # nearest: divisors may be one unit in the last place off
    backend: str = "loader"  # whose kernels read the experts; loader: as vLLM's loader fills them

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UnknownName.among(name, getattr(self, name), known)

    @classmethod
    def from_values(
        cls, given: Mapping[str, object], accepted: Iterable[str], to: str
    ) -> ConversionOptions:
        """Return options from names and values; raise for one that this conversion lacks."""
        known = tuple(accepted)
        for name in given:
            if name not in known:
                raise UnknownName.among(f"option of {to}", name, known or ("none",))
        return replace(cls(), **given)  # type: ignore[arg-type]  # values are checked above

    def to_json(self, accepted: Iterable[str]) -> dict[str, object]:
        """Return the accepted options as JSON values."""
        taken = set(accepted)
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if field.name in taken
            for value in [getattr(self, field.name)]
        }


class FurthestElement(NamedTuple):
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
    worst: FurthestElement | None = None
    faults: tuple[str, ...] = ()  # what is wrong apart from the values

    @property
    def holds(self) -> bool:
        """Whether the output is what the conversion promises."""
        return not self.beyond and not self.faults

    @property
    def is_exact(self) -> bool:
        """Whether no value changed."""
        return self.holds and not self.different


ONE_ULP = "one unit in the last place of float32"
UNKNOWN_NAMES = "The names were not compared: no loader of this model in these formats is known."


class NameProof(NamedTuple):
    """The result of comparing names. `extra`: tensors of the source that belong to no parameter.

    `other_formats`: formats that stay and that the consumer does not load, with their linears.
    """

    consumer: str
    read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    passed_over: int
    extra: tuple[str, ...]
    other_formats: dict[str, int]

    @property
    def holds(self) -> bool:
        """Whether the consumer finds all that it reads, and nothing else of the model."""
        return not self.missing and not self.unexpected

    def lines(self) -> Iterator[str]:
        """Yield the verdict, then each wrong name."""
        verdict = "The names are" if self.holds else "The names are not"
        yield f"{verdict} those that {self.consumer} reads: {self.read} tensors."
        for name in self.missing:
            yield f"{shown(name)}: it reads this tensor, which is missing"
        for name in self.unexpected:
            yield f"{shown(name)}: it has no place for this tensor"
        if self.passed_over:
            yield f"It passes {self.passed_over} tensors of the drafter over."
        for name in self.extra:
            yield f"{shown(name)} belongs to no parameter and was copied from the source"
        for word, count in self.other_formats.items():
            yield f"It does not load {word}, in which {count} linears stay."


@dataclass(frozen=True)
class ConversionProof:
    """The result of a proof. `left_out`: source tensors that are left out, with the reason."""

    to: str
    tensors: tuple[TensorProof, ...]
    copied: int
    faults: tuple[str, ...]  # of the whole: tensors lost, or made by nobody
    left_out: Mapping[str, str]
    names: NameProof | None = None  # None: of a model whose loaders are not known

    @property
    def holds(self) -> bool:
        """Whether the target is what the conversion promises."""
        named = self.names is None or self.names.holds
        return named and not self.faults and all(tensor.holds for tensor in self.tensors)

    @property
    def broken(self) -> tuple[TensorProof, ...]:
        """The tensors that break the promise."""
        return tuple(tensor for tensor in self.tensors if not tensor.holds)

    @property
    def exact(self) -> int:
        """The number of converted tensors that kept every value."""
        return sum(tensor.is_exact for tensor in self.tensors)

    def _moved(self) -> Iterator[str]:
        moved = [each for each in self.tensors if each.bound == ONE_ULP and each.different]
        if moved:
            count = sum(each.different for each in moved)
            yield f"{count:,} elements of {len(moved)} modules moved, by {ONE_ULP} at most."

    def lines(self) -> Iterator[str]:
        """Yield one line for the whole, and some for each tensor that breaks the promise."""
        verdict = "holds" if self.holds else "is broken"
        yield (
            f"The promise of {self.to} {verdict}: {len(self.tensors)} converted"
            f" ({self.exact} exact), {self.copied} copied, {len(self.left_out)} left out."
        )
        yield from self._moved()
        yield from self.names.lines() if self.names else (UNKNOWN_NAMES,)
        yield from self.faults
        for proof in self.broken:
            yield f"{proof.tensor}: {proof.beyond} of {proof.elements} beyond {proof.bound}"
            yield from (f"  {fault}" for fault in proof.faults)
            if proof.worst:
                where = ", ".join(map(str, proof.worst.coordinate))
                yield (
                    f"  worst at [{where}]: {proof.worst.output:g}, source {proof.worst.source:g},"
                    f" allowed {proof.worst.bound:g}"
                )


class ConversionUnit(NamedTuple):
    """One module of the target. `left_out`: source tensors that are left out, with the reason."""

    key: str
    tensors: tuple[PlannedTensor, ...]
    sources: tuple[str, ...]
    make: Callable[[PlannedTensor], Iterator[Chunk]]
    check: Callable[[Checkpoint], Iterator[TensorProof]]
    left_out: tuple[tuple[str, str], ...] = ()
    formats: Mapping[str, str] = MappingProxyType({})  # logical name to format, where it changes
    require: Callable[[], object] | None = None  # refuses, before writing, what cannot be made


@dataclass(frozen=True)
class Conversion:
    """A row of the registry: name, promise, options, and the function that lists its units."""

    name: str
    promise: str
    options: tuple[str, ...]
    units: Callable[[Checkpoint, ConversionOptions, TargetNames], Iterator[ConversionUnit]]
    returns: bool = False  # `back` can undo it where nothing was lost
    whole: bool = False  # the output is an engine's layout, with names of its own
