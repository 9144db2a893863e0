"""Check each weight alone: its scales, codes, values and rows, and whether it is stored twice.

The thresholds of every rule that needs no sibling are here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.findings import FindingLocation
from degarble.harness.checkpoint.audit.table import (
    Judging,
    as_hex,
    indices,
    percent,
    sentinel,
)
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.parameters import routed_experts
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.rules import AuditRule


# --------------------------------------------------------------------------------------------------
# Each check selects the rows of the table that break its rule by column operations, so healthy
# weights cost nothing.

_AGAIN = "Quantise it again from its source, or restore the file that it came from."
_FIND = "Find out which step wrote it; the source has to be converted again."
_UNDER_ZERO = "of its blocks hold codes under a scale of zero"
_SUBNORMAL = "of its block scales are subnormal"
E2M1_FORMATS = ("NVFP4", "MXFP4")

TINY = 2.0**-60
SCATTERED_SHARE = 0.05
VALUES_SCATTERED_SHARE = 0.01
VANISHED_SHARE = 0.05
SUBNORMAL_SHARE = 0.01
FEW_BLOCKS = 256  # fewer may well agree in what many never agree in
PILE_UP = 4  # times as many scales at the largest number as at the one below it
CLIPPED_SHARE = 0.005
FEWEST_CLIPPED = 16  # blocks: an mse rule may bring a handful to the largest scale
UNUSED_FACTOR = 16
NOISE_BITS = 7.985  # bits a byte; uniform noise has 8, normally distributed weights 7.93
NOISE_SAMPLE = 1 << 19  # bytes of codes: with one row in eight counted, 65,536 bytes
LOW_TOPS = 0.005
UNWRITTEN_SHARE = 1 / 8
UNWRITTEN_END = 1 / 4  # columns up to the last one may be padding
FEWEST_ROWS = 16


def check_scales(judging: Judging) -> None:
    """Check tensor scales, input scales and block scales, each alone."""
    _check_scalars(judging, "tensor_scale", "scale_bits", PartKind.TENSOR_SCALE)
    _check_scalars(judging, "input_scale", "input_bits", PartKind.INPUT_SCALE)
    _check_block_scales(judging)
    _check_range(judging)


def _check_scalars(judging: Judging, column: str, bits: str, part: PartKind) -> None:
    table = judging.table
    value, present = table[column], table[bits] >= 0
    for index in indices(present & ~np.isfinite(value)):
        raw = int(table[bits][index])
        judging.report(
            rules.SCALE_NOT_FINITE,
            index,
            f"is {value[index]}: bits {as_hex(raw)}{sentinel(raw)}.",
            _AGAIN,
            part,
            bits=as_hex(raw),
        )
    for index in indices(present & (value <= 0)):
        text = "zero" if value[index] == 0 else f"negative: {value[index]:.6g}"
        judging.report(rules.SCALE_NOT_POSITIVE, index, f"is {text}.", _AGAIN, part)
    decode = table["decode_scale"] if part is PartKind.TENSOR_SCALE else value
    for index in indices(present & (decode > 0) & (decode < TINY)):
        judging.report(
            rules.SCALE_TINY,
            index,
            f"decodes by {decode[index]:.3g}, below 2^-60.",
            "If the expert is meant to be dead, make sure that every engine treats it as zero.",
            part,
            decode_scale=float(decode[index]),
        )


def _check_block_scales(judging: Judging) -> None:
    table = judging.table
    blocks = table["blocks"]
    has_codes = blocks - table["zero_blocks"] > 0
    for name, rule, text in (
        ("scale_not_finite", rules.SCALE_NOT_FINITE, "NaN or infinite"),
        ("scale_negative", rules.SCALE_NOT_POSITIVE, "negative"),
    ):
        for index in indices(table[name] > 0):
            count = int(table[name][index])
            message = f"has {count} of {blocks[index]} block scales that are {text}."
            judging.report(rule, index, message, _AGAIN, PartKind.BLOCK_SCALE, count=count)
    in_floats = table.of_format("FP8_128X128_F32", "FP8_1X128_F32")
    constant = (table["scale_distinct"] == 1) & has_codes & (blocks >= FEW_BLOCKS)
    for index in indices(constant & (table.of_format("NVFP4") | in_floats)):
        scale = float(table["scale_largest"][index])
        judging.report(
            rules.SCALE_CONSTANT,
            index,
            f"has the one block scale {scale:g} in all of its {blocks[index]} blocks.",
            _FIND,
            PartKind.BLOCK_SCALE,
            scale=scale,
        )
    for index in indices((table["scale_far"] > SCATTERED_SHARE) & (blocks >= FEW_BLOCKS)):
        share = float(table["scale_far"][index])
        low, high = float(table["scale_smallest"][index]), float(table["scale_largest"][index])
        judging.report(
            rules.SCALE_SCATTERED,
            index,
            f"has {percent(share)} of its block scales far from the others,"
            f" between {low:.3g} and {high:.3g}.",
            "Look for memory that was never written, or for bits of another type.",
            PartKind.BLOCK_SCALE,
            share=share,
        )


def _check_range(judging: Judging) -> None:
    """Check how block scales use their range: zero, subnormal, clipped, unused."""
    table = judging.table
    blocks = table["blocks"]
    with_codes = np.maximum(blocks - table["zero_blocks"], 1)
    vanished = table["underflown"] / with_codes
    subnormal = table["scale_subnormal"] / with_codes
    largest, below = table["scale_at_largest"], np.maximum(table["scale_below_largest"], 1)
    clipped = (largest > CLIPPED_SHARE * with_codes) & (largest > PILE_UP * below)
    clipped &= largest >= FEWEST_CLIPPED
    in_range = table.of_format("NVFP4") & (blocks >= FEW_BLOCKS)
    checks: tuple[tuple[AuditRule, NDArray[np.bool_], NDArray[np.float64], str], ...] = (
        (
            rules.SCALE_VANISHED,
            vanished > VANISHED_SHARE,
            vanished,
            _UNDER_ZERO,
        ),
        (
            rules.SCALE_UNDERFLOWN,
            (vanished > 0) & (vanished <= VANISHED_SHARE),
            vanished,
            f"{_UNDER_ZERO}, so they decode to zero",
        ),
        (rules.SCALE_SUBNORMAL, subnormal > SUBNORMAL_SHARE, subnormal, _SUBNORMAL),
        (
            rules.AMAX_CLIPPED,
            in_range & clipped,
            largest / with_codes,
            "of its block scales are the largest that there is, and few are just below",
        ),
    )
    for rule, mask, share, text in checks:
        for index in indices(mask):
            amount = float(share[index])
            message = f"{percent(amount)} {text}."
            judging.report(rule, index, message, _AGAIN, PartKind.BLOCK_SCALE, share=amount)
    for index in indices(in_range & (table["scale_largest"] * UNUSED_FACTOR < 448)):
        factor = 448 / float(table["scale_largest"][index])
        judging.report(
            rules.AMAX_UNUSED,
            index,
            f"was made for an amax {factor:.1f} times as large as the largest value in it.",
            "Harmless unless its block scales are subnormal; see whose amax it was.",
            PartKind.TENSOR_SCALE,
            factor=factor,
        )


def check_codes(judging: Judging) -> None:
    """Check packed codes: noise, one constant code, blocks whose largest code is low."""
    table = judging.table
    packed = table.of_format(*E2M1_FORMATS)
    noise = packed & (table["byte_entropy"] > NOISE_BITS) & (table["elements"] >= 2 * NOISE_SAMPLE)
    for index in indices(noise):
        bits = float(table["byte_entropy"][index])
        judging.report(
            rules.CODES_RANDOM,
            index,
            f"has {bits:.4f} bits of entropy a byte; noise has 8, quantised weights at most 7.95.",
            "Look for memory that was never written, for another type's bytes, for encryption.",
            PartKind.CODES,
            entropy=bits,
        )
    not_zero = table["zeros"] < table["elements"]
    filled = packed & not_zero & (table["common_byte"] > 0.999) & (table["elements"] >= 4096)
    for index in indices(filled):
        judging.report(rules.CODES_CONSTANT, index, "holds one code alone.", _AGAIN, PartKind.CODES)
    exact = table["scale_powers"] * 10 > table["blocks"] * 9  # MXFP4 cast without loss
    # Scaling by a block's maximum brings its largest code to 4 or 6.
    low = table.of_format("NVFP4") & ~exact & (table["ordinary"] >= FEW_BLOCKS)
    for index in indices(low & (table["top_low"] > LOW_TOPS)):
        share = float(table["top_low"][index])
        judging.report(
            rules.BLOCK_MAXIMUM,
            index,
            f"has {percent(share)} of its blocks whose largest code is below 4.",
            "See which rule chose its block scales, or whether they belong to other blocks.",
            PartKind.CODES,
            share=share,
        )


def check_values(judging: Judging) -> None:
    """Check values: not finite, scattered, ids out of range, rows and columns of zeros."""
    table = judging.table
    for index in indices(table["not_finite"] > 0):
        count = int(table["not_finite"][index])
        message = f"holds {count} of {table['elements'][index]} numbers that are NaN or infinite."
        judging.report(rules.VALUE_NOT_FINITE, index, message, _AGAIN, count=count)
    plain = table.of_format("plain") & (table["elements"] >= FEW_BLOCKS)
    for index in indices(plain & (table["far"] > VALUES_SCATTERED_SHARE)):
        share = float(table["far"][index])
        judging.report(
            rules.VALUE_SCATTERED,
            index,
            f"has {percent(share)} of its values a factor of 2^40 or more from the others.",
            "Look for memory that was never written, or for bits of another type.",
            share=share,
        )
    _check_ids(judging)
    _check_zero_rows(judging)
    _check_zero_columns(judging)
    for name, why in table.unread.items():
        judging.findings.add(
            rules.NOT_READ,
            FindingLocation(name),
            f"{name} was not read: {why}.",
            "Audit it elsewhere.",
        )


def _check_ids(judging: Judging) -> None:
    model, table = judging.checkpoint.model, judging.table
    if model is None:
        return
    ids = np.array([unit.role.endswith("tid2eid") for unit in table.units], np.bool_)
    outside = (table["lowest"] < 0) | (table["highest"] >= routed_experts(model))
    for index in indices(ids & outside):
        low, high = int(table["lowest"][index]), int(table["highest"][index])
        judging.report(
            rules.ID_OUT_OF_RANGE,
            index,
            f"names experts {low} to {high}; there are {routed_experts(model)}.",
            _FIND,
        )


def _check_zero_rows(judging: Judging) -> None:
    """Report zero rows in linears that are not all zero; siblings.py judges zero tensors."""
    table = judging.table
    height, run = table["height"], table["run_rows"]
    some = (table["zero_rows"] > 0) & (table["zeros"] < table["elements"]) & judging.linear
    end = table["run_begin"] + run
    torn = (run >= np.maximum(FEWEST_ROWS, UNWRITTEN_SHARE * height)) & (end < height)
    for index in indices(some & torn):
        first, last = int(table["run_begin"][index]), int(end[index]) - 1
        judging.report(
            rules.ROWS_UNWRITTEN,
            index,
            f"has nothing but zeros in rows {first} to {last} of {height[index]}.",
            "Look for the part of a fused parameter that was never written there.",
            rows=[first, last],
        )
    for index in indices(some & ~torn):
        count = int(table["zero_rows"][index])
        judging.report(
            rules.ZERO_ROWS,
            index,
            f"has {count} rows of zeros out of {height[index]}, the longest run"
            f" {run[index]} from row {table['run_begin'][index]} on.",
            "Fine for padding and pruned neurons; compare with the source.",
            count=count,
        )


def _check_zero_columns(judging: Judging) -> None:
    """Report runs of columns that are zero in sampled rows, if the zeros of all rows suffice."""
    table = judging.table
    height, run = table["height"], table["run_columns"]
    width = table["elements"] // np.maximum(height, 1)
    some = judging.linear & (run >= FEWEST_ROWS) & (run * height <= table["zeros"])
    some &= table["zeros"] < table["elements"]
    end = table["column_begin"] + run
    least = np.where(end < width, UNWRITTEN_SHARE, UNWRITTEN_END) * width
    for index in indices(some & (run >= least)):
        first, last = int(table["column_begin"][index]), int(end[index]) - 1
        judging.report(
            rules.COLUMNS_UNWRITTEN,
            index,
            f"has nothing but zeros in columns {first} to {last} of {width[index]}.",
            "Look for the rank whose part of the columns was never written there.",
            columns=[first, last],
        )


def check_norms(judging: Judging) -> None:
    """Report norms that are zero throughout."""
    table = judging.table
    norms = np.array([unit.kind is Kind.NORM for unit in table.units], np.bool_)
    for index in indices(norms & (table["zeros"] == table["elements"]) & (table["elements"] > 0)):
        judging.report(rules.TENSOR_ZERO, index, "is zero throughout.", _FIND)


# --------------------------------------------------------------------------------------------------
# Matrices that are stored twice: identical, or with their rows in another order. Digests of rows
# are compared. Constant tensors, small ones and vectors may agree by right and are left out. Equal
# embeddings, heads and their copies in a drafter may be tied and give a note.

# Matrices below these sizes may agree by right.
FEWEST_ELEMENTS = 4096
FEWEST_COPIED_ROWS = 16


def check_copies(judging: Judging) -> None:
    """Report matrices that hold the same rows."""
    table = judging.table
    named = np.array([unit.kind is not None for unit in table.units], np.bool_)
    tied = np.array([_may_be_tied(unit.kind, unit.role) for unit in table.units], np.bool_)
    judged = (judging.linear | tied | ~named) & ~table.of_format("integers")
    judged &= (table["elements"] >= FEWEST_ELEMENTS) & (table["height"] >= FEWEST_COPIED_ROWS)
    judged &= (table["common_byte"] < 0.999) & (table["zeros"] < table["elements"])
    for members in _groups(judging, judged):
        first = table.units[members[0]].name
        for index in members[1:]:
            same = table["digest"][index] == table["digest"][members[0]]
            _report(judging, index, first, is_same=bool(same), is_tied=bool(tied[members].all()))


def _may_be_tied(kind: Kind | None, role: str) -> bool:
    last = role.rpartition(".")[2]
    return kind is Kind.EMBEDDING or last in ("embed", "head", "lm_head", "embed_tokens")


def _groups(judging: Judging, judged: NDArray[np.bool_]) -> list[list[int]]:
    table = judging.table
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index in indices(judged):
        key = (table["format"][index], table["elements"][index], table["row_digest"][index])
        groups[key].append(index)
    return [members for members in groups.values() if len(members) > 1]


def _report(judging: Judging, index: int, first: str, *, is_same: bool, is_tied: bool) -> None:
    remedy = "See who copied it; restore the real one from the source."
    # `row_digest` groups matrices with the same rows in any order; `digest` compares the order.
    if is_same:
        rule = rules.IDENTICAL_TIED if is_tied else rules.IDENTICAL
        message = f"holds the same codes as {shown(first)}, in every row."
        judging.report(rule, index, message, remedy, same_as=first)
    else:
        message = f"holds the rows of {shown(first)} in another order."
        judging.report(rules.PERMUTED, index, message, remedy, same_as=first)
