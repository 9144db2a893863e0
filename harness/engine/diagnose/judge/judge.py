"""`judge`: compare one kernel call with exact arithmetic on the same operands; no checkpoint.

A component is a bare operation ("gemm", "rmsnorm", "swiglu", "quantise_nvfp4"), a role or full name
of a known architecture with its config, or a callable as the definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.engine.adopted.files import searching
from degarble.harness.engine.budget.budget import LevelFinding, OutputResult
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.conventions.learned import LEANS
from degarble.harness.engine.conventions.registry import OPERANDS, REGISTRY, read_conventions
from degarble.harness.engine.diagnose.judge.bare import causes_of
from degarble.harness.engine.diagnose.judge.gemm import judge_product, require_output
from degarble.harness.engine.diagnose.judge.operations import (
    by_callable,
    judge_defined,
    judge_quantised,
    rms_norm,
    swiglu,
)
from degarble.harness.engine.diagnose.judge.product import Product, excess_of
from degarble.harness.engine.diagnose.judge.report import JudgedKernel, census_of, elements_of
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
from degarble.harness.engine.localise.recorded_run import word_of
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection, block_format
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import components
from degarble.harness.model.family import is_config
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.site_forms import ComponentForms, declared_forms
from degarble.harness.report.number_text import shortened
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import bind
from degarble.references.facts import local_name
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.diagnose.judge.operations import Defined
    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel

    Operand = Tensor | QuantisedTensor | Weight


# --------------------------------------------------------------------------------------------------
# Judge one component of a known architecture alone, by its role or full name and a config.
#
# The component is bound under config and recipe with the given weights, run on the inputs that the
# kernel received, and judged as in a replay. A role without a layer number means the first layer
# that has it. Causes come from the faults of running models.


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
    bound = bind(config, Numerics.twin().with_switches(**conventions), given, recipe)
    _keep_known(bound, component, given)
    forms = declared_forms(config, recipe).get(component.name, ComponentForms({}, {}))
    _require_inputs(component, inputs, forms)
    call = _replayed(bound, component, inputs, forms)
    outputs = dict(output) if isinstance(output, dict) else {"out": output}
    for key, each in outputs.items():
        if key not in call.outputs:
            raise UnknownName.among(f"output of {name}", key, call.outputs)
        if not isinstance(each, torch.Tensor):
            raise InvalidArgument(key, type(each).__name__, "a tensor", "Pass what was returned.")
    foreign = {name: result for name, result in _foreign(outputs, forms) if name in call.outputs}
    judged = judge_outputs(call, {**outputs, **{name: call.outputs[name] for name in foreign}})
    judged |= foreign
    verdict = _verdict(judged)
    if verdict is not Verdict.DIFFERS or foreign:
        return JudgedKernel(component.name, verdict, judged)
    record = CallRecord(dict(inputs), outputs, dict(call.outputs))
    causes = causes_of(ComponentContext(bound, component, recipe), [record])
    elements, census = _elements(judged, outputs, call)
    return JudgedKernel(component.name, verdict, judged, elements, census, causes)


def _keep_known(bound: BoundModel, judged: Component, given: Mapping[str, Weight]) -> None:
    """Forget the components whose weights nobody gave: causes look at those of others."""
    own = judged.name.removesuffix(".act_quant").removesuffix(".experts")
    for name in list(bound.calls):
        known = all(weight in given for weight in bound.bound_to(name)[0].weights)
        if not known and not name.startswith(own):
            del bound.calls[name]


def _replayed(
    bound: BoundModel, component: Component, inputs: Mapping[str, Tensor], forms: ComponentForms
) -> JudgeableCall:
    """Run the twin; raise for shapes that it cannot take, and list the declared ones."""
    try:
        with torch.inference_mode():
            return JudgeableCall.from_twin(bound, component.name, dict(inputs))
    except (RuntimeError, IndexError, ValueError) as error:
        found = {name: list(tensor.shape) for name, tensor in inputs.items()}
        text = ", ".join(f"{name}: {form}" for name, form in forms.inputs.items() if name in found)
        raise ShapeMismatch(
            f"inputs of {component.name}", found, text or "extents that belong together",
            "Pass what the kernel was given.",
        ) from error  # fmt: skip


def _foreign(
    outputs: Mapping[str, Tensor], forms: ComponentForms
) -> Iterator[tuple[str, OutputResult]]:
    """Yield a finding for each output whose dtype its site cannot hold."""
    for name, output in outputs.items():
        form = forms.outputs.get(name)
        if form is not None and not form.accepts(word_of(output.dtype)):
            words = f"dtype {output.dtype} in place of {form.holds}"
            yield name, OutputResult(name, Verdict.DIFFERS, (LevelFinding(words, (), 1.0, 0.0),))


def _verdict(judged: Mapping[str, OutputResult]) -> Verdict:
    verdicts = {result.verdict for result in judged.values()}
    for verdict in (Verdict.DIFFERS, Verdict.UNDECIDED):
        if verdict in verdicts:
            return verdict
    return Verdict.AGREES


def _elements(
    judged: Mapping[str, OutputResult], outputs: Mapping[str, Tensor], call: JudgeableCall
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return worst elements and census of the numeric outputs that differ."""
    from degarble.harness.engine.budget.roles import budgets_of  # noqa: PLC0415  only on failure

    elements, census = {}, {}
    budgets = budgets_of(call)
    for name, result in judged.items():
        twin, budget = call.outputs[name], budgets.get(name)
        comparable = name in outputs and outputs[name].shape == twin.shape
        if result.verdict is not Verdict.DIFFERS or not comparable:
            continue
        if budget is not None and twin.dtype.is_floating_point:
            candidate = outputs[name].detach().cpu()
            elements[name] = elements_of(candidate, twin, excess_of(candidate, twin, budget))
            if census_of(candidate):
                census[name] = census_of(candidate)
    return elements, census


