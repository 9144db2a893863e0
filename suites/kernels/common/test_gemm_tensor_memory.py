"""A tile on sm_100a as arithmetic: what fits where, how many instructions, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from degarble.harness.errors import InvalidArgument
from degarble.kernels.common import gemm_problem as facts
from degarble.kernels.common import gemm_tensor_memory as tensor_memory
from degarble.kernels.common.gemm_problem import TACTICS, GemmForm, GemmProblem, choose_form
from degarble.kernels.common.targets import SM100A

FORMS = [
    GemmForm(operands, scales, target, tactic)
    for (target, operands), tactics in TACTICS.items()
    for scales in facts.OPERANDS[operands].scales
    for tactic in tactics
    if target == SM100A.name
]
NVFP4 = {form.tactic.columns: form for form in FORMS if form.operands == "nvfp4"}

each_form = pytest.mark.parametrize(
    "form", FORMS, ids=lambda form: f"{form.operands}-{form.tactic.rows}x{form.tactic.columns}"
)


@each_form
def test_a_thread_block_fits_its_processor(form: GemmForm) -> None:
    held = tensor_memory.footprint(form)
    rest = held.total + tensor_memory.ADDRESS_BYTES + facts.ALIGNMENT
    assert rest <= SM100A.shared_memory_bytes
    assert 3 <= held.stages <= facts.MOST_STAGES
    assert held.barriers == 2 * (held.stages + tensor_memory.accumulators(form))
    columns = tensor_memory.columns_allocated(form)
    assert tensor_memory.columns_held(form) <= columns <= SM100A.tensor_memory_columns
    assert columns & (columns - 1) == 0
    assert columns // 2 < tensor_memory.columns_held(form)


# Columns of a tile: sums at once, columns of scales, where these begin, columns allocated, stages,
# copies of scales a stage.
NUMBERS = {
    64: (2, (16, 16), (128, 144), 256, 6, 8),
    128: (2, (16, 16), (256, 272), 512, 5, 8),
    192: (2, (16, 32), (384, 400), 512, 4, 12),
    256: (1, (16, 32), (256, 272), 512, 3, 12),
}


@pytest.mark.parametrize("columns", NUMBERS)
def test_numbers_of_every_nvfp4_form(columns: int) -> None:
    form = NVFP4[columns]
    found = (
        tensor_memory.accumulators(form),
        tensor_memory.scale_columns(form),
        tensor_memory.first_columns(form),
        tensor_memory.columns_allocated(form),
        tensor_memory.footprint(form).stages,
        tensor_memory.scale_copies(form),
    )
    assert found == NUMBERS[columns]
    assert tensor_memory.instructions(form) == 4


def test_every_tile_of_scales_has_a_box_where_a_tile_begins_within_a_pair() -> None:
    loads = {columns: [each.rows for each in facts.loads(form)] for columns, form in NVFP4.items()}
    assert loads == {
        64: [128, 64, 1, 1],
        128: [128, 128, 1, 1],
        192: [128, 192, 1, 1, 1],
        256: [128, 256, 1, 2],
    }
    assert facts.transaction_bytes(NVFP4[192]) == 128 * (128 + 192) + 3 * 2048


def test_the_table_answers_by_rows() -> None:
    chosen = [
        choose_form(GemmProblem(rows, 512, 64, "nvfp4", "e4m3"), SM100A.name).tactic.columns
        for rows in (1, 128, 129, 512, 2048, 2049)
    ]
    assert chosen == [64, 64, 128, 128, 192, 256]


def test_threads_by_role() -> None:
    assert tensor_memory.threads() == 192
    assert tensor_memory.threads_that_store() == tensor_memory.LANES
    assert {tensor_memory.MULTIPLYING_WARP, tensor_memory.LOADING_WARP} == {4, 5}


def test_tiles_that_do_not_fit_are_refused() -> None:
    form = NVFP4[256]
    wide = replace(form, tactic=replace(form.tactic, columns=512))
    with pytest.raises(InvalidArgument, match="columns of a tile"):
        tensor_memory.accumulators(wide)
    thin = replace(form, tactic=replace(form.tactic, inner=128))
    with pytest.raises(InvalidArgument, match="bytes of a row in a stage"):
        tensor_memory.footprint(thin)
