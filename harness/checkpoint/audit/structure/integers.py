"""Compare what configs state about integer weights with the stored modules, whatever the model.

Bits and group sizes follow from shapes. Of the data only group indices and the first zero points
are read. Needs no torch.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import FindingLocation
from degarble.harness.checkpoint.read.file_access import read_small
from degarble.harness.checkpoint.read.types import TensorEntry, shown
from degarble.harness.checkpoint.view.quantisation_configs import integer_claims
from degarble.harness.checkpoint.view.schemes import CT_INTEGERS
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.findings import Findings
    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.view.modules import StoredForm
    from degarble.harness.checkpoint.view.quantisation_configs import IntegerClaim
    from degarble.harness.checkpoint.view.view import Checkpoint

_SAMPLE = 4096  # bytes of zero points
_WORD = "I32"
_SYMMETRIC = {"gptq": {4: 0x77, 8: 0x7F}, "gptq_v2": {4: 0x88, 8: 0x80}}  # each byte, zero = half


def report_stated_integers(checkpoint: Checkpoint, findings: Findings) -> None:
    """Report integer modules whose bits, group, zero points or order differ from the config."""
    read = [integer_claims(file, raw) for file, raw in checkpoint.quantisation.items()]
    claims = [stated for stated in read if stated is not None]
    for module, bits in checkpoint.table.suffixes.items() if claims else ():
        try:
            form = checkpoint.table.form(module) if bits else None
        except Refused:
            continue  # reported on its own
        if form is None or form.scheme is None:
            continue
        for stated in claims:
            claim = stated.claim(module)
            if claim is not None:
                _judge(form, claim, findings)


def _judge(form: StoredForm, claim: IntegerClaim, findings: Findings) -> None:
    fmt = form.format
    assert fmt is not None
    assert form.scheme is not None
    # A byte holds codes of fewer bits as well: compressed-tensors stores W4A8 so.
    fits = form.scheme.name == CT_INTEGERS.name and (claim.bits or 0) < fmt.element.bits
    if claim.bits is not None and claim.bits != fmt.element.bits and not fits:
        text = f"has codes of {fmt.element.bits} bits"
        _report(rules.CONTRADICTS, form, claim, (text, f"{claim.bits} bits"), findings)
    width = form.block[1] if form.block else 0
    group = width if claim.group in (None, -1) else claim.group
    if group != width or (claim.group == -1 and width != form.shape[1]):
        text = f"has one scale for {width} columns, by its shapes"
        stated = "whole rows" if claim.group == -1 else f"groups of {claim.group}"
        _report(rules.BLOCK_SIZE_BUILT, form, claim, (text, stated), findings)
    index = form.parts.get(PartKind.GROUP_INDEX)
    if index is not None and index.dtype == _WORD:
        ordered = _is_ordered(index)
        if claim.act_order is False and not ordered:
            text = "has columns in another order (g_idx), which engines then ignore"
            _report(rules.CONTRADICTS, form, claim, (text, "no act-order"), findings)
    centre = _SYMMETRIC.get(form.scheme.name, {}).get(fmt.element.bits)
    if claim.symmetric and centre is not None and PartKind.ZERO_POINT in form.parts:
        zeros = _first_bytes(form.parts[PartKind.ZERO_POINT])
        if set(zeros) - {centre}:
            text = f"has zero points other than {1 << (fmt.element.bits - 1)}, which engines ignore"
            _report(rules.CONTRADICTS, form, claim, (text, "symmetric codes"), findings)


def _is_ordered(entry: TensorEntry) -> bool:
    ((_, raw),) = read_small((entry,))
    groups = struct.unpack(f"<{len(raw) // 4}i", raw)
    return list(groups) == sorted(groups)


def _first_bytes(entry: TensorEntry) -> bytes:
    """Return the first zero points; all of them are read by the numbers audit."""
    end = min(entry.end, entry.begin + _SAMPLE)
    piece = TensorEntry(
        entry.name, entry.dtype, ((end - entry.begin) // 4,), entry.file, entry.begin, end
    )
    ((_, raw),) = read_small((piece,))
    return bytes(raw)


def _report(
    rule: AuditRule,
    form: StoredForm,
    claim: IntegerClaim,
    told: tuple[str, str],
    findings: Findings,
) -> None:
    found, stated = told
    findings.add(
        rule,
        FindingLocation(None, form.module),
        f"{shown(form.module)} {found}; {shown(claim.text)} states {stated}.",
        "Correct the config to what the shards hold, or write the module again as it states.",
        found=found,
        stated=stated,
    )
