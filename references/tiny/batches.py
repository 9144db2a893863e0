"""Training batches by step number, prepared by worker processes.

A batch is a function of its number alone, so a run that was interrupted trains on the same data as
an uninterrupted one.
"""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np
import torch
from torch import Tensor

from degarble.references.tiny.language import Mixture, document

KINDS = ("other", "recall", "far recall", "sum", "copy")
_Made = tuple[np.ndarray, np.ndarray]


def example(seed: int, mixture: Mixture) -> tuple[list[int], list[int]]:
    """Return token ids [length] and the kind of each next token [length - 1]."""
    made = document(seed, mixture)
    kinds = [0] * (mixture.length - 1)
    for probe in made.probes:
        if 0 < probe.position < mixture.length:
            far = probe.kind == "recall" and probe.distance > 128
            kinds[probe.position - 1] = KINDS.index("far recall" if far else probe.kind)
    return made.ids[: mixture.length], kinds


def _examples(first: int, count: int, mixture: Mixture) -> _Made:
    made = [example(seed, mixture) for seed in range(first, first + count)]
    ids = np.array([ids for ids, _ in made], dtype=np.int16)
    return ids, np.array([kinds for _, kinds in made], dtype=np.uint8)


class Batches:
    """Batches by worker processes. Call it with consecutive step numbers."""

    def __init__(self, batch: int, mixture: Mixture, first: int, step: int, workers: int) -> None:
        self.batch, self.mixture, self.first = batch, mixture, first
        self.pool = ProcessPoolExecutor(workers)
        self.jobs: dict[int, Future[_Made]] = {}
        self.next = step
        for _ in range(4 * workers):
            self._submit()

    def _submit(self) -> None:
        first = self.first + self.next * self.batch
        self.jobs[self.next] = self.pool.submit(_examples, first, self.batch, self.mixture)
        self.next += 1

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return ids [B, T + 1] and kinds [B, T]."""
        self._submit()
        ids, kinds = self.jobs.pop(step).result()
        return torch.from_numpy(ids).long(), torch.from_numpy(kinds).long()
