"""Sparse attention: machine code, refusals, checks that can fail; on an H200 every case."""

from __future__ import annotations

import re
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
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import AttentionForm, MergeForm
from degarble.kernels.primitives.kv_problem import ENTRIES
from degarble.kernels.runtime.machine_code import cubin_facts, unstated_roundings
from degarble.kernels.runtime.settings import CompileSettings
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels.attention import attention_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FUZZED, AT_ONCE = 500, 50
FORMS = [
    AttentionForm(entry, lengths, together, "sm_90a")
    for entry in ENTRIES
    for lengths, together in ((True, 2), (False, 1), (True, 0), (False, 8))
]
IN_CI = FORMS[0]


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.attention.sm90_sparse_attention")


def _named(form: AttentionForm) -> str:
    return f"{form.entry}{'-lengths' * form.lengths}-{form.together}"


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=() if f == IN_CI else pytest.mark.slow) for f in FORMS],
    ids=_named,
)
def test_compiles_without_spills_into_the_products_that_were_meant(
    kernels: ModuleType, form: AttentionForm
) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills, code
    entry = form.format
    assert code.registers <= facts.REGISTER_FILE // facts.threads(entry), code
    assert unstated_roundings(kernel.ptx) == ()
    products = re.findall(r"wgmma\.mma_async\S+?\.(m\d+n\d+k\d+)\.", kernel.ptx)
    # A tile's products are written twice each: before a loop or behind it, and in it.
    halved, columns = facts.halved(entry), facts.columns_at_once(entry)
    assert products.count("m64n64k16") == (2 * 256 // 16 if halved else 0)
    assert products.count("m64n32k16") == (0 if halved else 2 * 512 // 16)
    assert products.count(f"m64n{columns}k16") == 2 * facts.TILE // 16 * 256 // columns
    registers = sorted(map(int, re.findall(r"setmaxnreg\S+ \s*(\d+);", kernel.ptx)))
    assert registers == sorted(facts.registers(entry))


@pytest.mark.parametrize("target", TARGETS)
def test_the_merge_compiles_for_every_target(target: str) -> None:
    merging = import_module("degarble.kernels.attention.simt_attention_merge")
    kernel = merging.compile_form(MergeForm(target), CompileSettings())
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills, code
    assert unstated_roundings(kernel.ptx) == ()


def _changed(given: Any, **changes: Any) -> Any:
    return given._replace(**changes)


def test_refuses_by_name(kernels: ModuleType) -> None:
    case = checks.Case(tokens=2, heads=8, near=5, far=6, pages=(3, 2), lengths=True)
    given = checks.drawn(case, "cpu")
    whole = checks.operands_of(given)
    window = whole.window
    results = kernels.empty_results(case.problem, torch.device("cpu"))
    for error, name, operands, problem in (
        (DtypeMismatch, "query heads", _changed(whole, q=whole.q.float()), case.problem),
        (ShapeMismatch, "query heads", _changed(whole, q=whole.q[:1]), case.problem),
        (
            LayoutMismatch,
            "query heads",
            _changed(whole, q=whole.q.mT.contiguous().mT),
            case.problem,
        ),
        (DtypeMismatch, "sinks", _changed(whole, sink=whole.sink.double()), case.problem),
        (
            DtypeMismatch,
            "slots of the window",
            _changed(whole, window=_changed(window, slots=window.slots.long())),
            case.problem,
        ),
        (
            ShapeMismatch,
            "cache of the window",
            _changed(whole, window=_changed(window, cache=window.cache[1:])),
            case.problem,
        ),
        (
            InvalidArgument,
            "lengths of the window",
            _changed(whole, window=_changed(window, lengths=None)),
            case.problem,
        ),
        (InvalidArgument, "lengths of the window", whole, replace(case.problem, lengths=False)),
        (ShapeMismatch, "lists of keys", _changed(whole, entries=None), case.problem),
        (InvalidArgument, "workspace", whole, replace(case.problem, splits=9)),
        (InvalidArgument, "one CUDA device", whole, case.problem),
    ):
        workspace = None
        if name == "workspace":
            with pytest.raises(error, match=name):
                kernels.require_operands(problem, operands, results, workspace)
            continue
        with pytest.raises(error, match=name):
            kernels.sparse_attention(operands, problem, CompileSettings(), results=results)


def test_numbers_beyond_the_gates_are_seen() -> None:
    case = checks.Case(tokens=2, heads=3, near=9, far=20)
    out, lse = checks.formula(case, checks.drawn(case, "cpu"))
    rounded = out.bfloat16(), lse.float()
    assert not checks.complaint(rounded, (out, lse))
    for number, name in ((torch.nan, "output"), (torch.inf, "output"), (3.0, "output")):
        wrong = rounded[0].clone()
        wrong[1, 2, 511] = number
        assert name in checks.complaint((wrong, rounded[1]), (out, lse))
    assert "LSE" in checks.complaint((rounded[0], rounded[1] * 1.001), (out, lse))
    assert "cosine" in checks.complaint((rounded[0] * 1.015, rounded[1]), (out, lse))
    unfinished = lse.clone()
    unfinished[0, 0] = -torch.inf
    assert "LSE" in checks.complaint(rounded, (out, unfinished))


def test_a_token_without_keys_is_zero_and_the_formula_is_that_of_the_references() -> None:
    from degarble.references import attention  # noqa: PLC0415  the oracle of the oracle
    from degarble.references.numerics import Numerics  # noqa: PLC0415

    case = checks.Case(tokens=1, heads=4, near=9, far=20)
    given = checks.drawn(case, "cpu")
    out, _ = checks.formula(case, given)
    parts = [
        given.decoded[i][slots[0][slots[0] >= 0].long()] for i, slots in enumerate(given.slots)
    ]
    wanted = attention.attend(
        given.q.double(), parts, None, given.sink.double(), Numerics.definition()
    )
    assert torch.allclose(out, wanted, rtol=1e-9, atol=1e-12)
    nothing = checks.Case(gaps=1.0, far=3, near=1, heads=2)
    out, lse = checks.formula(nothing, checks.drawn(nothing, "cpu"))
    assert not out.any()
    assert bool(torch.isneginf(lse).all())


@pytest.mark.h200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_is_within_the_gates(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.parametrize("entry", ENTRIES)
def test_one_key_comes_out_as_kv_read_has_it(entry: str) -> None:
    """Bytes that no writer makes: every code and scale, subnormals and NaN."""
    wrong, lost = checks.rows_as_outputs(entry)
    assert not wrong
    assert 0 < lost < 1


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_cases(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("mode", facts.MODES)
def test_bits_are_a_tokens_own(kernels: ModuleType, mode: str) -> None:
    """Two runs are equal; a token alone, and with a wider list, has the bits that it has beside."""
    case = checks.Case(tokens=70, far=1024, lengths=True, mode=mode, seed=8)
    given = checks.drawn(case)
    out, lse = checks.on_device(case, given)
    for _ in range(3):
        again, lse_again = checks.on_device(case, given)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
    operands = checks.operands_of(given)
    for token in (1, 69):
        alone = operands._replace(
            q=operands.q[token : token + 1],
            window=_of_token(operands.window, token, 0),
            entries=_of_token(operands.entries, token, 129),
        )
        entries = case.problem.entries
        assert entries is not None
        wider = replace(entries, width=entries.width + 129)
        problem = replace(case.problem, tokens=1, entries=wider)
        made = kernels.sparse_attention(alone, problem, checks.SETTINGS)
        assert torch.equal(made.out[0], out[token])
        assert torch.equal(made.lse[0], lse[token])


def _of_token(keys: Any, token: int, more: int) -> Any:
    slots = torch.nn.functional.pad(keys.slots[token : token + 1], (0, more), value=-1)
    return keys._replace(slots=slots.contiguous(), lengths=keys.lengths[token : token + 1].clone())


@pytest.mark.h200
@pytest.mark.parametrize("splits", [2, 3, 8])
def test_a_cluster_merges_as_the_kernel_does(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, splits: int
) -> None:
    case = checks.Case(tokens=3, heads=70, far=1024, lengths=True, splits=splits, seed=6)
    given = checks.drawn(case)
    together = checks.on_device(case, given)
    monkeypatch.setattr(facts, "MOST_TOGETHER", 1)
    assert kernels.empty_workspace(case.problem, given.q.device) is not None
    apart = checks.on_device(case, given)
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])


@pytest.mark.h200
def test_a_slot_beyond_the_cache_is_nan_for_its_token_alone() -> None:
    case = checks.Case(tokens=3, far=700, seed=2)
    given = checks.drawn(case)
    given.slots[1][1, 650] = case.problem.lists[1].pages.slots
    out, lse = checks.on_device(case, given)
    assert bool(out[1].isnan().all())
    assert bool(lse[1].isnan().all())
    assert not out[0].isnan().any()
    assert not checks.complaint((out, lse), checks.formula(case, given))


@pytest.mark.h200
@pytest.mark.parametrize("mode", facts.MODES)
def test_a_graph_replays_on_changed_operands(kernels: ModuleType, mode: str) -> None:
    case = checks.Case(tokens=5, far=1024, lengths=True, mode=mode)
    given = checks.drawn(case)
    results, workspace = checks.memory_for(case, given.q.device)
    operands = checks.operands_of(given)

    def run() -> None:
        kernels.sparse_attention(
            operands, case.problem, checks.SETTINGS, results=results, workspace=workspace
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (4, 5):
        other = replace(case, seed=seed)
        drawn = checks.drawn(other)
        wanted = checks.on_device(other, drawn)
        given.q.copy_(drawn.q)
        given.sink.copy_(drawn.sink)
        assert given.lengths is not None
        assert drawn.lengths is not None
        pairs = (*zip(given.slots, drawn.slots, strict=True),)
        pairs += (*zip(given.caches, drawn.caches, strict=True),)
        pairs += (*zip(given.lengths, drawn.lengths, strict=True),)
        for mine, theirs in pairs:
            mine.copy_(theirs)
        for tensor in results:
            tensor.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(results.out, wanted[0])
        assert torch.equal(results.lse, wanted[1])