def _component(name: str, config: Config, recipe: Recipe) -> Component:
    known = components(config, recipe)
    for component in known:
        if component.name == name:
            return component
    for component in known:
        if component.role == name:
            return component
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
    missing = [weight for weight in component.weights if weight not in found]
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


def _require_inputs(component: Component, inputs: Mapping[str, Any], forms: ComponentForms) -> None:
    names = [each.name for each in component.inputs]
    for name, each in inputs.items():
        if name not in names:
            raise UnknownName.among(f"input of {component.name}", name, names)
        if not isinstance(each, torch.Tensor):
            raise InvalidArgument(name, type(each).__name__, "a tensor", "Pass what it was given.")
        form = forms.inputs.get(name)
        if form is not None and not form.accepts(word_of(each.dtype)):
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


# --------------------------------------------------------------------------------------------------
# A component is a bare operation ("gemm", "rmsnorm", "swiglu", "quantise_nvfp4"), a role or full
# name of an architecture whose config is given, or a callable that is the definition itself. The
# answer is two-sided: beyond the budget of the twin, or nearer to the unquantised reference than
# the twin can be. A difference is explained by reproduction.

OPERATIONS = ("gemm", "rmsnorm", "swiglu", "quantise_nvfp4")


@dataclass(frozen=True, repr=False)
class Setting:
    """Facts that operands do not contain; an operation ignores those that it does not use.

    `config` and `recipe` belong to a model's component; `activation` is the format of inputs that
    arrive as codes; `epsilon` belongs to a norm; `limit` is the clamp of a SwiGLU; `conventions`
    are what the kernel follows where correct implementations differ (docs/checking.md). `faults` is
    a folder of adopted faults, which are searched as well.

    >>> import torch
    >>> from degarble import Setting, judge
    >>> x, weight = torch.ones(2, 8), torch.ones(8)
    >>> bool(judge("rmsnorm", x, weight, x / (1 + 1e-5) ** 0.5, setting=Setting(epsilon=1e-5)))
    True
    """

    config: Config | None = None
    recipe: Recipe | str | None = None
    activation: str = NVFP4.name
    epsilon: float = 1e-6
    limit: float | None = None
    conventions: Mapping[str, Any] = field(default_factory=dict)
    faults: Path | str | None = None

    def __repr__(self) -> str:
        shown = {key.name: getattr(self, key.name) for key in fields(self)}
        shown |= {key: type(shown[key]).__name__ for key in ("config", "recipe") if shown[key]}
        shown["conventions"] = dict(self.conventions)
        return shortened(f"Setting({', '.join(f'{key}={value}' for key, value in shown.items())})")

    def __post_init__(self) -> None:
        stated = read_conventions(self.conventions, "of the setting")
        object.__setattr__(self, "conventions", MappingProxyType(stated))
        if self.config is not None and not is_config(self.config):
            raise InvalidArgument(
                "config", type(self.config).__name__, "the config of a model",
                "Read one with config_from_file.",
            )  # fmt: skip
        for name, value in (("epsilon", self.epsilon), ("limit", self.limit)):
            if name == "limit" and value is None:
                continue
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise InvalidArgument(
                    name,
                    value,
                    "a finite number that is not negative",
                    "As the model's config has it.",
                )


