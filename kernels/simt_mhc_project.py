"""Project four streams onto mHC's coefficients and sum their squares, in one pass over them.

Owns one kernel source for sm_90a and sm_100a, on mma.sync: a lane's 16 bytes of a row of streams
and of the split weight are operands of two steps as they are loaded, because K may be summed in any
order. The three BF16 parts of the weight make products exact, so the result is that of float32
sums. A second, small kernel adds partial sums in a stated order: bits depend on nothing but a
token's streams and the weight.

`mhc_project` gives products [T, 24] (the head's [T, 4]) and squares [T]: what simt_mhc reads.
`mhc_pre` is both: streams in, collapsed input, post and mix out. Wrappers check and launch, never
wait for the GPU, and may be captured. Refuse other dtypes, shapes, strides and alignments by name.
Kept honest by suites/kernels/test_simt_mhc_project.py. Shape letters as in mhc_projection_problem.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.harness.errors import InvalidArgument
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels import simt_mhc
from degarble.kernels.common import mhc_projection_problem as facts
from degarble.kernels.common.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.common.latent_words import registers_of, vectors, words_at
from degarble.kernels.common.mhc_problem import STREAMS, MixProblem
from degarble.kernels.common.mhc_projection_problem import (
    LINE,
    PARTS,
    ROWS_OF_TILE,
    SQUARES,
    TILE,
    Cut,
    ProjectForm,
    ProjectProblem,
)
from degarble.kernels.common.nvfp4_words import numbers_of
from degarble.kernels.common.operands import pointer, require_device, require_tensor
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.targets import TARGETS, target_of_device

WORDS = 4  # of a lane's 16 bytes
QUAD = 4  # lanes that share a row
OF_TILE = 4  # sums of a lane in a tile of 16 x 8
ADDING_THREADS = 128
NAMES = ("streams", "weight", "partial sums", "products", "squares")


# ---- device --------------------------------------------------------------------------------------


class Tensors(NamedTuple):
    """What the kernels read and write: vectors of 16 bytes, pairs of float32, float32."""

    streams: Any
    weight: Any
    pairs: Any
    partials: Any
    products: Any
    squares: Any


def multiplied(sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    """Return a lane's four sums with the products of sixteen values of K added."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    made = cute.arch.inline_ptx(
        text, write_only_types=[Float32] * OF_TILE, read_only_args=[*a, *b, *sums]
    )
    return list(made)


