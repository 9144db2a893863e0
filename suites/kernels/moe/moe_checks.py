"""Compare the grouped experts on a GPU with proven kernels run on one expert at a time.

Cases vary shapes, which expert chooses which tokens, and where weights count. For the oracle torch
picks an expert's tokens, which go through simt_quantise_nvfp4 and sm90_gemm_nvfp4; both have proofs
of their own. Every byte of what FC1 writes, every bit of FC2's rows and of the sum must be equal: a
product's order of K does not depend on tiles. Everything between the steps is poison before; what
lies past the last row has to stay poison.

Letters: T tokens, K chosen, S slots, D hidden, F width, E experts here, G experts in all
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.formats.layouts import SWIZZLE_128X4, round_up, to_layout
from degarble.kernels.gemm.problem import GemmProblem, GemmTactic
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, GATE_AND_UP, MoeProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.suites.kernels import gemm_checks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SETTINGS = CompileSettings()
TARGET = "sm_90a"
ARCHITECTURES = {"sm_90a": "sm90", "sm_100a": "sm100"}
NAN_SCALE = 0x7F
WRITTEN_ROWS = {"sm_90a": 64, "sm_100a": 32}  # of a tile, that leave together or not at all
POISON = 0xFF  # two codes of -6, a scale of NaN
EDGES = (1, 127, 128, 129, 0, 63, 64, 65)  # slots of the first experts
CHOICES = ("even", "skewed", "edges", "one", "nobody")


@dataclass(frozen=True)
class Case:
    """One call; everything follows from these facts."""

    problem: MoeProblem
    choice: str = "even"
    seed: int = 0
    tactic: GemmTactic | None = None
    shared: bool = False
    target: str = TARGET

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p, tile = self.problem, self.cut
        return (
            f"{p.tokens} tokens {p.hidden}/{p.width} {p.experts} of {p.routed} top-{p.chosen} "
            f"{p.weighting} limit {p.limit} in {tile.rows}x{tile.columns} {self.choice} "
            f"seed {self.seed}"
        )

    @property
    def cut(self) -> GemmTactic:
        """The tiles of both products."""
        return self.tactic or facts.choose_tactic(self.problem, self.target)

    @property
    def tile(self) -> int:
        """The rows of a tile, or of a cluster's tiles, which have one expert."""
        return facts.rows_of_one_expert(self.cut)


class RowPlan(NamedTuple):
    """What the plan's kernel writes."""

    rows: Tensor
    counts: Tensor
    experts: Tensor  # of each tile
    slots: Tensor
    places: Tensor


class Nvfp4Rows(NamedTuple):
    """Packed codes [R, K / 2], and scale bytes in 128x4 order."""

    codes: Tensor
    scales: Tensor


class ExpertWeights(NamedTuple):
    """The operands of a product that are of the experts."""

    codes: Tensor
    scales: Tensor
    decode_scale: Tensor
    input_scale: Tensor


class MoeWeights(NamedTuple):
    """Both products' weights."""

    w13: ExpertWeights
    w2: ExpertWeights


class Routing(NamedTuple):
    """The experts and routing weights of each token."""

    experts: Tensor
    weights: Tensor
    local: Tensor | None = None


class MoeInputs(NamedTuple):
    """All that a call reads."""

    x: Tensor
    routing: Routing
    weights: MoeWeights
    shared: Tensor | None = None

    @property
    def operands(self) -> dict[str, Tensor]:
        """The tensors by the names of operands."""
        made = {"x": self.x, **self.routing._asdict(), "shared": self.shared}
        for name, weights in self.weights._asdict().items():
            made |= {f"{name}_{part}": tensor for part, tensor in weights._asdict().items()}
        return {name: tensor for name, tensor in made.items() if tensor is not None}


class MoeWorkspace(NamedTuple):
    """What a call leaves between its kernels."""

    plan: RowPlan
    x: Nvfp4Rows
    hidden: Nvfp4Rows
    out: Tensor

    @property
    def operands(self) -> dict[str, Tensor]:
        """The tensors by the names of operands."""
        made = dict(zip(facts.PLANNED, self.plan, strict=True))
        for name, rows in (("x", self.x), ("hidden", self.hidden)):
            made |= {f"{name}_{part}": tensor for part, tensor in rows._asdict().items()}
        return made | {"products": self.out}


