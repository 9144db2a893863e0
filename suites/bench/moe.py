"""Grouped experts beside the plain NVFP4 form: products, whole calls, and step by step."""

from __future__ import annotations

import statistics
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import MoeProblem
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.bench import gpu
from degarble.suites.bench.gemm import cublas_arm, gemm_arm
from degarble.suites.bench.runner import (
    COPY,
    SETS,
    TERABYTES,
    TERAFLOPS,
    US_MEDIAN,
    Arm,
    Bench,
    Claim,
    Comparison,
    copy_arm,
    shared,
)
from degarble.suites.kernels.moe import moe_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.kernels.gemm.problem import GemmTactic
    from degarble.suites.bench.runner import Reading, Readings

    Launch = Callable[[], object]

MODELS = {"V4-Flash": (4096, 2048, 256, 6), "V4-Pro": (7168, 3072, 384, 6)}
JUDGED = ("V4-Flash", 8192)
WANTED = 0.70  # of the plain form's rate, both products together
FC1, FC2, WHOLE = "grouped FC1", "grouped FC2", "whole call"
PLAIN1, PLAIN2, CUBLAS = "plain FC1", "plain FC2", "cuBLAS, BF16, FC1"
ROWS = ("order of rows", "rows quantised", "sum of slots")
COPIED = 1 << 30
BYTES_OF_WEIGHT = 9 / 16  # a code, and a scale for sixteen of them


def problem_of(model: str, tokens: int) -> MoeProblem:
    """Return a model's layer on one GPU."""
    hidden, width, experts, chosen = MODELS[model]
    return MoeProblem(tokens, hidden, width, experts, chosen, experts, 10.0)


def plain_problems(problem: MoeProblem) -> tuple[GemmProblem, GemmProblem]:
    """Return what the plain form computes: as many rows as there are slots, one matrix."""
    shapes = ((2 * problem.width, problem.hidden), (problem.hidden, problem.width))
    first, second = (GemmProblem(problem.slots, n, k, "nvfp4", "e4m3") for n, k in shapes)
    return first, second


def share(readings: Mapping[str, Reading], ours: Sequence[str]) -> float:
    """Time of both plain products over that of some arms, the median over rounds."""
    theirs, own = (
        [sum(each) for each in zip(*(readings[name].seconds for name in arms), strict=True)]
        for arms in ((PLAIN1, PLAIN2), ours)
    )
    return float(statistics.median(a / b for a, b in zip(theirs, own, strict=True)))


def given_of(problem: MoeProblem, seed: int) -> Any:
    return checks.given_of(checks.Case(problem, "even", seed), gpu.DEVICE)


def launches_of(
    problem: MoeProblem, tactic: GemmTactic | None, given: Callable[[int], Any], number: int
) -> dict[str, Launch]:
    """Return the launches of a whole call and of its steps, on rows that are there."""
    case, inputs = checks.Case(problem, "even", 1, tactic), given(number)
    memory = checks.poisoned(case, inputs)
    tensors = inputs.operands | memory.workspace.operands | {"out": memory.out}
    made: dict[str, Launch] = {WHOLE: partial(checks.launch, case, inputs, memory)}
    names = (*ROWS[:2], FC1, FC2, ROWS[2])
    for name, (kernel, own) in zip(names, checks.steps(case, inputs), strict=True):
        here = {each: tensors[each] for each in kernel.names if each in tensors}
        made[name] = partial(kernel.run, own, checks.SETTINGS, **here)
    made[WHOLE]()  # rows have to be there before a product alone is timed
    return made


def arms_of(
    problem: MoeProblem,
    names: Sequence[str],
    given: Callable[[int], Any],
    tactic: GemmTactic | None = None,
    suffix: str = "",
) -> list[Arm]:
    """Return arms of launches that share the buffers of a set."""
    made = cache(partial(launches_of, problem, tactic, given))
    first, second = (gemm_problem.operations for gemm_problem in plain_problems(problem))
    operations = {WHOLE: problem.operations, FC1: first, FC2: second}
    return [
        Arm(name + suffix, shared(made, name), operations=operations.get(name, 0), sets=SETS)
        for name in names
    ]


