"""Prove a conversion: read the written checkpoint again, compare names and every value."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.read.types import StoredLayout, shown
from degarble.harness.checkpoint.transform.configs import recipe_of
from degarble.harness.checkpoint.transform.convert.job import formats_after, job_of
from degarble.harness.checkpoint.transform.units import TensorProof
from degarble.harness.checkpoint.view.consumers import consumer_of, name_coverage
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.workers import run_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from degarble.harness.checkpoint.transform.convert.job import ConversionJob
    from degarble.harness.checkpoint.write.workers import Workers


# --------------------------------------------------------------------------------------------------
# Names: exactly those that the consumer reads.
#
# Correct values under wrong names are not loaded: transformers then leaves its own tensors random
# and reports it in one log line among many. The expected names follow from the config and the
# formats alone, never from the conversion's plan.

UNKNOWN_NAMES = "The names were not compared: no loader of this model in these formats is known."


class NameProof(NamedTuple):
    """The result of comparing names. `extra`: tensors of the source that belong to no parameter.

    `other_formats`: formats that stay and that the consumer does not load, with their linears.
    """

    consumer: str
    read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    passed_over: int
    extra: tuple[str, ...]
    other_formats: dict[str, int]

    @property
    def holds(self) -> bool:
        """Whether the consumer finds all that it reads, and nothing else of the model."""
        return not self.missing and not self.unexpected

    def lines(self) -> Iterator[str]:
        """Yield the verdict, then each wrong name."""
        verdict = "The names are" if self.holds else "The names are not"
        yield f"{verdict} those that {self.consumer} reads: {self.read} tensors."
        for name in self.missing:
            yield f"{shown(name)}: it reads this tensor, which is missing"
        for name in self.unexpected:
            yield f"{shown(name)}: it has no place for this tensor"
        if self.passed_over:
            yield f"It passes {self.passed_over} tensors of the drafter over."
        for name in self.extra:
            yield f"{shown(name)} belongs to no parameter and was copied from the source"
        for word, count in self.other_formats.items():
            yield f"It does not load {word}, in which {count} linears stay."


def prove_names(job: ConversionJob, output: Checkpoint) -> NameProof | None:
    """Compare the names of a target with those that its consumer reads."""
    names = job.checkpoint.names
    if names is None:
        return None
    formats = formats_after(job)
    consumer = consumer_of(job.to, names.config.family)
    packed = output.layout is StoredLayout.COMPRESSED_TENSORS
    recipe = recipe_of(formats, names)
    found = name_coverage(consumer, names.config, recipe, output.entries, packed=packed)
    if found is None:
        return None
    taken = {names.module_of(each) for each in names.present.values()}
    claimed = {entry.name for module in taken for entry in names.table.tensors(module)}
    extra = {job.names.tensor(name) for name in job.copied if name not in claimed}
    others: dict[str, int] = {}
    for each in formats.values():
        if each.weight not in consumer.formats:
            others[each.weight] = others.get(each.weight, 0) + 1
    return NameProof(
        consumer.what,
        len(output.entries) - len(found.unexpected) - found.passed_over,
        found.missing,
        tuple(name for name in found.unexpected if name not in extra),
        found.passed_over,
        tuple(name for name in found.unexpected if name in extra),
        others,
    )


# --------------------------------------------------------------------------------------------------
# Values.
#
# Each unit compares its output: exactly where nothing is lost, within one rounding to the format
# elsewhere. Copied tensors are compared byte by byte. Separate faults are: a source tensor that
# reached nothing, a target tensor that no unit planned, a dtype or shape other than planned, and
# names that the consumer does not read. Nothing that the writing run remembered is
# used. Parts may be proven by several processes or machines. The target needs its conversion.json.

_CHUNK = 16 << 20
_LEAST_PART = 64 << 20  # bytes: below it, handing out costs more than it spreads
_PARTS = 256


@dataclass(frozen=True)
class ConversionProof:
    """The result of a proof. `left_out`: source tensors that are left out, with the reason."""

    to: str
    tensors: tuple[TensorProof, ...]
    copied: int
    faults: tuple[str, ...]  # of the whole: tensors lost, or made by nobody
    left_out: Mapping[str, str]
    names: NameProof | None = None  # None: of a model whose loaders are not known

    @property
    def holds(self) -> bool:
        """Whether the target is what the conversion promises."""
        named = self.names is None or self.names.holds
        return named and not self.faults and all(each.holds for each in self.tensors)

    @property
    def broken(self) -> tuple[TensorProof, ...]:
        """The tensors that break the promise."""
        return tuple(each for each in self.tensors if not each.holds)

    @property
    def exact(self) -> int:
        """The number of converted tensors that kept every value."""
        return sum(each.is_exact for each in self.tensors)

    def lines(self) -> Iterator[str]:
        """Yield one line for the whole, and some for each tensor that breaks the promise."""
        verdict = "holds" if self.holds else "is broken"
        yield (
            f"The promise of {self.to} {verdict}: {len(self.tensors)} converted"
            f" ({self.exact} exact), {self.copied} copied, {len(self.left_out)} left out."
        )
        yield from self.names.lines() if self.names else (UNKNOWN_NAMES,)
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


class ProofPart(NamedTuple):
    """A range of units and a range of copied tensors that one worker proves at once."""

    units: tuple[int, int]
    copies: tuple[int, int]
    nbytes: int


@dataclass(frozen=True)
class _Kept:
    """The files that this process has opened for a proof."""

    by_key: dict[str, tuple[ConversionJob, Checkpoint]] = field(default_factory=dict)


_KEPT = _Kept()


def prove(
    source: Path,
    target: Path,
    *,
    workers: Workers = 1,
    progress: Callable[[int, str], None] | None = None,
) -> ConversionProof:
    """Compare a finished target with the source that it was converted from.

    `progress` is called with the number of compared bytes of the target.
    """
    job = job_of(source, target)
    with job.checkpoint, Checkpoint.open(target) as output:
        faults = tuple(_unbalanced(job, output))
        parts = parts_of(job)
        # Workers keep files open between parts. The key separates this proof from an earlier one.
        key = secrets.token_hex(8)
        work = partial(_proven, key, source, target)
        if isinstance(workers, int) and sum(part.nbytes for part in parts) < _LEAST_PART:
            workers = 1  # another process takes longer to start than this takes
        proofs: dict[ProofPart, list[TensorProof]] = {}
        try:
            for part, found in run_each(work, parts, workers, "proof of {0.units}".format):
                proofs[part] = found
                if progress:
                    progress(part.nbytes, "compared")
        finally:
            _forget()
        tensors = tuple(each for part in parts for each in proofs[part])
        named = prove_names(job, output)
        return ConversionProof(job.to, tensors, len(job.copied), faults, job.left_out, named)


def parts_of(job: ConversionJob) -> list[ProofPart]:
    """Cut the work into parts of about equal size, in the order of the source."""
    sizes = [sum(tensor.nbytes for tensor in unit.tensors) for unit in job.units]
    copies = [job.checkpoint.entry(name).nbytes for name in job.copied]
    room = max(_LEAST_PART, (sum(sizes) + sum(copies)) // _PARTS)
    found = [ProofPart(cut, (0, 0), nbytes) for cut, nbytes in _cut(sizes, room)]
    return found + [ProofPart((0, 0), cut, nbytes) for cut, nbytes in _cut(copies, room)]


def _cut(sizes: Sequence[int], room: int) -> Iterator[tuple[tuple[int, int], int]]:
    begin = filled = 0
    for end, nbytes in enumerate(sizes, 1):
        filled += nbytes
        if filled >= room or end == len(sizes):
            yield (begin, end), filled
            begin, filled = end, 0


def _proven(key: str, source: Path, target: Path, part: ProofPart) -> list[TensorProof]:
    """Prove one part in any process; opened files are kept for the next part."""
    if key not in _KEPT.by_key:
        _forget()
        _KEPT.by_key[key] = job_of(source, target), Checkpoint.open(target)
    job, output = _KEPT.by_key[key]
    found: list[TensorProof] = []
    for unit in job.units[slice(*part.units)]:
        try:
            found.extend(unit.check(output))
        except Refused as error:
            text = f"cannot be read: {error}"
            found.append(TensorProof(unit.key, unit.sources, 0, 0, 0, "", None, (text,)))
    copied = (_copy(job, output, name) for name in job.copied[slice(*part.copies)])
    return found + [each for each in copied if each]


def _forget() -> None:
    for job, output in _KEPT.by_key.values():
        job.checkpoint.close()
        output.close()
    _KEPT.by_key.clear()


def _unbalanced(job: ConversionJob, output: Checkpoint) -> Iterator[str]:
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


def _copy(job: ConversionJob, output: Checkpoint, source: str) -> TensorProof | None:
    """Compare a copied tensor byte by byte; None where it is the same."""
    entry, name = job.checkpoint.entry(source), job.names.tensor(source)
    if name not in output.entries or output.entry(name).nbytes != entry.nbytes:
        fault = ("not copied",)
        return TensorProof(name, (source,), entry.nbytes, 0, 0, "equal bytes", None, fault)
    chunks = (job.checkpoint.chunks(source, _CHUNK), output.chunks(name, _CHUNK))
    wrong = sum(ours != theirs for ours, theirs in zip(*chunks, strict=True))
    if not wrong:
        return None
    fault = (f"bytes differ from the source in {wrong} pieces of {_CHUNK} bytes",)
    return TensorProof(name, (source,), entry.nbytes, wrong, wrong, "equal bytes", None, fault)
