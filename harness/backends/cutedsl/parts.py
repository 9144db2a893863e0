"""What a kernel adaptor gets: the component before a run, its tensors during one, its weights.

Part holds component, facts, formats and extents of weights, and target; the kernel is chosen by
these alone, before anything runs. Work holds one call's inputs, weights and kernels. Prepared
converts weights once and caches them. NoKernelError gives the reason why the reference computes a
part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference.weights import HeldWeight
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
    """No kernel computes this component as configured; the text is the reason."""


@dataclass(frozen=True)
class Part:
    """A component as kernel choice needs it; weights by their names within the block."""

    component: Component
    facts: Facts
    formats: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # in which a plain weight is stored
    target: str

    @property
    def config(self) -> Any:
        """Return the model's config."""
        return self.facts.config

    @property
    def v4(self) -> bool:
        """Return whether this is DeepSeek-V4."""
        return isinstance(self.config, V4Config)

    @property
    def name(self) -> str:
        """Return the name of the only weight."""
        (name,) = self.shapes
        return name

    def format_of(self, name: str) -> str:
        """Return the format of a weight, BF16 if the recipe does not quantise it."""
        return self.formats.get(name, "BF16")


@dataclass(frozen=True)
class Work:
    """One call: inputs and weights on the device of the kernels."""

    inputs: Mapping[str, Tensor]
    weights: Prepared
    kernels: Kernels

    def bf16(self, name: str = "x") -> Tensor:
        """Return an input as BF16; references keep some BF16 values in a wider dtype."""
        return own(self.inputs[name].to(torch.bfloat16))

    def fp32(self, name: str) -> Tensor:
        """Return an input in float32."""
        return own(self.inputs[name].to(torch.float32))

    def run(self, kernel: str, problem: Any, **tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Launch a kernel."""
        return self.kernels.run(kernel, problem, **tensors)


Outputs = dict[str, "Tensor"]
Compute = Callable[[Work], Outputs]


class Kept(NamedTuple):
    """A weight and what was made of it."""

    weight: Weight
    made: Any


@dataclass
class Prepared:
    """The weights of one call; results made from a held weight are cached for later calls."""

    source: Mapping[str, Weight]
    device: torch.device
    kept: dict[tuple[str, str], Kept] = field(default_factory=dict)

    def made(self, name: str, how: str, make: Callable[[Weight], T]) -> T:
        """Return `make(weight)`, cached for the same weight record."""
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
        """Return a weight's values on the device."""
        return self.made(name, str(dtype), lambda weight: self.there(weight.values(dtype)))

    def bf16(self, name: str) -> Tensor:
        """Return a weight as BF16 on the device; raise if that is not exact."""
        return self.made(name, "exact bf16", lambda weight: self.there(exact_bf16(name, weight)))

    def there(self, tensor: Tensor) -> Tensor:
        """Return a contiguous, aligned tensor on the device."""
        return own(tensor.to(self.device))


def exact_bf16(name: str, weight: Weight) -> Tensor:
    """Return values as BF16; raise unless BF16 represents all of them exactly."""
    wide = weight.values(torch.float32)
    narrow = wide.to(torch.bfloat16)
    if not torch.equal(narrow.float(), wide):
        raise InvalidArgument(
            f"values of {name}", f"{int((narrow.float() != wide).sum())} of {wide.numel()}",
            "values that BF16 holds exactly", "This format needs a kernel of its own.",
        )  # fmt: skip
    return narrow


def own(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and aligned to what every kernel requires."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
