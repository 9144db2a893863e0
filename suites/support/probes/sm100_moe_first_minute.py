"""Bring up the grouped experts on a B200, once the GEMM's first minute is right.

Eight steps in order: rows, load, requantise, one tile, two groups, jagged groups, pipeline wrap,
full. Whole calls are compared part by part in the order of computation (places, rows of x, FC1's
output, FC2's rows, the sum), so the first difference is the cause. A B200 executes them, or the
host model in its place. On a GPU each step has a process of its own, so that one which never ends
costs no more than its time limit:

    python -m degarble.suites.support.probes.sm100_moe_first_minute [STEP]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import numpy as np
import torch

from degarble.harness.base.errors import MissingDevice
from degarble.harness.formats.codec import unpack_nibbles
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, from_layout
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.moe import problem as moe
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, MoeProblem
from degarble.kernels.runtime.targets import SM100A, target_of_device
from degarble.references import elementary
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import moe_twin as twin
from degarble.suites.kernels.moe import sm100_moe_model as model
from degarble.suites.kernels.moe import sm100_moe_stages as stages
from degarble.suites.support.probes import sm100_first_minute as plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MODULE = "degarble.suites.support.probes.sm100_moe_first_minute"


class Executor(Protocol):
    """Executor of a part, or of all, of a call."""

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """Return FC1's stages of the first tile as they lie: [steps, bytes]."""

    def requantise(self, case: checks.Case, given: Any, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of FC1's first tile out of sums [rows, columns]."""

    def rows(self, case: checks.Case, given: Any) -> checks.Result:
        """Return a poisoned workspace with slots ordered and rows quantised."""

    def answer(self, case: checks.Case, given: Any) -> checks.Result:
        """Return what a whole call leaves."""

    def difference(self, case: checks.Case, given: Any, result: checks.Result) -> str:
        """Say how a whole call differs from one expert at a time."""


@dataclass(frozen=True)
class Step:
    """One step: its name, what it proves beyond those before, and its judgement."""

    name: str
    proves: str
    judge: Callable[[Executor], str]


def case_of(problem: MoeProblem, choice: str = "one", **more: Any) -> checks.Case:
    """Make a case."""
    return checks.Case(problem, choice, **{"seed": 5, "target": SM100A.name, **more})


# ---- rows ----------------------------------------------------------------------------------------


def rows_only(executor: Executor) -> str:
    """Slots are ordered, and rows are those that the definition makes."""
    case = case_of(MoeProblem(150, 96, 64, 3, 2, 3, 10.0), "even")
    given = checks.given_of(case, "cpu")
    got, want = executor.rows(case, given).workspace, HostModel().rows(case, given).workspace
    pairs = zip((*got.plan, *got.x), (*want.plan, *want.x), strict=True)
    names = ("rows", "counts", "experts of tiles", "slots", "places", "codes", "scales")
    wrong = [name for name, (x, y) in zip(names, pairs, strict=True) if not torch.equal(x.cpu(), y)]
    return f"not as defined: {', '.join(wrong)}" if wrong else ""


# ---- load ----------------------------------------------------------------------------------------

LOADED = case_of(MoeProblem(100, 576, 128, 2, 1, 2, 10.0))  # all choose expert 1; K ends in a step


def load_only(executor: Executor) -> str:
    """Check that gate and up of the right expert lie where one instruction reads them."""
    given = checks.given_of(LOADED, "cpu")
    workspace = HostModel().rows(LOADED, given).workspace
    got, want = executor.load(LOADED, given), stages.image_of(LOADED, given, workspace)
    wrong = (got != want).nonzero()
    if not len(wrong):
        return ""
    step, byte = wrong[0].tolist()
    return f"{len(wrong)} bytes of stages differ, first: step {step}, byte {byte}"


# ---- requantise ----------------------------------------------------------------------------------

REQUANTISED = case_of(MoeProblem(70, 64, 96, 2, 1, 2, 10.0, BEFORE_W2))


def requantise_only(executor: Executor) -> str:
    """SwiGLU of a row's sums as NVFP4: within a code of the definition, few at a boundary.

    A warp has six rows, another none; columns end within the tile.
    """
    case, given = REQUANTISED, checks.given_of(REQUANTISED, "cpu")
    sums = 40 * torch.randn(128, 256, generator=torch.Generator().manual_seed(3))
    got, count = executor.requantise(case, given, sums), case.problem.tokens
    want = requantised(case, given, sums)
    blocks = case.problem.width // 16
    scales = from_layout(got[1], SWIZZLE_128X4, len(got[0]), blocks)[:count]
    if not bool((got[0][96:128] == checks.POISON).all()):
        return "rows of nobody are written"
    for name, x, y, most in (
        ("scales", scales, want[1], twin.MOST_SCALES),
        ("codes", unpack_nibbles(got[0][:count]), unpack_nibbles(want[0]), twin.MOST_CODES),
    ):
        far = int(((x.int() - y.int()).abs() > 1).sum())
        share = float((x != y).double().mean())
        if far or share > most:
            return f"{name}: {far} far off, {share:.4f} of them differ"
    return ""


def requantised(case: checks.Case, given: Any, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scale codes of sums by definition; all tokens chose the last expert."""
    p, (w13, w2) = case.problem, given.weights
    rows, factors = sums[: p.tokens], model.factors(w13)[-1]
    gate, up = (
        (rows[:, first : first + p.width] * factor).bfloat16().float()
        for first, factor in zip((0, 128), factors, strict=True)
    )
    values = elementary.swiglu(gate, up, p.limit) * given.routing.weights
    return model.coded(values.bfloat16().float(), w2.input_scale[-1])


# ---- whole calls ---------------------------------------------------------------------------------


def calls(*cases: checks.Case) -> Callable[[Executor], str]:
    """Judge whole calls, in their order."""

    def judge(executor: Executor) -> str:
        for case in cases:
            given = checks.given_of(case, "cpu")
            why = executor.difference(case, given, executor.answer(case, given))
            if why:
                return why
        return ""

    return judge


ONE = MoeProblem(100, 64, 64, 1, 1, 1, 10.0)
GROUPS = MoeProblem(90, 96, 160, 2, 1, 2, 10.0)
JAGGED = MoeProblem(580, 64, 96, 8, 1, 8, 10.0, BEFORE_W2)
WRAP = MoeProblem(3, 1312, 32, 2, 1, 2, 2.0)  # six steps in a tile, seven tiles
FULL = MoeProblem(60, 288, 416, 5, 4, 9, None, AFTER_W2)
STEPS = (
    Step("rows", "order of slots, quantised rows, scales of groups", rows_only),
    Step("load", "boxes of one of many matrices, gate beside up", load_only),
    Step("requantise", "a row in registers, its codes and scales", requantise_only),
    Step("one tile", "both products of one group", calls(case_of(ONE))),
    Step("two groups", "whose matrices a tile has", calls(case_of(GROUPS, "even"))),
    Step("jagged groups", "warps without rows, no rows", calls(case_of(JAGGED, "edges"))),
    Step("pipeline wrap", "parities where rings begin anew", calls(case_of(WRAP, "even"))),
    Step(
        "full",
        "tails, experts elsewhere, the shared expert",
        calls(case_of(FULL, "even", shared=True)),
    ),
)
BY_NAME = {step.name: step for step in STEPS}


def first_failure(executor: Executor) -> tuple[str, str] | None:
    """Run the steps in their order; return the first that fails, and why."""
    return plain.first_failure(executor, STEPS)


# ---- executors -----------------------------------------------------------------------------------


class HostModel:
    """Host model in place of a GPU: it shows that the steps tell faults apart, and no more."""

    def rows(self, case: checks.Case, given: Any) -> checks.Result:
        """See Executor."""
        result = checks.poisoned(case, given)
        model.ordered(case, given, result.workspace.plan)
        model.gathered(case, given, result.workspace.plan, result.workspace.x)
        return result

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        block, plan, form = self._block(case, given)
        steps = ceil_div(case.problem.hidden, form.tactic.inner)
        seen = torch.zeros(steps, facts.transaction_bytes(form), dtype=torch.uint8)
        tile = (0, 0, int(plan.experts[0]))
        block.run([block.load([tile], steps), block.watch(seen.numpy(), steps)])
        return seen

    def requantise(self, case: checks.Case, given: Any, sums: Tensor) -> tuple[Tensor, Tensor]:
        """See Executor."""
        block, plan, form = self._block(case, given)
        hidden = checks.poisoned(case, given).workspace.hidden
        leaving = model.Leaving(
            model.factors(given.weights.w13),
            plan.slots,
            (hidden.codes.numpy(), hidden.scales.numpy()),
            given.weights.w2.input_scale,
            given.routing.weights.flatten(),
        )
        _, columns = block.memories.columns(block.base, form.tactic.columns)
        block.memories.tensor[:, columns] = sums.numpy().view(np.uint32)
        block.sums_full[0].arrive()
        tile = (0, 0, int(plan.experts[0]))
        block.run([block.leave(warp, [tile], leaving) for warp in range(model.WARPS)])
        return hidden.codes, hidden.scales

    def answer(self, case: checks.Case, given: Any) -> checks.Result:
        """See Executor."""
        return model.on_model(case, given)

    def difference(self, case: checks.Case, given: Any, result: checks.Result) -> str:
        """See Executor."""
        with mock.patch.object(checks, "wanted", model.wanted):
            return checks.difference(case, given, result)

    def _block(self, case: checks.Case, given: Any) -> tuple[Any, Any, facts.GemmForm]:
        """Return a thread block of FC1, the plan, and the form."""
        workspace = self.rows(case, given).workspace
        form = moe.forms_of(case.problem, case.target)[0]
        block = model.block_of(form, model.first_sides(case, given, workspace.x))
        return block, workspace.plan, form.gemm


class Gpu:
    """A B200: sm100_probe_moe.py for the parts, the kernels themselves for the rest."""

    def __init__(self) -> None:
        target = target_of_device()
        if target is not SM100A:
            raise MissingDevice("target", target.name, SM100A.name, "Run it on a B200.")

    def rows(self, case: checks.Case, given: Any) -> checks.Result:
        """See Executor."""
        given = moved(given)
        result = checks.poisoned(case, given)
        tensors = given.operands | result.workspace.operands
        for kernel, own in [*checks.steps(case, given)][:2]:
            here = {name: tensors[name] for name in kernel.names if name in tensors}
            kernel.run(own, checks.SETTINGS, **here)
        return result

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        image = self._part("load", case, given)[1]
        form = moe.forms_of(case.problem, case.target)[0].gemm
        return image[: ceil_div(case.problem.hidden, form.tactic.inner)]

    def requantise(self, case: checks.Case, given: Any, sums: Tensor) -> tuple[Tensor, Tensor]:
        """See Executor."""
        hidden: tuple[Tensor, Tensor] = self._part("requantise", case, given, sums)[0]
        return hidden

    def answer(self, case: checks.Case, given: Any) -> checks.Result:
        """See Executor."""
        return checks.on_device(case, moved(given))

    def difference(self, case: checks.Case, given: Any, result: checks.Result) -> str:
        """See Executor."""
        return checks.difference(case, moved(given), result)

    def _part(
        self, part: str, case: checks.Case, given: Any, sums: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Run a part; return what FC1 left, and the image."""
        probe, p = import_module("degarble.suites.support.probes.sm100_probe_moe"), case.problem
        form = moe.forms_of(p, case.target)[0]
        plan, x, hidden, _ = self.rows(case, given).workspace
        w13, w2 = moved(given).weights
        shape = (facts.MOST_STAGES, facts.transaction_bytes(form.gemm))
        image = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        held = torch.zeros(tensor_memory.LANES, form.gemm.tactic.columns, device="cuda")
        if sums is not None:
            held.copy_(sums)
        of_b = (w13.codes, w13.scales, w13.input_scale, w13.decode_scale)
        weights = given.routing.weights.cuda()
        leaving = (*hidden, w2.input_scale, weights)
        tensors = (*x, *of_b, plan.rows, plan.experts, plan.slots, *leaving, image, held)
        extents = (len(x.codes), moe.GATE_AND_UP * p.width, p.hidden, p.experts)
        probe.launch(probe.compile_part(part, form, checks.SETTINGS), form, extents, tensors)
        torch.cuda.synchronize()
        return tuple(each.cpu() for each in hidden), image.cpu()


def moved(given: Any) -> Any:
    """Return all that a call reads, on the GPU."""
    if isinstance(given, torch.Tensor):
        return given.cuda()
    return given if given is None else type(given)(*map(moved, given))


def main() -> int:
    """Run steps on the GPU."""
    return plain.run_steps(STEPS, MODULE, Gpu)


if __name__ == "__main__":
    sys.exit(main())
