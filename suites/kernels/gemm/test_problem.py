"""GEMM as arithmetic: what fits, what a barrier expects, who holds how many registers; refusals."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.problem import (
    TACTICS,
    GemmForm,
    GemmProblem,
    Tactic,
    choose_form,
)
from degarble.kernels.runtime.targets import TARGETS

FORMS = [
    GemmForm(operands, scales, target, tactic)
    for (target, operands), tactics in TACTICS.items()
    for scales in facts.OPERANDS[operands].scales
    for tactic in tactics
    if target == "sm_90a"
]
BIG = GemmProblem(4096, 7168, 4096)


def named(form: GemmForm) -> str:
    return f"{form.operands}-{form.scales}-{form.tactic.rows}x{form.tactic.columns}"


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_a_thread_block_fits_its_processor(form: GemmForm) -> None:
    held = facts.footprint(form)
    assert held.total + facts.ALIGNMENT <= TARGETS[form.target].shared_memory_bytes
    assert 2 <= held.stages <= facts.MOST_STAGES
    assert facts.registers_of_roles(form) <= facts.REGISTERS_OF_PROCESSOR
    assert facts.registers_of_roles(form) <= facts.registers_at_launch(form) * facts.threads(form)
    assert all(role.registers % 8 == 0 for role in facts.roles(form))
    assert all(24 <= role.registers <= facts.LARGEST_REGISTERS for role in facts.roles(form))


def test_numbers_of_the_large_bf16_form() -> None:
    form = choose_form(BIG, "sm_90a")
    assert facts.transaction_bytes(form) == (128 + 256) * 64 * 2
    held = facts.footprint(form)
    assert (held.stages, held.stage_bytes, held.output_bytes) == (4, 49_152, 32_768)
    assert facts.threads(form) == 384
    assert facts.release_arrivals(form) == 2 * 4 * 2  # two warpgroups of both thread blocks
    assert facts.cluster_tiles(BIG, form.tactic) == (16, 28)
    assert facts.grid(BIG, form.tactic, 132) == (2, 1, 66)
    assert facts.grid(GemmProblem(1, 8, 8), form.tactic, 132) == (2, 1, 1)
    assert BIG.operations == 240_518_168_576


def test_what_a_stage_of_codes_loads() -> None:
    form = GemmForm("nvfp4", "e4m3", "sm_90a", Tactic(1.0, rows=64, columns=256, inner=64))
    boxes = {load.name: load.bytes for load in facts.loads(form)}
    assert boxes == {"a": 2048, "b": 8192, "scales of a": 512, "scales of b": 1024}
    assert facts.transaction_bytes(form) == sum(boxes.values())


def test_bytes_that_have_to_move() -> None:
    assert GemmProblem(2, 16, 24).bytes_moved == 2 * (2 * 24 + 16 * 24 + 2 * 16)
    nvfp4 = GemmProblem(129, 8, 96, "nvfp4", "e4m3")
    assert nvfp4.scale_bytes == (256 + 128) * 8
    assert nvfp4.bytes_moved == 137 * 48 + nvfp4.scale_bytes + 2 * 129 * 8
    assert GemmProblem(2, 136, 160, "fp8_block", "float32").scale_bytes == 4 * 2 * (2 + 2)
    assert GemmProblem(2, 136, 160, "fp8_block", "ue8m0").scale_bytes == 2 * (2 + 2)


def test_extents_are_no_part_of_a_form_but_through_the_table() -> None:
    forms = {choose_form(GemmProblem(m, n, 64), "sm_90a") for m in (513, 9999) for n in (8, 7168)}
    assert len(forms) == 1
    assert choose_form(GemmProblem(64, 8, 8), "sm_90a").tactic.rows == 64
    assert choose_form(GemmProblem(65, 8, 8), "sm_90a").tactic.rows == 128


def test_refuses_by_name() -> None:
    for extents in ((-1, 8, 8), (1, 4, 8), (1, 0, 8), (1, 8, 0), (1, 8, 12), (1 << 31, 8, 8)):
        with pytest.raises(ShapeMismatch, match="extents M, N, K"):
            GemmProblem(*extents)
    with pytest.raises(ShapeMismatch, match="multiples of 32"):
        GemmProblem(1, 8, 16, "nvfp4", "e4m3")
    with pytest.raises(UnknownName, match="nvfp4"):
        GemmProblem(1, 8, 32, "nvfp5")
    with pytest.raises(InvalidArgument, match="e4m3"):
        GemmProblem(1, 8, 32, "nvfp4", "ue8m0")
    with pytest.raises(UnknownName, match="target of a bf16 GEMM"):
        choose_form(GemmProblem(1, 8, 8), "sm_80")
    with pytest.raises(InvalidArgument, match="bytes of a stage"):
        facts.stages_that_fit(200_000, 0, "sm_90a")
