"""Check the formats and scalar scales of linears against configs, partners and experts.

Partners are linears that engines fuse, so that their formats and scales must agree.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, defaultdict
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import NOWHERE, FindingLocation, Findings
from degarble.harness.checkpoint.audit.structure.inventory import NVFP4_NAME
from degarble.harness.checkpoint.read.file_access import read_small
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.quantisation_configs import (
    FP8_BLOCKS,
    Promise,
    statements,
    weight_family,
)
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16, recipe_named
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory, StoredParameter
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.quantisation_configs import Statement
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.types import Block


# --------------------------------------------------------------------------------------------------
# Partners. The list is read off the engine's fused tensors (harness/model/layouts.py). Gate and up
# are fused by every engine, other partners by some. Partners whose formats differ in the released
# model (V3.2's indexer.wk and weights_proj) are left out: no engine fuses them without converting
# them.

_ENGINE = "vllm"
# w1 is the gate, w3 the up projection, of dense, shared and routed experts alike.
_GATE_AND_UP = (".w1", ".w3")


class Fusable(NamedTuple):
    """Rows of the parameter table that are partners. `always`: every engine fuses them."""

    rows: tuple[str, ...]
    always: bool


class FusedPartners(NamedTuple):
    """The partners of one block, or of one expert, in the order of their fusion."""

    members: tuple[StoredParameter, ...]
    always: bool


@lru_cache(maxsize=8)
def fusable(config: Config) -> tuple[Fusable, ...]:
    """Return the rows that are partners in a family."""
    recipe = recipe_named("official", config)
    formats = {parameter.row.name: recipe.format_of(parameter) for parameter in _one_a_row(config)}
    found = []
    for fusion in layout_named(_ENGINE, config).fusions:
        rows = tuple(row for row in fusion.members if row in formats)
        # Partners that the release stores in different formats are not comparable.
        if len(rows) > 1 and len({formats[row] for row in rows}) == 1:
            found.append(Fusable(rows, all(row.endswith(_GATE_AND_UP) for row in rows)))
    return tuple(found)


def _one_a_row(config: Config) -> list[Parameter]:
    rows = {
        parameter.row.name: parameter
        for parameter in parameters(config)
        if parameter.expert in (None, 0)
    }
    return list(rows.values())


def partners(inventory: Inventory) -> list[FusedPartners]:
    """Return all groups of partners of which at least two are present."""
    groups: dict[tuple[object, int | None, int], list[StoredParameter]] = defaultdict(list)
    kinds = fusable(inventory.config)
    place = {row: (i, j) for i, kind in enumerate(kinds) for j, row in enumerate(kind.rows)}
    for stored_parameter in inventory.stored:
        parameter = stored_parameter.parameter
        if parameter.row.name in place and stored_parameter.weight is not None:
            kind, _ = place[parameter.row.name]
            groups[parameter.block, parameter.expert, kind].append(stored_parameter)
    return [
        FusedPartners(
            tuple(sorted(members, key=lambda each: place[each.parameter.row.name])),
            kinds[kind].always,
        )
        for (_, _, kind), members in groups.items()
        if len(members) > 1
    ]


# --------------------------------------------------------------------------------------------------
# Formats. Each linear is compared with what is stated for it, the two configs with each other,
# stated block sizes with those that shapes show, partners and experts among themselves, and the
# drafter's experts with the main model's.

# Elements of a block: along K, or rows and columns.
_BLOCKS = {NVFP4_NAME: (16,), "MXFP4": (32,), "MXFP8": (32,), FP8_BLOCKS: (128, 128)}


def report_formats(checkpoint: Checkpoint, inventory: Inventory, findings: Findings) -> None:
    """Report every linear whose format contradicts a config or its related linears."""
    stated = statements(checkpoint.quantisation, inventory.config)
    if stated:
        _report_promises(stated, inventory, findings)
        _report_block_sizes(stated, checkpoint, inventory, findings)
    else:
        _report_silence(checkpoint, inventory, findings)
        _report_input_scales(inventory, findings)
    for statement in stated:
        for words in statement.unread:
            findings.add(
                rules.UNREAD_STATEMENT,
                NOWHERE,
                f"Not judged: {shown(words)}.",
                "Nothing, if the tool that wrote it is known to be right.",
            )
    _report_partners(inventory, findings)
    _report_experts(inventory, findings)


def _report_promises(
    stated: tuple[Statement, ...], inventory: Inventory, findings: Findings
) -> None:
    kept: list[str] = []
    siblings = _rows_with_input_scales(inventory)
    for found in inventory.linears:
        path = inventory.path_of(found)
        promises = [statement.promise(found.parameter, path) for statement in stated]
        engine = promises[0]
        format_found = weight_family(found.weight or "")
        if engine.format not in (None, format_found):
            _report_contradiction(found, engine, inventory, findings)
        if any(None is not promise.format != engine.format is not None for promise in promises[1:]):
            findings.add(
                rules.TWO_STATEMENTS,
                FindingLocation(None, found.module),
                f"{shown(found.module)}: {engine.format} by {shown(engine.text)},"
                f" {promises[1].format} by {shown(promises[1].text)}; the file has {found.weight}.",
                "Make the two files say what the shards hold.",
            )
        # `ignore` names modules that the quantiser left alone, which need not be BF16.
        if stated[0].keeps_source and engine.text.endswith(" alone") and format_found == FP8_BLOCKS:
            kept.append(found.module)
        if found.weight == NVFP4_NAME and not found.check.has_input_scale:
            _judge_input_scale(found, engine, inventory, siblings, findings)
    if kept:
        findings.add(
            rules.IGNORE_KEEPS_SOURCE,
            NOWHERE,
            f"{len(kept)} modules that {stated[0].file} ignores are FP8, such as"
            f" {shown(kept[0])}: left alone, not unquantised.",
            "See that the engine does not take `ignore` for BF16.",
            modules=len(kept),
        )


def _report_contradiction(
    parameter: StoredParameter, promise: Promise, inventory: Inventory, findings: Findings
) -> None:
    findings.add(
        rules.CONTRADICTS,
        FindingLocation(None, parameter.module, inventory.layer_of(parameter.parameter)),
        f"{shown(parameter.module)} is {parameter.weight}, promised {promise.format}"
        f" ({shown(promise.text)}).",
        "Correct the quantisation config, or convert the module to what it promises.",
        found=parameter.weight,
        promised=promise.format,
        told=shown(promise.text),
    )


def _rows_with_input_scales(inventory: Inventory) -> set[str]:
    return {
        parameter.parameter.row.name
        for parameter in inventory.stored
        if parameter.check.has_input_scale
    }


def _report_input_scales(inventory: Inventory, findings: Findings) -> None:
    """Report missing input scales by comparison with siblings, where no config says anything."""
    siblings = _rows_with_input_scales(inventory)
    for linear in inventory.linears:
        if linear.weight == NVFP4_NAME and not linear.check.has_input_scale:
            _judge_input_scale(linear, None, inventory, siblings, findings)


def _judge_input_scale(
    parameter: StoredParameter,
    promise: Promise | None,
    inventory: Inventory,
    siblings: set[str],
    findings: Findings,
) -> None:
    promised = promise is not None and promise.activations and promise.format == NVFP4_NAME
    if not promised and parameter.parameter.row.name not in siblings:
        return
    why = f"{shown(promise.text)} quantises activations" if promised and promise else "others have"
    findings.add(
        rules.INPUT_SCALE_MISSING,
        FindingLocation(None, parameter.module, inventory.layer_of(parameter.parameter)),
        f"{shown(parameter.module)} is NVFP4 without input_scale; {why}.",
        "Calibrate again, or give it the largest input_scale of its siblings on purpose.",
    )


def _report_silence(checkpoint: Checkpoint, inventory: Inventory, findings: Findings) -> None:
    """Report quantised weights that no config mentions."""
    counts = Counter(linear.weight for linear in inventory.linears if linear.weight != BF16)
    # inference/config.json of the official code says it by `dtype` alone.
    if not counts or checkpoint.config.get("dtype") == "fp8":
        return
    findings.add(
        rules.NO_STATEMENT,
        NOWHERE,
        "Neither config.json nor hf_quant_config.json says that weights are quantised; they are:"
        f" {', '.join(f'{count} {weight}' for weight, count in counts.most_common())}.",
        "Add quantization_config to config.json.",
        found=dict(counts),
    )


def _report_block_sizes(
    stated: tuple[Statement, ...], checkpoint: Checkpoint, inventory: Inventory, findings: Findings
) -> None:
    examples: dict[str, StoredParameter] = {}
    for linear in inventory.linears:
        examples.setdefault(weight_family(linear.weight or ""), linear)
    claims = [block for statement in stated for block in statement.blocks]
    for name, sizes in _BLOCKS.items():
        blocks = [claim for claim in claims if claim.format == name]
        if name not in examples or all(claim.sizes == sizes for claim in blocks):
            continue
        module = examples[name].module
        shapes = {
            str(part): list(entry.shape)
            for part, entry in checkpoint.table.parts(module).items()
            if entry.shape
        }
        # An engine reads the first statement; the others are for people and for ModelOpt's tools.
        builds = any(
            block.builds and block.sizes != sizes for block in blocks if block in stated[0].blocks
        )
        findings.add(
            rules.BLOCK_SIZE_BUILT if builds else rules.BLOCK_SIZE,
            FindingLocation(None, module),
            f"{name} has blocks of {_told(sizes)} by the shapes of {shown(module)}, but"
            f" {'; '.join(shown(claim.text) for claim in blocks)}.",
            "Correct the config; an engine that believes it allocates other scales than are stored."
            if builds
            else "Correct the config; readers that believe it cut the scales wrongly.",
            shown=list(sizes),
            stated={claim.text: list(claim.sizes) for claim in blocks},
            shapes=shapes,
        )


def _told(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _report_partners(inventory: Inventory, findings: Findings) -> None:
    for group in partners(inventory):
        formats = {member.parameter.name: member.weight for member in group.members}
        if len(set(formats.values())) > 1:
            first = group.members[0]
            findings.add(
                rules.PARTNERS_FORMAT if group.always else rules.PARTNERS_FORMAT_FUSABLE,
                FindingLocation(None, first.module, inventory.layer_of(first.parameter)),
                "Partners differ in format: "
                + ", ".join(f"{name} is {weight}" for name, weight in formats.items())
                + ".",
                "Quantise both or neither; an engine keeps them in one tensor.",
                formats=formats,
            )


def _report_experts(inventory: Inventory, findings: Findings) -> None:
    """Report experts of one layer that differ, and drafter experts unlike the main model's."""
    rows: dict[tuple[Block, str], Counter[str]] = defaultdict(Counter)
    for linear in inventory.linears:
        block = linear.parameter.block
        if linear.parameter.expert is not None and block is not None:
            rows[block, linear.parameter.row.name][linear.weight or ""] += 1
    scopes: dict[bool, set[str]] = {False: set(), True: set()}
    for (block, row), counts in rows.items():
        scopes[block.is_drafter].update(counts)
        if len(counts) > 1:
            text = ", ".join(f"{count} {weight}" for weight, count in counts.most_common())
            layer = block.index + (len(inventory.config.layers) if block.is_drafter else 0)
            findings.add(
                rules.PARTNERS_FORMAT,
                FindingLocation(None, f"{block.prefix}.{row}".replace("{e}", "*"), layer),
                f"Experts of {block.prefix} differ in format: {text}.",
                "Quantise all or none; an engine keeps them in one stack.",
                formats=dict(counts),
            )
    main, drafter = scopes[False], scopes[True]
    if main and drafter and main != drafter:
        findings.add(
            rules.DRAFTER_EXPERTS,
            NOWHERE,
            f"The drafter's experts are {' and '.join(sorted(drafter))}, the main model's"
            f" {' and '.join(sorted(main))}: an engine that builds all experts by one format builds"
            " the drafter's for bytes that are not there.",
            "See that the engine dispatches the drafter by itself, or serve without it.",
            drafter=sorted(drafter),
            main=sorted(main),
        )


