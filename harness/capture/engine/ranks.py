"""Join the captures of single ranks into one: concatenate shards, sum terms, compare replicas.

All ranks have the same steps and calls. A shard lies along one dimension in the order of ranks,
slot by slot where the engine fused several; its padding is cut off. Terms are summed in float64 and
stored as float32, so joining adds no rounding of its own to a rank's. Of a replicated tensor, and
of a part that several ranks have, the first copy is kept; a rank whose bytes differ is recorded by
site and rank, as a finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.maps import WHOLE, ShareKind
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import site_of
from degarble.harness.capture.files.writer import CaptureWriter, PendingCall, PendingTensor
from degarble.harness.capture.recorder import Snapshots
from degarble.harness.model.sites import Port

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.capture.engine.maps import CapturedRankShare, ComponentMap, TensorLocation
    from degarble.harness.capture.files.records import CapturedCall, CapturedTensor

APART = "ranks_apart"  # the fact that lists sites whose copies differ between ranks
_OWN = ("requests", "ended", "replayed")  # facts of a rank that are the engine's
_MOST_APART = 100
_AGAIN = "Capture all ranks of one engine again, together."


def join_ranks(
    folders: Sequence[Path], sightings: Iterable[ComponentMap], out: Path, facts: Mapping[str, Any]
) -> list[str]:
    """Write one capture from those of all ranks, in their order; return the sites that differ."""
    ranks = [Capture.open(folder) for folder in folders]
    known = {sighting.component: sighting for sighting in sightings}
    _require_alike(ranks)
    apart: dict[str, None] = {}
    with CaptureWriter(out, facts) as writer:
        joiner = _Joiner(ranks, known, apart)
        calls = iter(zip(*(rank.calls for rank in ranks), strict=True))
        waiting = next(calls, None)
        for step in ranks[0].steps:
            writer.step(step)
            while waiting is not None and waiting[0].step == step.number:
                writer.call(joiner.joined(waiting))
                waiting = next(calls, None)
        lines = list(apart)
        own = {name: ranks[0].facts[name] for name in _OWN if name in ranks[0].facts}
        writer.finish(ranks=len(ranks), **own, **({APART: lines[:_MOST_APART]} if lines else {}))
    return lines


def _require_alike(ranks: Sequence[Capture]) -> None:
    first = ranks[0]
    for number, rank in enumerate(ranks):
        if rank.steps != first.steps or [c.component for c in rank.calls] != [
            c.component for c in first.calls
        ]:
            raise InvalidArgument(
                f"capture of rank {number}", f"{len(rank.steps)} steps, {len(rank.calls)} calls",
                f"those of rank 0: {len(first.steps)} steps, {len(first.calls)} calls", _AGAIN,
            )  # fmt: skip


class _Joiner:
    """Joins calls; bytes that come again are stored once."""

    def __init__(
        self, ranks: Sequence[Capture], known: Mapping[str, ComponentMap], apart: dict[str, None]
    ) -> None:
        self._ranks, self._known, self._apart = ranks, known, apart
        self._snapshots = Snapshots()

    def joined(self, calls: Sequence[CapturedCall]) -> PendingCall:
        """One call of all ranks."""
        first, sighting = calls[0], self._known[calls[0].component]
        sides: list[dict[str, PendingTensor]] = []
        for port, places in ((Port.IN, sighting.inputs), (Port.OUT, sighting.outputs)):
            kept = [call.inputs if port is Port.IN else call.outputs for call in calls]
            sides.append({
                name: self._sent(str(site_of(first.component, port, name)), places[name], tensors)
                for name in kept[0] if all(tensors := [each.get(name) for each in kept])
            })  # fmt: skip
        return PendingCall(first.step, first.component, sides[0], sides[1])

    def _sent(
        self, site: str, seen: TensorLocation, kept: Sequence[CapturedTensor | None]
    ) -> PendingTensor:
        here = [each for each in kept if each is not None]
        whole = seen.share.held is ShareKind.WHOLE
        copies = len(here) if whole else seen.share.copies
        for rank, tensor_here in enumerate(here):
            first = rank - rank % copies
            if (tensor_here.sha256, tensor_here.shape) != (here[first].sha256, here[first].shape):
                self._apart.setdefault(f"{site}: rank {rank} is not as rank {first}")
        if whole:
            tensor = self._ranks[0].tensor(here[0])
        else:
            tensors = [
                self._flat(seen, rank.tensor(each))
                for rank, each in zip(self._ranks, here, strict=True)
            ]
            tensor = joined(site, seen.share, tensors)
        snapshot = self._snapshots.take(tensor)
        return PendingTensor(snapshot.payload, tuple(tensor.shape), here[0].rows)

    def _flat(self, seen: TensorLocation, tensor: Tensor) -> Tensor:
        """Put heads side by side, where an engine gives each a row and the map counts columns."""
        share = seen.share
        wide = share.held is ShareKind.PART and share.dim == -1 and tensor.ndim > 2
        needs = wide and tensor.shape[-1] * len(self._ranks) < max(share.extents)
        return tensor.flatten(1) if needs else tensor


def joined(name: str, share: CapturedRankShare, tensors: Sequence[Tensor]) -> Tensor:
    """The whole tensor, from what each rank has of it."""
    if share == WHOLE:
        return tensors[0]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise InvalidArgument(
            name, [list(tensor.shape) for tensor in tensors], "one shape on every rank", _AGAIN
        )
    if share.held is ShareKind.TERM:
        if len(tensors) == 1:
            return tensors[0]
        return torch.stack([tensor.to(torch.float64) for tensor in tensors]).sum(0).float()
    tensors = tensors[:: share.copies]
    slots = len(share.extents)
    own = tensors[0].shape[share.dim]
    if own % slots or own // slots * len(tensors) < max(share.extents):
        raise InvalidArgument(
            name, f"{own} of dimension {share.dim} on each of {len(tensors)} ranks",
            f"{slots} equal slots that make {list(share.extents)}", "Correct the engine's map.",
        )  # fmt: skip
    runs = [tensor.split(own // slots, share.dim) for tensor in tensors]
    whole = [
        torch.cat([run[slot] for run in runs], share.dim).narrow(share.dim, 0, extent)
        for slot, extent in enumerate(share.extents)
    ]
    return torch.cat(whole, share.dim) if slots > 1 else whole[0].contiguous()
