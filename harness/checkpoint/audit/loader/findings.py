"""Word the findings of a loader proof; the same finding on several ranks is one.

Wrong writes and uncovered elements are grouped by parameter. The rules are in rules/loader.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit.loader.coverage import SCALES
from degarble.harness.checkpoint.audit.loader.names import Outcome
from degarble.harness.checkpoint.audit.rules import loader as rules
from degarble.harness.checkpoint.audit.rules.findings import (
    NOWHERE,
    Finding,
    Findings,
    Place,
    ranges_told,
)
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.base.errors import LayoutMismatch
    from degarble.harness.checkpoint.audit.loader.coverage import Wrong
    from degarble.harness.checkpoint.audit.loader.names import Resolved
    from degarble.harness.checkpoint.audit.loader.sources import Conversion, Source
    from degarble.harness.checkpoint.audit.rules.rule import Rule
    from degarble.harness.checkpoint.audit.structure.inventory import Found, Inventory
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.types import Box

_LAYER = re.compile(r"\blayers\.(\d{1,9})\b")
_MOST_BOXES = 4  # shown in a message


class LoaderFindings:
    """Collector of the findings of one proof."""

    def __init__(self, inventory: Inventory | None) -> None:
        self._inventory = inventory
        self._findings = Findings()
        self._wrong: dict[tuple[str, str, Wrong], tuple[Source, set[int]]] = {}
        self._boxes: dict[tuple[Rule, str, tuple[Box, ...], str], set[int]] = defaultdict(set)

    def wrong(self, source: Source, target: str, wrong: Wrong, rank: int) -> None:
        """Add a write that breaks a rule."""
        self._wrong.setdefault((source.name, target, wrong), (source, set()))[1].add(rank)

    def boxes(self, rule: Rule, target: str, boxes: tuple[Box, ...], why: str, rank: int) -> None:
        """Add elements of a parameter that are unwritten, or written twice."""
        self._boxes[rule, target, boxes, why].add(rank)

    def unread(self, source: Source, boxes: tuple[Box, ...]) -> None:
        """Add elements of a placed tensor that no rank reads."""
        self._findings.add(
            rules.UNREAD,
            Place(source.name, None, self._layer(source.parameter, source.name)),
            f"{shown(source.name)}: {_told(boxes)} of {list(source.shape)} reach no rank.",
            "Check the split rule and the number of ranks.",
            boxes=_listed(boxes),
        )

    def lost(self, source: Source, resolved: Resolved, leaves: Iterable[str] = ()) -> None:
        """Add a tensor of the model that is skipped or dropped, and what it leaves unwritten."""
        assert source.parameter is not None, "a tensor of the model"
        skipped = resolved.outcome is Outcome.SKIPPED
        rule = rules.SKIPPED if skipped else rules.DROPPED
        if source.part in SCALES:
            rule = rules.SKIPPED_SCALE if skipped else rules.DROPPED_SCALE
        why = f"{shown(resolved.target)} is no parameter of the engine"
        if skipped:
            why = f"the pattern {shown(resolved.by)} covers it"
        self._findings.add(
            rule,
            Place(source.name, None, self._layer(source.parameter, source.name)),
            f"{shown(source.name)}, the {source.part} of {source.parameter.name}, is"
            f" {resolved.outcome}: {why}{_left(leaves)}.",
            "Narrow the pattern." if skipped else "Add a rule that places it.",
            pattern=shown(resolved.by),
            renamed=shown(resolved.target),
        )

    def none_of_ours(self, source: Source, resolved: Resolved) -> None:
        """Add a tensor that the model does not have and that goes nowhere."""
        self._findings.add(
            rules.EXTRA_DROPPED,
            Place(source.name),
            f"{shown(source.name)}, no tensor of the model, is {resolved.outcome}.",
            "Nothing.",
        )

    def elsewhere(self, pattern: str, reason: str) -> None:
        """Add a tensor that another loader reads."""
        self._findings.add(
            rules.ELSEWHERE,
            Place(None, pattern),
            f"Tensors by {shown(pattern)} are left to another loader: {shown(reason)}.",
            "Prove that loader too.",
        )

    def format(self, found: Found, built: str) -> None:
        """Add a weight that the engine builds in another format than the stored one."""
        block, expert = found.parameter.block, found.parameter.expert
        drafts = block is not None and block.is_drafter and expert is not None
        layer = self._layer(found.parameter, found.module)
        self._findings.add(
            rules.DRAFTER_FORMAT if drafts else rules.FORMAT,
            Place(None, found.module, layer, f"{found.weight} as {built}"),
            f"{shown(found.module)} is stored as {found.weight}, the engine builds {built}.",
            "Convert it beforehand, add a conversion to the map, or change what the engine builds.",
            stored=found.weight,
            built=built,
        )

    def conversion(self, conversion: Conversion) -> None:
        """Check what a conversion reads, and which block size it states."""
        found, rule = conversion.found, conversion.rule
        place = Place(None, found.module, self._layer(found.parameter, found.module))
        unread = sorted(conversion.has - {Part.INPUT_SCALE} - conversion.reads)
        if unread:
            self._findings.add(
                rules.SCALE_UNREAD,
                place,
                f"{shown(found.module)} is converted to {rule.to} without its"
                f" {' and '.join(unread)}.",
                "Read codes and every scale of the weight.",
                unread=[str(part) for part in unread],
            )
        if Part.INPUT_SCALE in conversion.reads:
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
                Place(None, f"{kind}: {pattern}"),
                f"The {kind} rule {shown(pattern)} matches nothing.",
                "Remove it, or find out why it does not match.",
            )

    def sorted(self) -> list[Finding]:
        """Return all findings."""
        for (_, target, wrong), (source, ranks) in self._wrong.items():
            # Narrowing is one cause for all layers; other wrong writes are reported by layer.
            spread = wrong.told if wrong.rule is rules.NARROWED else None
            layer = self._layer(source.parameter, source.name)
            self._findings.add(
                wrong.rule,
                Place(source.name, target, layer, spread),
                f"{shown(source.name)} -> {shown(target)}, {_ranks(ranks)}: it {wrong.told}.",
                wrong.remedy,
                ranks=sorted(ranks),
            )
        for (rule, target, boxes, why), ranks in self._boxes.items():
            what = f"{_told(boxes)} {_VERBS[rule.id]}" if boxes else why
            self._findings.add(
                rule,
                Place(None, target, self._layer(None, target)),
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
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges_told(ranks)}"


def _told(boxes: tuple[Box, ...]) -> str:
    elements = sum(box.count for box in boxes)
    shown_boxes = " and ".join(
        str([list(each) for each in box.ranges]) for box in boxes[:_MOST_BOXES]
    )
    more = f" and {len(boxes) - _MOST_BOXES} boxes more" if len(boxes) > _MOST_BOXES else ""
    return f"{elements} elements at {shown_boxes}{more}"


def _listed(boxes: tuple[Box, ...]) -> list[list[list[int]]]:
    return [[list(each) for each in box.ranges] for box in boxes[:_MOST_BOXES]]
