"""Runs of linears whose inputs have factors (pre_quant_scale) agree, and faults of them are named.

The engine is transformers' model whose linears get another forward pass, with torch alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import linear

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.recipes import Rule
from degarble.harness.report.verdict import Verdict
from degarble.references.traced.family import logical_name
from degarble.suites.engine.quantised_runs import Inputs, QuantisedRun, emulated, learned

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.localise.localise import Localised

pytestmark = pytest.mark.needs("transformers")

WAYS = {
    "W4A16": Inputs("INT4_G32", ""),
    "W4A8": Inputs("INT4_G32", "FP8_ROW", static=True),
    "SmoothQuant": Inputs("INT8_ROW", "INT8_ROW", static=True),
}
_O = "model.layers.1.self_attn.o_proj"


def _once(own: Tensor) -> list[Tensor]:
    return [own]


class FactoredRun(QuantisedRun):
    """A run whose linears have factors for the columns of their inputs."""

    def _calibrate(self) -> None:
        self.factors: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(2)
        fmt = BLOCK_FORMATS[self.way.weight]
        for path, module in self.linears():
            weight = module.weight.detach().float()
            own = torch.randn(weight.shape[1], generator=generator).exp().bfloat16().float()
            self.factors[path] = own
            name, scale = logical_name(f"{path}.weight"), torch.tensor(0.02)
            self.scales[path] = scale if self.way.activation else None
            made = Weight.of(quantise(weight / own, fmt, CANONICAL), self.scales[path])
            self.weights[name] = replace(made, channel_scale=own)
            rule = (name, self.way.weight, self.way.activation)
            self.rules.append(Rule(*rule) if self.way.activation else Rule(*rule[:2]))

    def run_with(
        self, engine: str, only: str = "", change: Callable[[Tensor], list[Tensor]] = _once
    ) -> Localised:
        """Judge a run of an engine; the linear `only` gets changed factors."""
        for path, module in self.linears():
            weight = self.weights[logical_name(f"{path}.weight")]
            own = change(self.factors[path]) if path == only else [self.factors[path]]
            whole = weight.without_factors().values(torch.float32)
            if engine == "folded":
                factors = torch.stack([torch.ones(()).expand(whole.shape[1]), *own]).prod(0)
                module.forward = MethodType(_multiplies((whole * factors).to(self.dtype)), module)
            else:
                module.forward = MethodType(self._forward(path, own, whole), module)
        return self.judged()

    def _forward(self, path: str, own: list[Tensor], whole: Tensor) -> Any:
        def forward(_module: Any, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
            x = input
            for each in own:
                x = (x.float() * each).to(input.dtype)
            if self.way.activation:
                x = emulated(x, self.way, self.scales[path])
            return linear(x.float(), whole).to(input.dtype)

        return forward


def _multiplies(weight: Tensor) -> Any:
    return lambda _module, input: linear(input, weight)  # noqa: A006  torch's own name


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=_SLOW)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("engine", ["applied", "folded"])
@pytest.mark.parametrize("name", ["W4A16", "W4A8", pytest.param("SmoothQuant", marks=_SLOW)])
def test_a_healthy_run_agrees(name: str, engine: str, dtype: torch.dtype) -> None:
    found = FactoredRun("llama", WAYS[name], dtype).run_with(engine)
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    if dtype is torch.bfloat16:
        used = learned(found).get("input_factors_applied", True)
        assert used is (engine == "applied")


_CHANGES: dict[str, tuple[Callable[[Tensor], list[Tensor]], str]] = {
    "lost": (lambda _own: [], "never multiplied"),
    "twice": (lambda own: [own, own], "multiplied twice"),
    "divided": (lambda own: [1 / own], "divided by its factors"),
}


_DEFAULT = {("W4A16", "lost", "applied"), ("W4A16", "twice", "folded")}
_CASES = [
    pytest.param(*case, marks=() if case in _DEFAULT else _SLOW)
    for case in product(WAYS, [*_CHANGES, "another linear's"], ["applied", "folded"])
]


@pytest.mark.parametrize(("name", "change", "engine"), _CASES)
def test_other_factors_are_placed_and_named(name: str, change: str, engine: str) -> None:
    run = FactoredRun("llama", WAYS[name])
    other = run.factors["model.layers.0.self_attn.o_proj"]
    made, words = _CHANGES.get(change, (lambda _own: [other], "layers.0.self_attn.o_proj"))
    (origin,) = run.run_with(engine, _O, made).origins
    assert origin.component == "layers.1.self_attn.o_proj"
    assert origin.record is not None
    told = diagnose(origin.context, [origin.record, *origin.more])
    assert told.named[0].id == "M18.input_factors", told.sentence
    assert words in told.sentence
