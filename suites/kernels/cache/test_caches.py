"""What is particular to a kernel of the caches: refusals, faults, walks, foreign bytes."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import CHOSEN, KINDS, WINDOW, PoolProblem, SlotsProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import ENTRIES, Pages, ReadProblem
from degarble.kernels.runtime.modules import kernel_named, module_of
from degarble.suites.kernels import cache_checks as checks
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.cache import compressor_checks as pooling
from degarble.suites.kernels.cache import paged_pool_checks as paged
from degarble.suites.kernels.cache.compressor_checks import Case
from degarble.suites.kernels.contract import SETTINGS

pytestmark = pytest.mark.needs("cutlass")


def test_pooling_waits_before_a_kernel_that_reads_early_is_let_begin() -> None:
    kernel = kernel_named("simt_compressor")
    for alone in (False, True):
        form = facts.PoolForm(4, 512, alone, "sm_90a", few=False)
        pool = kernel.compile_form(form, SETTINGS).ptx.split(".visible .entry")[1]
        wait, let = (pool.index(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
        assert (wait < let) is not alone


def _last_vector_of(position: int, *, corrected: bool) -> tuple[int, int]:
    """Return the last vector of states that is read for an only token, and those of its page."""
    kernels = import_module(module_of("simt_paged_pool"))
    problem = paged.call_on_one_page(position).problem
    form = facts.choose_paged_form(problem, "sm_90a")
    of_page = problem.pages.stride // 4 // form.pool.channels_of_thread
    places = kernels.row_places((position - 7, 0, 0), 2, form)
    listed = kernels.rows_listed(places, [0, 0], problem.pages.count)
    if corrected:
        listed = kernels.rows_or_first(listed, (position + 1) % problem.ratio == 0)
    chunk = form.pool.vectors(problem.width) - 1
    return max(map(max, kernels.vectors_of_rows(listed, (chunk, of_page), form))), of_page


@pytest.mark.parametrize("position", range(4, 8))
def test_rows_of_an_only_token_lie_in_its_page(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = import_module(module_of("simt_paged_pool"))
    for name in ("Int32", "Int64", "Uint32"):
        monkeypatch.setattr(kernels, name, int)
    last, of_page = _last_vector_of(position, corrected=True)
    assert last == of_page - 1
    beyond, _ = _last_vector_of(position, corrected=False)
    assert (beyond >= of_page) is (position < 7)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("position", range(4, 7))
def test_a_token_on_the_only_page_is_kept(position: int) -> None:
    call = paged.call_on_one_page(position)
    for made, exact in zip(paged.on_device(call), paged.by_stated_order(call), strict=True):
        assert torch.equal(made, exact)


# ---- the latent cache: writing and reading -------------------------------------------------------


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


@pytest.mark.h200
@pytest.mark.b200
def test_other_tokens_change_no_entry() -> None:
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
def test_no_tokens_and_no_pages_launch_nothing() -> None:
    for tokens, count in ((0, 2), (3, 0)):
        problem = checks.write_problem("fp8", tokens)
        problem = replace(problem, pages=replace(problem.pages, count=count))
        assert not checks.mismatch(checks.Case(problem))


def test_gaps_are_zeros_and_numbers_beyond_the_cache_are_nan() -> None:
    case = checks.Case(checks.write_problem("fp8", 5, 2))
    pages = case.problem.pages
    asked = torch.tensor([-1, pages.slots, int(case.slots[0])], dtype=torch.int32)
    out = checks.read_by_definition(checks.by_definition(case), asked, pages)
    assert not out[0].any()
    assert out[1].isnan().all()
    assert plain.steps_apart(out[2, 448:], case.rows()[0, 448:]) == 0


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_byte_of_a_foreign_cache_decodes(entry: str) -> None:
    """Bytes that no writer makes: codes and scales that are NaN, subnormal or the largest."""
    pages = Pages(entry, 64, 9)
    generator = torch.Generator().manual_seed(1)
    cache = torch.randint(256, (9, pages.stride), generator=generator, dtype=torch.uint8)
    asked = torch.randperm(pages.slots, generator=generator).to(torch.int32)
    got = checks.read_on_device(cache, asked, ReadProblem(len(asked), pages))
    assert torch.equal(plain.bits(got), plain.bits(checks.read_by_definition(cache, asked, pages)))


def test_the_latent_is_normed_and_the_key_is_not() -> None:
    problem = checks.write_problem("bf16", 4, width=rows.WITH_KEY)
    case = checks.Case(problem, "ordinary")
    larger = replace(case, spread="ordinary")
    larger.__dict__["values"] = case.values.clone()
    larger.values[:, : rows.WIDTH] *= 2
    assert torch.equal(larger.rows()[:, : rows.WIDTH], case.rows()[:, : rows.WIDTH])
    larger.values[:, rows.WIDTH :] *= 2
    assert torch.equal(larger.rows()[:, rows.WIDTH :], 2 * case.rows()[:, rows.WIDTH :])


def test_weight_and_values_of_rows_with_a_key_are_refused_by_name() -> None:
    case = checks.Case(checks.write_problem("fp8-v32", 3, width=rows.WITH_KEY))
    given = checks.operands_of(case, "cpu") | {"cache": case.cache()}
    for name, wrong in (
        ("weight", torch.ones(rows.WITH_KEY, dtype=torch.bfloat16)),
        ("values", case.values[:, :512].contiguous()),
    ):
        with pytest.raises(ShapeMismatch, match=name):
            kernel_named("simt_kv_write").run(case.problem, SETTINGS, **given | {name: wrong})


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("entry", checks.WITH_KEY)
def test_every_byte_of_a_foreign_cache_with_keys_decodes(entry: str) -> None:
    """Bytes that no writer makes: scales that are negative, subnormal, infinite or NaN."""
    pages = Pages(entry, 64, 9, width=rows.WITH_KEY)
    generator = torch.Generator().manual_seed(1)
    cache = torch.randint(256, (9, pages.stride), generator=generator, dtype=torch.uint8)
    asked = torch.randperm(pages.slots, generator=generator).to(torch.int32)
    got = checks.read_on_device(cache, asked, ReadProblem(len(asked), pages))
    want = checks.read_by_definition(cache, asked, pages)
    assert torch.equal(got.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(plain.bits(got)[known], plain.bits(want)[known])


# ---- the compressor, over rings ------------------------------------------------------------------


NARROW = [case for case in pooling.cases() if case.width == 128]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(NARROW[::3], id="few"),
        pytest.param([*NARROW, *pooling.fuzzed(1, 10)], id="all", marks=pytest.mark.slow),
    ],
)
def test_the_stated_order_is_near_the_definition(cases: list[pooling.Case]) -> None:
    for case in cases:
        assert not pooling.mismatch(case, pooling.by_stated_order), case.name


def test_faults_of_the_stated_order_are_detected() -> None:
    case = NARROW[1]

    def planted(change: Any) -> str:
        return pooling.mismatch(case, lambda call: change(call, pooling.by_stated_order(call)))

    def unbiased(call: pooling.Call, made: pooling.Made) -> pooling.Made:
        del made
        return pooling.by_stated_order(call._replace(ape=call.ape * 0))

    def forgets(call: pooling.Call, made: pooling.Made) -> pooling.Made:
        return made._replace(rings=call.rings)

    def off_by_a_page(call: pooling.Call, made: pooling.Made) -> pooling.Made:
        del call
        return made._replace(slots=made.slots + pooling.PAGE * (made.slots >= 0))

    def halves_changed(call: pooling.Call, made: pooling.Made) -> pooling.Made:
        del made
        turned = call.projected.unflatten(1, (2, 2, -1)).flip(2).flatten(1)
        return pooling.by_stated_order(call._replace(projected=turned))

    def a_step_off(call: pooling.Call, made: pooling.Made) -> pooling.Made:
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
@pytest.mark.parametrize("ratio", [4, 128])
def test_chunks_batches_and_repeats_change_no_bit(ratio: int) -> None:
    length = 3 * ratio + 2
    whole = pooling.Case(ratio, 512, ((length, 9),), seed=8)
    cut = replace(whole, steps=((ratio + 1, 9), (1, 0), (1, 0), (length - ratio - 3, 0)))
    alone = replace(whole, steps=((length, 9),))
    found = []
    for case in (whole, cut, alone):
        rings = torch.full((3, *pooling._ring(case)), torch.nan)
        entries = []
        for part in pooling.calls(case):
            call = pooling.call_of(case, part, rings)
            made, again = pooling.on_device(call), pooling.on_device(call)
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
    case = pooling.Case(ratio, 512, ((2 * ratio + 3, 0), (ratio, 0)), seed=6)
    first, second = pooling.calls(case)
    rings = torch.full((3, *pooling._ring(case)), torch.nan)
    rings = pooling.on_device(pooling.call_of(case, first, rings)).rings
    there = pooling.on_device(pooling.call_of(case, second, rings))
    other = 3 - sum(case.ring_of)
    rings[other], rings[case.ring_of[0]] = rings[case.ring_of[0]].clone(), torch.nan
    case.__dict__["ring_of"] = [other, case.ring_of[1]]
    here = pooling.on_device(pooling.call_of(case, second, rings))
    assert torch.equal(there.values.view(torch.int16), here.values.view(torch.int16))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_graph_decodes_on(ratio: int) -> None:
    """One captured step of decode, replayed past a window's end, is the eager one."""
    kernel = kernel_named("simt_compressor")
    steps = ((2 * ratio - 3, ratio - 2),) + ((1, 1),) * 6
    case = pooling.Case(ratio, 512, steps, seed=7)
    parts = pooling.calls(case)
    rings = torch.full((3, *pooling._ring(case)), torch.nan)
    rings = pooling.on_device(pooling.call_of(case, parts[0], rings)).rings
    call = pooling.call_of(case, parts[1], rings)
    given, problem = pooling.operands_of(call), call.problem
    out = kernel.allocate(problem, torch.device("cuda"))

    def step() -> None:
        kernel.run(problem, SETTINGS, **given, **out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    given["rings"].copy_(rings)
    closed = 0
    for part in parts[1:]:
        call = pooling.call_of(case, part, rings)
        want = pooling.on_device(call)
        given["projected"].copy_(call.projected)
        given["starts"].copy_(call.windows[2])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out["places"].cpu(), want.slots)
        live = want.slots >= 0
        closed += int(live.sum())
        got, bits = out["pooled"].cpu()[live], want.values[live]
        assert torch.equal(plain.bits(got), plain.bits(bits))
        assert torch.equal(given["rings"].cpu().view(torch.int32), want.rings.view(torch.int32))
        rings = want.rings
    assert closed


