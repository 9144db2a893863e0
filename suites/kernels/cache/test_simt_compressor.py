"""The compressor: compiled for every target, refusals, on an H200 near float64 in every call."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.cache.problem import PoolForm, PoolProblem
from degarble.kernels.primitives.kv_problem import Pages
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import cache_checks
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.cache import compressor_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 500, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.cache.simt_compressor")


def require_sound(kernels: ModuleType, form: PoolForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    found = cubin_facts(kernel.cubin)
    assert len(found) == (1 if form.alone else 2)
    for facts in found:
        assert not facts.spills, facts
        assert facts.registers <= 168, facts
    assert unstated_roundings(kernel.ptx) == ()


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, PoolForm(4, 512, alone=True, target=target.name, few=True))
    require_sound(kernels, PoolForm(128, 512, alone=False, target=target.name))


@pytest.mark.slow
@each_target
def test_every_form_compiles(kernels: ModuleType, target: Target) -> None:
    for ratio in (4, 128):
        for width in (512, 128):
            for alone, few in ((True, True), (True, False), (False, False)):
                require_sound(kernels, PoolForm(ratio, width, alone, target.name, few))


def test_refuses_by_name(kernels: ModuleType) -> None:
    case = checks.Case(4, 128, ((9, 5),))
    rings = torch.zeros(3, 8, 512)
    call = checks.call_of(case, checks.calls(case)[0], rings)
    carried = kernels.Carried(call.projected, call.ape, rings)
    windows = kernels.Windows(*call.windows)
    problem = call.problem
    for error, name, given in (
        (DtypeMismatch, "projected", (carried._replace(projected=call.projected.half()), windows)),
        (ShapeMismatch, "ape", (carried._replace(ape=call.ape[:3]), windows)),
        (ShapeMismatch, "rings", (carried._replace(rings=rings[:2]), windows)),
        (DtypeMismatch, "starts", (carried, windows._replace(starts=windows.starts.int()))),
        (ShapeMismatch, "offsets", (carried, windows._replace(offsets=windows.offsets[1:]))),
        (ShapeMismatch, "table", (carried, windows._replace(table=windows.table[:1]))),
        (InvalidArgument, "one CUDA device", (carried, windows)),
    ):
        with pytest.raises(error, match=name):
            kernels.pool(*given, problem, checks.SETTINGS)
    with pytest.raises(InvalidArgument, match="width of cache rows"):
        kernels.CompressorProblem(problem, Pages("fp8", 64, 1), 5)


def test_the_stated_order_is_near_the_definition_and_faults_are_detected() -> None:
    chosen = [case for case in checks.cases() if case.width == 128]
    for case in (*chosen, *checks.fuzzed(1, 10)):
        assert not checks.mismatch(case, checks.by_stated_order), case.name
    case = chosen[1]

    def planted(change: Any) -> str:
        return checks.mismatch(case, lambda call: change(call, checks.by_stated_order(call)))

    def unbiased(call: checks.Call, made: checks.Made) -> checks.Made:
        del made
        return checks.by_stated_order(call._replace(ape=call.ape * 0))

    def forgets(call: checks.Call, made: checks.Made) -> checks.Made:
        return made._replace(rings=call.rings)

    def off_by_a_page(call: checks.Call, made: checks.Made) -> checks.Made:
        del call
        return made._replace(slots=made.slots + checks.PAGE * (made.slots >= 0))

    def halves_changed(call: checks.Call, made: checks.Made) -> checks.Made:
        del made
        turned = call.projected.unflatten(1, (2, 2, -1)).flip(2).flatten(1)
        return checks.by_stated_order(call._replace(projected=turned))

    def a_step_off(call: checks.Call, made: checks.Made) -> checks.Made:
        del call
        bits = made.values.clone().view(torch.int16)
        bits[-1, 5] += 1
        return made._replace(values=bits.view(torch.bfloat16))

    assert "of its budget" in planted(unbiased)
    assert "ring" in planted(forgets)
    assert "slots" in planted(off_by_a_page)
    assert "of its budget" in planted(halves_changed)
    assert "of its budget" in planted(a_step_off)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_every_call_is_near_the_definition(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_calls(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ratio", [4, 128])
def test_chunks_batches_and_repeats_change_no_bit(ratio: int) -> None:
    length = 3 * ratio + 2
    whole = checks.Case(ratio, 512, ((length, 9),), seed=8)
    cut = replace(whole, steps=((ratio + 1, 9), (1, 0), (1, 0), (length - ratio - 3, 0)))
    alone = replace(whole, steps=((length, 9),))
    found = []
    for case in (whole, cut, alone):
        rings = torch.full((3, *checks._ring(case)), torch.nan)
        entries = []
        for part in checks.calls(case):
            call = checks.call_of(case, part, rings)
            made, again = checks.on_device(call), checks.on_device(call)
            assert torch.equal(made.values.view(torch.int16), again.values.view(torch.int16))
            own = (made.slots >= 0) & (call.windows[1] == 0)
            entries += list(made.values[own])
            rings = made.rings
        found.append(torch.stack(entries))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_prefix_goes_on_by_its_ring(ratio: int) -> None:
    """Two sequences share a prefix; the second has a copy of the first one's ring."""
    case = checks.Case(ratio, 512, ((2 * ratio + 3, 0), (ratio, 0)), seed=6)
    first, second = checks.calls(case)
    rings = torch.full((3, *checks._ring(case)), torch.nan)
    rings = checks.on_device(checks.call_of(case, first, rings)).rings
    there = checks.on_device(checks.call_of(case, second, rings))
    other = 3 - sum(case.ring_of)
    rings[other], rings[case.ring_of[0]] = rings[case.ring_of[0]].clone(), torch.nan
    case.__dict__["ring_of"] = [other, case.ring_of[1]]
    here = checks.on_device(checks.call_of(case, second, rings))
    assert torch.equal(there.values.view(torch.int16), here.values.view(torch.int16))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("entry", ["fp8", "nvfp4", "bf16"])
