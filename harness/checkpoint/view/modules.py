"""Group stored tensors into modules by suffix, and infer each one's format from dtypes and shapes.

`wq_a.weight` and `wq_a.scale` make the module `wq_a`. Inferred are the block format, the producer,
the direction of the scale, and the logical shape. The block size follows from shapes alone, never
from a config's claim. Checkpoints are mixed, so each module is judged by itself. Suffixes are those
of harness.model.tensors. Needs no torch.

Integers by group are recognised by schemes.py. A module that no format explains raises an error:
blocks of another size, codes without scales, scales without codes, two tensors for one part.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import LayoutMismatch, Refused, ShapeMismatch
from degarble.harness.checkpoint.read.types import StoredLayout, TensorEntry, shown, unknown_name
from degarble.harness.checkpoint.view.schemes import (
    fits_scales,
    packed_form,
    require_factors,
    suffix_parts,
)
from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS, MODELOPT
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.model.tensors import SUFFIXES, PartKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from degarble.harness.checkpoint.view.schemes import StorageScheme
    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat


class NamingConvention(StrEnum):
    """The convention by which a module's parts are named."""

    PLAIN = "plain"  # one tensor
    DEEPSEEK = "deepseek"  # .weight and .scale
    HUGGINGFACE = "huggingface"  # .weight and .weight_scale_inv
    MODELOPT = "modelopt"  # .weight, .weight_scale, .weight_scale_2, .input_scale
    COMPRESSED_TENSORS = "compressed-tensors"  # .weight_packed and divisor scales
    WEIGHT_SCALE = "weight-scale"  # .weight and .weight_scale: vLLM's MXFP4, compressed FP8
    INTEGERS = "integers"  # as a scheme names them


def _suffix_parts() -> dict[str, PartKind]:
    found: dict[str, PartKind] = {}
    for table in SUFFIXES.values():
        named = [(part, suffix) for part, suffix in table.by_part.items()]
        named += [(part, suffix) for (part, _), suffix in table.by_format.items()]
        for part, suffix in named:
            # One suffix may hold codes or plain values; the dtype distinguishes them.
            whole = PartKind.CODES if part is PartKind.VALUE else part
            assert found.setdefault(suffix, whole) is whole, f"{suffix} means two things"
    # A stack of experts joins the same words by an underscore (model.layouts, Fusion.tensor).
    stacked = {
        suffix.replace(".", "_", 1): part for suffix, part in found.items() if suffix != ".scale"
    }
    torchao = {
        "._weight_per_tensor_scale": PartKind.TENSOR_SCALE,
        "._weight_act_pre_scale": PartKind.CHANNEL_SCALE,
    }
    return found | stacked | suffix_parts() | torchao


_SUFFIX_PARTS: Mapping[str, PartKind] = MappingProxyType(_suffix_parts())
_ORDER = tuple(_SUFFIX_PARTS)
# The suffixes of a module are bits of one integer, so the table stays small.
_BIT = {suffix: 1 << position for position, suffix in enumerate(_ORDER)}
_CODES_BITS = sum(_BIT[suffix] for suffix in _ORDER if _SUFFIX_PARTS[suffix] is PartKind.CODES)

# Of stacks of experts that lie transposed: MXFP4 of gpt-oss, and NVFP4 as ModelOpt exports it.
BLOCKS, SCALES = "_blocks", "_scales"
STACK_BLOCK_SCALE, STACK_TENSOR_SCALE = "_weight_scale", "_weight_scale_2"
STACK_INPUT_SCALE = "_input_scale"
_STACK = 3  # axes

ELEMENT_OF_DTYPE = {"U8": "E2M1", "I8": "E2M1", "F4": "E2M1", "F8_E4M3": "E4M3"}
PAIRS = frozenset({"U8", "I8"})  # one element holds two codes
SCALE_OF_DTYPE = {
    "F8_E4M3": "E4M3",
    "F8_E8M0": "UE8M0",
    "U8": "UE8M0",
    "F32": "FP32",
    "BF16": "FP32",
    "F16": "FP32",
}
PLAIN_DTYPES = frozenset({"BF16", "F16", "F32", "F64", "I64", "I32", "I16", "BOOL"})


class StoredForm(NamedTuple):
    """One module as it is stored: its tensors, and how to decode them.

    `format` None: plain values. `shape` is logical; `block` is the area of one scale, from shapes.
    """

    module: str
    convention: NamingConvention
    parts: Mapping[PartKind, TensorEntry]
    format: BlockFormat | None
    dialect: Dialect | None
    direction: ScaleDirection | None
    nibble_order: NibbleOrder | None
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    scheme: StorageScheme | None = None  # of integers

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.parts.values())


