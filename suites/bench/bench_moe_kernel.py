"""Grouped experts against the plain NVFP4 form, on a Hopper GPU: a script that prints a table.

    python -m degarble.suites.bench.bench_moe_kernel [--rounds N] [--tokens T ...] [--model M]
    python -m degarble.suites.bench.bench_moe_kernel --steps --tokens 1 16 64 256

Arms: both grouped products, each alone and on existing rows; the whole call, from BF16 tokens to
their sum; the plain NVFP4 GEMM on as many rows with one matrix; cuBLAS in BF16 on the first
product; a copy. A rate counts only the work of slots: rows of zeros that fill up tiles are waste.
Choices of experts are drawn evenly. `--steps` times each step in each tactic instead, with the time
that the visited experts' weights take at a copy's bandwidth. Graphs and turns are those of
bench_gemm_kernels. Numbers are compared with the definition by suites/kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError, MissingDevice
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import MoeProblem
from degarble.kernels.runtime.targets import SM90A, target_of_device
from degarble.suites.bench import bench_gemm_kernels as plain
from degarble.suites.bench.bench_quantise_kernel import SETS, Arm, Figure, captured, copy_arm, timed
from degarble.suites.kernels.moe import moe_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from degarble.kernels.gemm.problem import GemmTactic

MODELS = {"V4-Flash": (4096, 2048, 256, 6), "V4-Pro": (7168, 3072, 384, 6)}
TOKENS = (1, 16, 256, 2048, 8192)
JUDGED = ("V4-Flash", 8192)
WANTED = 0.70  # of the plain form's rate, both products together
FC1, FC2, WHOLE = "grouped FC1", "grouped FC2", "whole call"
PLAIN1, PLAIN2 = "plain FC1", "plain FC2"
COPIED = 1 << 30
BYTES_OF_WEIGHT = 9 / 16  # a code, and a scale for sixteen of them


@dataclass(frozen=True)
class Row:
    """One arm, and the operations that it is credited with."""

    figure: Figure
    operations: int

    @property
    def teraflops(self) -> float:
        """Operations a second over the median, in 10**12."""
        return self.operations / self.figure.median * 1e-6

    def line(self) -> str:
        """One line of the table."""
        return f"| {self.figure.arm.name} | {self.figure.median:.1f} | {self.teraflops:.0f} |"


def share(figures: dict[str, Figure], ours: Sequence[str]) -> float:
    """Time of both plain products over that of some arms, the median over rounds."""
    times: list[list[float]] = [
        [sum(each) for each in zip(*(figures[name].microseconds for name in names), strict=True)]
        for names in ((PLAIN1, PLAIN2), ours)
    ]
    theirs, own = times
    return statistics.median(a / b for a, b in zip(theirs, own, strict=True))


def plain_problems(problem: MoeProblem) -> tuple[GemmProblem, GemmProblem]:
    """Return what the plain form computes: as many rows as there are slots, one matrix."""
    shapes = ((2 * problem.width, problem.hidden), (problem.hidden, problem.width))
    first, second = (GemmProblem(problem.slots, n, k, "nvfp4", "e4m3") for n, k in shapes)
    return first, second


def named(name: str, arm: Arm) -> Arm:
    """Return an arm under another name."""
    return Arm(name, arm.bytes_moved, arm.launches, arm.replay, arm.buffers)


def grouped_arms(problem: MoeProblem, tactic: GemmTactic | None = None) -> list[Arm]:
    """Return the arms of both products and of the whole call."""
    kernels = import_module("degarble.kernels.moe.sm90_moe_nvfp4")
    case = checks.Case(problem, "even", 1, tactic)
    job, forms = case.job, facts.forms_of(problem, SM90A.name, case.job.tactic)
    launches: dict[str, list[Callable[[], object]]] = {FC1: [], FC2: [], WHOLE: []}
    for seed in range(SETS):
        given = checks.given_of(checks.Case(problem, "even", seed))
        space = kernels.empty_workspace(job, given.x.device)
        out, (w13, w2) = kernels.empty_output(problem, given), given.weights
        leaving = (*space.hidden, w2.input_scale, space.plan.slots, given.routing.weights)
        first = (job, forms[0], (space.x, w13, space.plan), leaving)
        second = (job, forms[1], (space.hidden, w2, space.plan), (space.out,))
        for name, launch, arguments in (
            (WHOLE, kernels.launch, (job, given, space, out)),
            (FC1, kernels.multiply_rows, first),
            (FC2, kernels.multiply_rows, second),
        ):
            launches[name].append(_later(launch, arguments))
    for launch in launches[WHOLE]:
        launch()  # rows have to be there before a product alone is timed
    return [captured(name, 1, each) for name, each in launches.items()]


def step_arms(problem: MoeProblem, tactics: Sequence[GemmTactic]) -> tuple[list[Arm], float]:
    """Return the arms of all steps in each tactic, and the mean bytes of visited experts."""
    kernels: Any = import_module("degarble.kernels.moe.sm90_moe_nvfp4")
    rows: Any = import_module("degarble.kernels.moe.simt_moe_rows")
    every = [checks.given_of(checks.Case(problem, "even", seed)) for seed in range(SETS)]
    arms = []
    for number, tactic in enumerate(tactics):
        job = checks.Case(problem, "even", 1, tactic).job
        forms = facts.forms_of(problem, SM90A.name, tactic)
        launches: dict[str, list[Callable[[], object]]] = {}

        def add(name: str, launch: Any, *given: Any, to: Any = launches) -> None:
            to.setdefault(name, []).append(_later(launch, given))

        for given in every:
            space = kernels.empty_workspace(job, given.x.device)
            out, (w13, w2) = kernels.empty_output(problem, given), given.weights
            plan, routing = space.plan, given.routing
            leaving = (*space.hidden, w2.input_scale, plan.slots, routing.weights)
            add(WHOLE, kernels.launch, job, given, space, out)
            add("FC1", kernels.multiply_rows, job, forms[0], (space.x, w13, plan), leaving)
            add("FC2", kernels.multiply_rows, job, forms[1], (space.hidden, w2, plan), (space.out,))
            if not number:
                add("order of rows", rows.plan, job, routing.experts, routing.local, plan)
                add("rows quantised", rows.gather, job, given.x, w13.input_scale, plan, space.x)
                summed = rows.Sum(space.out, plan.places, routing.weights, None, out)
                add("sum of slots", rows.combine, job, summed)
        for launch in launches[WHOLE]:
            launch()
        cut = f"{tactic.rows}x{tactic.columns}, {tactic.blocks} a processor"
        arms += [captured(f"{name} in {cut}", 1, each) for name, each in launches.items()]
    visited = statistics.mean(len(given.routing.experts.unique()) for given in every)
    return arms, weight_bytes(problem, visited)


def weight_bytes(problem: MoeProblem, visited: float) -> float:
    """Return the bytes of so many experts' codes and scales."""
    return visited * BYTES_OF_WEIGHT * 3 * problem.hidden * problem.width


