"""Compare grouped FP8 products on a GPU with the kernels that compute each step, bit for bit.

Cases have the groups, columns and heads of models, tokens around every tile, both formats of
scales, heads or the codes made of them, and positions inside and outside of the table. D, and the
rows after it, are full of NaN before.
The composition is inverse_rope, quantise_fp8 and the plain FP8 product of each piece of B under one
row of scales; all of them have suites of their own. A bit of the product depends on neither tile
nor stage, and codes are the same numbers, so the grouped kernel has no freedom.

Shape letters as in grouped_problem.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.kernels.gemm import grouped_problem as facts
from degarble.kernels.gemm.grouped_problem import GroupedFp8Problem
from degarble.kernels.gemm.problem import FP8_BLOCK, GemmProblem
from degarble.kernels.primitives.quantise_problem import Fp8Problem
from degarble.kernels.rows.problem import InverseRopeProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels import gemm_checks
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.gemm.grouped_checks import difference

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
POSITIONS = 300
BEHIND = 3  # rows of D that nobody may touch
PRO, FLASH, TINY = (16, 1024, 4096, 512), (8, 1024, 4096, 512), (4, 128, 256, 128)


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    tokens: int
    shape: tuple[int, int, int, int]  # groups, columns, values of a group, values of a head
    scales: str = "float32"
    turned: bool = True  # whether the kernel is given heads, else codes
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        groups, columns, inner, head = self.shape
        text = f"heads of {head}" if self.turned else "codes"
        return f"{self.tokens} {groups}x{columns}x{inner} {text} {self.scales} {self.seed}"

    @property
    def problem(self) -> GroupedFp8Problem:
        """What the kernel is asked for."""
        groups, columns, inner, head = self.shape
        more = (head, POSITIONS) if self.turned else (0, 0)
        return GroupedFp8Problem(self.tokens, groups, columns, inner, self.scales, *more)


class GroupedFp8Operands(NamedTuple):
    """Operands: A as codes and scales, or as heads with RoPE table and positions; others None."""

    a: Tensor  # E4M3 [T, G K], or BF16 heads [T, G K]
    b: Tensor  # E4M3 [G N, K]
    b_scales: Tensor  # [ceil(G N / 128), K / 128]
    a_scales: Tensor | None = None  # [T, G K / 128]
    turns: Tensor | None = None  # float32 [P, 64]
    positions: Tensor | None = None  # int64 [T]


def multiply(
    given: GroupedFp8Operands, problem: GroupedFp8Problem, out: Tensor | None = None
) -> Tensor:
    """Multiply by the kernel."""
    kernels = import_module("degarble.kernels.gemm.sm90_gemm_grouped_fp8")
    more = {} if out is None else {"out": out}
    made: Tensor = kernels.KERNEL.run_one(problem, SETTINGS, **given._asdict(), **more)
    return made


def operands(case: Case) -> Any:
    """Draw heads, B and what turns them, on the GPU: magnitudes differ from block to block."""
    p = case.problem
    generator = torch.Generator("cuda").manual_seed(case.seed)
    kind: dict[str, Any] = {"generator": generator, "device": "cuda"}
    heads = torch.randn(p.tokens, p.groups * p.inner, **kind)
    size = torch.rand(p.tokens, p.groups * p.inner // facts.FP8_STEP, **kind)
    heads *= torch.exp2(12 * size - 8).repeat_interleave(facts.FP8_STEP, 1)
    heads[:, ::97] = 0
    b = torch.randn(p.groups * p.columns, p.inner, **kind).to(torch.float8_e4m3fn)
    of_b = torch.rand(p.rows_of_scales, p.blocks, **kind) / 64 + 2.0**-8
    if p.scales == "ue8m0":
        of_b = (127 + torch.log2(of_b).floor()).to(torch.uint8)
    positions = torch.randint(POSITIONS, (p.tokens,), **kind)
    if p.tokens > 2:
        positions[1], positions[2] = POSITIONS, -1
    table = plain.table_of_turns(POSITIONS).cuda()
    return GroupedFp8Operands(heads.bfloat16(), b, of_b, turns=table, positions=positions)


def coded(case: Case, given: Any) -> tuple[Tensor, Tensor]:
    """Return codes and scales of heads that are turned back first."""
    rope = import_module("degarble.kernels.rows.simt_inverse_rope")
    kernel = kernel_named("simt_quantise_fp8")
    p, width = case.problem, case.shape[3]
    heads = p.groups * p.inner // width
    back = InverseRopeProblem(p.tokens, heads, POSITIONS, width=width)
    given_heads = given.a.view(p.tokens, heads, width)
    fields = {"heads": given_heads, "turns": given.turns, "positions": given.positions}
    turned = rope.KERNEL.run_one(back, SETTINGS, **fields)
    problem = Fp8Problem(p.tokens, p.groups * p.inner, p.scales)
    made = kernel.run(problem, SETTINGS, values=turned.flatten(1))
    return made["codes"], made["scales"]


def coded_at_once(case: Case, given: Any) -> tuple[Tensor, Tensor]:
    """Return codes and scales of heads that are turned back on their way."""
    kernel = kernel_named("simt_quantise_fp8")
    p, head = case.problem, case.shape[3]
    wide = p.groups * p.inner
    problem = Fp8Problem(p.tokens, wide, p.scales, turned=head, positions=POSITIONS)
    turning = {"turns": given.turns, "positions": given.positions}
    made = kernel.run(problem, SETTINGS, values=given.a, **turning)
    return made["codes"], made["scales"]


def launched(case: Case, given: Any) -> tuple[Tensor, Tensor]:
    """Run a case into poisoned memory; D and the rows behind it stay on the GPU."""
    if not case.turned:
        codes, scales = coded_at_once(case, given)
        given = given._replace(a=codes, a_scales=scales, turns=None, positions=None)
    shape = (case.tokens + BEHIND, given.b.shape[0])
    whole = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    multiply(given, case.problem, whole[: case.tokens])
    return whole[: case.tokens], whole[case.tokens :]


def composed(case: Case, given: Any) -> Tensor:
    """Return what the pieces make, one after the other; B in pieces under one row of scales."""
    kernels = import_module("degarble.kernels.gemm.sm90_gemm_fp8_block")
    p = case.problem
    codes, scales = coded(case, given)
    piece = p.columns if p.groups == 1 else min(facts.FP8_STEP, p.columns)
    piece = piece if p.groups == 1 or p.columns % piece == 0 else facts.LEAST_COLUMNS
    problem = GemmProblem(p.tokens, piece, p.inner, FP8_BLOCK.name, p.scales)
    made = []
    for first in range(0, p.groups * p.columns, piece):
        group = first // p.columns
        own = slice(group * p.inner, (group + 1) * p.inner)
        blocks = slice(group * p.blocks, (group + 1) * p.blocks)
        of_b = slice(first // facts.FP8_STEP, -(-(first + piece) // facts.FP8_STEP))
        parts = (
            codes[:, own], scales[:, blocks], given.b[first : first + piece], given.b_scales[of_b]
        )  # fmt: skip
        kept = tuple(part.contiguous().clone() for part in parts)
        made.append(gemm_checks.multiply(kernels, kept, problem))
    return torch.cat(made, 1)


def mismatch(case: Case) -> str:
    """Say how a case differs from the composition; empty where it does not."""
    given = operands(case)
    got, behind = launched(case, given)
    if not bool(behind.isnan().all()):
        return f"{case.name}: rows behind D were written"
    return difference(case.name, got, composed(case, given))


def cases() -> list[Case]:
    """Return the named cases: models' shapes, tokens around tiles, heads and codes, both scales."""
    made = [Case(tokens, TINY, seed=tokens) for tokens in (1, 3, 63, 64, 65, 129, 300)]
    made += [Case(tokens, FLASH, seed=tokens) for tokens in (1, 17, 64, 65, 127, 513)]
    made += [Case(tokens, PRO) for tokens in (2, 64, 300)]
    made += [Case(tokens, (3, 64, 256, 128)) for tokens in (5, 200)]
    made += [Case(77, (2, 192, 1024, 512)), Case(140, (1, 520, 512, 512))]
    made += [replace(case, scales="ue8m0") for case in made]
    return made + [replace(case, turned=False) for case in made[::2]]


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn, made = random.Random(seed), []
    for _ in range(count):
        head = drawn.choice((128, 512))
        groups, inner = drawn.choice((1, 2, 3, 8)), head * drawn.randint(1, 4)
        columns = 64 * drawn.randint(1, 6) if groups > 1 else 8 * drawn.randint(1, 60)
        tokens = drawn.choice((drawn.randint(1, 70), drawn.randint(60, 400)))
        shape, scales = (groups, columns, inner, head), drawn.choice(FP8_BLOCK.scales)
        made.append(Case(tokens, shape, scales, drawn.random() < 0.7, drawn.randrange(1 << 30)))
    return made
