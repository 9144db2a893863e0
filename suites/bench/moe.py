"""Grouped experts beside the plain NVFP4 form: products, whole calls, and step by step."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.moe import by_row_problem as by_row
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.by_row_problem import ByRowProblem
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
from degarble.suites.kernels.moe import by_row_checks, decoded_checks
from degarble.suites.kernels.moe import moe_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.kernels.gemm.problem import GemmTactic
    from degarble.suites.bench.runner import Reading, Readings

    Launch = Callable[[], object]

MODELS = {"V4-Flash": (4096, 2048, 256, 6), "V4-Pro": (7168, 3072, 384, 6)}
BY_ROW_MODELS = {"V4-Flash": (4096, 2048, 256, 6), "V3.2": (7168, 2048, 256, 8)}
JUDGED = ("V4-Flash", 8192)
WANTED = 0.70  # of the plain form's rate, both products together
FC1, FC2, WHOLE = "grouped FC1", "grouped FC2", "whole call"
PLAIN1, PLAIN2, CUBLAS = "plain FC1", "plain FC2", "cuBLAS, BF16, FC1"
ROWS = ("order of rows", "rows quantised", "sum of slots")
DECODED = ", rows decoded once,"
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


def decoded_launches_of(
    problem: MoeProblem, tactic: GemmTactic, given: Callable[[int], Any], number: int
) -> dict[str, Launch]:
    """Return the launches of a call that decodes its rows once, and of its products."""
    case, inputs = checks.Case(problem, "even", 1, tactic), given(number)
    memory = decoded_checks.poisoned(case, inputs)
    tensors = inputs.operands | memory
    made: dict[str, Launch] = {WHOLE: partial(decoded_checks.launch, case, inputs, memory)}
    *_, first, second, _ = decoded_checks.steps(case, inputs)
    for name, (kernel, own) in ((FC1, first), (FC2, second)):
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
    decoded = tactic is not None and suffix.startswith(DECODED)
    launches: Any = decoded_launches_of if decoded else launches_of
    made = cache(partial(launches, problem, tactic, given))
    first, second = (gemm_problem.operations for gemm_problem in plain_problems(problem))
    operations = {WHOLE: problem.operations, FC1: first, FC2: second}
    return [
        Arm(name + suffix, shared(made, name), operations=operations.get(name, 0), sets=SETS)
        for name in names
    ]


def products_arms(problem: MoeProblem) -> list[Arm]:
    """Both grouped products, each alone and on existing rows, and the whole call; as calls run."""
    tactic = facts.choose_decoded_tactic(problem)
    return [
        replace(arm, name=arm.name.removesuffix(DECODED))
        for arm in arms_of(
            problem, (WHOLE, FC1, FC2), cache(partial(given_of, problem)), tactic, DECODED
        )
    ]


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
    for tactic in facts.DECODED_TACTICS:
        cut = f"{DECODED} in {tactic.rows}x{tactic.columns}"
        arms += arms_of(problem, (WHOLE, FC1, FC2), given, tactic, cut)

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


# ---- few tokens, each row by its own expert's matrices -------------------------------------------

BY_ROW, BY_TILES, SHARED = "by row, whole", "tiles, whole", "tiles, shared expert"
ASKED = "weights asked for early"
STEPS_BY_ROW = ("rows decoded", "FC1", "gated rows decoded", "FC2", "sum")
OTHER_FORMS = (
    *by_row.TACTICS, *(replace(each, resident=1) for each in by_row.TACTICS),
)  # fmt: skip


def by_row_problem(model: str, tokens: int) -> ByRowProblem:
    """Return a model's layer with its shared expert, which is as wide as a routed one."""
    hidden, width, experts, chosen = BY_ROW_MODELS[model]
    return ByRowProblem(MoeProblem(tokens, hidden, width, experts, chosen, experts, 10.0), True)


