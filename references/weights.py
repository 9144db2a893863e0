"""Weights for models without a checkpoint: random ones, and quantised ones made from others.

`random_weights` and `quantised_weights` return mappings from logical parameter names to Weight
records; the observer InputAmax finds the input scales. Random values depend on seed and parameter
name alone, so a rank may make only what it holds. Gate and up of one expert share their tensor
scale and input scale, as in ModelOpt's exports.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import components
from degarble.harness.model.parameters import parameter_named, parameters, routed_experts
from degarble.harness.model.types import Dtype, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Formats, Recipe

NVFP4_LARGEST = 6.0 * 448.0  # a decode scale is amax over this: E2M1's largest times E4M3's


def random_weights(
    config: Config, seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Weight]:
    """Return random weights of every parameter, scaled so that activations keep their size.

    Values are rounded to what a checkpoint stores (BF16 or F32), then held as `dtype`, or as F32
    and int64 where the checkpoint has these.
    """
    return {p.name: Weight(value=_random(p, config, seed, dtype)) for p in parameters(config)}


def _random(parameter: Parameter, config: Config, seed: int, dtype: torch.dtype) -> Tensor:
    """Return one parameter's values, from a generator that its name seeds."""
    # 56 bits of the hash, a seed without a sign bit.
    digest = hashlib.sha256(f"{seed} {parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    shape, row = parameter.shape, parameter.row
    if row.dtype is Dtype.I64:
        # The table of hash layers: distinct experts for each token id.
        scores = torch.rand(shape[0], routed_experts(config), generator=generator)
        return scores.argsort(-1)[:, : shape[1]].contiguous()
    noise = torch.randn(shape, generator=generator)
    if parameter.kind is Kind.NORM or row.name.endswith("scale"):
        value = 1.0 + 0.1 * noise
    elif parameter.kind is Kind.PLAIN and len(shape) == 1:
        value = 0.1 * noise
    elif row.name.endswith(".ape"):
        value = 0.5 * noise
    elif parameter.kind is Kind.EMBEDDING:
        value = noise
    else:
        # 1 / sqrt(K): an output is about as large as its inputs.
        value = noise * shape[-1] ** -0.5
    if row.dtype is Dtype.BF16:
        return value.to(torch.bfloat16).to(dtype)
    return value


def quantised_weights(
    weights: Mapping[str, Weight],
    config: Config,
    recipe: Recipe,
    dialect: Dialect = CANONICAL,
    input_amax: Mapping[str, Tensor] | None = None,
) -> dict[str, Weight]:
    """Quantise plain weights by recipe; formats that `dialect` does not write are canonical.

    With `input_amax`, linears with NVFP4 activations get an input scale; an expert that no
    token visited takes the largest of the same projection over all layers, as ModelOpt does.
    """
    made = {}
    for parameter in parameters(config):
        formats, weight = recipe.format_of(parameter), weights[parameter.name]
        if formats.weight not in BLOCK_FORMATS:
            made[parameter.name] = weight
            continue
        form = BLOCK_FORMATS[formats.weight]
        partner = _partner(parameter, weights)
        amax = None
        if form.tensor_scale:
            # Gate and up share one tensor scale, as in ModelOpt exports.
            sources = [weight, *([partner] if partner else [])]
            amax = torch.stack([w.values(torch.float32).abs().amax() for w in sources]).amax()
        writer = dialect if _writes(dialect, form) else CANONICAL
        tensor = quantise(weight.values(torch.float32), form, writer, amax=amax)
        scale = _input_scale(parameter, formats, input_amax)
        made[parameter.name] = Weight.of(tensor, scale)
    return made


def _writes(dialect: Dialect, form: BlockFormat) -> bool:
    return any(rule.format == form for rule in dialect.rules)


def _partner(parameter: Parameter, weights: Mapping[str, Weight]) -> Weight | None:
    """Return the up projection of a gate projection, and the reverse."""
    stem, _, part = parameter.name.rpartition(".")
    other = {"w1": "w3", "w3": "w1"}.get(part)
    return weights.get(f"{stem}.{other}") if other else None


def _input_scale(
    parameter: Parameter, formats: Formats, input_amax: Mapping[str, Tensor] | None
) -> Tensor | None:
    """Return amax / (6 * 448) of a linear's activations, where they become NVFP4."""
    if input_amax is None or formats.activation != "NVFP4":
        return None
    amax = input_amax.get(parameter.name)
    if amax is None:
        tail = f".{parameter.row.name.rpartition('.')[2]}"
        alike = [v for n, v in input_amax.items() if ".experts." in n and n.endswith(tail)]
        if parameter.expert is None or not alike:
            return None
        amax = torch.stack(alike).amax()
    return amax.to(torch.float32) / NVFP4_LARGEST


class InputAmax:
    """An observer that keeps the largest input magnitude of every linear, expert by expert."""

    def __init__(self, config: Config) -> None:
        self.largest: dict[str, Tensor] = {}
        self._linears = {
            component.name: tuple(
                name
                for name in component.weights
                if parameter_named(config, name).kind is Kind.LINEAR
            )
            for component in components(config)
        }

    def __call__(
        self, component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        """Record the input of a component that reads linears."""
        del outputs
        names = self._linears.get(component, ())
        if not names or "x" not in inputs:
            return
        x = inputs["x"].float().abs()
        if "experts" not in inputs:
            for name in names:
                self._see(name, x.amax())
            return
        experts = inputs["experts"]
        if x.ndim == 2:
            x = x.unsqueeze(1).expand(-1, experts.shape[1], -1)
        of_slot = x.amax(-1)
        for number in experts.unique().tolist():
            amax = of_slot[experts == number].amax()
            for name in names:
                if f".experts.{number}." in name:
                    self._see(name, amax)

    def _see(self, name: str, amax: Tensor) -> None:
        known = self.largest.get(name)
        self.largest[name] = amax if known is None else torch.maximum(known, amax)
