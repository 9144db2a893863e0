"""One call of a component, as whoever judges its outputs has it in hands.

Owns the record, and the way to it from a bound twin. `facts` are those that the twin's callable was
bound to: config, arithmetic, block, formats. Derivations that go through several stored values need
them; without, such roles are refused as undecided. Refuses nothing else.
Kept honest by suites/engine/budget/test_judging.py.
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
    """One component on the inputs that the candidate saw; `outputs` are the twin's."""

    role: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    weights: Mapping[str, Weight]
    activation: str | None = None
    facts: Facts | None = None
    ranks: int = 1  # over which the candidate sums behind linears that are cut along K
    fraction_bits: int | None = None  # that the candidate's tensor core keeps of FP8 products

    @classmethod
    def of(
        cls,
        twin: Bound,
        component: str,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor] | None = None,
    ) -> Call:
        """A call of a bound twin; without `outputs` it is made here."""
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
        """The input's numbers, decoded where codes arrived, as they are multiplied."""
        numerics = None if self.facts is None else self.facts.numerics
        return activation_values(self.inputs, self.activation, torch.float32, numerics)

    @property
    def operands(self) -> DecodedOperands:
        """What becomes of quantised operands behind their decoding."""
        return DecodedOperands.EXACT if self.facts is None else self.facts.numerics.operands

    @property
    def x_loose(self) -> Tensor | None:
        """How far the input's rounded numbers may be off [rows, K]; None where nothing rounds."""
        if self.operands is not DecodedOperands.BOTH or CODES not in self.inputs:
            return None
        decoded = activation_values(self.inputs, self.activation, torch.float32)
        return ambiguous_bf16(decoded.reshape(-1, decoded.shape[-1])).float()

    @property
    def known_facts(self) -> Facts:
        """The facts; a derivation that needs them is undecided without."""
        if self.facts is None:
            raise Undecided(
                "budget", self.role, "a call with the facts that its twin was bound to",
                "Make it with Call.of(twin, component, inputs).",
            )  # fmt: skip
        return self.facts
