"""Prove that a converted checkpoint uses exactly the tensor names that its consumer reads.

Correct values under wrong names are not loaded: transformers then leaves its own tensors random and
reports it in one log line among many. The expected names follow from the config and the formats
alone, never from the conversion's plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.read.types import StoredLayout, shown
from degarble.harness.checkpoint.transform.convert.recipes_after import formats_after, recipe_of
from degarble.harness.checkpoint.view.consumers import consumer_of, name_coverage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.transform.convert.job import Job
    from degarble.harness.checkpoint.view.view import Checkpoint

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


def prove_names(job: Job, output: Checkpoint) -> NameProof | None:
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