@dataclass(frozen=True)
class ModuleTable:
    """The modules of one checkpoint, with the suffixes of each."""

    entries: Mapping[str, TensorEntry]
    configs: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)  # of quantisation

    @cached_property
    def suffixes(self) -> Mapping[str, int]:
        """Return the set of suffixes of each module, as bits; plain tensors have none."""
        bits: dict[str, int] = {}
        for name in self.entries:
            module, suffix = _split(name)
            if suffix:
                bits[module] = bits.get(module, 0) | _BIT[suffix]
        found: dict[str, int] = {}
        for name in self.entries:
            module, suffix = _split(name)
            if suffix and bits[module] & _CODES_BITS:
                found[module] = bits[module]
            else:  # `attn_hc.scale` ends like a scale, and is a parameter of its own
                found[name] = 0
        return found

    def is_matrix(self, module: str) -> bool:
        """Return whether a module holds a matrix, or a stack of them."""
        return len(self._whole(module).shape) >= 2

    def form(self, module: str) -> StoredForm:
        """Infer how to decode a module."""
        parts = self.parts(module)
        convention = _convention(parts)
        codes = parts[PartKind.CODES]
        packed = packed_form(module, parts, _split(codes.name)[1], self.configs)
        if packed is not None:
            fmt = packed.format
            return StoredForm(
                module,
                NamingConvention.INTEGERS,
                MappingProxyType(parts),
                fmt,
                CANONICAL,
                None,
                NibbleOrder.LOW_EVEN if fmt.packed else None,
                packed.shape,
                fmt.extents(*packed.shape),
                packed.scheme,
            )
        if codes.dtype in PLAIN_DTYPES:
            return _plain_form(module, parts)
        if PartKind.BLOCK_SCALE not in parts:
            raise LayoutMismatch(
                f"module {shown(module)}",
                f"{codes.dtype} {list(codes.shape)} without block scales",
                "codes with their scales, or unquantised values",
                "Look for its scales under another name, or in a shard that is missing.",
            )
        parts[PartKind.BLOCK_SCALE] = _without_unit_axes(parts[PartKind.BLOCK_SCALE], codes)
        if (wrong := misnamed(parts)) is not None:
            raise LayoutMismatch(
                f"{wrong[0]} of module {shown(module)}",
                shown(parts[wrong[0]].name),
                f"{shown(module)}{wrong[1]}, as loaders of NVFP4 look for it",
                "Rename the tensor.",
            )
        fmt, shape = _format(module, codes, parts[PartKind.BLOCK_SCALE])
        if fmt.tensor_scale != (PartKind.TENSOR_SCALE in parts):
            raise LayoutMismatch(
                f"module {shown(module)}",
                sorted(_split(entry.name)[1] for entry in parts.values()),
                f"{'a' if fmt.tensor_scale else 'no'} tensor scale, as {fmt.name} has",
                "Find out which tool wrote it; a scale is never assumed.",
            )
        require_factors(module, parts, shape[-1])
        packs_divisors = convention is NamingConvention.COMPRESSED_TENSORS
        direction = ScaleDirection.ENCODE if packs_divisors else ScaleDirection.DECODE
        dialect = COMPRESSED_TENSORS if packs_divisors else MODELOPT
        return StoredForm(
            module,
            convention,
            MappingProxyType(parts),
            fmt,
            dialect if fmt == NVFP4 else CANONICAL,
            direction if fmt.tensor_scale else None,
            NibbleOrder.LOW_EVEN if fmt.packed else None,
            shape,
            fmt.extents(*shape[-2:]),
        )

    def tensors(self, module: str) -> tuple[TensorEntry, ...]:
        """Return the tensors of a module, whether they fit together or not."""
        return tuple(self.entries[module + suffix] for suffix in self._suffixes_of(module))

    def parts(self, module: str) -> dict[PartKind, TensorEntry]:
        """Return the tensors of a module by part; a plain value counts as its codes."""
        parts: dict[PartKind, TensorEntry] = {}
        for suffix in self._suffixes_of(module):
            entry, part = self.entries[module + suffix], _SUFFIX_PARTS.get(suffix, PartKind.CODES)
            if part in parts:
                raise LayoutMismatch(
                    f"{part} of module {shown(module)}",
                    sorted(shown(tensor_entry.name) for tensor_entry in (entry, parts[part])),
                    "one tensor",
                    "Two conventions are mixed in one module; remove what does not belong.",
                )
            parts[part] = entry
        return parts

    def is_nvfp4_stack(self, name: str) -> bool:
        """Return whether a tensor holds NVFP4 codes [E, K / 2, N], as ModelOpt exports experts."""
        codes = self.entries.get(name)
        scales = {f"{name}{STACK_BLOCK_SCALE}", f"{name}{STACK_TENSOR_SCALE}"}
        is_coded = codes is not None and codes.dtype == "U8" and len(codes.shape) == _STACK
        return is_coded and scales <= self.entries.keys()

    def is_scale_of_stack(self, name: str) -> bool:
        """Return whether a tensor is a scale of such a stack."""
        ends = (STACK_TENSOR_SCALE, STACK_BLOCK_SCALE, STACK_INPUT_SCALE)
        return any(
            self.is_nvfp4_stack(name.removesuffix(end)) for end in ends if name.endswith(end)
        )

    def is_mxfp4_stack(self, base: str) -> bool:
        """Return whether blocks of MXFP4 codes and their scales lie under a name, as of gpt-oss."""
        return {f"{base}{BLOCKS}", f"{base}{SCALES}"} <= self.entries.keys()

    def is_of_stack(self, name: str) -> bool:
        """Return whether a tensor is one of a stack of experts that is no module by itself."""
        blocks = self.is_mxfp4_stack(name.removesuffix(BLOCKS).removesuffix(SCALES))
        return blocks or self.is_nvfp4_stack(name) or self.is_scale_of_stack(name)

    def layout(self) -> StoredLayout:
        """Return the layout of the whole checkpoint, by its strongest evidence."""
        if not self.entries:
            return StoredLayout.EMPTY
        kinds = Counter(self.suffixes.values())
        seen = {suffix for bits in kinds for suffix in _ORDER if bits & _BIT[suffix]}
        signs = (
            (".weight_packed", StoredLayout.COMPRESSED_TENSORS),
            ("_weight", StoredLayout.VLLM),
            (".weight_scale_2", StoredLayout.MODELOPT),
            (".scale", StoredLayout.OFFICIAL),
            (".weight_scale_inv", StoredLayout.HF_FP8),
        )
        # The first of these suffixes that occurs decides.
        for suffix, layout in signs:
            if suffix in seen:
                return layout
        plain = (name for name, bits in self.suffixes.items() if not bits)
        stacked = any(len(self.entries[name].shape) == 3 for name in plain)
        return StoredLayout.TRANSFORMERS if stacked else StoredLayout.BF16

    def _suffixes_of(self, module: str) -> tuple[str, ...]:
        bits = self.suffixes.get(module)
        if bits is None:
            raise unknown_name("module", module, self.suffixes)
        return _suffixes(bits)

    def _whole(self, module: str) -> TensorEntry:
        parts = (self.entries[module + suffix] for suffix in self._suffixes_of(module))
        return max(parts, key=lambda entry: entry.nbytes)


