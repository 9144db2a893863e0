"""GEMM cases for sm_100a: operands, what D has to be to the bit, and the host model's answer.

Owns the operands as a launch hands them over, the result that references.tensor_core defines from
them, and the comparison of every bit. The model's answer is a stand-in where there is no GPU; it is
told apart by name. Kept honest by suites/kernels/test_sm100_gemm_nvfp4_model.py.
Shape letters: M rows of D, N columns of D, K inner, B blocks of K
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, from_layout
from degarble.harness.formats.packing import unpack_nibbles
from degarble.kernels.common import gemm_problem as facts
from degarble.kernels.common import gemm_tensor_memory as tensor_memory
from degarble.references import tensor_core
from degarble.suites.kernels import gemm_checks, sm100_model
from degarble.suites.kernels.sm100_memories import Matrix, require

if TYPE_CHECKING:
    from torch import Tensor

TARGET = "sm_100a"
CLUSTERS = ((2, 1), (1, 2), (2, 2))
CODE_ELEMENT, SCALE_ELEMENT = 4, 8  # bytes that TMA counts in, as the launch says


@dataclass(frozen=True)
class Drawn:
    """Operands as they are handed over, and what D has to be."""

    given: tuple[Any, Any]
    sums: Tensor  # [M, N] float32
    want: Tensor  # [M, N] BF16


def forms(operands: str = "nvfp4") -> list[facts.GemmForm]:
    """Return every form of the table."""
    return gemm_checks.forms(operands, TARGET)


def clustered(form: facts.GemmForm) -> list[facts.GemmForm]:
    """Return a form with clusters whose thread blocks share loads."""
    return [
        replace(form, tactic=replace(form.tactic, cluster_rows=rows, cluster_columns=columns))
        for rows, columns in CLUSTERS
    ]


def named(form: facts.GemmForm) -> str:
    """Name a form by its tile and cluster."""
    tactic = form.tactic
    cluster = f"{tactic.cluster_rows}x{tactic.cluster_columns}"
    return f"{tactic.rows}x{tactic.columns}" + (f"-{cluster}" if cluster != "1x1" else "")


def drawn(case: gemm_checks.Case, device: str = "cpu") -> Drawn:
    """Draw operands, and compute what the tensor core returns, step by step in the order of K."""
    if case.problem.operands == facts.BF16.name:
        return drawn_bf16(case, device)
    sides = gemm_checks.nvfp4_sides(case, "cpu")
    p, whole = case.problem, []
    for operand, rows in zip(sides.given, (p.rows, p.columns), strict=True):
        codes_MK = unpack_nibbles(operand.codes)
        scales_MB = from_layout(operand.scales, SWIZZLE_128X4, rows, p.inner // 16)
        pad = -p.inner % 64
        whole += [functional.pad(codes_MK, (0, pad)), functional.pad(scales_MB, (0, pad // 16))]
    sums_MN = tensor_core.block_scaled_gemm(whole[0], whole[1], whole[2], whole[3])
    a, b = sides.given
    want_MN = (sums_MN * (a.decode_scale * b.decode_scale)).bfloat16()
    moved = tuple(type(each)(*(t.to(device) for t in each)) for each in sides.given)
    return Drawn((moved[0], moved[1]), sums_MN, want_MN)


def drawn_bf16(case: gemm_checks.Case, device: str) -> Drawn:
    """Draw BF16 operands, and compute what the tensor core returns."""
    a_MK, b_NK = gemm_checks.bf16_sides(case, "cpu").given
    pad = (0, -case.problem.inner % 64)
    rule = tensor_core.TCGEN05_F16
    whole = (functional.pad(x, pad) for x in (a_MK, b_NK))
    sums_MN = tensor_core.dense_gemm(*whole, rule=rule)
    return Drawn((a_MK.to(device), b_NK.to(device)), sums_MN, sums_MN.bfloat16())


def difference(case: gemm_checks.Case, out: Tensor, want: Tensor) -> str:
    """Say where bits differ; empty where they do not."""
    got, wanted = (x.cpu().view(torch.int16) for x in (out, want))
    wrong = (got != wanted).nonzero()
    if not len(wrong):
        return ""
    row, column = wrong[0].tolist()
    return (
        f"{case.name}: {len(wrong)} of {wanted.numel()} differ, first at ({row}, {column}): got "
        f"{int(got[row, column]) & 0xFFFF:#06x}, want {int(wanted[row, column]) & 0xFFFF:#06x}"
    )


# ---- the host model ------------------------------------------------------------------------------


def bytes_of(tensor: Tensor, rows: int) -> Any:
    """View a tensor as rows of bytes."""
    return tensor.contiguous().view(torch.uint8).view(rows, -1).numpy()


def matrices(form: facts.GemmForm, given: tuple[Any, Any], out: Tensor) -> dict[str, Matrix]:
    """Return what TMA is told of the operands and of D."""
    made = {}
    row_bytes = {load.name: load.row_bytes for load in facts.loads(form)}
    for side, operand in zip("ab", given, strict=True):
        if form.operands == facts.BF16.name:
            of_numbers = (0, row_bytes[side] // 2)
            rows_of = bytes_of(operand, len(operand))
            made[side] = Matrix(rows_of, 2, of_numbers, sm100_model.SWIZZLE)
            continue
        name, rows = f"scales of {side}", ceil_div(len(operand.codes), facts.SCALE_TILE_ROWS)
        of_codes = (0, row_bytes[side] // CODE_ELEMENT)
        of_scales = (0, row_bytes[name] // SCALE_ELEMENT)
        codes = bytes_of(operand.codes, len(operand.codes))
        made[side] = Matrix(codes, CODE_ELEMENT, of_codes, sm100_model.SWIZZLE)
        made[name] = Matrix(bytes_of(operand.scales, rows), SCALE_ELEMENT, of_scales)
    box = (tensor_memory.LANES, facts.PIECE_COLUMNS)
    made["d"] = Matrix(bytes_of(out, len(out)), 2, box, sm100_model.SWIZZLE)
    return made


def on_model(
    case: gemm_checks.Case, given: tuple[Any, Any], first: str = "loads", processors: int = 2
) -> tuple[Tensor, int]:
    """Let the host model answer, thread block by thread block; return D and instructions run."""
    p, form = case.problem, case.form
    out = torch.full((p.rows, p.columns), torch.nan, dtype=torch.bfloat16)
    of, steps = matrices(form, given, out), sm100_model.steps_of(p, form)
    *_, count = facts.grid(p, form.tactic, processors)
    scale = torch.ones(1)
    if form.operands == facts.NVFP4.name:
        scale = given[0].decode_scale * given[1].decode_scale
    instructions, stored = 0, torch.zeros(p.rows, 2 * p.columns, dtype=torch.uint8)
    for number in range(count):
        block = sm100_model.block_of(form, of)
        tiles = sm100_model.tiles_of(p, form, number, count)
        roles = [
            block.load(tiles, steps),
            block.multiply(tiles, steps, p.inner // facts.NVFP4.block),
            block.store(tiles, scale),
        ]
        block.run(roles, first)
        instructions += block.memories.instructions
        stored += torch.from_numpy(block.stored)
    require(bool((stored == 1).all()), "not every byte of D is written once")
    return out, instructions
