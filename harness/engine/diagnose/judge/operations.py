"""Define single operations in float64, with their budgets: RMS norm, SwiGLU, NVFP4, callables.

Of a callable no derivation is known, so its budget is measured: how far its output moves when every
input errs by one rounding, times the root of the longest sum that its shapes allow.

Shape letters: T tokens, D width, F half of gate and up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.engine.budget import bounded_values
from degarble.harness.engine.budget.budget import Budget, OutputResult, ResultBasis, judge
from degarble.harness.engine.budget.rules import UNDERFLOW, U, cut_off, few, normed
from degarble.harness.engine.diagnose.judge.bare import BareOperation, operation_causes
from degarble.harness.engine.diagnose.judge.gemm import require_output
from degarble.harness.engine.diagnose.judge.product import MatrixOperand, excess_of, require_finite
from degarble.harness.engine.diagnose.judge.report import (
    Causes,
    JudgedKernel,
    NamedCause,
    census_of,
    elements_of,
)
from degarble.harness.engine.diagnose.packing_diagnosis import diagnose
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict
from degarble.references.traced.graph import StretchKind
from degarble.references.traced.trace import BoundaryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

_SILU_ROUNDINGS = 12  # as in budget/roles.py: exponential and quotient, two products
_RUNS = 8  # runs of a callable with perturbed inputs
_SPREAD = 6  # standard deviations allowed, since so few runs are measured
_OWN = "operation"  # until it is judged under a name
_OPERATIONS = 16  # roundings of the result allowed in addition, for any callable


@dataclass(frozen=True, eq=False)
class Defined:
    """A definition's float64 outputs by name, the function that builds each budget, and its own."""

    outputs: Mapping[str, Tensor]
    budget: Callable[[str, Tensor], Budget]  # name, and the output rounded once
    operation: BareOperation


def judge_defined(name: str, defined: Defined, output: Any, *, search: bool = True) -> JudgedKernel:
    """Judge outputs against a definition, and search what explains a difference."""
    given = dict(output) if isinstance(output, dict) else {next(iter(defined.outputs)): output}
    if set(given) != set(defined.outputs):
        raise UnknownName.among("output", sorted(given), defined.outputs)
    outputs, elements, census = {}, {}, {}
    for key, exact in defined.outputs.items():
        candidate = require_output(key, given[key], tuple(exact.shape))
        twin = exact.to(candidate.dtype)
        budget = defined.budget(key, twin)
        result = outputs[key] = judge(candidate, twin, budget, output=key)
        if result.verdict is Verdict.DIFFERS:
            elements[key] = elements_of(candidate, twin, excess_of(candidate, twin, budget))
            if census_of(candidate):
                census[key] = census_of(candidate)
    differs = any(output_result.verdict is Verdict.DIFFERS for output_result in outputs.values())
    verdict = Verdict.DIFFERS if differs else Verdict.AGREES
    causes = Causes()
    if differs and search:
        seen = {key: each.detach().cpu() for key, each in given.items()}
        causes = operation_causes(defined.operation._replace(name=name), seen)
    return JudgedKernel(name, verdict, outputs, elements, census, causes)