class Result(NamedTuple):
    """What a call left: the workspace, and the sum."""

    workspace: MoeWorkspace
    out: Tensor


def entry(target: str = TARGET) -> Any:
    """Return the module of a target's kernels."""
    return import_module(module_of(f"{ARCHITECTURES[target]}_moe_nvfp4"))


def drawn_problem(
    drawn: random.Random, step: int, most: tuple[int, int], limits: Sequence[float | None]
) -> MoeProblem:
    """Draw a problem; `most` steps are the largest hidden size and width."""
    routed = drawn.choice((1, 2, 5, 8, 33, 256))
    return MoeProblem(
        tokens=drawn.choice((1, 3, drawn.randint(1, 40), drawn.randint(1, 700))),
        hidden=step * drawn.randint(1, most[0]),
        width=step * drawn.randint(1, most[1]),
        experts=drawn.randint(1, routed),
        chosen=drawn.randint(1, min(8, routed)),
        routed=routed,
        limit=drawn.choice(limits),
        weighting=drawn.choice(facts.WEIGHTINGS),
    )


def fuzzed(seed: int, count: int, target: str = TARGET) -> list[Case]:
    """Draw cases."""
    drawn, made = random.Random(f"experts {seed}"), []
    tactics = (None, *facts.TILES[target].values())
    for _ in range(count):
        problem = drawn_problem(drawn, 32, (20, 16), (None, 10.0, 2.0))
        choice, tactic = drawn.choice(CHOICES[:2] + CHOICES[3:4]), drawn.choice(tactics)
        rest = (drawn.randrange(1 << 30), tactic, drawn.random() < 0.5)
        made.append(Case(problem, choice, *rest, target))
    return made


# ---- operands ------------------------------------------------------------------------------------


