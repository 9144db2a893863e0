"""Error budgets of attention outputs, and statistical tests of the attention shares.

A share is one normalised softmax weight.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.budget.bounded_values import (
    FUNCTION,
    BoundedValue,
    stored,
)
from degarble.harness.engine.budget.budget import HEADROOM, MISTAKEN, Budget, LevelFinding
from degarble.harness.engine.budget.rules import ALIGNED_TERMS, UNDERFLOW, U, output_format
from degarble.harness.formats.number_formats import BF16
from degarble.harness.model.family import family_of
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.references.facts import Span


# --------------------------------------------------------------------------------------------------
# Statistical tests: gains, weights of keys by distance to the peak, energy.
#
# A share that a kernel rounds to BF16 is up to 2^-8 off, but roundings of different shares are
# independent. `ShareStatistics` projects the output's difference from exact attention on fixed
# directions: the row itself (a gain), and, for keys at a similar distance below the peak, what the
# row gains if these weigh more (an exponential that is off there). Projections are summed over
# rows, weighted by their variance. A sum may differ by
#
# * the error of float32 in logits, exponentials and sums, in full;
# * the largest error of an ensemble of legal kernels, computed exactly: peaks of rows, sinks, tiles
#   in both orders, normalised shares, and PHASES constants in place of a peak. Where shares round
#   alike (equal logits) this is the whole error, and the bound is wide;
# * chance: a rounding error of half length h is sub-Gaussian with variance h^2 / 3, so a weighted
#   sum exceeds sqrt(2 L V) with probability MISTAKEN; L = log(1 / MISTAKEN). V adds up squares, or
#   the square of a head's sum where its rows round alike.
#
# The energy of all projections has the tail of a quadratic form (Hsu, Kakade, Zhang 2012).
#
# Shape letters: n tokens, H heads, R rows, C width of value rows, L width of the output, B
# directions, K members of the ensemble.

BINS = 8  # parts of an octave that distances to the peak are sorted into
OCTAVES = ((0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 8.0))  # below the peak
WAVES = ("sine", "cosine")  # of the distance: an exponential's error repeats with every octave
DIRECTIONS = 2 + BINS + len(OCTAVES) + len(WAVES)
PHASES = 8  # positions within an octave of a constant used for every peak
TILES = (16, 64, 128)  # keys that share one running peak
HALF = 2.0**-8  # of the spacing of a BF16 number between 1 and 2
_MANTISSAS = 0.375 / math.log(2.0)  # mean of 1 / m^2, m between 1 and 2 as likely as 1 / m
_ON_PEAK = 2.0**-7  # octaves
_SHIFTS = (0.0, 2.0**-11, -(2.0**-11), 3 * 2.0**-11)  # of outputs, to see which round alike
_UNEXPLAINED = 1e-4  # of the energy that a variant explains: one per cent of its length
_LOG = math.log(1 / MISTAKEN)
_FLOOR = -100.0  # octaves below the peak: less than any sum can show
_AT_MOST = 1 << 24  # numbers of directions kept in memory
_SHARES = 1 << 22  # shares that are examined
_AT_ONCE = 1 << 17  # of these at once


class AttentionShares(NamedTuple):
    """Normalised shares of some tokens [n, H, R], their rows, and what rounds after them.

    A share's `error` is the part of float32 that many shares have in common. Logits and sinks are
    in octaves. `expand` maps a row of width C to the output's L [H, L, C]; None where they are
    equal.
    """

    share: BoundedValue
    chance: Tensor  # [n, H, R], or 0: deviation of a logit's independent error
    logit: Tensor  # -inf where a token does not see a row
    sink: Tensor | None  # [H]
    values: Tensor  # [R, C], or [H, R, C]
    rounded: bool  # shares may be rounded to BF16, next to a peak of the kernel's choice
    expand: Tensor | None = None

    def part(self, tokens: slice) -> AttentionShares:
        """Return some of the tokens."""
        share = type(self.share)(self.share.value[tokens], self.share.error[tokens])
        chance = self.chance[tokens] if self.chance.ndim else self.chance
        return self._replace(share=share, chance=chance, logit=self.logit[tokens])


@dataclass(frozen=True, eq=False)
class _Rows:
    """Statistics of sampled rows, by direction, token and head [B, n, H]."""

    tokens: Tensor  # [n]
    centre: Tensor  # exact attention [n, H, L]
    directions: Tensor  # [B, n, H, L]
    members: Tensor  # [B, K, n, H]
    stored: Tensor  # [B, 2, S, n, H]: effect of rounding mixed rows and the output
    small: Tensor
    variance: Tensor  # of the random error, on average
    proxy: Tensor  # the variance proxy, for its tail
    covariance: Tensor  # of the tail [B, B, n, H]

    @cached_property
    def signal(self) -> Tensor:
        """Return the squared lengths of directions."""
        return _by_direction(self.directions, lambda each: each.double().square().sum(-1))


@dataclass(eq=False)
class ShareStatistics:
    """Laws of an attention's output over an even sample of its tokens."""

    tokens: int
    heads: int
    _parts: list[tuple[Tensor, Callable[[], AttentionShares]]] = field(default_factory=list)
    _joined: _Rows | None = None

    def sample(self, width: int, rows: int) -> Tensor:
        """Mark the tokens to examine: all, where that is affordable."""
        kept = torch.zeros(self.tokens, dtype=torch.bool)
        if self.tokens and self.heads and width:
            most = min(_AT_MOST // (DIRECTIONS * width), _SHARES // max(1, rows)) // self.heads
            count = min(max(1, most), self.tokens)
            kept[torch.linspace(0, self.tokens - 1, count).round().long()] = True
        return kept

    def add(self, tokens: Tensor, weighed: Callable[[], AttentionShares]) -> None:
        """Register shares of tokens [n]; they are computed only once a difference is judged.

        Most callers of a budget need its slack alone, and this is most of the work.
        """
        self._parts.append((tokens, weighed))

    def findings(self, candidate: Tensor, twin: Tensor) -> list[LevelFinding]:
        """Judge a candidate; relative to the twin where the twin is not that of these inputs."""
        if not self._parts:
            return []
        if self._joined is None:
            self._joined = _join([rows for part in self._parts for rows in _looked_at(*part)])
        rows = self._joined
        own, twins = (
            _Sums.project(rows, side.reshape(self.tokens, self.heads, -1)[rows.tokens])
            for side in (candidate, twin)
        )
        # Diagnosis passes a damaged twin; then candidate and twin both have roundings of their own.
        if max((finding.ratio for finding in twins.findings()), default=0.0) <= HEADROOM:
            return list(own.findings())
        return list(own.less(twins).findings())

    @property
    def words(self) -> tuple[str, ...]:
        """Describe what is tested, and on how many tokens."""
        seen = sum(len(tokens) for tokens, _ in self._parts)
        first = f"gains and weights of keys: sums over {seen} of {self.tokens} tokens"
        return (first, "roundings of shares there: by chance, in full where they are alike")


def _join(parts: Sequence[_Rows]) -> _Rows:
    if len(parts) == 1:
        return parts[0]
    axes = {"tokens": 0, "centre": 0, "directions": 1, "members": 2, "stored": 3, "covariance": 2}
    names = ("small", "variance", "proxy", *axes)
    return _Rows(
        **{
            name: torch.cat([getattr(part, name) for part in parts], dim=axes.get(name, 1))
            for name in names
        }
    )


def _looked_at(tokens: Tensor, made: Callable[[], AttentionShares]) -> Iterator[_Rows]:
    weighed = made()
    _, heads, rows = weighed.share.value.shape
    step = max(1, _AT_ONCE // max(1, heads * rows))
    for begin in range(0, len(tokens), step):
        part = slice(begin, begin + step)
        yield _rows_of(tokens[part], weighed.part(part))


def _rows_of(tokens: Tensor, given: AttentionShares) -> _Rows:
    share, below = given.share.value, _below(given.logit)
    own = _summed(share, given.values)
    out = _expanded(own, given.expand)
    picked = torch.stack(list(_bins(below, share))).float()  # [B - 1, n, H, R]
    moved = _expanded(_summed(picked, given.values.float()), given.expand)
    row = out.float()
    energy = row.square().sum(-1, keepdim=True).clamp(min=1e-30)
    for each, lowered in zip(moved, picked.sum(-1, keepdim=True), strict=True):
        # Raising some weights lowers all others: the sum of shares stays 1.
        each.sub_(lowered * row)
        # A gain changes no weight: remove the component along the row, the first direction.
        each.sub_((each * row).sum(-1, keepdim=True) / energy * row)
    directions = torch.cat((row[None], moved))
    back = directions
    if given.expand is not None:
        back = torch.einsum("bnhl,hlc->bnhc", directions, given.expand.float())
    turned = given.values.float().transpose(-1, -2)
    reach = _summed(back, turned)  # how far a share reaches in a direction [B, n, H, R]
    pulls = share.float() * reach
    # The reach of the whole output.
    level = _by_direction(directions, lambda each: (each * row).sum(-1))
    members = list(_of_members(pulls, level, below, given))
    # Variance of a uniform rounding error of half length HALF.
    half = HALF**2 / 3 if given.rounded else 0.0
    freed = pulls - share.float() * level[..., None]
    proxy = torch.maximum(pulls.square().sum(-1), freed.square().sum(-1)).double() * half
    covariance = torch.einsum("bnhr,cnhr->bcnh", pulls, pulls).double() * half
    own_error = freed * given.chance.float()
    chance, stored = proxy * _MANTISSAS + own_error.square().sum(-1), []
    proxy = proxy + own_error.square().sum(-1)
    for value, direction in ((out, directions), (own, back))[: 1 + (given.expand is not None)]:
        half_step = _half_step(value)
        reached = direction.double().mul_(half_step)
        added = _by_direction(reached, lambda each: each.square().sum(-1)) / 3
        chance, proxy = chance + added, proxy + added
        covariance = covariance + torch.einsum("bnhl,cnhl->bcnh", reached, reached) / 3
        stored.append(_stored(value, direction))
    if len(stored) == 1:
        stored.append(torch.zeros_like(stored[0]))
    small = torch.einsum("bnhr,nhr->bnh", reach.abs().double(), given.share.error)
    return _Rows(
        tokens, out, directions, torch.stack(members, 1), torch.stack(stored, 1), small, chance,
        proxy, covariance,
    )  # fmt: skip


def _summed(share: Tensor, values: Tensor) -> Tensor:
    """Sum rows [..., n, H, R] x [R, C], or [H, R, C]."""
    if values.ndim == 2:
        return torch.matmul(share, values)
    return torch.matmul(share.transpose(-3, -2), values).transpose(-3, -2)


def _expanded(rows: Tensor, expand: Tensor | None) -> Tensor:
    if expand is None:
        return rows
    return torch.einsum("...hc,hlc->...hl", rows, expand.to(rows.dtype))


def _below(logit: Tensor) -> Tensor:
    """Return the distance to the largest logit of a row, in octaves."""
    top = logit.amax(-1, keepdim=True) if logit.shape[-1] else logit.sum(-1, keepdim=True)
    return (top.clamp(min=-1e30) - logit).clamp(min=0.0, max=-_FLOOR)


def _bins(below: Tensor, share: Tensor) -> Iterator[Tensor]:
    """Yield the shares of keys at the peak, by fraction of an octave, by octave, and as waves."""
    on_peak = below < _ON_PEAK
    yield share * on_peak
    part = ((below % 1.0) * BINS).floor()
    for octave_bin in range(BINS):
        yield share * ((part == octave_bin) & ~on_peak)
    for low, high in OCTAVES:
        yield share * ((below >= low) & (below < high) & ~on_peak)
    angle = 2 * math.pi * below
    yield share * angle.sin()
    yield share * angle.cos()


def _of_members(
    pulls: Tensor, level: Tensor, below: Tensor, given: AttentionShares
) -> Iterator[Tensor]:
    """Yield the contribution of each member of the ensemble [B, n, H]; the first rounds nothing."""
    yield torch.zeros_like(level).double()
    if not given.rounded:
        return
    share = given.share.value
    for offset in _offsets(below, given):
        error = _rounded(offset - below).float()
        one = torch.einsum("bnhr,nhr->bnh", pulls, error).double()
        yield one
        # A kernel that divides by the sum of rounded shares has their mean error removed.
        yield one - (share * error).sum(-1) * level.double()


def _offsets(below: Tensor, given: AttentionShares) -> Iterator[Tensor]:
    """Yield, for each share, the octaves that a member's peak lies below the row's own."""
    none = torch.zeros(*below.shape[:2], 1, dtype=below.dtype)
    yield none
    top = none
    largest = none
    if given.logit.shape[-1]:
        top = given.logit.amax(-1, keepdim=True).clamp(min=-1e30)
        largest = given.share.value.amax(-1, keepdim=True)
    yield largest.clamp(min=2.0**_FLOOR).log2()
    sink = top if given.sink is None else given.sink[:, None]
    yield (top - sink).clamp(min=_FLOOR, max=0.0)
    # Trap: sequences of one call differ in their number of rows; each still needs the same members.
    for tile in TILES:
        yield _running(below, tile)
        yield _running(below.flip(-1), tile).flip(-1)
    for phase in range(PHASES):
        # A constant peak: only its fraction of an octave affects the rounding.
        yield (top % 1.0) + phase / PHASES


def _running(below: Tensor, tile: int) -> Tensor:
    """Return how far the running peak of a share's tile lies below the row's peak."""
    count = below.shape[-1]
    if not count:
        return below
    padded = torch.nn.functional.pad(below, (0, -count % tile), value=-_FLOOR)
    peaks = padded.unflatten(-1, (-1, tile)).amin(-1).cummin(-1).values
    of_keys: Tensor = peaks.repeat_interleave(tile, -1)[..., :count]
    return of_keys


def _rounded(octaves: Tensor) -> Tensor:
    """Return the relative error of 2^octaves in BF16."""
    value = torch.exp2(octaves.clamp(min=_FLOOR))
    # Halfway points are exact in float64, and 2^x rounds there as it would in float32.
    error: Tensor = value.bfloat16().double() / value - 1.0
    return error


def _half_step(value: Tensor) -> Tensor:
    exponent = torch.frexp(value).exponent - 1
    step = torch.ldexp(torch.full_like(value, HALF), exponent)
    return torch.where(value != 0, step, 0.0)


def _stored(value: Tensor, direction: Tensor) -> Tensor:
    """Return the contribution of a stored value's roundings, at shifts of less than a spacing."""
    shifted = [value * (1.0 + shift) for shift in _SHIFTS]
    errors = [moved.bfloat16().double() - moved for moved in shifted]
    made = []
    for each in direction:
        towards = each.double()
        made.append(torch.stack([(error * towards).sum(-1) for error in errors]))
    return torch.stack(made)


def _by_direction(directions: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what is made of each direction, one by one: all together leave every cache."""
    return torch.stack([made(each) for each in directions])


@dataclass(frozen=True, eq=False)
class _Sums:
    """Projections of a difference [B, n, H], with the rounding errors of one side or of two."""

    rows: _Rows
    along: Tensor
    known: Tensor  # [n, H]: both sides are finite
    sides: int = 1
    explained: Tensor | None = None  # projections of the damaged twin, as `along`

    @classmethod
    def project(cls, rows: _Rows, output: Tensor) -> _Sums:
        """Project the difference of an output [n, H, L] from exact attention."""
        off = output.double() - rows.centre
        known = off.isfinite().all(-1)
        off = torch.where(known[..., None], off, 0.0)
        return cls(rows, _by_direction(rows.directions, lambda each: (off * each).sum(-1)), known)

    def less(self, other: _Sums) -> _Sums:
        """Return the difference of two outputs."""
        known = self.known & other.known
        return _Sums(self.rows, self.along - other.along, known, 2, other.along)

    def findings(self) -> Iterator[LevelFinding]:
        """Yield each law's measure."""
        rows, signal = self.rows, self.rows.signal
        usable = self.known & (rows.variance > 0) & (signal > 0)
        weight = torch.where(usable, signal / rows.variance.clamp(min=1e-300), 0.0)
        laws = [self._law(number, weight[number], None) for number in range(len(signal))]
        laws += [
            self._law(0, weight[0, :, head : head + 1], head) for head in range(signal.shape[-1])
        ]
        yield from laws
        if all(law.ratio <= 1 for law in laws):  # else the laws that failed are more specific
            yield self._energy(usable)

    def _law(self, number: int, weight: Tensor, head: int | None) -> LevelFinding:
        rows = self.rows
        at = slice(None) if head is None else slice(head, head + 1)
        place = () if head is None else (head,)
        level = _name(number, head)
        scale = float((weight * rows.signal[number][:, at]).sum())
        if not scale:
            return LevelFinding(level, place, 0.0, 0.0)
        heads = (weight * rows.members[number][..., at]).sum(1)  # [K, H]
        alike = heads.square().mean(0)
        chance = torch.maximum((weight.square() * rows.proxy[number][:, at]).sum(0), alike).sum()
        stored = (weight * rows.stored[number][..., at]).sum((-1, -2)).abs().amax(-1).sum()
        most = heads.sum(-1).abs().max() + stored + (weight * rows.small[number][:, at]).sum()
        allowed = float(most + torch.sqrt(2 * _LOG * chance)) * self.sides
        measured = abs(float((weight * self.along[number][:, at]).sum()))
        return LevelFinding(level, place, measured / scale, allowed / scale / HEADROOM)

    def _energy(self, usable: Tensor) -> LevelFinding:
        rows, level = self.rows, "energy of shares' errors"
        unit = torch.where(usable, 1 / rows.variance.clamp(min=1e-300), 0.0)
        total = float((unit * self.along.square()).sum())
        squares = (unit[:, None] * rows.members.square()).sum((0, 2, 3))
        mean = float(squares.max()) * self.sides
        shifted = (unit[:, None, None] * rows.stored.square()).sum((0, 3, 4)).amax(-1).sum()
        mean += float(shifted) * self.sides
        root = unit.sqrt()
        tail = rows.covariance * root[:, None] * root[None]
        # Rows of alike shares are off together, by as much as their members show.
        clumped = (rows.members.square().mean(1) / rows.proxy.clamp(min=1e-300)).amax(0)
        tail = tail * clumped.clamp(min=1.0) * self.sides
        by_row = tail.square().sum((0, 1))
        chance = 2 * math.sqrt(_LOG * float(by_row.sum()))
        chance += 2 * _LOG * math.sqrt(float(by_row.max()))
        common = math.sqrt(float((unit * rows.small.square()).sum())) * self.sides
        most = (math.sqrt(mean + chance) + common) ** 2
        if self.explained is not None:
            # A way may weigh other keys than the statistics know, with roundings of their own.
            most = max(most, _UNEXPLAINED * float((unit * self.explained.square()).sum()))
        if not mean:
            return LevelFinding(level, (), 0.0, 0.0)
        over = max(0.0, total - mean)
        return LevelFinding(level, (), over / mean, (most - mean) / mean / HEADROOM)


def _name(number: int, head: int | None) -> str:
    if number == 0:
        return "gain of all heads" if head is None else "gain of head"
    if number == 1:
        return "weight of keys on the peak"
    if number <= 1 + BINS:
        low, high = (number - 2) / BINS, (number - 1) / BINS
        return f"weight of keys whole octaves and {low:g} to {high:g} below the peak"
    number -= 2 + BINS
    if number >= len(OCTAVES):
        return f"weight of keys by the {WAVES[number - len(OCTAVES)]} of their distance to the peak"
    low, high = OCTAVES[number]
    return f"weight of keys {low:g} to {high:g} octaves below the peak"


# --------------------------------------------------------------------------------------------------
# Budgets of elements: errors of the shares, then of the sums over rows.
#
# A share errs by its logit's error (half the sum's length in u of |q| |k|), by its peers' errors
# through their sum, and by the exponential. Kernels that never store a logit round shares relative
# to a peak of their own choice, the twin relative to the row's peak: each is off by half a spacing
# of BF16, together 2^-8 of the share. Implementations that store logits and normalised shares step
# only at rounding boundaries. The output errs by the sum over rows of a share's error times the
# row.
#
# Which rows a token sees, and what is stored on the way, is a family's own: its `attention_error`.
#
# Shape letters: T tokens, H heads, R rows.

if TYPE_CHECKING:
    _Key = tuple[object, ...]
    _Kept = tuple[list[object], Budget]

_MOST_KEPT = 1 << 18  # numbers of an output whose budget is kept
_CALLS_KEPT = 8
_CHUNK = 1 << 22  # shares [T, H, R] of one step
_BESIDE_PEAKS = (
    "each share is rounded relative to a peak of the kernel's choice: 2^-8 on both sides"
)
_IN_STEPS = "logits and normalised shares are stored: steps at rounding boundaries only"
_CHECKPOINTS = 4  # partial sums of a logit that are computed
_CUT_TOGETHER = 16  # products of BF16 in one step of a tensor core
LOG2E = 1.0 / math.log(2.0)
_HALF = 2.0 ** -(BF16.mantissa_bits + 1)  # half a spacing, of the number that is stored


_KEPT: ContextVar[OrderedDict[_Key, _Kept] | None] = ContextVar("budgets", default=None)


@contextmanager
def keeping_budgets() -> Iterator[None]:
    """Cache budgets of the same inputs and weights in this context; none of these may be mutated.

    Diagnosis derives a budget for every variant that it tries, and many variants change the output
    alone.
    """
    if _KEPT.get() is not None:
        yield
        return
    token = _KEPT.set(OrderedDict())
    try:
        yield
    finally:
        _KEPT.reset(token)


def attended(call: JudgeableCall) -> dict[str, Budget]:
    """Return the budget of the attention's output."""
    kept, out = _KEPT.get(), call.outputs["out"]
    if kept is None or out.numel() > _MOST_KEPT:
        return {"out": _attended(call)}
    # Trap: Python reuses the id of a freed object, so the cache holds every object whose id is in
    # the key.
    held = [*call.inputs.items(), *call.weights.items()]
    names = tuple((name, id(each)) for name, each in held)
    key = (names, id(call.facts), out.dtype, tuple(out.shape))
    known = kept.pop(key, None) or ([*held, call.facts], _attended(call))
    kept[key] = known
    while len(kept) > _CALLS_KEPT:
        kept.popitem(last=False)
    return {"out": known[1]}


def _attended(call: JudgeableCall) -> Budget:
    facts, out = call.known_facts, call.outputs["out"]
    laws = ShareStatistics(*call.inputs["q"].shape[:2])
    slack, beside_peaks, more = family_of(facts.config).attention_error(call, laws)
    average = float(slack.mean()) if slack.numel() else 0.0
    words = (
        "logits: half their length in u of |q| |k|, 2 u of themselves",
        "shares: their logit's error, that of the sum, the exponential (2 u of its argument, 4 u)",
        _BESIDE_PEAKS if beside_peaks else _IN_STEPS,
        f"sum over rows of error times row: {number(average)} on average",
        *laws.words,
        *more,
    )
    slack = slack.reshape(out.shape) + UNDERFLOW
    return Budget(output_format(out), slack, words, laws=laws)


def token_steps(span: Span, work: int) -> Iterator[slice]:
    """Yield slices of a sequence's tokens that fit into one step; `work` is the cost of a token."""
    step = max(1, _CHUNK // max(1, work))
    for begin in range(span.begin, span.end, step):
        yield slice(begin, min(begin + step, span.end))


def logit_in_part(q: Tensor, rows: Tensor, scale: float) -> tuple[BoundedValue, Tensor]:
    """Return logits [T, H, R] with the error that many keys have in common, and their random error.

    A bound of each logit by itself lets every addition err in one direction. Additions that round
    err independently, key by key. Steps of a tensor core truncate toward 0 for all keys alike, but
    there are fewer of them. Both err relative to their partial sums, as in budget/rules.py.
    """
    value, width = torch.matmul(q, rows.T) * scale, q.shape[-1]
    partial = torch.zeros_like(value)
    size = value.abs()
    for part in range(_CHECKPOINTS - 1):
        at = slice(width * part // _CHECKPOINTS, width * (part + 1) // _CHECKPOINTS)
        partial += torch.matmul(q[..., at], rows[:, at].T) * scale
        size = torch.maximum(size, partial.abs())
    # |q|_4 |k|_4 bounds the deviation of partial sums in any order (budget/rules.py).
    four = [side.square().square().sum(-1).sqrt().sqrt() for side in (q, rows)]
    size = size + four[0][..., None] * four[1] * scale
    # Truncation by tensor-core steps has one sign for all keys.
    common = U * ((width / _CUT_TOGETHER + ALIGNED_TERMS) * size + 2 * value.abs())
    return BoundedValue(value, common), U * math.sqrt(width / 3) * size


def listed_rows(chosen_TK: Tensor, rows: int) -> Tensor:
    """Return which rows are listed [T, R]; -1 and rows that do not exist are skipped."""
    exists = (chosen_TK >= 0) & (chosen_TK < rows)
    seen = torch.zeros(len(chosen_TK), rows + 1, dtype=torch.bool)
    seen.scatter_(1, torch.where(exists, chosen_TK, rows), value=True)
    return seen[:, :rows]


def bounded_logit(q: Tensor, rows: Tensor, scale: float) -> BoundedValue:
    """Return scaled products [T, H, R], with errors bounded by Cauchy-Schwarz from the norms."""
    value = torch.matmul(q, rows.T) * scale
    size = q.norm(dim=-1, keepdim=True) * rows.norm(dim=-1) * scale
    return BoundedValue(value, U * ((q.shape[-1] / 2 + 2) * size + 2 * value.abs()))


def bounded_shares(
    logit: BoundedValue, seen: Tensor, how: tuple[Tensor | None, bool, bool], store: torch.dtype
) -> BoundedValue:
    """Return normalised shares [T, H, R]; `how`: sink, whether logits are stored, free peaks."""
    sink, logits_stored, beside_peaks = how
    if logits_stored:
        logit = stored(logit, store)
    share = exact_shares(logit, seen, sink)
    if beside_peaks:
        return BoundedValue(share.value, share.error + share.value * 2 * _HALF)
    return stored(share, store)


def exact_shares(logit: BoundedValue, seen: Tensor, sink: Tensor | None) -> BoundedValue:
    """Return shares without rounding, and the error that float32 may add."""
    hidden = ~seen[:, None]
    value = logit.value.masked_fill(hidden, -torch.inf)
    if sink is not None:
        value = torch.cat((value, sink.expand(value.shape[:2]).unsqueeze(-1)), dim=-1)
    elif not value.shape[-1]:  # a hostile capture may choose no row for any token
        return BoundedValue(value, value)
    # A row that sees nothing has only -inf; zeros avoid the NaN, and its shares are cleared below.
    share = torch.softmax(value.masked_fill(value.amax(-1, keepdim=True).isneginf(), 0.0), dim=-1)
    share = torch.where(value.isneginf(), 0.0, share)
    below = torch.where(share > 0, value.amax(-1, keepdim=True) - value, 0.0)
    if sink is not None:
        share, below = share[..., :-1], below[..., :-1]
    relative = torch.where(hidden, 0.0, logit.error) + U * (2 * below + FUNCTION)
    # The normaliser errs by the share-weighted mean of all relative errors, and by its own R
    # additions.
    relative = relative + (share * relative).sum(-1, keepdim=True) + U * share.shape[-1]
    return BoundedValue(share, share * relative + torch.where(hidden, 0.0, UNDERFLOW))
