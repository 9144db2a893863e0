"""A GEMM of nothing but wgmma steps in the order of K, to observe the instruction's arithmetic.

D = C + A B^T with BF16 or FP16 operands and fp32 accumulators on sm_90a: one warpgroup for a tile
of 64 rows, one wgmma.m64nNk16 a step, A and B from shared memory. Without C the first step does not
read its accumulators. It is slow on purpose: plain copies, one step in flight, nothing between two
steps that could change a bit. Ragged extents are an error: the probe must not pad.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import cutlass
import torch
from cuda.bindings import driver
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    MissingDevice,
    ShapeMismatch,
)
from degarble.harness.formats.number_formats import BF16, FP16, ElementFormat
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.targets import SM90A, target_of_device

WARPGROUP = 128  # threads that issue one wgmma together
TILE_M = 64  # PTX ISA 9.1, wgmma.mma_async: M is 64, N is 8 to 256 by eights, 16-bit K is 16
STEP_K = 16
SHARED_ALIGNMENT = 1024  # PTX ISA 9.1, 9.7.15: swizzled patterns start at 256 to 1024 bytes
_FORMAT_OF_DTYPE = {torch.bfloat16: BF16, torch.float16: FP16}
_DSL_ELEMENT = {BF16.name: cutlass.BFloat16, FP16.name: cutlass.Float16}


@dataclass(frozen=True)
class WgmmaProbe:
    """Which instruction is probed, on which extents; without C the first step reads none.

    The extents are part of the kernel: a probe is compiled in a tenth of a second and seldom run.
    """

    element: str
    m: int
    n: int
    k: int
    tile_n: int
    reads_c: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles, one warpgroup each."""
        return (self.m // TILE_M, self.n // self.tile_n, 1)


def choose_probe(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor | None, tile_n: int) -> WgmmaProbe:
    """Return the instruction for these operands, or refuse what would need padding."""
    element = _required_format(a_MK, b_NK, c_MN)
    # N = 8 exists in PTX, but the DSL does not build its descriptors (cutlass issue 3290).
    if tile_n not in range(16, 257, 8):
        raise InvalidArgument(
            "tile_n", tile_n, "a multiple of 8 from 16 to 256", "Choose the N of a wgmma."
        )
    shapes = [tuple(x.shape) for x in (a_MK, b_NK, c_MN) if x is not None]
    m, n, k = a_MK.shape[0], b_NK.shape[0], a_MK.shape[-1]
    whole = m % TILE_M == 0 and n % tile_n == 0 and k % STEP_K == 0 and min(m, n, k) > 0
    if not whole or shapes != [(m, k), (n, k), (m, n)][: len(shapes)]:
        raise ShapeMismatch(
            "shapes of A, B, C",
            shapes,
            f"(M, K), (N, K), (M, N) in multiples of M {TILE_M}, N {tile_n}, K {STEP_K}",
            "Pad on the host, so that both sides see the same zeros.",
        )
    return WgmmaProbe(element.name, m, n, k, tile_n, c_MN is not None)


@cache
def compile_probe(probe: WgmmaProbe, settings: CompileSettings) -> CompiledKernel:
    """Compile the probe for sm_90a; needs no GPU."""
    element = _DSL_ELEMENT[probe.element]
    operand = make_ptr(element, 16, cute.AddressSpace.gmem, assumed_align=16)
    accumulator = make_ptr(cutlass.Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
    arguments = (operand, operand, accumulator, accumulator, probe, any_stream())
    return compile_kernel(launch_probe, arguments, SM90A, settings)


def probe_gemm(
    a_MK: Tensor, b_NK: Tensor, c_MN: Tensor | None, tile_n: int, settings: CompileSettings
) -> Tensor:
    """Return C + A B^T in fp32 as the GPU's wgmma computes it; operands are on that GPU."""
    probe = choose_probe(a_MK, b_NK, c_MN, tile_n)
    _require_sm90a([x.device for x in (a_MK, b_NK, c_MN) if x is not None])
    out_MN = torch.full((probe.m, probe.n), torch.nan, dtype=torch.float32, device=a_MK.device)
    tensors = [a_MK, b_NK, out_MN if c_MN is None else c_MN, out_MN]
    tensors = [x.contiguous() for x in tensors]
    operand, gmem = _DSL_ELEMENT[probe.element], cute.AddressSpace.gmem
    types = (operand, operand, cutlass.Float32, cutlass.Float32)
    pointers = [
        make_ptr(dtype, x.data_ptr(), gmem, assumed_align=16)
        for dtype, x in zip(types, tensors, strict=True)
    ]
    kernel = compile_probe(probe, settings)
    kernel(*pointers, current_stream(a_MK.device.index or 0))
    return out_MN


def _require_sm90a(devices: list[torch.device]) -> None:
    """Refuse operands that are not all on one GPU that wgmma exists on."""
    if len(set(devices)) > 1 or devices[0].type != "cuda":
        names = [str(device) for device in devices]
        raise InvalidArgument("devices of A, B, C", names, "one CUDA device", "Move them there.")
    target = target_of_device(devices[0].index or 0)
    if target is not SM90A:
        raise MissingDevice(
            "target", target.name, SM90A.name, "wgmma exists on Hopper only; use an H100 or H200."
        )


def _required_format(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor | None) -> ElementFormat:
    """Return the format of the operands."""
    mixed = a_MK.dtype not in _FORMAT_OF_DTYPE or b_NK.dtype != a_MK.dtype
    if mixed or (c_MN is not None and c_MN.dtype != torch.float32):
        raise DtypeMismatch(
            "dtypes of A, B, C",
            [str(x.dtype) for x in (a_MK, b_NK, c_MN) if x is not None],
            "bfloat16 twice or float16 twice, and float32",
            "Round the operands to one 16-bit format.",
        )
    return _FORMAT_OF_DTYPE[a_MK.dtype]


# ---- device --------------------------------------------------------------------------------------


@cute.jit
def launch_probe(
    a_ptr: cute.Pointer,
    b_ptr: cute.Pointer,
    c_ptr: cute.Pointer,
    d_ptr: cute.Pointer,
    probe: cutlass.Constexpr,
    stream: driver.CUstream,
) -> None:
    """Cut the extents into tiles of one warpgroup each."""
    m, n, k = probe.m, probe.n, probe.k
    mA = cute.make_tensor(a_ptr, cute.make_layout((m, k), stride=(k, 1)))
    mB = cute.make_tensor(b_ptr, cute.make_layout((n, k), stride=(k, 1)))
    mC = cute.make_tensor(c_ptr, cute.make_layout((m, n), stride=(n, 1)))
    mD = cute.make_tensor(d_ptr, cute.make_layout((m, n), stride=(n, 1)))
    instruction = warpgroup.MmaF16BF16Op(
        a_ptr.dtype,
        cutlass.Float32,
        (TILE_M, probe.tile_n, STEP_K),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    tiled_mma = cute.make_tiled_mma(cute.make_mma_atom(instruction))
    _probe_kernel(tiled_mma, mA, mB, mC, mD, probe).launch(
        grid=probe.grid, block=(WARPGROUP, 1, 1), stream=stream
    )


@cute.kernel
def _probe_kernel(
    tiled_mma: cute.TiledMma,
    mA: cute.Tensor,
    mB: cute.Tensor,
    mC: cute.Tensor,
    mD: cute.Tensor,
    probe: cutlass.Constexpr,
) -> None:
    """Compute one tile of 64 x tile_n, one step of K at a time."""
    thread, _, _ = cute.arch.thread_idx()
    tile_row, tile_column, _ = cute.arch.block_idx()
    # A step of K is 32 bytes: exactly the row of the 32-byte swizzle.
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, mA.element_type)
    smem = cutlass.memory.SmemAllocator()
    sA = _shared_tile(smem, mA.element_type, atom, TILE_M)
    sB = _shared_tile(smem, mB.element_type, atom, probe.tile_n)
    gA = cute.local_tile(mA, (TILE_M, STEP_K), (tile_row, None))
    gB = cute.local_tile(mB, (probe.tile_n, STEP_K), (tile_column, None))
    gC = cute.local_tile(mC, (TILE_M, probe.tile_n), (tile_row, tile_column))
    gD = cute.local_tile(mD, (TILE_M, probe.tile_n), (tile_row, tile_column))

    of_warpgroup, of_thread = tiled_mma.get_slice(0), tiled_mma.get_slice(thread)
    fragment_a = tiled_mma.make_fragment_A(of_warpgroup.partition_A(sA))
    fragment_b = tiled_mma.make_fragment_B(of_warpgroup.partition_B(sB))
    tCgC, tCgD = of_thread.partition_C(gC), of_thread.partition_C(gD)
    rD = cute.make_rmem_tensor(tCgD.shape, cutlass.Float32)
    if cutlass.const_expr(probe.reads_c):
        rD.store(tCgC.load())
    tiled_mma.set(warpgroup.Field.ACCUMULATE, probe.reads_c)

    for step in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
        _fill(sA, gA[None, None, step], thread)
        _fill(sB, gB[None, None, step], thread)
        # wgmma reads shared memory through the async proxy (PTX ISA 9.1, 9.7.15)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        warpgroup.fence()
        cute.gemm(tiled_mma, rD, fragment_a[None, None, 0], fragment_b[None, None, 0], rD)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

    tCgD.store(rD.load())


def _shared_tile(smem: Any, element: Any, atom: Any, rows: int) -> Any:
    """Allocate one operand's tile of a step."""
    layout = cute.tile_to_shape(atom, (rows, STEP_K), (0, 1))
    return smem.allocate_tensor(element, layout.outer, SHARED_ALIGNMENT, swizzle=layout.inner)


@cute.jit
def _fill(shared: cute.Tensor, tile: cute.Tensor, thread: cutlass.Int32) -> None:
    """Copy one tile element by element, all threads together."""
    for round_ in cutlass.range_constexpr(cute.size(shared) // WARPGROUP):
        row, column = (thread + round_ * WARPGROUP) // STEP_K, thread % STEP_K
        shared[row, column] = tile[row, column]
