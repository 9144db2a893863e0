"""Compute the sharding plan of a loader map: the bytes of parameters that each rank holds.

Bytes are those of the parameters as the engine builds them, before any rearrangement. Caches and
activations are not counted. The counts come from the same targets that a proof checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.checkpoint.audit.rules.findings import ranges_told
from degarble.harness.checkpoint.read.types import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from degarble.harness.checkpoint.audit.loader.proof import LoaderProof
    from degarble.harness.checkpoint.audit.loader.targets import RankTargets, Target

# What a parameter belongs to, in the order of a table's columns.
KINDS = ("routed experts", "attention", "feed-forward", "other")
_REST = "other"
_BEGINNINGS = (("attn.", "attention"), ("ffn.", "feed-forward"))

SHARE_HEADER = ("ranks", "experts", "parameters", *(f"{kind}, GB" for kind in KINDS), "all, GB")


class RankShare(NamedTuple):
    """The parameters of one rank, counted in bytes.

    `experts`: ids of its routed experts, half-open; equal where it has none. `by_kind`: bytes of
    each of KINDS; for an engine's own list of parameters only experts and the rest are separated.
    """

    rank: int
    experts: tuple[int, int]
    parameters: int
    by_kind: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(self.by_kind.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a JSON report."""
        return {
            "rank": self.rank,
            "experts": list(self.experts),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bytes_by_kind": dict(self.by_kind),
        }


def rank_shares(proof: LoaderProof) -> tuple[RankShare, ...]:
    """Return the share of each rank of a proof."""
    return tuple(map(_share, proof.held()))


def _share(held: RankTargets) -> RankShare:
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    experts = 0
    for target in held.targets.values():
        counts[_kind(held, target)] += prod(target.shape) * DTYPE_BITS[target.dtype] // 8
        if target.stacked:
            experts = max(experts, target.shape[0])
    first = held.first_expert if experts else 0
    return RankShare(held.rank, (first, first + experts), len(held.targets), dict(counts))


def _kind(held: RankTargets, target: Target) -> str:
    if target.stacked:
        # Only routed experts are stacked.
        return KINDS[0]
    member = next(iter(target.members.values()))
    if member.position is None:
        return _REST
    name = held.held[member.position].row.name
    return next((kind for start, kind in _BEGINNINGS if name.startswith(start)), _REST)


def share_rows(shares: Sequence[RankShare]) -> tuple[tuple[str, ...], ...]:
    """Return table rows under SHARE_HEADER; ranks that differ only in expert ids share one."""
    alike: dict[tuple[object, ...], list[RankShare]] = defaultdict(list)
    for share in shares:
        first, stop = share.experts
        key = (stop - first, share.parameters, tuple(share.by_kind.items()))
        alike[key].append(share)
    return tuple(_row(group) for group in alike.values())


def _row(group: Sequence[RankShare]) -> tuple[str, ...]:
    sizes = [group[0].by_kind[kind] for kind in KINDS]
    # Ranks of one row may hold different experts: show how many, not which.
    every = len({share.experts for share in group}) > 1
    first, stop = group[0].experts
    experts = f"{stop - first} each" if every else ranges_told(range(first, stop))
    return (
        ranges_told(share.rank for share in group),
        experts or "none",
        f"{group[0].parameters:,}",
        *(f"{size / 1e9:.3f}" for size in (*sizes, sum(sizes))),
    )
