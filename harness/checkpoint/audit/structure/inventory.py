"""Match the parameters that a config implies with the stored modules, and check each module.

Every part of the structure audit starts from this inventory, as does the recipe of formats that a
checkpoint follows as it is stored. Values are never read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.read.types import StoredLayout
from degarble.harness.checkpoint.view.modules import (
    ELEMENT_OF_DTYPE,
    PAIRS,
    PLAIN_DTYPES,
    SCALE_OF_DTYPE,
    misnamed,
    suffix_of,
)
from degarble.harness.checkpoint.view.schemes import packed_form
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    NVFP4,
    scale_shape,
)
from degarble.harness.model.parameters import EXPERT, parameters
from degarble.harness.model.recipes import BF16, Formats, Recipe, Rule
from degarble.harness.model.tensors import PartKind, tensors_of
from degarble.harness.model.types import Dtype, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.modules import ModuleTable
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# One stored module against its parameter. ModuleTable.form rejects a module that no format
# explains; here the broken rule is named. Modules with the same shapes, suffixes and dtypes are
# checked once: of 73,164 parameters of V4-Pro a few dozen differ. Shapes are logical (unpacked)
# unless a tensor is named.

if TYPE_CHECKING:
    Parts = Mapping[PartKind, TensorEntry]

_FLOATS = {"F64": 3, "F32": 3, "BF16": 2, "F16": 1}  # by how much of a bf16 or fp32 value is kept
_INTEGERS = frozenset({"I64", "I32", "I16"})
_DTYPES_OF_SCALE = {"FP32": "F32 or BF16", "UE8M0": "F8_E8M0 or U8", "E4M3": "F8_E4M3"}
_BY_GROUPS = 3  # dimensions: groups, rows, columns
_ANOTHER_TOOL = "Find out which tool wrote it, and write the module again."


class ModuleIssue(NamedTuple):
    """A rule that a module breaks. `part`: the offending tensor; None: the whole module."""

    rule: AuditRule
    part: PartKind | None
    text: str  # continues a sentence that begins with the tensor's name
    remedy: str
    evidence: Mapping[str, object]


@dataclass
class ModuleCheck:
    """Result for one module. `weight`: format name, BF16 for plain values, None: unknown."""

    weight: str | None = None
    has_input_scale: bool = False
    issues: list[ModuleIssue] = field(default_factory=list)

    def report(
        self, rule: AuditRule, part: PartKind | None, text: str, remedy: str, **evidence: object
    ) -> None:
        """Add one issue."""
        self.issues.append(ModuleIssue(rule, part, text, remedy, evidence))


class ModuleChecks:
    """The checks of one checkpoint's modules, cached by shape, dtype and suffix."""

    def __init__(self, table: ModuleTable) -> None:
        self._table = table
        self._known: dict[tuple[object, ...], ModuleCheck] = {}

    def check(self, parameter: Parameter, module: str) -> ModuleCheck:
        """Return the result for the stored module of one parameter; it must exist."""
        try:
            parts = self._table.parts(module)
        except Refused as error:
            check = ModuleCheck()
            check.report(
                rules.UNREADABLE_MODULE,
                None,
                f"has two tensors for one part: {error.shown_value}",
                error.remedy,
            )
            return check
        integers = self._integers(parameter, module, parts)
        if integers is not None:
            return integers
        seen = tuple(
            (part, suffix_of(entry), entry.dtype, entry.shape) for part, entry in parts.items()
        )
        key = (parameter.shape, parameter.kind, parameter.row.dtype, parameter.row.name, seen)
        module_check = self._known.get(key)
        if module_check is None:
            module_check = self._known[key] = _judged(parameter, parts)
        return module_check

    def _integers(
        self, parameter: Parameter, module: str, parts: dict[PartKind, TensorEntry]
    ) -> ModuleCheck | None:
        """Return the result for a module of integers by group; None for any other module."""
        codes = parts[PartKind.CODES]
        check = ModuleCheck(has_input_scale=PartKind.INPUT_SCALE in parts)
        try:
            suffix = codes.name.removeprefix(module)
            packed = packed_form(module, parts, suffix, self._table.configs)
        except Refused as error:
            check.report(
                rules.UNREADABLE_MODULE,
                PartKind.CODES,
                f"does not fit its module: {error.name} is {error.shown_value}, expected"
                f" {error.expectation}",
                error.remedy,
            )
            return check
        if packed is None:
            return None
        check.weight = packed.format.name
        _judge_shape(check, parameter, packed.shape, codes)
        return check


