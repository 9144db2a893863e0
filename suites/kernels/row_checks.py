"""Compare the row kernels on a GPU with their stated arithmetic on tensors, bit for bit.

RMSNorm, fused or not, and the product of few rows are defined in the order that their problem
states. Outputs are filled with 0xAA before a launch, which reveals a byte that is never written,
and padding of scales has to be zero. suites/kernels/rows compares the arithmetic itself with
float64.

Shape letters: M rows, K columns, N columns of a product, T lanes, S slots or steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import to_layout
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.kernels.gemm import gemv_problem
from degarble.kernels.gemm.gemv_problem import GemvProblem
from degarble.kernels.primitives.quantise_problem import BLOCK, LAYOUTS
from degarble.kernels.rows import problem as rmsnorm_problem
from degarble.kernels.rows.problem import NormProblem
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named

if TYPE_CHECKING:
    from torch import Tensor


SETTINGS = CompileSettings()
POISON = 0xAA
SPREADS = ("ordinary", "rows", "tiny", "huge", "zeros", "special")
LANES = 32


def spread(shape: tuple[int, int], kind: str, seed: int) -> Tensor:
    """Draw BF16 values on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x_MK = torch.randn(shape, generator=generator)
    if kind == "rows":
        x_MK *= torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator).float())
    if kind in {"tiny", "huge"}:
        x_MK *= 2.0 ** (-100 if kind == "tiny" else 100)  # squares vanish, or are infinite
    if kind == "zeros":
        x_MK[::2] = -0.0
    if kind == "special":
        for place, number in enumerate((torch.inf, -torch.inf, torch.nan)):
            x_MK[place::5, place % shape[1]] = number
    return x_MK.bfloat16()


@dataclass(frozen=True)
class NormCase:
    """One launch of the norm; everything follows from these facts."""

    problem: NormProblem
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        what = f"rmsnorm {p.rows}x{p.columns} {p.weight} {p.layout or 'plain'}"
        return f"{what}{' keeps' if p.keeps_values else ''} {self.spread} seed={self.seed}"

    @cached_property
    def values(self) -> Tensor:
        """Draw what is read."""
        return spread((self.problem.rows, self.problem.columns), self.spread, self.seed)

    @cached_property
    def weight(self) -> Tensor:
        """Draw the weight."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        weight = torch.rand(self.problem.columns, generator=generator) * 2 - 0.25
        return weight if self.problem.weight == "fp32" else weight.bfloat16()

    @property
    def decode_scale(self) -> Tensor | None:
        """A scale that fits what the norm makes, where something is quantised."""
        return torch.tensor([5.0 / 2688]) if self.problem.layout else None


def folded(total: Tensor) -> Tensor:
    """Fold the last axis: number i and number i + n / 2, until one is left."""
    while total.shape[-1] > 1:
        total = ops.add_rn(*total.chunk(2, -1))
    return total[..., 0]


def normed_by_definition(values_MK: Tensor, weight_K: Tensor, epsilon: float) -> Tensor:
    """Return the normed BF16 values, in the order that rmsnorm_problem states."""
    rows, columns = values_MK.shape
    x_MK = values_MK.float()
    lanes, slots = rmsnorm_problem.lanes_of_row(columns), rmsnorm_problem.SLOTS_OF_LANE
    padded = torch.nn.functional.pad(x_MK, (0, slots * lanes * BLOCK - columns))
    padded = padded.reshape(rows, slots, lanes, BLOCK)
    first, second = (
        rmsnorm_problem.sum_of_squares(list(padded[:, slot].unbind(-1))) for slot in range(slots)
    )
    total = folded(ops.add_rn(first, second).reshape(rows, -1, LANES))
    missing = rmsnorm_problem.MOST_WARPS - total.shape[1]
    narrow = rmsnorm_problem.is_narrow(columns)
    total = total[:, 0] if narrow else folded(torch.nn.functional.pad(total, (0, missing)))
    # Trap: torch on a GPU multiplies by the inverse of a number; a tensor it divides by.
    factor = rmsnorm_problem.factor_of(total, torch.full_like(total, columns), epsilon, torch.sqrt)
    made: Tensor = rmsnorm_problem.normed(x_MK, weight_K.float(), factor[:, None])
    return made.bfloat16()


def norm_by_definition(case: NormCase, device: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return normed values, codes and scale storage."""
    problem = case.problem
    values_MK = normed_by_definition(
        case.values.to(device), case.weight.to(device), problem.epsilon
    )
    if problem.layout is None:
        return values_MK, None, None
    assert case.decode_scale is not None, "what is quantised has a scale"
    made = quantise(values_MK, NVFP4, CANONICAL, decode_scale=case.decode_scale[0].to(device))
    return values_MK, made.codes, to_layout(made.block_scale, LAYOUTS[problem.layout])


