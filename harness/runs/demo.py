"""The demonstration: a weight like a real one is quantised, damaged on purpose, and diagnosed.

Owns the weight (seeded, heavy tails, rows and columns of unlike size, as in trained models), the
faults that are planted by default, and whether the story holds: the healthy copy is clean, and each
planted fault is named first. A fault without effect on this weight is said to have none and is not
counted. Refuses an unknown fault by name.
What keeps it honest: suites/runs/test_demo.py, also with a diagnosis that is blind on purpose.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.family import same_values
from degarble.harness.engine.faults.registry import fault_named
from degarble.harness.engine.packing_diagnosis import diagnose
from degarble.harness.formats.block_formats import NVFP4
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.quantise import quantise
from degarble.harness.record.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.engine.faults.family import Fault
    from degarble.harness.engine.packing_diagnosis import Diagnosis
    from degarble.harness.formats.quantised import QuantisedTensor

PLANTED = ("M10.nibble_order", "M11.read_unswizzled", "M01.inverse")
SEED = 20260
SHAPE = (512, 2048)
LAYER = 3
COMPONENT = "ffn.experts.w2"
EXPERT = 17


@dataclass(frozen=True, eq=False)
class Copy:
    """One copy of the weight, and what was said about it; the healthy one has no fault."""

    fault: Fault | None
    tensor: QuantisedTensor
    diagnosis: Diagnosis
    has_effect: bool

    @property
    def planted(self) -> str:
        """What was done to this copy."""
        return "nothing" if self.fault is None else self.fault.id

    @property
    def name(self) -> str:
        """The copy in words."""
        return "healthy" if self.fault is None else f"with {self.fault.id}"

    @property
    def as_told(self) -> bool:
        """Whether the diagnosis says what was done: nothing more, nothing else."""
        named = [cause.fault.id for cause in self.diagnosis.causes]
        if self.fault is None or not self.has_effect:
            return self.diagnosis.verdict is Verdict.AGREES
        return named == [self.fault.id] and not self.diagnosis.unexplained


@dataclass(frozen=True, eq=False)
class Story:
    """The healthy copy, then the damaged ones."""

    weight: Tensor
    healthy: Copy
    damaged: tuple[Copy, ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """All copies, the healthy one first."""
        return (self.healthy, *self.damaged)

    @property
    def holds(self) -> bool:
        """Whether every copy was judged rightly."""
        return all(copy.as_told for copy in self.copies)


def demo_faults(identity: str | None) -> tuple[Fault, ...]:
    """Give the faults to plant: the one that is named, or the three of the default."""
    return tuple(fault_named(name) for name in (PLANTED if identity is None else [identity]))


def demo_weight(seed: int = SEED) -> Tensor:
    """Draw a weight as trained ones are: heavy tails, rows and columns of unlike size, outliers.

    Random integers, products and sums in float64 only: the same bytes on every machine.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, columns = SHAPE
    weight = _bell(generator, *SHAPE) * (_bell(generator, *SHAPE).abs() + 0.3)  # heavy tails
    weight *= (_bell(generator, rows, 1) ** 2) * 0.5 + 0.5
    weight *= (_bell(generator, 1, columns) ** 2) * 0.8 + 0.4
    weight[:, :: columns // 8] *= 6.0  # outlier channels
    return (weight * 0.02).to(torch.bfloat16)


def _bell(generator: torch.Generator, *shape: int) -> Tensor:
    """Sums of four 16-bit numbers, brought to variance 1: nearly normal, and exact."""
    wide = torch.randint(-(2**63), 2**63 - 1, (*shape, 1), generator=generator)
    bell: Tensor = wide.view(torch.int16).sum(-1).double() * (3.0**0.5 / 2**16)
    return bell


def tell_story(
    faults: tuple[Fault, ...], step: Callable[[str], None] = lambda _name: None
) -> Story:
    """Quantise, judge the healthy copy, then damage and judge one copy a fault."""
    with _one_thread():
        return _tell_story(faults, step)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread: the work is small, and threads that spin on a busy machine cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tell_story(faults: tuple[Fault, ...], step: Callable[[str], None]) -> Story:
    weight = demo_weight()
    tensor = quantise(weight, NVFP4, CANONICAL)
    healthy = Copy(None, tensor, diagnose(weight, tensor), has_effect=False)
    step("healthy copy")
    damaged = []
    for fault in faults:
        changed = fault.inject(tensor)
        assert changed is not None, fault.id  # an NVFP4 matrix can carry every fault
        effect = not same_values(tensor, changed)
        damaged.append(Copy(fault, changed, diagnose(weight, changed), effect))
        step(fault.id)
    return Story(weight, healthy, tuple(damaged))
