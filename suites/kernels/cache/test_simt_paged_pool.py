"""Pooling out of paged states: compiled, refusals, on an H200 near float64 in every call."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.cache import problem as facts
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.cache import compressor_checks
from degarble.suites.kernels.cache import paged_pool_checks as checks
from degarble.suites.kernels.cache.compressor_checks import SETTINGS, Case

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 300, 30


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.cache.simt_paged_pool")


@each_target
@pytest.mark.parametrize(
    ("tokens", "served"),
    [
        (5, ((4, 512),)), (3000, ((128, 512),)),
        pytest.param(5, ((4, 128), (128, 512)), marks=pytest.mark.slow),
        pytest.param(200, ((4, 512), (4, 128), (128, 512)), marks=pytest.mark.slow),
        pytest.param(3000, ((4, 512), (4, 128)), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target, tokens: int, served: tuple[tuple[int, int], ...]
) -> None:
    for ratio, width in served:
        pages = facts.StatePages(checks.ROWS[ratio], 9, width * (2 if ratio == 4 else 1))
        problem = facts.PagedPoolProblem(tokens, 1, ratio, pages, width)
        form = facts.choose_paged_form(problem, target.name)
        kernel = kernels.compile_form(form, CompileSettings())
        found = cubin_facts(kernel.cubin)
        assert len(found) == 2
        assert not any(each.spills for each in found)
        assert max(each.registers for each in found) <= 96
        assert unstated_roundings(kernel.ptx) == ()


def a_call() -> tuple[Case, checks.Call]:
    case = Case(4, 128, ((9, 5),))
    return case, checks.call_of(case, compressor_checks.calls(case)[0], checks.empty_states(case))


def test_refuses_by_name(kernels: ModuleType) -> None:
    _, call = a_call()
    good, states = kernels.PagedOperands(*call.tensors), call.states
    for error, name, changed in (
        (DtypeMismatch, "projected", {"projected": good.projected.half()}),
        (ShapeMismatch, "projected", {"projected": good.projected[1:]}),
        (LayoutMismatch, "strides of projected", {"projected": good.projected.T.contiguous().T}),
        (ShapeMismatch, "ape", {"ape": good.ape[:3]}),
        (DtypeMismatch, "requests", {"requests": good.requests.long()}),
        (DtypeMismatch, "positions", {"positions": good.positions.int()}),
        (ShapeMismatch, "slots", {"slots": good.slots[1:]}),
        (ShapeMismatch, "table", {"table": good.table[:1]}),
        (ShapeMismatch, "table", {"table": good.table[:, :0]}),
        (ShapeMismatch, "table", {"table": good.table[0, 0]}),
        (DtypeMismatch, "entries", {"entries": good.entries.int()}),
        (InvalidArgument, "one CUDA device", {}),
    ):
        with pytest.raises(error, match=name):
            kernels.paged_pool(good._replace(**changed), states, call.problem, SETTINGS)
    with pytest.raises(ShapeMismatch, match="states"):
        kernels.paged_pool(good, states[:, :-16].contiguous(), call.problem, SETTINGS)


def test_the_stated_order_is_near_the_definition_and_faults_are_detected() -> None:
    narrow = [case for case in checks.cases() if case.width == 128]
    for case in (*narrow, *checks.fuzzed(1, 6)):
        assert not checks.mismatch(case, checks.by_stated_order), case.name
    case = narrow[1]

    def planted(change: Any) -> str:
        return checks.mismatch(case, lambda call: change(call, checks.by_stated_order(call)))

    def given(call: checks.Call, place: int, tensor: torch.Tensor) -> checks.Made:
        tensors = (*call.tensors[:place], tensor, *call.tensors[place + 1 :])
        return checks.by_stated_order(call._replace(tensors=tensors))

    def a_step_off(call: checks.Call, made: checks.Made) -> checks.Made:
        bits = made.values.clone().view(torch.int16)
        bits[int(torch.nonzero(made.slots >= 0)[-1]), 5] += 1
        del call
        return made._replace(values=bits.view(torch.bfloat16))

    def beyond_a_page(call: checks.Call, made: checks.Made) -> checks.Made:
        del call
        made.states[0, -1] += 1
        return made

    def of_the_first(call: checks.Call, made: checks.Made) -> checks.Made:
        wrong = given(call, 2, call.tensors[2] * 0)
        return made._replace(values=wrong.values)

    assert "states" in planted(lambda call, _: given(call, 1, call.tensors[1] * 0))  # no bias
    assert "states" in planted(lambda call, made: made._replace(states=call.states))
    assert "states" in planted(beyond_a_page)
    assert "slots" in planted(lambda _, made: made._replace(slots=made.slots + 1))
    assert "positions" in planted(lambda _, made: made._replace(positions=made.positions + 1))
    assert "of its budget" in planted(a_step_off)
    assert "of its budget" in planted(of_the_first)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_every_call_is_near_the_definition(case: Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_calls(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


def entries_of(case: Case) -> list[torch.Tensor]:
    """Return the entries of the first sequence, in its order; each call twice, bit for bit."""
    states, found = checks.empty_states(case), []
    for part in compressor_checks.calls(case):
        call = checks.call_of(case, part, states)
        made, again = checks.on_device(call), checks.on_device(call)
        assert torch.equal(plain.bits(made.values), plain.bits(again.values))
        own = (made.slots >= 0) & (call.tensors[2] == 0)
        found += list(made.values[own])
        states = made.states
    return found


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ratio", [4, 128])
def test_chunks_and_batches_change_no_bit(ratio: int) -> None:
    """Nor does it matter that rows lie in pages: simt_compressor gives the same bits."""
    length = 3 * ratio + 2
    whole = Case(ratio, 512, ((length, 9),), seed=8)
    cut = replace(whole, steps=((ratio + 1, 9), (1, 0), (1, 0), (length - ratio - 3, 0)))
    crowd = replace(whole, steps=((length, 700),))
    found = [torch.stack(entries_of(case)) for case in (whole, cut, crowd)]
    assert len(found[0]) == 3
    for other in found[1:]:
        assert torch.equal(plain.bits(found[0]), plain.bits(other))
    rings = torch.full((3, *compressor_checks._ring(whole)), torch.nan)
    call = compressor_checks.call_of(whole, compressor_checks.calls(whole)[0], rings)
    by_rings = compressor_checks.on_device(call)
    own = (by_rings.slots >= 0) & (call.windows[1] == 0)
    assert torch.equal(plain.bits(by_rings.values[own]), plain.bits(found[0]))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_graph_decodes_on(kernels: ModuleType, ratio: int) -> None:
    """One captured step of decode, replayed past a window's end, is the eager one."""
    steps = ((2 * ratio - 3, ratio - 2),) + ((1, 1),) * 6
    case = Case(ratio, 512, steps, seed=7)
    parts = compressor_checks.calls(case)
    states = checks.on_device(checks.call_of(case, parts[0], checks.empty_states(case))).states
    call = checks.call_of(case, parts[1], states)
    operands = kernels.PagedOperands(*(tensor.cuda() for tensor in call.tensors))
    held, out = states.cuda(), kernels.empty_entries(call.problem, torch.device("cuda"))

    def step() -> None:
        kernels.paged_pool(operands, held, call.problem, SETTINGS, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    held.copy_(states)
    closed = 0
    for part in parts[1:]:
        call = checks.call_of(case, part, states)
        want = checks.on_device(call)
        for mine, given in zip(operands, call.tensors, strict=True):
            mine.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.slots.cpu(), want.slots)
        live = want.slots >= 0
        closed += int(live.sum())
        assert torch.equal(plain.bits(out.values.cpu()[live]), plain.bits(want.values[live]))
        assert torch.equal(held.cpu(), want.states)
        states = want.states
    assert closed


@pytest.mark.h200
@pytest.mark.b200
def test_a_missing_page_is_detected_and_no_tokens_launch_nothing(kernels: ModuleType) -> None:
    case, call = a_call()
    for lost in (-1, call.problem.pages.count):
        table = call.tensors[5].clone()
        table[0, 0] = lost
        tensors = (*call.tensors[:5], table, call.tensors[6])
        made, sound = checks.on_device(call._replace(tensors=tensors)), checks.on_device(call)
        first = (call.tensors[2] == 0) & (made.slots >= 0)
        assert bool(made.values[first].isnan().all())
        other = (call.tensors[2] == 1) & (made.slots >= 0)
        assert torch.equal(made.values[other], sound.values[other])
    nobody = replace(call.problem, tokens=0)
    places = {0, 2, 3, 4, 6}
    none = [t[:0] if at in places else t for at, t in enumerate(call.tensors)]
    operands = kernels.PagedOperands(*(tensor.cuda() for tensor in none))
    made = kernels.paged_pool(operands, call.states.cuda(), nobody, SETTINGS)
    assert made.values.shape == (0, case.width)
