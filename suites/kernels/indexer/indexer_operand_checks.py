"""Compare rows of the indexer on a GPU with their stated arithmetic on tensors, bit for bit.

The definition has the order that indexer.problem states: LayerNorm, RoPE, Hadamard, rounding.
Roundings to blocks are those of references.numerics, which knows no kernel; the suite compares the
whole with the references, where sums have other orders.

Shape letters: T tokens, N heads, I width, P rows of the table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import OperandProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.references import numerics
from degarble.suites.kernels.row_checks import POISON, bits_differ, spread

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
SPREADS = ("ordinary", "rows", "zeros", "special")
POSITIONS = 50


class Made(NamedTuple):
    """BF16 values; codes as bytes, and scales."""

    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class OperandCase:
    """One launch; everything follows from these facts."""

    problem: OperandProblem
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        return f"{self.problem}, {self.spread} seed={self.seed}"

    @cached_property
    def rows(self) -> Tensor:
        """Draw BF16 rows [T, N, I]."""
        p = self.problem
        found = spread((p.rows, facts.WIDTH), self.spread, self.seed)
        if self.spread == "rows":
            found = found.float().clamp(-1e4, 1e4).bfloat16()
        return found.view(p.tokens, p.heads, facts.WIDTH)

    @cached_property
    def turning(self) -> tuple[Tensor, Tensor] | None:
        """Draw a table of turns, and positions, some of them outside where rows are special."""
        p = self.problem
        if not p.positions:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        angle = torch.rand((p.positions, facts.PAIRS), generator=generator) * 6.3
        position_T = torch.randint(0, p.positions, (p.tokens,), generator=generator)
        if self.spread == "special":
            position_T[1::7], position_T[2::7] = -1, p.positions
        return torch.cat((angle.cos(), angle.sin()), dim=1), position_T

    @cached_property
    def norm(self) -> tuple[Tensor, Tensor] | None:
        """Draw LayerNorm's weight and bias."""
        if not self.problem.normed:
            return None
        generator = torch.Generator().manual_seed(self.seed + 2)
        drawn = torch.randn((2, facts.WIDTH), generator=generator)
        return drawn[0] * 0.3 + 1, drawn[1] * 0.1

    def operands(self, device: str = "cuda") -> dict[str, Tensor]:
        """Return the operands by name."""
        given = {"rows": self.rows}
        given |= dict(zip(("turns", "positions"), self.turning or (), strict=False))
        given |= dict(zip(("weight", "bias"), self.norm or (), strict=False))
        return {name: tensor.to(device) for name, tensor in given.items()}


def lanes_folded(of_lane: Tensor) -> Tensor:
    """Fold numbers [..., 8] by distance 4, 2, 1."""
    while of_lane.shape[-1] > 1:
        first, second = of_lane.chunk(2, dim=-1)
        of_lane = first + second
    return of_lane


def mean(x: Tensor) -> Tensor:
    """Return the mean in the stated order."""
    lanes = x.unflatten(-1, (facts.LANES, facts.OF_LANE))
    total = lanes[..., 0]
    for place in range(1, facts.OF_LANE):
        total = total + lanes[..., place]
    return lanes_folded(total) * (1.0 / facts.WIDTH)


def layer_normed(x: Tensor, norm: tuple[Tensor, Tensor], epsilon: float) -> Tensor:
    """Return LayerNorm in float32, each step rounded."""
    centred = x - mean(x)
    variance = mean(centred * centred)
    # Trap: torch's square root on a CPU may be a unit off; a double's, rounded again, is not.
    root = (variance + torch.tensor(epsilon)).double().sqrt().float()
    made: Tensor = (centred * (1.0 / root)) * norm[0] + norm[1]
    return made


def turned(x: Tensor, turning: tuple[Tensor, Tensor], pairing: str) -> Tensor:
    """Return rows [T, N, I] turned in float32, each product and sum rounded."""
    turns, position_T = turning
    inside = (position_T >= 0) & (position_T < len(turns))
    table = turns[position_T.clamp(0, len(turns) - 1)]
    table = torch.where(inside[:, None], table, torch.nan).unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    x = x.clone()
    if pairing == "halves":
        first, second = x[..., : facts.PAIRS], x[..., facts.PAIRS : facts.TURNED]
    else:
        first, second = x[..., -facts.TURNED :: 2], x[..., -facts.TURNED + 1 :: 2]
    tensors = first * cos - second * sin, first * sin + second * cos
    if pairing == "halves":
        x[..., : facts.TURNED] = torch.cat(tensors, dim=-1)
    else:
        x[..., -facts.TURNED :] = torch.stack(tensors, dim=-1).flatten(-2)
    return x


