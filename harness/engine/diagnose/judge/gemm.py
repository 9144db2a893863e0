"""Judge one matrix product against exact arithmetic on the same operands, and name its cause.

The judgement is two-sided: beyond the budget of its twin, or nearer to the product of unquantised
operands than the twin, which is a silent fallback. A cause is named when its reproduction is within
its own budget everywhere; a few rows and columns are tried first, since they reject nearly all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.engine.budget.budget import judge, nearer_than_the_twin
from degarble.harness.engine.conventions.learned import LEANS
from degarble.harness.engine.conventions.registry import OPERANDS, REGISTRY
from degarble.harness.engine.diagnose.judge.fits import fits_of
from degarble.harness.engine.diagnose.judge.mismatch import Wrong
from degarble.harness.engine.diagnose.judge.product import OUTPUTS, Operand, Product, require_data
from degarble.harness.engine.diagnose.judge.report import (
    JudgedKernel,
    Named,
    OneOutput,
    census_of,
    elements_of,
    judged_numbers,
)
from degarble.harness.engine.diagnose.judge.variants import ways_of
from degarble.harness.report.number_text import share
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import BudgetResult
    from degarble.harness.engine.diagnose.judge.mismatch import Explanation

OUT = "out"


def judge_product(
    name: str, product: Product, output: Any, reference: Any = None, *, explain: bool = True
) -> JudgedKernel:
    """Judge a kernel's output of a product; `reference` as in harness.api.judge."""
    operands, target = _reference(reference, product)
    candidate = require_output(OUT, output, product.shape)
    if candidate.dtype is not product.dtype:
        product = replace(product, dtype=candidate.dtype)
    rows = candidate.reshape(-1, candidate.shape[-1]).contiguous()
    wrong = Wrong(product, rows, product.exact, product.expected, product.budget)
    found = judge(rows, wrong.twin, wrong.budget)
    judged = judged_numbers(OUT, found)
    too_good = None
    if operands:
        target = Product(
            operands.get("x", product.x), operands.get("w", product.w), product.dtype, product.bias
        ).expected
    if target is not None:
        too_good = nearer_than_the_twin(found, rows, wrong.twin, target)
    verdict = found.verdict
    if too_good is not None and too_good.ratio > 1:
        verdict = Verdict.DIFFERS
    if verdict is Verdict.AGREES:
        return JudgedKernel(name, verdict, {OUT: judged}, too_good=too_good)
    named: tuple[Named, ...] = ()
    tried: tuple[str, ...] = ()
    note, kind = "", followed_by(product, rows, found) if explain else None
    if kind is not None:
        note = f"{REGISTRY[OPERANDS].words(kind)}: a convention ({OPERANDS}={kind}), not declared"
    elif explain:
        named, tried = explanations(wrong, {key: each.values for key, each in operands.items()})
    census = census_of(candidate)
    return JudgedKernel(
        name, verdict, {OUT: judged}, {OUT: elements_of(rows, wrong.twin, wrong.excess)},
        {OUT: census} if census else {}, named, tried,
        too_good if too_good is not None and too_good.ratio > 1 else None, note, kind,
    )  # fmt: skip


def followed_by(product: Product, rows: Tensor, found: BudgetResult) -> DecodedOperands | None:
    """Return the convention of decoded operands that a differing product follows, or None.

    It has to be clearly nearer as well: a wider budget explains nothing.
    """
    if product.operands is not DecodedOperands.EXACT or found.verdict is Verdict.AGREES:
        return None
    kinds = [DecodedOperands.WEIGHTS] if product.w.quantised is not None else []
    if product.x.quantised is not None:
        kinds.append(DecodedOperands.BOTH)
    for kind in kinds:
        other = replace(product, operands=kind)
        judged = judge(rows, other.expected, other.budget)
        nearer = LEANS * float(judged.comparison.total.dd) < float(found.comparison.total.dd)
        if judged.verdict is Verdict.AGREES and nearer:
            return kind
    return None


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
    judged = OneOutput(OUT, Verdict.AGREES, derivation=(words,))
    return JudgedKernel(name, Verdict.AGREES, {OUT: judged}, note=words)


def explanations(
    wrong: Wrong, reference: Mapping[str, Tensor]
) -> tuple[tuple[Named, ...], tuple[str, ...]]:
    """Return the causes that reproduce a candidate, the likeliest first, and all faults tried."""
    tried, found = [], []
    for each in (*fits_of(wrong), *ways_of(wrong, reference)):
        tried.append(each.fault)
        if not _survives(wrong, each):
            continue
        made = each.make(None)
        judgement = judge(wrong.candidate, made.output, made.budget)
        if judgement.verdict is Verdict.AGREES:
            found.append((each, judgement))
    # Explanations without a fitted parameter come first.
    found.sort(key=lambda pair: (pair[0].rank, pair[1].worst.ratio))
    named: dict[str, Named] = {}
    for each, judgement in found:
        named.setdefault(each.fault, _named(each, judgement))
    return tuple(named.values()), tuple(dict.fromkeys(tried))


def _survives(wrong: Wrong, explanation: Explanation) -> bool:
    """Tell whether an explanation holds on a few rows and columns."""
    part = wrong.sample
    made = explanation.make(part)
    # The explanation changes nothing here, though something is wrong here.
    if torch.equal(made.output, part.of(wrong.twin)) and bool(part.of(wrong.beyond).any()):
        return False
    return judge(part.of(wrong.candidate), made.output, made.budget).verdict is Verdict.AGREES


def _named(explanation: Explanation, judgement: BudgetResult) -> Named:
    equal = share(judgement.comparison.identical)
    evidence = f"{explanation.words} reproduces {equal} of the codes, and all within the budget"
    return Named(explanation.fault, explanation.title, evidence, judgement.worst.ratio)


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


def _reference(given: Any, product: Product) -> tuple[dict[str, Operand], Tensor | None]:
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
        own: Operand = getattr(product, name)
        operand = Operand.of(f"reference {name}", each)
        if operand.values.shape != own.values.shape or operand.quantised is not None:
            raise ShapeMismatch(
                f"reference {name}", tuple(operand.values.shape), str(tuple(own.values.shape)),
                "Pass the operand as it was before it was quantised.",
            )  # fmt: skip
        operands[name] = operand
    return operands, None