def _judged(parameter: Parameter, parts: Parts) -> ModuleCheck:
    check = ModuleCheck(has_input_scale=PartKind.INPUT_SCALE in parts)
    codes = parts[PartKind.CODES]
    if codes.dtype in PLAIN_DTYPES:
        check.weight = BF16
        _judge_plain(check, parameter, parts)
    elif parameter.kind is not Kind.LINEAR:
        check.report(
            rules.WRONG_DTYPE,
            PartKind.CODES,
            f"is {codes.dtype}, but {parameter.name} is no linear and is never quantised",
            _ANOTHER_TOOL,
            dtype=codes.dtype,
        )
    elif parameter.row.name == "attn.wo_a" and (form := _deepgemm_form(parameter, parts)):
        check.weight = form
        check.report(
            rules.ENGINE_FORM,
            PartKind.CODES,
            f"is {list(codes.shape)} with scales for DeepGEMM's kernel, and judged as that",
            "Nothing, if an engine hands it to that kernel; others expect two dimensions.",
            shape=list(codes.shape),
        )
    else:
        fmt = _judge_codes(check, parameter, parts)
        check.weight = None if fmt is None else fmt.name
        if parameter.row.name == "ffn.gate":
            check.report(
                rules.ROUTER_QUANTISED,
                PartKind.CODES,
                f"is the router, in {codes.dtype}",
                "Take the router from the source checkpoint.",
                dtype=codes.dtype,
            )
    for part in (PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE):
        if part in parts:
            _judge_scalar(check, part, parts[part])
    return check