# --------------------------------------------------------------------------------------------------
# Scalar scales of NVFP4 modules. Every weight_scale_2 and input_scale is read: two numbers a
# module, in the order of the files. Partners must have equal scales, and no weight scale may have
# its input scale as a factor. Whether a scale is finite, positive and of a sensible size is checked
# by the numbers audit.

_SCALARS = (PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE)
_LARGEST_CODED = 6 * 448  # what codes and block scales alone can reach in NVFP4
# A scale that is 50 times too small is no outlier of training; the input scale that explains it
# must do so within a factor of 4, which is how far weight scales of one row lie apart.
_FAR, _NEAR = math.log(50), math.log(4)
_TINIEST_MATRIX = 1e-3  # no trained matrix has all its weights below it, in every layer
# Fewer numbers, or larger ones, say nothing of what is common to a row.
_SMALL_MATRIX, _ENOUGH = 0.1, 32
_STEEP, _SURE = 0.6, 0.2  # a slope that is nearer to 1 than to 0, and known well enough

Scalars = dict[str, tuple[float, ...]]


def report_scalars(checkpoint: Checkpoint, inventory: Inventory, findings: Findings) -> None:
    """Report partners with unequal scales, and weight scales multiplied by an input scale."""
    entries = _scalar_entries(checkpoint, inventory)
    scalars = _read(part for parts in entries.values() for part in parts.values())
    for group in partners(inventory):
        members = [member for member in group.members if member.module in entries]
        if len(members) > 1 and len({member.module for member in members}) > 1:
            rule = rules.PARTNERS_SCALE if group.always else rules.PARTNERS_SCALE_FUSABLE
            _compare(members, entries, scalars, (rule, inventory, findings))
    _compare_stacked(inventory, entries, scalars, findings)
    _report_factor(inventory, entries, scalars, findings)


