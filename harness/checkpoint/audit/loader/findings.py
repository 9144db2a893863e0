"""Judge single writes of a loader, and word the findings of a proof.

The same finding on several ranks is one; wrong writes and uncovered elements are grouped by
parameter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import (
    NOWHERE,
    Finding,
    FindingLocation,
    Findings,
    format_ranges,
)
from degarble.harness.checkpoint.audit.loader.maps import NameOutcome
from degarble.harness.checkpoint.audit.loader.targets import Member
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.base.errors import LayoutMismatch
    from degarble.harness.checkpoint.audit.loader.maps import DerivedNames, ResolvedName, Split
    from degarble.harness.checkpoint.audit.loader.sources import MatchedConversion, SourceTensor
    from degarble.harness.checkpoint.audit.loader.targets import ExpectedContent
    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory, StoredParameter
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# One write: the box that a rank copies, its extents, dtype and identity. `piece` cuts the box by a
# split rule. `judge_write` returns the broken rule with its message, or None.

SCALES = frozenset({PartKind.BLOCK_SCALE, PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE})

# The same bytes under another name: torch copies them as they are.
_VIEWS = frozenset({frozenset({"I8", "U8"}), frozenset({"F8_E8M0", "U8"})})
_MANTISSA = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
_INTEGERS = frozenset({"I64", "I32", "I16"})


class WrongWrite(NamedTuple):
    """A rule that a write breaks. `written`: the bytes are copied nevertheless."""

    rule: AuditRule
    text: str
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
    source: SourceTensor, taken: Box, dtype: str, member: Member, truth: ExpectedContent | None
) -> WrongWrite | None:
    """Return the first rule that a write breaks: identity, then dtype, then extents."""
    if member is NO_SLOT:
        return WrongWrite(
            rules.LOADER_SHAPE,
            "is sent to a slot or an expert that the parameter does not have",
            "Correct the number of the slot.",
            written=False,
        )
    shape = judge_shape(source, taken, member)
    writes = [
        judge_identity(source, taken, truth),
        judge_dtype(source, dtype, truth),
        shape,
    ]
    wrong = [write for write in writes if write is not None]
    if not wrong:
        return None
    return wrong[0]._replace(written=all(write.written for write in wrong))


def judge_shape(source: SourceTensor, taken: Box, member: Member) -> WrongWrite | None:
    """Compare the extents of a piece with those of its slot."""
    if fits(taken, member.box):
        return None
    rule = rules.LOADER_SHAPE
    if source.part in SCALES and len(source.shape) < 2 <= len(member.box.shape):
        rule = rules.LOADER_SCALE_RANK
    part = "" if taken.shape == source.shape else f", of which a rank takes {list(taken.shape)}"
    return WrongWrite(
        rule,
        f"is {list(source.shape)}{part}; the slot is {list(member.box.shape)}",
        "Correct the rule that sends it there, or convert the tensor.",
        written=False,
    )


def judge_dtype(
    source: SourceTensor, dtype: str, truth: ExpectedContent | None
) -> WrongWrite | None:
    """Compare the dtypes of a tensor and of the parameter that it is written to."""
    if source.dtype == dtype or frozenset({source.dtype, dtype}) in _VIEWS:
        return None
    if {source.dtype, dtype} <= _INTEGERS:
        return None
    text = f"is {source.dtype}, the parameter is {dtype}"
    before, after = _MANTISSA.get(source.dtype), _MANTISSA.get(dtype)
    if before is not None and after is not None:
        # fp16 keeps more digits than bf16 and less range: either way something is lost.
        if after >= before and {source.dtype, dtype} != {"F16", "BF16"}:
            return None
        return WrongWrite(
            rules.LOADER_NARROWED, text, "Keep the parameter in the tensor's own type."
        )
    scale = source.part in SCALES or (truth is not None and truth.part in SCALES)
    return WrongWrite(
        rules.LOADER_SCALE_DTYPE if scale else rules.DTYPE,
        text,
        "Convert the weight before it is loaded, or build the parameter in the weight's format.",
        written=False,
    )


def judge_identity(
    source: SourceTensor, taken: Box, truth: ExpectedContent | None
) -> WrongWrite | None:
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
        return WrongWrite(
            rules.WRONG_ROWS,
            f"gives its box {list(taken.ranges)}; this rank needs {list(truth.box.ranges)}",
            "Split it along the dimension and in the multiples by which the engine splits.",
        )
    return None


def _another_part(source: SourceTensor, truth: ExpectedContent) -> WrongWrite:
    rule = rules.WRONG_PART
    if source.part is PartKind.INPUT_SCALE:
        rule = rules.INPUT_SCALE_IN_WEIGHT
    return WrongWrite(
        rule,
        f"is the {source.part} of {truth.parameter.name}; its {truth.part} belongs there",
        "Correct the rule that sends it there.",
    )


def _another_parameter(source: SourceTensor, truth: ExpectedContent) -> WrongWrite:
    assert source.parameter is not None, "judge_identity asked"
    mine, wanted = source.parameter, truth.parameter
    rule = rules.WRONG_PARAMETER
    if mine.name.replace(".indexer.", ".") == wanted.name.replace(".indexer.", "."):
        rule = rules.PREFIX
    elif (mine.block, mine.expert) == (wanted.block, wanted.expert) and mine.shape == wanted.shape:
        rule = rules.SWAPPED_PARTNERS
    if source.part is PartKind.INPUT_SCALE is not truth.part:
        rule = rules.INPUT_SCALE_IN_WEIGHT
    return WrongWrite(
        rule,
        f"is {mine.name} ({source.part}); {wanted.name} ({truth.part}) belongs there",
        "Correct the rule that sends it there.",
    )


_LAYER = re.compile(r"\blayers\.(\d{1,9})\b")
_MOST_BOXES = 4  # shown in a message


class LoaderFindings:
    """Collector of the findings of one proof."""

    def __init__(self, inventory: Inventory | None) -> None:
        self._inventory = inventory
        self._findings = Findings()
        self._wrong: dict[tuple[str, str, WrongWrite], tuple[SourceTensor, set[int]]] = {}
        self._boxes: dict[tuple[AuditRule, str, tuple[Box, ...], str], set[int]] = defaultdict(set)

    def wrong(self, source: SourceTensor, target: str, wrong: WrongWrite, rank: int) -> None:
        """Add a write that breaks a rule."""
        self._wrong.setdefault((source.name, target, wrong), (source, set()))[1].add(rank)

    def boxes(
        self, rule: AuditRule, target: str, boxes: tuple[Box, ...], why: str, rank: int
    ) -> None:
        """Add elements of a parameter that are unwritten, or written twice."""
        self._boxes[rule, target, boxes, why].add(rank)

    def unread(self, source: SourceTensor, boxes: tuple[Box, ...]) -> None:
        """Add elements of a placed tensor that no rank reads."""
        self._findings.add(
            rules.LOADER_UNREAD,
            FindingLocation(source.name, None, self._layer(source.parameter, source.name)),
            f"{shown(source.name)}: {_box_text(boxes)} of {list(source.shape)} reach no rank.",
            "Check the split rule and the number of ranks.",
            boxes=_listed(boxes),
        )

    def lost(
        self, source: SourceTensor, resolved: ResolvedName, leaves: Iterable[str] = ()
    ) -> None:
        """Add a tensor of the model that is skipped or dropped, and what it leaves unwritten."""
        assert source.parameter is not None, "a tensor of the model"
        skipped = resolved.outcome is NameOutcome.SKIPPED
        rule = rules.SKIPPED if skipped else rules.DROPPED
        if source.part in SCALES:
            rule = rules.SKIPPED_SCALE if skipped else rules.DROPPED_SCALE
        why = f"{shown(resolved.target)} is no parameter of the engine"
        if skipped:
            why = f"the pattern {shown(resolved.by)} covers it"
        self._findings.add(
            rule,
            FindingLocation(source.name, None, self._layer(source.parameter, source.name)),
            f"{shown(source.name)}, the {source.part} of {source.parameter.name}, is"
            f" {resolved.outcome}: {why}{_left(leaves)}.",
            "Narrow the pattern." if skipped else "Add a rule that places it.",
            pattern=shown(resolved.by),
            renamed=shown(resolved.target),
        )

    def add_unknown(self, source: SourceTensor, resolved: ResolvedName) -> None:
        """Add a tensor that the model does not have and that goes nowhere."""
        self._findings.add(
            rules.EXTRA_DROPPED,
            FindingLocation(source.name),
            f"{shown(source.name)}, no tensor of the model, is {resolved.outcome}.",
            "Nothing.",
        )

    def of_names(self, derived: DerivedNames) -> None:
        """Add tensors that the model does not have, and tied ones that differ."""
        for name in derived.unexpected:
            self._findings.add(
                rules.UNREAD_NAME,
                FindingLocation(name, None, self._layer(None, name)),
                f"{shown(name)} belongs to no parameter of the model: nobody reads it.",
                "Rename it as the model's config.json implies, or leave it out.",
            )
        for first, other in derived.tied_apart:
            self._findings.add(
                rules.TIED_APART,
                FindingLocation(other, first),
                f"{shown(other)} is tied to {shown(first)} and has other values:"
                " the loader keeps one of them.",
                "Set tie_word_embeddings to false in config.json if they are two weights.",
            )

        for name in derived.undecided:
            self._findings.add(
                rules.UNDECIDED,
                FindingLocation(name, None, self._layer(None, name), "source"),
                f"{shown(name)}: where it goes is not plain from {derived.origin}; degarble's"
                " packing table placed it.",
                "Compare with the engine's own parameters, or state the rule in a map.",
            )

    def elsewhere(self, pattern: str, reason: str) -> None:
        """Add a tensor that another loader reads."""
        self._findings.add(
            rules.ELSEWHERE,
            FindingLocation(None, pattern),
            f"Tensors by {shown(pattern)} are left to another loader: {shown(reason)}.",
            "Prove that loader too.",
        )

    def format(self, found: StoredParameter, built: str) -> None:
        """Add a weight that the engine builds in another format than the stored one."""
        block, expert = found.parameter.block, found.parameter.expert
        drafts = block is not None and block.is_drafter and expert is not None
        layer = self._layer(found.parameter, found.module)
        self._findings.add(
            rules.DRAFTER_FORMAT if drafts else rules.FORMAT,
            FindingLocation(None, found.module, layer, f"{found.weight} as {built}"),
            f"{shown(found.module)} is stored as {found.weight}, the engine builds {built}.",
            "Convert it beforehand, add a conversion to the map, or change what the engine builds.",
            stored=found.weight,
            built=built,
        )

    def conversion(self, conversion: MatchedConversion) -> None:
        """Check what a conversion reads, and which block size it states."""
        found, rule = conversion.parameter, conversion.rule
        place = FindingLocation(None, found.module, self._layer(found.parameter, found.module))
        unread = sorted(conversion.has - {PartKind.INPUT_SCALE} - conversion.reads)
        if unread:
            self._findings.add(
                rules.SCALE_UNREAD,
                place,
                f"{shown(found.module)} is converted to {rule.to} without its"
                f" {' and '.join(unread)}.",
                "Read codes and every scale of the weight.",
                unread=[str(part) for part in unread],
            )
        if PartKind.INPUT_SCALE in conversion.reads:
            self._findings.add(
                rules.INPUT_SCALE_IN_WEIGHT,
                place,
                f"{shown(found.module)} is converted to {rule.to} with its input_scale, which"
                " belongs to the activations.",
                "Leave input_scale out.",
            )
        if rule.to != "BF16" and rule.block is None:
            self._findings.add(
                rules.BLOCK_UNSTATED,
                place,
                f"{shown(found.module)} is converted to {rule.to}, in blocks that nothing states.",
                "State the block, such as [128, 128].",
            )

    def constant(self, target: str, value: float, scale: bool, rank: int) -> None:
        """Add elements that hold a constant instead of the checkpoint's values."""
        rule = rules.CONSTANT_SCALE if scale else rules.UNWRITTEN
        self._boxes[rule, target, (), f"holds the constant {value:g}"].add(rank)

    def partners_differ(self, error: LayoutMismatch) -> None:
        """Add partners that the engine cannot keep in one tensor."""
        self._findings.add(
            rules.PARTNERS_DIFFER,
            NOWHERE,
            f"{error.name}: {error.shown_value}, expected {error.expectation}."
            " The proof ends there: no parameter of the engine can be laid out.",
            error.remedy,
        )

    def caveat(self, caveat: str) -> None:
        """Add a respect in which the map differs from the engine's own."""
        self._findings.add(
            rules.CAVEAT,
            NOWHERE,
            f"{shown(caveat)}.",
            "Read the proof as one of such a loader, not of the engine as it is shipped.",
        )

    def dead(self, dead: Iterable[tuple[str, str]]) -> None:
        """Add rules that matched nothing."""
        for kind, pattern in dead:
            self._findings.add(
                rules.DEAD_RULE,
                FindingLocation(None, f"{kind}: {pattern}"),
                f"The {kind} rule {shown(pattern)} matches nothing.",
                "Remove it, or find out why it does not match.",
            )

    def sorted(self) -> list[Finding]:
        """Return all findings."""
        for (_, target, wrong), (source, ranks) in self._wrong.items():
            # Narrowing is one cause for all layers; other wrong writes are reported by layer.
            spread = wrong.text if wrong.rule is rules.LOADER_NARROWED else None
            layer = self._layer(source.parameter, source.name)
            self._findings.add(
                wrong.rule,
                FindingLocation(source.name, target, layer, spread),
                f"{shown(source.name)} -> {shown(target)}, {_ranks(ranks)}: it {wrong.text}.",
                wrong.remedy,
                ranks=sorted(ranks),
            )
        for (rule, target, boxes, why), ranks in self._boxes.items():
            what = f"{_box_text(boxes)} {_VERBS[rule.id]}" if boxes else why
            self._findings.add(
                rule,
                FindingLocation(None, target, self._layer(None, target)),
                f"{shown(target)}, {_ranks(ranks)}: {what}{f'; {why}' if why and boxes else ''}.",
                "Place a tensor there: engines leave such memory as they found it.",
                ranks=sorted(ranks),
                boxes=_listed(boxes),
            )
        return self._findings.sorted()

    def _layer(self, parameter: Parameter | None, name: str) -> int | None:
        if parameter is not None and self._inventory is not None:
            return self._inventory.layer_of(parameter)
        found = _LAYER.search(name)
        return int(found[1]) if found else None


def _left(leaves: Iterable[str]) -> str:
    names = " and ".join(map(shown, leaves))
    return f"; {names} stays as the engine found it" if names else ""


_VERBS = {
    rules.UNWRITTEN.id: "never written",
    rules.SLOT_UNWRITTEN.id: "never written, a whole slot of a fused parameter",
    rules.WRITTEN_TWICE.id: "written twice",
}


def _ranks(ranks: Iterable[int]) -> str:
    ranks = set(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"


def _box_text(boxes: tuple[Box, ...]) -> str:
    elements = sum(box.count for box in boxes)
    shown_boxes = " and ".join(
        str([list(each) for each in box.ranges]) for box in boxes[:_MOST_BOXES]
    )
    more = f" and {len(boxes) - _MOST_BOXES} boxes more" if len(boxes) > _MOST_BOXES else ""
    return f"{elements} elements at {shown_boxes}{more}"


def _listed(boxes: tuple[Box, ...]) -> list[list[list[int]]]:
    return [[list(each) for each in box.ranges] for box in boxes[:_MOST_BOXES]]
