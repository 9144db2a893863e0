"""What is particular to sparse attention: its gates, refusals, a token's bits, planted faults."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import MergeProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import ENTRIES, entry_format
from degarble.references import attention, numerics
from degarble.references.numerics import Numerics
from degarble.suites.kernels.attention import attention_checks as checks
from degarble.suites.kernels.attention import attention_faults as faults
from degarble.suites.kernels.attention.contract import OF_V32, V32, WIDTH
from degarble.suites.kernels.contract import SETTINGS, kernels_of

pytestmark = pytest.mark.needs("cutlass")

V4 = checks.Case(far=1024)
# Wider by one split of decoding: other widths move keys to other splits, and so change bits.
each_widening = pytest.mark.parametrize(
    ("case", "lists"),
    [(V4, {"window": 0, "entries": 513}), (V32, {"window": 961})],
    ids=["V4", "V3.2"],
)
each_fault = pytest.mark.parametrize(
    "fault",
    [*faults.FAULTS, *faults.FAULTS_OF_V32, *faults.FAULTS_IN_TURNS],
    ids=lambda fault: fault.name.replace(" ", "-"),
)


def test_sums_of_splits_have_to_be_there() -> None:
    case = checks.Case(tokens=2, heads=8, near=5, far=6, pages=(3, 2), lengths=True)
    kernel, whole = (
        kernels_of("sm90_sparse_attention").KERNEL,
        checks.operands_of(checks.drawn(case, "cpu")),
    )
    with pytest.raises(InvalidArgument, match="sums"):
        kernel.require(
            replace(case.problem, splits=9),
            whole | kernel.allocate(case.problem, torch.device("cpu")),
        )


def test_sinks_and_lists_that_a_family_lacks_are_refused() -> None:
    kernels = kernels_of("sm90_sparse_attention")
    case = replace(V32, near=5, heads=8)
    whole = checks.operands_of(checks.drawn(case, "cpu"))
    for error, name, changes in (
        (InvalidArgument, "sinks", {"sink": torch.zeros(8)}),
        (ShapeMismatch, "query heads", {"q": whole["q"][..., : rows.WIDTH].contiguous()}),
        (InvalidArgument, "slots of the entries", {"entries_slots": whole["window_slots"]}),
    ):
        with pytest.raises(error, match=name):
            kernels.KERNEL.run(case.problem, SETTINGS, **whole | changes)
    of_v4 = checks.Case(near=5, far=None, heads=8)
    without: dict[str, Any] = checks.operands_of(checks.drawn(of_v4, "cpu")) | {"sink": None}
    with pytest.raises(InvalidArgument, match="sinks"):
        kernels.KERNEL.run(of_v4.problem, SETTINGS, **without)


@pytest.mark.parametrize("name", ["fp8", "fp8-v32"])
def test_lanes_have_the_scales_of_their_codes_and_meet_all_banks(name: str) -> None:
    gather = import_module("degarble.kernels.attention.gather")
    entry = entry_format(name, WIDTH if name in OF_V32 else rows.WIDTH)
    taken: list[int] = []
    for part in range(2):
        for lane in range(32):
            first = lane * gather.CODES + part * gather.SECOND_CODES
            if first < entry.quantised:
                assert gather.block_of_codes(lane, part, entry) == first // entry.block
                taken += range(first, first + gather.CODES)
    assert taken == [*range(entry.quantised)]
    for row in range(8):
        at = [int(gather.address_in_tile(row, lane)) for lane in range(32)]
        # A quarter of a warp meets all banks, and codes 256 further on lie SECOND_BYTES further on.
        assert all(len({i % 128 for i in at[k : k + 8]}) == 8 for k in range(0, 32, 8))
        assert [int(gather.address_in_tile(row, lane + 32)) for lane in range(32)] == [
            i + gather.SECOND_BYTES for i in at
        ]


def test_numbers_beyond_the_gates_are_detected() -> None:
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


def test_the_formula_of_v32_is_that_of_the_references() -> None:
    case = replace(V32, tokens=1, heads=4, near=30, gaps=0.0)
    given = checks.drawn(case, "cpu")
    out, _ = checks.formula(case, given)
    found = given.decoded[0][given.slots[0][0].long()]
    form = attention.Form(rows.WIDTH, rows.WIDTH, case.problem.scale, False)
    identity = torch.eye(rows.WIDTH, dtype=torch.float64)
    wkv_b = torch.cat((identity, identity)).repeat(4, 1)
    made = attention.attend_absorbed(
        given.q.double(), found, wkv_b, None, form, Numerics.definition()
    )
    assert torch.allclose(out.flatten(1), made, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize(
    ("entry", "width"),
    [
        *(
            pytest.param(entry, rows.WIDTH, marks=[pytest.mark.h200, pytest.mark.b200])
            for entry in ENTRIES
        ),
        *(pytest.param(entry, WIDTH, marks=pytest.mark.h200) for entry in OF_V32),
    ],
)
def test_one_key_comes_out_as_kv_read_has_it(entry: str, width: int) -> None:
    """Bytes that no writer makes: every code and scale, subnormals and NaN."""
    wrong, lost = checks.rows_as_outputs(entry, width)
    assert not wrong
    assert 0 < lost < 1


def widened(problem: facts.AttentionProblem, lists: dict[str, int]) -> facts.AttentionProblem:
    """Return the problem of one token whose lists are so much wider."""
    plain = {name: getattr(problem, name) for name in lists}
    wider = {name: replace(of, width=of.width + lists[name]) for name, of in plain.items()}
    return replace(problem, tokens=1, **wider)


@each_widening
def test_a_wider_list_adds_splits_and_moves_no_key_to_another(
    case: checks.Case, lists: dict[str, int]
) -> None:
    plain = replace(case, mode="decode").problem
    wider = widened(plain, lists)
    assert facts.tiles_each(wider) == facts.tiles_each(plain)
    assert facts.choose_splits(wider) > facts.choose_splits(plain) > 1


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.h200
@pytest.mark.parametrize("mode", facts.MODES)
@each_widening
def test_bits_are_a_tokens_own(case: checks.Case, lists: dict[str, int], mode: str) -> None:
    """Two runs are equal; a token alone, its list a split wider, has its bits of beside."""
    case = replace(case, tokens=70, lengths=True, mode=mode, seed=8)
    given, kernel = checks.drawn(case), kernels_of("sm90_sparse_attention").KERNEL
    out, lse = checks.on_device(case, given)
    for _ in range(3):
        again, lse_again = checks.on_device(case, given)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
    problem = widened(case.problem, lists)
    for token in (1, 69):
        made = kernel.run(problem, SETTINGS, **checks.of_token(given, token, **lists))
        assert torch.equal(made["out"][0], out[token])
        assert torch.equal(made["lse"][0], lse[token])


@pytest.mark.b200
@pytest.mark.parametrize("mode", facts.MODES)
def test_two_runs_are_equal_bit_for_bit(mode: str) -> None:
    case = replace(V4, tokens=70, lengths=True, mode=mode, seed=8)
    given = checks.drawn(case)
    (out, lse), (again, lse_again) = (checks.on_device(case, given) for _ in range(2))
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.h200
@pytest.mark.parametrize(
    "case",
    [*(replace(V4, splits=splits) for splits in (2, 3, 8)), V32],
    ids=["2", "3", "8", "V3.2"],
)
def test_a_cluster_merges_as_the_kernel_does(
    case: checks.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, tokens=3, heads=70, lengths=True, seed=6)
    given, kernel = checks.drawn(case), kernels_of("sm90_sparse_attention").KERNEL
    together = checks.on_device(case, given)
    monkeypatch.setattr(facts, "MOST_TOGETHER", 1)
    monkeypatch.setitem(vars(kernel), "prepared", kernel.prepared.__wrapped__)
    if case.splits:
        assert kernel.allocate(case.problem, given.q.device)["sums"] is not None
    apart = checks.on_device(case, given)
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])


@pytest.mark.h200
@pytest.mark.parametrize("case", [replace(V4, splits=9), replace(V32, splits=16)])
def test_fewer_heads_of_a_thread_block_have_the_same_bits(
    case: checks.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, tokens=1, heads=70, seed=7)
    given = checks.drawn(case)
    assert facts.heads_of_block(case.problem) < facts.HEADS
    few = checks.on_device(case, given)
    monkeypatch.setattr(facts, "heads_of_block", lambda _problem: facts.HEADS)
    many = checks.on_device(case, given)
    assert torch.equal(few[0], many[0])
    assert torch.equal(few[1], many[1])


@pytest.mark.usefixtures("kernel_cache")
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


# ---- planted faults ------------------------------------------------------------------------------


@each_fault
def test_a_fault_is_planted_and_removed(fault: faults.Fault) -> None:
    module = import_module(fault.module)
    true = getattr(module, fault.function)
    with faults.planted(fault):
        assert getattr(module, fault.function) is not true
    assert getattr(module, fault.function) is true


@each_fault
def test_the_merge_of_a_fault_leaves_no_split_out(fault: faults.Fault) -> None:
    problem, form = faults.merge_of(fault)
    assert problem.splits <= form.at_once


def test_a_form_that_leaves_splits_out_is_refused() -> None:
    merging = kernels_of("simt_attention_merge")
    for splits in range(1, facts.MOST_SPLITS + 1):
        problem = MergeProblem(3, 64, splits)
        chosen = merging.choose_form(problem, "sm_90a")
        merging.KERNEL.refuse_form(problem, chosen)
        with pytest.raises(InvalidArgument, match="form of a merge"):
            merging.KERNEL.refuse_form(problem, replace(chosen, at_once=splits - 1))


def test_a_sink_left_out_is_beyond_the_gates() -> None:
    for fault in faults.FAULTS:
        if fault.function != "inverse_total":
            continue
        given = checks.drawn(fault.case, "cpu")
        wanted = checks.formula(fault.case, given)
        without = replace(given, sink=given.sink - torch.inf)
        out, lse = checks.formula(fault.case, without)
        assert "output" in checks.complaint((out.bfloat16(), lse.float()), wanted)


@pytest.mark.h200
@each_fault
def test_a_fault_is_caught(fault: faults.Fault) -> None:
    assert not checks.mismatch(fault.case), "the whole kernels agree"
    assert faults.verdict(fault, faults.compiled(fault))


# ---- NVFP4 products of queries and keys: by name only --------------------------------------------


EXPERIMENT = checks.Case(tokens=3, heads=70, far=200, entry=facts.EXPERIMENT_ENTRY, seed=5)
ROOT = Path(__file__).parents[4]


def test_nothing_chooses_it() -> None:
    """The default is BF16, and no module outside of the kernels knows the other name."""
    assert EXPERIMENT.problem.products == facts.PRODUCTS[0] == "bf16"
    lines = [
        str(path.relative_to(ROOT))
        for folder in ("harness", "references", "reports")
        for path in (ROOT / folder).rglob("*.py")
        if facts.EXPERIMENT in path.read_text() or "problem.EXPERIMENT" in path.read_text()
    ]
    assert lines == []


def test_products_of_nvfp4_numbers_are_exact_in_float32() -> None:
    """So BF16 operands and float32 sums are NVFP4's arithmetic, but for the order of sums."""
    code = torch.arange(16)
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[code % 8]
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = (e2m1.double()[:, None] * scales).flatten().unique()
    assert torch.equal(numbers.bfloat16().double(), numbers)
    products = numbers[:, None] * numbers
    assert torch.equal(products.float().double(), products)


@pytest.mark.h200
@pytest.mark.parametrize("mode", facts.MODES)
def test_it_is_attention_over_rounded_queries(mode: str) -> None:
    kernels = kernels_of("sm90_sparse_attention")
    case = replace(EXPERIMENT, mode=mode)
    given = checks.drawn(case)
    rounded = numerics.through_nvfp4_row(given.q.cpu()).bfloat16().cuda()
    assert not torch.equal(rounded, given.q)
    operands = checks.operands_of(given)
    problem = replace(case.problem, products=facts.EXPERIMENT)
    made = kernels.KERNEL.run(problem, SETTINGS, **operands)
    plain = kernels.KERNEL.run(case.problem, SETTINGS, **operands | {"q": rounded})
    assert torch.equal(made["out"], plain["out"])
    assert torch.equal(made["lse"], plain["lse"])
    wanted = checks.formula(case, replace(given, q=rounded))
    assert not checks.complaint(tuple(made.values()), wanted)
    assert checks.complaint(tuple(made.values()), checks.formula(case, given)), (
        "BF16 queries differ"
    )
