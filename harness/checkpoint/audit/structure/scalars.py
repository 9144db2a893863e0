"""Check the scalar scales of NVFP4 modules: equal among partners, and free of the input scale.

Every weight_scale_2 and input_scale is read: two numbers a module, in the order of the files.
Partners must have equal scales, and no weight scale may have its input scale as a factor. Whether a
scale is finite, positive and of a sensible size is checked by the numbers audit.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.audit.structure.inventory import NVFP4
from degarble.harness.checkpoint.audit.structure.partners import fusable, partners
from degarble.harness.checkpoint.read.file_access import read_small
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.audit.structure.inventory import Found, Inventory
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.view import Checkpoint

_SCALARS = (Part.TENSOR_SCALE, Part.INPUT_SCALE)
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
    scalars = _read(each for parts in entries.values() for each in parts.values())
    for group in partners(inventory):
        members = [each for each in group.members if each.module in entries]
        if len(members) > 1 and len({each.module for each in members}) > 1:
            rule = rules.PARTNERS_SCALE if group.always else rules.PARTNERS_SCALE_FUSABLE
            _compare(members, entries, scalars, (rule, inventory, findings))
    _compare_stacked(inventory, entries, scalars, findings)
    _report_factor(inventory, entries, scalars, findings)


def _scalar_entries(
    checkpoint: Checkpoint, inventory: Inventory
) -> dict[str, dict[Part, TensorEntry]]:
    """Return the scalar scales of every NVFP4 module; absent ones are reported elsewhere."""
    found: dict[str, dict[Part, TensorEntry]] = {}
    for each in inventory.found:
        if each.weight == NVFP4 and each.module not in found:
            parts = checkpoint.table.parts(each.module)
            found[each.module] = {
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
    members: list[Found],
    entries: Mapping[str, Mapping[Part, TensorEntry]],
    scalars: Scalars,
    told: tuple[AuditRule, Inventory, Findings],
) -> None:
    """Compare, bit for bit, the scalars of partners in separate modules."""
    rule, inventory, findings = told
    for part in _SCALARS:
        names = [
            entries[each.module][part].name for each in members if part in entries[each.module]
        ]
        values = [scalars[name] for name in names]
        if len(set(values)) < 2:
            continue
        chosen = rule if part is Part.TENSOR_SCALE else rules.PARTNERS_INPUT_SCALE
        _differ(chosen, members[0], names, [value[0] for value in values], (inventory, findings))


def _differ(
    rule: AuditRule,
    first: Found,
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
    entries: Mapping[str, Mapping[Part, TensorEntry]],
    scalars: Scalars,
    findings: Findings,
) -> None:
    """Compare the scalars of partners in one module, whose last extent counts them."""
    always = {row: kind.always for kind in fusable(inventory.config) for row in kind.rows}
    by_module = {each.module: each for each in inventory.found if each.module in inventory.fused}
    for module, found in by_module.items():
        row = found.parameter.row.name
        for part, entry in entries.get(module, {}).items():
            count = len({each.row.name for each in inventory.fused[module]})
            if count < 2 or not entry.shape or entry.shape[-1] != count or row not in always:
                continue
            rule = rules.PARTNERS_SCALE if always[row] else rules.PARTNERS_SCALE_FUSABLE
            rule = rule if part is Part.TENSOR_SCALE else rules.PARTNERS_INPUT_SCALE
            values = scalars[entry.name]
            for expert in range(len(values) // count):
                own = list(values[expert * count : (expert + 1) * count])
                if len(set(own)) > 1:
                    names = [f"{entry.name}[{expert}, {i}]" for i in range(count)]
                    _differ(rule, found, names, own, (inventory, findings))


def _report_factor(
    inventory: Inventory,
    entries: Mapping[str, Mapping[Part, TensorEntry]],
    scalars: Scalars,
    findings: Findings,
) -> None:
    """Report weight scales that are too small by a factor of their input scale."""
    rows: dict[str, list[tuple[Found, float, float]]] = defaultdict(list)
    for each in inventory.found:
        parts = entries.get(each.module, {})
        if len(parts) == 2 and each.module not in inventory.fused:
            weight, inputs = (_decode_scale(parts[part], scalars) for part in _SCALARS)
            if 0 < weight < math.inf and 0 < inputs < math.inf:
                rows[each.parameter.row.name].append((each, weight, inputs))
    for members in rows.values():
        usual = median(weight for _, weight, _ in members)
        common = _is_common(members, usual)
        for found, weight, inputs in members:
            if common:
                # The largest weight that codes can reach once the factor is removed.
                restored = weight / inputs * _LARGEST_CODED
                inside = _TINIEST_MATRIX < restored < 1 / _TINIEST_MATRIX
            else:
                lost = math.log(weight / usual)
                inside = lost < -_FAR and abs(lost - math.log(inputs)) < _NEAR
            if inside:
                _report_inside(found, entries, (weight, inputs, usual), (inventory, findings))


def _is_common(members: list[tuple[Found, float, float]], usual: float) -> bool:
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
    found: Found,
    entries: Mapping[str, Mapping[Part, TensorEntry]],
    numbers: tuple[float, float, float],
    told: tuple[Inventory, Findings],
) -> None:
    weight, inputs, usual = numbers
    inventory, findings = told
    name = entries[found.module][Part.TENSOR_SCALE].name
    findings.add(
        rules.INPUT_SCALE_INSIDE,
        FindingLocation(name, found.module, inventory.layer_of(found.parameter)),
        f"{shown(name)} multiplies by {weight:.4g}; divided by the module's input_scale"
        f" {inputs:.4g} that is {weight / inputs:.4g} (median of its row: {usual:.4g}).",
        "Divide it by input_scale, which belongs to the activations.",
        weight_scale_2=weight,
        input_scale=inputs,
        median_of_row=usual,
    )
