"""V3.2's query rows: compiled for every target, refusals, on an H200 every bit."""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.attention.problem import QueryForm, QueryProblem
from degarble.kernels.runtime.compiling import cubin_facts, fused_instructions, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.format_checks import difference
from degarble.suites.kernels.row_checks import SETTINGS

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

pytestmark = pytest.mark.needs("cutlass")
POSITIONS = 300


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.attention.simt_latent_query")


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    kernel = kernels.compile_form(QueryForm(target.name), SETTINGS)
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 32, facts
    assert unstated_roundings(kernel.ptx) == fused_instructions(kernel.ptx) == ()


def drawn(problem: QueryProblem, kind: str = "wide", seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latent, heads = (
        plain.drawn(kind, (problem.tokens, problem.heads, width), seed + width)
        for width in (512, problem.width)
    )
    positions = torch.randint(problem.positions, (problem.tokens,), generator=generator)
    if problem.tokens > 100:
        positions[-1], positions[-2] = problem.positions, -1
    turns = plain.table_of_turns(problem.positions)
    return {"latent": latent, "heads": heads, "turns": turns, "positions": positions}


def by_definition(problem: QueryProblem, given: dict[str, Tensor]) -> Tensor:
    latent, heads, table, positions = given.values()
    turns = plain.turns_at(table, positions).repeat_interleave(problem.heads, 0)
    tail = heads.reshape(-1, problem.width)[:, -64:].float()
    made = plain.with_the_machines_nan(plain.turned_tail(tail, turns))
    return torch.cat((latent, made.view(problem.tokens, problem.heads, 64)), -1)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = QueryProblem(2, 3, 192, 5)
    given = drawn(problem)
    for error, name, operand, wrong in (
        (DtypeMismatch, "latent part", "latent", given["latent"].half()),
        (ShapeMismatch, "query heads", "heads", given["heads"][:, :2]),
        (ShapeMismatch, "turns", "turns", given["turns"][1:]),
        (DtypeMismatch, "positions", "positions", given["positions"].int()),
        (InvalidArgument, "one CUDA device", "positions", given["positions"]),
        (ShapeMismatch, "query rows", "out", given["latent"]),
    ):
        with pytest.raises(error, match=name):
            kernels.KERNEL.run(problem, SETTINGS, **{**given, operand: wrong})


def cases() -> list[tuple[QueryProblem, str, int]]:
    made = [
        (QueryProblem(tokens, heads, width, POSITIONS), "wide", tokens)
        for tokens, heads, width in ((1, 128, 192), (3, 4, 192), (130, 16, 192), (65, 7, 64))
    ]
    made += [(QueryProblem(110, 8, 256, POSITIONS), kind, 3) for kind in plain.SPREADS]
    some = random.Random(5)
    for seed in range(40):
        problem = QueryProblem(
            some.randint(1, 160), some.randint(1, 40), 64 + 16 * some.randint(0, 16), POSITIONS
        )
        made.append((problem, some.choice(plain.SPREADS), seed))
    return made


def mismatch(kernels: ModuleType, case: tuple[QueryProblem, str, int]) -> str:
    problem, kind, seed = case
    given = {name: each.cuda() for name, each in drawn(problem, kind, seed).items()}
    out = kernels.KERNEL.allocate(problem, given["latent"].device)["out"].fill_(7.0)
    made = kernels.KERNEL.run_one(problem, SETTINGS, **given, out=out)
    want = by_definition(problem, given)
    return difference(f"{problem} {kind} {seed}", plain.bits(made), plain.bits(want))


@pytest.mark.h200
@pytest.mark.b200
def test_every_bit_is_that_of_the_stated_order(kernels: ModuleType) -> None:
    assert not [why for case in cases() if (why := mismatch(kernels, case))]


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data(kernels: ModuleType) -> None:
    problem = QueryProblem(16, 8, 192, POSITIONS)
    given = {name: each.cuda() for name, each in drawn(problem).items()}
    out = kernels.KERNEL.run_one(problem, SETTINGS, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.KERNEL.run(problem, SETTINGS, **given, out=out)
    for name, other in drawn(problem, seed=4).items():
        given[name].copy_(other)
    graph.replay()
    assert torch.equal(plain.bits(out), plain.bits(by_definition(problem, given)))