@pytest.mark.h200
@pytest.mark.b200
def test_no_tokens_launch_nothing() -> None:
    words = [torch.zeros(n, dtype=torch.int32) for n in (0, 0, 1, 0)]
    starts, table = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int32)
    windows = (words[0], words[1], starts, words[2], words[3], table)
    projected, ape, rings = (torch.zeros(of) for of in ((0, 512), (4, 256), (1, 8, 512)))
    call = pooling.Call(PoolProblem(0, 0, 0, 1, 4, 128), projected, ape, rings, windows)
    made = kernel_named("simt_compressor").run(call.problem, SETTINGS, **pooling.operands_of(call))
    assert made["pooled"].shape == (0, 128)


# ---- the compressor, over paged states -----------------------------------------------------------


def a_call() -> tuple[Case, paged.Call]:
    case = Case(4, 128, ((9, 5),))
    return case, paged.call_of(case, pooling.calls(case)[0], paged.empty_states(case))


def test_tables_without_pages_are_refused() -> None:
    _, call = a_call()
    good = paged.operands_of(call, "cpu")
    for table in (good["table"][:, :0], good["table"][0, 0]):
        with pytest.raises(ShapeMismatch, match="table"):
            kernel_named("simt_paged_pool").run(call.problem, SETTINGS, **good | {"table": table})


