"""The facts that one block's components are bound to: config, block, arithmetic, recipe's formats.

A component is a pure function `(facts, inputs, weights) -> outputs`; binding it to its facts gives
the callable of harness.base.protocols. Inputs and outputs are named tensors, by the names of
harness.model.components; weights go by their name within the block (`attn.wq_a`,
`ffn.experts.3.w1`, `hc_attn_fn`).

Tokens of several sequences are concatenated, `token_offsets` [B+1] says where each begins, and
positions of a sequence are consecutive. State of earlier calls arrives as `state_*`, again
concatenated; how many rows belong to each sequence follows from its first position.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import UNQUANTISED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Formats, Recipe
    from degarble.harness.model.types import Block
    from degarble.references.numerics import Numerics


# --------------------------------------------------------------------------------------------------
# Sizes and weights of the hyper-connections (mHC); compiled.py takes them too


@dataclass(frozen=True)
class MixingFacts:
    """Streams, Sinkhorn iterations, and the two epsilons."""

    streams: int
    iterations: int
    epsilon: float
    norm_epsilon: float


@dataclass(frozen=True)
class MixingWeights:
    """fn [N, S*D], base [N], scale [3] (head collapse: [S, S*D], [S], [1])."""

    fn: Tensor
    base: Tensor
    scale: Tensor


# --------------------------------------------------------------------------------------------------
# Facts of a block

if TYPE_CHECKING:
    Inputs = Mapping[str, Tensor]
    Weights = Mapping[str, Weight]
    Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model's ends, or of one block."""

    config: Any  # of its family's own class
    numerics: Numerics
    block: Block | None
    formats: Mapping[str, Formats]

    def activation(self, weight: str) -> str | None:
        """Return the activation format in front of a weight, or None where nothing is quantised."""
        if self.numerics.exact:
            return None
        chosen = self.formats.get(weight, UNQUANTISED).activation
        return None if chosen == UNQUANTISED.activation else chosen

    def norm_epsilon(self, weight: str) -> float:
        """Return the epsilon under the root of the norm that has this weight."""
        del weight
        epsilon: float = self.config.rms_norm_eps
        return epsilon

    def multiplied(self, x: Tensor, weight: Weight, *, coded: bool) -> tuple[Tensor, Weight]:
        """Return an input and the weight as they are multiplied; `coded`: the input is codes."""
        del coded
        return x, weight

    def quantised_operand(self, x: Tensor, weights: Weights) -> tuple[Tensor, Any] | None:
        """Return what a linear quantises, and how, as a linears.InputQuantiser.

        None where a format that is the same for all inputs says it all.
        """
        del x, weights
        return None

    @property
    def summed_over_ranks(self) -> bool:
        """Return whether several ranks have a linear's inputs each in part, and add up outputs."""
        return False

    @property
    def weight_before_w2(self) -> bool:
        """Return whether a routing weight is applied in front of w2."""
        return False

    @property
    def limit(self) -> float | None:
        """Return the SwiGLU clamp of routed experts."""
        return None

    @property
    def shared_limit(self) -> float | None:
        """Return the SwiGLU clamp of the shared expert."""
        return None


@dataclass(frozen=True)
class ReferenceTable:
    """The functions of a family's components by role, and the facts that they are bound to."""

    facts: type[ModelFacts]
    ends: Mapping[str, Callable[[Any, Inputs, Weights], Outputs]]
    block: Mapping[str, Callable[[Any, Inputs, Weights], Outputs]]
    # Of a drafter's block alone, before and after an ordinary block.
    drafter: Mapping[str, Callable[[Any, Inputs, Weights], Outputs]] = field(default_factory=dict)
    scoring: str | None = None  # of routers: the only `scoring_func` that the functions compute

    def function(self, role: str, block: Block | None) -> Callable[..., Outputs]:
        """Return the function of a role, in a block or at the ends of the model."""
        if block is None:
            return self.ends[role]
        if block.is_drafter and role in self.drafter:
            return self.drafter[role]
        return self.block[role]


