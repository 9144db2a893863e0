"""Find a model's parameters in a checkpoint by the names and operations of transformers.

A parameter has one stored module, or several: transformers renames modules, stacks the matrices of
experts, and joins gates with up projections. Its conversion mapping says how. The same operations
are applied here to numbers as the scheme of the file decodes them, so a quantised module is found
by the name that its plain weight would have.

transformers is not imported: the mapping is given. Of the files only headers are read until a value
is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import LayoutMismatch, Refused, ShapeMismatch, UnreadableFile
from degarble.harness.checkpoint.read.types import shown, unknown_name
from degarble.harness.checkpoint.view.modules import (
    BLOCKS,
    SCALES,
    STACK_BLOCK_SCALE,
    STACK_INPUT_SCALE,
    STACK_TENSOR_SCALE,
)
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import MXFP4, NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, dequantise
from degarble.harness.formats.weight import DerivedWeight
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.weight import Weight

# Scales of caches and of attention belong to no parameter.
_CACHE_SCALES = re.compile(r"\.(?:[kqv]|output)_(?:scale|zero_point)$")
# ModelOpt stores them with the projections, compressed-tensors with the attention module.
_CACHED_BY = re.compile(r"(.+?)(?:\.[kv]_proj)?\.([kv])_scale$")
_SHOWN = 3  # stored tensors that an error names
_STACK = 3  # axes of experts in one tensor
_OF_STACKS = (STACK_TENSOR_SCALE, STACK_BLOCK_SCALE, STACK_INPUT_SCALE)
_ONE_MODEL = "Check that config.json and shards are of one model."


class RenamedTensor(NamedTuple):
    """The parameter that a stored tensor belongs to, and the converter whose pattern it matches."""

    parameter: str
    pattern: str = ""
    converter: Any = None


@dataclass(frozen=True)
class NamingRules:
    """How the parameters of a model are named in files.

    `wanted`: their shapes by name. `tied`: further names of a parameter. `ignored`: patterns of
    stored names that the model leaves out. `model`: on the meta device, for operations that ask it.
    """

    wanted: Mapping[str, tuple[int, ...]]
    rename: Callable[[str], RenamedTensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    model: Any = None


@dataclass
class ParameterSource:
    """The stored modules of a parameter, in the order of their numbers, by the pattern of each."""

    converter: Any
    modules: dict[str, list[str]] = field(default_factory=dict)

    @property
    def single(self) -> str | None:
        """Return the module whose values are the parameter's own; None where they are converted."""
        return next(iter(self)) if self.converter is None else None

    def __iter__(self) -> Iterator[str]:
        return (module for several in self.modules.values() for module in several)


# --------------------------------------------------------------------------------------------------
# Stored modules. The experts of gpt-oss are no StoredWeight: their MXFP4 codes lie transposed and
# in blocks of 16 bytes. ModelOpt writes NVFP4 of stacks [E, K, N] with the codes along K as well.

_WHOLE = slice(None)


class StoredModule(NamedTuple):
    """One stored module: shape, name of its format (empty: values), its tensors, and a reader."""

    name: str
    shape: tuple[int, ...]
    format: str
    has_input_scale: bool
    entries: tuple[TensorEntry, ...]
    weight: Callable[[], Weight]
    has_factors: bool = False  # of its input


