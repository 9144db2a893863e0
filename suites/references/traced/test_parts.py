"""A twin and its budgets read large matrices part by part, never as a whole."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.capture.traced import recording
from degarble.harness.engine.localise.localise import Localised, localise
from degarble.harness.formats import weight as weight_module
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.recipes import recipe_named
from degarble.references import linears
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel, logical_name
from degarble.suites.references.traced.traced_models import built, config_of, weights_of

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.traced.family import TracedConfig

pytestmark = pytest.mark.needs("transformers")
_SMALL = 1000  # elements of what may be read whole: norms, and the logits of a router
_TOKENS = 23


class _InParts(Weight):
    """A weight that fails where all of its values are decoded at once."""

    @classmethod
    def of_weight(cls, weight: Weight) -> _InParts:
        """Take over the fields of a weight."""
        return cls(
            weight.value, weight.codes, weight.block_scale, weight.tensor_scale, None,
            weight.storage,
        )  # fmt: skip

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of a small weight."""
        assert prod(self.shape) <= _SMALL, f"{self.shape} was decoded as a whole"
        return super().values(dtype)


def _quantised(name: str, weight: Weight) -> Weight:
    value = weight.value
    assert value is not None, "made from a model's own tensors"
    if value.ndim != 2 or "embed" in name or prod(value.shape) <= _SMALL:
        return weight
    return Weight.of(quantise(value.float(), NVFP4))


def _checked(model: Any, config: TracedConfig, weights: dict[str, Weight]) -> Localised:
    run, ids = MemoryRun({}), torch.arange(_TOKENS)[None]
    with torch.inference_mode(), recording(model, config, Recorder(run)):
        model(input_ids=ids)
    exact = torch.float64
    numerics = replace(Numerics.bf16(), work=exact, products=exact, store=torch.bfloat16)
    known: Any = config
    return localise(TracedModel(known, numerics, weights), recipe_named("bf16", known), run)


@pytest.mark.parametrize("quantised", [False, True], ids=["stored", "nvfp4"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_no_large_matrix_is_decoded_as_a_whole(
    name: str, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "_CHUNK", 1)
    monkeypatch.setattr(weight_module, "_SMALL", 0)  # as if no matrix were small
    model: Any = built(name, torch.bfloat16)
    weights = weights_of(model)
    if quantised:
        weights = {name: _quantised(name, weight) for name, weight in weights.items()}
        for path, parameter in model.named_parameters():
            parameter.data = weights[logical_name(path)].values(torch.float32).to(torch.bfloat16)
    in_parts: dict[str, Weight] = {
        name: _InParts.of_weight(weight) for name, weight in weights.items()
    }
    assert _checked(model, config_of(name, torch.bfloat16), in_parts).verdict == "AGREES"


def test_a_healthy_check_multiplies_each_matrix_twice() -> None:
    """Once for the twin, once for the partial sums of its budget; conventions cost no product."""
    model = built("llama", torch.bfloat16)
    config = config_of("llama", torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        assert _checked(model, config, weights_of(model)).verdict == "AGREES"
    matrices = sum(
        prod(each.shape)
        for path, each in model.named_parameters()
        if each.ndim == 2 and "embed" not in path
    )
    # One time more for the run itself; a tenth more is attention's.
    assert counter.get_total_flops() <= 2 * _TOKENS * matrices * 3.2