class Normed(NamedTuple):
    """Requested results: normed values, codes, scale bytes."""

    values: Tensor | None
    codes: Tensor | None
    scales: Tensor | None


def poisoned(problem: NormProblem, device: str = "cuda") -> dict[str, Tensor | None]:
    """Allocate outputs full of 0xAA."""
    out = kernel_named("simt_rmsnorm").allocate(problem, torch.device(device))
    for tensor in out.values():
        if tensor is not None:
            tensor.view(torch.uint8).fill_(POISON)
    return out


def norm_on_device(case: NormCase) -> Normed:
    """Run a case on the GPU; outputs stay there."""
    given = {"values": case.values.cuda(), "weight": case.weight.cuda()}
    if case.decode_scale is not None:
        given["decode_scale"] = case.decode_scale.cuda()
    out = poisoned(case.problem)
    made = kernel_named("simt_rmsnorm").run(case.problem, SETTINGS, **given, **out)
    return Normed(*(made[name] for name in ("normed", "codes", "scales")))


def norm_mismatch(case: NormCase) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    got = norm_on_device(case)
    place = case.values.cuda().device.type
    want = norm_by_definition(case, place)
    pairs = zip(("values", "codes", "scales"), got, want, strict=True)
    found = [
        bits_differ(f"{case.name}, {name}", mine, theirs)
        for name, mine, theirs in pairs
        if mine is not None and theirs is not None
    ]
    return "; ".join(filter(None, found))


def bits_differ(name: str, got: Tensor, want: Tensor) -> str:
    """Describe how two tensors of one dtype differ, NaN equal to NaN; empty where they do not."""
    if got.is_floating_point():
        kind = torch.int16 if got.dtype is torch.bfloat16 else torch.int32
        differs = (got.view(kind) != want.view(kind)) & ~(got.isnan() & want.isnan())
    else:
        differs = got != want
    if not bool(differs.any()):
        return ""
    at = tuple(differs.nonzero()[0].tolist())
    return (
        f"{name}: {int(differs.sum())} of {differs.numel()} differ (budget 0: the order is stated)"
        f"; first at {at}: got {got[at].item()}, want {want[at].item()}"
    )


def norm_cases() -> list[NormCase]:
    """Return the named cases: widths of the models, tails, every layout, spread and weight."""
    made = []
    for columns in (64, 128, 512, 1024, 1040, 1536, 4096, 7168, 16_384):
        made += [
            NormCase(NormProblem(37, columns, weight=weight), "rows", columns)
            for weight in rmsnorm_problem.NORM_WEIGHTS
        ]
        for layout in LAYOUTS:
            problem = NormProblem(133, columns, layout=layout, keeps_values=layout == "128x4")
            made.append(NormCase(problem, "ordinary", columns))
    for kind in SPREADS:
        for named in (None, *LAYOUTS):
            made.append(NormCase(NormProblem(70, 2064, layout=named), kind, 3))
            made.append(NormCase(NormProblem(70, 272, 1e-20, layout=named), kind, 4))
    made.append(NormCase(NormProblem(77, 80), "rows"))
    made.append(NormCase(NormProblem(3000, 7168, layout="128x4", weight="fp32"), "rows"))
    # Several rows to a thread block, some of which have none.
    for layout, kind in zip((*LAYOUTS, *LAYOUTS), SPREADS, strict=True):
        made.append(
            NormCase(NormProblem(rmsnorm_problem.LEAST_TOGETHER + 21, 7168, layout=layout), kind, 5)
        )
    return made


def fuzzed_norms(seed: int, count: int) -> list[NormCase]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        layout = drawn.choice((None, *LAYOUTS))
        problem = NormProblem(
            rows=drawn.choice((drawn.randint(1, 20), drawn.randint(1, 700))),
            columns=16 * drawn.choice((drawn.randint(4, 70), drawn.randint(4, 600))),
            epsilon=drawn.choice((1e-6, 1e-20, 1e-5)),
            weight=drawn.choice(rmsnorm_problem.NORM_WEIGHTS),
            layout=layout,
            keeps_values=layout is not None and drawn.random() < 0.3,
        )
        made.append(NormCase(problem, drawn.choice(SPREADS), drawn.randrange(1 << 30)))
    return made


# ---- the product of few rows ---------------------------------------------------------------------


@dataclass(frozen=True)
class GemvCase:
    """One launch of the product."""

    problem: GemvProblem
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        extents = f"{p.rows}x{p.columns}x{p.inner}{f'x{p.groups}' if p.groups > 1 else ''}"
        spared = f" less {p.spared}" if p.spared else ""
        return f"gemv {extents} {p.out} {self.spread} seed={self.seed}{spared}"

    @cached_property
    def operands(self) -> tuple[Tensor, Tensor]:
        """Draw activations and weight."""
        p = self.problem
        x_MK = spread((p.rows, p.groups * p.inner), self.spread, self.seed)
        return x_MK, spread((p.sums, p.inner), "ordinary", self.seed + 1)