def products_arms(problem: MoeProblem) -> list[Arm]:
    """Both grouped products, each alone and on existing rows, and the whole call."""
    return arms_of(problem, (WHOLE, FC1, FC2), cache(partial(given_of, problem)))


def plain_arms(problem: MoeProblem) -> list[Arm]:
    """The plain NVFP4 product on as many rows with one matrix."""
    names = zip((PLAIN1, PLAIN2), plain_problems(problem), strict=True)
    return [gemm_arm(name, gemm_problem, baseline=True) for name, gemm_problem in names]


def compared(model: str, tokens: int) -> Comparison:
    """A rate counts the work of slots alone: rows of zeros that fill up tiles are waste."""
    problem = problem_of(model, tokens)
    first, _ = plain_problems(problem)
    cublas = cublas_arm(GemmProblem(problem.slots, first.columns, first.inner), CUBLAS)
    arms = (*products_arms(problem), *plain_arms(problem), cublas, copy_arm(COPIED))
    text = f"products at {model}, {tokens}: of the plain form's rate"
    claim = Claim(text, FC1, lambda reading: share(reading.beside, (FC1, FC2)), WANTED)

    def shares(found: Readings) -> Iterator[str]:
        of_products, of_all = share(found, (FC1, FC2)), share(found, (WHOLE,))
        yield (
            f"{model}, {tokens} tokens, of the plain form's rate: products {of_products:.3f}, "
            f"whole call {of_all:.3f}"
        )

    return Comparison(
        f"{model}, {tokens} tokens", [arms], (US_MEDIAN, TERAFLOPS, TERABYTES),
        [claim] if (model, tokens) == JUDGED else [], notes=shares,
    )  # fmt: skip


def weight_bytes(problem: MoeProblem, visited: float) -> float:
    """Return the bytes of so many experts' codes and scales."""
    return visited * BYTES_OF_WEIGHT * 3 * problem.hidden * problem.width


def steps(model: str, tokens: int) -> Comparison:
    """Each step in each tactic, and the time that the visited experts take at a copy's rate."""
    problem, arms = problem_of(model, tokens), []
    given = cache(partial(given_of, problem))
    for number, tactic in enumerate(facts.TILES[SM90A.name].values()):
        names = (WHOLE, FC1, FC2) if number else (WHOLE, FC1, FC2, *ROWS)
        cut = f" in {tactic.rows}x{tactic.columns}, {tactic.blocks} a processor"
        arms += arms_of(problem, names, given, tactic, cut)

    def floor(found: Readings) -> Iterator[str]:
        visited = statistics.mean(
            len(given(number).routing.experts.unique()) for number in range(SETS)
        )
        weights = weight_bytes(problem, visited)
        copied = weights / found[COPY].bandwidth * 1e6
        yield (
            f"{model}, {tokens} tokens: visited experts {weights / 1e9:.2f} GB, "
            f"{copied:.0f} us of copy"
        )

    half = copy_arm(COPIED // 2)  # whole gigabytes go slower
    return Comparison(f"{model}, {tokens} tokens", [(*arms, half)], (US_MEDIAN,), notes=floor)


def moe(options: Any) -> Iterator[Comparison]:
    """Choices of experts are drawn evenly."""
    for model in [options.model] if options.model != "all" else MODELS:
        for tokens in options.tokens:
            yield (steps if options.steps else compared)(model, tokens)


BENCHES = {
    "moe": Bench(
        "grouped experts beside the plain NVFP4 form; --steps: each step in each tactic", moe,
        rounds=12, needs=SM90A.name, remedy="These forms are Hopper's.",
        options={"tokens": (1, 16, 256, 2048, 8192), "model": ("all", *MODELS), "steps": False},
    ),
}  # fmt: skip