def _scalar_entries(
    checkpoint: Checkpoint, inventory: Inventory
) -> dict[str, dict[PartKind, TensorEntry]]:
    """Return the scalar scales of every NVFP4 module; absent ones are reported elsewhere."""
    found: dict[str, dict[PartKind, TensorEntry]] = {}
    for parameter in inventory.stored:
        if parameter.weight == NVFP4_NAME and parameter.module not in found:
            parts = checkpoint.table.parts(parameter.module)
            found[parameter.module] = {
                part: parts[part]
                for part in _SCALARS
                if part in parts and parts[part].dtype == "F32" and parts[part].elements
            }
    return found


def _read(entries: Iterable[TensorEntry]) -> Scalars:
    """Read small fp32 tensors."""
    return {
        name: struct.unpack(f"<{len(found) // 4}f", found) for name, found in read_small(entries)
    }


def _compare(
    members: list[StoredParameter],
    entries: Mapping[str, Mapping[PartKind, TensorEntry]],
    scalars: Scalars,
    told: tuple[AuditRule, Inventory, Findings],
) -> None:
    """Compare, bit for bit, the scalars of partners in separate modules."""
    rule, inventory, findings = told
    for part in _SCALARS:
        names = [
            entries[member.module][part].name
            for member in members
            if part in entries[member.module]
        ]
        values = [scalars[name] for name in names]
        if len(set(values)) < 2:
            continue
        chosen = rule if part is PartKind.TENSOR_SCALE else rules.PARTNERS_INPUT_SCALE
        _differ(chosen, members[0], names, [value[0] for value in values], (inventory, findings))


