"""Run one role of the grouped sm_100a products at a time, to bring them up on a new GPU.

Two kernels call the roles of FC1 in sm100_moe_nvfp4 unchanged:

* `load`: boxes of gate and up of one expert of many, written out as they lie in shared memory;
* `requantise`: reads sums from memory, writes codes and scales.

Missing partners are replaced as in sm100_probe_gemm. One tile, K within the ring.
Compiled, never run. sm100_moe_first_minute.py holds the expected results.
Shape letters: S stages, W words of a stage, R rows of the tile, N its columns
"""

from functools import cache
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint32, cute
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm100_gemm_nvfp4 as gemm
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe import sm100_moe_nvfp4 as moe
from degarble.kernels.moe.entry import READ
from degarble.kernels.moe.problem import GATE_AND_UP, MoeForm
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.support.probes import sm100_probe_gemm as probe

PARTS = ("load", "requantise")


@cute.kernel
def probe_kernel(
    feeds: Any,
    leaving: Any,
    given: tuple[Any, Any, Any],
    extents: tuple[Int32, ...],
    told: cutlass.Constexpr,
) -> None:
    """Run one role, and let the storing warps stand in for its partners."""
    form, part = told
    groups, image, sums = given
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    held = moe.prepared(form.gemm)
    total = (Int32(groups.rows[0]), extents[0])
    walk = mainloop.walk_of(total, form.gemm.tactic, groups.experts)
    steps = ceil_div(extents[1], form.gemm.tactic.inner)
    if warp == tensor_memory.LOADING_WARP:
        if cutlass.const_expr(part == "load"):
            feedings = gemm.feedings_of(feeds, held.shared, form.gemm)
            tcgen05.load(held.ring, feedings, walk, steps, form.gemm)
    elif warp == tensor_memory.MULTIPLYING_WARP:
        if cutlass.const_expr(part == "requantise"):
            probe.hand_over(held.sums_ring, form.gemm)
    else:
        if cutlass.const_expr(part == "load"):
            probe.write_out(held, image, steps, form.gemm)
        else:
            probe.fill_sums(held, sums, form.gemm)
            outlets = (leaving, held.pieces, held.sums, held.sums_ring)
            blocks = extents[0] // GATE_AND_UP // tcgen05.BLOCK
            moe.leave_tiles(outlets, walk, groups, blocks, form)
        tcgen05.give_back(held.base, form.gemm)


@cute.jit
def launch_probe(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    part: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a part on one tile: extents are rows at most, N, K, experts."""
    feeds = moe.feeds_of(pointers[:4], extents, form.gemm)
    groups = moe.Sm100ExpertTensors(*rows.flat(pointers[4:READ]))
    leaving = moe.leaving_of(pointers[READ:-2], groups.slots, extents, form)
    words = facts.transaction_bytes(form.gemm) // 4
    layout = cute.make_layout((facts.MOST_STAGES, words), stride=(words, 1))
    image = cute.make_tensor(pointers[-2], layout)
    of_tile = tensor_memory.LANES * form.gemm.tactic.columns
    sums = cute.make_tensor(pointers[-1], cute.make_layout(of_tile))
    probe_kernel(feeds, leaving, (groups, image, sums), extents[1:3], (form, part)).launch(
        grid=[1, 1, 1], block=[tensor_memory.threads(), 1, 1], min_blocks_per_mp=1, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def pointers_of(form: MoeForm, tensors: tuple[Tensor, ...] | None) -> tuple[Any, ...]:
    """Return the pointers that FC1 takes, and those of image and sums."""
    of_product = [place for operand in moe.FC1.operands for place in operand.pointers(form)]
    places = (*of_product, (Uint32, 16), (Float32, 16))
    given = tensors or (None,) * len(places)
    return tuple(
        pointer(element, tensor, alignment)
        for (element, alignment), tensor in zip(places, given, strict=True)
    )


@cache
def compile_part(part: str, form: MoeForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a part; needs no GPU."""
    if part not in PARTS:
        raise UnknownName.among("part of grouped products", part, PARTS)
    pointers = pointers_of(form, None)
    extents = tuple(Int32(1) for _ in range(4))
    arguments = (pointers, extents, form, part, any_stream())
    return compile_kernel(launch_probe, arguments, TARGETS[form.gemm.target], settings)


def launch(
    kernel: CompiledKernel,
    form: MoeForm,
    extents: tuple[int, int, int, int],
    tensors: tuple[Tensor, ...],
) -> None:
    """Launch a part on what FC1 takes and leaves, an image [S, W] and sums [R, N]."""
    _, columns, inner, _ = extents
    stages = tensor_memory.footprint(form.gemm).stages
    steps = ceil_div(inner, form.gemm.tactic.inner)
    if columns > form.gemm.tactic.columns or steps > stages:
        raise InvalidArgument(
            "N, K", (columns, inner), f"one tile, and {stages} stages at most", "Cut them."
        )
    pointers = pointers_of(form, tensors)
    kernel(pointers, tuple(map(Int32, extents)), current_stream(tensors[0].device.index or 0))
