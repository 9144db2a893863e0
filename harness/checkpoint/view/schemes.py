"""Recognise modules of integers by group: AWQ, GPTQ, compressed-tensors, ModelOpt, torchao.

A scheme says which suffixes its tensors have, how codes lie in stored words, and what zero points
mean. The number of bits, the group size and the logical shape follow from shapes alone; a config
decides only what no shape shows, the offset of GPTQ's zero points. A module whose tensors are
missing, or do not fit each other, raises an error that names the tensor. Needs no torch.

Sources: AutoAWQ utils/packing_utils.py and WQLinear_GEMM; AutoGPTQ nn_modules/qlinear and GPTQModel
(`gptq_v2`); compressed-tensors 0.20 compressors/pack_quantized and naive_quantized; ModelOpt 0.47
torch/export/quant_utils (pack_int4_in_uint8); torchao 0.18
prototype/safetensors and quantization/quantize_/workflows.
Shape letters: N rows, K columns of the logical matrix, G groups along K, W words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import DtypeMismatch, LayoutMismatch, ShapeMismatch
from degarble.harness.checkpoint.read.file_access import read_small
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.formats.number_formats import BLOCK_FORMATS, TABLE_FORMATS, scale_shape
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.formats.number_formats import BlockFormat

    Parts = Mapping[PartKind, TensorEntry]
    Shape = tuple[int, ...]

WORD = 32  # bits
_BYTE = 8
FLOATS = frozenset({"F16", "BF16", "F32"})
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each nibble of a word, lowest first
_READABLE_BITS = (4, 8)


@dataclass(frozen=True)
class StorageScheme:
    """How one exporter stores integer codes, scales and zero points.

    `transposed`: codes lie [K, N] and scales [G, N]. `packed_along` is the axis, rows or columns of
    the stored tensor, along which a word's codes follow each other; None: one code an element.
    `signed`: stored integers are two's complement, or offset by half of the codes if packed.
    """

    name: str
    exporters: str
    suffixes: Mapping[PartKind, str]
    required: tuple[PartKind, ...]
    code_dtypes: frozenset[str]
    transposed: bool = False
    packed_along: int | None = None  # stored axis
    zeros_along: int | None = None
    order: tuple[int, ...] | None = None  # of the codes in a word, lowest first; None: ascending
    signed: bool = False
    twos_complement: bool = False  # packed codes as well
    word: int = WORD
    zero_added: int = 0  # to a stored zero point


class PackedForm(NamedTuple):
    """What the shapes of a module say."""

    scheme: StorageScheme
    format: BlockFormat
    shape: tuple[int, int]


_CODES, _SCALE, _ZERO = PartKind.CODES, PartKind.BLOCK_SCALE, PartKind.ZERO_POINT
_QWEIGHT = {_CODES: ".qweight", _SCALE: ".scales", _ZERO: ".qzeros"}

AWQ = StorageScheme(
    name="awq",
    exporters="AutoAWQ, llm-awq, transformers (quant_method awq, version gemm)",
    suffixes=_QWEIGHT,
    required=(_SCALE, _ZERO),
    code_dtypes=frozenset({"I32"}),
    transposed=True,
    packed_along=1,
    zeros_along=1,
    order=_AWQ_ORDER,
)
GPTQ = StorageScheme(
    name="gptq",
    exporters="AutoGPTQ, GPTQModel (checkpoint_format gptq)",
    suffixes={**_QWEIGHT, PartKind.GROUP_INDEX: ".g_idx"},
    required=(_SCALE, _ZERO),
    code_dtypes=frozenset({"I32"}),
    transposed=True,
    packed_along=0,
    zeros_along=1,
    zero_added=1,  # AutoGPTQ subtracts 1 before it packs
)
GPTQ_V2 = replace(
    GPTQ, name="gptq_v2", exporters="GPTQModel (checkpoint_format gptq_v2)", zero_added=0
)
CT_PACKED = StorageScheme(
    name="pack-quantized",
    exporters="compressed-tensors, llm-compressor (W4A16, W8A16)",
    suffixes={
        _CODES: ".weight_packed",
        _SCALE: ".weight_scale",
        _ZERO: ".weight_zero_point",
        PartKind.GROUP_INDEX: ".weight_g_idx",
        PartKind.LOGICAL_SHAPE: ".weight_shape",
    },
    required=(_SCALE, PartKind.LOGICAL_SHAPE),
    code_dtypes=frozenset({"I32"}),
    packed_along=1,
    zeros_along=0,
    signed=True,
)
CT_INTEGERS = StorageScheme(
    name="int-quantized",
    exporters="compressed-tensors, llm-compressor (W8A8), ModelOpt (INT8_SQ)",
    suffixes={
        _CODES: ".weight",
        _SCALE: ".weight_scale",
        _ZERO: ".weight_zero_point",
        PartKind.INPUT_SCALE: ".input_scale",
        PartKind.CHANNEL_SCALE: ".pre_quant_scale",
    },
    required=(_SCALE,),
    code_dtypes=frozenset({"I8"}),
    signed=True,
)
# W4A8 stores besides by what the decoded weight was rounded to FP8 in the search; kernels divide
# the scales by it and multiply the result, so that values do not change.
MODELOPT_INT4 = StorageScheme(
    name="modelopt-int4",
    exporters="ModelOpt (W4A16_AWQ, W4A8_AWQ)",
    suffixes={
        _CODES: ".weight",
        _SCALE: ".weight_scale",
        PartKind.TENSOR_SCALE: ".weight_scale_2",
        PartKind.INPUT_SCALE: ".input_scale",
        PartKind.CHANNEL_SCALE: ".pre_quant_scale",
    },
    required=(_SCALE,),
    code_dtypes=frozenset({"U8"}),
    packed_along=0,
    signed=True,
    twos_complement=True,
    word=_BYTE,
)
TORCHAO_INT8 = StorageScheme(
    name="torchao-int8",
    exporters="torchao (Int8Tensor, IntxUnpackedToInt8Tensor)",
    suffixes={
        _CODES: "._weight_qdata",
        _SCALE: "._weight_scale",
        _ZERO: "._weight_zero_point",
    },
    required=(_SCALE,),
    code_dtypes=frozenset({"I8"}),
    signed=True,
)

SCHEMES: Mapping[str, StorageScheme] = {
    scheme.name: scheme
    for scheme in (AWQ, GPTQ, GPTQ_V2, CT_PACKED, CT_INTEGERS, MODELOPT_INT4, TORCHAO_INT8)
}


def suffix_parts() -> dict[str, PartKind]:
    """Return the part of every suffix of a scheme."""
    return {suffix: part for scheme in SCHEMES.values() for part, suffix in scheme.suffixes.items()}


def packed_form(
    module: str, parts: Parts, suffix: str, configs: Iterable[Mapping[str, Any]]
) -> PackedForm | None:
    """Return the scheme, format and shape of a module of integers; None for any other module."""
    codes = parts[_CODES]
    candidates = [
        scheme
        for scheme in SCHEMES.values()
        if scheme.suffixes[_CODES] == suffix and codes.dtype in scheme.code_dtypes
    ]
    scale = parts.get(_SCALE)
    if not candidates or (suffix == ".weight" and _are_floats(codes, scale)):
        return None
    scheme = candidates[0]
    if scheme.transposed:
        scheme = _awq_or_gptq(module, parts, configs)
    _require_parts(module, parts, scheme)
    return _Shapes(module, parts, scheme).form()


def _are_floats(codes: TensorEntry, scale: TensorEntry | None) -> bool:
    """Return whether bytes are codes of floating-point formats, by their scales."""
    if scale is None:
        return codes.dtype == "U8"
    rows = (2 * codes.shape[0],) if codes.shape else ()
    return scale.dtype not in FLOATS or (codes.dtype == "U8" and scale.shape[:1] != rows)


def _require_parts(module: str, parts: Parts, scheme: StorageScheme) -> None:
    for part in scheme.required:
        if part not in parts:
            raise LayoutMismatch(
                f"module {shown(module)}",
                f"{shown(parts[_CODES].name)} without {part}",
                f"{shown(module + scheme.suffixes[part])}, as {scheme.name} stores it",
                "Look for it under another name, or in a shard that is missing.",
            )
    unknown = sorted(str(part) for part in set(parts) - set(scheme.suffixes))
    if unknown:
        raise LayoutMismatch(
            f"module {shown(module)}",
            f"{', '.join(unknown)} in a module of {scheme.name}",
            f"{', '.join(map(str, scheme.suffixes))} alone",
            "Find out which tool wrote it; nothing is left out silently.",
        )
    if parts[_SCALE].dtype not in FLOATS:
        raise DtypeMismatch(
            f"scales of {shown(module)}",
            parts[_SCALE].dtype,
            ", ".join(sorted(FLOATS)),
            "Find out which tool wrote it.",
        )


def _awq_or_gptq(module: str, parts: Parts, configs: Iterable[Mapping[str, Any]]) -> StorageScheme:
    """Tell AWQ's words along N from GPTQ's along K; the config tells GPTQ's two versions apart."""
    codes, scale = parts[_CODES].shape, parts.get(_SCALE)
    if PartKind.GROUP_INDEX not in parts:
        scales = () if scale is None else scale.shape
        if not (len(codes) == len(scales) == 2 and codes[1] == scales[1]):
            return AWQ
    for config in configs:
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if config.get("quant_method") != "gptq" or layout == "gptq":
            continue
        if layout == GPTQ_V2.name:
            return GPTQ_V2
        raise LayoutMismatch(
            f"checkpoint_format of {shown(module)}",
            str(layout)[:80],
            f"{GPTQ.name} or {GPTQ_V2.name}",
            "Codes of other formats are permuted for one kernel; take the checkpoint before that.",
        )
    return GPTQ