def rms_norm(
    inputs: Mapping[str, Any], weights: Any, epsilon: float, *, in_steps: bool = False
) -> Defined:
    """Define `w * x / sqrt(mean(x^2) + epsilon)`; w is 1 if no weight is given.

    `in_steps` rounds rows to the format of x before the weight is applied, as Llama's norm does.
    """
    given = _plain("x", _taken(inputs, "x"))
    x, stored_in = given.double(), given.dtype if in_steps else None
    weight = torch.ones(x.shape[-1]) if weights is None else _lone("weight", weights)
    if tuple(weight.shape) != x.shape[-1:]:
        raise ShapeMismatch("weight", tuple(weight.shape), f"({x.shape[-1]},)", "One a feature.")
    w, width = weight.double().cpu(), x.shape[-1]
    mean = x.square().mean(-1, keepdim=True)
    normal = x * torch.rsqrt(mean + epsilon)

    def function(given: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = given["x"]
        root = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
        return {"out": rows * root * parameters["weight"]}

    def budget(_name: str, twin: Tensor) -> Budget:
        fmt = FORMAT_OF_DTYPE[twin.dtype]
        if stored_in is None:
            return normed(twin, width, fmt, weight=w)
        near = bounded_values.bounded_norm(bounded_values.exactly(x), w, epsilon, stored_in)
        return Budget(fmt, near.error, (f"RMS norm of {width}, stored in front of the weight",))

    kept = normal if stored_in is None else normal.to(stored_in).double()
    operation = BareOperation(_OWN, BoundaryKind.NORM, function, {"x": x}, {"weight": w})
    return Defined({"out": kept * w}, budget, operation)


def swiglu(inputs: Mapping[str, Any], limit: float | None, *, in_steps: bool = False) -> Defined:
    """Define SiLU(gate) * up; both in `x`, gate first, or separate; clamped first by `limit`.

    `in_steps` rounds SiLU to the format of x before the product.
    """
    if set(inputs) == {"x"}:
        x = _plain("x", inputs["x"])
        if x.shape[-1] % 2:
            raise ShapeMismatch("x", tuple(x.shape), "[..., 2 F]: gate and up", "Pass both apart.")
        gate, up = x.chunk(2, -1)
    else:
        gate, up = (_plain(n, each) for n, each in _both(inputs).items())
    kept = gate.dtype if in_steps else None
    gate, up = gate.double(), up.double()
    if gate.shape != up.shape:
        raise ShapeMismatch("up", tuple(up.shape), str(tuple(gate.shape)), "One up a gate.")
    silu = torch.nn.functional.silu
    own: Mapping[str, Any] = {"gate": gate, "up": up}
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    passed = silu(gate) if kept is None else silu(gate).to(kept).double()
    out = passed * up

    def function(given: Mapping[str, Any], _parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        one, other = given["gate"], given["up"]
        if limit is not None:
            one, other = one.clamp(max=limit), other.clamp(min=-limit, max=limit)
        return {"out": silu(one) * other}

    def budget(_name: str, twin: Tensor) -> Budget:
        grown = twin.abs() * (1 + 2 * gate.abs().float() / _SILU_ROUNDINGS)
        made = few(grown, _SILU_ROUNDINGS, FORMAT_OF_DTYPE[twin.dtype], "SwiGLU")
        end = cut_off(torch.sigmoid(gate)) * (gate * up).abs() + UNDERFLOW
        if kept is not None:
            error = silu(gate).abs() * (1 + 2 * gate.abs()) * (_SILU_ROUNDINGS * U)
            near = bounded_values.stored(bounded_values.BoundedValue(silu(gate), error), kept)
            end = end + near.error * up.abs()
        return replace(made, slack=made.slack + end)

    operation = BareOperation(_OWN, StretchKind.GATED, function, own, {})
    return Defined({"out": out}, budget, operation)


def judge_quantised(inputs: Mapping[str, Any], output: Any) -> JudgedKernel:
    """Judge codes and scales against their source; causes by reproduction."""
    source = _plain("x", _taken(inputs, "x"))
    if not isinstance(output, QuantisedTensor) or output.format != NVFP4:
        raise InvalidArgument(
            "output", type(output).__name__, "a QuantisedTensor in NVFP4",
            "Say how the bytes are read: dialect, layout, direction, nibble order and shape.",
        )  # fmt: skip
    diagnosis = diagnose(source if source.dtype is not torch.float64 else source.float(), output)
    named = tuple(
        NamedCause(cause.fault.id, cause.fault.title, cause.match.evidence, 0.0)
        for cause in diagnosis.causes
    )
    tried = tuple(name for unexplained in diagnosis.unexplained for name, _ in unexplained.excluded)
    words = [cause.difference.sentence for cause in diagnosis.causes]
    words += [unexplained.difference.sentence for unexplained in diagnosis.unexplained]
    basis = ResultBasis(derivation=("codes and scales as the dialect rounds",))
    judged = OutputResult("out", diagnosis.verdict, reasons=lambda: basis)
    return JudgedKernel(
        "quantise_nvfp4", diagnosis.verdict, {"out": judged}, {},
        {"out": " ".join(words)} if words else {}, Causes(named, tried), note=diagnosis.sentence,
    )  # fmt: skip


def by_callable(definition: Callable[..., Any], inputs: Any, weights: Any) -> Defined:
    """Use a callable as the exact definition: run it in float64 and measure its budget."""
    given, named = _arguments(inputs, weights)
    exact = _run(definition, given, named, torch.float64)
    shown = _run(definition, given, named, torch.float32)
    for key, out in exact.items():
        require_finite(f"definition's {key}", out)
    length = max((each.shape[-1] for each in (*given, *named.values()) if _is_number(each)
                  and each.ndim), default=1)  # fmt: skip
    squares = {key: (shown[key].double() - out).square() for key, out in exact.items()}
    for seed in range(_RUNS):
        moved = _run(definition, *_moved(given, named, seed, math.sqrt(length)), torch.float64)
        for key, out in exact.items():
            squares[key] = squares[key] + (moved[key] - out).square()

    def budget(key: str, twin: Tensor) -> Budget:
        error = (squares[key] / (_RUNS + 1)).sqrt()
        slack = _SPREAD * error + _OPERATIONS * U * exact[key].abs()
        words = (
            f"measured, not derived: {_RUNS} runs with inputs that err by u sqrt({length})",
            f"u = 2^-24 = {number(U)}",
            f"slack = {_SPREAD} deviations, and {_OPERATIONS} u of the result",
            f"and one rounding to {FORMAT_OF_DTYPE[twin.dtype].name}",
        )
        return Budget(FORMAT_OF_DTYPE[twin.dtype], slack.float(), words)

    inputs_by_name = {f"x{number or ''}": each for number, each in enumerate(given)} | named

    def function(known: Mapping[str, Any], _parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rest = dict(known)
        first = [rest.pop(f"x{number or ''}") for number in range(len(given))]
        made = definition(*first, **rest)
        return dict(made) if isinstance(made, dict) else {"out": made}

    operation = BareOperation(_OWN, BoundaryKind.MODULE, function, inputs_by_name, {})
    return Defined(exact, budget, operation)


def _arguments(inputs: Any, weights: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a callable: by name where names were given, else in order."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    for held in (inputs, weights):
        if held is None:
            continue
        if isinstance(held, dict):
            named |= {key: _value(each) for key, each in held.items()}
        else:
            given += [
                _value(each) for each in (held if isinstance(held, (tuple, list)) else [held])
            ]
    for key, each in (*enumerate(given), *named.items()):
        if _is_number(each):
            require_finite(f"argument {key}", each)
    return given, named


def _value(held: Any) -> Any:
    """Decode quantised values; return everything else unchanged."""
    if isinstance(held, (Weight, QuantisedTensor)):
        return MatrixOperand.from_value("argument", held).values
    return held


def _is_number(held: Any) -> bool:
    return isinstance(held, torch.Tensor) and held.dtype.is_floating_point


def _moved(
    given: list[Any], named: dict[str, Any], seed: int, times: float
) -> tuple[list[Any], dict[str, Any]]:
    """Perturb arguments by one float32 rounding, scaled up for long sums."""
    generator = torch.Generator().manual_seed(seed)

    def move(each: Any) -> Any:
        if not _is_number(each):
            return each
        # Random signs: each input errs by +u or -u, times `times`.
        sign = torch.randint(0, 2, each.shape, generator=generator) * 2 - 1
        return each.double().cpu() * (1 + U * times * sign)

    return [move(each) for each in given], {key: move(each) for key, each in named.items()}


def _run(
    definition: Callable[..., Any], given: list[Any], named: dict[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    def cast(each: Any) -> Any:
        return each.detach().cpu().to(dtype) if _is_number(each) else each

    name = getattr(definition, "__name__", type(definition).__name__)
    try:
        with torch.no_grad():
            made = definition(*map(cast, given), **{key: cast(e) for key, e in named.items()})
    except Exception as error:
        raise InvalidArgument(
            f"definition {name}", f"{type(error).__name__}: {error}",
            f"a callable that takes these inputs in {str(dtype).removeprefix('torch.')}",
            "Let it compute in the dtype of its inputs, and check their names.",
        ) from error  # fmt: skip
    found = made if isinstance(made, dict) else {"out": made}
    for key, each in found.items():
        if not _is_number(each):
            raise InvalidArgument(
                f"definition {name}: {key}", type(each).__name__, "a tensor of numbers",
                "Return one tensor, or a dict of them.",
            )  # fmt: skip
    return found


def _taken(inputs: Mapping[str, Any], *names: str) -> Any:
    for name in inputs:
        if name not in names:
            raise UnknownName.among("input", name, names)
    if set(inputs) != set(names):
        raise InvalidArgument("inputs", sorted(inputs), " and ".join(names), "Pass them by name.")
    return inputs[names[0]]


def _both(inputs: Mapping[str, Any]) -> dict[str, Any]:
    _taken(inputs, "gate", "up")
    return {"gate": inputs["gate"], "up": inputs["up"]}


def _plain(name: str, held: Any) -> Tensor:
    """Return a tensor of finite numbers with at least two extents."""
    return MatrixOperand.from_value(name, held).values.reshape(held.shape)


def _lone(name: str, held: Any) -> Tensor:
    """Return a vector, given alone or as the only entry of a mapping."""
    if isinstance(held, dict):
        (held,) = held.values() if len(held) == 1 else (None,)
    if isinstance(held, Weight) and not held.is_quantised:
        held = held.value
    if not _is_number(held):
        raise InvalidArgument(
            name, type(held).__name__, "one tensor of numbers", "Pass the weight alone."
        )
    require_finite(name, held)
    vector: Tensor = held
    return vector
