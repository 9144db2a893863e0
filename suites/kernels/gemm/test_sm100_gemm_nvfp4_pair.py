"""Two thread blocks together in the sm_100a NVFP4 GEMM: text as derived, host model, a B200's part.

No B200 is here, and nobody has published the arithmetic of cta_group::2: that it is that of one
thread block is assumed (references.tensor_core). Where a B200 shows other bits within the budget of
an NVFP4 GEMM, what it says is UNDECIDED; beyond it, wrong.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_code as code
from degarble.suites.kernels import sm100_memories as memories
from degarble.suites.kernels import sm100_model as model
from degarble.suites.kernels import tcgen05_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

PAIRS = {form.tactic.columns: form for form in blackwell.pairs()}
CLUSTERED = [clustered for form in PAIRS.values() for clustered in blackwell.clustered_pair(form)]
SETTINGS = CompileSettings()


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")


# ---- machine code --------------------------------------------------------------------------------

DAMAGES = {
    "first one's": (f", {code.FIRST_OF_PAIR};", ", -8;"),
    "expected bytes": (", 77824;", ", 38912;"),
    "copies of scales": ("tcgen05.cp.cta_group::2", "tcgen05.cp.cta_group::1"),
    "of the other group": ("tcgen05.commit.cta_group::2", "tcgen05.commit.cta_group::1"),
    "loads shared": ("complete_tx::bytes.multicast", "complete_tx::bytes"),
    "releases shared": (".multicast::cluster.b64", ".b64"),
    "end together": ("barrier.cluster.arrive;", "bar.sync 0;"),
    "sums given back": ("mbarrier.arrive.shared::cluster.b64", "mbarrier.arrive.shared.b64"),
    "arrivals": (", 256;\n", ", 128;\n"),
    "scales cleared": ("st.shared::cluster.v4", "st.shared.v4"),
}


def test_machine_code_is_as_derived_and_every_damage_is_seen(kernels: ModuleType) -> None:
    form = PAIRS[256]
    kernel = kernels.compile_form(form, SETTINGS)
    assert not code.complaints(kernel, form)
    for name, (true, wrong) in DAMAGES.items():
        assert true in kernel.ptx, name
        found = code.complaints(replace(kernel, ptx=kernel.ptx.replace(true, wrong)), form)
        assert any(name in each for each in found), (name, found)


@pytest.mark.slow
@pytest.mark.parametrize("form", [*PAIRS.values(), *CLUSTERED], ids=blackwell.named)
def test_machine_code_of_every_form(kernels: ModuleType, form: facts.GemmForm) -> None:
    assert not code.complaints(kernels.compile_form(form, SETTINGS), form)


@pytest.mark.parametrize("columns", PAIRS)
def test_the_dsl_divides_a_tile_as_it_is_loaded_and_stored(columns: int) -> None:
    """Thread blocks, then (rows, K) or (rows, columns): where the second one's part begins."""
    cute = import_module("cutlass.cute")
    make = import_module("degarble.kernels.gemm.tcgen05").nvfp4_mma
    seen: list[tuple[int, int, int]] = []

    def divided() -> None:
        mma = make(PAIRS[columns])
        seen.extend(
            (layout.shape[0], layout.shape[1][0], layout.stride[0])
            for layout in (mma.tv_layout_A, mma.tv_layout_B, mma.tv_layout_C)
        )

    cute.compile(cute.jit(divided), options="--gpu-arch sm_100a")
    _, half, *_ = (load.rows for load in facts.loads(PAIRS[columns]))
    lanes = tensor_memory.LANES
    assert seen == [(2, lanes, lanes), (2, half, half), (2, lanes, lanes)]


CLUSTERS = [
    *(clustered for form in blackwell.forms() for clustered in blackwell.clustered(form)),
    *PAIRS.values(),
    *CLUSTERED,
]


@pytest.mark.parametrize("form", CLUSTERS, ids=blackwell.named)
def test_who_receives_a_box_wants_that_box(
    form: facts.GemmForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places and masks of every thread block of a cluster, against the boxes of its tile."""
    pair = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    wgmma = import_module("degarble.kernels.gemm.mainloop")
    rows, columns = form.tactic.cluster_rows, form.tactic.cluster_columns
    at = [(row, column) for column in range(columns) for row in range(rows)]  # by rank
    boxes = [tensor_memory.tiles_of_boxes((8 * rows + row, column), form) for row, column in at]
    told = []
    for row, column in at:
        here = SimpleNamespace(block_idx=lambda x=row, y=column: (x, y, 5))
        for module in (pair, wgmma):
            monkeypatch.setattr(module, "cute", SimpleNamespace(arch=here))
        monkeypatch.setattr(pair, "Int16", int)
        monkeypatch.setattr(wgmma, "cutlass", SimpleNamespace(Int16=int))
        told.append(pair.sharing_of(form))
    for load, count in enumerate(tensor_memory.sharers(form)):
        for rank, of_loads in enumerate(told):
            place, number, mask = of_loads[load]
            receivers = [each for each in range(len(at)) if (mask or 1 << rank) >> each & 1]
            assert number == count == len(receivers)
            assert receivers[place] == rank
            assert {boxes[each][load] for each in receivers} == {boxes[rank][load]}
            assert all(told[each][load][2] == mask for each in receivers)


# ---- host model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", model.FIRST)
@pytest.mark.parametrize(
    "columns", [64, 192, *(pytest.param(each, marks=pytest.mark.slow) for each in (128, 256))]
)
def test_every_bit_with_tails_of_all_extents(columns: int, first: str) -> None:
    """The second one's rows end within its tile, or lie beyond D; K ends within a word."""
    assert not blackwell.answer(PAIRS[columns], (130, columns + 136, 288), first)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [32, 64, 96, 256, 1312])
