"""The record of one component call as judges receive it, and its construction from a bound twin.

`facts` are those that the twin's callable was bound to: config, arithmetic, block, formats. Roles
whose budget chains through several stored values need them and are UNDECIDED without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import Undecided
from degarble.harness.engine.budget.rules import ambiguous_bf16
from degarble.references.linears import CODES, activation_values
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.references.binding import Bound
    from degarble.references.facts import Facts


@dataclass(frozen=True, eq=False)
class Call:
    """One component call on the candidate's inputs; `outputs` are the twin's."""

    role: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    weights: Mapping[str, Weight]
    activation: str | None = None
    facts: Facts | None = None
    ranks: int = 1  # over which the candidate sums the outputs of linears split along K
    fraction_bits: int | None = None  # that the candidate's tensor core keeps of FP8 products

    @classmethod
    def of(
        cls,
        twin: Bound,
        component: str,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor] | None = None,
    ) -> Call:
        """Build the call of a bound twin; run the twin where `outputs` are not given."""
        what, facts = twin.bound_to(component)
        weights = twin.weights_of(component)
        if outputs is None:
            outputs = twin.calls[component](inputs, weights)
        name = next(iter(weights), None)
        form = facts.activation(name) if "codes" in inputs and name is not None else None
        bits = twin.fraction_bits.get(component)
        return cls(what.role, inputs, outputs, weights, form, facts, twin.ranks, bits)

    @property
    def x(self) -> Tensor:
        """Return the input's numbers as they are multiplied, decoded where codes arrived."""
        numerics = None if self.facts is None else self.facts.numerics
        return activation_values(self.inputs, self.activation, torch.float32, numerics)

    @property
    def operands(self) -> DecodedOperands:
        """Return how quantised operands are rounded after decoding."""
        return DecodedOperands.EXACT if self.facts is None else self.facts.numerics.operands

    @property
    def x_loose(self) -> Tensor | None:
        """Return how far the input's rounded numbers may be off [rows, K]; None if exact."""
        if self.operands is not DecodedOperands.BOTH or CODES not in self.inputs:
            return None
        decoded = activation_values(self.inputs, self.activation, torch.float32)
        return ambiguous_bf16(decoded.reshape(-1, decoded.shape[-1])).float()

    @property
    def known_facts(self) -> Facts:
        """Return the facts; raise Undecided where they are missing."""
        if self.facts is None:
            raise Undecided(
                "budget", self.role, "a call with the facts that its twin was bound to",
                "Make it with Call.of(twin, component, inputs).",
            )  # fmt: skip
        return self.facts