def _deepgemm_form(parameter: Parameter, parts: Parts) -> str:
    """Return the format of a grouped wo_a, its scales fp32 or packed UE8M0; else empty."""
    codes, scales = parts[PartKind.CODES], parts.get(PartKind.BLOCK_SCALE)
    if codes.dtype != "F8_E4M3" or len(codes.shape) != _BY_GROUPS or scales is None:
        return ""
    # Scales of DeepGEMM's grouped wo_a: [groups, blocks / 4, rows] words of four UE8M0 bytes, or
    # fp32 [groups, rows / 128, blocks].
    groups, rows, columns = codes.shape
    if (groups * rows, columns) != parameter.shape:
        return ""
    blocks = -(-columns // 128)
    if (scales.dtype, scales.shape) == ("I32", (groups, -(-blocks // 4), rows)):
        return FP8_128X128_UE8M0.name
    as_fp32 = (scales.dtype, scales.shape) == ("F32", (groups, rows // 128, blocks))
    return FP8_128X128_F32.name if as_fp32 else ""


def _judge_plain(check: ModuleCheck, parameter: Parameter, parts: Parts) -> None:
    value, wanted = parts[PartKind.CODES], parameter.row.dtype
    _judge_shape(check, parameter, value.shape, value)
    if (value.dtype in _INTEGERS) != (wanted is Dtype.I64) or value.dtype == "BOOL":
        check.report(
            rules.WRONG_DTYPE, PartKind.CODES, f"is {value.dtype}, expected {wanted}", _ANOTHER_TOOL
        )
    elif value.dtype in _FLOATS and _FLOATS[value.dtype] < _FLOATS[wanted]:
        check.report(
            rules.NARROWED,
            PartKind.CODES,
            f"is {value.dtype}, published as {wanted}",
            "Take it from the source checkpoint if its precision matters.",
            dtype=value.dtype,
            published=str(wanted),
        )
    for part in (PartKind.BLOCK_SCALE, PartKind.TENSOR_SCALE):
        if part in parts:
            check.report(
                rules.SCALE_LEFT_OVER,
                part,
                f"is a scale of {value.dtype} values, which need none",
                "Remove it, or find the codes that it belongs to.",
            )


def _judge_shape(
    check: ModuleCheck, parameter: Parameter, shape: tuple[int, ...], codes: TensorEntry
) -> bool:
    if shape == parameter.shape:
        return True
    by_bytes = ", two codes a byte" if codes.dtype in PAIRS else ""
    packed = f" (stored {list(codes.shape)}{by_bytes})" if shape != codes.shape else ""
    check.report(
        rules.WRONG_SHAPE,
        PartKind.CODES,
        f"is {list(shape)}{packed}, expected {list(parameter.shape)}",
        "Check that config and shards are of one model, and that no prefix was mixed up.",
        shape=list(shape),
        expected=list(parameter.shape),
    )
    return False


def _judge_codes(check: ModuleCheck, parameter: Parameter, parts: Parts) -> BlockFormat | None:
    """Check codes and their scales; return the format if the two tensors determine it."""
    codes = parts[PartKind.CODES]
    shape = codes.shape
    if codes.dtype in PAIRS and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    element = ELEMENT_OF_DTYPE.get(codes.dtype)
    if element is None or len(shape) < 2:
        check.report(
            rules.UNREADABLE_MODULE,
            PartKind.CODES,
            f"is {codes.dtype} {list(codes.shape)}: codes of no known format",
            "Convert it with the tool that wrote it.",
            dtype=codes.dtype,
        )
        return None
    wrong = misnamed(parts)
    if wrong is not None:
        check.report(
            rules.SCALE_NAME,
            wrong[0],
            f"is looked for under {wrong[1]} by loaders of NVFP4",
            "Rename the tensor.",
            wanted=wrong[1],
        )
    fits = _judge_shape(check, parameter, shape, codes)
    if PartKind.BLOCK_SCALE not in parts:
        check.report(
            rules.SCALE_MISSING,
            PartKind.CODES,
            f"is {codes.dtype} without block scales",
            "Look for them under another name, or in a shard that is missing.",
            dtype=codes.dtype,
        )
        return None
    fmt = _format_shown(check, element, shape, parts) if fits else None
    if fmt is not None and fmt.tensor_scale and PartKind.TENSOR_SCALE not in parts:
        check.report(
            rules.SCALE_MISSING,
            PartKind.CODES,
            "is NVFP4 without weight_scale_2",
            "Look for it under another name; a global scale is never assumed to be 1.",
        )
    elif fmt is not None and not fmt.tensor_scale and PartKind.TENSOR_SCALE in parts:
        check.report(
            rules.SCALE_LEFT_OVER,
            PartKind.TENSOR_SCALE,
            f"is a tensor scale of {fmt.name}, which has none",
            "Find out whether the block scales are of another format than their dtype says.",
        )
    return fmt


def _format_shown(
    check: ModuleCheck, element: str, shape: tuple[int, ...], parts: Parts
) -> BlockFormat | None:
    """Return the format of codes with block scales; report the broken rule if none fits."""
    scales = parts[PartKind.BLOCK_SCALE]
    scale = SCALE_OF_DTYPE.get(scales.dtype)
    known = [fmt for fmt in BLOCK_FORMATS.values() if fmt.element.name == element]
    fitting = [fmt for fmt in known if _scales_of(shape, fmt) == scales.shape]
    for fmt in fitting:
        if fmt.scale.name == scale:
            return fmt
    expected = "; ".join(
        f"{_DTYPES_OF_SCALE[fmt.scale.name]} {list(_scales_of(shape, fmt) or ())} for {fmt.name}"
        for fmt in known
    )
    text = f"is {scales.dtype} {list(scales.shape)} for codes of {list(shape)}"
    evidence = {"dtype": scales.dtype, "shape": list(scales.shape), "expected": expected}
    if element == "E2M1" and scale == "E4M3" and _from_packed(shape, scales.shape):
        # MXFP4 has as many scales, in another type: E4M3 scales are NVFP4's alone.
        rule, also = rules.SCALE_FROM_PACKED, "one a 16 bytes where one a 16 codes is expected"
    elif fitting:
        rule, also = rules.SCALE_DTYPE, f"{_told_dtypes(fitting)} expected"
    elif len(scales.shape) != len(shape):
        rule, also = rules.SCALE_RANK, f"{len(shape)} dimensions expected"
    else:
        rule, also = rules.SCALE_BLOCK, _block_told(shape, scales.shape)
    check.report(
        rule,
        PartKind.BLOCK_SCALE,
        f"{text}, {also}",
        f"Known: {expected}. {_ANOTHER_TOOL}",
        **evidence,
    )
    return None


def _told_dtypes(formats: list[BlockFormat]) -> str:
    return " or ".join(dict.fromkeys(_DTYPES_OF_SCALE[fmt.scale.name] for fmt in formats))


def _scales_of(shape: tuple[int, ...], fmt: BlockFormat) -> tuple[int, ...] | None:
    try:
        return scale_shape(shape, fmt)
    except Refused:
        return None


def _from_packed(shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    expected = _scales_of(shape, NVFP4)
    return expected is not None and (*expected[:-1], expected[-1] // 2) == scales


def _block_told(shape: tuple[int, ...], scales: tuple[int, ...]) -> str:
    """Describe the block size that two shapes imply, or a kernel's padded layout."""
    if not all(scales) or not all(shape):
        return "empty"
    rows, columns = (
        -(-whole // parts) for whole, parts in zip(shape[-2:], scales[-2:], strict=True)
    )
    wanted = _scales_of(shape, NVFP4)
    if wanted is not None:
        padded = (-(-wanted[-2] // 128) * 128, -(-wanted[-1] // 4) * 4)
        if padded == scales[-2:]:
            return "padded as the 128x4 layout of a kernel: it was processed after loading"
    return f"one a {rows}x{columns} block, which no known format has"


def _judge_scalar(check: ModuleCheck, part: PartKind, entry: TensorEntry) -> None:
    if prod(entry.shape) != 1:
        check.report(
            rules.SCALE_RANK,
            part,
            f"is {list(entry.shape)}, one number expected",
            _ANOTHER_TOOL,
            shape=list(entry.shape),
        )
    if entry.dtype != "F32":
        check.report(
            rules.SCALE_DTYPE,
            part,
            f"is {entry.dtype}, F32 expected: kernels read its bits as fp32",
            _ANOTHER_TOOL,
            dtype=entry.dtype,
        )


# --------------------------------------------------------------------------------------------------
# Modules that several parameters share, such as `gate_up_proj` or a stack of experts. The format is
# inferred from the module itself. The model tables then give the tensors and shapes that its
# members need in that format, and each is compared with what is stored.


def check_fused(names: LogicalNames, module: str, members: list[Parameter]) -> ModuleCheck:
    """Return the format of one fused module and the rules that it breaks."""
    check = ModuleCheck()
    try:
        form = names.table.form(module)
        check.weight = BF16 if form.format is None else form.format.name
        check.has_input_scale = PartKind.INPUT_SCALE in form.parts
        activation = check.weight if check.has_input_scale and check.weight == "NVFP4" else BF16
        # All members of a fused module share its format.
        recipe = Recipe("as stored", (Rule("*", check.weight, activation),))
        expected = tensors_of(names.config, names.layout.with_recipe(recipe), members)
    except Refused as error:
        check.weight = None
        check.report(
            rules.UNREADABLE_MODULE,
            None,
            f"is {error.shown_value}, expected {error.expectation}",
            error.remedy,
        )
        return check
    for tensor in expected:
        entry = names.table.entries.get(tensor.name)
        suffix = tensor.name.removeprefix(module)
        if entry is None:
            check.report(
                rules.SCALE_MISSING,
                None,
                f"has no {suffix}, as {check.weight} needs",
                "Look for it under another name, or in a shard that is missing.",
            )
        elif entry.shape != tensor.shape:
            check.report(
                rules.WRONG_SHAPE,
                None,
                f"has a {suffix} of {list(entry.shape)}, expected {list(tensor.shape)}",
                "Check that config and shards are of one model.",
                shape=list(entry.shape),
                expected=list(tensor.shape),
            )
    return check


# --------------------------------------------------------------------------------------------------
# The inventory. A fused module (several parameters in one tensor) is checked as a whole; its
# members have the module's format.

NVFP4_NAME = "NVFP4"


class StoredParameter(NamedTuple):
    """A parameter that is present, with the module that holds it."""

    parameter: Parameter
    module: str
    check: ModuleCheck

    @property
    def weight(self) -> str | None:
        """Name of its format; None where it could not be determined."""
        return self.check.weight


@dataclass
class Inventory:
    """The parameters of a config that a checkpoint has and lacks. Made by `take_inventory`."""

    config: Config
    layout: Layout  # spells the names; its suffixes are those that the checkpoint has
    stored: list[StoredParameter] = field(default_factory=list)
    missing: list[tuple[Parameter, str]] = field(default_factory=list)
    fused: dict[str, list[Parameter]] = field(default_factory=dict)

    @cached_property
    def modules(self) -> frozenset[str]:
        """Stored modules that hold parameters."""
        return frozenset(parameter.module for parameter in self.stored)

    @cached_property
    def by_name(self) -> dict[str, StoredParameter]:
        """Present parameters by logical name."""
        return {parameter.parameter.name: parameter for parameter in self.stored}

    @property
    def linears(self) -> list[StoredParameter]:
        """Linears whose format could be determined."""
        kind = Kind.LINEAR
        return [
            parameter
            for parameter in self.stored
            if parameter.parameter.kind is kind and parameter.weight
        ]

    def path_of(self, parameter: StoredParameter) -> str:
        """Return a linear's unfused path in the layout, as configs name it."""
        if parameter.module not in self.fused:
            return parameter.module
        return self.layout.path_of(parameter.parameter, self.config)

    def layer_of(self, parameter: Parameter) -> int | None:
        """Return the number of a parameter's layer; drafters follow the decoder."""
        block = parameter.block
        if block is None:
            return None
        return block.index + (len(self.config.layers) if block.is_drafter else 0)


def take_inventory(names: LogicalNames) -> Inventory:
    """Find every parameter for which the layout has a name, and check its module."""
    layout = names.layout
    if names.table.layout() is StoredLayout.COMPRESSED_TENSORS:
        layout = replace(layout, suffixes="compressed-tensors")
    inventory = Inventory(names.config, layout)
    checks = ModuleChecks(names.table)
    present = names.table.suffixes
    fused: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in parameters(names.config):
        if names.layout.omits(parameter, names.config):
            continue
        module = names.module_of(parameter)
        if module not in present:
            inventory.missing.append((parameter, module))
        elif names.is_fused(parameter):
            fused[module].append(parameter)
        else:
            inventory.stored.append(
                StoredParameter(parameter, module, checks.check(parameter, module))
            )
    for module, members in fused.items():
        check = check_fused(names, module, members)
        inventory.stored.extend(StoredParameter(member, module, check) for member in members)
    inventory.fused = dict(fused)
    return inventory


def stored_recipe(inventory: Inventory) -> Recipe:
    """Return the recipe that a checkpoint follows as it is stored.

    It has one rule for each row of the parameter table, and one more for each block where the row
    differs. Where experts of one block differ, the most frequent format counts, because engines
    stack them.
    """
    counts: dict[str, dict[str, Counter[Formats]]] = defaultdict(lambda: defaultdict(Counter))
    for linear in inventory.linears:
        block, name = linear.parameter.block, linear.parameter.row.name.replace(EXPERT, "*")
        everywhere = f"{block.scope}.*.{name}" if block else name
        here = f"{block.prefix}.{name}" if block else name
        counts[everywhere][here][_formats(linear)] += 1
    rules, exceptions = [], []
    for everywhere, places in counts.items():
        common = sum(places.values(), Counter()).most_common(1)[0][0]
        rules.append(Rule(everywhere, *common))
        for here, place in places.items():
            formats = place.most_common(1)[0][0]
            if formats != common:
                exceptions.append(Rule(here, *formats))
    # Exceptions come first: the first rule that matches decides.
    return Recipe("as stored", (*exceptions, *rules))


def _formats(parameter: StoredParameter) -> Formats:
    weight = parameter.weight or BF16
    quantised = weight == NVFP4_NAME and parameter.check.has_input_scale
    return Formats(weight, weight if quantised else BF16)
