"""Bring up the sm_100a NVFP4 GEMM on a GPU, in steps that each need one part more.

Steps in order: load only, multiply only, store only, one tile, two tiles, pipeline wrap, full; few
rows; two thread blocks together. Results are compared to the bit. The first step that fails names
the part that is wrong, because the steps before it hold. For a pair of blocks, other bits within
the budget of a GEMM are UNDECIDED: nobody has published their arithmetic. A GPU executes the steps,
or the host model in its place. On a GPU each step has a process of its own, so that one which never
ends costs no more than its time limit:

    python -m degarble.suites.support.probes.sm100_first_minute [STEP]
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.errors import DegarbleError, UnknownName
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_model as model
from degarble.suites.kernels.sm100_model import BASE, Undefined
from degarble.suites.kernels.tcgen05_words import WrongWord
from degarble.suites.support.probes.sm100_executors import Executor, Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

NAMES = ("a", "b", "scales of a", "scales of b")
MODULE = "degarble.suites.support.probes.sm100_first_minute"
SECONDS = 60  # of a step, its compilation included
FORMS = {form.tactic.columns: form for form in blackwell.forms()}
SWAPPED = {form.tactic.columns: form for form in blackwell.swapped()}
PAIRS = {form.tactic.columns: form for form in blackwell.pairs()}
UNDECIDED = "UNDECIDED, within the budget of a GEMM: "
UNDER_WAY = "never ended: a barrier, a parity or bytes that were expected"


@dataclass(frozen=True)
class Step:
    """One step: its name, what it proves beyond those before, and its judgement."""

    name: str
    proves: str
    judge: Callable[[Executor], str]


def case_of(form: facts.GemmForm, extents: tuple[int, int, int]) -> checks.Case:
    """Make a case in a form."""
    return checks.with_form(form, extents, "ordinary", sum(extents))


# ---- what has to come out ------------------------------------------------------------------------


def image_of(case: checks.Case, given: Any) -> Tensor:
    """Return the stages of the first tile as TMA has to leave them, operand by operand."""
    form, steps = case.form, model.steps_of(case.problem, case.form)
    of = blackwell.matrices(form, given, torch.zeros(case.problem.rows, case.problem.columns))
    whole = torch.zeros(steps, facts.expected_bytes(form), dtype=torch.uint8)
    at = 0
    for rank in range(form.tactic.together):
        # Rows of A and tiles of their scales, half of B: each its own; all scales of B: both.
        first = {"a": rank * form.tactic.rows, "scales of a": rank, "scales of b": 0}
        first["b"] = rank * form.tactic.columns // form.tactic.together
        for load in facts.loads(form):
            matrix = of[load.name]
            part = replace(matrix, box=(load.rows, matrix.box[1]))
            for step in range(steps):
                row = np.empty(load.bytes, np.uint8)
                place = (first[load.name], step * part.box[1])
                row[part.addresses(BASE) - BASE] = part.filled(*place)
                whole[step, at : at + load.bytes] = torch.from_numpy(row)
            at, first[load.name] = at + load.bytes, first[load.name] + load.rows
    return whole


def loads(form: facts.GemmForm, extents: tuple[int, int, int]) -> Callable[[Executor], str]:
    """Judge stages: every byte lies where the instruction will look for it."""

    def judge(executor: Executor) -> str:
        case = case_of(form, extents)
        given = checks.nvfp4_sides(case, "cpu").given
        got, want = executor.load(case, given), image_of(case, given)
        wrong = (got != want).nonzero()
        if not len(wrong):
            return ""
        step, byte = wrong[0].tolist()
        rank, byte = divmod(byte, facts.transaction_bytes(form))
        for name in NAMES:
            size = facts.bytes_of(form, name)
            if byte < size:
                break
            byte -= size
        where = f"step {step}, {name}, byte {byte}, thread block {rank}"
        return f"{len(wrong)} bytes of stages differ, first: {where}"

    return judge


def multiplies(*cases: tuple[facts.GemmForm, int]) -> Callable[[Executor], str]:
    """Judge sums of stages from memory: descriptors, scales in tensor memory, sums begun anew."""

    def judge(executor: Executor) -> str:
        for form, inner in cases:
            rows = form.tactic.together * form.tactic.rows
            case = case_of(form, (rows, form.tactic.columns, inner))
            drawn = blackwell.drawn(case)
            got = executor.multiply(case, image_of(case, drawn.given))
            wrong = (got.view(torch.int32) != drawn.sums.view(torch.int32)).nonzero()
            if len(wrong):
                row, column = wrong[0].tolist()
                near = torch.allclose(got, drawn.sums, rtol=2.0**-20, atol=0.0)
                return (UNDECIDED if assumed(form) and near else "") + (
                    f"{case.name}: {len(wrong)} sums differ, first at ({row}, {column}): got "
                    f"{float(got[row, column])}, want {float(drawn.sums[row, column])}"
                )
        return ""

    return judge


def stores(form: facts.GemmForm, extents: tuple[int, int, int]) -> Callable[[Executor], str]:
    """Judge D of sums from memory: read from their lanes, rounded once, stored and no further."""

    def judge(executor: Executor) -> str:
        case, tactic = case_of(form, extents), form.tactic
        generator = torch.Generator().manual_seed(7)
        shape = (tactic.together * tactic.rows, tactic.columns)
        sums = torch.randn(shape, generator=generator)
        got = executor.store(case, sums)
        return blackwell.difference(case, got, sums[: extents[0], : extents[1]].bfloat16())

    return judge


def answers(
    *cases: tuple[facts.GemmForm, tuple[int, int, int]], alone: bool = False
) -> Callable[[Executor], str]:
    """Judge whole GEMMs, in their order; one cluster does all the work where it is alone."""

    def judge(executor: Executor) -> str:
        for form, extents in cases:
            case = case_of(form, extents)
            drawn = blackwell.drawn(case)
            out = executor.answer(case, drawn.given, alone=alone)
            why = blackwell.difference(case, out, drawn.want)
            if why:
                return undecided(case, out) + why
        return ""

    return judge


def undecided(case: checks.Case, out: Tensor) -> str:
    """Describe a pair whose bits differ from those of one block, if neither is wrong."""
    wrong = checks.difference(case, out.cpu(), checks.nvfp4_sides(case, "cpu"))
    return UNDECIDED if assumed(case.form) and not wrong else ""


def assumed(form: facts.GemmForm) -> bool:
    """Return whether the arithmetic of a form is neither published nor confirmed."""
    return form.tactic.together > 1 and not blackwell.PAIRS_CONFIRMED


def wrapped(form: facts.GemmForm) -> tuple[facts.GemmForm, tuple[int, int, int]]:
    """Return a tile whose K goes through the ring twice and a step."""
    tactic = form.tactic
    steps = 2 * tensor_memory.footprint(form).stages + 1
    return form, (tactic.together * tactic.rows, tactic.columns, steps * tactic.inner)


def tails(forms: dict[int, facts.GemmForm]) -> list[tuple[facts.GemmForm, tuple[int, int, int]]]:
    """Return tails of all extents for forms: K ends within a word of scales."""
    return [(form, (130, columns + 8, 288)) for columns, form in forms.items()]


FEW = ((SWAPPED[16], (16, 128, 64)), (SWAPPED[8], (5, 264, 288)), (SWAPPED[32], (70, 136, 544)))
STEPS = (
    Step(
        "load only",
        "TMA: boxes, swizzle, bytes expected",
        loads(FORMS[192], (128, 192, 256 * 3 + 32)),
    ),
    Step(
        "multiply only",
        "descriptors, scales in tensor memory, sums begun",
        multiplies((FORMS[128], 64), (FORMS[128], 256), (FORMS[192], 544)),
    ),
    Step(
        "store only",
        "reads of tensor memory, rounding, pieces, TMA out",
        stores(FORMS[128], (70, 72, 64)),
    ),
    Step("one tile", "rings between the roles", answers((FORMS[128], (128, 128, 256)))),
    Step(
        "two tiles",
        "walk, scale tiles",
        answers((FORMS[64], (128, 128, 64)), (FORMS[128], (256, 128, 64)), alone=True),
    ),
    Step(
        "pipeline wrap",
        "parities where rings begin anew",
        answers(wrapped(FORMS[256]), (FORMS[128], (640, 128, 64)), alone=True),
    ),
    Step("full", "tails of all extents, all forms", answers(*tails(FORMS))),
    Step("few rows", "operands swapped, D^T stored upright", answers(*FEW)),
    Step(
        "pair: load only",
        "halves of B, scales of B to both, one barrier for both",
        loads(PAIRS[192], (256, 192, 256 * 3 + 32)),
    ),
    Step(
        "pair: multiply only",
        "both shared memories, both tensor memories, commits to both",
        multiplies((PAIRS[64], 64), (PAIRS[192], 544)),
    ),
    Step("pair: store only", "each its rows", stores(PAIRS[128], (200, 72, 64))),
    Step(
        "pair: one stage",
        "rings between the roles of both",
        answers((PAIRS[64], (256, 64, 64)), (PAIRS[128], (256, 128, 256))),
    ),
    Step(
        "pair: two tiles",
        "walk, sums given back, those that overlap",
        answers((PAIRS[64], (256, 136, 64)), (PAIRS[256], (256, 776, 64)), alone=True),
    ),
    Step("pair: pipeline wrap", "releases by both", answers(wrapped(PAIRS[256]))),
    Step("pair: full", "tails, scales of the other one cleared", answers(*tails(PAIRS))),
)
PLAIN = 7  # steps before those of other forms
BY_NAME = {step.name: step for step in STEPS}


def first_failure(executor: Any, steps: Sequence[Any] = STEPS) -> tuple[str, str] | None:
    """Run the steps of a first minute in their order; return the first that fails, and why."""
    for step in steps:
        why = judged(step, executor)
        if why:
            return step.name, why
    return None


def judged(step: Any, executor: Any) -> str:
    """Describe what is wrong with a step; an error of the executor is wrong as well."""
    try:
        found: str = step.judge(executor)
    except (Undefined, WrongWord) as error:
        return str(error)
    return found


# ---- run -----------------------------------------------------------------------------------------


def in_a_process(name: str, command: tuple[str, ...] = ()) -> str:
    """Run a step on the GPU in a process of its own; say what is wrong with it."""
    given = command or (sys.executable, "-m", MODULE, name)
    try:
        run = subprocess.run(given, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return UNDER_WAY
    return "" if run.returncode == 0 else (run.stdout + run.stderr).strip()


def run_steps(steps: Sequence[Any], module: str, executor_of: Callable[[], Any]) -> int:
    """Run the step that the command names, or all in their order until one fails."""
    by_name = {step.name: step for step in steps}
    chosen = sys.argv[1:] or list(by_name)
    try:
        for name in chosen:
            if name not in by_name:
                raise UnknownName.among("step", name, by_name)
        executor = executor_of()
    except DegarbleError as error:
        print(f"REFUSED: {error}")  # noqa: T201  a script
        return 2
    for name in chosen:
        step = by_name[name]
        if len(chosen) == 1:
            why = judged(step, executor)
        else:  # what one breaks reaches no other
            why = in_a_process(name, (sys.executable, "-m", module, name))
        print(f"{name} ({step.proves}): {why or 'right'}", flush=True)  # noqa: T201  a script
        if why:
            return 1
    return 0


def main() -> int:
    """Run steps on the GPU."""
    return run_steps(STEPS, MODULE, Gpu)


if __name__ == "__main__":
    sys.exit(main())