@overload
def judge(
    component: Literal["gemm"],
    inputs: Operand | Mapping[str, Any],
    weights: Operand | Mapping[str, Any],
    output: Tensor,
    *,
    reference: Tensor | Mapping[str, Tensor] | None = None,
    setting: Setting | None = None,
) -> JudgedKernel: ...


@overload
def judge(
    component: Literal["quantise_nvfp4"],
    inputs: Tensor | Mapping[str, Tensor],
    weights: None,
    output: QuantisedTensor,
    *,
    setting: Setting | None = None,
) -> JudgedKernel: ...


@overload
def judge(
    component: str | Callable[..., Any],
    inputs: Any,
    weights: Any,
    output: Any,
    *,
    reference: Any = None,
    setting: Setting | None = None,
) -> JudgedKernel: ...


def judge(
    component: str | Callable[..., Any],
    inputs: Any,
    weights: Any,
    output: Any,
    *,
    reference: Any = None,
    setting: Setting | None = None,
) -> JudgedKernel:
    """Judge a kernel call; `reference`: unquantised operands by name, or their output.

    >>> import torch
    >>> from degarble import NVFP4, dequantise, judge, quantise
    >>> x, w = (quantise(torch.ones(rows, 64), NVFP4) for rows in (2, 3))
    >>> out = (dequantise(x) @ dequantise(w).T).bfloat16()  # your kernel's output
    >>> bool(judge("gemm", x, w, out)), bool(judge("gemm", x, w, out * 2))
    (True, False)
    """
    how = Setting() if setting is None else setting
    if not isinstance(how, Setting):
        raise InvalidArgument("setting", type(how).__name__, "a Setting", "Name its facts.")
    with searching(None if how.faults is None else Path(how.faults)):
        return _judged(component, inputs, weights, output, reference, how)


def _judged(
    component: Any, inputs: Any, weights: Any, output: Any, reference: Any, how: Setting
) -> JudgedKernel:
    if callable(component):
        name = getattr(component, "__name__", type(component).__name__)
        return judge_defined(name, by_callable(component, inputs, weights), output)
    if not isinstance(component, str):
        raise InvalidArgument(
            "component", type(component).__name__, "a name, or a callable as the definition",
            f"Bare operations are {', '.join(OPERATIONS)}.",
        )  # fmt: skip
    if reference is not None and component != "gemm":
        raise InvalidArgument(
            "reference", component, "a gemm, whose operands can be compared unquantised",
            "Leave it out, or judge the product alone.",
        )  # fmt: skip
    if component not in OPERATIONS and how.config is None:
        raise UnknownName.among("component without a config", component, OPERATIONS)
    given = _by_name(inputs)
    match component:
        case "gemm":
            return _gemm(given, weights, output, reference, how)
        case "rmsnorm":
            norm = partial(rms_norm, given, weights, how.epsilon)
            return _in_steps_or_not(component, norm, output, how, "norm_rounded_before_weight")
        case "swiglu":
            gated = partial(swiglu, given, how.limit)
            return _in_steps_or_not(component, gated, output, how, "gate_rounded_before_product")
        case "quantise_nvfp4":
            return judge_quantised(given, output)
    assert how.config is not None, "refused above"
    model = how.config, how.recipe, how.conventions
    return judge_component(component, given, weights, output, model)


