"""What a pairing of a component with kernels is told, and how weights come to lie as kernels read.

Owns the part (component, facts, formats and extents of its weights, target) that a pairing decides
by, before anything runs; the work of one call (inputs and weights on the GPU, and the kernels); the
preparation of weights, once a record; and NoKernel, the reason why the reference computes a part.
Refuses weights that are asked for in BF16 and do not fit it. Kept honest by
suites/backends/cutedsl/test_backend.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference.held_weights import HeldWeight
from degarble.harness.model.config.config import V4Config

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.components import Component
    from degarble.references.facts import Facts

T = TypeVar("T")
ALIGNMENT = 32  # bytes, the most that a kernel demands of an address


class NoKernelError(Exception):
    """No kernel computes this component as it is here; the text is the reason."""


@dataclass(frozen=True)
class Part:
    """A component as a pairing sees it; weights by their names within the block."""

    component: Component
    facts: Facts
    formats: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # in which a plain weight is stored
    target: str

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.facts.config

    @property
    def v4(self) -> bool:
        """Whether this is DeepSeek-V4."""
        return isinstance(self.config, V4Config)

    @property
    def name(self) -> str:
        """The only weight's name."""
        (name,) = self.shapes
        return name

    def format_of(self, name: str) -> str:
        """The format of a weight; what a recipe does not quantise is BF16."""
        return self.formats.get(name, "BF16")


@dataclass(frozen=True)
class Work:
    """One call: inputs and weights where the kernels are."""

    inputs: Mapping[str, Tensor]
    weights: Prepared
    kernels: Kernels

    def bf16(self, name: str = "x") -> Tensor:
        """An input of BF16 values; references hold some of them in a wider dtype."""
        return own(self.inputs[name].to(torch.bfloat16))

    def fp32(self, name: str) -> Tensor:
        """An input in float32."""
        return own(self.inputs[name].to(torch.float32))

    def run(self, kernel: str, problem: Any, **tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Launch a kernel."""
        return self.kernels.run(kernel, problem, **tensors)


Outputs = dict[str, "Tensor"]
Compute = Callable[[Work], Outputs]


class Kept(NamedTuple):
    """Something that was made of a weight."""

    weight: Weight
    made: Any


@dataclass
class Prepared:
    """The weights of one call; what is made of a held one is kept for later calls."""

    source: Mapping[str, Weight]
    device: torch.device
    kept: dict[tuple[str, str], Kept] = field(default_factory=dict)

    def made(self, name: str, how: str, make: Callable[[Weight], T]) -> T:
        """Make something of a weight, or find what was made of the same record before."""
        weight = self.source[name]
        known = self.kept.get((name, how))
        if known is not None and known.weight is weight:
            found: T = known.made
            return found
        made = make(weight)
        if isinstance(weight, HeldWeight):  # nobody writes into it
            self.kept[name, how] = Kept(weight, made)
        return made

    def plain(self, name: str, dtype: torch.dtype) -> Tensor:
        """A weight's values on the device."""
        return self.made(name, str(dtype), lambda weight: self.there(weight.values(dtype)))

    def bf16(self, name: str) -> Tensor:
        """Values that BF16 holds exactly, on the device."""
        return self.made(name, "exact bf16", lambda weight: self.there(exact_bf16(name, weight)))

    def there(self, tensor: Tensor) -> Tensor:
        """A tensor of its own on the device."""
        return own(tensor.to(self.device))


def exact_bf16(name: str, weight: Weight) -> Tensor:
    """Values that BF16 holds exactly: plain ones, and FP8 or FP4 codes by powers of two."""
    wide = weight.values(torch.float32)
    narrow = wide.to(torch.bfloat16)
    if not torch.equal(narrow.float(), wide):
        raise InvalidArgument(
            f"values of {name}", f"{int((narrow.float() != wide).sum())} of {wide.numel()}",
            "values that BF16 holds exactly", "This format needs a kernel of its own.",
        )  # fmt: skip
    return narrow


def own(tensor: Tensor) -> Tensor:
    """The tensor contiguous and on an address that every kernel takes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
