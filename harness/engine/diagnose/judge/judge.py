"""`judge`: compare one kernel call with exact arithmetic on the same operands; no checkpoint.

A component is a bare operation ("gemm", "rmsnorm", "swiglu", "quantise_nvfp4"), a role or full name
of an architecture whose config is given, or a callable that is the definition itself. The answer is
two-sided: beyond the budget of the twin, or nearer to the unquantised reference than the twin can
be. A difference is explained by reproduction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.engine.conventions.learned import LEANS
from degarble.harness.engine.conventions.registry import OPERANDS, REGISTRY, read_conventions
from degarble.harness.engine.diagnose.judge.components import judge_component
from degarble.harness.engine.diagnose.judge.gemm import judge_product, require_output
from degarble.harness.engine.diagnose.judge.operations import (
    by_callable,
    judge_defined,
    judge_quantised,
    rms_norm,
    swiglu,
)
from degarble.harness.engine.diagnose.judge.product import Product
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection, block_format
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.harness.model.config.config import Config
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from degarble.harness.engine.diagnose.judge.operations import Defined
    from degarble.harness.engine.diagnose.judge.report import JudgedKernel
    from degarble.harness.model.recipes import Recipe

OPERATIONS = ("gemm", "rmsnorm", "swiglu", "quantise_nvfp4")


@dataclass(frozen=True)
class Setting:
    """Facts that operands do not contain; an operation ignores those that it does not use.

    `config` and `recipe` belong to a model's component; `activation` is the format of inputs that
    arrive as codes; `epsilon` belongs to a norm; `limit` is the clamp of a SwiGLU; `conventions`
    are what the kernel follows where correct implementations differ (docs/checking.md).
    """

    config: Config | None = None
    recipe: Recipe | str | None = None
    activation: str = NVFP4.name
    epsilon: float = 1e-6
    limit: float | None = None
    conventions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stated = read_conventions(self.conventions, "of the setting")
        object.__setattr__(self, "conventions", MappingProxyType(stated))
        if self.config is not None and not isinstance(self.config, Config):
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


def judge(
    component: Any,
    inputs: Any,
    weights: Any,
    output: Any,
    *,
    reference: Any = None,
    setting: Setting | None = None,
) -> JudgedKernel:
    """Judge a kernel call; `reference`: unquantised operands by name, or their output."""
    how = Setting() if setting is None else setting
    if not isinstance(how, Setting):
        raise InvalidArgument("setting", type(how).__name__, "a Setting", "Name its facts.")
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
    name: str, make: Callable[..., Defined], output: Any, how: Setting, convention: str
) -> JudgedKernel:
    """Judge by the declared convention; else without rounding in between, then with it."""
    stated = how.conventions.get(convention)
    if stated is not None:
        return judge_defined(name, make(in_steps=stated), output)
    judged = judge_defined(name, make(), output)
    if judged.verdict is not Verdict.DIFFERS:
        return judged
    other = judge_defined(name, make(in_steps=True), output)
    # A wider budget alone is no evidence: the distance has to shrink clearly as well.
    if other.verdict is Verdict.AGREES and LEANS * other.distance < judged.distance:
        return replace(other, note=f"{REGISTRY[convention].words(value=True)} (learned)")
    return judged


def _by_name(inputs: Any) -> dict[str, Any]:
    return dict(inputs) if isinstance(inputs, dict) else {"x": inputs}


def _gemm(
    given: dict[str, Any], weights: Any, output: Any, reference: Any, how: Setting
) -> JudgedKernel:
    x = _coded(given, how.activation) if "codes" in given else given.get("x")
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
    product = Product.of(x, named.get("w"), dtype, named.get("bias"))
    stated = how.conventions.get(OPERANDS)
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