@lru_cache(maxsize=1024)  # a checkpoint has a dozen sets of suffixes
def _suffixes(bits: int) -> tuple[str, ...]:
    return tuple(suffix for suffix in _ORDER if bits & _BIT[suffix]) or ("",)


def _split(name: str) -> tuple[str, str]:
    """Split a tensor's name into module and suffix; the suffix is empty where none is known."""
    module, dot, last = name.rpartition(".")
    if dot + last in _SUFFIX_PARTS:
        return module, dot + last
    # Stacks join the suffix by an underscore: `experts.w13_weight_scale`.
    at = name.rfind("_weight", len(module))
    at = name.rfind("_input", len(module)) if at < 0 else at
    if at > 0 and name[at:] in _SUFFIX_PARTS:
        return name[:at], name[at:]
    return name, ""


def _without_unit_axes(scales: TensorEntry, codes: TensorEntry) -> TensorEntry:
    """Drop the axes within a block, which ModelOpt leaves in: [rows, 1, columns, 1]."""
    if len(scales.shape) == 2 * len(codes.shape) and set(scales.shape[1::2]) == {1}:
        return scales._replace(shape=scales.shape[::2])
    return scales


def _convention(parts: Mapping[PartKind, TensorEntry]) -> NamingConvention:
    suffixes = {part: _split(entry.name)[1] for part, entry in parts.items()}
    if suffixes.get(PartKind.CODES) == ".weight_packed":
        return NamingConvention.COMPRESSED_TENSORS
    if PartKind.TENSOR_SCALE in suffixes:
        return NamingConvention.MODELOPT
    by_scale = {
        ".scale": NamingConvention.DEEPSEEK,
        ".weight_scale_inv": NamingConvention.HUGGINGFACE,
        "_weight_scale_inv": NamingConvention.HUGGINGFACE,
        "": NamingConvention.PLAIN,
    }
    return by_scale.get(suffixes.get(PartKind.BLOCK_SCALE, ""), NamingConvention.WEIGHT_SCALE)