@cute.jit
def load_streams(
    tensors: Tensors, registers: Any, told: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Read a lane's 16 bytes of its rows in a step; `told`: first row, tokens, vectors, place."""
    row, tokens, of_row, place = told
    for each in cutlass.range_constexpr(form.tokens_of_warp // 8):
        token = ops.minimum(row + each * 8, tokens - 1)  # what lies behind is computed and lost
        at = Int64(token) * Int64(of_row) + Int64(place)
        cute.autovec_copy(tensors.streams[None, at], registers[None, each])


@cute.jit
def add_step(
    tensors: Tensors,
    registers: tuple[Any, Any, Any],
    told: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Add a step's products and squares; `told`: lane's row of a tile, vectors of a row, place."""
    rStreams, rSums, rSquares = registers
    row, of_row, place = told
    for each in cutlass.range_constexpr(form.tokens_of_warp // 8):
        total = Float32(rSquares[each])
        for number in numbers_of(words_at(rStreams, each)):
            total = ops.fma_rn(number, number, total)
        rSquares[each] = total
    rWeight = registers_of(WORDS, PARTS * form.tiles)
    for tile in cutlass.range_constexpr(PARTS * form.tiles):
        at = Int64(row + tile * TILE) * Int64(of_row) + Int64(place)
        cute.autovec_copy(tensors.weight[None, at], rWeight[None, tile])
    for tile in cutlass.range_constexpr(form.tiles):
        for high in cutlass.range_constexpr(form.tokens_of_warp // ROWS_OF_TILE):
            sums = [Float32(rSums[i, tile, high]) for i in range(OF_TILE)]
            upper, lower = (words_at(rStreams, 2 * high + i) for i in (0, 1))
            for part in cutlass.range_constexpr(PARTS - 1, -1, -1):  # the smallest first
                b = words_at(rWeight, part * form.tiles + tile)
                for half in (0, 2):
                    a = [upper[half], lower[half], upper[half + 1], lower[half + 1]]
                    sums = multiplied(sums, a, b[half : half + 2])
            for i in cutlass.range_constexpr(OF_TILE):
                rSums[i, tile, high] = sums[i]


@cute.jit
def add_piece(
    tensors: Tensors,
    registers: tuple[Any, Any],
    told: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Sum up one piece of K and add it to the whole; `told`: rows, tokens, vectors, lane, steps."""
    rWhole, rWholeSquares = registers
    row, weight_row, tokens, of_row, lane, begin, end = told
    rSums = cute.make_rmem_tensor(rWhole.layout, Float32)
    rSquares = cute.make_rmem_tensor(rWholeSquares.layout, Float32)
    rSums.fill(0.0)
    rSquares.fill(0.0)
    rStreams, rNext = (registers_of(WORDS, form.tokens_of_warp // 8) for _ in range(2))
    load_streams(tensors, rStreams, (row, tokens, of_row, begin * QUAD + lane), form)
    for step in cutlass.range(begin, end, unroll=1):
        following = ops.minimum(step + 1, end - 1) * QUAD + lane
        load_streams(tensors, rNext, (row, tokens, of_row, following), form)
        add_step(
            tensors, (rStreams, rSums, rSquares), (weight_row, of_row, step * QUAD + lane), form
        )
        for each in cutlass.range_constexpr(cute.size(rNext)):
            rStreams[each] = rNext[each]
    for i in cutlass.range_constexpr(cute.size(rSums)):
        rWhole[i] = ops.add_rn(Float32(rWhole[i]), Float32(rSums[i]))
    for each in cutlass.range_constexpr(cute.size(rSquares)):
        total = Float32(rSquares[each])
        for distance in (1, 2):
            total = ops.add_rn(total, cute.arch.shuffle_sync_bfly(total, offset=distance))
        rWholeSquares[each] = ops.add_rn(Float32(rWholeSquares[each]), total)


@cute.kernel
def project_kernel(tensors: Tensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Sum a piece of K, or a group of pieces, for a warp's tokens."""
    thread, _, _ = cute.arch.thread_idx()
    part, block, _ = cute.arch.block_idx()
    tokens, of_row, steps, per_piece, per_group, partials = extents
    thread, part = Int32(thread), Int32(part)
    lane, warp = thread % 32, thread // 32
    of_lane, in_quad = lane // QUAD, lane % QUAD
    first = Int32(block) * form.tokens_of_block + warp * form.tokens_of_warp
    tiles, halves = form.tiles, form.tokens_of_warp // ROWS_OF_TILE
    rWhole = cute.make_rmem_tensor(cute.make_layout((OF_TILE, tiles, halves)), Float32)
    rSquares = cute.make_rmem_tensor(form.tokens_of_warp // 8, Float32)
    rWhole.fill(0.0)
    rSquares.fill(0.0)
    count = 1 if form.few else per_group
    for number in cutlass.range(count, unroll=1):
        begin = ops.minimum((part * count + number) * per_piece, steps)
        end = ops.minimum(begin + per_piece, steps)
        if begin < end:
            told = (first + of_lane, of_lane, tokens, of_row, in_quad, begin, end)
            add_piece(tensors, (rWhole, rSquares), told, form)
    for each in cutlass.range_constexpr(form.tokens_of_warp // 8):
        token = first + of_lane + each * 8
        if token < tokens:
            line = Int64(token) * Int64(partials) + Int64(part)
            for tile in cutlass.range_constexpr(tiles):
                rPair = cute.make_rmem_tensor(2, Float32)
                for i in cutlass.range_constexpr(2):
                    rPair[i] = rWhole[each % 2 * 2 + i, tile, each // 2]
                at = line * (LINE // 2) + (tile * (TILE // 2) + in_quad)
                cute.autovec_copy(rPair, tensors.pairs[None, at])
            if in_quad == 0:
                tensors.partials[line * LINE + SQUARES] = rSquares[each]


@cute.kernel
def add_kernel(tensors: Tensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Add a token's partial sums: a warp has a token, a lane a column."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tokens, groups, per_group, partials = extents
    thread = Int32(thread)
    lane, token = thread % 32, Int32(block) * (ADDING_THREADS // 32) + thread // 32
    if token < tokens:
        line = Int64(token) * Int64(partials) * LINE + Int64(lane)
        whole = Float32(0.0)
        for group in cutlass.range(groups, unroll=4):
            if cutlass.const_expr(form.few):
                of_group = Float32(0.0)
                for piece in cutlass.range(per_group, unroll=4):
                    at = ops.minimum(group * per_group + piece, partials - 1)
                    found = Float32(tensors.partials[line + Int64(at) * LINE])
                    beyond = group * per_group + piece >= partials
                    of_group = ops.select(beyond, of_group, ops.add_rn(of_group, found))
                whole = ops.add_rn(whole, of_group)
            else:
                whole = ops.add_rn(whole, Float32(tensors.partials[line + Int64(group) * LINE]))
        products = facts.WEIGHTS[form.kind]
        if lane < products:
            tensors.products[Int64(token) * products + Int64(lane)] = whole
        if lane == SQUARES:
            tensors.squares[token] = whole


@cute.jit
def launch_project(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch both: tokens, vectors of a row, steps, per piece, per group, groups, parts, blocks."""
    streams, weight, partials, products, squares = pointers
    sizes = (WORDS, WORDS, 2, 0, 0, 0)
    views = zip((streams, weight, partials, partials, products, squares), sizes, strict=True)
    tensors = Tensors(*(vectors(address, words) for address, words in views))
    tokens, of_row, steps, per_piece, per_group, groups, parts, blocks = extents
    told = (tokens, of_row, steps, per_piece, per_group, parts)
    project_kernel(tensors, told, form).launch(
        grid=[parts, blocks, 1], block=[32 * form.warps, 1, 1], stream=stream
    )
    add_kernel(tensors, (tokens, groups, per_group, parts), form).launch(
        grid=[(tokens + (ADDING_THREADS // 32 - 1)) // (ADDING_THREADS // 32), 1, 1],
        block=[ADDING_THREADS, 1, 1],
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """mHC's parameters of a sublayer, or of the head: `split_weight(fn)`, base and scale."""

    split: Tensor  # BF16 [3, N padded, 4 D]
    base: Tensor  # float32 [24], of the head [4]
    scale: Tensor  # float32 [3], of the head [1]


@cache
def compile_form(form: ProjectForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    extents = tuple(Int32(1) for _ in range(8))
    arguments = (_pointers((None,) * 5), extents, form, any_stream())
    return compile_kernel(launch_project, arguments, TARGETS[form.target], settings)


def mhc_project(
    streams_TSD: Tensor,
    split_NK: Tensor,
    problem: ProjectProblem,
    settings: CompileSettings,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return products [T, 24 or 4] and sums of squares [T], both float32.

    `split_NK` is split_weight of the weight. `out` takes partial sums, products and squares.
    """
    out = empty_outputs(problem, streams_TSD.device) if out is None else out
    require_operands(problem, streams_TSD, split_NK, out)
    tensors = (streams_TSD, split_NK, *out)
    device = require_device(tensors)
    if problem.tokens:
        form = facts.choose_form(problem, target_of_device(device).name)
        launch(compile_form(form, settings), form, problem, tensors)
    return out[1], out[2]


def mhc_pre(
    streams_TSD: Tensor, weights: Weights, problem: MixProblem, settings: CompileSettings
) -> simt_mhc.Mixing:
    """Project and mix: out [T, D], post and mix of a layer (part "all"), or out of the "head".

    Bit for bit what mhc_project and the parts of simt_mhc give one after the other.
    """
    if problem.part not in {"all", "head", "coefficients"}:
        raise InvalidArgument(
            "part of mHC behind a projection", problem.part, "all, head or coefficients",
            "The other parts read no products: call simt_mhc.mhc.",
        )  # fmt: skip
    kind = "head" if problem.part == "head" else "layer"
    projected = ProjectProblem(problem.tokens, problem.width, kind)
    products, squares = mhc_project(streams_TSD, weights.split, projected, settings)
    streams = None if problem.part == "coefficients" else streams_TSD
    given = simt_mhc.Mixing(streams, products, squares, weights.base, weights.scale)
    return simt_mhc.mhc(given, problem, settings)


def launch(
    kernel: CompiledKernel, form: ProjectForm, problem: ProjectProblem, tensors: Sequence[Tensor]
) -> None:
    """Launch on checked tensors: streams, weight, partial sums, products, squares."""
    cut, (parts, blocks) = Cut(problem.inner), facts.grid(problem, form)
    numbers = (problem.tokens, problem.inner // 8, cut.steps, cut.per_piece, cut.per_group)
    extents = tuple(Int32(number) for number in (*numbers, cut.groups, parts, blocks))
    kernel(_pointers(tensors), extents, current_stream(tensors[0].device.index or 0))


def empty_outputs(problem: ProjectProblem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate partial sums, products and squares."""
    shapes = ((problem.tokens, problem.partials, LINE), (problem.tokens, problem.products))
    partials, products = (torch.empty(s, dtype=torch.float32, device=device) for s in shapes)
    return partials, products, products.new_empty(problem.tokens)


def require_operands(
    problem: ProjectProblem, streams_TSD: Tensor, split_NK: Tensor, out: tuple[Tensor, ...]
) -> None:
    """Refuse tensors that the kernels would misread."""
    tokens, parts = problem.tokens, (problem.partials, LINE)
    shapes: tuple[tuple[torch.dtype, tuple[int, ...], int], ...] = (
        (torch.bfloat16, (tokens, STREAMS, problem.width), 16),
        (torch.bfloat16, (PARTS, problem.weight_rows, problem.inner), 16),
        (torch.float32, (tokens, *parts), 16),
        (torch.float32, (tokens, problem.products), 16),
        (torch.float32, (tokens,), 4),
    )
    for name, tensor, kind in zip(NAMES, (streams_TSD, split_NK, *out), shapes, strict=True):
        dtype, shape, alignment = kind
        require_tensor(name, tensor, dtype, shape, alignment)


def _pointers(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return what the entry takes; None becomes a pointer that is not read."""
    kinds = ((Uint32, 16), (Uint32, 16), (Float32, 16), (Float32, 16), (Float32, 4))
    return tuple(
        pointer(element, tensor, alignment)
        for (element, alignment), tensor in zip(kinds, tensors, strict=True)
    )
