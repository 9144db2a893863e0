"""The proof of a conversion: read its output from disk again, and compare every value.

Owns the walk over a finished target. Each unit compares what it made (exactly where nothing is
lost, within one rounding to the format elsewhere); each copied tensor is compared byte by byte;
and the books are balanced: a source tensor that reached nothing, a target tensor that nobody
planned, a dtype or shape other than planned are faults of their own. Nothing of what the writing
run remembered is believed.

Refuses a target without conversion.json. Kept honest by the planted faults of
suites/checkpoint/convert/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.convert.job import job_of
from degarble.harness.checkpoint.convert.units import TensorProof
from degarble.harness.checkpoint.view import Checkpoint
from degarble.harness.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.convert.job import Job

_CHUNK = 16 << 20


@dataclass(frozen=True)
class Proof:
    """What the comparison found. `left_out`: source tensors that end here, counted by reason."""

    to: str
    tensors: tuple[TensorProof, ...]
    copied: int
    faults: tuple[str, ...]  # of the whole: tensors lost, or made by nobody
    left_out: Mapping[str, str]

    @property
    def holds(self) -> bool:
        """Whether the target is what the conversion promises."""
        return not self.faults and all(each.holds for each in self.tensors)

    @property
    def broken(self) -> tuple[TensorProof, ...]:
        """The tensors that are not."""
        return tuple(each for each in self.tensors if not each.holds)

    @property
    def exact(self) -> int:
        """How many converted tensors kept every value."""
        return sum(each.is_exact for each in self.tensors)

    def lines(self) -> Iterator[str]:
        """Tell it: one line for the whole, and some for each tensor that breaks the promise."""
        verdict = "holds" if self.holds else "is broken"
        yield (
            f"The promise of {self.to} {verdict}: {len(self.tensors)} converted"
            f" ({self.exact} exact), {self.copied} copied, {len(self.left_out)} left out."
        )
        yield from self.faults
        for each in self.broken:
            yield f"{each.tensor}: {each.beyond} of {each.elements} beyond {each.bound}"
            yield from (f"  {fault}" for fault in each.faults)
            if each.worst:
                where = ", ".join(map(str, each.worst.coordinate))
                yield (
                    f"  worst at [{where}]: {each.worst.output:g}, source {each.worst.source:g},"
                    f" allowed {each.worst.bound:g}"
                )


def prove(source: Path, target: Path) -> Proof:
    """Compare a finished target with the source that it was converted from."""
    job = job_of(source, target)
    with Checkpoint.open(target) as output:
        faults = tuple(_unbalanced(job, output))
        tensors: list[TensorProof] = []
        for unit in job.units:
            try:
                tensors.extend(unit.check(output))
            except Refused as error:
                text = f"cannot be read: {error}"
                tensors.append(TensorProof(unit.key, unit.sources, 0, 0, 0, "", None, (text,)))
        differing = [each for each in (_copy(job, output, name) for name in job.copied) if each]
        return Proof(job.to, (*tensors, *differing), len(job.copied), faults, job.left_out)


def _unbalanced(job: Job, output: Checkpoint) -> Iterator[str]:
    planned = {tensor.name: (tensor.dtype, tensor.shape) for tensor in job.planned()}
    for name, (dtype, shape) in planned.items():
        entry = output.entries.get(name)
        if entry is None:
            yield f"{name} is missing"
        elif (entry.dtype, entry.shape) != (dtype, shape):
            found = f"{entry.dtype} {list(entry.shape)}"
            yield f"{name} is {found}, not {dtype} {list(shape)}"
    for name in output.entries:
        if name not in planned:
            yield f"{name} belongs to no conversion"


def _copy(job: Job, output: Checkpoint, name: str) -> TensorProof | None:
    """Compare a copied tensor byte by byte; None where it is the same."""
    entry = job.checkpoint.entry(name)
    if name not in output.entries or output.entry(name).nbytes != entry.nbytes:
        return TensorProof(name, (name,), entry.nbytes, 0, 0, "equal bytes", None, ("not copied",))
    chunks = (job.checkpoint.chunks(name, _CHUNK), output.chunks(name, _CHUNK))
    wrong = sum(ours != theirs for ours, theirs in zip(*chunks, strict=True))
    if not wrong:
        return None
    fault = (f"bytes differ from the source in {wrong} pieces of {_CHUNK} bytes",)
    return TensorProof(name, (name,), entry.nbytes, wrong, wrong, "equal bytes", None, fault)