@pytest.mark.parametrize("width", [512, 128])
def test_what_is_stored_is_kv_writes_of_the_pooled(
    kernels: ModuleType, width: int, entry: str
) -> None:
    case = checks.Case(4, width, ((70, 33),), seed=5)
    call = checks.call_of(case, checks.calls(case)[0], torch.full((3, 8, 4 * width), torch.nan))
    pages = Pages(entry, checks.PAGE, int(case.table.max()) + 1, width=width)
    problem = kernels.CompressorProblem(call.problem, pages, 80)
    of_writing = cache_checks.Case(problem.write, seed=5)
    cache = of_writing.cache().cuda()
    carried = kernels.Carried(call.projected.cuda(), call.ape.cuda(), call.rings.cuda())
    windows = kernels.Windows(*(tensor.cuda() for tensor in call.windows))
    assert of_writing.weight is not None
    assert of_writing.turns is not None
    norm = (of_writing.weight.cuda(), of_writing.turns.cuda())
    made = kernels.compressor(carried, windows, norm, cache, problem, checks.SETTINGS)
    for name, tensor in made._asdict().items():
        of_writing.__dict__[name] = tensor.cpu()
    assert torch.equal(cache.cpu(), cache_checks.by_definition(of_writing))
    assert int((made.slots >= 0).sum()) == 70 // 4 + 33 // 4


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_graph_decodes_on(kernels: ModuleType, ratio: int) -> None:
    """One captured step of decode, replayed past a window's end, is the eager one."""
    steps = ((2 * ratio - 3, ratio - 2),) + ((1, 1),) * 6
    case = checks.Case(ratio, 512, steps, seed=7)
    parts = checks.calls(case)
    rings = torch.full((3, *checks._ring(case)), torch.nan)
    rings = checks.on_device(checks.call_of(case, parts[0], rings)).rings
    call = checks.call_of(case, parts[1], rings)
    carried = kernels.Carried(call.projected.cuda(), call.ape.cuda(), rings.cuda())
    windows = kernels.Windows(*(tensor.cuda() for tensor in call.windows))
    out = kernels.empty_entries(call.problem, torch.device("cuda"))

    def step() -> None:
        told = (call.problem, checks.SETTINGS)
        kernels.pool(carried, windows, *told, page_entries=checks.PAGE, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    carried.rings.copy_(rings)
    closed = 0
    for part in parts[1:]:
        call = checks.call_of(case, part, rings)
        want = checks.on_device(call)
        carried.projected.copy_(call.projected)
        windows.starts.copy_(call.windows[2])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.slots.cpu(), want.slots)
        live = want.slots >= 0
        closed += int(live.sum())
        got, bits = out.values.cpu()[live], want.values[live]
        assert torch.equal(plain.bits(got), plain.bits(bits))
        assert torch.equal(carried.rings.cpu().view(torch.int32), want.rings.view(torch.int32))
        rings = want.rings
    assert closed


@pytest.mark.h200
@pytest.mark.b200
def test_no_tokens_launch_nothing(kernels: ModuleType) -> None:
    problem = PoolProblem(0, 0, 0, 1, 4, 128)
    carried = kernels.Carried(
        *(torch.zeros(shape, device="cuda") for shape in ((0, 512), (4, 256), (1, 8, 512)))
    )
    words = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (0, 0, 1, 0)]
    starts = torch.zeros(0, dtype=torch.int64, device="cuda")
    table = torch.zeros(0, 2, dtype=torch.int32, device="cuda")
    windows = kernels.Windows(words[0], words[1], starts, words[2], words[3], table)
    assert kernels.pool(carried, windows, problem, checks.SETTINGS).values.shape == (0, 128)
