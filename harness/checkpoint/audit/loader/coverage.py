"""Check one write of a loader: the box that a rank copies, its extents, dtype and identity.

`piece` cuts the box by a split rule. `judge_write` returns the broken rule with its message, or
None; loader/proof.py collects the results.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.loader.targets import Member
from degarble.harness.checkpoint.audit.rules import loader as rules
from degarble.harness.model.storage import Part
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.loader.maps import Split
    from degarble.harness.checkpoint.audit.loader.sources import Source
    from degarble.harness.checkpoint.audit.loader.targets import Truth
    from degarble.harness.checkpoint.audit.rules.rule import Rule

SCALES = frozenset({Part.BLOCK_SCALE, Part.TENSOR_SCALE, Part.INPUT_SCALE})

# The same bytes under another name: torch copies them as they are.
_VIEWS = frozenset({frozenset({"I8", "U8"}), frozenset({"F8_E8M0", "U8"})})
_MANTISSA = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
_INTEGERS = frozenset({"I64", "I32", "I16"})


class Wrong(NamedTuple):
    """A rule that a write breaks. `written`: the bytes are copied nevertheless."""

    rule: Rule
    told: str
    remedy: str
    written: bool = True


NO_SLOT = Member(Box(()))  # what a number stands for that a parameter has no slot for


@lru_cache(maxsize=65536)
def piece(shape: tuple[int, ...], split: Split | None, ranks: int, rank: int) -> Box:
    """Return the box of a stored tensor that one of `ranks` takes; scalars are repeated."""
    whole = Box.whole(shape)
    if split is None or split.dim >= len(shape):
        return whole
    extent = shape[split.dim]
    # Ranks take equal numbers of whole multiples; the last ones may take less, or nothing.
    blocks = -(-extent // split.multiple)
    step = -(-blocks // ranks) * split.multiple
    cut = (min(rank * step, extent), min((rank + 1) * step, extent))
    return Box((*whole.ranges[: split.dim], cut, *whole.ranges[split.dim + 1 :]))


def fits(taken: Box, slot: Box) -> bool:
    """Return whether a piece has the extents of a slot, which may have leading ones more."""
    extents, wanted = taken.shape, slot.shape
    lead = len(wanted) - len(extents)
    # A scalar may be stored with more dimensions than its slot has: [1] into [].
    if lead < 0:
        return prod(wanted) == 1 == prod(extents)
    return wanted[lead:] == extents and prod(wanted[:lead]) == 1


def judge_write(
    source: Source, taken: Box, dtype: str, member: Member, truth: Truth | None
) -> Wrong | None:
    """Return the first rule that a write breaks: identity, then dtype, then extents."""
    if member is NO_SLOT:
        return Wrong(
            rules.SHAPE,
            "is sent to a slot or an expert that the parameter does not have",
            "Correct the number of the slot.",
            written=False,
        )
    shape = judge_shape(source, taken, member)
    found = [
        judge_identity(source, taken, truth),
        judge_dtype(source, dtype, truth),
        shape,
    ]
    wrong = [each for each in found if each is not None]
    if not wrong:
        return None
    return wrong[0]._replace(written=all(each.written for each in wrong))


def judge_shape(source: Source, taken: Box, member: Member) -> Wrong | None:
    """Compare the extents of a piece with those of its slot."""
    if fits(taken, member.box):
        return None
    rule = rules.SHAPE
    if source.part in SCALES and len(source.shape) < 2 <= len(member.box.shape):
        rule = rules.SCALE_RANK
    part = "" if taken.shape == source.shape else f", of which a rank takes {list(taken.shape)}"
    return Wrong(
        rule,
        f"is {list(source.shape)}{part}; the slot is {list(member.box.shape)}",
        "Correct the rule that sends it there, or convert the tensor.",
        written=False,
    )


def judge_dtype(source: Source, dtype: str, truth: Truth | None) -> Wrong | None:
    """Compare the dtypes of a tensor and of the parameter that it is written to."""
    if source.dtype == dtype or frozenset({source.dtype, dtype}) in _VIEWS:
        return None
    if {source.dtype, dtype} <= _INTEGERS:
        return None
    told = f"is {source.dtype}, the parameter is {dtype}"
    before, after = _MANTISSA.get(source.dtype), _MANTISSA.get(dtype)
    if before is not None and after is not None:
        # fp16 keeps more digits than bf16 and less range: either way something is lost.
        if after >= before and {source.dtype, dtype} != {"F16", "BF16"}:
            return None
        return Wrong(rules.NARROWED, told, "Keep the parameter in the tensor's own type.")
    scale = source.part in SCALES or (truth is not None and truth.part in SCALES)
    return Wrong(
        rules.SCALE_DTYPE if scale else rules.DTYPE,
        told,
        "Convert the weight before it is loaded, or build the parameter in the weight's format.",
        written=False,
    )


def judge_identity(source: Source, taken: Box, truth: Truth | None) -> Wrong | None:
    """Compare part, parameter and box of a write with those that belong in the slot."""
    if truth is None or source.parameter is None:
        return None
    if source.parameter.name != truth.parameter.name:
        return _another_parameter(source, truth)
    if source.part is not truth.part:
        return _another_part(source, truth)
    if len(taken.ranges) != len(truth.box.ranges):
        return None  # its extents tell more
    if taken.ranges != truth.box.ranges:
        return Wrong(
            rules.WRONG_ROWS,
            f"gives its box {list(taken.ranges)}; this rank needs {list(truth.box.ranges)}",
            "Split it along the dimension and in the multiples by which the engine splits.",
        )
    return None


def _another_part(source: Source, truth: Truth) -> Wrong:
    rule = rules.WRONG_PART
    if source.part is Part.INPUT_SCALE:
        rule = rules.INPUT_SCALE_IN_WEIGHT
    return Wrong(
        rule,
        f"is the {source.part} of {truth.parameter.name}; its {truth.part} belongs there",
        "Correct the rule that sends it there.",
    )


def _another_parameter(source: Source, truth: Truth) -> Wrong:
    assert source.parameter is not None, "judge_identity asked"
    mine, wanted = source.parameter, truth.parameter
    rule = rules.WRONG_PARAMETER
    if mine.name.replace(".indexer.", ".") == wanted.name.replace(".indexer.", "."):
        rule = rules.PREFIX
    elif (mine.block, mine.expert) == (wanted.block, wanted.expert) and mine.shape == wanted.shape:
        rule = rules.SWAPPED_PARTNERS
    if source.part is Part.INPUT_SCALE is not truth.part:
        rule = rules.INPUT_SCALE_IN_WEIGHT
    return Wrong(
        rule,
        f"is {mine.name} ({source.part}); {wanted.name} ({truth.part}) belongs there",
        "Correct the rule that sends it there.",
    )
