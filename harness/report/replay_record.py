"""Records behind the replay and text panels: outputs, places, histograms, texts.

The main table is layer x component, with the details that a click on a cell unfolds. Numbers are
numbers and codes are hex words, so that an old run can be rendered without torch, a GPU or its
checkpoint. None stands for what was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

PAIRS = ("candidate and twin", "candidate and BF16", "twin and BF16")


@dataclass(frozen=True)
class JudgedPlace:
    """Worst place of one level (element, row, tile, head, ...), in one unit with its bound."""

    level: str
    place: str
    measured: float
    allowed: float
    ratio: float


@dataclass(frozen=True)
class WorstElement:
    """Element furthest beyond its bound: both codes in hex, both values."""

    place: str
    candidate_code: str
    twin_code: str
    candidate: float
    twin: float
    steps: int | None = None  # ulps between them; None where one is no number


@dataclass(frozen=True)
class AxisProfile:
    """Relative difference along one axis: positions, rows, heads, experts, tiles."""

    name: str
    labels: tuple[str, ...]
    values: tuple[float | None, ...]

    def __post_init__(self) -> None:
        _require_labelled(self.name, self.labels, self.values)


@dataclass(frozen=True)
class Histogram:
    """Number of elements by their distance from the twin's, in steps."""

    unit: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_labelled("histogram", self.labels, self.counts)


@dataclass(frozen=True)
class CloseLook:
    """Details that a click on a cell unfolds, measured while the tensors were in memory."""

    worst: WorstElement | None = None
    places: tuple[JudgedPlace, ...] = ()
    along: tuple[AxisProfile, ...] = ()
    histogram: Histogram | None = None
    derivation: tuple[str, ...] = ()
    gain: float | None = None
    rounding_bias: float | None = None


@dataclass(frozen=True)
class MeasuredOutput:
    """Details of one output; `difference` and `budget` are relative L2 of the worst call."""

    output: str
    look: CloseLook = field(default_factory=CloseLook)
    difference: float | None = None
    budget: float | None = None


@dataclass(frozen=True)
class JudgedOutput:
    """One output of one component over the whole run.

    `cosines` follow PAIRS; `difference` and `budget` are relative L2 of the worst call, `ratio` is
    the worst place of any level in units of its own budget. `layer` is None at the ends.
    """

    component: str
    role: str
    layer: int | None
    output: str
    verdict: Verdict
    ratio: float | None = None
    cosines: tuple[float | None, float | None, float | None] = (None, None, None)
    difference: float | None = None
    budget: float | None = None
    identical: float | None = None
    elements: int = 0
    calls: int = 0
    flips: int = 0
    choices: int = 0
    undecided: str = ""
    look: CloseLook = field(default_factory=CloseLook)

    @property
    def site(self) -> str:
        """Where it is seen."""
        name = "" if self.output == "out" else f".{self.output}"
        return f"{self.component}.out{name}"

    @property
    def column(self) -> str:
        """What its layer is called: drafters carry their own name, the ends none."""
        if self.layer is None:
            return "ends"
        return f"mtp.{self.layer}" if self.component.startswith("mtp.") else str(self.layer)


@dataclass(frozen=True)
class ReplayRecord:
    """All outputs in the order of the run, what was found, and where it was obtained."""

    verdict: Verdict
    sentence: str
    outputs: tuple[JudgedOutput, ...]
    origins: tuple[str, ...] = ()  # sites at which something began, in the order of the run
    findings: tuple[str, ...] = ()  # one sentence each
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # provenance
    preface: tuple[str, ...] = ()  # what went well before


@dataclass(frozen=True)
class PromptTexts:
    """One prompt, the text of each model, and the first token at which they differ."""

    prompt: str
    voices: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def parting(self) -> int | None:
        """The first token that is not the same in all texts; None if they never differ."""
        texts = [tokens for _, tokens in self.voices]
        for at in range(max((len(tokens) for tokens in texts), default=0)):
            if len({tokens[at] if at < len(tokens) else None for tokens in texts}) > 1:
                return at
        return None


@dataclass(frozen=True)
class TextRecord:
    """Texts of the model, healthy and as it was run."""

    said: tuple[PromptTexts, ...]
    notes: tuple[str, ...] = ()


def worst_first(outputs: tuple[JudgedOutput, ...]) -> list[JudgedOutput]:
    """Outputs that differ, then those that are undecided, then those nearest to their budget."""
    order: Mapping[Verdict, int] = {Verdict.DIFFERS: 0, Verdict.UNSTABLE: 0, Verdict.UNDECIDED: 1}
    return sorted(
        outputs, key=lambda output: (order.get(output.verdict, 2), -(output.ratio or 0.0))
    )


def _require_labelled(
    name: str, labels: tuple[str, ...], values: tuple[float | None, ...] | tuple[int, ...]
) -> None:
    if len(labels) != len(values):
        raise ShapeMismatch(
            f"labels of {name}", len(labels), f"{len(values)}, one a value", "Label every value."
        )