def _in_steps_or_not(
    name: str, make: Callable[..., Defined], output: Any, setting: Setting, convention: str
) -> JudgedKernel:
    """Judge by the declared convention; else without rounding in between, then with it."""
    stated = setting.conventions.get(convention)
    if stated is not None:
        return judge_defined(name, make(in_steps=stated), output)
    judged = judge_defined(name, make(), output, search=False)
    if judged.verdict is not Verdict.DIFFERS:
        return judged
    other = judge_defined(name, make(in_steps=True), output, search=False)
    # A wider budget alone is no evidence: the distance has to shrink clearly as well.
    if other.verdict is Verdict.AGREES and LEANS * other.distance < judged.distance:
        return replace(other, note=f"{REGISTRY[convention].words(value=True)} (learned)")
    return judge_defined(name, make(), output)


def _by_name(inputs: Any) -> dict[str, Any]:
    return dict(inputs) if isinstance(inputs, dict) else {"x": inputs}


def _gemm(
    given: dict[str, Any], weights: Any, output: Any, reference: Any, setting: Setting
) -> JudgedKernel:
    x = _coded(given, setting.activation) if "codes" in given else given.get("x")
    known = {"codes", "block_scale", "tensor_scale"} if "codes" in given else {"x"}
    for name in given:
        if name not in known:
            raise UnknownName.among("input", name, known)
    named = weights if isinstance(weights, dict) else {"w": weights}
    for name in named:
        if name not in {"w", "bias"}:
            raise UnknownName.among("weight", name, ("w", "bias"))
    dtype = output.dtype if isinstance(output, torch.Tensor) else torch.bfloat16
    require_output("output", output, tuple(getattr(output, "shape", ())))
    product = Product.from_operands(x, named.get("w"), dtype, named.get("bias"))
    stated = setting.conventions.get(OPERANDS)
    if stated is not None:
        return judge_product("gemm", replace(product, operands=stated), output, reference)
    judged = judge_product("gemm", product, output, reference)
    if judged.follows is None:
        return judged
    # With a single kernel no other component can contradict the learned convention.
    learned = judge_product("gemm", replace(product, operands=judged.follows), output, reference)
    note = f"{REGISTRY[OPERANDS].words(judged.follows)} (learned)"
    return replace(learned, note=note)


def _coded(given: dict[str, Any], activation: str) -> QuantisedTensor:
    """Wrap codes and scales as components receive them: linear, low nibble even, decode scales."""
    form = block_format(activation)
    codes, scale = given["codes"], given.get("tensor_scale")
    if not isinstance(codes, torch.Tensor) or not codes.ndim or "block_scale" not in given:
        raise InvalidArgument(
            "inputs", sorted(given), "codes and block_scale", "Pass both, as tensors."
        )
    if scale is not None and not isinstance(scale, torch.Tensor):
        raise InvalidArgument(
            "tensor_scale", type(scale).__name__, "a tensor in float32", "torch.tensor(scale)."
        )
    block_scale, width = given["block_scale"], codes.shape[-1] * (2 if form.packed else 1)
    if scale is not None and scale.ndim:
        # A tensor scale per token: each row becomes a tensor of one row [M, 1, K].
        codes, block_scale = codes.unsqueeze(-2), block_scale.unsqueeze(-2)
    return QuantisedTensor(
        codes=codes,
        block_scale=block_scale,
        tensor_scale=scale,
        format=form,
        dialect=CANONICAL,
        layout=LINEAR,
        direction=None if scale is None else ScaleDirection.DECODE,
        nibble_order=NibbleOrder.LOW_EVEN if form.packed else None,
        shape=(*codes.shape[:-1], width),
    )