def _differ(
    rule: AuditRule,
    first: StoredParameter,
    names: list[str],
    values: list[float],
    told: tuple[Inventory, Findings],
) -> None:
    inventory, findings = told
    ratio = max(values) / min(values) if min(values) > 0 else math.inf
    findings.add(
        rule,
        FindingLocation(names[0], first.module, inventory.layer_of(first.parameter)),
        " and ".join(
            f"{shown(name)} is {value:.6g}" for name, value in zip(names, values, strict=True)
        )
        + f": {ratio:.4g} times apart.",
        "Quantise the partners with one scale; an engine that fuses them keeps one of the two.",
        values=values,
        ratio=ratio,
    )


def _compare_stacked(
    inventory: Inventory,
    entries: Mapping[str, Mapping[PartKind, TensorEntry]],
    scalars: Scalars,
    findings: Findings,
) -> None:
    """Compare the scalars of partners in one module, whose last extent counts them."""
    always = {row: kind.always for kind in fusable(inventory.config) for row in kind.rows}
    by_module = {
        stored_parameter.module: stored_parameter
        for stored_parameter in inventory.stored
        if stored_parameter.module in inventory.fused
    }
    for module, parameter in by_module.items():
        row = parameter.parameter.row.name
        for part, entry in entries.get(module, {}).items():
            count = len({each.row.name for each in inventory.fused[module]})
            if count < 2 or not entry.shape or entry.shape[-1] != count or row not in always:
                continue
            rule = rules.PARTNERS_SCALE if always[row] else rules.PARTNERS_SCALE_FUSABLE
            rule = rule if part is PartKind.TENSOR_SCALE else rules.PARTNERS_INPUT_SCALE
            values = scalars[entry.name]
            for expert in range(len(values) // count):
                own = list(values[expert * count : (expert + 1) * count])
                if len(set(own)) > 1:
                    names = [f"{entry.name}[{expert}, {i}]" for i in range(count)]
                    _differ(rule, parameter, names, own, (inventory, findings))


def _report_factor(
    inventory: Inventory,
    entries: Mapping[str, Mapping[PartKind, TensorEntry]],
    scalars: Scalars,
    findings: Findings,
) -> None:
    """Report weight scales that are too small by a factor of their input scale."""
    rows: dict[str, list[tuple[StoredParameter, float, float]]] = defaultdict(list)
    for parameter in inventory.stored:
        parts = entries.get(parameter.module, {})
        if len(parts) == 2 and parameter.module not in inventory.fused:
            weight, inputs = (_decode_scale(parts[part], scalars) for part in _SCALARS)
            if 0 < weight < math.inf and 0 < inputs < math.inf:
                rows[parameter.parameter.row.name].append((parameter, weight, inputs))
    for members in rows.values():
        usual = median(weight for _, weight, _ in members)
        common = _is_common(members, usual)
        for stored_parameter, weight, inputs in members:
            if common:
                # The largest weight that codes can reach once the factor is removed.
                restored = weight / inputs * _LARGEST_CODED
                inside = _TINIEST_MATRIX < restored < 1 / _TINIEST_MATRIX
            else:
                lost = math.log(weight / usual)
                inside = lost < -_FAR and abs(lost - math.log(inputs)) < _NEAR
            if inside:
                _report_inside(
                    stored_parameter, entries, (weight, inputs, usual), (inventory, findings)
                )


def _is_common(members: list[tuple[StoredParameter, float, float]], usual: float) -> bool:
    """Return whether all scales of a row have the factor, so that none stands out.

    Either the row is smaller than any trained matrix, or it is small and its weight scales follow
    the input scales with a slope near 1, where independent ones have a slope of 0.
    """
    if usual * _LARGEST_CODED < _TINIEST_MATRIX:
        return True
    logs = [(math.log(inputs), math.log(weight / usual)) for _, weight, inputs in members]
    living = [(x, y) for x, y in logs if abs(y) < _FAR]  # dead experts have scales of their own
    if usual * _LARGEST_CODED > _SMALL_MATRIX or len(living) < _ENOUGH:
        return False
    slope, uncertainty = _slope(living)
    return slope > _STEEP and uncertainty < _SURE


def _slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of y over x by least squares, and its standard error."""
    count = len(points)
    mean_x, mean_y = (sum(column) / count for column in zip(*points, strict=True))
    width = sum((x - mean_x) ** 2 for x, _ in points)
    if not width:
        return 0.0, math.inf
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / width
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, math.sqrt(rest / (count - 2) / width)


def _decode_scale(entry: TensorEntry, scalars: Scalars) -> float:
    """Return a scale to multiply by; compressed-tensors stores both as divisors."""
    value = scalars[entry.name][0]
    if entry.name.endswith("_global_scale"):
        return 1 / value if value else math.inf
    return value


def _report_inside(
    parameter: StoredParameter,
    entries: Mapping[str, Mapping[PartKind, TensorEntry]],
    numbers: tuple[float, float, float],
    told: tuple[Inventory, Findings],
) -> None:
    weight, inputs, usual = numbers
    inventory, findings = told
    name = entries[parameter.module][PartKind.TENSOR_SCALE].name
    findings.add(
        rules.INPUT_SCALE_INSIDE,
        FindingLocation(name, parameter.module, inventory.layer_of(parameter.parameter)),
        f"{shown(name)} multiplies by {weight:.4g}; divided by the module's input_scale"
        f" {inputs:.4g} that is {weight / inputs:.4g} (median of its row: {usual:.4g}).",
        "Divide it by input_scale, which belongs to the activations.",
        weight_scale_2=weight,
        input_scale=inputs,
        median_of_row=usual,
    )