def by_row_launches(problem: ByRowProblem, number: int) -> dict[str, Launch]:
    """Return the launches of a call, of its steps in every form, and of the same by tiles."""
    case, moe = by_row_checks.Case(problem, "even", number), problem.moe
    given = by_row_checks.given_of(case, gpu.DEVICE)
    memory = by_row_checks.memory_of(case, given)
    call, tensors = gpu.module("sm90_moe_by_row"), {**given, **memory}
    made: dict[str, Launch] = {BY_ROW: partial(by_row_checks.launch, case, given, memory)}
    problems = call.KERNEL.problems(problem, None, given)
    for name, kernel, own in zip(STEPS_BY_ROW, call.KERNEL.kernels, problems, strict=True):
        here = {each: tensors[each] for each in kernel.names if each in tensors}
        made[name] = partial(kernel.run, own, checks.SETTINGS, **here)
        if name in ("FC1", "FC2"):
            products = facts.GATE_AND_UP if name == "FC1" else 1
            for tactic in OTHER_FORMS:
                form = by_row.form_of(problem, products, SM90A.name, tactic)
                of_form = partial(kernel.run, own, checks.SETTINGS, form, **here)
                made[f"{name}, {tactic.tiles} tiles, {tactic.resident} a processor"] = of_form
            form = by_row.form_of(problem, products, SM90A.name, early=True)
            made[f"{name}, {ASKED}"] = partial(kernel.run, own, checks.SETTINGS, form, **here)
    weights = {n: given[n] for n in given if n.startswith(("w13_", "w2_"))}
    of_tokens = {name: given[name] for name in ("x", "experts", "weights")}
    routed = {name: tensor[:-1] for name, tensor in weights.items()}
    alone = {name: tensor[-1:] for name, tensor in weights.items()}
    first, whole = (torch.full((moe.tokens, 1), n, device=gpu.DEVICE) for n in (0, 1.0))
    made[BY_TILES] = partial(
        gpu.module("sm90_moe_nvfp4").KERNEL.run, moe, checks.SETTINGS, None, **of_tokens,
        **routed, shared=memory["products"][: moe.tokens],
    )  # fmt: skip
    made[SHARED] = partial(
        gpu.module("sm90_shared_expert").KERNEL.run,
        MoeProblem(moe.tokens, moe.hidden, moe.width, 1, 1, 1, moe.limit), checks.SETTINGS, None,
        x=given["x"], experts=first.int(), weights=whole, **alone,
    )  # fmt: skip
    made[BY_ROW]()  # rows have to be there before a product alone is timed
    return made


def compared_by_row(model: str, tokens: int) -> Comparison:
    """The copy has as many bytes as all rows read, each expert once a row."""
    problem = by_row_problem(model, tokens)
    made = cache(partial(by_row_launches, problem))
    forms = [
        f"{name}, {tactic.tiles} tiles, {tactic.resident} a processor"
        for name, tactic in product(("FC1", "FC2"), OTHER_FORMS)
    ]
    forms += [f"{name}, {ASKED}" for name in ("FC1", "FC2")]
    names = (BY_ROW, *STEPS_BY_ROW, *forms, BY_TILES, SHARED)
    arms = [Arm(name, shared(made, name), sets=SETS) for name in names]
    size = int(weight_bytes(problem.moe, problem.rows))
    return Comparison(
        f"{model}, {tokens} tokens, the shared expert among them",
        [(*arms, copy_arm(size // 16 * 16))], (US_MEDIAN,),
    )  # fmt: skip


def moe_by_row(options: Any) -> Iterator[Comparison]:
    """Choices of experts are drawn evenly."""
    for model in [options.model] if options.model != "all" else BY_ROW_MODELS:
        for tokens in options.tokens:
            yield compared_by_row(model, tokens)


BENCHES = {
    "moe-by-row": Bench(
        "experts of few tokens, each row by its own matrices, beside tiles and a copy", moe_by_row,
        rounds=12, needs=SM90A.name, remedy="The tiles beside them are Hopper's.",
        options={"tokens": (1, 2, 4, 8, 16), "model": ("all", *BY_ROW_MODELS)},
    ),
    "moe": Bench(
        "grouped experts beside the plain NVFP4 form; --steps: each step in each tactic", moe,
        rounds=12, needs=SM90A.name, remedy="These forms are Hopper's.",
        options={"tokens": (1, 16, 256, 2048, 8192), "model": ("all", *MODELS), "steps": False},
    ),
}  # fmt: skip
