"""Runs that quantise their inputs agree, and so do runs that do not; faults of inputs are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.localise.localise import localise
from degarble.harness.formats.weight import DerivedWeight, Weight
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import BlockScaleUse
from degarble.references.traced.spans import tensor_names
from degarble.suites.engine.quantised_runs import (
    DECODED,
    DEEPGEMM,
    EXACT,
    FUSED,
    INPUTS,
    PLAIN,
    SHORT,
    STAGED,
    STEPWISE,
    QuantisedRun,
    learned,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.localise.localise import Localised
    from degarble.suites.engine.quantised_runs import Emulation

pytestmark = pytest.mark.needs("transformers")

_ENGINES = {"exact": EXACT, "decoded": DECODED, "plain": PLAIN, "stepwise": STEPWISE}
_EXPERTS = "layers.1.mlp.experts"
_BANKS = {f"layers.{layer}.mlp.experts" for layer in range(2)}
_WIDE = {"hidden_size": 128, "intermediate_size": 256}
# compressed-tensors rounds the scales of both by rules of their own.
_WITHOUT_STEPS = frozenset({"NVFP4", "MXFP8"})


def _run(
    name: str, model: str = "llama", dtype: torch.dtype = torch.bfloat16, **more: Any
) -> QuantisedRun:
    more |= _WIDE if name == "FP8 block" else {}
    return QuantisedRun(model, INPUTS[name], dtype, **more)


# By default each kind of input in exact arithmetic, and each other arithmetic with some of them.
_QUICK = {
    ("FP8 tensor", "decoded"), ("NVFP4", "decoded"), ("INT8 token", "plain"), ("MXFP8", "plain"),
    ("INT8 tensor", "stepwise"),
}  # fmt: skip
_HEALTHY = [
    pytest.param(
        *(name, engine, dtype),
        id=f"{name}-{engine}-{'bf16' if dtype is torch.bfloat16 else 'fp32'}",
        marks=()
        if dtype is torch.bfloat16 and (engine == "exact" or (name, engine) in _QUICK)
        else pytest.mark.slow,
    )
    for name in INPUTS
    for engine in _ENGINES
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize(("name", "engine", "dtype"), _HEALTHY)
def test_a_healthy_run_agrees(name: str, engine: str, dtype: torch.dtype) -> None:
    if engine == "stepwise" and name in _WITHOUT_STEPS:
        return
    run = _run(name, dtype=dtype)
    run.emulate(_ENGINES[engine])
    found = run.judged()
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    used = learned(found)
    assert (used.get("quantised_inputs") == "none") == (engine == "plain")
    if dtype is torch.bfloat16:
        operands = {"decoded": "bf16", "plain": "weights_bf16", "stepwise": "bf16"}.get(engine)
        # Powers of two change no rounding, so nobody can tell.
        assert name == "MXFP8" or used.get("decoded_operands") == operands


@pytest.mark.parametrize(
    ("name", "engine", "operands"),
    [
        ("NVFP4", "plain", "weights_bf16"),
        pytest.param("NVFP4", "decoded", "bf16", marks=pytest.mark.slow),
        pytest.param("FP8 token", "decoded", "bf16", marks=pytest.mark.slow),
        pytest.param("INT8 tensor", "exact", None, marks=pytest.mark.slow),
    ],
)
def test_a_model_in_float16_multiplies_what_is_decoded_to_it(
    name: str, engine: str, operands: str | None
) -> None:
    run = _run(name, dtype=torch.float16)
    run.emulate(_ENGINES[engine])
    found = run.judged()
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert learned(found).get("decoded_operands") == operands


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param("FP8 token", "decoded", marks=pytest.mark.slow),
        pytest.param("FP8 tensor", "exact", marks=pytest.mark.slow),
        pytest.param("FP8 tensor", "decoded", marks=pytest.mark.slow),
        pytest.param("INT8 token", "decoded", marks=pytest.mark.slow),
        pytest.param("MXFP8", "exact", marks=pytest.mark.slow),
        ("NVFP4", "decoded"),
        pytest.param("NVFP4", "exact", marks=pytest.mark.slow),
        pytest.param("NVFP4", "plain", marks=pytest.mark.slow),
    ],
)
def test_a_healthy_run_of_quantised_experts_agrees(name: str, engine: str) -> None:
    run = _run(name, "qwen3_moe", num_experts=4, num_experts_per_tok=2)
    run.emulate(_ENGINES[engine])
    found = run.judged()
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("FP8 token", 2), ("FP8 token", 4), ("FP8 token", 8), ("INT8 token", 2), ("INT8 token", 8),
    ],
)  # fmt: skip
def test_ranks_that_share_the_width_of_experts_are_learned(name: str, ranks: int) -> None:
    """Each quantises its own part of a token: with one scale for all of it, experts are blamed."""
    run = _run(name, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    run.emulate(EXACT._replace(ranks=ranks))
    recorded = run.run()
    recorded.facts |= {"ranks": ranks}
    found = run.judged(recorded)
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert learned(found)["expert_width_parts"] == ranks
    recorded.facts |= {"conventions": {"expert_width_parts": 1}}  # a declared value stays
    assert {each.component for each in run.judged(recorded).origins} == _BANKS


@pytest.mark.parametrize("engine", [FUSED, pytest.param(SHORT, marks=pytest.mark.slow)])
def test_an_engine_stores_what_it_likes_in_its_experts(engine: Emulation) -> None:
    run = _run("FP8 token", "qwen3_moe")
    twin = run.twin()
    twin = twin.coarsened(tensor_names(twin.config.graph))  # every tensor, by an engine's hooks

    def experts_alone() -> Localised:
        run.emulate(engine)
        recorded = run.run()
        recorded.calls[:] = [each for each in recorded.calls if each.component == _EXPERTS]
        return localise(twin, run.recipe, recorded)

    (row,) = experts_alone().rows
    assert row.verdict is Verdict.AGREES
    name = f"{_EXPERTS}.down_proj"
    run.weights = {
        **run.weights,
        name: Weight(value=run.weights[name].values(torch.float32).flip(0)),
    }
    (row,) = experts_alone().rows
    assert row.verdict is Verdict.DIFFERS


_SUMS = (("FP8 token", SHORT), ("FP8 tensor", STAGED), ("FP8 block", STAGED))


@pytest.mark.parametrize(
    ("name", "engine", "sums"),
    [
        pytest.param(*_SUMS[0], "hopper", marks=pytest.mark.slow),
        pytest.param(*_SUMS[1], "hopper-in-stages", marks=pytest.mark.slow),
        pytest.param(*_SUMS[2], "hopper", marks=pytest.mark.slow),
    ],
)
def test_short_sums_of_a_tensor_core_are_learned(name: str, engine: Emulation, sums: str) -> None:
    run = QuantisedRun("llama", INPUTS[name], hidden_size=256, intermediate_size=512)
    run.emulate(engine)
    found = run.judged()
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert learned(found)["code_sums"] == sums


@pytest.mark.parametrize(
    ("name", "engine"),
    [_SUMS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in _SUMS[1:])],
)
def test_exact_sums_of_a_single_linear_are_no_finding(name: str, engine: Emulation) -> None:
    """An engine may have a more exact kernel for one shape; what is wrong there is found."""
    run = QuantisedRun("llama", INPUTS[name], hidden_size=256, intermediate_size=512)
    run.emulate(EXACT)
    module = dict(run.linears())[_O]
    exact = module.forward
    run.emulate(engine)
    module.forward = exact
    recorded = run.run()
    found = run.judged(recorded)
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert any("1 of its components, such as layers.1.self_attn.o_proj" in n for n in found.notes)
    assert "code_sums" in learned(found)
    module.forward = lambda x: exact(x) * 1.01
    origins = run.judged(run.run()).origins
    assert [origin.component for origin in origins] == ["layers.1.self_attn.o_proj"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), _SUMS)
def test_short_sums_of_a_single_linear_are_no_convention(name: str, engine: Emulation) -> None:
    """Its partners say that this engine does not sum so."""
    run = QuantisedRun("llama", INPUTS[name], hidden_size=256, intermediate_size=512)
    run.emulate(engine, lambda path: path == _O)
    assert "code_sums" not in learned(run.judged())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_scales_rounded_up_for_deepgemm_are_learned(model: str) -> None:
    run = _run("FP8 block", model)
    run.emulate(DEEPGEMM)
    found = run.judged()
    assert found.verdict is Verdict.AGREES, [each.sentence for each in found.origins]
    assert learned(found)["block_scales"] == "both"
    assert model == "llama" or learned(found)["expert_block_scales"] == "inputs"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_scales_rounded_up_in_a_single_linear_are_a_finding(model: str) -> None:
    run = _run("FP8 block", model)
    run.emulate(DEEPGEMM, lambda path: path == _O)
    found = run.judged()
    assert "block_scales" not in learned(found)
    assert {origin.component for origin in found.origins} == {"layers.1.self_attn.o_proj"}


def test_weights_quantised_again_are_kept_for_one_component() -> None:
    twin = _run("FP8 block", "llama").twin(block_scales=BlockScaleUse.BOTH)
    read = [each for name, each in twin._fetched.items() if name.endswith("_proj")]
    for weights in read:
        (name,) = (each for each in weights if each.endswith("weight"))
        assert weights[name] is weights[name]
    assert sum(bool(each._made) for each in read) == 1


def test_stacks_that_are_no_blocks_stay_as_they_are_for_deepgemm() -> None:
    run = QuantisedRun("qwen3_moe", INPUTS["FP8 token"], hidden_size=256, moe_intermediate_size=128)
    stacks = {name: each for name, each in run.weights.items() if "experts" in name}
    for name, each in stacks.items():
        run.weights[name] = DerivedWeight(
            make=each.values, extents=each.shape, make_rows=each.rows, make_elements=each.elements,
            from_codes=True,
        )  # fmt: skip
    twin = run.twin(expert_block_scales=BlockScaleUse.BOTH)
    read = twin._fetched["layers.1.mlp.experts"]
    assert len(read) == len(stacks) // 2
    assert all(read[name] is run.weights[f"layers.1.{name}"] for name in read)


# --------------------------------------------------------------------------------------------------
# Faults

_O = "model.layers.1.self_attn.o_proj"
_OTHER = "model.layers.1.mlp.down_proj"
_SCALES: dict[str, Callable[[Any, Any], Any]] = {
    "lost": lambda _run, _own: torch.ones(()),
    "reciprocal": lambda _run, own: 1 / own,
    "another linear's": lambda run, _own: run.scales[_OTHER],
    "a token's own": lambda _run, _own: None,
}
_FAULTS = [
    ("FP8 tensor", "exact", "lost"),
    ("FP8 tensor", "decoded", "reciprocal"),
    ("FP8 tensor", "decoded", "a token's own"),
    ("INT8 tensor", "exact", "a token's own"),
    ("INT8 tensor", "decoded", "another linear's"),
    ("NVFP4", "exact", "another linear's"),
    ("NVFP4", "decoded", "lost"),
    ("FP8 token", "decoded", "lost"),
]


def _judged_with(run: QuantisedRun, engine: Emulation, path: str, scale: Any) -> Any:
    """Run with another scale in one place than the checkpoint has."""
    own = run.scales[path]
    run.scales[path] = scale
    run.emulate(engine)
    run.scales[path] = own
    return run.judged()


@pytest.mark.parametrize(
    ("name", "engine", "fault"),
    [
        pytest.param(*case, marks=() if number in {0, 3, 6} else pytest.mark.slow)
        for number, case in enumerate(_FAULTS)
    ],
)
def test_another_scale_is_placed_and_named(name: str, engine: str, fault: str) -> None:
    run = _run(name)
    scale = _SCALES[fault](run, run.scales[_O])
    (origin,) = _judged_with(run, _ENGINES[engine], _O, scale).origins
    assert origin.component == "layers.1.self_attn.o_proj"
    told = diagnose(origin.context, [origin.record, *origin.more])
    assert told.named[0].id == "M18.input_scale", told.sentence


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("FP8 token", "decoded"),
        ("NVFP4", "exact"),
        pytest.param("FP8 token", "exact", marks=pytest.mark.slow),
        pytest.param("NVFP4", "decoded", marks=pytest.mark.slow),
        pytest.param("MXFP8", "exact", marks=pytest.mark.slow),
        pytest.param("MXFP8", "decoded", marks=pytest.mark.slow),
    ],
)
def test_a_single_plain_input_is_a_finding_and_no_convention(name: str, engine: str) -> None:
    run = _run(name)
    run.emulate(_ENGINES[engine], lambda path: path != _O)
    found = run.judged()
    assert "quantised_inputs" not in learned(found)
    (origin,) = found.origins
    assert (origin.component, origin.kind) == ("layers.1.self_attn.o_proj", "fallback")
    assert origin.record is not None
    told = diagnose(origin.context, [origin.record, *origin.more])
    assert told.named[0].id == "M18.plain_input", told.sentence


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["exact", "decoded"])
@pytest.mark.parametrize(
    "change", [torch.ones_like, lambda s: s.roll(-1, 0)], ids=["lost", "next expert's"]
)
def test_other_scales_of_experts_are_placed_and_named(
    engine: str, change: Callable[[Tensor], Tensor]
) -> None:
    run = QuantisedRun("qwen3_moe", INPUTS["FP8 tensor"], num_hidden_layers=4)
    path = "model.layers.2.mlp.experts.down_proj"
    own = run.scales[path]
    assert own is not None
    found = _judged_with(run, _ENGINES[engine], path, change(own))
    (origin,) = found.origins
    assert origin.component == "layers.2.mlp.experts"
    told = diagnose(origin.context, [origin.record, *origin.more])
    assert told.named[0].id == "M18.expert_scales", told.sentence
