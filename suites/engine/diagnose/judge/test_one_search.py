"""`judge`, `api.check` and `check` name one cause of a faulty call, in the same words."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness import api
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.gain_fit import planted_gain
from degarble.harness.engine.faults.model_faults import (
    CallRecord,
    ComponentContext,
    FaultVariant,
    with_outputs,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import component_named
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.report.verdict import AnswerLevel
from degarble.references.numerics import Numerics, Switches, switches_of
from degarble.references.traced.family import TracedModel, logical_name
from degarble.suites.engine.diagnosing import double
from degarble.suites.references.traced.traced_models import config_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.diagnose.diagnose import Diagnosed
    from degarble.harness.engine.diagnose.judge.report import JudgedKernel
    from degarble.harness.formats.quantise import QuantisedTensor


def answer(level: AnswerLevel, causes: list[str], evidence: str) -> tuple[str, list[str], str]:
    return str(level), causes, evidence


def judged_answer(kernel: JudgedKernel, name: str) -> tuple[str, list[str], str]:
    told = kernel.causes
    evidence = told.described.evidence if told.described else ""
    evidence = told.named[0].evidence if told.named else evidence
    return answer(kernel.level, [each.fault for each in told.named], evidence.replace(name, "it"))


def checked_answer(found: Diagnosed, name: str) -> tuple[str, list[str], str]:
    level, evidence = AnswerLevel.PLACED, ""
    if found.named:
        level, evidence = AnswerLevel.NAMED, found.named[0].evidence
    elif found.described is not None:
        level, evidence = AnswerLevel.DESCRIBED, found.described.evidence
    return answer(level, [each.id for each in found.named], evidence.replace(name, "it"))


# --------------------------------------------------------------------------------------------------
# Linears in every format: a module of a torch model, a bare product, a linear of a traced model

NEXT = "scales of the next"
WIDTH, HEIGHT, TOKENS = 128, 512, 96
PLACE = "layers.1.mlp.up_proj"
FORMATS = ("BF16", "NVFP4", "MXFP4", "MXFP8", "FP8_128X128_F32", "FP8_128X128_UE8M0", "FP8_ROW")


def _scales_of_the_next(tensor: QuantisedTensor) -> QuantisedTensor:
    """Block scale k + 1 in the last 64 of 512 rows."""
    scales = tensor.block_scale.clone()
    scales[-64:] = tensor.block_scale.view(torch.uint8).roll(-1, 1).view(scales.dtype)[-64:]
    return replace(tensor, block_scale=scales)


def _gain(weight: Tensor) -> Tensor:
    return weight * (33 / 32)


def _gain_of_rows(weight: Tensor) -> Tensor:
    made = weight.clone()
    made[128:192] *= 0.5
    return made


def _without_k(weight: Tensor) -> Tensor:
    made = weight.clone()
    made[:, 32:64] = 0
    return made


def _twice_k(weight: Tensor) -> Tensor:
    made = weight.clone()
    made[256:, 48:80] *= 2
    return made


def _rows_exchanged(weight: Tensor) -> Tensor:
    made = weight.clone()
    made[[7, 300]] = weight[[300, 7]]
    return made


def _one_element(weight: Tensor) -> Tensor:
    made = weight.clone()
    made[77, 13] += 3 * weight.abs().max()
    return made


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "gain": _gain,
    "gain of rows": _gain_of_rows,
    "part of K missing": _without_k,
    "part of K twice": _twice_k,
    "rows exchanged": _rows_exchanged,
    "one element": _one_element,
}
_QUICK = {
    ("NVFP4", "gain"), ("NVFP4", "one element"),     ("FP8_ROW", "rows exchanged"), ("NVFP4", NEXT),
}  # fmt: skip
LINEARS = [
    pytest.param(form, change, marks=() if (form, change) in _QUICK else pytest.mark.slow)
    for form in FORMATS
    for change in (
        *CHANGES,
        *(["scales of the next"] if form in {"NVFP4", "MXFP4", "MXFP8"} else []),
    )
]


@lru_cache(maxsize=2)
def _operands(form: str) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(FORMATS.index(form))
    w = torch.randn(HEIGHT, WIDTH, generator=generator) * 0.1
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    return x, w.bfloat16() if form == "BF16" else quantise(w, BLOCK_FORMATS[form])


def _faulty(stored: Any, change: str) -> Tensor:
    if change == NEXT:
        return dequantise(_scales_of_the_next(stored), torch.float32)
    plain = (
        stored.float() if isinstance(stored, torch.Tensor) else dequantise(stored, torch.float32)
    )
    return CHANGES[change](plain)


@lru_cache(maxsize=2)
def _traced(form: str) -> ComponentContext:
    """A linear of a traced Llama, as `check` binds it."""
    config: Any = replace(
        config_of("llama", hidden_size=WIDTH, intermediate_size=HEIGHT), dtype="float32"
    )
    name = logical_name(f"model.{PLACE}.weight")
    weights = {}
    for number, parameter in enumerate(_parameters(config)):
        generator = torch.Generator().manual_seed(100 + number)
        value = torch.randn(parameter.shape, generator=generator) * 0.1
        weights[parameter.name] = Weight(value=value.bfloat16())
    stored = _operands(form)[1]
    weights[name] = Weight(value=stored) if form == "BF16" else Weight.of(stored)
    rules = () if form == "BF16" else (Rule(name, form),)
    recipe = Recipe("one", rules)
    bound = TracedModel(config, Numerics.twin(), weights, recipe)
    return ComponentContext(bound, component_named(config, PLACE, recipe), recipe)


def _parameters(config: Any) -> Any:
    from degarble.references.traced.family import traced_parameters  # noqa: PLC0415

    return traced_parameters(config)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("form", "change"), LINEARS)
def test_a_faulty_linear_has_one_answer(form: str, change: str) -> None:
    x, stored = _operands(form)
    linear = torch.nn.Linear(WIDTH, HEIGHT, bias=False)
    with torch.no_grad():
        linear.weight.copy_(_faulty(stored, change))
        out = linear(x)
    model = torch.nn.Sequential(OrderedDict(up_proj=linear))
    bare = judged_answer(api.judge("gemm", x, stored, out), "gemm")
    run = api.capture(model, x)
    checked = api.check(run, {"up_proj": stored})
    (trouble,), (origin,) = checked.discrepancies, checked.document()["origins"]
    assert origin["level"] == trouble.document()["level"]
    assert bool(origin["changes"]) == bool(trouble.causes.described)
    context = _traced(form)
    expected = context.call({"x": x}, context.weights)
    found = diagnose(context, CallRecord({"x": x}, {"out": out}, expected))
    assert bare == judged_answer(trouble, "up_proj") == checked_answer(found, PLACE)
    assert bare[0] != "placed", bare


# --------------------------------------------------------------------------------------------------
# Components of V4: as `judge` takes them by name, and as `check` diagnoses them


def _moved() -> FaultVariant:
    def change(_inputs: Any, outputs: Any) -> Any:
        return {**outputs, "out": outputs["out"].roll(1, -1)}

    return FaultVariant("moved", with_outputs(change))


def _first_variant(fault: str, context: ComponentContext) -> FaultVariant:
    return next(iter(MODEL_FAULTS[fault].variants(context)))


V4_FAULTS: dict[str, tuple[str, Callable[[ComponentContext], FaultVariant]]] = {
    "33/32 behind a norm": ("attn.q_norm", lambda c: planted_gain(c, "33/32", 33 / 32)),
    "2 behind a norm": ("attn.norm", lambda c: planted_gain(c, "2", 2.0)),
    "columns of an output shifted": ("ffn.shared.w2", lambda _c: _moved()),
    **{
        f"{fault} in {role}": (role, partial(_first_variant, fault))
        for role, faults in {
            "attn.wq_b": "M12.column_off M10.nibble_order M41.tile_of_k",
            "attn.wo_a": "M17.second_half",
            "ffn.experts.w13": "M10.nibble_order M43.one_expert",
            "ffn.experts.w2": "M06.down",
            "attn.attend": "M29.scale M43.one_head",
            "attn.q_head_norm_rope": "M28.base",
            "attn.kv_norm_rope": "M28.reciprocal",
            "ffn.norm": "M24.norm_weight",
            "ffn.shared.act": "M25.function",
            "head": "M43.whole",
        }.items()
        for fault in faults.split()
    },
}  # fmt: skip
_V4_QUICK = ("33/32 behind a norm", "M10.nibble_order in attn.wq_b", "M29.scale in attn.attend")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in _V4_QUICK else pytest.mark.slow) for c in V4_FAULTS]
)
def test_a_faulty_component_has_one_answer(case: str) -> None:
    role, plant = V4_FAULTS[case]
    model = double("v4", "nvfp4-full")
    name = next(each for each in model.calls if model.naming(each).role == role)
    variant = plant(model.planting(name))
    record = model.sights(name, variant, calls=1)[0]
    context = model.naming(name)
    official = vars(switches_of("official-v4"))
    stated = {n: value for n, value in official.items() if value != getattr(Switches(), n)}
    setting = api.Setting(config=context.bound.config, recipe=model.recipe, conventions=stated)
    kernel = api.judge(
        name, dict(record.inputs), dict(context.weights), dict(record.outputs), setting=setting
    )
    found = diagnose(context, record)
    assert judged_answer(kernel, name) == checked_answer(found, name)
    assert kernel.level is not AnswerLevel.PLACED, str(kernel)


def test_there_are_many_calls() -> None:
    assert len(LINEARS) + len(V4_FAULTS) >= 40