@dataclass(frozen=True)
class _Shapes:
    """The checks of one module's shapes."""

    module: str
    parts: Parts
    scheme: StorageScheme

    def form(self) -> PackedForm:
        """Return what the shapes say; raise where they contradict each other."""
        stored = self.parts[_CODES].shape
        if len(stored) != 2 or not all(stored):
            raise self._refused(_CODES, "two dimensions [rows, columns], none of them 0")
        bits, (rows, columns) = self._bits_and_shape(stored)
        asymmetric = _ZERO in self.parts
        signed = self.scheme.signed and not asymmetric
        element = TABLE_FORMATS[f"{'INT' if signed else 'UINT'}{bits}"].name
        fmt = self._format(element, (rows, columns))
        if asymmetric:
            self._require_zero_points(fmt, bits, (rows, columns))
        if PartKind.GROUP_INDEX in self.parts:
            index = self.parts[PartKind.GROUP_INDEX]
            if index.dtype not in {"I32", "I64"} or index.shape != (columns,):
                raise self._refused(PartKind.GROUP_INDEX, f"I32 [{columns}], one group a column")
        require_factors(self.module, self.parts, columns)
        return PackedForm(self.scheme, fmt, (rows, columns))

    def _bits_and_shape(self, stored: Shape) -> tuple[int, tuple[int, int]]:
        scheme, scales = self.scheme, self.parts[_SCALE].shape
        if scheme.packed_along is None:
            return 8, (stored[0], stored[1])
        if scheme.word == _BYTE:
            return _BYTE // 2, (2 * stored[0], stored[1])
        if not scheme.transposed:
            return self._by_stated_shape(stored)
        if len(scales) != 2:
            raise self._refused(_SCALE, "two dimensions [groups, N]")
        groups, rows = scales
        zeros = self.parts[_ZERO].shape
        # qzeros [G, N * bits / 32] show the bits whatever the group size.
        bits = WORD * zeros[-1] // rows if len(zeros) == 2 and rows else 0
        if bits not in _READABLE_BITS or zeros != (groups, rows * bits // WORD):
            expected = " or ".join(str([groups, rows * wide // WORD]) for wide in _READABLE_BITS)
            raise self._refused(_ZERO, f"{expected}, words of 4-bit or 8-bit zero points")
        if scheme.packed_along == 1:
            columns = stored[0]
            agrees = stored[1] * WORD == rows * bits
        else:
            columns = stored[0] * WORD // bits
            agrees = stored[1] == rows
        if not agrees:
            raise self._refused(
                _CODES, f"words of {bits}-bit codes for {rows} rows, as scales have"
            )
        return bits, (rows, columns)

    def _by_stated_shape(self, stored: Shape) -> tuple[int, tuple[int, int]]:
        """Read weight_shape: the words may end in padding, so they do not show the columns."""
        entry = self.parts[PartKind.LOGICAL_SHAPE]
        sizes = {"I64": 8, "I32": 4}
        if entry.dtype not in sizes or entry.elements != 2:
            raise self._refused(PartKind.LOGICAL_SHAPE, "two integers, I64 or I32")
        ((_, raw),) = read_small((entry,))
        size = sizes[entry.dtype]
        rows, columns = (
            int.from_bytes(raw[at : at + size], "little", signed=True) for at in (0, size)
        )
        for bits in _READABLE_BITS:
            if columns > 0 and (rows, -(-columns * bits // WORD)) == stored:
                return bits, (rows, columns)
        raise ShapeMismatch(
            f"{shown(entry.name)}",
            [rows, columns],
            f"the matrix of 4-bit or 8-bit codes in words {list(stored)}",
            "Check that both tensors are of one module.",
        )

    def _format(self, element: str, shape: tuple[int, int]) -> BlockFormat:
        """Return the block format whose scales have the stored extents."""
        scales = self.parts[_SCALE].shape
        if self.scheme.transposed:
            scales = scales[::-1]
        known = [fmt for fmt in BLOCK_FORMATS.values() if fmt.element.name == element]
        # Where a cut-off group fits as well, the size that divides K is meant.
        known.sort(key=lambda fmt: bool(fmt.block[1] and shape[1] % fmt.block[1]))
        for fmt in known:
            if fits_scales(shape, scales, fmt):
                return fmt
        sizes = ", ".join(str(list(scale_shape(shape, fmt))) for fmt in known)
        raise self._refused(_SCALE, f"one of {sizes} for a matrix {list(shape)}")

    def _require_zero_points(self, fmt: BlockFormat, bits: int, shape: tuple[int, int]) -> None:
        entry, (rows, groups) = self.parts[_ZERO], scale_shape(shape, fmt)
        scheme = self.scheme
        if scheme.zeros_along is None:
            legal = {"I8"} if scheme.packed_along is None else {"I32"}
            if entry.dtype not in legal or not fits_scales(shape, entry.shape, fmt):
                raise self._refused(_ZERO, f"{' or '.join(legal)} [{rows}, {groups}], one a scale")
            return
        if scheme.transposed:
            expected: Shape = (groups, rows * bits // WORD)
        else:
            expected = (-(-rows * bits // WORD), groups)
        if entry.dtype != "I32" or entry.shape != expected:
            raise self._refused(_ZERO, f"I32 {list(expected)}: one zero point a scale, in words")

    def _refused(self, part: PartKind, expectation: str) -> ShapeMismatch:
        entry = self.parts[part]
        return ShapeMismatch(
            f"{part} {shown(entry.name)} of {self.scheme.name}",
            f"{entry.dtype} {list(entry.shape)}",
            expectation,
            "Check that the module's tensors are of one checkpoint; convert it with the tool that"
            " wrote it.",
        )


def require_factors(module: str, parts: Parts, columns: int) -> None:
    """Raise unless the factors of a module's input, if there are any, are one a column."""
    entry = parts.get(PartKind.CHANNEL_SCALE)
    if entry is not None and (entry.dtype not in FLOATS or entry.shape != (columns,)):
        raise ShapeMismatch(
            f"factors of the input of {shown(module)}, {shown(entry.name)}",
            f"{entry.dtype} {list(entry.shape)}",
            f"{' or '.join(sorted(FLOATS))} [{columns}], one a column",
            "Check that the module's tensors are of one checkpoint.",
        )


def fits_scales(shape: Shape, scales: Shape, fmt: BlockFormat) -> bool:
    """Return whether stored scales have a format's extents, up to axes of 1."""
    expected = scale_shape(shape, fmt)
    if scales == expected:
        return True
    squeezed = tuple(extent for extent in expected if extent != 1)
    is_whole = 0 in fmt.block and len(shape) == 2
    return is_whole and tuple(extent for extent in scales if extent != 1) == squeezed
