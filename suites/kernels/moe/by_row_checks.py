"""Compare experts of very few tokens on a GPU with proven kernels, a row and a matrix at a time.

The oracle quantises a row by simt_quantise_nvfp4, which decodes it, multiplies it by
sm90_gemm_w4a16 with its expert's matrix, and adds up slots by torch in float32. Both kernels have
proofs of their own. Every bit of what each launch leaves has to be equal. Padding of scales holds
NaN, and outputs hold poison before. A slot whose expert is not here is left out of the sum.

Letters: T tokens, K chosen, D hidden, F width, E experts, the shared one last
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.moe.by_row_problem import ByRowProblem, Division, by_turns, form_of
from degarble.kernels.moe.problem import GATE_AND_UP, NONE, MoeProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels.moe import moe_checks

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.kernels.gemm.w4a16_problem import W4A16ByRowForm, W4A16Tactic

    Given = dict[str, Tensor]

SETTINGS = CompileSettings()
POISON = 0xFF  # of every byte: NaN in BF16 and float32, -1 in int32
CHOICES = ("even", "same", "absent")
PRODUCTS = (0, GATE_AND_UP, 0, 1, 0)  # of a launch with a row; 0: it is none
CHOSEN = 0  # as the kernel divides tiles
LEFT = ("x_rows", "places", "gate_and_up", "hidden_rows", "products", "out")


@dataclass(frozen=True)
class Case:
    """One call; everything follows from these facts."""

    problem: ByRowProblem
    choice: str = "even"
    seed: int = 0
    given_shared: bool = False  # the shared expert's output, where it does not take part

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p, shared = self.problem.moe, self.problem.shared
        return (
            f"{p.tokens} tokens {p.hidden}/{p.width} top-{p.chosen} of {p.routed} limit {p.limit} "
            f"shared {shared or 'given' * self.given_shared} {self.choice} seed {self.seed}"
        )


def given_of(case: Case, device: str = "cuda") -> Given:
    """Draw all that a call reads."""
    p, experts = case.problem.moe, case.problem.experts
    stacked = replace(p, experts=experts, routed=experts)
    drawn = moe_checks.Case(stacked, "even", case.seed, shared=case.given_shared)
    given = moe_checks.given_of(drawn, device).operands
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    score = torch.rand(p.tokens, p.routed, generator=generator, device=device)
    if case.choice == "same":
        score = score[:1].expand(p.tokens, -1)
    chosen = score.topk(p.chosen).indices.int()
    if case.choice == "absent":  # numbers of no routed expert; E is the shared one's
        others = torch.tensor([-1, p.routed, 1 << 30], dtype=torch.int32, device=device)
        pick = torch.randint(3, chosen.shape, generator=generator, device=device)
        absent = torch.rand(chosen.shape, generator=generator, device=device) < 0.4
        chosen = torch.where(absent, others[pick], chosen)
    return {**given, "experts": chosen.contiguous()}


def memory_of(case: Case, given: Given) -> Given:
    """Allocate what a call leaves, full of poison."""
    call, device = kernel_named("sm90_moe_by_row"), given["x"].device
    made: dict[str, Any] = {}
    problems = call.problems(case.problem, None, given)  # type: ignore[attr-defined]
    for kernel, own in zip(call.kernels, problems, strict=True):  # type: ignore[attr-defined]
        made |= {n: t for n, t in kernel.allocate(own, device).items() if t is not None}
    for tensor in made.values():
        tensor.view(torch.uint8).fill_(POISON)
    return {name: made[name] for name in LEFT}


def launch(case: Case, given: Given, memory: Given) -> None:
    """Run a call in memory that is there."""
    kernel_named("sm90_moe_by_row").run(case.problem, SETTINGS, None, **given, **memory)


def launch_whole(
    case: Case, given: Given, memory: Given, settings: CompileSettings = SETTINGS
) -> None:
    """Run a call as a graph does: where one token's rows are short, products decode them."""
    left = {n: t for n, t in memory.items() if n not in ("x_rows", "hidden_rows")}
    kernel_named("sm90_moe_by_row").run(case.problem, settings, None, **given, **left)


