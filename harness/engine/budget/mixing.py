"""Error budgets of mHC: the collapsed input, the gates, and the mixing matrix after Sinkhorn.

The error of the coefficients `fn . x` passes through sigmoid and normalisation:

* A coefficient errs by the slack of its product and by the norm factor's share.
* A gate errs by its slope s (1 - s), at most 1/4, times that, and by the exponential's argument.
* The error of the mixing matrix P is, for small errors, that of the logits with row and column
  factors projected out. The projection, weighted by P, lengthens nothing: |dP| <= sqrt(S P) d, and
  also |dP| <= P (2 + 8 g) d. Factors common to a row or column cancel, but for the last ones: each
  later pass leaves the square of the second singular value, at most |P|_F^2 - 1. Hence g = 1 / (2 -
  |P|_F^2), or the number of passes if that is less.

Shape letters: T tokens, S streams, K = S * D, N coefficients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.bounded_values import FUNCTION, Near
from degarble.harness.engine.budget.budget import Budget
from degarble.harness.engine.budget.rules import UNDERFLOW, U, output_format, summed
from degarble.harness.formats.element_formats import FP32
from degarble.harness.report.number_text import number
from degarble.references.facts import V4Facts

if TYPE_CHECKING:
    from degarble.harness.engine.budget.call import Call
    from degarble.references.mixing_facts import MixingFacts

_DIVISION = 2  # in u per pass: an entry's division by its row sum, and by its column sum


def mixed(call: Call) -> dict[str, Budget]:
    """Return budgets of `out`, `post` and `mix`, or of `out` alone where the streams end."""
    facts = call.known_facts
    assert isinstance(facts, V4Facts), "only V4 has streams"
    how, streams = facts.mixing, call.inputs["streams"]
    # Coefficients [T, N]: S of `pre`, S of `post`, then S * S of the mixing matrix.
    m, words = _coefficients(call, how)
    count = how.streams
    gates = _sigmoid(Near(m.value[:, : 2 * count], m.error[:, : 2 * count]))
    pre = gates.value[:, :count] + how.epsilon, gates.error[:, :count] + U
    x = streams.double()
    slack = torch.einsum("ts,tsd->td", pre[1] + (count + 2) * U * pre[0], x.abs())
    named = "sum of streams: errors of the gates, and one rounding a term"
    made = {"out": Budget(output_format(call.outputs["out"]), slack, (*words, named))}
    if "mix" in call.outputs:
        # post = 2 sigmoid(m)
        post = 2 * gates.error[:, count:]
        made["post"] = Budget(output_format(call.outputs["post"]), post, words)
        made["mix"] = _balanced(Near(m.value[:, 2 * count :], m.error[:, 2 * count :]), call, how)
    return made


def _coefficients(call: Call, how: MixingFacts) -> tuple[Near, tuple[str, ...]]:
    """Return scaled products with their errors [T, N], and the derivation in words."""
    by_part = {name.rpartition("_")[2]: weight for name, weight in call.weights.items()}
    fn, base, scale = (by_part[part].values(torch.float32) for part in ("fn", "base", "scale"))
    flat = call.inputs["streams"].flatten(1).float()
    width, count = flat.shape[1], how.streams
    product = summed(flat, fn, FP32)
    wide = flat.double()
    rho = (wide.square().mean(-1, keepdim=True) + how.norm_epsilon).rsqrt()
    factor = scale.double()
    if len(factor) > 1:
        factor = factor.repeat_interleave(torch.tensor([count, count, count * count]))
    scaled = (wide @ fn.double().T) * rho * factor
    error = product.slack.double() * rho * factor.abs()
    error = error + scaled.abs() * ((width / 4 + 8) * U) + 3 * U * (scaled.abs() + base.abs())
    words = (
        *product.derivation[:-1],
        f"norm factor over {width}: {number(width / 4 + 8)} u of the coefficient",
        f"coefficients err by {number(float(error.mean()))} on average",
        f"gates: slope s (1 - s) of that; functions within 2 units ({FUNCTION} u)",
    )
    return Near(scaled + base.double(), error), words


def _sigmoid(m: Near) -> Near:
    value = torch.sigmoid(m.value)
    argument = m.error + (2 * m.value.abs() + FUNCTION) * U
    off = value * (1 - value) * argument + (FUNCTION + 2) * U * value
    return Near(value, off + UNDERFLOW)


def _balanced(logits: Near, call: Call, how: MixingFacts) -> Budget:
    count, mix = how.streams, call.outputs["mix"].double()
    value = logits.value.reshape(-1, count, count)
    spread = (value.amax(-1) - value.amin(-1)).amax(-1) if len(value) else value.new_zeros(0)
    own = logits.error.amax(-1) + U * (2 * spread + FUNCTION + _DIVISION * how.iterations)
    # 1 / g of the module's docstring; g is bounded by the number of passes.
    rest = (2 - mix.square().sum((1, 2))).clamp(min=1 / how.iterations)
    g = (1 / rest).clamp(min=1.0)[:, None, None]
    per_error = torch.minimum((count * mix).sqrt(), mix * (2 + 8 * g))
    common = 2 * (count + 2 + FUNCTION) * U * g * mix
    most = float(g.max()) if g.numel() else 1.0
    words = (
        f"logits err by {number(float(own.mean()))}, divisions of {how.iterations} passes included",
        "normalisation projects row and column factors out: sqrt(S P) or P (2 + 8 g) of that",
        f"factors of the last passes: 2 (S + 2 + {FUNCTION}) u g P, g up to {number(most)}",
    )
    slack = own[:, None, None] * per_error + common
    return Budget(output_format(call.outputs["mix"]), slack, words)
