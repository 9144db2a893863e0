"""W4A16, FP8 and BF16 products against Marlin, quack, humming, DeepGEMM, CUTLASS and cuBLAS."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.backends.graph.matrices import few_rows_kernel
from degarble.kernels.gemm.problem import BF16, FP8_BLOCK, GemmProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import empty, normal, octets
from degarble.suites.bench.kernel_peers import operands, vendors
from degarble.suites.bench.kernel_peers.contest import Call, Contender, Row, of_best, of_copy
from degarble.suites.bench.runner import copy_arm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

W4A16_SHAPES = ((7168, 4096), (8192, 8192), (4096, 7168), (2048, 7168))  # N x K
W4A16_ROWS = (1, 4, 8, 16, 32, 64)
OF_A_COPY = (8192, 8192)  # with one row
FP8_SHAPE, FP8_ROWS = (7168, 4096), (1, 16, 128, 512, 4096)
DECODE_SCALE = 0.01
CUBLAS = "cuBLAS BF16"


class Product(NamedTuple):
    """What all kernels of a row multiply, of one buffer set."""

    x: Any
    codes: Any
    scales: Any  # linear
    decode_scale: Any

    def reference(self) -> Tensor:
        """Multiply in float64, 64 columns of the output at a time where memory is short."""
        wide = operands.nvfp4(self.codes, self.scales) * self.decode_scale.double()
        made: Tensor = self.x.double() @ wide.T
        return made


def product_of(problem: W4A16Problem, _number: int) -> Product:
    blocks = problem.columns // 16
    return Product(
        normal(problem.rows, problem.columns),
        octets(problem.outputs, problem.columns // 2, low=0, high=256),
        octets(problem.outputs, blocks, low=0x30, high=0x48),
        torch.full((1,), DECODE_SCALE, device=gpu.DEVICE),
    )


def product_call(
    prepare: Callable[[Product], Callable[[Any, Any], object]],
    product: Callable[[int], Product],
    outputs: int,
    number: int,
) -> Call:
    """Prepare weights once, and multiply into an output."""
    of = product(number)
    multiply, out = prepare(of), empty(len(of.x), outputs)
    return Call(lambda: multiply(of.x, out), lambda: out)


def by_marlin(of: Product) -> Callable[[Any, Any], object]:
    weight = vendors.marlin_weight(of.codes, of.scales, of.decode_scale)
    work = vendors.locks(of.codes.device)
    return lambda x, out: vendors.marlin(x, weight, work, out)


def by_quack(of: Product) -> Callable[[Any, Any], object]:
    made: Callable[[Any, Any], object] = vendors.quack_product(of.codes, of.scales, DECODE_SCALE)
    return made


def by_humming(of: Product) -> Callable[[Any, Any], object]:
    made: Callable[[Any, Any], object] = vendors.humming_product(
        of.codes, of.scales, of.decode_scale
    )
    return made


def by_cublas(of: Product) -> Callable[[Any, Any], object]:
    """Multiply by the same weights in BF16: four times the bytes."""
    weight = (operands.nvfp4(of.codes, of.scales) * of.decode_scale.double()).bfloat16()
    return lambda x, out: torch.mm(x, weight.T, out=out)


W4A16_PEERS = {"Marlin": by_marlin, "quack": by_quack, "humming": by_humming, CUBLAS: by_cublas}


def w4a16_row(problem: W4A16Problem) -> Row:
    shared, outputs = cache(partial(product_of, problem)), problem.outputs

    def given(number: int) -> dict[str, Any]:
        of = shared(number)
        return {**of._asdict(), "scales": of.scales.flatten()}

    peers = [
        Contender(name, partial(product_call, prepare, shared, outputs))
        for name, prepare in W4A16_PEERS.items()
    ]
    goals = [of_best(1.15)]
    if (outputs, problem.columns) == OF_A_COPY and problem.rows == 1:
        goals.append(of_copy(0.80))
    return Row(
        f"{outputs}x{problem.columns}, M = {problem.rows}",
        [operands.ours(few_rows_kernel(problem.rows), problem, given), *peers],
        problem.weight_bytes, 2 * problem.rows * outputs * problem.columns,
        lambda: shared(0).reference(), goals, ceilings=[copy_arm(problem.weight_bytes)],
        other_bytes={CUBLAS: 2 * outputs * problem.columns},
    )  # fmt: skip


def w4a16() -> Iterator[Row]:
    """Every shape at every number of rows."""
    for outputs, columns in W4A16_SHAPES:
        for rows in W4A16_ROWS:
            yield w4a16_row(W4A16Problem(rows, outputs, columns))


# ---- FP8 with scales of 128x128 blocks, and BF16 -------------------------------------------------


class Scaled(NamedTuple):
    """E4M3 operands: scales of 128 values of A, and of 128 x 128 values of B."""

    a: Any
    a_scales: Any
    b: Any
    b_scales: Any


def scaled_of(problem: GemmProblem, _number: int) -> Scaled:
    m, n, k = problem.rows, problem.columns, problem.inner
    fp8, blocks = torch.float8_e4m3fn, k // 128
    factors = [
        torch.rand(rows, blocks, device=gpu.DEVICE) * 0.02 + 0.01 for rows in (m, -(-n // 128))
    ]
    return Scaled(normal(m, k, dtype=fp8), factors[0], normal(n, k, dtype=fp8), factors[1])


def scaled_reference(of: Scaled) -> Tensor:
    some = operands.sample(len(of.a))
    a = operands.fp8_blocks(of.a[some], of.a_scales[some], 1)
    made: Tensor = a @ operands.fp8_blocks(of.b, of.b_scales, 128).T
    return made


def sampled_call(run: Callable[[Tensor], object], out: Tensor) -> Call:
    some = operands.sample(len(out))
    return Call(lambda: run(out), lambda: out[some])


def fp8_deep_gemm(of: Scaled, out: Tensor) -> Call:
    """Scales of A lie column by column before it is timed, as its own quantiser leaves them."""
    home = vendors.deep_gemm()
    a, b = (of.a, home.get_mn_major_tma_aligned_tensor(of.a_scales)), (of.b, of.b_scales)
    return sampled_call(lambda d: home.fp8_gemm_nt(a, b, d, disable_ue8m0_cast=True), out)


def fp8_cutlass(of: Scaled, out: Tensor) -> Call:
    scales = of.a_scales.T.contiguous().T
    multiply = vendors.common().cutlass_scaled_mm
    return sampled_call(lambda d: multiply(d, of.a, of.b.T, scales, of.b_scales.T, None), out)


def fp8_row(problem: GemmProblem) -> Row:
    shared, some = cache(partial(scaled_of, problem)), operands.sample(problem.rows)

    def theirs(make: Callable[[Scaled, Tensor], Call], number: int) -> Call:
        return make(shared(number), empty(problem.rows, problem.columns))

    peers = {"DeepGEMM": fp8_deep_gemm, "CUTLASS": fp8_cutlass}
    kernel = operands.ours(
        "sm90_gemm_fp8_block", problem, lambda number: shared(number)._asdict(),
        lambda tensors: tensors["out"][some],
    )  # fmt: skip
    return Row(
        f"FP8 128x128, {problem.columns}x{problem.inner}, M = {problem.rows}",
        [kernel, *(Contender(name, partial(theirs, make)) for name, make in peers.items())],
        problem.bytes_moved, problem.operations, lambda: scaled_reference(shared(0)),
        [of_best(1.0)], ceilings=[copy_arm(problem.bytes_moved)],
    )  # fmt: skip


def bf16_row(problem: GemmProblem) -> Row:
    m, n, k = problem.rows, problem.columns, problem.inner
    shared = cache(lambda _number: (normal(m, k), normal(n, k)))
    some = operands.sample(m)

    def reference() -> Tensor:
        a, b = shared(0)
        made: Tensor = a[some].double() @ b.double().T
        return made

    def by_mm(number: int) -> Call:
        a, b = shared(number)
        return sampled_call(lambda d: torch.mm(a, b.T, out=d), empty(m, n))

    def by_deep_gemm(number: int) -> Call:
        a, b = shared(number)
        home = vendors.deep_gemm()
        return sampled_call(lambda d: home.bf16_gemm_nt(a, b, d), empty(m, n))

    kernel = operands.ours(
        "sm90_gemm_bf16", problem, lambda number: dict(zip("ab", shared(number), strict=True)),
        lambda tensors: tensors["out"][some],
    )  # fmt: skip
    return Row(
        f"BF16, {n}x{k}, M = {m}",
        [kernel, Contender(CUBLAS, by_mm), Contender("DeepGEMM", by_deep_gemm)],
        problem.bytes_moved, problem.operations, reference,
        [of_best(0.98)], ceilings=[copy_arm(problem.bytes_moved)],
    )  # fmt: skip


def fp8() -> Iterator[Row]:
    for rows in FP8_ROWS:
        yield fp8_row(GemmProblem(rows, *FP8_SHAPE, FP8_BLOCK.name, "float32"))


def bf16() -> Iterator[Row]:
    """The goal counts cuBLAS and DeepGEMM alike."""
    for rows in FP8_ROWS:
        yield bf16_row(GemmProblem(rows, *FP8_SHAPE, BF16.name))