def launch_runs(
    case: Case,
    given: Given,
    memory: Given,
    division: int | Division,
    tactic: W4A16Tactic | None = None,
    *,
    early: bool = False,
) -> None:
    """Run a call in memory that is there; its products walk as `launch_product` says."""
    call, tensors = (
        import_module("degarble.kernels.moe.sm90_moe_by_row").KERNEL,
        {**given, **memory},
    )
    problems = call.problems(case.problem, None, given)
    for kernel, own, products in zip(call.kernels, problems, PRODUCTS, strict=True):
        if products:
            form = form_of(own, products, "sm_90a", tactic, early=early)
            launch_product(kernel, own, form, tensors, division)
        else:
            here = {name: tensors[name] for name in kernel.names if name in tensors}
            kernel.run(own, SETTINGS, **here)


def launch_product(
    kernel: Any,
    problem: ByRowProblem,
    form: W4A16ByRowForm,
    tensors: Given,
    division: int | Division,
) -> None:
    """Launch a product; a number says how many runs a thread block walks, CHOSEN: the kernel."""
    chosen = by_turns(problem, form, division) if isinstance(division, int) and division else None
    told = division if isinstance(division, Division) else chosen
    here = {name: tensors[name] for name in kernel.names}
    kernel.launch(kernel.compile_form(form, SETTINGS), form, problem, here, told)


def on_device(case: Case) -> Given:
    """Run a case in poisoned memory; return all that it left."""
    given = given_of(case)
    memory = memory_of(case, given)
    launch(case, given, memory)
    return memory


def mismatch(case: Case) -> str:
    """Say how a case differs from its oracle; empty where it does not."""
    given = given_of(case)
    memory = memory_of(case, given)
    launch(case, given, memory)
    return difference(case, given, memory)


