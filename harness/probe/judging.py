"""Compare two ways to the same distribution, and judge a check by what the server itself shows.

A healthy server is not bit-equal over batches: shapes change the order of sums, and rounding moves
logits. So a check is held against the larger of two things: what one rounding of the logits gives,
and what the *other* checks of the same session show. A single faulty way therefore cannot widen its
own limit, and a server that is noisy everywhere is so in all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from degarble.harness.probe.answers import distance, divergence, same_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from degarble.harness.probe.answers import Position

# Relative error of one rounding. Formats of 8 and 4 bits are fed by BF16: an input that is off by
# e moves a code of step s with probability e / s, which gives an RMS of sqrt(e s).
_BF16 = 2.0**-9
ROUNDINGS = {
    "fp32": 2.0**-24,
    "fp16": 2.0**-12,
    "bf16": _BF16,
    "fp8": math.sqrt(_BF16 * 2.0**-3.5),
    "fp4": math.sqrt(_BF16 * 2.0**-1.5),
}
LOGIT = 12.0  # size of a logit of a likely token: the logarithm of a vocabulary of 160,000

_FACTOR = 3.0  # over the noise, before it counts
_GROSS = 0.75  # nats over the positions of one prompt that no rounding gives
_LARGEST_GROSS = 2.0
_FAR = 4.0  # over the limit, where only some of the prompts are affected
_SUSTAINED = 4  # positions of one prompt
_CAPPED = 5.0  # nats: a position counts for no more

# Checks in which one kernel is held against another, so that a requantised input may take another
# code; in a batch other sums do the same. Where nothing else shows how far that moves, FP8 is
# allowed for unless the user says what is served.
KERNELS = ("cache", "chunks", "prefill", "chat")
_OTHER_SHAPES = ("cache", "chunks", "prefill")
_SAME_KERNEL = ("batch", "lengths", "repeats")


class ProbeLevel(StrEnum):
    """What a finding does to the verdict."""

    DIFFERS = "differs"
    UNSTABLE = "unstable"
    NOTE = "note"


@dataclass(frozen=True)
class ProbeFinding:
    """One thing that a healthy server does not do. `body` is a request that shows it."""

    check: str
    cause: str
    evidence: str
    level: ProbeLevel = ProbeLevel.DIFFERS
    remedy: str = ""
    body: Mapping[str, Any] | None = None
    measured: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class ProbedComparison:
    """One prompt, asked in two ways: how far apart each position is, and where tokens part."""

    prompt: int
    distances: tuple[float, ...]
    divergences: tuple[float, ...]
    parted: int | None = None
    condition: str = ""
    body: Mapping[str, Any] | None = None

    @property
    def size(self) -> float:
        """Return the RMS over the positions, in nats."""
        capped = [min(value, _CAPPED) for value in self.distances]
        return math.sqrt(fmean(value * value for value in capped)) if capped else 0.0


def compare(
    one: Sequence[Position], other: Sequence[Position], prompt: int, condition: str = ""
) -> ProbedComparison:
    """Compare position by position until the tokens part; that position still counts."""
    distances, divergences, parted = [], [], None
    for place, (first, second) in enumerate(zip(one, other, strict=False)):
        distances.append(distance(first, second))
        divergences.append(divergence(first, second))
        if not same_token(first.token, second.token):
            parted = place
            break
    return ProbedComparison(prompt, tuple(distances), tuple(divergences), parted, condition)


_TIGHTER = "If no activations are quantised here, probe with --rounding bf16: then it counts."


class Status(StrEnum):
    """How a check ended."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOTE = "note"
    SKIPPED = "skipped"
    CUT = "not finished"


QUESTIONS = {
    "repeats": "Does the same request, alone, get the same answer?",
    "cache": "Does a cached prefix give what a cold one gives?",
    "prefill": "Does prefill give the log-probabilities that decoding gave?",
    "chunks": "Does a prompt give the same whole and in pieces?",
    "batch": "Does an answer depend on what is computed with it?",
    "stream": "Is a streamed answer the one that comes whole?",
    "long": "Does a long prompt count from its first token to its last?",
    "sampling": "Does sampling follow temperature, seed and probabilities?",
    "stops": "Do stops and limits end a text where they should?",
    "chat": "Does a chat read every message, by its own template?",
    "numbers": "Are the log-probabilities those of the tokens that came?",
    "usage": "Are the counts of tokens right?",
    "against": "Do both sides give the same?",
}


