"""Lists of slots: compiled for every target, refusals, on an H200 equal to the rule on integers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import CHOSEN, KINDS, WINDOW, SlotsForm, SlotsProblem
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts
from degarble.kernels.runtime.targets import TARGETS, Target

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")
SETTINGS = CompileSettings()


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.cache.simt_slots")


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_spills(kernels: ModuleType, target: Target, kind: str) -> None:
    kernel = kernels.compile_form(SlotsForm(kind, target.name), SETTINGS)
    assert f".target {target.name}\n" in kernel.ptx
    (found,) = cubin_facts(kernel.cubin)
    assert not found.spills, found
    assert found.registers <= 32, found


def told(kernels: ModuleType, problem: SlotsProblem, device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(problem.tokens)
    positions = torch.randint(0, 700, (problem.tokens,), generator=generator)
    positions[:2] = torch.tensor([0, 127])[: problem.tokens]
    owners = torch.randint(-1, problem.sequences + 1, (problem.tokens,), generator=generator).int()
    table = torch.randperm(problem.sequences * problem.columns, generator=generator).int()
    table = table.reshape(problem.sequences, problem.columns)
    table[:, ::17] = -1
    shape, most = (problem.tokens, problem.width), problem.columns + 3
    numbers = torch.randint(-2, most, shape, generator=generator).int()
    made = positions, owners, table, numbers if problem.kind == CHOSEN else None
    return kernels.SlotOperands(*(None if each is None else each.to(device) for each in made))


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = SlotsProblem(3, 8, WINDOW, 2, 16)
    given = told(kernels, problem)
    for error, name, change in (
        (DtypeMismatch, "positions", {"positions": given.positions.int()}),
        (ShapeMismatch, "owners", {"owners": given.owners[:1]}),
        (ShapeMismatch, "table of slots", {"table": given.table.flatten()}),
        (InvalidArgument, "numbers of entries", {"numbers": given.table}),
        (InvalidArgument, "one CUDA device", {}),
    ):
        with pytest.raises(error, match=name):
            kernels.slots(given._replace(**change), problem, SETTINGS)
    short = kernels.SlotLists(torch.zeros(3, 8, dtype=torch.int32), None)
    with pytest.raises(InvalidArgument, match="slots of the tokens"):
        kernels.slots(given, problem, SETTINGS, out=short)


def by_the_rule(problem: SlotsProblem, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    listed = torch.full((problem.tokens, problem.width), -1, dtype=torch.int32)
    own = torch.full((problem.tokens,), -1, dtype=torch.int64)
    table = given.table.tolist()
    for token, (position, owner) in enumerate(
        zip(given.positions.tolist(), given.owners.tolist(), strict=True)
    ):
        if not 0 <= owner < problem.sequences:
            continue
        end = facts.end_of(problem.kind, position, problem.columns, problem.ratio)

        def slot(number: int, row: list[int] = table[owner], end: int = end) -> int:
            inside = 0 <= number < end
            return row[facts.column_of(problem.kind, number, problem.columns)] if inside else -1

        for place in range(problem.width):
            number = facts.number_of(problem.kind, place, position, problem.width)
            if given.numbers is not None:
                number = int(given.numbers[token, place])
            listed[token, place] = slot(number)
        own[token] = slot(position)
    return listed, own


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "width", "columns"), [(1, 128, 128), (7, 129, 320), (70, 8, 64)]
)
def test_equal_to_the_rule_also_in_a_graph(
    kernels: ModuleType, kind: str, tokens: int, width: int, columns: int
) -> None:
    problem = SlotsProblem(tokens, min(width, columns), kind, 5, columns, 4)
    given = told(kernels, problem)
    there = told(kernels, problem, "cuda")
    made = kernels.empty_slots(problem, torch.device("cuda"))
    kernels.slots(there, problem, SETTINGS, out=made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.slots(there, problem, SETTINGS, out=made)
    for shift in (0, 1, 300):
        moved = given._replace(positions=given.positions + shift)
        there.positions.copy_(moved.positions)
        made.listed.fill_(77)
        graph.replay()
        listed, own = by_the_rule(problem, moved)
        assert torch.equal(made.listed.cpu(), listed)
        if kind == WINDOW:
            assert made.own is not None
            assert torch.equal(made.own.cpu(), own)
