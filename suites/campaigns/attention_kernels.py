"""Random legal kernels of attention on random inputs agree; gains and coarse exponentials differ.

A healthy case is one random kernel on one random call; a planted one adds a gain of all heads, a
gain of one head, or an exponential with a relative error. Planted faults on inputs that cannot
decide (equal logits, few keys) may pass: the table shows the share found by size, and only sizes
that the documents promise, on inputs that can decide, are targets.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.budget.budget import judge
from degarble.harness.engine.budget.roles import budgets_of
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.engine import legal_attention as legal

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.rules import JudgeableCall

NAME = "attention_kernels"
HEALTHY = 4  # cases in five
GAINS = (0.001, 0.002, 0.003, 0.005, 0.01)
SIZES = (2.0**-10, 2.0**-9, 2.0**-8, 2.0**-7)
PROMISED = {"gain of all heads": 0.003, "gain of a head": 0.01, "exponential": 2.0**-8}
DECIDING = ("gauss", "small", "no sinks", "positive values")


def drawn_call(draw: random.Random, seed: int) -> tuple[str, str, JudgeableCall]:
    """Draw a family, inputs and extents; planted cases have enough rows to decide."""
    family, inputs = draw.choice(("v4", "v32", "v32 naive")), draw.choice(legal.INPUTS)
    tokens = draw.choice((1, 3, 24, 64) if seed % (HEALTHY + 1) else (48, 96))
    if family == "v4":
        extents = legal.Extents(
            tokens, draw.choice((2, 8, 16)), draw.choice((64, 128, 512)), draw.choice((1, 4, 40))
        )
        return family, inputs, legal.call_v4(inputs, extents, seed)
    extents = legal.Extents(
        tokens, draw.choice((4, 8)), entries=draw.choice((20, 64, 200)), before=250
    )
    naive = family == "v32 naive"
    return family, inputs, legal.call_v32(inputs, extents, seed, naive=naive)


def drawn_kernel(draw: random.Random) -> legal.Kernel:
    """Draw every choice by itself."""
    kernel = legal.Kernel(
        "drawn", draw.choice((1, 8, 16, 32, 64, 128, 576)), draw.random() < 0.5,
        draw.choice((1, 1, 2, 5, 9)), draw.random() < 0.8,
        draw.choice(("running", "running", "row", "sink", "lazy", "power")), False,
        draw.random() < 0.2, draw.choice(("exact", "approximate")), draw.random() < 0.5,
    )  # fmt: skip
    if draw.random() > 0.15:
        return kernel
    # Who divides first knows the whole row's sum: nothing is in splits there.
    return replace(kernel, splits=1, peak="row", first_divided=True)


def case(seed: int) -> CaseResult:
    """Run the healthy or the planted case of a seed."""
    draw = random.Random(seed)
    family, inputs, call = drawn_call(draw, seed)
    kernel = drawn_kernel(draw)
    budget, twin = budgets_of(call)["out"], call.outputs["out"]

    def ratio(out: Tensor) -> tuple[float, str]:
        worst = judge(out.bfloat16(), twin, budget).findings[0]
        return worst.ratio, str(worst)

    if seed % (HEALTHY + 1):
        measured, words = ratio(legal.ran(call, kernel))
        outcome = "ok" if measured <= 1 else "alarm"
        return CaseResult(seed, f"healthy {family}", outcome, f"{inputs}, {kernel}: {words}")
    fault, size, out = planted(draw, call, kernel)
    measured, words = ratio(out)
    decides = inputs in DECIDING and size >= PROMISED[fault]
    kind = f"{fault}, {size:.4f}, {'decided' if inputs in DECIDING else 'any inputs'}"
    outcome = "ok" if measured > 1 else "missed" if decides else "not found"
    return CaseResult(seed, kind, outcome, f"{family}, {inputs}, {kernel}: {words}")


def planted(
    draw: random.Random, call: JudgeableCall, kernel: legal.Kernel
) -> tuple[str, float, Tensor]:
    """Run a kernel with one fault of a random size."""
    fault = draw.choice(tuple(PROMISED))
    if fault == "exponential":
        size, how = draw.choice(SIZES), draw.choice(legal.COARSE)
        return fault, size, legal.ran(call, kernel, legal.coarse(how, size))
    size, out = draw.choice(GAINS), legal.ran(call, kernel)
    gain = 1 + size * draw.choice((-1, 1))
    if fault == "gain of all heads":
        return fault, size, out * gain
    heads = call.inputs["q"].shape[1]
    by_head = out.reshape(len(out), heads, -1).clone()
    by_head[:, draw.randrange(heads)] *= gain
    return fault, size, by_head.reshape(out.shape)


def main() -> int:
    """Run the campaign; 1 where a healthy kernel alarmed or a promised fault was missed."""
    options = arguments(__doc__.splitlines()[0], count=2500).parse_args()
    return run_campaign(NAME, case, options, wanted=("ok", "not found"))  # that is no promise


if __name__ == "__main__":
    sys.exit(main())
