"""Bound components, their facts and weights: names, fetching, observers, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, NotBuilt, UnknownName
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.model.components import components
from degarble.harness.model.config.config import Dspark, small_v4, small_v32
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.types import RECIPE_NAMES
from degarble.references.binding import BoundModel
from degarble.references.components.v4 import V4Facts
from degarble.references.components.v32 import V32Facts
from degarble.references.facts import Span, spans_of
from degarble.references.model import ModelV4, ModelV32, RowBuffer, Sequence, TokenBatch
from degarble.references.numerics import SOURCES, Numerics
from degarble.references.weights import NVFP4_LARGEST, InputAmax, quantised_weights, random_weights

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# Bound components: names of the component list, weights fetched when read, observers, refusals.

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)
# Inputs that carry what earlier calls left, and where sequences begin: the @state of the wiring.
MEMORY = {"state_window", "state_compressed", "state_keys", "state_rows", "state_expanded"}


def forward(config: DeepSeekConfig, bound: BoundModel, *, absorbed: bool = True) -> None:
    """A prompt and two tokens behind it, through model and drafter."""
    sequence, ids = Sequence(), torch.arange(140)
    for part in ids.split([137, 1, 2]):
        step_tokens = [part]
        if config is V4:
            v4 = ModelV4(bound, V4)
            step = TokenBatch.from_sequences([sequence.length], step_tokens)
            streams = v4.streams(step, [sequence])
            v4.logits(streams)
            v4.draft([sequence], streams, step_tokens)
        else:
            v32 = ModelV32(bound, V32, absorbed=absorbed)
            step = TokenBatch.from_sequences([sequence.length], step_tokens)
            hidden = v32.hidden(step, [sequence])
            bound("head", x=hidden)
            v32.draft([sequence], hidden, step_tokens)
        sequence.length += len(part)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_components_are_those_of_the_anatomy(config: DeepSeekConfig, name: str) -> None:
    recipe = recipe_named(name, config)
    weights = quantised_weights(random_weights(config, 1), config, recipe)
    seen: dict[str, tuple[set[str], set[str]]] = {}

    def watch(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        known = seen.setdefault(component, (set(), set()))
        known[0].update(inputs)
        known[1].update(outputs)

    bound = BoundModel(config, Numerics.twin(), weights, recipe, watch)
    found = {component.name: component for component in components(config, recipe)}
    assert set(bound.calls) == set(found)
    forward(config, bound)
    if config is V32:
        forward(config, bound, absorbed=False)
    assert set(seen) == set(found)  # every component is run by the model
    for component_name, (inputs, outputs) in seen.items():
        component = found[component_name]
        named = {i.name for i in component.inputs if i.name not in MEMORY}
        assert named <= inputs, component_name
        assert inputs <= {i.name for i in component.inputs}, component_name
        assert outputs == set(component.outputs), component_name


def test_inputs_are_what_the_anatomy_says_produced_them() -> None:
    """Edges: each input that a component outputs elsewhere is that very tensor."""
    made: dict[str, Tensor] = {}
    took: dict[str, Tensor] = {}

    def watch(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        took.update({f"{component}.in.{name}": tensor for name, tensor in inputs.items()})
        for name, tensor in outputs.items():
            made[f"{component}.out" if name == "out" else f"{component}.out.{name}"] = tensor

    bound = BoundModel(V4, Numerics.definition(), random_weights(V4, 1), None, watch)
    ModelV4(bound, V4).forward([Sequence()], [torch.arange(140)])
    checked = 0
    for component in components(V4):
        for each in component.inputs:
            key = f"{component.name}.in.{each.name}"
            if each.sources and not each.via and key in took:
                assert torch.equal(took[key], made[str(each.sources[0])]), key
                checked += 1
    assert checked > 100


def test_weights_are_read_when_a_component_needs_them() -> None:
    plain, read = random_weights(V4, 1), []

    class Watched(Mapping[str, "Weight"]):
        def __getitem__(self, key: str) -> Weight:
            read.append(key)
            return plain[key]

        def __iter__(self) -> Iterator[str]:
            return iter(plain)

        def __len__(self) -> int:
            return len(plain)

    bound = BoundModel(V4, Numerics.definition(), Watched())
    assert not read
    bound("layers.1.attn.norm", x=torch.zeros(2, 256))
    assert read == ["layers.1.attn_norm"]
    read.clear()
    experts = torch.tensor([[3, 5]])
    bound("layers.1.ffn.experts.w2", x=torch.zeros(1, 2, 256), experts=experts)
    assert set(read) == {"layers.1.ffn.experts.3.w2", "layers.1.ffn.experts.5.w2"}


def test_a_replaced_component_is_the_one_that_runs() -> None:
    bound = BoundModel(V4, Numerics.definition(), random_weights(V4, 1))
    model = ModelV4(bound, V4)
    tokens = [torch.arange(9)]
    before = model.forward([Sequence()], tokens)
    plain = bound.calls["layers.1.attn.wq_b"]

    def doubled(inputs: Mapping[str, Tensor], weights: Mapping[str, object]) -> dict[str, Tensor]:
        return {"out": plain(inputs, weights)["out"] + 1}

    bound.calls["layers.1.attn.wq_b"] = doubled
    assert (model.forward([Sequence()], tokens) - before).abs().max() > 1e-3
    weights = random_weights(V4, 1)
    del weights["layers.2.attn_norm"]
    bound.weights = weights
    with pytest.raises(KeyError, match=r"layers\.2\.attn_norm"):
        model.forward([Sequence()], tokens)


def test_the_definition_ignores_recipes() -> None:
    recipe = recipe_named("nvfp4-full", V4)
    bound = BoundModel(V4, Numerics.definition(), random_weights(V4, 1), recipe)
    assert not any(name.endswith(".wq_a.act_quant") for name in bound.calls)


def test_the_official_code_leaves_the_input_of_wo_a_alone() -> None:
    recipe = recipe_named("official", V4)
    weights = quantised_weights(random_weights(V4, 1), V4, recipe)
    name = "layers.1.attn.wo_a"
    official, engines = (
        BoundModel(V4, Numerics.twin(SOURCES[source]), weights, recipe)
        for source in ("official-v4", "vllm")
    )
    assert not official.quantises(name)
    assert engines.quantises(name)
    x = torch.randn(3, 4 * 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = official(name, x=x)["out"]
    codes = engines(f"{name}.act_quant", x=x)
    rounded = engines(name, **codes)["out"]
    assert not torch.equal(plain, rounded)
    assert (plain.float() - rounded.float()).norm() < 0.05 * plain.float().norm()


def test_unknown_components_are_refused_with_the_nearest_name() -> None:
    bound = BoundModel(V4, Numerics.definition(), random_weights(V4, 1))
    with pytest.raises(UnknownName, match=r"layers\.1\.attn\.wq_b"):
        bound("layers.1.attn.wqb")
    with pytest.raises(UnknownName):
        bound.weights_of("layers.0.attn.indexer.q")


def test_the_block_parallel_drafter_is_refused_by_name() -> None:
    dspark = Dspark(target_layer_ids=(0, 1, 2), markov_rank=4, block_size=5, noise_token_id=7)
    config = replace(V4, dspark=dspark, compress_ratios=(0, 4, 128))
    bound = BoundModel(config, Numerics.definition(), random_weights(config, 1))
    model = ModelV4(bound, config)
    step = TokenBatch.from_sequences([0], [torch.arange(5)])
    streams = model.streams(step, [Sequence()])
    assert torch.isfinite(model.logits(streams)).all()
    with pytest.raises(NotBuilt, match="DSpark"):
        model.draft([Sequence()], streams, [torch.arange(5)])


def test_calls_without_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="one id at least"):
        TokenBatch.from_sequences([0, 3], [torch.arange(2), torch.arange(0)])
    with pytest.raises(InvalidArgument, match="one for each of 2 sequences"):
        TokenBatch.from_sequences([0, 3], [torch.arange(2)])
    with pytest.raises(InvalidArgument, match="token lists"):
        TokenBatch.from_sequences([], [])


def test_rows_keep_what_they_were_given() -> None:
    rows, bounded = RowBuffer(), RowBuffer(keep=5)
    plain = torch.arange(300.0).reshape(100, 3)
    for part in plain.split([1, 1, 40, 3, 55]):
        rows.append(part)
        bounded.append(part)
    assert torch.equal(rows.all(), plain)
    assert torch.equal(bounded.all(), plain[-5:])
    assert torch.equal(rows.last(7), plain[-7:])
    fork = rows.copy()
    fork.append(plain[:1])
    assert len(rows.all()) == 100
    assert len(fork.all()) == 101


@pytest.mark.parametrize(("config", "other"), [(V4, "sigmoid"), (V32, "softmax")])
def test_an_unknown_scoring_function_is_refused(config: DeepSeekConfig, other: str) -> None:
    with pytest.raises(NotBuilt, match=f"scoring_func = '?{other}") as refused:
        BoundModel(replace(config, scoring_func=other), Numerics.definition(), {})
    assert config.scoring_func in str(refused.value)


# --------------------------------------------------------------------------------------------------
# Which tokens belong to which sequence: read once a step, and anew when the tensors change.


def test_epsilons_that_sources_do_not_take_from_the_config() -> None:
    config, v4 = small_v32(rms_norm_eps=1e-3), small_v4(rms_norm_eps=1e-3)
    names = ("attn.norm", "attn.q_norm", "attn.kv_norm", "attn.indexer.k_norm", "norm")
    found = {}
    for source in (None, "vllm", "transformers"):
        numerics = Numerics.definition(switches=SOURCES[source] if source else None)
        facts = V32Facts(config, numerics, config.layers[1], {})
        found[source] = [facts.norm_epsilon(name) for name in names]
        assert V4Facts(v4, numerics, v4.layers[1], {}).norm_epsilon("attn.q_norm") == 1e-3
    assert found[None] == found["vllm"] == [1e-3, 1e-3, 1e-3, 1e-6, 1e-3]
    assert found["transformers"] == [1e-3, 1e-6, 1e-6, 1e-6, 1e-3]


def test_spans_are_read_once_until_they_are_overwritten() -> None:
    given = {"positions": torch.tensor([4, 5, 0]), "token_offsets": torch.tensor([0, 2, 3])}
    spans = spans_of(given)
    assert spans == (Span(0, 2, 4), Span(2, 3, 0))
    assert spans_of(dict(given)) is spans
    given["positions"][2] = 9
    assert spans_of(given) == (Span(0, 2, 4), Span(2, 3, 9))
    given["token_offsets"][1] = 1
    given["positions"][1] = 3
    assert spans_of(given) == (Span(0, 1, 4), Span(1, 3, 3))
    alone = {"positions": torch.tensor([7]), "token_offsets": torch.tensor([0, 1])}
    assert spans_of(alone) == (Span(0, 1, 7),)


def test_tensors_without_a_version_are_always_read() -> None:
    with torch.inference_mode():
        given = {"positions": torch.tensor([4]), "token_offsets": torch.tensor([0, 1])}
        assert spans_of(given) == (Span(0, 1, 4),)
        given["positions"][0] = 6
        assert spans_of(given) == (Span(0, 1, 6),)


# --------------------------------------------------------------------------------------------------
# Random and quantised weights, and the input scales that an observed run yields.


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_random_weights_fill_every_parameter_and_depend_on_names_alone(
    config: DeepSeekConfig,
) -> None:
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
def test_weights_take_the_formats_of_the_recipe(
    config: DeepSeekConfig, name: str, dialect: object
) -> None:
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


def observed(config: DeepSeekConfig, weights: dict[str, Weight]) -> InputAmax:
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
def test_input_scales_follow_from_observation(config: DeepSeekConfig) -> None:
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
