"""Check how bytes are ordered: layout of block scales, packing order of codes, NVFP4 dialect.

A scale layout is inferred only where the correlation between scales and codes is weak, absolutely
or compared with siblings, and only for a few matrices of each role in a block. Undecided matrices
are reported as one note.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.findings import NOWHERE
from degarble.harness.checkpoint.audit.numbers.checks import E2M1_FORMATS
from degarble.harness.checkpoint.audit.numbers.siblings import group_median
from degarble.harness.checkpoint.audit.statistics.inference import (
    FAR,
    LINEAR,
    ORDER_NAMES,
    DialectTraces,
    Kinship,
    candidates,
    infer_dialect,
    infer_layout,
)
from degarble.harness.checkpoint.audit.table import CONVENTIONS, Judging, indices
from degarble.harness.checkpoint.transform.convert.vllm_parameters import (
    is_arranged,
    stated_backend,
)
from degarble.harness.checkpoint.view.modules import NamingConvention
from degarble.harness.checkpoint.view.weight_units import stored_of
from degarble.harness.formats.number_formats import ScaleDirection
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.statistics.inference import Inference

KINSHIPS = tuple(Kinship)

STRONG = -0.25  # a pairing that cannot be chance, nor an order that is nearly right
WEAKER = 0.6  # of the siblings' pairing: something is wrong in parts
FEWEST_BLOCKS = 1536  # chance correlates fewer by more than 0.025
FEWEST_REPORTED = 64  # matrices with fewer blocks are not even reported as undecided
_MOST_ROLES = 8  # named in evidence
LOOKED_AT = 3  # matrices of one role in one block; the others share the last one's result


def check_layouts(judging: Judging) -> None:
    """Infer the scale layout of matrices whose scales do not correlate with their codes."""
    table, units = judging.table, judging.table.units
    pairing = table["pairing"]
    packed = table.of_format(*E2M1_FORMATS) & (table["freedom"] >= FEWEST_BLOCKS)
    small = table.of_format(*E2M1_FORMATS) & ~packed & (table["freedom"] >= FEWEST_REPORTED)
    known = packed & np.isfinite(pairing)
    median = group_median([unit.role for unit in units], pairing, known, 3)
    whole = float(np.median(pairing[known])) if known.any() else float("nan")
    company = np.where(np.isfinite(median), np.minimum(median, whole), whole)
    weak = packed & ~(known & (pairing <= STRONG) & (pairing <= WEAKER * company))
    seen: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], Inference] = {}
    undecided, as_stated = indices(small & ~(pairing <= STRONG)), []
    stated = _stated_layouts(judging)
    for index in indices(weak):
        key = (units[index].role, units[index].place)
        seen[key] += 1
        if seen[key] <= LOOKED_AT:
            weight = stored_of(judging.checkpoint, units[index]).weight()
            last[key] = infer_layout(weight)
            judging.checkpoint.release()
        if last[key].value is not None and last[key].value == stated.get(index):
            as_stated.append(index)
        elif not _report_layout(judging, index, last[key], float(company[index])):
            undecided.append(index)
    _report_broken_claims(judging, [i for i in stated if not weak[i] and known[i]], stated)
    _note_stated(judging, as_stated, stated)
    _note_undecided(judging, undecided)


def _stated_layouts(judging: Judging) -> dict[int, str]:
    """Return, by row, the scale layout other than row-major that conversion.json states."""
    backend = stated_backend(judging.checkpoint)
    if backend is None or backend.scales.name == LINEAR:
        return {}
    nvfp4 = indices(judging.table.of_format("NVFP4"))
    arranged = [index for index in nvfp4 if is_arranged(judging.table.units[index].module)]
    return dict.fromkeys(arranged, backend.scales.name)


def _report_broken_claims(judging: Judging, rows: list[int], stated: dict[int, str]) -> None:
    """Report scales that lie in row-major order although another one is stated."""
    for index in rows:
        judging.report(
            rules.SCALE_LAYOUT,
            index,
            f"is in row-major order; conversion.json states `{stated[index]}`.",
            "Convert again: the requested backend reads these scales wrongly.",
            PartKind.BLOCK_SCALE,
            pairing=_rounded(float(judging.table["pairing"][index])),
        )


def _note_stated(judging: Judging, rows: list[int], stated: dict[int, str]) -> None:
    if rows:
        judging.findings.add(
            rules.SCALE_LAYOUT_STATED,
            NOWHERE,
            f"Block scales of {len(rows)} stacked matrices lie in the order `{stated[rows[0]]}`,"
            " as conversion.json states.",
            "Load them with that backend alone, without reordering them again.",
            matrices=len(rows),
        )


def _report_layout(judging: Judging, index: int, inferred: Inference, company: float) -> bool:
    """Report one matrix; return whether the layout was decided."""
    correlation = float(judging.table["pairing"][index])
    evidence = {
        "pairing": _rounded(correlation),
        "siblings": _rounded(company),
        "deviations": {name: round(z, 1) for name, z in _best(inferred)},
    }
    if inferred.value is not None and inferred.value != LINEAR:
        judging.report(
            rules.SCALE_LAYOUT,
            index,
            f"is in the order `{inferred.value}`: in that one scales and codes go together"
            f" (confidence {inferred.confidence:.6f}).",
            "Store scales in row-major order; engines reorder them when they load.",
            PartKind.BLOCK_SCALE,
            **evidence,
        )
        return True
    in_part = company <= STRONG and correlation > WEAKER * company
    linear = inferred.evidence.get(LINEAR, 0.0)
    if in_part and (inferred.value is None or correlation > STRONG):
        judging.report(
            rules.SCALE_UNRELATED,
            index,
            f"does not belong to its codes: correlation {correlation:+.2f}, its siblings'"
            f" {company:+.2f}, and no known order mends that.",
            "Look for the scales of another matrix, or for rows in an unknown order.",
            PartKind.BLOCK_SCALE,
            **evidence,
        )
        return True
    return inferred.value == LINEAR and linear >= FAR


def _rounded(value: float) -> float | None:
    return round(value, 3) if np.isfinite(value) else None


def _best(inferred: Inference) -> list[tuple[str, float]]:
    finite = [(name, z) for name, z in inferred.evidence.items() if np.isfinite(z)]
    return sorted(finite, key=lambda pair: -pair[1])[:4]


def _note_undecided(judging: Judging, undecided: list[int]) -> None:
    if undecided:
        first = judging.table.units[undecided[0]].name
        judging.findings.add(
            rules.SCALE_UNDECIDED,
            NOWHERE,
            f"Of {len(undecided)} matrices, {first} for one, statistics do not show whether their"
            " block scales are in order.",
            "Compare with the source by --against.",
            matrices=len(undecided),
        )


def check_orders(judging: Judging) -> None:
    """Report the packing orders that the walk inferred."""
    table = judging.table
    order, kin = table["order"], table["order_kin"]
    sibling = KINSHIPS.index(Kinship.SIBLING)
    for index in indices(order > 0):
        kinship = KINSHIPS[int(kin[index])]
        rule = rules.NIBBLE_ORDER if kin[index] == sibling else rules.NIBBLE_ORDER_LIKELY
        lead = float(table["order_lead"][index])
        judging.report(
            rule,
            index,
            f"is packed in the order `{ORDER_NAMES[order[index]]}`, going by {kinship}:"
            f" {lead:.0f} standard deviations.",
            "Swap the halves of its bytes, or convert it again with the order that engines read.",
            PartKind.CODES,
            deviations=round(lead, 1),
        )
    asked, open_ = int((order > -2).sum()), int((order == -1).sum())
    if open_:
        units = [table.units[index] for index in indices(order == -1)]
        judging.findings.add(
            rules.NIBBLE_ORDER_UNDECIDED,
            NOWHERE,
            f"Of {open_} of {asked} packed matrices, {units[0].name} for one, statistics do not"
            " show the packing order: swapped nibbles there would not be noticed.",
            "Run `degarble audit` with --against SOURCE: that decides it for every matrix.",
            matrices=open_,
            roles=list(dict.fromkeys(unit.role for unit in units))[:_MOST_ROLES],
        )


def check_dialects(judging: Judging) -> None:
    """Report which producer's traces the NVFP4 tensors show, by naming convention."""
    table = judging.table
    nvfp4 = table.of_format("NVFP4") & (table["scale_bits"] >= 0)
    groups: dict[int, list[int]] = defaultdict(list)
    for index in indices(nvfp4):
        groups[int(table["convention"][index])].append(index)
    for number, members in groups.items():
        convention = CONVENTIONS[number]
        traces = _traces(judging, members, convention)
        inferred, left = infer_dialect(traces), candidates(traces)
        found = inferred.value or "undecided"
        message = f"{len(members)} NVFP4 matrices under {convention} names: {found}."
        judging.findings.add(
            rules.DIALECT,
            NOWHERE,
            f"{message} {inferred.because[:1].upper()}{inferred.because[1:]}.",
            "Nothing to do; kernels read all of them.",
            matrices=len(members),
            candidates=list(left),
        )
        own = convention is NamingConvention.COMPRESSED_TENSORS
        if left and ("compressed_tensors" in left) != own and len(left) < 4:
            judging.findings.add(
                rules.DIALECT_OTHER,
                NOWHERE,
                f"{message} That is not what writes such names.",
                "Make sure that its tensor scales multiply or divide as the names promise.",
                candidates=list(left),
            )


def _traces(judging: Judging, members: list[int], convention: NamingConvention) -> DialectTraces:
    table = judging.table
    zero = table["zero_scale"][members]
    smallest = table["scale_smallest"][members]
    stored = table["tensor_scale"][members]
    powers = bool((table["scale_powers"][members] == table["blocks"][members]).all())
    return DialectTraces(
        scales=stored.tolist(),
        direction=(
            ScaleDirection.ENCODE
            if convention is NamingConvention.COMPRESSED_TENSORS
            else ScaleDirection.DECODE
        ),
        zero_bytes=zero[zero >= 0].tolist(),
        smallest=float(np.nanmin(smallest)) if np.isfinite(smallest).any() else 448.0,
        zero_over_codes=int(table["underflown"][members].sum()),
        powers_only=powers and bool((np.frexp(np.abs(stored))[0] == 0.5).all()),
    )