NARROW_PAGES = [case for case in paged.cases() if case.width == 128]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(NARROW_PAGES[::3], id="few"),
        pytest.param([*NARROW_PAGES, *paged.fuzzed(1, 6)], id="all", marks=pytest.mark.slow),
    ],
)
def test_the_stated_order_of_pages_is_near_the_definition(cases: list[Any]) -> None:
    for case in cases:
        assert not paged.mismatch(case, paged.by_stated_order), case.name


def test_faults_of_the_stated_order_of_pages_are_detected() -> None:
    case = NARROW_PAGES[1]

    def planted(change: Any) -> str:
        return paged.mismatch(case, lambda call: change(call, paged.by_stated_order(call)))

    def given(call: paged.Call, place: int, tensor: torch.Tensor) -> paged.Made:
        tensors = (*call.tensors[:place], tensor, *call.tensors[place + 1 :])
        return paged.by_stated_order(call._replace(tensors=tensors))

    def a_step_off(call: paged.Call, made: paged.Made) -> paged.Made:
        bits = made.values.clone().view(torch.int16)
        bits[int(torch.nonzero(made.slots >= 0)[-1]), 5] += 1
        del call
        return made._replace(values=bits.view(torch.bfloat16))

    def beyond_a_page(call: paged.Call, made: paged.Made) -> paged.Made:
        del call
        made.states[0, -1] += 1
        return made

    def of_the_first(call: paged.Call, made: paged.Made) -> paged.Made:
        wrong = given(call, 2, call.tensors[2] * 0)
        return made._replace(values=wrong.values)

    assert "states" in planted(lambda call, _: given(call, 1, call.tensors[1] * 0))  # no bias
    assert "states" in planted(lambda call, made: made._replace(states=call.states))
    assert "states" in planted(beyond_a_page)
    assert "slots" in planted(lambda _, made: made._replace(slots=made.slots + 1))
    assert "positions" in planted(lambda _, made: made._replace(positions=made.positions + 1))
    assert "of its budget" in planted(a_step_off)
    assert "of its budget" in planted(of_the_first)


