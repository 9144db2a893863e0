"""Hold the weights of a model in memory: read once, and decode once for each dtype.

Decoded values are kept under torch's inference mode too, where Weight keeps none. A weight is
decoded when a component first uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(eq=False)
class HeldWeight(Weight):
    """A weight whose fields do not change: its values are decoded once in each dtype."""

    _kept: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of_weight(cls, weight: Weight) -> HeldWeight:
        """Take over the fields of a weight."""
        named = {each.name: getattr(weight, each.name) for each in fields(weight)}
        named.pop("_decoded")
        return cls(**named)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The numbers, in `dtype`."""
        found = self._kept.get(dtype)
        if found is None:
            with torch.inference_mode(mode=False):
                found = self._kept[dtype] = super()._decode(dtype)
        return found


class HeldWeights(Mapping[str, Weight]):
    """All weights of a source, each read at its first use."""

    def __init__(self, source: Mapping[str, Weight]) -> None:
        self._source = source
        self._held: dict[str, HeldWeight] = {}

    def __getitem__(self, name: str) -> Weight:
        found = self._held.get(name)
        if found is None:
            found = self._held[name] = HeldWeight.of_weight(self._source[name])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)
