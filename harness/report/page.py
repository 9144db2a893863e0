"""Record of the report page of one checkpoint: subject, provenance, verdict, findings, panels.

Panels have a fixed order, whatever the order in which they were added. reports/ renders from this
record alone, so an old page renders again without torch, a GPU or the checkpoint.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.report.blocks import Block
from degarble.harness.report.verdict import Origin, Verdict


class PanelKind(StrEnum):
    """Kind of a panel, in the order in which every page shows them."""

    AUDIT = "audit"
    REPLAY = "replay"
    TEXT = "text"
    KERNELS = "kernels"
    HISTORY = "history"


@dataclass(frozen=True)
class Subject:
    """Subject of the page. The manifest hash is the identity; the name is for people."""

    name: str
    kind: str
    manifest_hash: str

    @property
    def key(self) -> str:
        """A file name without directory parts, the same for the same subject."""
        kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.name)
        words = "-".join(part for part in kept.lower().split("-") if part)[:48]
        digits = self.manifest_hash.lower().rpartition(":")[2]
        digest = "".join(c for c in digits if c in "0123456789abcdef")[:12]
        return f"{words.strip('-') or 'page'}-{digest or 'nohash'}"


@dataclass(frozen=True)
class Provenance:
    """Where the result was obtained: without it a figure cannot be checked."""

    created: str  # ISO 8601, UTC
    command: str
    machine: str
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Finding:
    """One difference for the first screen: cause, what to do, and the origin as data.

    `reproduction` is a command that shows the fault by itself, `note` what else a reader must know.
    """

    cause: str
    remedy: str
    origin: Origin
    reproduction: str = ""
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """One part of the page. Without a verdict it did not run, and `sentence` says why."""

    kind: PanelKind
    sentence: str
    verdict: Verdict | None = None
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Page:
    """All that is known about one checkpoint."""

    subject: Subject
    provenance: Provenance
    verdict: Verdict
    sentence: str
    findings: tuple[Finding, ...] = ()
    panels: tuple[Panel, ...] = ()

    def __post_init__(self) -> None:
        kinds = [panel.kind for panel in self.panels]
        if len(set(kinds)) != len(kinds):
            raise InvalidArgument(
                "panels of a page",
                [str(kind) for kind in kinds],
                "at most one panel of a kind",
                "Replace a panel with Page.with_panel.",
            )

    def with_panel(self, panel: Panel) -> "Page":
        """Add `panel`, in the place of the older one of its kind."""
        others = tuple(old for old in self.panels if old.kind != panel.kind)
        return replace(self, panels=(*others, panel))

    @property
    def ordered_panels(self) -> tuple[Panel, ...]:
        """Return the panels in the order of PanelKind, those that did not run included."""
        known = {panel.kind: panel for panel in self.panels}
        return tuple(known.get(kind) or Panel(kind, "Not run.") for kind in PanelKind)