def entries_of(case: Case) -> list[torch.Tensor]:
    """Return the entries of the first sequence, in its order; each call twice, bit for bit."""
    states, found = paged.empty_states(case), []
    for part in pooling.calls(case):
        call = paged.call_of(case, part, states)
        made, again = paged.on_device(call), paged.on_device(call)
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
    tensors = [torch.stack(entries_of(case)) for case in (whole, cut, crowd)]
    assert len(tensors[0]) == 3
    for other in tensors[1:]:
        assert torch.equal(plain.bits(tensors[0]), plain.bits(other))
    rings = torch.full((3, *pooling._ring(whole)), torch.nan)
    call = pooling.call_of(whole, pooling.calls(whole)[0], rings)
    by_rings = pooling.on_device(call)
    own = (by_rings.slots >= 0) & (call.windows[1] == 0)
    assert torch.equal(plain.bits(by_rings.values[own]), plain.bits(tensors[0]))


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_graph_decodes_on_in_pages(ratio: int) -> None:
    """One captured step of decode, replayed past a window's end, is the eager one."""
    kernel = kernel_named("simt_paged_pool")
    steps = ((2 * ratio - 3, ratio - 2),) + ((1, 1),) * 6
    case = Case(ratio, 512, steps, seed=7)
    parts = pooling.calls(case)
    states = paged.on_device(paged.call_of(case, parts[0], paged.empty_states(case))).states
    call = paged.call_of(case, parts[1], states)
    given = paged.operands_of(call)
    held, out = given["states"], kernel.allocate(call.problem, torch.device("cuda"))

    def step() -> None:
        kernel.run(call.problem, SETTINGS, **given, **out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    held.copy_(states)
    closed = 0
    for part in parts[1:]:
        call = paged.call_of(case, part, states)
        want = paged.on_device(call)
        for name, other in zip(paged.OPERANDS, call.tensors, strict=True):
            given[name].copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out["places"].cpu(), want.slots)
        live = want.slots >= 0
        closed += int(live.sum())
        assert torch.equal(plain.bits(out["pooled"].cpu()[live]), plain.bits(want.values[live]))
        assert torch.equal(held.cpu(), want.states)
        states = want.states
    assert closed