def grouped_by_definition(case: GemvCase, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the sums [M, G N] of a case's groups."""
    groups = case.problem.groups
    pairs = zip(x_MK.chunk(groups, 1), weight_NK.chunk(groups), strict=True)
    return torch.cat([product_by_definition(*pair, case.problem.out) for pair in pairs], 1)


def product_by_definition(x_MK: Tensor, weight_NK: Tensor, out: str) -> Tensor:
    """Return the sums [M, N], in the order that gemv_problem states."""
    inner = x_MK.shape[1]
    missing = -inner % gemv_problem.STEP
    x, weight = (
        torch.nn.functional.pad(part.float(), (0, missing)).reshape(
            part.shape[0], -1, gemv_problem.LANES, gemv_problem.VECTOR
        )
        for part in (x_MK, weight_NK)
    )
    total = torch.zeros(
        (x.shape[0], weight.shape[0], gemv_problem.LANES), device=x.device, dtype=torch.float32
    )
    for step in range(x.shape[1]):
        activations = [x[:, None, step, :, i] for i in range(gemv_problem.VECTOR)]
        weights = [weight[None, :, step, :, i] for i in range(gemv_problem.VECTOR)]
        total = gemv_problem.accumulated(total, weights, activations)
    sums = folded(total)
    return sums if out == "fp32" else sums.bfloat16()


def multiply(x_MK: Tensor, weight_NK: Tensor, p: GemvProblem, out: Tensor | None = None) -> Tensor:
    """Multiply a few rows by the kernel."""
    from degarble.kernels.gemm import simt_gemv_bf16 as kernels  # noqa: PLC0415  needs the DSL

    more = {} if out is None else {"out": out}
    return kernels.KERNEL.run_one(p, SETTINGS, x=x_MK, weight=weight_NK, **more)


def product_on_device(case: GemvCase) -> Tensor:
    """Run a case on the GPU, into poisoned memory; the result stays there."""
    p = case.problem
    out = torch.empty((p.rows, p.sums), dtype=operands.DTYPES[p.out], device="cuda")
    out.view(torch.uint8).fill_(POISON)
    x_MK, weight_NK = (part.cuda() for part in case.operands)
    return multiply(x_MK, weight_NK, p, out)


def product_mismatch(case: GemvCase) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    got = product_on_device(case)
    x_MK, weight_NK = (part.to(got.device) for part in case.operands)
    return bits_differ(case.name, got, grouped_by_definition(case, x_MK, weight_NK))


def gemv_cases() -> list[GemvCase]:
    """Return the named cases: heads of the models, tails in N and K, every spread."""
    shapes = (
        (1, 1, 8),
        (3, 5, 264),
        (8, 129, 512),
        (2, 131, 776),
        (5, 1000, 7168),
        (4, 77, 16_384),
    )
    cases = [
        GemvCase(GemvProblem(*shape, out=out), kind, shape[1])
        for shape in shapes
        for out in gemv_problem.OUTPUTS
        for kind in ("ordinary", "special")
    ]
    cases += [GemvCase(GemvProblem(m, 5000, 4096), "rows", m) for m in range(1, 9)]
    cases.append(GemvCase(GemvProblem(8, 3000, 14_336), "rows"))
    walked = (
        (1, 7168, 0),
        (258, 7168, 0),
        (255, 4096, 0),
        (2047, 4096, 0),
        (1536, 7168, 0),
        (8192, 1536, 0),
        (2049, 1536, 24),
        (1500, 3584, 0),
        (300, 14_336, 0),
        (2048, 12_288, 0),
        # Just below whole steps.
        (255, 4088, 0),
        (258, 7160, 0),
    )
    cases += [
        GemvCase(GemvProblem(1, n, k, "bf16", spared=spared), "rows") for n, k, spared in walked
    ]
    of_groups = ((1, 1024, 4096, 8), (4, 512, 128, 128), (3, 77, 264, 5), (2, 1, 8, 300))
    cases += [GemvCase(GemvProblem(m, n, k, "bf16", g), "rows") for m, n, k, g in of_groups]
    return cases


def fuzzed_gemvs(seed: int, count: int) -> list[GemvCase]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        problem = GemvProblem(
            rows=drawn.randint(1, 8),
            columns=drawn.choice((drawn.randint(1, 40), drawn.randint(1, 3000))),
            inner=8 * drawn.choice((drawn.randint(1, 70), drawn.randint(1, 700))),
            out=drawn.choice(gemv_problem.OUTPUTS),
            groups=drawn.choice((1, 1, drawn.randint(2, 9))),
        )
        made.append(GemvCase(problem, drawn.choice(SPREADS), drawn.randrange(1 << 30)))
    return made
