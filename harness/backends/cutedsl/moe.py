"""Launch the steps of kernels/moe/sm90_moe_nvfp4.py one by one, so that each has a component.

Steps: the order of rows, the quantised rows, FC1 as shipped, FC1 that also stores gate and up, FC2,
the sum. Each is the same launch as in the whole call, on one workspace, in the same order.

Shape letters: T tokens, K chosen, S slots, R rows at most, E experts visited, D hidden, F width.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.kernels.moe import problem as facts
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import SM90A, target_of_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.kernels.moe.problem import MoeProblem
    from degarble.kernels.runtime.compiling import CompileSettings

    Given = Mapping[str, Tensor | None]

KERNELS = "sm90_moe_nvfp4"  # owns the products
ROWS = "simt_moe_rows"  # owns what is around them
ORDER, GATHER, SHOWN, FIRST, SECOND, SUM, TOTAL = (
    "order of rows", "rows quantised", "FC1, gate and up shown", "FC1", "FC2", "sum of slots",
    "sum of slots and shared expert",
)  # fmt: skip
AROUND = frozenset({ORDER, GATHER, SUM, TOTAL})  # what is not a product
PLAN = ("rows", "counts", "tiles", "slots", "places")
CODES = ("x_codes", "x_scales", "hidden_codes", "hidden_scales")


class Step(NamedTuple):
    """One step of a call."""

    name: str
    problem: MoeProblem


def tactic(step: Step, target: str) -> str:
    """Return the tile configuration of a step."""
    p = step.problem
    if step.name in {SUM, TOTAL}:
        return f"{step.name}, weights {p.weighting}"
    cut = facts.choose_tactic(p, target)
    if step.name in {ORDER, GATHER}:
        return f"{step.name}, tiles of {cut.rows}"
    return f"{step.name}, {cut.rows}x{cut.columns}x{cut.inner}, {p.experts} of {p.routed} experts"


def empty_space(problem: MoeProblem, device: torch.device) -> dict[str, Tensor]:
    """Allocate the workspace between the steps."""
    cut = facts.choose_tactic(problem, SM90A.name)
    most, d, f = facts.most_rows(problem, cut), problem.hidden, problem.width
    counts = facts.plan_sizes(problem, cut)
    made = {
        name: torch.empty(count, dtype=torch.int32, device=device)
        for name, count in zip(PLAN, counts, strict=True)
    }
    for name, width in (("x", d), ("hidden", f)):
        size = facts.scale_bytes(most, width)
        made[f"{name}_codes"] = torch.empty(most, width // 2, dtype=torch.uint8, device=device)
        made[f"{name}_scales"] = torch.empty(size, dtype=torch.uint8, device=device)
    return made | {"out": torch.empty(most, d, dtype=torch.bfloat16, device=device)}


def launched(module: Any, step: Step, settings: CompileSettings, t: Given) -> Any:
    """Launch a step; return its outputs."""
    del module
    rows, kernels = (import_module(module_of(name)) for name in (ROWS, KERNELS))
    if step.name in {SUM, TOTAL}:
        return _sum(rows, step.problem, settings, t)
    job = kernels.job_of(step.problem, settings)
    plan = rows.RowPlan(*(t[name] for name in PLAN)) if "places" in t else None
    if step.name == ORDER:
        if step.problem.tokens:
            rows.plan(job, t["experts"], t["local"], plan)
        return tuple(t[name] for name in PLAN)
    if step.name == GATHER:
        x = rows.Nvfp4Rows(t["x_codes"], t["x_scales"])
        if step.problem.tokens:
            rows.gather(job, t["x"], t["input_scale"], plan, x)
        return tuple(x)
    return _product(kernels, rows, job, (step, plan), t)


def _sum(rows: Any, p: MoeProblem, settings: CompileSettings, t: Given) -> Any:
    """Launch the sum of every token's slots, and of the shared expert if given."""
    given, target = t["rows"], target_of_device().name
    job = rows.MoeJob(p, facts.choose_tactic(p, target), target, settings)
    assert given is not None, "the pairing hands over rows"
    shared = t.get("shared")
    dtype = torch.float32 if shared is None else torch.bfloat16
    out = torch.empty(p.tokens, p.hidden, dtype=dtype, device=given.device)
    if p.tokens:
        rows.combine(job, rows.Sum(given, t["places"], t["weights"], shared, out))
    return out


def _product(kernels: Any, rows: Any, job: Any, told: tuple[Step, Any], t: Given) -> Any:
    """Launch FC1, with or without storing its sums, or FC2."""
    step, plan = told
    first, second = facts.forms_of(job.problem, job.target, job.tactic)
    weights = kernels.ExpertWeights(*(t[n] for n in ("codes", "scales", "decode", "input_scale")))
    is_first = step.name != SECOND
    leading = (job.problem.experts, facts.GATE_AND_UP)[: 1 + is_first]
    kernels.require_weights("w13" if is_first else "w2", weights, job.problem, leading)
    x, hidden = (
        rows.Nvfp4Rows(t[f"{name}_codes"], t[f"{name}_scales"]) for name in ("x", "hidden")
    )
    if not is_first:
        if job.problem.tokens:
            kernels.multiply_rows(job, second, (hidden, weights, plan), (t["out"],))
        return t["out"]
    leaving: tuple[Any, ...] = (*hidden, t["hidden_scale"], plan.slots, t["weights"])
    made = tuple(hidden)
    if step.name == SHOWN:
        first = replace(first, shown=True)
        shape = (plan.slots.numel(), facts.GATE_AND_UP * job.problem.width)
        both = torch.empty(shape, dtype=torch.bfloat16, device=plan.slots.device)
        leaving, made = (*leaving, both), (both,)
    if job.problem.tokens:
        kernels.multiply_rows(job, first, (x, weights, plan), leaving)
    return made