def chosen_experts(case: Case, generator: torch.Generator) -> Tensor:
    """Draw experts of tokens, none twice in a token; int32 [T, K]."""
    p, device = case.problem, generator.device
    if case.choice == "nobody":
        return torch.full((p.tokens, p.chosen), -1, dtype=torch.int32, device=device)
    if case.choice == "edges":
        counts = torch.tensor(EDGES[: p.routed], device=device)
        ids = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        ids = torch.nn.functional.pad(ids, (0, p.slots), value=-1)[: p.slots]
        order = torch.randperm(p.slots, generator=generator, device=device)
        return ids[order].reshape(p.tokens, p.chosen).int()
    score = torch.rand(p.tokens, p.routed, generator=generator, device=device)
    if case.choice == "skewed":
        score *= torch.linspace(0.02, 1, p.routed, device=device)
    if case.choice == "one":
        score[:, p.routed // 2] = 2
    return score.topk(p.chosen).indices.int()


def given_of(case: Case, device: str = "cuda") -> MoeInputs:
    """Draw all that a call reads; padding of scales is NaN."""
    p = case.problem
    generator = torch.Generator(device).manual_seed(case.seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    x = torch.randn(p.tokens, p.hidden, generator=generator, device=device)
    x *= 1 + 30 * (uniform(p.hidden) > 0.99)  # some columns are outliers
    w13, w2 = (
        ExpertWeights(*matrices(leading, n, k, generator), uniform(*leading) + 0.5, scale)
        for leading, n, k, scale in (
            ((p.experts, GATE_AND_UP), p.width, p.hidden, uniform(p.experts) * 0.02 + 0.01),
            ((p.experts,), p.hidden, p.width, uniform(p.experts) * 0.002 + 0.001),
        )
    )
    w13.decode_scale.mul_(2.0**-6)
    weights = uniform(p.tokens, p.chosen)
    if p.weighting == BEFORE_W2:
        weights = torch.exp2(torch.floor(4 * weights) - 2)  # rounding and they change places
    local = None
    if p.experts < p.routed:
        local = torch.full((p.routed,), -1, dtype=torch.int32, device=device)
        ours = torch.randperm(p.routed, generator=generator, device=device)[: p.experts]
        local[ours] = torch.arange(p.experts, dtype=torch.int32, device=device)
    shared = x.flip(0).bfloat16() if case.shared else None
    routing = Routing(chosen_experts(case, generator), weights, local)
    return MoeInputs(x.bfloat16(), routing, MoeWeights(w13, w2), shared)


def matrices(
    leading: tuple[int, ...], n: int, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw codes and scales of many matrices."""
    device = generator.device
    codes = torch.randint(
        0, 256, (*leading, n, k // 2), generator=generator, device=device, dtype=torch.uint8
    )
    blocks = k // 16
    size = SWIZZLE_128X4.storage_size(n, blocks)
    scales = torch.randint(
        0x28, 0x40, (*leading, size), generator=generator, device=device, dtype=torch.uint8
    )
    padding = torch.ones(round_up(n, 128), round_up(blocks, 4), dtype=torch.uint8, device=device)
    padding[:n, :blocks] = 0
    scales[..., to_layout(padding, SWIZZLE_128X4).bool()] = NAN_SCALE
    return codes, scales


def one_expert(tokens: int, hidden: int, width: int, limit: float | None) -> MoeProblem:
    """Return the problem of an expert that every token visits."""
    return MoeProblem(tokens, hidden, width, experts=1, chosen=1, routed=1, limit=limit)


# ---- runs ----------------------------------------------------------------------------------------


def poisoned(case: Case, given: MoeInputs) -> Result:
    """Allocate workspace and output, full of poison."""
    made: dict[str, Any] = {}
    for kernel, own in steps(case, given):
        made |= kernel.allocate(own, given.x.device)
    x, hidden = (
        Nvfp4Rows(made[f"{name}_codes"], made[f"{name}_scales"]) for name in ("x", "hidden")
    )
    plan = RowPlan(*(made[name] for name in facts.PLANNED))
    for rows in (x, hidden):
        rows.codes.fill_(POISON)
        rows.scales.fill_(POISON)
    for each in plan:
        each.fill_(-7)
    products = made["products"].fill_(torch.nan)
    return Result(MoeWorkspace(plan, x, hidden, products), made["out"].fill_(torch.nan))


def steps(case: Case, given: MoeInputs) -> Iterator[tuple[Any, Any]]:
    """Yield the kernels of a call, each with its problem."""
    call = entry(case.target).KERNEL
    yield from zip(call.kernels, call.problems(case.problem, case.cut, given.operands), strict=True)


def launch(case: Case, given: MoeInputs, result: Result) -> None:
    """Run a case in memory that is there."""
    memory = {**result.workspace.operands, "out": result.out}
    entry(case.target).KERNEL.run(case.problem, SETTINGS, case.cut, **given.operands, **memory)


def on_device(case: Case, given: MoeInputs) -> Result:
    """Run a case in poisoned memory."""
    result = poisoned(case, given)
    launch(case, given, result)
    return result


def by_shared_expert(case: Case, given: MoeInputs) -> Tensor:
    """Run the kernels of a shared expert, with every token's weight 1."""
    kernels = import_module(module_of(f"{ARCHITECTURES[case.target]}_shared_expert")).KERNEL
    ours = given.operands | {"weights": torch.ones_like(given.routing.weights)}
    made: Tensor = kernels.run(case.problem, SETTINGS, **ours)["out"]
    return made


def mismatch(case: Case) -> str:
    """Say how a case differs from its oracle; empty where it does not."""
    given = given_of(case)
    return difference(case, given, on_device(case, given))


# ---- the oracle ----------------------------------------------------------------------------------


def slots_of_experts(case: Case, routing: Any) -> list[Tensor]:
    """Return the slots of each expert here, in their order."""
    ids = routing.experts.flatten().long()
    here = ids.clone()
    if routing.local is not None:
        here = torch.where(ids >= 0, routing.local.long()[ids.clamp(min=0)], -1)
    return [(here == e).nonzero().flatten() for e in range(case.problem.experts)]


def difference(case: Case, given: Any, result: Result) -> str:
    """Compare all that a call left with the oracle."""
    plan, tile = result.workspace.plan, case.tile
    row, sums = 0, torch.zeros(case.problem.slots, case.problem.hidden, device=given.x.device)
    taken = torch.zeros(case.problem.slots, dtype=torch.bool, device=given.x.device)
    for expert, slots in enumerate(slots_of_experts(case, given.routing)):
        end = row + round_up(len(slots), tile)
        for what, got, want in _of_expert(case, given, result, (expert, slots, row, end)):
            if not torch.equal(got, want):
                return f"{case.name}: {what} of expert {expert}: {_first(got, want)}"
        sums[slots] = result.workspace.out[row : row + len(slots)].float()
        taken[slots] = True
        row = end
    if int(plan.rows) != row:
        return f"{case.name}: {int(plan.rows)} rows, not {row}"
    if not bool((plan.places[: case.problem.slots][~taken] == facts.NONE).all()):
        return f"{case.name}: a slot that is elsewhere has a row"
    behind = [result.workspace.out[row:].isnan()]
    behind += [each.codes[row:] == POISON for each in (result.workspace.x, result.workspace.hidden)]
    if not all(bool(each.all()) for each in behind):
        return f"{case.name}: written behind the last row"
    want = summed(case, given, sums, taken)
    return "" if torch.equal(result.out, want) else f"{case.name}: sum: {_first(result.out, want)}"


def _of_expert(
    case: Case, given: Any, result: Result, group: tuple[int, Tensor, int, int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what a call made of one expert's rows, and what it should be."""
    expert, slots, row, end = group
    plan, p, count = result.workspace.plan, case.problem, len(slots)
    yield "places", plan.places[slots], torch.arange(row, row + count, device=slots.device).int()
    yield "slots", plan.slots[row : row + count], slots.int()
    yield (
        "padding",
        plan.slots[row + count : end],
        torch.full_like(plan.slots[row + count : end], -1),
    )
    if not count:
        return
    x, hidden, out = wanted(case, given, expert, slots)
    written = row + round_up(count, min(WRITTEN_ROWS[case.target], case.tile))
    for what, got, want, width, last in (
        ("x", result.workspace.x, x, p.hidden, end),
        ("hidden", result.workspace.hidden, hidden, p.width, written),
    ):
        codes = torch.zeros(last - row, width // 2, dtype=torch.uint8, device=slots.device)
        codes[:count] = want[0]
        yield f"codes of {what}", got.codes[row:last], codes
        scales = torch.zeros(last - row, width // 16, dtype=torch.uint8, device=slots.device)
        scales[:count] = scale_codes(want[1], (0, count), width)
        yield f"scales of {what}", scale_codes(got.scales, (row, last), width), scales
    yield "rows", result.workspace.out[row : row + count].view(torch.int16), out.view(torch.int16)
    zeros = result.workspace.out[row + count : written]
    yield "rows of zeros", zeros, torch.zeros_like(zeros)
    behind = result.workspace.out[written:end].isnan()
    yield "rows of nobody", behind, torch.ones_like(behind)


def shown(case: Case, given: Any, result: Result) -> str:
    """Say how what FC1 shows differs from a product of gate and of up; run it in poisoned memory.

    What it writes beside that has to be what it writes without showing.
    """
    p, plan = case.problem, result.workspace.plan
    w13, again = given.weights.w13, poisoned(case, given).workspace
    both = torch.full_like(again.out[:, :1].expand(-1, 2 * p.width), torch.nan).contiguous()
    own = result.workspace._replace(hidden=again.hidden).operands
    kernel = entry().FC1
    memory = own | given.operands
    read = {name: memory[name] for name in kernel.names if name in memory}
    rows = replace(facts.rows_of_call(p, TARGET, case.cut), shown=True)
    kernel.run(rows, SETTINGS, **read, gate_and_up=both)
    for got, want in zip(again.hidden, result.workspace.hidden, strict=True):
        if not torch.equal(got, want):
            return f"{case.name}: another requantisation: {_first(got, want)}"
    for expert, slots in enumerate(slots_of_experts(case, given.routing)):
        x = quantised(given.x[slots // p.chosen], w13.input_scale[expert : expert + 1])
        extents = (len(slots), p.width, p.hidden)
        want = torch.cat([product(x, w13, (expert, part), extents) for part in range(2)], dim=1)
        if not torch.equal(got := both[plan.places[slots].long()], want):
            return f"{case.name}: gate and up of expert {expert}: {_first(got, want)}"
    return ""


def scale_codes(storage: Tensor, rows: tuple[int, int], width: int) -> Tensor:
    """Return the scale codes of some rows [M, K / 16] out of 128x4 order, where they lie."""
    device, blocks = storage.device, width // 16
    row_M1 = torch.arange(*rows, device=device)[:, None]
    found: Tensor = storage[
        SWIZZLE_128X4.offset_of(row_M1, torch.arange(blocks, device=device), None, blocks)
    ]
    return found


def wanted(case: Case, given: Any, expert: int, slots: Tensor) -> tuple[Any, Any, Tensor]:
    """Return codes and scales of x, those of SwiGLU, and the outputs, of one expert's slots."""
    p, count = case.problem, len(slots)
    w13, w2 = given.weights
    x = quantised(given.x[slots // p.chosen], w13.input_scale[expert : expert + 1])
    gate, up = (
        product(x, w13, (expert, part), (count, p.width, p.hidden), case.target)
        for part in range(GATE_AND_UP)
    )
    halves, scale = torch.cat([gate, up], 1), w2.input_scale[expert : expert + 1]
    hidden = quantised(halves, scale, source="swiglu", limit=p.limit, keeps_values=True)
    if p.weighting == BEFORE_W2:
        weights = given.routing.weights.flatten()[slots, None]
        hidden = quantised((hidden[2].float() * weights).bfloat16(), scale)
    return x, hidden, product(hidden, w2, (expert,), (count, p.hidden, p.width), case.target)


def quantised(values: Tensor, scale: Tensor, **more: Any) -> Any:
    """Quantise by the kernel that does nothing else."""
    kernel = import_module("degarble.kernels.quantise.simt_quantise_nvfp4").KERNEL
    columns = values.shape[1] // (2 if more.get("source") == "swiglu" else 1)
    problem = QuantiseProblem(values.shape[0], columns, **more)
    given = {"values": values.contiguous(), "decode_scale": scale.contiguous().clone()}
    made = kernel.run(problem, SETTINGS, **given)
    return made["codes"], made["scales"], made["kept"]


def product(
    a: Any, b: Any, matrix: tuple[int, ...], extents: tuple[int, int, int], target: str = TARGET
) -> Tensor:
    """Multiply by the kernel of one matrix."""
    kernels = import_module(module_of(f"{ARCHITECTURES[target]}_gemm_nvfp4"))
    expert = matrix[0]
    a_scale, b_scale = b.input_scale[expert].reshape(1), b.decode_scale[matrix].reshape(1)
    sides = (a[0], a[1], a_scale.clone(), b.codes[matrix], b.scales[matrix], b_scale.clone())
    return gemm_checks.multiply(kernels, sides, GemmProblem(*extents, "nvfp4", "e4m3"))


def summed(case: Case, given: Any, rows: Tensor, taken: Tensor) -> Tensor:
    """Sum every token's rows in their order, rounding as the kernel says."""
    p = case.problem
    if p.weighting == AFTER_W2:
        rows = rows * given.routing.weights.flatten()[:, None]
    rows = rows.reshape(p.tokens, p.chosen, p.hidden)
    is_there = taken.reshape(p.tokens, p.chosen, 1)
    total: Tensor = torch.zeros_like(rows[:, 0])
    for k in range(p.chosen):
        total = torch.where(is_there[:, k], total + rows[:, k], total)
    if given.shared is None:
        return total
    rounded: Tensor = (total + given.shared.float()).bfloat16()
    return rounded


def _first(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    places = (got != want).nonzero()
    if not len(places):
        return "NaN"
    first = tuple(places[0].tolist())
    return (
        f"{len(places)} of {want.numel()} differ, first at {first}: got {got[first].item()}, "
        f"want {want[first].item()}"
    )