@pytest.mark.parametrize("columns", PAIRS)
def test_every_bit_of_more_shapes(columns: int, inner: int) -> None:
    for rows in (1, 128, 300):
        assert not blackwell.answer(PAIRS[columns], (rows, 2 * columns + 8, inner))


@pytest.mark.slow
def test_a_ring_that_begins_anew() -> None:
    assert tensor_memory.footprint(PAIRS[256]).stages == 5
    assert not blackwell.answer(PAIRS[256], (129, 72, 256 * 11))


def same_half(true: Any, tile: Any, form: facts.GemmForm) -> Any:
    a, b, *scales = true(tile, form)
    return a, b // 2 * 2, *scales


def bytes_of_one(_true: Any, form: facts.GemmForm) -> int:
    return facts.transaction_bytes(form)


def one_gives_back(_true: Any, _form: facts.GemmForm) -> int:
    return tensor_memory.threads_that_store()


def own_scales_alone(true: Any, block: Any, *given: Any) -> None:
    with mock.patch.object(block, "other", None):
        true(block, *given)


def first_half_twice(true: Any, memory: Any, word: int, rows: int) -> Any:
    codes = true(memory, word, rows)
    return codes if rows == memories.LANES else codes * 0 + codes[:1]


def in_order(_true: Any, number: int, _place: int, _pieces: int) -> int:
    return number


def rows_of_one(true: Any, rows: int, columns: int) -> int:
    return int(true(rows // 2, columns))


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "the same half of B": (tensor_memory, "tiles_of_boxes", same_half),
    "bytes of one thread block": (facts, "expected_bytes", bytes_of_one),
    "sums given back by one": (tensor_memory, "arrivals_of_sums", one_gives_back),
    "own scales cleared alone": (model.Block, "clear_beyond", own_scales_alone),
    "codes of B": (memories.Memories, "codes", first_half_twice),
    "sums that overlap read in order": (tensor_memory, "piece_in_turn", in_order),
    "rows of one": (tcgen05_words, "block_scaled_word", rows_of_one),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    """Sums have one place at 256 columns: what is given back too early is written over."""
    place, function, instead = FAULTS[name]
    true = getattr(place, function)
    form, extents = (256, (130, 2312, 32)) if "sums" in name else (64, (130, 72, 288))
    with mock.patch.object(place, function, lambda *given: instead(true, *given)):
        assert blackwell.answer(PAIRS[form], extents)


# ---- on a B200 -----------------------------------------------------------------------------------


@pytest.mark.b200
@pytest.mark.parametrize("inner", [32, 64, 96, 288, 1056, 4096])
@pytest.mark.parametrize("form", [*PAIRS.values(), *CLUSTERED], ids=blackwell.named)
def test_tails(form: facts.GemmForm, inner: int) -> None:
    blackwell.judge_pairs(blackwell.verdict(case) for case in checks.tails(form, inner))


@pytest.mark.b200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (300, 7168, 18432), (300, 520, 1184)])
def test_two_together_do_not_change_a_bit(extents: tuple[int, int, int]) -> None:
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    alone = checks.with_form(blackwell.forms()[0], extents, "ordinary", 9)
    sides, found = checks.nvfp4_sides(alone, "cuda"), []
    want = kernels.gemm_nvfp4(*sides.given, alone.problem, SETTINGS, form=alone.form)
    for form in (*PAIRS.values(), *CLUSTERED):
        case = replace(alone, form=form)
        out, again = (
            kernels.gemm_nvfp4(*sides.given, case.problem, SETTINGS, form=form) for _ in range(2)
        )
        assert torch.equal(out.view(torch.int16), again.view(torch.int16)), "two runs differ"
        bits = blackwell.difference(case, out, want)
        found.append(blackwell.Verdict(bits, checks.difference(case, out, sides) if bits else ""))
    blackwell.judge_pairs(found)
