"""Wrong forms, NaN, infinity and float32's end: what cannot be judged hides nothing else."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.judgeable_rows import OVERFLOW, rows_out_of_range
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun, by_component
from degarble.harness.engine.localise.replay import TwinComponents, batches, replayed
from degarble.harness.engine.localise.tensor_forms import (
    ONE_SIDED,
    check_forms,
    poisoned,
    wrong_forms,
)
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import components
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.site_forms import declared_forms
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.weights import random_weights
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    V4,
    V32,
    bound,
    localised,
    run_of,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Recorded tensors against what their sites declare: healthy runs fit, others are findings.

if TYPE_CHECKING:
    Change = Callable[[torch.Tensor], torch.Tensor]


def changed(run: InMemoryRun, component: str, port: str, name: str, change: Change) -> InMemoryRun:
    """Put another tensor at one site of the first call, in its record as well."""
    at = next(n for n, call in enumerate(run.calls) if call.component == component)
    sides = [dict(side) for side in run._tensors[at]]
    side = sides[port == "outputs"]
    side[name] = change(side[name])
    run._tensors[at] = (sides[0], sides[1])
    call = run.calls[at]
    records = [dict(call.inputs), dict(call.outputs)]
    kept = records[port == "outputs"]
    shape = tuple(side[name].shape)
    kept[name] = kept[name]._replace(dtype=WORDS[side[name].dtype], shape=shape)
    run.calls[at] = replace(call, inputs=records[0], outputs=records[1])
    return run


WORDS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int64: "I64", torch.float16: "F16", torch.float32: "F32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "recipe"),
    [(V4, "bf16"), (V4, "nvfp4-full"), (V32, "bf16"), (V32, "nvfp4-full"), (V32, "official")],
)
def test_a_healthy_run_fits_and_every_site_of_it_is_declared(config: Config, recipe: str) -> None:
    run, twin = run_of(config=config, recipe=recipe), bound(config, recipe)
    known = TwinComponents.from_twin(twin, recipe_named(recipe, config))
    assert check_forms(run, known).run is run
    declared = declared_forms(config, known.recipe)
    for call in run.calls:
        assert call.inputs.keys() <= declared[call.component].inputs.keys(), call.component
        assert call.outputs.keys() <= declared[call.component].outputs.keys(), call.component


@pytest.mark.parametrize("config", [V4, V32])
def test_every_output_of_a_model_is_declared(config: Config) -> None:
    for name in ("bf16", "nvfp4-full", "nvfp4-experts", "official"):
        recipe = recipe_named(name, config)
        declared = declared_forms(config, recipe)
        for component in components(config, recipe):
            if component.name in declared:
                assert set(component.outputs) <= declared[component.name].outputs.keys(), (
                    component.name
                )


@pytest.mark.parametrize(
    ("component", "name", "change", "told"),
    [
        ("q_head_norm_rope", "out", lambda t: t.to(torch.uint8), "U8"),
        ("q_norm", "out", lambda t: t.bool(), "BOOL"),
        ("compressor.pool", "state_latent", lambda t: t.sum(), "F64 []"),
        ("indexer.weights_proj", "out", lambda t: t[None], "BF16 [1, "),
        ("wq_a", "out", lambda t: t[:, 1:], "declared are numbers [tokens, "),
        ("wq_a", "out", lambda t: t[1:], "tokens, as its other inputs have"),
        ("wq_a.act_quant", "block_scale", lambda t: t.float(), "declared are codes"),
        ("indexer.topk", "out", lambda t: t.double(), "declared are integers [tokens, any]"),
    ],
)  # fmt: skip
def test_an_output_that_its_site_cannot_hold_is_the_one_finding(
    component: str, name: str, change: Change, told: str
) -> None:
    found = localised(changed(run_of(), ATTN + component, "outputs", name, change))
    (origin,) = found.origins
    assert (origin.kind, origin.component, origin.record) == (
        DiscrepancyKind.FORM,
        ATTN + component,
        None,
    )
    assert told in origin.sentence
    assert (ATTN + component, origin.sentence) in found.unjudged


def test_a_consumer_is_not_blamed_for_what_a_wrong_kernel_made() -> None:
    run = run_of()
    run = changed(run, f"{ATTN}wo_b", "outputs", "out", lambda t: t[:, :-1])
    run = changed(run, f"{ATTN}hc_post", "inputs", "x", lambda t: t[:, :-1])
    found = localised(run)
    assert [origin.component for origin in found.origins] == [f"{ATTN}wo_b"]
    assert {name for name, _ in found.unjudged} >= {f"{ATTN}wo_b", f"{ATTN}hc_post"}


def test_an_input_of_another_shape_is_a_finding_of_its_own() -> None:
    found = localised(changed(run_of(), f"{ATTN}attend", "inputs", "q", lambda t: t.flatten()))
    (origin,) = found.origins
    assert (origin.kind, str(origin.site)) == (DiscrepancyKind.FORM, f"{ATTN}attend.in.q")
    assert "declared are numbers [tokens, " in origin.sentence


@pytest.mark.parametrize(
    ("component", "name", "change"),
    [("wo_a", "x", lambda t: t.reshape(len(t), 2, -1)), ("attend", "q", lambda t: t.flatten(1))],
)
def test_other_extents_of_the_same_row_are_laid_out_as_declared(
    component: str, name: str, change: Change
) -> None:
    found = localised(changed(run_of(), ATTN + component, "inputs", name, change))
    assert (found.verdict, found.origins, found.unjudged) == (Verdict.AGREES, (), ())


@pytest.mark.parametrize(
    ("component", "name"),
    [("attn.hc_pre", "post"), ("attn.compressor.pool", "out"), ("ffn.topk", "weights")],
)
def test_an_output_captured_without_the_others_is_judged(component: str, name: str) -> None:
    """Budgets read all outputs of a component; modules of others put out less."""
    component = f"layers.1.{component}"
    run = run_of(component, scaled(name, 1.1))

    def alone(call: CapturedCall) -> CapturedCall:
        return replace(call, outputs={name: call.outputs[name]})

    for at, call in enumerate(run.calls):
        if call.component == component:
            run.calls[at] = alone(call)
            inputs, outputs = run._tensors[at]
            run._tensors[at] = (inputs, {name: outputs[name]})
    found = localised(run)
    if component.endswith("topk"):  # a choice is judged as a whole
        assert found.verdict is Verdict.UNDECIDED
        return
    assert component in {origin.component for origin in found.origins}


# --------------------------------------------------------------------------------------------------
# Values that are not finite are found in outputs of any rank, a scalar scale included.


@pytest.mark.parametrize(("shape", "row"), [((), 0), ((3,), 2), ((3, 4), 2), ((3, 2, 2), 2)])
def test_non_finite_values_where_the_twin_is_finite_are_reported_by_row(
    shape: tuple[int, ...], row: int
) -> None:
    twin = torch.ones(shape)
    candidate = twin.clone()
    candidate.view(-1)[-1] = torch.nan
    result = poisoned("tensor_scale", candidate, twin)
    assert result.verdict is Verdict.DIFFERS
    assert result.worst is not None
    assert (result.worst.level, result.worst.place) == (ONE_SIDED, (row,))


def test_a_row_close_to_the_end_of_float32_may_overflow() -> None:
    twin = torch.tensor([[torch.inf, 3e38, 2.0], [torch.inf, 4.0, 2.0]])
    result = poisoned("out", torch.full((2, 3), torch.nan), twin)
    assert result.worst is not None
    assert result.worst.place == (1,)
    result = poisoned("out", torch.full((1, 3), torch.nan), twin[:1])
    assert result.verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 2, 2)])
def test_outputs_without_elements_are_left_undecided(shape: tuple[int, ...]) -> None:
    assert poisoned("out", torch.ones(shape), torch.ones(shape)).verdict is Verdict.UNDECIDED


# --------------------------------------------------------------------------------------------------
# NaN in some rows hides nothing in the others, raises no alarm, and may not spread.

SPOILT = 13  # a token whose row of the embedding is NaN
FIRST, LAST = [7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [4, 4, 2, 9, 1, 8, 2, 7]


@cache
def side(config: Config, inside: torch.dtype) -> BoundModel:
    """A model with a NaN among its weights: whoever reads it has to hand it on."""
    weights = dict(random_weights(config, 1))
    name = next(weight for weight in weights if "embed" in weight)
    table = weights[name].values(torch.bfloat16).clone()
    table[SPOILT] = torch.nan
    weights[name] = Weight(value=table)
    numerics = bound(config, "bf16", inside).numerics
    return BoundModel(config, numerics, weights, recipe_named("bf16", config))


@contextmanager
def wrapped(candidate: BoundModel, name: str, way: Callable[..., Any] | None) -> Iterator[None]:
    healthy = candidate.calls.get(name)
    if way is not None and healthy is not None:
        candidate.calls[name] = way(healthy)
    try:
        yield
    finally:
        if healthy is not None:
            candidate.calls[name] = healthy


def found(
    prompts: tuple[list[int], ...],
    name: str = "",
    way: Callable[..., Any] | None = None,
    config: Config = V4,
) -> Localised:
    candidate = side(config, torch.float32)
    with wrapped(candidate, name, way):
        run = InMemoryRun.from_prompts(candidate, prompts, 3)
    twin = side(config, torch.float64)
    return localise(twin, recipe_named("bf16", config), run)


BESIDE = (FIRST, [2, SPOILT, 1], LAST)
WITHIN = ([*FIRST, SPOILT, *LAST],)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("prompts", [BESIDE, WITHIN], ids=["beside", "within"])
def test_a_nan_that_everybody_has_to_hand_on_is_no_fault(
    config: Config, prompts: tuple[list[int], ...]
) -> None:
    told = found(prompts, config=config)
    assert not told.origins
    assert told.verdict is Verdict.UNDECIDED  # some rows were not judged, which is said
    assert {row.verdict for row in told.rows} <= {Verdict.AGREES, Verdict.UNDECIDED}
    left = [row for row in told.rows if row.left_out]
    assert left
    assert max(row.ratio for row in told.rows if row.ratio == row.ratio) <= 0.7
    assert any("rows were left out: inputs are not finite" in why for _, why in told.unjudged)
    if prompts is BESIDE:
        # 2 of 3 tokens of the prompt, and one of each of two steps, of 22 + 6.
        assert {(row.left_out, row.judged_rows) for row in left if "ffn" in row.component.name} == {
            (4, 24)
        }


PLACES = (
    f"{ATTN}attend", f"{ATTN}compressor.pool", f"{ATTN}indexer.scores", f"{ATTN}wq_b",
    f"{FFN}experts.w2", f"{FFN}topk",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        *((name, WITHIN) for name in PLACES[:3]),
        *((name, BESIDE) for name in PLACES[2:4]),
        *(
            pytest.param(name, BESIDE, marks=pytest.mark.slow)
            for name in PLACES
            if name not in PLACES[2:4]
        ),
    ],
)
def test_a_fault_is_found_in_the_rows_without_nan(
    name: str, prompts: tuple[list[int], ...]
) -> None:
    told = found(prompts, name, scaled("weights" if name.endswith("topk") else "out", 1.1))
    (origin,) = told.origins
    assert origin.component == name
    assert origin.judged is not None
    assert origin.judged.ratio > 1
    assert origin.record is not None
    for values in (*origin.record.inputs.values(), *origin.record.expected.values()):
        assert not bool(values.isnan().any()), "who diagnoses sees no row that was left out"


@pytest.mark.parametrize("name", [f"{ATTN}attend", f"{FFN}experts.w2"])
def test_a_nan_where_none_can_legally_be_is_a_fault(name: str) -> None:
    def spread(call: Any, inputs: Any, weights: Any) -> Any:
        out = call(inputs, weights)["out"].clone()
        if bool(out.isnan().any()):
            out[:2] = torch.nan  # of the first sequence
        return {"out": out}

    (origin,) = found(BESIDE, name, lambda call: partial(spread, call)).origins
    assert origin.component == name
    assert "NaN or infinite on one side only" in origin.sentence


# --------------------------------------------------------------------------------------------------
# Where float32 ends, a correct kernel is not blamed for what came before it; elsewhere it is.

FLOAT32_RANGE_FIRST = "layers.0.attn."


@pytest.mark.parametrize(
    ("config", "name", "factor"),
    [
        (V4, f"{ATTN}wkv", 1e20),
        (V4, f"{ATTN}wo_b", 1e37),
        (V4, f"{ATTN}kv_write", 1e37),
        pytest.param(V4, f"{ATTN}indexer.wq_b", 1e37, marks=pytest.mark.slow),
        pytest.param(V32, f"{FLOAT32_RANGE_FIRST}wkv_a", 1e20, marks=pytest.mark.slow),
        (V32, f"{FLOAT32_RANGE_FIRST}indexer.wk", 1e20),
    ],
)
def test_what_follows_numbers_near_the_end_of_float32_is_not_blamed(
    config: Config, name: str, factor: float
) -> None:
    """The candidate sums in float32 inside, the twin in float64."""
    run = run_of(name, scaled("out", factor), config=config, inside=torch.float32, recipe="bf16")
    found = localised(run, config, "bf16")
    (origin,) = found.origins
    assert origin.component == name
    assert any(OVERFLOW in why for _, why in found.unjudged)


def one_row_large(row: int, factor: float, norm: float) -> InMemoryRun:
    """One token's query latent beyond float32's squares, and a gain in the norm behind it."""

    def change(call: Any, inputs: Any, weights: Any) -> Any:
        out = call(inputs, weights)["out"].clone()
        if len(out) > 2:
            out[row] = (out[row].float() * factor).to(out.dtype)
        return {"out": out}

    candidate = bound(V4, "bf16", torch.float32)
    name, healthy = f"{ATTN}q_norm", candidate.calls[f"{ATTN}q_norm"]
    candidate.calls[name] = scaled("out", norm)(healthy)
    try:
        way = lambda call: partial(change, call)  # noqa: E731
        return run_of(f"{ATTN}wq_a", way, inside=torch.float32, recipe="bf16")
    finally:
        candidate.calls[name] = healthy


def test_rows_that_do_not_overflow_are_judged() -> None:
    healthy = localised(one_row_large(3, 1e25, 1.0), recipe="bf16")
    assert [origin.component for origin in healthy.origins] == [f"{ATTN}wq_a"]
    (row,) = (
        output_row for output_row in healthy.rows if output_row.component.name == f"{ATTN}q_norm"
    )
    assert (row.verdict, row.left_out, row.why_left_out) == (Verdict.AGREES, 1, OVERFLOW)
    sick = localised(one_row_large(3, 1e25, 1.05), recipe="bf16")
    assert [origin.component for origin in sick.origins] == [f"{ATTN}wq_a", f"{ATTN}q_norm"]


@pytest.mark.parametrize("name", [f"{ATTN}attend", f"{FFN}hc_pre"])
def test_ordinary_numbers_are_in_range(name: str) -> None:
    run = run_of(recipe="bf16")
    known = TwinComponents.from_twin(bound(V4, "bf16", torch.float64), recipe_named("bf16", V4))
    steps = {step.number: step for step in run.steps}
    calls = by_component(run)[name]
    for batch in batches(run, known.components[name], calls, steps):
        assert rows_out_of_range(known, replayed(known, batch)) is None


@pytest.mark.parametrize(
    ("dtype", "store", "wrong"),
    [
        (torch.float16, torch.bfloat16, True),
        (torch.float16, torch.float32, True),
        (torch.float16, torch.float16, False),
        (torch.float8_e4m3fn, torch.float16, True),
        (torch.bfloat16, torch.float16, False),
    ],
)
def test_the_range_of_a_models_own_dtype_is_wide_enough(
    dtype: torch.dtype, store: torch.dtype, *, wrong: bool
) -> None:
    twin = torch.ones(2, 3)
    assert bool(wrong_forms({"out": twin.to(dtype)}, {"out": twin}, store)) == wrong