def transformed(x: Tensor) -> Tensor:
    """Return the Hadamard transform by butterflies of growing distance."""
    distance = 1
    while distance < facts.WIDTH:
        pairs = x.unflatten(-1, (-1, 2, distance))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    scaled: Tensor = x * facts.HADAMARD_FACTOR
    return scaled


def by_definition(case: OperandCase) -> Made:
    """Return what a launch has to write."""
    p, x = case.problem, case.rows
    if case.norm is not None:
        x = layer_normed(x.float(), case.norm, p.epsilon).bfloat16()
    if case.turning is not None:
        x = turned(x.float(), case.turning, p.pairing).bfloat16()
    if p.hadamard:
        x = transformed(x.float()).bfloat16()
    if p.format == "exact":
        return Made(x, None)
    blocks = x.float().unflatten(-1, (-1, facts.BLOCKS[p.format]))
    broken = ~blocks.isfinite().all(-1, keepdim=True).expand_as(blocks).flatten(-2)
    whole = torch.where(broken, 0.0, x.float())
    if not p.coded:
        through = numerics.through_fp8 if p.format == "fp8" else numerics.through_mxfp4
        values = through(whole, facts.BLOCKS[p.format]).bfloat16()
        return Made(torch.where(broken, torch.nan, values), None)
    amax = whole.abs().amax(-1).clamp(min=numerics.FP8_FLOOR)
    scale = numerics.power_of_two_above(amax * (1.0 / numerics.E4M3_LARGEST))
    codes = numerics.round_e4m3(whole / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    codes = torch.where(broken, 0x7F, codes.view(torch.uint8))
    return Made(codes, torch.where(broken[..., 0], torch.nan, scale))


def on_device(case: OperandCase) -> Made:
    """Run a case on the GPU, into poisoned memory; the result stays there."""
    from degarble.kernels.indexer import simt_indexer_operand as kernels  # noqa: PLC0415  needs the DSL

    given = case.operands()
    out = kernels.KERNEL.allocate(case.problem, given["rows"].device)
    for tensor in out.values():
        if tensor is not None:
            tensor.view(torch.uint8).fill_(POISON)
    return Made(**kernels.KERNEL.run(case.problem, SETTINGS, **given, **out))


def difference(case: OperandCase, values: Tensor, scales: Tensor | None) -> str:
    """Say how a result differs from the definition; any NaN equals any other."""
    want = by_definition(case)
    got = values.cpu()
    if case.problem.coded:
        codes = got.view(torch.uint8)
        codes = torch.where(codes == 0xFF, 0x7F, codes)  # NaN has two codes
        found = [bits_differ(f"{case.name}, codes", codes, want.values)]
        assert scales is not None
        assert want.scales is not None
        found.append(bits_differ(f"{case.name}, scales", scales.cpu(), want.scales))
        return "; ".join(filter(None, found))
    return bits_differ(case.name, got, want.values)


def mismatch(case: OperandCase) -> str:
    """Say how a case differs from its definition on the GPU."""
    made = on_device(case)
    return difference(case, made.values, made.scales)


# Pairing, format, Hadamard, codes, norm: V4's queries and keys, V3.2's, and those of others.
KINDS = (
    ("interleaved", "mxfp4", True, False, False),
    ("interleaved", "exact", False, False, False),
    ("interleaved", "fp8", False, True, False),
    ("none", "mxfp4", True, False, False),
    ("none", "fp8", False, True, False),
    ("halves", "fp8", True, False, False),
    ("halves", "fp8", True, True, False),
    ("halves", "fp8", True, False, True),
    ("halves", "exact", False, False, True),
    ("halves", "fp8", True, True, True),
)


def problem_of(tokens: int, heads: int, kind: int) -> OperandProblem:
    """Return a problem of a kind."""
    pairing, form, hadamard, coded, normed = KINDS[kind]
    positions = POSITIONS * (pairing != "none")
    return OperandProblem(tokens, heads, pairing, form, hadamard, coded, normed, positions)


def cases() -> list[OperandCase]:
    """Return every kind in every spread."""
    return [
        OperandCase(problem_of(tokens, heads, kind), which, seed=kind)
        for kind in range(len(KINDS))
        for which in SPREADS
        for tokens, heads in ((1, 1), (37, 64), (9, 4))
    ]


def fuzzed(seed: int, count: int) -> list[OperandCase]:
    """Draw cases."""
    drawn = random.Random(f"operands {seed}")
    made = []
    for _ in range(count):
        problem = problem_of(drawn.randint(1, 60), drawn.randint(1, 40), drawn.randrange(10))
        made.append(OperandCase(problem, drawn.choice(SPREADS), drawn.randrange(1 << 30)))
    return made