# Of NVFP4, by the suffix of the codes: what loaders look for, and nothing else.
_NVFP4_NAMES = {
    ".weight": {
        PartKind.BLOCK_SCALE: ".weight_scale",
        PartKind.TENSOR_SCALE: ".weight_scale_2",
        PartKind.INPUT_SCALE: ".input_scale",
    },
    ".weight_packed": {
        PartKind.BLOCK_SCALE: ".weight_scale",
        PartKind.TENSOR_SCALE: ".weight_global_scale",
        PartKind.INPUT_SCALE: ".input_global_scale",
    },
}


def suffix_of(entry: TensorEntry) -> str:
    """Return the suffix of a tensor's name; a stack joins it by an underscore."""
    suffix = _split(entry.name)[1]
    return f".{suffix[1:]}" if suffix.startswith("_") else suffix


def misnamed(parts: Mapping[PartKind, TensorEntry]) -> tuple[PartKind, str] | None:
    """Return a scale of an NVFP4 module whose suffix no loader looks for, and the right suffix.

    A module is NVFP4 where it has a tensor scale, or bytes of codes with E4M3 scales.
    """
    codes, scales = parts[PartKind.CODES], parts.get(PartKind.BLOCK_SCALE)
    by_bytes = codes.dtype in PAIRS and scales is not None and scales.dtype == "F8_E4M3"
    wanted = _NVFP4_NAMES.get(suffix_of(codes), {})
    if codes.dtype not in PAIRS or not (by_bytes or PartKind.TENSOR_SCALE in parts):
        return None
    for part, suffix in wanted.items():
        if part in parts and suffix_of(parts[part]) != suffix:
            return part, suffix
    return None


def _plain_form(module: str, parts: dict[PartKind, TensorEntry]) -> StoredForm:
    value = parts.pop(PartKind.CODES)
    scales = sorted(entry.name for part, entry in parts.items() if part is not PartKind.INPUT_SCALE)
    if scales:
        raise LayoutMismatch(
            f"module {shown(module)}",
            f"{value.dtype} values with {', '.join(map(shown, scales))}",
            "unquantised values without scales, or codes with them",
            "Find out whether the scales are left over, or the values were cast.",
        )
    kept = MappingProxyType({PartKind.VALUE: value, **parts})
    return StoredForm(
        module, NamingConvention.PLAIN, kept, None, None, None, None, value.shape, None
    )


def _format(
    module: str, codes: TensorEntry, scales: TensorEntry
) -> tuple[BlockFormat, tuple[int, ...]]:
    """Return the one block format that matches the element, scale and block size of two tensors."""
    element, scale = ELEMENT_OF_DTYPE.get(codes.dtype), SCALE_OF_DTYPE.get(scales.dtype)
    shape = codes.shape
    if codes.dtype in PAIRS and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    for fmt in BLOCK_FORMATS.values():
        # Of 128x128 and 1x128, the registry names the one that weights have first.
        if (fmt.element.name, fmt.scale.name) == (element, scale) and _fits(shape, scales, fmt):
            return fmt, shape
    known = ", ".join(
        f"{fmt.name} ({fmt.scale.name} scales a {fmt.block[0]}x{fmt.block[1]})"
        for fmt in BLOCK_FORMATS.values()
        if fmt.element.name == element
    )
    raise ShapeMismatch(
        f"module {shown(module)}",
        f"{codes.dtype} {list(codes.shape)} with {scales.dtype} scales {list(scales.shape)}:"
        f" {_block_told(shape, scales.shape)}",
        f"one of {known}" if known else f"codes in {', '.join(ELEMENT_OF_DTYPE)}",
        "Such a weight cannot be read here; convert it with the tool that wrote it.",
    )


def _fits(shape: tuple[int, ...], scales: TensorEntry, fmt: BlockFormat) -> bool:
    try:
        return fits_scales(shape, scales.shape, fmt)
    except Refused:
        return False


def _block_told(shape: tuple[int, ...], scales: tuple[int, ...]) -> str:
    if len(scales) != len(shape) or len(shape) < 2 or not all(scales) or not all(shape):
        return "no scale a block"
    rows, columns = (
        -(-whole // parts) for whole, parts in zip(shape[-2:], scales[-2:], strict=True)
    )
    return f"one scale a {rows}x{columns} block"