class TensorVersion(NamedTuple):
    """Recognises a tensor that is the same object and unchanged. Not for inference tensors."""

    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorVersion:
        """Remember a tensor without keeping it alive."""
        return cls(weakref.ref(tensor), tensor._version)  # noqa: SLF001

    def still(self, tensor: Tensor) -> bool:
        """Return whether it is this tensor, and nobody wrote into it."""
        return self.tensor() is tensor and self.version == tensor._version  # noqa: SLF001


@dataclass(frozen=True)
class Span:
    """The new tokens of one sequence: their range in this call, and their first position."""

    begin: int
    end: int
    start: int

    @property
    def count(self) -> int:
        """Return the number of new tokens."""
        return self.end - self.begin

    @property
    def stop(self) -> int:
        """Return the number of tokens of the sequence after this call."""
        return self.start + self.count

    @property
    def tokens(self) -> slice:
        """Return the range of the new tokens in this call."""
        return slice(self.begin, self.end)

    def entries_before(self, ratio: int) -> int:
        """Return the number of entries that earlier calls completed."""
        return self.start // ratio

    def entries_made(self, ratio: int) -> int:
        """Return the number of entries that this call completes."""
        return self.stop // ratio - self.start // ratio


_SPANS: dict[tuple[int, int], tuple[TensorVersion, TensorVersion, tuple[Span, ...]]] = {}
_MOST_SPANS = 16


def spans_of(inputs: Inputs) -> tuple[Span, ...]:
    """Return the sequences of a call, each with one token at least.

    All components of a step share the two tensors that say so: they are read once.
    """
    positions, offsets = inputs["positions"], inputs["token_offsets"]
    # An id may be reused after a tensor dies: `still` checks that it is the same tensor.
    key = id(positions), id(offsets)
    found = _SPANS.get(key)
    if found is not None and found[0].still(positions) and found[1].still(offsets):
        return found[2]
    spans = _spans(positions, offsets)
    # Inference tensors count no versions, so a write into one would go unnoticed.
    if not (positions.is_inference() or offsets.is_inference()):
        if len(_SPANS) >= _MOST_SPANS:
            _SPANS.clear()
        _SPANS[key] = (
            TensorVersion.from_tensor(positions),
            TensorVersion.from_tensor(offsets),
            spans,
        )
    return spans


def rows_kept(rows: int, counts: list[int]) -> list[int]:
    """Return how many rows of a cache are each sequence's: a sliding window keeps so many at most.

    A run that began before it was recorded has fewer than any window explains.
    """
    window = bisect_left(range(max(counts)), rows, key=lambda w: sum(min(n, w) for n in counts))
    kept = [min(count, window) for count in counts]
    return kept if sum(kept) == rows else [rows // len(counts)] * len(counts)


def _spans(positions: Tensor, offsets: Tensor) -> tuple[Span, ...]:
    # A single sequence: only its first position has to be read.
    if offsets.shape[0] == 2:
        return (Span(0, positions.shape[0], int(positions[0])),)
    starts, bounds = positions[offsets[:-1]].tolist(), pairwise(offsets.tolist())
    return tuple(Span(a, b, start) for (a, b), start in zip(bounds, starts, strict=True))


def formats_by_block(
    config: Config, recipe: Recipe | None
) -> dict[Block | None, dict[str, Formats]]:
    """Return the recipe's formats, by block and by the weight's name within it."""
    found: dict[Block | None, dict[str, Formats]] = {None: {}}
    for parameter in parameters(config):
        where = found.setdefault(parameter.block, {})
        if recipe is not None:
            where[local_name(parameter.name, parameter.block)] = recipe.format_of(parameter)
    return found


def local_name(name: str, block: Block | None) -> str:
    """Return a parameter's name within its block."""
    return name.removeprefix(f"{block.prefix}.") if block else name


def single(weights: Weights) -> Weight:
    """Return the only weight of a component."""
    (weight,) = weights.values()
    return weight