@dataclass
class ProbedCheck:
    """What a check gathered, and later what it was judged."""

    name: str
    comparisons: list[ProbedComparison] = field(default_factory=list)
    findings: list[ProbeFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    status: Status = Status.AGREES
    reason: str = ""  # why it was skipped or cut
    requests: int = 0
    unit: str = "answers"
    limit: float | None = None
    shape_noise: float | None = None  # of one kernel in several shapes
    looked_at: int = 0  # things that were compared without distances
    texts_apart: int = 0  # answers whose text is another one

    @property
    def question(self) -> str:
        """Return what it asks."""
        return QUESTIONS[self.name]

    @property
    def positions(self) -> int:
        """Return how many positions were compared."""
        return sum(len(comparison.distances) for comparison in self.comparisons)

    @property
    def typical(self) -> float | None:
        """Return the median of the prompts' distances, in nats."""
        sizes = [comparison.size for comparison in self.comparisons if comparison.distances]
        return median(sizes) if sizes else None

    @property
    def largest(self) -> float | None:
        """Return the largest of the prompts' distances, in nats."""
        return max((c.size for c in self.comparisons if c.distances), default=None)

    @property
    def divergence(self) -> float | None:
        """Return the mean KL divergence over positions, in nats."""
        found = [min(value, _CAPPED) for c in self.comparisons for value in c.divergences]
        return fmean(found) if found else None


def rounding_distance(rounding: str) -> float:
    """Return how far rounding alone moves a log-probability, in nats."""
    return LOGIT * ROUNDINGS[rounding]


def limit_of(name: str, results: Sequence[ProbedCheck], rounding: str | None) -> float:
    """Return how far a check may be: rounding, or what the session itself shows, times a factor.

    Where two kernels compute one thing, the noise of one kernel in other shapes counts (batches,
    lengths, repeats), and that of short prompts between the two. Elsewhere the median of all
    others, so that a faulty one decides nothing.
    """
    known = {r.name: r.typical for r in results if r.typical is not None}
    for result in results:
        if result.shape_noise is not None:
            known["lengths"] = result.shape_noise
    sources = [n for n in (*_SAME_KERNEL, "prefill") if n in known and n != name]
    if name not in KERNELS:
        # Repeats and chats change no shapes: that they are exact says nothing about rounding.
        sources = [n for n in _OTHER_SHAPES if n in known] or [n for n in sources if n != "prefill"]
    found = [known[n] for n in sources] or [0.0]
    learned = max(found) if name in KERNELS else median(found)
    if rounding is not None:
        floor = rounding_distance(rounding)
    elif name == "batch":
        # Two other routes through requantised inputs show what a batch may do; neither: FP8.
        routes = [known[n] for n in ("chunks", "prefill") if n in known]
        shown = max(routes, default=math.inf)
        floor = max(rounding_distance("bf16"), min(shown, rounding_distance("fp8")))
    else:
        unknown = name in KERNELS and "prefill" not in sources  # how far two kernels are apart
        floor = rounding_distance("fp8" if unknown else "bf16")
    return _FACTOR * max(floor, min(learned, rounding_distance("fp4")))


def gross_of(limit: float) -> float:
    """Return what a single prompt may not exceed."""
    return min(_LARGEST_GROSS, max(_GROSS, 2.5 * limit))


def affected(comparisons: Sequence[ProbedComparison], limit: float) -> list[ProbedComparison]:
    """Return the comparisons that rounding does not explain; none where they are too few to tell.

    Most prompts beyond the limit; several far beyond it; two and an eighth of all grossly apart; or
    one over many positions. A single odd position may be a near tie of a router.
    """
    sizes = [c for c in comparisons if c.distances]
    beyond = [c for c in sizes if c.size > limit]
    far = [c for c in sizes if c.size > _FAR * limit]
    gross = [c for c in sizes if c.size > gross_of(limit)]
    sustained = [c for c in gross if sum(d > gross_of(limit) for d in c.distances) >= _SUSTAINED]
    most = len(beyond) >= 3 and len(beyond) > len(sizes) / 2
    several = len(far) >= 3 and len(far) >= len(sizes) / 5
    grossly = len({c.prompt for c in gross}) >= 2 and len(gross) >= len(sizes) / 8
    if not (most or several or grossly or sustained):
        return []
    return beyond


@dataclass(frozen=True)
class Cause:
    """What a check says where it finds something."""

    cause: str
    remedy: str
    level: ProbeLevel = ProbeLevel.DIFFERS


def judge(result: ProbedCheck, limit: float, cause: Cause, tight: float | None = None) -> None:
    """Turn what a check gathered into a finding, where rounding does not explain it.

    `tight` is the limit of a server that quantises no activations: beyond it alone, it is a note.
    """
    result.limit = limit
    found = affected(result.comparisons, limit)
    if found:
        result.findings.insert(0, _finding(result, found, limit, cause))
    elif tight is not None and (found := affected(result.comparisons, tight)):
        words = "more than BF16 explains; FP8 activations would"
        noted = Cause(f"{cause.cause}: {words}", _TIGHTER, ProbeLevel.NOTE)
        result.findings.append(_finding(result, found, tight, noted))
    if any(finding.level is not ProbeLevel.NOTE for finding in result.findings):
        result.status = Status.DIFFERS
    elif result.findings and result.status is Status.AGREES:
        result.status = Status.NOTE


def _finding(
    result: ProbedCheck, found: Sequence[ProbedComparison], limit: float, cause: Cause
) -> ProbeFinding:
    worst = max(found, key=lambda comparison: comparison.size)
    whole = [comparison for comparison in result.comparisons if comparison.distances]
    parted = sum(comparison.parted is not None for comparison in found)
    text = (
        f"{len(found)} of {len(whole)} {result.unit} are beyond the limit of {limit:.3g} nats; the "
        f"worst is {worst.size:.3g} apart over {len(worst.distances)} tokens"
    )
    if parted:
        text += f", and {parted} go on with other tokens"
    conditions = sorted({comparison.condition for comparison in found if comparison.condition})
    clean = sorted({c.condition for c in whole if c.condition} - set(conditions))
    if conditions:
        text += f". Seen {_listed(conditions)}"
        text += f", not {_listed(clean)}" if clean else ""
    return ProbeFinding(
        result.name, cause.cause, f"{text}.", cause.level, cause.remedy, worst.body,
        worst.size, limit,
    )  # fmt: skip


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
