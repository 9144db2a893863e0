"""Compare BF16 times NVFP4 on a GPU with the product in float64, within a derived budget.

Two kernels, by mma and by wgmma. Cases vary extents, layouts, and the spreads of activations and
scales. The twin multiplies decoded weights and activations in float64, on the GPU. The budget
follows from what rounds: each mma truncates its 17 terms at 2**-25 of the largest and its result to
float32; the sums of the parts of K are added; two products and the output's BF16 round. Outputs
hold NaN before, padding of scales holds the code of NaN.

Shape letters: M rows, N outputs, K columns
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.codec import decode_array, unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import SCALE_LAYOUTS, from_layout, to_layout
from degarble.harness.formats.number_formats import E2M1, E4M3, NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.kernels.gemm.w4a16_problem import LAYOUTS, PARTS, ROUND, W4A16Problem
from degarble.kernels.gemm.w4a16_wgmma_problem import STEP as WGMMA_STEP
from degarble.kernels.gemm.w4a16_wgmma_problem import division, run_of
from degarble.kernels.runtime.compiling import CompileSettings

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
BY_MMA, BY_WGMMA = KERNELS = ("sm90_gemm_w4a16", "sm90_gemm_w4a16_wgmma")
SPREADS = ("ordinary", "wide", "sparse", "cancelling")
SCALES = ("ordinary", "all", "tiny")
NAN_CODE = 0x7F  # of E4M3
MMA_DEPTH = 16
# Tensor cores of Hopper: references/tensor_core.py, WGMMA_F16; 16 products and the sum so far.
STEP_ERROR = (MMA_DEPTH + 1) * 2.0**-25 + 2.0**-23
BF16_HALF_STEP = 2.0**-8  # of a number's own magnitude at most


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    problem: W4A16Problem
    spread: str = "ordinary"
    scale: str = "ordinary"
    seed: int = 0
    kernel: str = BY_MMA

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        extents = f"{p.rows}x{p.outputs}x{p.columns} {p.layout}"
        return f"{self.kernel} {extents} {self.spread} {self.scale} seed={self.seed}"

    @cached_property
    def activations(self) -> Tensor:
        """Draw activations, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.problem.rows, self.problem.columns)
        x_MK = torch.randn(shape, generator=generator)
        if self.spread == "wide":
            x_MK *= torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
        if self.spread == "sparse":
            x_MK *= torch.rand(shape, generator=generator) < 0.05
        if self.spread == "cancelling":
            x_MK[:, 1::2] = -x_MK[:, ::2]
        return x_MK.bfloat16()

    @cached_property
    def weights(self) -> QuantisedTensor:
        """Draw codes and scales, on the CPU; padding is NaN."""
        p, generator = self.problem, torch.Generator().manual_seed(self.seed + 1)
        shape = (p.outputs, p.columns // 2)
        codes_NP = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        low, high = {"ordinary": (0x30, 0x48), "all": (0, NAN_CODE), "tiny": (0, 9)}[self.scale]
        shape = (p.outputs, p.blocks)
        scales_NK = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        stored = scales_NK
        if p.layout != "linear":
            marked = to_layout(torch.ones_like(scales_NK), p.scale_layout)
            stored = to_layout(scales_NK, p.scale_layout)
            stored[marked == 0] = NAN_CODE
        return QuantisedTensor(
            codes=codes_NP,
            block_scale=stored,
            tensor_scale=torch.tensor(0.0037 + self.seed % 7),
            format=NVFP4,
            dialect=CANONICAL,
            layout=SCALE_LAYOUTS[p.layout],
            direction=ScaleDirection.DECODE,
            nibble_order=NibbleOrder.LOW_EVEN,
            shape=(p.outputs, p.columns),
        )


def on_gpu(weights: QuantisedTensor) -> QuantisedTensor:
    """Move weights to the GPU."""
    assert weights.tensor_scale is not None
    return replace(
        weights,
        codes=weights.codes.cuda(),
        block_scale=weights.block_scale.cuda(),
        tensor_scale=weights.tensor_scale.cuda(),
    )


def multiply(
    x_MK: Tensor, weights: QuantisedTensor, out: Tensor | None = None, kernel: str = BY_MMA
) -> Tensor:
    """Multiply by weights as a checkpoint stores them."""
    from degarble.kernels.gemm import sm90_gemm_w4a16 as kernels  # noqa: PLC0415  needs the DSL
    from degarble.kernels.runtime.modules import kernel_named  # noqa: PLC0415  likewise

    problem, given = kernels.operands_of(x_MK, weights)
    given |= {} if out is None else {"out": out}
    return kernel_named(kernel).run_one(problem, SETTINGS, **given)


def on_device(case: Case) -> Tensor:
    """Run a case on the GPU; the output stays there."""
    shape = (case.problem.rows, case.problem.outputs)
    out_MN = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    return multiply(case.activations.cuda(), on_gpu(case.weights), out_MN, case.kernel)


def decoded(weights: QuantisedTensor) -> Tensor:
    """Return codes times block scales in float64, without the tensor scale."""
    outputs, columns = weights.shape
    scales_NK = weights.block_scale
    if weights.layout.name != "linear":
        scales_NK = from_layout(scales_NK, weights.layout, outputs, columns // 16)
    values_NK = decode_array(unpack_nibbles(weights.codes, NibbleOrder.LOW_EVEN), E2M1).double()
    return values_NK * decode_array(scales_NK, E4M3).double().repeat_interleave(16, -1)


def twin(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the sum of its terms' magnitudes."""
    weights = on_gpu(case.weights) if device == "cuda" else case.weights
    x_MK, w_NK = case.activations.to(device).double(), decoded(weights)
    scale = weights.decode_scale.double()
    return (x_MK @ w_NK.T) * scale, (x_MK.abs() @ w_NK.abs().T) * scale


def division_of(case: Case) -> tuple[int, int]:
    """Return into how many parts K is cut, and the mma of the longest one."""
    problem = case.problem
    if case.kernel == BY_MMA:
        return PARTS, -(-problem.columns // ROUND) * (ROUND // PARTS // MMA_DEPTH)
    _, ranks = division(problem.outputs, problem.columns)
    longest = max(run_of(rank, problem.columns, ranks)[1] for rank in range(ranks))
    return ranks, longest * WGMMA_STEP // MMA_DEPTH


def budget(case: Case, want_MN: Tensor, terms_MN: Tensor) -> Tensor:
    """Return how far a result may be: what its roundings can add up to, and no more."""
    parts, steps = division_of(case)
    sums = steps * STEP_ERROR + (parts + 2) * 2.0**-24
    return terms_MN * sums * (1 + BF16_HALF_STEP) + want_MN.abs() * BF16_HALF_STEP + 2.0**-100


def mismatch(case: Case) -> str:
    """Say how a case differs from its twin; empty where it does not."""
    got_MN = on_device(case)
    return difference(case, got_MN, *twin(case, got_MN.device.type))


def difference(case: Case, got_MN: Tensor, want_MN: Tensor, terms_MN: Tensor) -> str:
    """Say what is farther from the twin than the budget."""
    allowed = budget(case, want_MN, terms_MN)
    apart = (got_MN.double() - want_MN).abs()
    wrong = ~(apart <= allowed)  # a NaN is wrong
    if not bool(wrong.any()):
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    worst = float((apart / allowed).nan_to_num(nan=torch.inf).max())
    return (
        f"{case.name}: {int(wrong.sum())} of {wrong.numel()} are farther than the budget, worst "
        f"{worst:.3g} times; first at {at}: got {float(got_MN[at])!r}, want {float(want_MN[at])!r} "
        f"within {float(allowed[at])!r}"
    )


# N x K of linears of V4-Pro, V4-Flash and V3.2, and those of the bench.
MODEL_SHAPES = (
    (7168, 4096),
    (8192, 8192),
    (1536, 7168),
    (576, 7168),
    (7168, 2048),
    (4096, 7168),
    (2048, 4096),
    (7168, 16384),
    (24576, 1536),
    (7168, 18432),
)


def cases(kernel: str = BY_MMA) -> list[Case]:
    """Return the named cases: model shapes, tails, layouts, spreads, scales."""
    made: list[Case] = []
    few, many = ((1, 16), (3, 8)) if kernel == BY_MMA else ((17, 64), (1, 32))
    for place, (outputs, columns) in enumerate(MODEL_SHAPES):
        for layout in LAYOUTS:
            problems = [
                W4A16Problem(rows, outputs, columns, layout)
                for rows in (few if place % 2 else many)
            ]
            made += [Case(problem, seed=place) for problem in problems]
    for layout in LAYOUTS:
        for rows, outputs, columns in (
            (1, 8, 32),
            (5, 24, 96),
            (9, 136, 4128),
            (33, 264, 2080),
            (64, 1000, 7168),
            (17, 200, 128),
        ):
            problem = W4A16Problem(rows, outputs, columns, layout)
            made += [Case(problem, spread, "all") for spread in SPREADS]
        made += [Case(W4A16Problem(4, 512, 2048, layout), "wide", scale) for scale in SCALES]
    return [replace(case, kernel=kernel) for case in made]


def fuzzed(seed: int, count: int, kernel: str = BY_MMA) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        problem = W4A16Problem(
            rows=drawn.choice((1, 2, 4, 8, 16, drawn.randint(1, 64))),
            outputs=8 * drawn.choice((drawn.randint(1, 9), drawn.randint(1, 300))),
            columns=32 * drawn.choice((drawn.randint(1, 9), drawn.randint(1, 200))),
            layout=drawn.choice(tuple(LAYOUTS)),
        )
        spread, scale, number = (
            drawn.choice(SPREADS), drawn.choice(SCALES), drawn.randrange(1 << 30),
        )  # fmt: skip
        made.append(Case(problem, spread, scale, number, kernel))
    return made
