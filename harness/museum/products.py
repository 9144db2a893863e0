"""Plant adopted faults of products: in a product of the extents and formats of where it was found.

The museum's models have no components of this kind. A product is drawn from the case's seed; its
candidate adds up in float32, and its twin in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN, InvalidArgument
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.judge.bare import BareProduct, bare_context
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
from degarble.harness.engine.faults.registry import faults_for
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome, equal_outputs
from degarble.references.linears import X, quantise_activations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.adopted.files import AdoptedFault
    from degarble.harness.engine.faults.model_faults import ModelFault

NAME = "product"
_MOST = 1 << 26  # numbers of a weight


def plant_in_product(fault: ModelFault, adopted: AdoptedFault) -> PlantOutcome | None:
    """Plant a fault in the product of its case; None where it changes nothing, or has no case."""
    case = adopted.case.get("product")
    if case is None:
        return None
    twin, inputs = _product(case, adopted.id)
    candidate = ComponentContext(_in_float32(twin.bound), twin.component, twin.recipe)
    variants = list(fault.variants(candidate))
    if not variants or not fault.applies_to(candidate):
        return None
    variant = variants[0]
    with torch.no_grad():
        expected = twin.call(inputs, twin.weights)
        healthy = candidate.call(inputs, candidate.weights)
        try:
            outputs = variant.apply(candidate.call)(inputs, candidate.weights)
        except CANNOT_RUN as error:
            told = (fault.id, NAME, variant.words, _words(case))
            return PlantOutcome(*told, effect=0.0, sentence=f"the run stops: {error}"[:200])
    told = (fault.id, NAME, variant.words, _words(case))
    call = JudgeableCall.from_twin(twin.bound, twin.name, inputs, expected)
    effect, alarm = (
        max(result.ratio for result in judge_outputs(call, made).values())
        for made in (outputs, healthy)
    )
    if effect <= 1:
        return PlantOutcome(*told, effect=effect)
    place = PlaceAnswer.EXACT if alarm <= 1 else PlaceAnswer.ALSO_ELSEWHERE
    record = CallRecord(inputs, outputs, expected)
    said = diagnose(twin, record, faults_for(twin))
    named = said.named[0] if said.named else None
    if named is None:
        cause = CauseAnswer.UNKNOWN
    elif named.id == fault.id:
        cause = CauseAnswer.FIRST
    else:
        with torch.no_grad():
            other = named.variant.apply(candidate.call)(inputs, candidate.weights)
        cause = CauseAnswer.SAME if equal_outputs(other, outputs) else CauseAnswer.WRONG
    return PlantOutcome(
        *told, effect=effect, place=place, cause=cause, named="" if named is None else named.id,
        blamed=(NAME,), truth=(NAME,), sentence=said.sentence,
    )  # fmt: skip


def _words(case: Mapping[str, Any]) -> str:
    rows, columns = case["shape"]
    return f"product of {case['tokens']} x {columns} by {rows}, seed {case['seed']}"


def _in_float32(bound: Any) -> Any:
    numerics = replace(bound.numerics, products=torch.float32)
    return type(bound)(bound.config, numerics, bound.weights, bound.recipe)


def _product(case: Mapping[str, Any], name: str) -> tuple[ComponentContext, dict[str, Tensor]]:
    """Return a product as a component, and its inputs."""
    _require(case, name)
    (rows, columns), tokens = case["shape"], case["tokens"]
    drawn = torch.Generator().manual_seed(case["seed"])
    x = torch.randn(tokens, columns, generator=drawn)
    w = torch.randn(rows, columns, generator=drawn)
    weight = Weight(value=w.bfloat16())
    if case["format"]:
        weight = Weight.of(quantise(w, BLOCK_FORMATS[case["format"]], CANONICAL))
    form = case["input"] if case["input"] in BLOCK_FORMATS else None
    inputs = {X: x.bfloat16()}
    if form is not None:
        own = BLOCK_FORMATS[form]
        largest = x.abs().max() / (own.element.largest * 448)
        inputs = dict(quantise_activations(x, form, largest if own.tensor_scale else None))
    context = bare_context(NAME, {NAME: BareProduct(weight, None, torch.bfloat16)}, form)
    return context, inputs


def _require(case: Mapping[str, Any], name: str) -> None:
    shape: Any = case.get("shape")
    whole = all(type(case.get(key)) is int and case[key] > 0 for key in ("tokens", "seed"))
    fits = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape)
    if not whole or not fits or not 0 < shape[0] * shape[1] * case["tokens"] < _MOST << 6:
        raise InvalidArgument(
            f"{name}: case.product", dict(case), "shape [N, K], tokens and a seed",
            "Adopt the description again: degarble faults adopt VERDICT",
        )  # fmt: skip
    if case.get("format") and case["format"] not in BLOCK_FORMATS:
        raise InvalidArgument(
            f"{name}: case.product.format", case["format"], f"one of {', '.join(BLOCK_FORMATS)}",
            "Mend it by hand.",
        )  # fmt: skip
