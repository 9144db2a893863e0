"""Judge one matrix product against exact arithmetic on the same operands, and search its cause.

The judgement is two-sided: beyond the budget of its twin, or nearer to the product of unquantised
operands than the format allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.engine.budget.budget import (
    OutputResult,
    ResultBasis,
    judge,
    nearer_than_the_twin,
)
from degarble.harness.engine.conventions.learned import LEANS
from degarble.harness.engine.conventions.registry import OPERANDS, REGISTRY
from degarble.harness.engine.diagnose.judge.bare import BareCall, product_causes
from degarble.harness.engine.diagnose.judge.product import (
    OUTPUTS,
    MatrixOperand,
    Product,
    excess_of,
    require_data,
)
from degarble.harness.engine.diagnose.judge.report import (
    Causes,
    JudgedKernel,
    census_of,
    elements_of,
)
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Search = Callable[[BareCall, Mapping[str, Tensor]], Causes]

OUT = "out"
_FLOOR = 1e-3  # of a column's largest result, so that no result counts without bound
_ROWS = 8  # below that, a vector explains too much
_ONE_VECTOR = (
    "the same vector is added to every row, as a bias is; if the kernel adds one, pass weights as "
    '{"w": w, "bias": bias}'
)


def judge_product(
    name: str,
    product: Product,
    output: Any,
    reference: Any = None,
    search: Search | None = product_causes,
) -> JudgedKernel:
    """Judge a kernel's output of a product; `reference` as in harness.api.judge."""
    operands, target = _reference(reference, product)
    candidate = require_output(OUT, output, product.shape)
    if candidate.dtype is not product.dtype:
        product = replace(product, dtype=candidate.dtype)
    rows = candidate.reshape(-1, candidate.shape[-1]).contiguous()
    twin = product.expected
    result = judge(rows, twin, product.budget, output=OUT)
    too_good = None
    if operands:
        target = Product(
            operands.get("x", product.x), operands.get("w", product.w), product.dtype, product.bias
        ).expected
    if target is not None:
        too_good = nearer_than_the_twin(result, rows, twin, target)
    verdict = result.verdict
    if too_good is not None and too_good.ratio > 1:
        verdict = Verdict.DIFFERS
    if verdict is Verdict.AGREES:
        return JudgedKernel(name, verdict, {OUT: result}, too_good=too_good)
    causes = Causes()
    note, kind = "", followed_by(product, rows, result) if search else None
    if kind is not None:
        note = f"{REGISTRY[OPERANDS].words(kind)}: a convention ({OPERANDS}={kind}), not declared"
    elif search:
        plain = {key: operand.values for key, operand in operands.items()}
        causes = search(BareCall(name, product, rows), plain)
        if not causes.named and causes.described is None and adds_one_vector(product, rows):
            causes, note = Causes(), _ONE_VECTOR
    census = census_of(candidate)
    return JudgedKernel(
        name, verdict, {OUT: result},
        {OUT: elements_of(rows, twin, excess_of(rows, twin, product.budget))},
        {OUT: census} if census else {}, causes,
        too_good if too_good is not None and too_good.ratio > 1 else None, note, kind,
    )  # fmt: skip


def followed_by(product: Product, rows: Tensor, result: OutputResult) -> DecodedOperands | None:
    """Return the convention of decoded operands that a differing product follows, or None.

    It has to be clearly nearer as well: a wider budget explains nothing.
    """
    if product.operands is not DecodedOperands.EXACT or result.verdict is Verdict.AGREES:
        return None
    kinds = [DecodedOperands.WEIGHTS] if product.w.quantised is not None else []
    if product.x.quantised is not None:
        kinds.append(DecodedOperands.BOTH)
    for kind in kinds:
        other = replace(product, operands=kind)
        judged = judge(rows, other.expected, other.budget)
        nearer = LEANS * judged.distance < result.distance
        if judged.verdict is Verdict.AGREES and nearer:
            return kind
    return None


def adds_one_vector(product: Product, rows: Tensor) -> bool:
    """Tell whether the same vector, added to every row, gives the output of a bare product."""
    if product.bias is not None or len(rows) < _ROWS or not bool(rows.isfinite().all()):
        return False
    exact = rows.double()
    trust = (exact.abs() + _FLOOR * exact.abs().amax(0)) ** -2  # small results are rounded least
    fine = replace(product, dtype=torch.float32).expected.double()
    vector = (trust * (exact - fine)).sum(0) / trust.sum(0)
    biased = replace(product, bias=vector.nan_to_num().float())
    return judge(rows, biased.expected, biased.budget).verdict is Verdict.AGREES


def agrees_at_once(name: str, product: Product, output: Tensor) -> JudgedKernel | None:
    """Return agreement if the candidate equals this machine's own float32 product bit for bit.

    A float32 product is correct in any order of its sum, so nothing is left to judge. None
    otherwise, which proves nothing.
    """
    rows = output.reshape(-1, output.shape[-1])
    plain = product.plain()
    if plain.dtype is not rows.dtype or not torch.equal(plain, rows):
        return None
    words = "bit for bit the float32 product of the same operands on this machine"
    basis = ResultBasis(derivation=(words,))
    judged = OutputResult(OUT, Verdict.AGREES, reasons=lambda: basis)
    return JudgedKernel(name, Verdict.AGREES, {OUT: judged}, note=words)


def require_output(name: str, output: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the output on the CPU; raise if it is no output of this shape."""
    if not isinstance(output, torch.Tensor):
        raise InvalidArgument(
            name, type(output).__name__, "the tensor that the kernel returned", "Pass its output."
        )
    if output.dtype not in OUTPUTS:
        raise DtypeMismatch(
            name, output.dtype, "bfloat16, float16 or float32",
            "Pass what the kernel wrote, in the format in which it was written.",
        )  # fmt: skip
    if tuple(output.shape) != shape:
        raise ShapeMismatch(
            name, tuple(output.shape), str(shape), "Check which operands belong to this output."
        )
    require_data(name, output)
    return output.detach().cpu()


def _reference(given: Any, product: Product) -> tuple[dict[str, MatrixOperand], Tensor | None]:
    """Return unquantised operands by name, or their output."""
    if given is None:
        return {}, None
    if isinstance(given, torch.Tensor):
        target = require_output("reference", given, product.shape)
        return {}, target.reshape(-1, target.shape[-1])
    if not isinstance(given, dict):
        raise InvalidArgument(
            "reference", type(given).__name__, "operands by name, or the output that they give",
            "Pass {'x': x, 'w': w} as they were before they were quantised.",
        )  # fmt: skip
    operands = {}
    for name, each in given.items():
        if name not in {"x", "w"}:
            raise UnknownName.among("reference", name, ("x", "w"))
        own: MatrixOperand = getattr(product, name)
        operand = MatrixOperand.from_value(f"reference {name}", each)
        if operand.values.shape != own.values.shape or operand.quantised is not None:
            raise ShapeMismatch(
                f"reference {name}", tuple(operand.values.shape), str(tuple(own.values.shape)),
                "Pass the operand as it was before it was quantised.",
            )  # fmt: skip
        operands[name] = operand
    return operands, None