def difference(case: Case, given: Given, memory: Given) -> str:
    """Compare all that a call left with the oracle."""
    p, shared = case.problem.moe, case.problem.shared_rows
    chosen = given["experts"].flatten().tolist()
    rows = [(row, row, p.routed) for row in range(shared)]
    rows += [(shared + slot, slot // p.chosen, e) for slot, e in enumerate(chosen)]
    for row, token, expert in rows:
        if row >= shared and not 0 <= expert < p.routed:
            if int(memory["places"][row - shared]) != NONE:
                return f"{case.name}: a slot of expert {expert} has a place"
            if memory["gate_and_up"][row].any() or memory["products"][row].any():
                return f"{case.name}: row {row} of expert {expert} is not zero"
            continue
        if row >= shared and int(memory["places"][row - shared]) != row:
            return f"{case.name}: the place of slot {row - shared}"
        for name, want in _of_row(case, given, given["x"][token : token + 1], expert).items():
            got = memory[name][row : row + 1]
            if not torch.equal(got.view(torch.int16), want.view(torch.int16)):
                return f"{case.name}: {name} of row {row}, expert {expert}: {_first(got, want)}"
    want = summed(case, given, memory)
    got = memory["out"]
    return "" if torch.equal(got, want) else f"{case.name}: sum: {_first(got, want)}"


def _of_row(case: Case, given: Given, x: Tensor, expert: int) -> Given:
    """Return what the launches make of one row."""
    p = case.problem.moe
    row = decoded(x, given["w13_input_scale"][expert])
    halves = [multiplied(given, row, "w13", (expert, part)) for part in range(GATE_AND_UP)]
    both = torch.cat(halves, dim=1)
    hidden = decoded(both, given["w2_input_scale"][expert], "swiglu", p.limit)
    products = multiplied(given, hidden, "w2", (expert,))
    return {"x_rows": row, "gate_and_up": both, "hidden_rows": hidden, "products": products}


def decoded(
    values: Tensor, scale: Tensor, source: str = "values", limit: float | None = None
) -> Tensor:
    """Quantise and decode rows by the kernel that does nothing else."""
    columns = values.shape[1] // (2 if source == "swiglu" else 1)
    problem = QuantiseProblem(len(values), columns, LINEAR.name, source, limit=limit, decoded=True)
    given = {"values": values.clone(), "decode_scale": scale.reshape(1).clone()}
    made: Tensor = kernel_named("simt_quantise_nvfp4").run(problem, SETTINGS, **given)["decoded"]
    return made


def multiplied(given: Given, rows: Tensor, name: str, matrix: tuple[int, ...]) -> Tensor:
    """Multiply by the kernel of one matrix."""
    codes, scales = given[f"{name}_codes"][matrix], given[f"{name}_scales"][matrix]
    factor = given[f"{name}_input_scale"][matrix[0]] * given[f"{name}_decode_scale"][matrix]
    problem = W4A16Problem(len(rows), len(codes), 2 * codes.shape[1], SWIZZLE_128X4.name)
    return kernel_named("sm90_gemm_w4a16").run_one(
        problem, SETTINGS, x=rows, codes=codes.clone(), scales=scales.clone(),
        decode_scale=factor.reshape(1),
    )  # fmt: skip


def summed(case: Case, given: Given, memory: Given) -> Tensor:
    """Add up every token's products in the order of its slots, rounded as the kernel says."""
    p, shared = case.problem.moe, case.problem.shared_rows
    rows = memory["products"][shared:].float().reshape(p.tokens, p.chosen, p.hidden)
    chosen = given["experts"]
    here = ((chosen >= 0) & (chosen < p.routed))[..., None]
    total = torch.zeros_like(rows[:, 0])
    for k in range(p.chosen):
        total = torch.where(here[:, k], total + rows[:, k] * given["weights"][:, k, None], total)
    more = given.get("shared", memory["products"][:shared] if shared else None)
    return total if more is None else (total + more.float()).bfloat16()


def _first(got: Tensor, want: Tensor) -> str:
    places = (got != want).nonzero()
    if not len(places):
        return "NaN"
    at = tuple(places[0].tolist())
    return (
        f"{len(places)} of {want.numel()} differ, first at {at}: got {got[at].item()}, "
        f"want {want[at].item()}"
    )


MODELS = {
    "v4-pro": (7168, 3072, 6), "v4-flash": (4096, 2048, 6), "v3.2": (7168, 2048, 8),
}  # fmt: skip


def cases() -> list[Case]:
    """Return the named cases: models with a few of their experts, tails, every kind of choice."""
    made = []
    for seed, (hidden, width, chosen) in enumerate(MODELS.values()):
        for tokens in (1, 3):
            moe = MoeProblem(tokens, hidden, width, 16, chosen, 16, 10.0)
            made.append(Case(ByRowProblem(moe, shared=True), "even", seed))
    for choice in CHOICES:
        for hidden, width in ((352, 416), (512, 256), (32, 32)):
            moe = MoeProblem(5, hidden, width, 8, 3, 8, 2.0)
            made.append(Case(ByRowProblem(moe, shared=True), choice, 7))
            made.append(Case(ByRowProblem(moe), choice, 8, given_shared=True))
            made.append(Case(ByRowProblem(replace(moe, limit=None)), choice, 9))
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn, made = random.Random(f"experts by row {seed}"), []
    for _ in range(count):
        routed = drawn.choice((1, 2, 5, 33))
        part, most = drawn.choice(((32, 30), (256, 8)))  # the latter are walked by whole lines
        moe = MoeProblem(
            tokens=drawn.choice((1, 2, drawn.randint(1, 16))),
            hidden=part * drawn.randint(1, most),
            width=part * drawn.randint(1, most),
            experts=routed,
            chosen=drawn.randint(1, min(4, routed)),
            routed=routed,
            limit=drawn.choice((None, 10.0, 2.0)),
        )
        shared = drawn.random() < 0.6
        given = not shared and drawn.random() < 0.5
        problem = ByRowProblem(moe, shared)
        made.append(Case(problem, drawn.choice(CHOICES), drawn.randrange(1 << 30), given))
    return made


def fresh() -> None:
    """Forget what was compiled of a call's kernels."""
    for kernel in import_module("degarble.kernels.moe.sm90_moe_by_row").KERNEL.kernels:
        kernel.compile_form.cache_clear()