def steps(problem: MoeProblem, title: str, rounds: int) -> None:
    """Time every step in every tactic and print them."""
    arms, weights = step_arms(problem, tuple(facts.TILES[SM90A.name].values()))
    *figures, copied = timed([*arms, copy_arm(COPIED // 2)], rounds)  # whole gigabytes go slower
    floor = weights / copied.terabytes_a_second * 1e-6
    _say(f"\n**{title}**: visited experts {weights / 1e9:.2f} GB, {floor:.0f} us of copy\n")
    _say("| step | us |\n|---|---|")
    for figure in figures:
        _say(f"| {figure.arm.name} | {figure.median:.1f} |")


def _later(launch: Callable[..., object], arguments: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: launch(*arguments)


def compare(problem: MoeProblem, title: str, rounds: int) -> float:
    """Time all arms on a problem and print them; return the share of the plain form's rate."""
    first, second = plain_problems(problem)
    arms = grouped_arms(problem)
    arms += [named(PLAIN1, plain.kernel_arm(first)), named(PLAIN2, plain.kernel_arm(second))]
    cublas = plain.cublas_arm(GemmProblem(problem.slots, first.columns, first.inner))
    arms += [named("cuBLAS, BF16, FC1", cublas), copy_arm(COPIED)]
    figures = {figure.arm.name: figure for figure in timed(arms, rounds)}
    operations = dict.fromkeys((FC1, PLAIN1, "cuBLAS, BF16, FC1"), first.operations)
    operations |= dict.fromkeys((FC2, PLAIN2), second.operations)
    operations[WHOLE] = problem.operations
    _say(f"\n**{title}**\n\n| arm | us | TFLOP/s |\n|---|---|---|")
    for name, figure in figures.items():
        if name in operations:
            _say(Row(figure, operations[name]).line())
        else:
            _say(f"| {name} | {figure.median:.1f} | {figure.terabytes_a_second:.2f} TB/s |")
    of_products, of_all = share(figures, (FC1, FC2)), share(figures, (WHOLE,))
    _say(f"\nof the plain form's rate: products {of_products:.3f}, whole call {of_all:.3f}")
    return of_products


def problem_of(model: str, tokens: int) -> MoeProblem:
    """Return a model's layer on one GPU."""
    hidden, width, experts, chosen = MODELS[model]
    return MoeProblem(tokens, hidden, width, experts, chosen, experts, 10.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--model", choices=MODELS, default=None)
    parser.add_argument("--steps", action="store_true")
    settings = parser.parse_args(arguments)
    try:
        target = target_of_device()
        if target is not SM90A:
            raise MissingDevice("target", target.name, SM90A.name, "These forms are Hopper's.")
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    _say(f"{torch.cuda.get_device_name()} ({target.name}), torch {torch.__version__}")
    missed = False
    for model in [settings.model] if settings.model else MODELS:
        for tokens in settings.tokens:
            if settings.steps:
                steps(problem_of(model, tokens), f"{model}, {tokens} tokens", settings.rounds)
                continue
            got = compare(problem_of(model, tokens), f"{model}, {tokens} tokens", settings.rounds)
            missed |= (model, tokens) == JUDGED and got < WANTED
            torch.cuda.empty_cache()
    if settings.steps:
        return 0
    _say(f"\nwanted at least {WANTED} for {JUDGED}: {'missed' if missed else 'not missed'}")
    return int(missed)


def _say(text: Any) -> None:
    print(text, flush=True)  # noqa: T201  a script


if __name__ == "__main__":
    sys.exit(main())