def packed_experts(checkpoint: Checkpoint, name: str) -> StoredModule:
    """Return a stack [E, K, M] whose codes are stored as [E, M, K / 32, 16]."""
    codes, scales = (checkpoint.entry(f"{name}{each}") for each in (BLOCKS, SCALES))
    experts, rows, *blocks = codes.shape
    columns = 2 * prod(blocks)
    if (*codes.shape[:-1], MXFP4.block[1] // 2) != (*scales.shape, codes.shape[-1]):
        raise ShapeMismatch(
            f"{shown(name)}{BLOCKS}", f"{list(codes.shape)}, scales {list(scales.shape)}",
            "16 bytes of codes a scale", _ONE_MODEL,
        )  # fmt: skip

    def some(part: slice, dtype: torch.dtype) -> Tensor:
        own = checkpoint.tensor(codes.name)[part]
        stack = QuantisedTensor(
            codes=own.reshape(len(own), rows, columns // 2),
            block_scale=checkpoint.tensor(scales.name)[part],
            tensor_scale=None, format=MXFP4, dialect=CANONICAL, layout=LINEAR, direction=None,
            nibble_order=NibbleOrder.LOW_EVEN, shape=(len(own), rows, columns),
        )  # fmt: skip
        return dequantise(stack, dtype).transpose(1, 2)

    shape = (experts, columns, rows)

    def weight() -> Weight:
        return DerivedWeight(
            make=partial(some, _WHOLE), extents=shape, from_codes=True, make_rows=some
        )

    return StoredModule(
        name, shape, MXFP4.name, has_input_scale=False, entries=(codes, scales), weight=weight
    )


def nvfp4_experts(checkpoint: Checkpoint, name: str) -> StoredModule:
    """Return a stack [E, K, N] whose codes lie [E, K / 2, N], and scales [E, K / 16, N]."""
    codes, scales = checkpoint.entry(name), checkpoint.entry(f"{name}{STACK_BLOCK_SCALE}")
    tensor_scale = checkpoint.entry(f"{name}{STACK_TENSOR_SCALE}")
    given = checkpoint.entries.get(f"{name}{STACK_INPUT_SCALE}")
    experts, halves, rows = codes.shape
    columns, block = 2 * halves, NVFP4.block[1]
    fits = columns % block == 0 and scales.shape == (experts, columns // block, rows)
    if not fits or scales.dtype != "F8_E4M3" or tensor_scale.elements != 1:
        raise ShapeMismatch(
            f"{shown(name)}",
            f"{list(codes.shape)}, scales {scales.dtype} {list(scales.shape)}, tensor scale"
            f" {list(tensor_scale.shape)}",
            "E4M3 scales of 16 inputs each, and one tensor scale", _ONE_MODEL,
        )  # fmt: skip

    def some(part: slice, dtype: torch.dtype) -> Tensor:
        own = checkpoint.tensor(name)[part].transpose(1, 2).contiguous()
        held = checkpoint.tensor(scales.name)[part].transpose(1, 2).contiguous()
        stack = QuantisedTensor(
            codes=own, block_scale=held.view(torch.uint8),
            tensor_scale=checkpoint.tensor(tensor_scale.name).float().reshape(()),
            format=NVFP4, dialect=MODELOPT, layout=LINEAR, direction=ScaleDirection.DECODE,
            nibble_order=NibbleOrder.LOW_EVEN, shape=(len(own), rows, columns),
        )  # fmt: skip
        return dequantise(stack, dtype).transpose(1, 2)

    shape = (experts, columns, rows)

    def weight() -> Weight:
        scale = None if given is None else checkpoint.tensor(given.name).float().reshape(())
        return DerivedWeight(
            make=partial(some, _WHOLE), extents=shape, from_codes=True, make_rows=some,
            input_scale=scale,
        )  # fmt: skip

    entries = (codes, scales, tensor_scale, *([] if given is None else [given]))
    return StoredModule(name, shape, NVFP4.name, given is not None, entries, weight)


# --------------------------------------------------------------------------------------------------


class ConvertedWeights(Mapping[str, "Weight"]):
    """The parameters of a model by their names in it; each is read from the files at access."""

    def __init__(self, checkpoint: Checkpoint, rules: NamingRules) -> None:
        self._checkpoint = checkpoint
        self._rules = rules
        self.sources: dict[str, ParameterSource] = {}
        self.unexpected: list[str] = []
        self.cache_scales: dict[str, str] = {}  # stored tensors, by `<attention>.k_scale`
        self._locate()

    def __getitem__(self, name: str) -> Weight:
        source = self.sources.get(name)
        if source is None:
            raise KeyError(name) from unknown_name("parameter", name, self.sources)
        modules = self.held(name)
        if source.single is not None:
            return modules[0].weight()
        shape, coded = self._rules.wanted[name], any(each.format for each in modules)
        by_part = partial(self._converted_rows, name) if self._stacks(name) else None
        return DerivedWeight(
            make=partial(self._converted, name), extents=shape, from_codes=coded,
            make_rows=by_part, make_elements=partial(self._elements, name),
            input_scale=self._input_scales(source, modules, shape),
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def module(self, name: str) -> StoredModule:
        """Return one stored module."""
        checkpoint = self._checkpoint
        if f"{name}{BLOCKS}" in checkpoint.entries:
            return packed_experts(checkpoint, name)
        if checkpoint.table.is_nvfp4_stack(name):
            return nvfp4_experts(checkpoint, name)
        stored = checkpoint.stored(name)
        form = stored.form
        entries, fmt = tuple(form.parts.values()), form.format.name if form.format else ""
        scaled = PartKind.INPUT_SCALE in form.parts
        factors = PartKind.CHANNEL_SCALE in form.parts
        return StoredModule(name, stored.shape, fmt, scaled, entries, stored.weight, factors)

    def held(self, name: str) -> tuple[StoredModule, ...]:
        """Return the stored modules of a parameter; tied ones are one."""
        source = self.sources[name]
        return tuple(map(self.module, source if source.single is None else (source.single,)))

    def _input_scales(
        self, source: ParameterSource, modules: tuple[StoredModule, ...], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return the input scale of each expert, the largest of its matrices; None without one."""
        alike = all(len(each) == shape[0] for each in source.modules.values())
        if not (alike and len(shape) == _STACK and all(each.has_input_scale for each in modules)):
            return None
        found = [each.weight().input_scale for each in modules]
        scales = torch.stack([each.float().reshape(()) for each in found if each is not None])
        return scales.reshape(-1, shape[0]).amax(0)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a parameter in the files."""
        entries = (each for module in self.sources[name] for each in self.module(module).entries)
        return sum(entry.nbytes for entry in entries)

    def require_complete(self) -> None:
        """Raise unless every parameter is there with its shape, and nothing else is."""
        missing = [name for name in self._rules.wanted if name not in self.sources]
        if missing:
            stem = f"{missing[0].rpartition('.')[0]}."
            near = ", ".join(shown(each) for each in self.unexpected if each.startswith(stem))
            others = len(self.unexpected)
            raise UnreadableFile(
                "weights",
                f"{len(missing)} parameters missing, such as {missing[0]}"
                + (f"; stored are {near}" if near else "")
                + (
                    f"; {others} stored without a parameter, such as {shown(self.unexpected[0])}"
                    if others and not near
                    else ""
                ),
                "every parameter of the model that config.json describes, in a scheme that is read"
                " here",
                "Store it as one of docs/families.md, or fetch the shards that are missing."
                if near
                else "Fetch the missing shards, or the config.json that belongs to these ones"
                + (", or rename what is stored." if others else "."),
            )
        for name in self.unexpected:
            base = next((name.removesuffix(e) for e in _OF_STACKS if name.endswith(e)), "")
            if base in self._checkpoint.entries:
                codes = self._checkpoint.entry(base)
                raise LayoutMismatch(
                    f"experts in one stack {shown(base)}",
                    f"{codes.dtype} {list(codes.shape)} with {shown(name)}",
                    "stacks in NVFP4 as ModelOpt stores them, in MXFP4 as gpt-oss does, or in BF16",
                    "Store them so, or one matrix an expert, with the tool that wrote them.",
                )
        if self.unexpected:
            raise LayoutMismatch(
                "tensors of the checkpoint",
                f"{len(self.unexpected)} without a parameter, such as {self.unexpected[0]}",
                "tensors of parameters that the model has by its config.json", _ONE_MODEL,
            )  # fmt: skip
        for name, shape in self._rules.wanted.items():
            self._require_shape(name, shape)
            self._require_alike(name)

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        stored = {module: self.module(module).shape for module in self.sources[name]}
        found: tuple[int, ...] | None
        if self.sources[name].single is not None:
            found = next(iter(stored.values()))
        else:
            try:
                found = tuple(self._converted(name, None).shape)
            except (RuntimeError, ValueError, LookupError, TypeError):
                found = None  # matrices that do not fit together
        if found != shape:
            places = [f"{shown(module)} {list(each)}" for module, each in stored.items()]
            more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
            raise ShapeMismatch(
                name, f"{', '.join(places[:_SHOWN])}{more}",
                f"{list(shape)}, as config.json implies", _ONE_MODEL,
            )  # fmt: skip

    def _require_alike(self, name: str) -> None:
        """Raise if a parameter is stored under two names with two values."""
        first, *others = self.sources[name]
        if self.sources[name].converter is None:
            for other in others:
                if self._bytes(first) != self._bytes(other):
                    raise LayoutMismatch(
                        name, f"{shown(first)} and {shown(other)} with different values",
                        "one tensor, or two alike: config.json ties them",
                        "Set tie_word_embeddings to false in config.json if they are two weights.",
                    )  # fmt: skip

    def _bytes(self, module: str) -> list[memoryview]:
        return [self._checkpoint.raw(entry.name) for entry in self.module(module).entries]

    def _stacks(self, name: str) -> bool:
        """Return whether each module is one entry of the first axis, such as an expert."""
        shape = self._rules.wanted[name]
        counts = {len(modules) for modules in self.sources[name].modules.values()}
        if len(shape) < 3 or counts != {shape[0]}:
            return False
        try:
            first = self._converted(name, None, slice(0, 1))
        except (RuntimeError, ValueError, LookupError, TypeError):
            return False  # an operation that needs all modules
        return tuple(first.shape) == (1, *shape[1:])

    def _converted_rows(self, name: str, part: slice, dtype: torch.dtype) -> Tensor:
        """Return a part of a stack; pages of the files that it read are released."""
        made = self._converted(name, dtype, part)
        for modules in self.sources[name].modules.values():
            for module in modules[part]:
                for entry in self.module(module).entries:
                    self._checkpoint.release(entry.name)
        return made

    def _elements(self, name: str, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return what codes of FP8 of a part of a stack stand for, and the scale of each."""
        if not self._stacks(name):
            return None
        read = {
            module: self.module(module).weight().elements(_WHOLE)
            for modules in self.sources[name].modules.values()
            for module in modules[part]
        }
        known = {module: each for module, each in read.items() if each is not None}
        if len(known) < len(read):
            return None
        numbers = self._moved(name, part, lambda module: known[module][0])
        return numbers, self._moved(name, part, lambda module: known[module][1])

    def _converted(self, name: str, dtype: torch.dtype | None, part: slice = _WHOLE) -> Tensor:
        """Apply the operations of transformers to decoded values; without a dtype, to shapes."""
        # Operations only move values: plain ones are widened after them, as one tensor.
        plain = not any(self.module(module).format for module in self.sources[name])
        made = self._moved(name, part, lambda module: self._values(module, dtype, plain=plain))
        return made if dtype is None else made.to(dtype)

    def _moved(self, name: str, part: slice, read: Callable[[str], Tensor]) -> Tensor:
        """Apply the operations of transformers to what is read of each module."""
        source = self.sources[name]
        made: Any = {
            pattern: [read(module) for module in modules[part]]
            for pattern, modules in source.modules.items()
        }
        converter = source.converter
        patterns = {"source_patterns": converter.source_patterns}
        patterns["target_patterns"] = converter.target_patterns
        model = self._rules.model
        for operation in converter.operations:
            made = operation.convert(
                made, full_layer_name=name, model=model, config=model.config, **patterns
            )
        # One of several targets is the one whose pattern the name has.
        several = len(made) > 1
        found = next(each for key, each in made.items() if not several or _has(name, key))
        tensor: Tensor = found[0] if isinstance(found, list) else found
        return tensor

    def _values(self, module: str, dtype: torch.dtype | None, *, plain: bool) -> Tensor:
        stored = self.module(module)
        if dtype is None:
            return torch.empty(stored.shape, device="meta")
        weight = stored.weight()
        return weight.value if plain and weight.value is not None else weight.values(dtype)

    def _locate(self) -> None:
        rules = self._rules
        ignored = [*map(re.compile, rules.ignored), _CACHE_SCALES]
        for module in sorted(self._modules(), key=_natural):
            plain = self._plain_name(module)
            cached = _CACHED_BY.match(plain)
            if cached is not None:
                side = rules.rename(f"{cached[1]}.{cached[2]}_scale").parameter
                self.cache_scales[side] = plain
            found = rules.rename(plain)
            targets = [found.parameter]
            if found.converter is not None:
                first, *others = found.converter.target_patterns
                targets += [found.parameter.replace(first, other) for other in others]
            known = [rules.tied.get(target, target) for target in targets]
            known = [each for each in known if each in rules.wanted]
            for each in known:
                source = self.sources.setdefault(each, ParameterSource(found.converter))
                source.modules.setdefault(found.pattern, []).append(module)
            if not known and not any(each.search(plain) for each in ignored):
                self.unexpected.append(plain)

    def _modules(self) -> Iterator[str]:
        """Yield the stored modules; codes and scales of packed experts are one."""
        table = self._checkpoint.table
        names = table.suffixes
        for name in names:
            if table.is_scale_of_stack(name):
                continue
            base = name.removesuffix(BLOCKS).removesuffix(SCALES)
            if not table.is_mxfp4_stack(base):
                yield name
            elif name.endswith(BLOCKS):
                yield base

    def _plain_name(self, module: str) -> str:
        """Return the name that a module's weight has where it is not quantised."""
        table = self._checkpoint.table
        if not table.suffixes.get(module):
            return module
        try:
            codes = table.parts(module)[PartKind.CODES]
        except Refused:
            return module  # two tensors for one part: refused when it is read
        joined = codes.name.startswith(f"{module}_")
        return f"{module}_weight" if joined else f"{module}.weight"


def _has(name: str, pattern: str) -> bool:
    return pattern.replace("*.", "0.") in name


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort numbers by value, as transformers does before it stacks."""
    words = (word for part in name.split(".") for word in re.findall(r"\d+$|.+?(?=\d*$)", part))
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in words)
