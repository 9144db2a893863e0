"""The half of Blackwell's FC1 epilogue that any GPU can run: a row's sums to codes and scales.

The kernel calls keep_piece and requantise_row of common.tcgen05_moe unchanged. A thread has one row
of a tile, as after a load from tensor memory, but reads its sums from global memory. So the row
code can be compared on an H200, though tcgen05 cannot run there.

Shape letters: R rows, C tiles along columns, F width, E experts, S slots
"""

from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.moe import problem as moe
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe import sm100_moe_nvfp4 as leaving_tiles
from degarble.kernels.moe.problem import GATE_AND_UP, MoeForm
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.targets import SM100A, TARGETS
from degarble.suites.kernels.moe.moe_checks import Nvfp4Rows

ROWS = facts.SCALE_TILE_ROWS  # of a tile, one a thread
STEP = moe.BLOCK * moe.BLOCKS_OF_STORE  # values of a row that leave together
# Sums; codes, scales, decode scales, slots, weights; decode scales of x and of w13; experts.
ELEMENTS = (Float32, Uint32, Uint32, Float32, Int32, Float32, Float32, Float32, Int32)
ALIGNED = (16, 16, 16, 4, 4, 4, 4, 4, 4)


class Given(NamedTuple):
    """Inputs: the sums of FC1, and their scales and weights."""

    sums: Tensor  # float32 [R, C, 256], gate beside up in each tile
    hidden_scale: Tensor  # float32 [E]
    slots: Tensor  # int32 [R]
    weights: Tensor  # float32 [S]
    scale_a: Tensor  # float32 [E]
    scale_b: Tensor  # float32 [E, 2]
    experts: Tensor  # int32 of each 128 rows


def form_of(target: str, limit: float | None, weighted: bool) -> MoeForm:
    """Return Blackwell's FC1, its codes converted as a target does."""
    tactic = moe.FIRST_TACTICS[SM100A.name]
    of_gemm = GemmForm(facts.NVFP4.name, "e4m3", target, tactic, GATE_AND_UP)
    return MoeForm(of_gemm, limit, weighted)


@cute.kernel
def requantise_kernel(
    sums: Any, leaving: Any, groups: Any, blocks: Int32, form: cutlass.Constexpr
) -> None:
    """Take one row of one tile."""
    thread, _, _ = cute.arch.thread_idx()
    tile, column, _ = cute.arch.block_idx()
    _, tiles, _ = cute.arch.grid_dim()
    row, expert = tile * ROWS + thread, Int32(groups.experts[tile])
    scales = leaving_tiles.scales_of(groups, expert, GATE_AND_UP)
    kept = cute.make_rmem_tensor(moe.words_of_row(form), Uint32)
    pieces = form.gemm.tactic.columns // facts.PIECE_COLUMNS
    for piece in cutlass.range_constexpr(pieces):
        registers = cute.make_rmem_tensor(facts.PIECE_COLUMNS, Float32)
        at = (Int64(row) * Int64(tiles) + Int64(column)) * pieces + piece
        cute.autovec_copy(sums[None, at], registers)
        leaving_tiles.keep_piece(registers, piece, scales, kept, form)
    leaving_tiles.requantise_row(leaving, kept, (row, column, expert, blocks), form)


@cute.jit
def launch_requantise(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on tiles of rows, tiles along columns, blocks of a row."""
    tiles, columns, blocks = extents
    sums = rows.in_words(pointers[0], facts.PIECE_COLUMNS)
    codes = rows.in_words(pointers[1], 4)
    flat = rows.flat(pointers[2:])
    leaving = leaving_tiles.Sm100Fc1Outputs(codes, *flat[:4])
    slots, (of_a, of_b, experts) = flat[2], flat[4:]
    groups = leaving_tiles.Sm100ExpertTensors(of_a, of_b, experts, experts, slots)
    requantise_kernel(sums, leaving, groups, blocks, form).launch(
        grid=[tiles, columns, 1], block=[ROWS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: MoeForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    pointers = tuple(map(pointer, ELEMENTS, (None,) * len(ELEMENTS), ALIGNED))
    arguments = (pointers, tuple(Int32(1) for _ in range(3)), form, any_stream())
    return compile_kernel(launch_requantise, arguments, TARGETS[form.gemm.target], settings)


def requantise(
    given: Given, width: int, form: MoeForm, settings: CompileSettings, out: Nvfp4Rows
) -> None:
    """Write codes [R, F / 2] and scales in 128x4 order of what FC1 summed."""
    require_given(given, width, form, out)
    require_device((*given, *out))
    sums, hidden, slots, weights, of_a, of_b, experts = given
    count, tiles, _ = sums.shape
    tensors = (sums, *out, hidden, slots, weights, of_a, of_b, experts)
    extents = (count // ROWS, tiles, width // moe.BLOCK)
    compile_form(form, settings)(
        tuple(map(pointer, ELEMENTS, tensors, ALIGNED)),
        tuple(map(Int32, extents)),
        current_stream(sums.device.index or 0),
    )


def require_given(given: Given, width: int, form: MoeForm, out: Nvfp4Rows) -> None:
    """Refuse tensors that the kernel would misread; rows and experts are those of slots, scales."""
    count, experts = given.slots.numel(), given.hidden_scale.numel()
    if count % ROWS or width % STEP:
        raise ShapeMismatch(
            "rows and width of the sums", (count, width), f"multiples of {ROWS} and of {STEP}",
            "Pad rows with slots of -1.",
        )  # fmt: skip
    columns = form.gemm.tactic.columns
    of_sums = (count, ceil_div(width, columns // GATE_AND_UP), columns)
    for name, tensor, dtype, shape, alignment in (
        ("slots", given.slots, torch.int32, (count,), 4),
        ("sums", given.sums, torch.float32, of_sums, 16),
        ("scales of hidden rows", given.hidden_scale, torch.float32, (experts,), 4),
        ("routing weights", given.weights, torch.float32, (given.weights.numel(),), 4),
        ("scales of x", given.scale_a, torch.float32, (experts,), 4),
        ("scales of w13", given.scale_b, torch.float32, (experts, GATE_AND_UP), 4),
        ("experts of tiles", given.experts, torch.int32, (count // ROWS,), 4),
        ("codes", out.codes, torch.uint8, (count, width // 2), 16),
        ("scales", out.scales, torch.uint8, (moe.scale_bytes(count, width),), 16),
    ):
        require_tensor(name, tensor, dtype, shape, alignment)
