"""Judge one component of a known architecture alone, by its role or full name and a config.

The component is bound under config and recipe with the given weights, run on the inputs that the
kernel received, and judged as in a replay. A role without a layer number means the first layer that
has it. Causes come from the faults of running models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.engine.budget.budget import LevelFinding
from degarble.harness.engine.budget.judging import OutputResult, judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.judge.mismatch import excess_of
from degarble.harness.engine.diagnose.judge.report import (
    JudgedKernel,
    Named,
    census_of,
    elements_of,
)
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
from degarble.harness.engine.localise.recorded_run import word_of
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import components
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.site_forms import Forms, declared_forms
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import Bound
from degarble.references.facts import local_name
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe


def judge_component(
    name: str,
    inputs: Mapping[str, Tensor],
    weights: Any,
    output: Any,
    model: tuple[Config, Recipe | str | None, Mapping[str, Any]],
) -> JudgedKernel:
    """Judge a kernel's outputs in place of a component."""
    config, recipe, conventions = model
    if recipe is None or isinstance(recipe, str):
        recipe = recipe_named(recipe or "bf16", config)
    component = _component(name, config, recipe)
    given = _weights(component, weights)
    bound = Bound(config, Numerics.twin().with_switches(**conventions), given, recipe)
    forms = declared_forms(config, recipe).get(component.name, Forms({}, {}))
    _require_inputs(component, inputs, forms)
    call = _replayed(bound, component, inputs, forms)
    outputs = dict(output) if isinstance(output, dict) else {"out": output}
    for key, each in outputs.items():
        if key not in call.outputs:
            raise UnknownName.among(f"output of {name}", key, call.outputs)
        if not isinstance(each, torch.Tensor):
            raise InvalidArgument(key, type(each).__name__, "a tensor", "Pass what was returned.")
    foreign = {name: each for name, each in _foreign(outputs, forms) if name in call.outputs}
    judged = judge_outputs(call, {**outputs, **{name: call.outputs[name] for name in foreign}})
    judged |= foreign
    verdict = _verdict(judged)
    if verdict is not Verdict.DIFFERS or foreign:
        return JudgedKernel(component.name, verdict, judged)
    found = diagnose(
        ComponentContext(bound, component, recipe),
        CallRecord(dict(inputs), outputs, dict(call.outputs)),
    )
    named = tuple(
        Named(each.id, each.fault.title, each.evidence, each.ratio) for each in found.named
    )
    tried = tuple(each.fault for each in found.excluded)
    elements, census = _elements(judged, outputs, call)
    return JudgedKernel(component.name, verdict, judged, elements, census, named, tried)


def _replayed(
    bound: Bound, component: Component, inputs: Mapping[str, Tensor], forms: Forms
) -> JudgeableCall:
    """Run the twin; raise for shapes that it cannot take, and list the declared ones."""
    try:
        with torch.inference_mode():
            return JudgeableCall.of(bound, component.name, dict(inputs))
    except (RuntimeError, IndexError, ValueError) as error:
        found = {name: list(each.shape) for name, each in inputs.items()}
        told = ", ".join(f"{name}: {form}" for name, form in forms.inputs.items() if name in found)
        raise ShapeMismatch(
            f"inputs of {component.name}", found, told or "extents that belong together",
            "Pass what the kernel was given.",
        ) from error  # fmt: skip


def _foreign(outputs: Mapping[str, Tensor], forms: Forms) -> Iterator[tuple[str, OutputResult]]:
    """Yield a finding for each output whose dtype its site cannot hold."""
    for name, each in outputs.items():
        form = forms.outputs.get(name)
        if form is not None and not form.takes(word_of(each.dtype)):
            words = f"dtype {each.dtype} in place of {form.holds}"
            yield name, OutputResult(name, Verdict.DIFFERS, (LevelFinding(words, (), 1.0, 0.0),))


def _verdict(judged: Mapping[str, OutputResult]) -> Verdict:
    found = {each.verdict for each in judged.values()}
    for verdict in (Verdict.DIFFERS, Verdict.UNDECIDED):
        if verdict in found:
            return verdict
    return Verdict.AGREES


def _elements(
    judged: Mapping[str, OutputResult], outputs: Mapping[str, Tensor], call: JudgeableCall
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return worst elements and census of the numeric outputs that differ."""
    from degarble.harness.engine.budget.roles import budgets_of  # noqa: PLC0415  only on failure

    elements, census = {}, {}
    budgets = budgets_of(call)
    for name, each in judged.items():
        twin, budget = call.outputs[name], budgets.get(name)
        comparable = name in outputs and outputs[name].shape == twin.shape
        if each.verdict is not Verdict.DIFFERS or not comparable:
            continue
        if budget is not None and twin.dtype.is_floating_point:
            candidate = outputs[name].detach().cpu()
            elements[name] = elements_of(candidate, twin, excess_of(candidate, twin, budget))
            if census_of(candidate):
                census[name] = census_of(candidate)
    return elements, census


def _component(name: str, config: Config, recipe: Recipe) -> Component:
    known = components(config, recipe)
    for each in known:
        if each.name == name:
            return each
    for each in known:
        if each.role == name:
            return each
    names = {each.role for each in known} | {each.name for each in known}
    raise UnknownName.among("component", name, names)


def _weights(component: Component, given: Any) -> dict[str, Weight]:
    """Return weights by full name; a single one may come unnamed, and names may be local."""
    wanted = component.weights or component.input_scales
    if isinstance(given, (torch.Tensor, QuantisedTensor, Weight)):
        given = {next(iter(wanted), "weight"): given}
    local = {local_name(each, component.block): each for each in wanted}
    found: dict[str, Weight] = {}
    for name, each in dict(given or {}).items():
        full = local.get(name, name)
        if full not in wanted:
            raise UnknownName.among(f"weight of {component.name}", name, [*local, *wanted])
        found[full] = _weight(name, each)
    missing = [each for each in component.weights if each not in found]
    if missing:
        raise InvalidArgument(
            f"weights of {component.name}", sorted(dict(given or {})),
            f"all of {', '.join(local)}", "Pass them by name.",
        )  # fmt: skip
    return found


def _weight(name: str, each: Any) -> Weight:
    if isinstance(each, Weight):
        return each
    if isinstance(each, QuantisedTensor):
        return Weight.of(each)
    if isinstance(each, torch.Tensor):
        return Weight(value=each.detach())
    raise InvalidArgument(
        f"weight {name}", type(each).__name__, "a Weight, a QuantisedTensor or a tensor",
        "Say what codes mean: QuantisedTensor names format, layout, direction and shape.",
    )  # fmt: skip


def _require_inputs(component: Component, inputs: Mapping[str, Any], forms: Forms) -> None:
    names = [each.name for each in component.inputs]
    for name, each in inputs.items():
        if name not in names:
            raise UnknownName.among(f"input of {component.name}", name, names)
        if not isinstance(each, torch.Tensor):
            raise InvalidArgument(name, type(each).__name__, "a tensor", "Pass what it was given.")
        form = forms.inputs.get(name)
        if form is not None and not form.takes(word_of(each.dtype)):
            raise DtypeMismatch(
                f"{name} of {component.name}", str(each.dtype), f"{form.holds}",
                "Pass what the kernel was given.",
            )  # fmt: skip
    must = [n for n in names if not n.startswith("state_") and n not in {"residual", "context"}]
    missing = [name for name in must if name not in inputs]
    if missing:
        raise ShapeMismatch(
            f"inputs of {component.name}", sorted(inputs), ", ".join(names),
            f"Add {', '.join(missing)}.",
        )  # fmt: skip