@pytest.mark.h200
@pytest.mark.b200
def test_a_missing_page_is_detected_and_no_tokens_launch_nothing() -> None:
    case, call = a_call()
    for lost in (-1, call.problem.pages.count):
        table = call.tensors[5].clone()
        table[0, 0] = lost
        tensors = (*call.tensors[:5], table, call.tensors[6])
        made, sound = paged.on_device(call._replace(tensors=tensors)), paged.on_device(call)
        first = (call.tensors[2] == 0) & (made.slots >= 0)
        assert bool(made.values[first].isnan().all())
        other = (call.tensors[2] == 1) & (made.slots >= 0)
        assert torch.equal(made.values[other], sound.values[other])
    nobody = replace(call.problem, tokens=0)
    places = {0, 2, 3, 4, 6}
    none = [t[:0] if at in places else t for at, t in enumerate(call.tensors)]
    given = paged.operands_of(paged.Call(nobody, tuple(none), call.states))
    found = kernel_named("simt_paged_pool").run(nobody, SETTINGS, **given)
    assert found["pooled"].shape == (0, case.width)


# ---- lists of slots ------------------------------------------------------------------------------


def told(problem: SlotsProblem, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(problem.tokens)
    positions = torch.randint(0, 700, (problem.tokens,), generator=generator)
    positions[:2] = torch.tensor([0, 127])[: problem.tokens]
    owners = torch.randint(-1, problem.sequences + 1, (problem.tokens,), generator=generator).int()
    table = torch.randperm(problem.sequences * problem.columns, generator=generator).int()
    table = table.reshape(problem.sequences, problem.columns)
    table[:, ::17] = -1
    shape, most = (problem.tokens, problem.width), problem.columns + 3
    numbers = torch.randint(-2, most, shape, generator=generator).int()
    made = {"positions": positions, "owners": owners, "table": table}
    made |= {"numbers": numbers} if problem.kind == CHOSEN else {}
    return {name: tensor.to(device) for name, tensor in made.items()}


def test_lists_without_slots_of_the_tokens_are_refused() -> None:
    problem = SlotsProblem(3, 8, WINDOW, 2, 16)
    short = {"listed": torch.zeros(3, 8, dtype=torch.int32), "own": None}
    with pytest.raises(InvalidArgument, match="slots of the tokens"):
        kernel_named("simt_slots").run(problem, SETTINGS, **told(problem), **short)


def by_the_rule(problem: SlotsProblem, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    listed = torch.full((problem.tokens, problem.width), -1, dtype=torch.int32)
    own = torch.full((problem.tokens,), -1, dtype=torch.int64)
    table = given["table"].tolist()
    for token, (position, owner) in enumerate(
        zip(given["positions"].tolist(), given["owners"].tolist(), strict=True)
    ):
        if not 0 <= owner < problem.sequences:
            continue
        end = facts.end_of(problem.kind, position, problem.columns, problem.ratio)

        def slot(number: int, row: list[int] = table[owner], end: int = end) -> int:
            inside = 0 <= number < end
            return row[facts.column_of(problem.kind, number, problem.columns)] if inside else -1

        for place in range(problem.width):
            number = facts.number_of(problem.kind, place, position, problem.width)
            if "numbers" in given:
                number = int(given["numbers"][token, place])
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
    kind: str, tokens: int, width: int, columns: int
) -> None:
    kernel = kernel_named("simt_slots")
    problem = SlotsProblem(tokens, min(width, columns), kind, 5, columns, 4)
    given, there = told(problem), told(problem, "cuda")
    made = kernel.run(problem, SETTINGS, **there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(problem, SETTINGS, **there, **made)
    for shift in (0, 1, 300):
        moved = given | {"positions": given["positions"] + shift}
        there["positions"].copy_(moved["positions"])
        made["listed"].fill_(77)
        graph.replay()
        listed, own = by_the_rule(problem, moved)
        assert torch.equal(made["listed"].cpu(), listed)
        if kind == WINDOW:
            assert made["own"] is not None
            assert torch.equal(made["own"].cpu(), own)
