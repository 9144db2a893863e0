"""Writing into the latent cache: compiled for every target, refusals, on an H200 every byte."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.primitives.kv_problem import (
    ENTRIES,
    KEY,
    KEY_WIDTH,
    WriteForm,
    choose_write_form,
)
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import cache_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 500, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.cache.simt_kv_write")


def require_sound(kernels: ModuleType, form: WriteForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    target = TARGETS[form.target]
    assert f".target {target.name}\n" in kernel.ptx
    found = cubin_facts(kernel.cubin)
    assert len(found) == (2 if form.duplicates == "last" else 1)
    for facts in found:
        assert not facts.spills, facts
        assert facts.registers <= (56 if form.few else 32), facts
        assert facts.shared_bytes == 0, facts
    assert unstated_roundings(kernel.ptx) == ()
    # The sum of squares; for NVFP4, in each of two halves, the inverse's error and eight quotients,
    # on sm_90a the inverse, and quotients and codes of four pairs.
    nvfp4 = form.format.code_bits == 4
    halves = 2 if form.width == 512 else 1
    fused = 7 * halves * (form.source == "latent")
    fused += halves * nvfp4 * (1 + 8 if target.converts_e2m1 else 2 + 4 + 4)
    assert len(fused_instructions(kernel.ptx)) == fused


@each_target
@pytest.mark.parametrize("entry", ["fp8", "nvfp4"])
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target, entry: str
) -> None:
    for few in (True, False):
        require_sound(kernels, WriteForm(entry, "latent", "bf16", "absent", few, target.name))


@each_target
def test_an_indexers_keys_compile(kernels: ModuleType, target: Target) -> None:
    for few in (True, False):
        form = WriteForm(KEY, "latent", "bf16", "absent", few, target.name, KEY_WIDTH)
        require_sound(kernels, form)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("duplicates", ["absent", "last"])
def test_every_form_compiles(
    kernels: ModuleType, target: Target, entry: str, duplicates: str
) -> None:
    for source, weight in (("latent", "bf16"), ("latent", "fp32"), ("row", "bf16")):
        for few, width in ((True, 512), (False, 512), (True, 128), (False, 128)):
            form = WriteForm(entry, source, weight, duplicates, few, target.name, width)
            require_sound(kernels, form)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = replace(checks.write_problem("fp8", 4), duplicates="last")
    case = checks.Case(problem)
    cache_NB, claims = case.cache(), torch.full((problem.pages.slots,), -1, dtype=torch.int32)
    given = (case.values, case.weight, case.turns, case.positions, case.slots, claims)
    good = kernels.WriteOperands(*given)
    for error, name, changed in (
        (DtypeMismatch, "values", {"values": case.values.float()}),
        (ShapeMismatch, "values", {"values": case.values[:3]}),
        (LayoutMismatch, "strides of values", {"values": case.values.T.contiguous().T}),
        (DtypeMismatch, "weight", {"weight": good.weight.float()}),
        (InvalidArgument, "weight", {"weight": None}),
        (ShapeMismatch, "turns", {"turns": good.turns[1:]}),
        (DtypeMismatch, "positions", {"positions": good.positions.int()}),
        (DtypeMismatch, "slots", {"slots": case.slots.int()}),
        (InvalidArgument, "claims", {"claims": None}),
        (ShapeMismatch, "claims", {"claims": claims[1:]}),
        (InvalidArgument, "one CUDA device", {}),
    ):
        with pytest.raises(error, match=name):
            kernels.kv_write(good._replace(**changed), cache_NB, problem, checks.SETTINGS)
    with pytest.raises(ShapeMismatch, match="cache"):
        kernels.kv_write(good, cache_NB[:, :-16].contiguous(), problem, checks.SETTINGS)
    row = replace(problem, source="row", positions=0)
    with pytest.raises(InvalidArgument, match="weight"):
        kernels.kv_write(good, cache_NB, row, checks.SETTINGS)


def test_a_wrong_bit_and_a_byte_too_many_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in ENTRIES:
        case = checks.Case(checks.write_problem(entry, 5, 3), "wide")
        out = checks.by_definition(case)
        monkeypatch.setattr(checks, "on_device", lambda _case, out=out: out)
        assert not checks.mismatch(case)
        of_values, of_scales = checks.places(case.problem.pages, int(case.slots[4]))
        page = int(case.slots[4]) // 3
        for byte in (of_values.start, of_values.stop - 1, of_scales.stop - 1, out.shape[1] - 1):
            kept = int(out[page, byte])
            out[page, byte] = kept ^ 1
            assert "1 of" in checks.mismatch(case)
            out[page, byte] = kept


def test_the_last_of_repeated_slots_stays_and_others_are_left_alone() -> None:
    case = checks.Case(checks.write_problem("bf16", 40, 4, duplicates="last"), slots_are="repeated")
    cache_NB, slots = checks.by_definition(case), case.slots.tolist()
    assert len(set(slots)) < len(slots)
    rows_TL = case.rows()
    for slot in range(case.problem.pages.slots):
        entry = cache_NB[slot // 4, checks.places(case.problem.pages, slot)[0]]
        if slot in slots:
            last = max(token for token, at in enumerate(slots) if at == slot)
            assert torch.equal(entry.view(torch.bfloat16), rows_TL[last])
        else:
            assert (entry == checks.POISON).all()


def test_cases_have_names_of_their_own_and_fuzzed_ones_differ() -> None:
    names = [case.name for case in checks.cases()]
    assert len(set(names)) == len(names)
    assert checks.fuzzed(1, 20) == checks.fuzzed(1, 20) != checks.fuzzed(2, 20)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_every_byte_is_that_of_the_definition(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_caches(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal_and_other_tokens_change_no_entry() -> None:
    for case in checks.fuzzed(99, 20):
        assert torch.equal(checks.on_device(case), checks.on_device(case)), case.name
    whole = checks.Case(checks.write_problem("nvfp4", 260), "wide", "in a row")
    cache_NB = checks.on_device(whole)
    alone = checks.Case(replace(whole.problem, tokens=1), "wide")
    for token in (0, 100, 258):
        for name in ("values", "positions", "slots"):
            alone.__dict__[name] = getattr(whole, name)[token : token + 1]
        alone.__dict__["weight"] = whole.weight
        slot = int(whole.slots[token])
        got = checks.on_device(alone)[slot // 64]
        for place in checks.places(whole.problem.pages, slot):
            assert torch.equal(got[place], cache_NB[slot // 64, place])


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("duplicates", ["absent", "last"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_graph_replays_on_changed_data(kernels: ModuleType, entry: str, duplicates: str) -> None:
    problem = checks.write_problem(entry, 257, duplicates=duplicates)
    kind = "repeated" if duplicates == "last" else "spread"
    cases = [checks.Case(problem, "wide", kind, seed) for seed in range(3)]
    first = cases[0]
    claims = kernels.empty_claims(problem, torch.device("cuda")) if duplicates == "last" else None
    names = ("values", "weight", "turns", "positions", "slots")
    operands = kernels.WriteOperands(*(getattr(first, name).cuda() for name in names), claims)
    cache_NB = first.cache().cuda()
    kernels.kv_write(operands, cache_NB, problem, checks.SETTINGS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.kv_write(operands, cache_NB, problem, checks.SETTINGS)
    for case in cases:
        for name in ("values", "weight", "positions", "slots"):
            getattr(operands, name).copy_(getattr(case, name))
        cache_NB.fill_(checks.POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cache_NB.cpu(), checks.by_definition(case))


@pytest.mark.h200
@pytest.mark.b200
def test_no_tokens_and_no_pages_launch_nothing() -> None:
    for tokens, count in ((0, 2), (3, 0)):
        problem = checks.write_problem("fp8", tokens)
        problem = replace(problem, pages=replace(problem.pages, count=count))
        assert not checks.mismatch(checks.Case(problem))


def test_extents_are_no_part_of_the_kernel(kernels: ModuleType) -> None:
    problems = [checks.write_problem("fp8", *extents) for extents in ((1, 1), (9, 64))]
    (form,) = {choose_write_form(problem, "sm_90a") for problem in problems}
    first = kernels.compile_form(form, CompileSettings())
    assert kernels.compile_form(form, CompileSettings()) is first
