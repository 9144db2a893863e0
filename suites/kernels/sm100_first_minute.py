"""The first minute of the sm_100a NVFP4 GEMM on a GPU: steps, each of which needs one thing more.

Owns the steps in their order (load only, multiply only, store only, one tile, two tiles, pipeline
wrap, full; few rows; two thread blocks together), what each has to leave, to the bit, and who
executes them: a GPU, or the host model as a stand-in. The first step that fails names the part that
is wrong: those before it hold. Of two together other bits within the budget of a GEMM are
UNDECIDED: nobody has published their arithmetic. On a GPU each step has a process of its own, so
that one which never ends costs no more than its time:

    python -m degarble.suites.kernels.sm100_first_minute [STEP]

Refuses machines without a B200 by name. Kept honest by suites/kernels/test_sm100_probe_gemm.py:
order and judgement on the host model, with a fault for each step.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from degarble.harness.errors import DegarbleError, MissingDevice, UnknownName
from degarble.kernels.common import gemm_problem as facts
from degarble.kernels.common import gemm_tensor_memory as tensor_memory
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.targets import SM100A, target_of_device
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_model as model
from degarble.suites.kernels.sm100_memories import BASE, Undefined
from degarble.suites.kernels.tcgen05_words import WrongWord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

NAMES = ("a", "b", "scales of a", "scales of b")
SECONDS = 60  # of a step, its compilation included
FORMS = {form.tactic.columns: form for form in blackwell.forms()}
SWAPPED = {form.tactic.columns: form for form in blackwell.swapped()}
PAIRS = {form.tactic.columns: form for form in blackwell.pairs()}
UNDECIDED = "UNDECIDED, within the budget of a GEMM: "
UNDER_WAY = "never ended: a barrier, a parity or bytes that were expected"


class Executor(Protocol):
    """Who runs a part, or all, of a GEMM."""

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """Return the stages as they lie in shared memory: [steps, bytes]."""

    def multiply(self, case: checks.Case, image: Tensor) -> Tensor:
        """Return the float32 sums of stages that lie so: [rows of a tile, columns]."""

    def store(self, case: checks.Case, sums: Tensor) -> Tensor:
        """Return D of sums: [M, N]."""

    def answer(self, case: checks.Case, given: Any) -> Tensor:
        """Return D of operands: [M, N]."""


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
    """Return the stages of tile (0, 0) as TMA has to leave them, operand by operand."""
    form, steps = case.form, model.steps_of(case.problem, case.form)
    of = blackwell.matrices(form, given, torch.zeros(case.problem.rows, case.problem.columns))
    whole = torch.zeros(steps, facts.transaction_bytes(form), dtype=torch.uint8)
    for step in range(steps):
        at, first = 0, dict.fromkeys(NAMES, 0)
        for load in facts.loads(form):
            matrix = of[load.name]
            part = type(matrix)(
                matrix.rows, matrix.element, (load.rows, matrix.box[1]), matrix.swizzle
            )
            row = np.empty(load.bytes, np.uint8)
            place = (first[load.name], step * part.box[1])
            row[part.addresses(BASE) - BASE] = part.filled(*place)
            whole[step, at : at + load.bytes] = torch.from_numpy(row)
            at, first[load.name] = at + load.bytes, first[load.name] + load.rows
    return whole


def load_only(executor: Executor) -> str:
    """Every byte of every stage lies where the instruction will look for it."""
    case = case_of(FORMS[192], (128, 192, 256 * 3 + 32))
    given = checks.nvfp4_sides(case, "cpu").given
    got, want = executor.load(case, given), image_of(case, given)
    wrong = (got != want).nonzero()
    if not len(wrong):
        return ""
    step, byte = wrong[0].tolist()
    for name in NAMES:
        size = facts.bytes_of(case.form, name)
        if byte < size:
            break
        byte -= size
    return f"{len(wrong)} bytes of stages differ, first: step {step}, {name}, byte {byte}"


def multiply_only(executor: Executor) -> str:
    """Descriptors, scales in tensor memory, sums begun anew: stages from memory, sums to memory."""
    for columns, inner in ((128, 64), (128, 256), (192, 544)):
        case = case_of(FORMS[columns], (128, columns, inner))
        drawn = blackwell.drawn(case)
        got = executor.multiply(case, image_of(case, drawn.given))
        wrong = (got.view(torch.int32) != drawn.sums.view(torch.int32)).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            return (
                f"{case.name}: {len(wrong)} sums differ, first at ({row}, {column}): got "
                f"{float(got[row, column])}, want {float(drawn.sums[row, column])}"
            )
    return ""


def store_only(executor: Executor) -> str:
    """Sums are read from their lanes, rounded once, and stored where D has them, no further."""
    case = case_of(FORMS[128], (70, 72, 64))
    generator = torch.Generator().manual_seed(7)
    sums = torch.randn(128, 128, generator=generator)
    got = executor.store(case, sums)
    return blackwell.difference(case, got, sums[:70, :72].bfloat16())


def answers(*cases: tuple[facts.GemmForm, tuple[int, int, int]]) -> Callable[[Executor], str]:
    """Judge whole GEMMs, in their order."""

    def judge(executor: Executor) -> str:
        for form, extents in cases:
            case = case_of(form, extents)
            drawn = blackwell.drawn(case)
            out = executor.answer(case, drawn.given)
            why = blackwell.difference(case, out, drawn.want)
            if why:
                return undecided(case, out) + why
        return ""

    return judge


def undecided(case: checks.Case, out: Tensor) -> str:
    """Say so where two together have other bits than one, and none is wrong."""
    assumed = case.form.tactic.together > 1 and not blackwell.PAIRS_CONFIRMED
    wrong = checks.difference(case, out.cpu(), checks.nvfp4_sides(case, "cpu"))
    return UNDECIDED if assumed and not wrong else ""


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
    Step("load only", "TMA: boxes, swizzle, bytes expected", load_only),
    Step("multiply only", "descriptors, scales in tensor memory, sums begun", multiply_only),
    Step("store only", "reads of tensor memory, rounding, pieces, TMA out", store_only),
    Step("one tile", "rings between the roles", answers((FORMS[128], (128, 128, 256)))),
    Step(
        "two tiles",
        "walk, scale tiles",
        answers((FORMS[64], (128, 128, 64)), (FORMS[128], (256, 128, 64))),
    ),
    Step("pipeline wrap", "parities where rings begin anew", answers(wrapped(FORMS[256]))),
    Step("full", "tails of all extents, all forms", answers(*tails(FORMS))),
    Step("few rows", "operands swapped, D^T stored upright", answers(*FEW)),
    Step(
        "pair: one stage",
        "halves of B, one barrier for both, commits to both",
        answers((PAIRS[64], (256, 64, 64)), (PAIRS[128], (256, 128, 256))),
    ),
    Step("pair: two tiles", "walk, sums given back", answers((PAIRS[256], (256, 264, 64)))),
    Step("pair: pipeline wrap", "releases by both", answers(wrapped(PAIRS[256]))),
    Step("pair: full", "tails, scales of the other one cleared", answers(*tails(PAIRS))),
)
PLAIN = 7  # steps before those of other forms
BY_NAME = {step.name: step for step in STEPS}


def first_failure(executor: Executor, steps: Sequence[Step] = STEPS) -> tuple[str, str] | None:
    """Run the steps in their order; return the first that fails, and why."""
    for step in steps:
        why = judged(step, executor)
        if why:
            return step.name, why
    return None


def judged(step: Step, executor: Executor) -> str:
    """Say what is wrong with a step; what the executor refuses is wrong as well."""
    try:
        return step.judge(executor)
    except (Undefined, WrongWord) as error:
        return str(error)


# ---- executors -----------------------------------------------------------------------------------


class HostModel:
    """The host model as a stand-in: it shows that the steps tell faults apart, and no more."""

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        block, steps = self._block(case, given), model.steps_of(case.problem, case.form)
        size = facts.transaction_bytes(case.form)
        seen = torch.zeros(steps, size, dtype=torch.uint8)
        block.run([block.load([(0, 0)], steps), block.watch(seen.numpy(), steps)])
        return seen

    def multiply(self, case: checks.Case, image: Tensor) -> Tensor:
        """See Executor."""
        form, steps = case.form, len(image)
        block = self._block(case, None)
        block.fill(image.numpy())
        blocks = case.problem.inner // facts.NVFP4.block
        block.run([block.multiply([(0, 0)], steps, blocks)])
        _, columns = block.memories.columns(block.base, form.tactic.columns)
        return torch.from_numpy(block.memories.tensor[:, columns].copy().view(np.float32))

    def store(self, case: checks.Case, sums: Tensor) -> Tensor:
        """See Executor."""
        p = case.problem
        out = torch.full((p.rows, p.columns), torch.nan, dtype=torch.bfloat16)
        block = self._block(case, None, out)
        _, columns = block.memories.columns(block.base, case.form.tactic.columns)
        block.memories.tensor[:, columns] = sums.numpy().view(np.uint32)
        block.sums_full[0].arrive()
        block.run([block.store([(0, 0)], torch.ones(1))])
        return out

    def answer(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        return blackwell.on_model(case, given)[0]

    def _block(self, case: checks.Case, given: Any, out: Tensor | None = None) -> model.Block:
        p = case.problem
        out = torch.zeros(p.rows, p.columns, dtype=torch.bfloat16) if out is None else out
        given = given or checks.nvfp4_sides(case, "cpu").given
        return model.block_of(case.form, blackwell.matrices(case.form, given, out))


class Gpu:
    """A B200: kernels/sm100_probe_gemm.py for the parts, the GEMM itself for the rest."""

    def __init__(self) -> None:
        found = target_of_device()
        if found is not SM100A:
            raise MissingDevice("target", found.name, SM100A.name, "Run it on a B200.")
        self.settings = CompileSettings()

    def load(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        image = self._part("load", case, given=given)[1]
        return image[: model.steps_of(case.problem, case.form)].cpu()

    def multiply(self, case: checks.Case, image: Tensor) -> Tensor:
        """See Executor."""
        sums: Tensor = self._part("multiply", case, image=image)[2].cpu()
        return sums

    def store(self, case: checks.Case, sums: Tensor) -> Tensor:
        """See Executor."""
        out: Tensor = self._part("store", case, sums=sums)[0].cpu()
        return out

    def answer(self, case: checks.Case, given: Any) -> Tensor:
        """See Executor."""
        entry = import_module("degarble.kernels.sm100_gemm_nvfp4").gemm_nvfp4
        moved = [type(each)(*(t.cuda() for t in each)) for each in given]
        p = case.problem
        out = torch.full((p.rows, p.columns), torch.nan, dtype=torch.bfloat16, device="cuda")
        entry(*moved, p, self.settings, form=case.form, out=out)
        return out.cpu()

    def _part(
        self, part: str, case: checks.Case, *, given: Any = None, **held: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a part; return D, image and sums."""
        probe = import_module("degarble.kernels.sm100_probe_gemm")
        form, p = case.form, case.problem
        a, b = given or checks.nvfp4_sides(case, "cpu").given
        out = torch.full((p.rows, p.columns), torch.nan, dtype=torch.bfloat16, device="cuda")
        shape = (facts.MOST_STAGES, facts.transaction_bytes(form))
        image = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        sums = torch.zeros(tensor_memory.LANES, form.tactic.columns, device="cuda")
        if "image" in held:
            image[: len(held["image"])] = held["image"].cuda()
        if "sums" in held:
            sums.copy_(held["sums"])
        operands = tuple(each.cuda() for each in (a.codes, a.scales, b.codes, b.scales))
        kernel = probe.compile_part(part, form, self.settings)
        probe.launch(kernel, form, p, (*operands, out, image, sums))
        torch.cuda.synchronize()
        return out, image, sums


def in_a_process(name: str, command: tuple[str, ...] = ()) -> str:
    """Run a step on the GPU in a process of its own; say what is wrong with it."""
    given = command or (sys.executable, "-m", "degarble.suites.kernels.sm100_first_minute", name)
    try:
        run = subprocess.run(given, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return UNDER_WAY
    return "" if run.returncode == 0 else (run.stdout + run.stderr).strip()


def main() -> int:
    """Run one step, or all in their order until one fails."""
    chosen = sys.argv[1:] or [step.name for step in STEPS]
    try:
        for name in chosen:
            if name not in BY_NAME:
                raise UnknownName.among("step", name, BY_NAME)
        executor = Gpu()
    except DegarbleError as error:
        print(f"REFUSED: {error}")  # noqa: T201  a script
        return 2
    for name in chosen:
        step = BY_NAME[name]
        # One step runs here; several run each in a process of its own.
        why = judged(step, executor) if len(chosen) == 1 else in_a_process(name)
        print(f"{name} ({step.proves}): {why or 'right'}", flush=True)  # noqa: T201  a script
        if why:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
