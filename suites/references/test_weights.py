"""Random and quantised weights, and the input scales that an observed run yields."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import RECIPE_NAMES, recipe_named
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence
from degarble.references.numerics import Numerics
from degarble.references.weights import (
    NVFP4_LARGEST,
    InputAmax,
    quantised_weights,
    random_weights,
)

if TYPE_CHECKING:
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_random_weights_fill_every_parameter_and_depend_on_names_alone(config: Config) -> None:
    made, again, other = (random_weights(config, seed) for seed in (1, 1, 2))
    assert list(made) == [parameter.name for parameter in parameters(config)]
    for parameter in parameters(config):
        weight = made[parameter.name]
        assert weight.shape == parameter.shape
        value = weight.values(torch.float64)
        assert torch.isfinite(value).all()
        assert torch.equal(value, again[parameter.name].values(torch.float64))
    differing = [n for n in made if not torch.equal(
        made[n].values(torch.float64), other[n].values(torch.float64))]  # fmt: skip
    assert len(differing) == len(made)


def test_token_tables_name_each_expert_once() -> None:
    table = random_weights(V4, 1)["layers.0.ffn.gate.tid2eid"].values(torch.int64)
    assert ((table >= 0) & (table < V4.n_routed_experts)).all()
    assert (table.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("dialect", [CANONICAL, MODELOPT], ids=["canonical", "modelopt"])
def test_weights_take_the_formats_of_the_recipe(config: Config, name: str, dialect: object) -> None:
    plain = random_weights(config, 1)
    recipe = recipe_named(name, config)
    made = quantised_weights(plain, config, recipe, dialect)  # type: ignore[arg-type]
    for parameter in parameters(config):
        form, weight = recipe.format_of(parameter).weight, made[parameter.name]
        if form == "BF16":
            assert weight is plain[parameter.name]
            continue
        assert weight.storage is not None
        assert weight.storage.format == BLOCK_FORMATS[form]
        expected = dialect if form == "NVFP4" else CANONICAL
        assert weight.storage.dialect == expected
        wide, exact = weight.values(torch.float32), plain[parameter.name].values(torch.float32)
        floor = {"NVFP4": 0.12, "MXFP4": 0.15}.get(form, 0.035)
        assert (wide - exact).norm() / exact.norm() < floor


def test_gate_and_up_share_their_tensor_scale() -> None:
    plain = random_weights(V4, 1)
    scaled = plain["layers.1.ffn.experts.3.w3"]
    assert scaled.value is not None
    scaled.value *= 5
    made = quantised_weights(plain, V4, recipe_named("nvfp4-experts", V4))

    def scale(part: str) -> float:
        found = made[f"layers.1.ffn.experts.3.{part}"].tensor_scale
        assert found is not None
        return float(found)

    assert scale("w1") == scale("w3") == pytest.approx(float(scaled.value.abs().max()) / 2688)
    assert scale("w2") < scale("w1")


def observed(config: Config, weights: dict[str, Weight]) -> InputAmax:
    watch = InputAmax(config)
    bound = BoundModel(config, Numerics.bf16(), weights, None, watch)
    tokens = torch.arange(40)
    if config is V4:
        ModelV4(bound, V4).forward([Sequence()], [tokens])
    else:
        ModelV32(bound, V32).forward([Sequence()], [tokens])
    return watch


def test_observed_inputs_are_the_largest_of_each_linear() -> None:
    weights = random_weights(V4, 1)
    seen: dict[str, float] = {}
    watch = InputAmax(V4)

    def both(component: str, inputs: dict[str, torch.Tensor], outputs: object) -> None:
        watch(component, inputs, outputs)  # type: ignore[arg-type]
        if component == "layers.1.attn.wq_b":
            amax = float(inputs["x"].abs().max())
            seen[component] = max(amax, seen.get(component, 0.0))
        if component == "layers.1.ffn.experts.w2":
            for number in range(8):
                mine = inputs["x"][inputs["experts"] == number].float()
                if len(mine):
                    key = f"{component}.{number}"
                    seen[key] = max(float(mine.abs().max()), seen.get(key, 0.0))

    model = ModelV4(BoundModel(V4, Numerics.bf16(), weights, None, both), V4)  # type: ignore[arg-type]
    sequence = Sequence()
    for part in torch.arange(30).split([20, 1, 9]):
        model.forward([sequence], [part])
    assert float(watch.largest["layers.1.attn.wq_b"]) == seen["layers.1.attn.wq_b"]
    experts = {n: v for n, v in seen.items() if n.startswith("layers.1.ffn.experts.w2.")}
    assert experts
    for name, amax in experts.items():
        number = name.rpartition(".")[2]
        assert float(watch.largest[f"layers.1.ffn.experts.{number}.w2"]) == amax


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_input_scales_follow_from_observation(config: Config) -> None:
    weights = random_weights(config, 1)
    largest = observed(config, weights).largest
    recipe = recipe_named("nvfp4-full", config)
    unvisited = next(n for n in largest if ".experts." in n and n.endswith(".w2"))
    del largest[unvisited]
    made = quantised_weights(weights, config, recipe, CANONICAL, largest)
    for parameter in parameters(config):
        if parameter.block and parameter.block.is_drafter:
            continue
        scale, formats = made[parameter.name].input_scale, recipe.format_of(parameter)
        assert (scale is not None) == (formats.activation == "NVFP4"), parameter.name
        if scale is not None and parameter.name in largest:
            assert float(scale) == pytest.approx(float(largest[parameter.name]) / NVFP4_LARGEST)
    alike = [float(v) for n, v in largest.items() if ".experts." in n and n.endswith(".w2")]
    scale = made[unvisited].input_scale
    assert scale is not None
    assert float(scale) == pytest.approx(max(alike) / NVFP4_LARGEST)
    assert all(w.input_scale is None for w in quantised_weights(weights, config, recipe).values())
