"""Compare grouped products on a GPU with inverse_rope and one GEMM a group, bit for bit.

Cases have the groups, columns and heads of models, tokens around every tile, and positions inside
and outside of the table. D, and the rows after it, are full of NaN before. Both pieces of the
composition have suites of their own, which hold them to the references; a bit of the GEMM depends
on neither tile nor stage, so the fused kernel has no freedom. Float32 results, rounded, are the
BF16 ones, and lie within 2e-6 of the summed magnitudes of float64.

Shape letters as in grouped_problem.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.rows.problem import InverseRopeProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device
from degarble.suites.kernels import latent_checks as plain

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
ARCHITECTURES = {SM90A.name: "sm90", SM100A.name: "sm100"}
POSITIONS = 300
BEHIND = 3  # rows of D that nobody may touch
PRO, FLASH, TINY = (16, 1024, 4096, 512), (8, 1024, 4096, 512), (4, 128, 256, 128)


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    tokens: int
    shape: tuple[int, int, int, int]  # groups, columns, values of a group, values of a head or 0
    out: str = "bf16"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        groups, columns, inner, turned = self.shape
        return f"{self.tokens} {groups}x{columns}x{inner} heads of {turned} {self.out} {self.seed}"

    @property
    def problem(self) -> GroupedProblem:
        """What the kernel is asked for."""
        groups, columns, inner, turned = self.shape
        known = POSITIONS if turned else 0
        return GroupedProblem(self.tokens, groups, columns, inner, turned, known, self.out)

    def operands(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Draw A, B, and what turns A's heads, on the GPU."""
        p = self.problem
        generator = torch.Generator("cuda").manual_seed(self.seed)
        kind: dict[str, Any] = {"generator": generator, "device": "cuda"}
        a = torch.randn(p.tokens, p.groups * p.inner, **kind).bfloat16()
        b = torch.randn(p.groups * p.columns, p.inner, **kind).bfloat16() / 64
        if not p.turned:
            return a, b, None
        positions = torch.randint(POSITIONS, (p.tokens,), **kind)
        if p.tokens > 2:
            positions[1], positions[2] = POSITIONS, -1
        return a, b, (plain.table_of_turns(POSITIONS).cuda(), positions)


def kernels_here(operands: str) -> Any:
    """Return the module of the GPU that is installed."""
    architecture = ARCHITECTURES[target_of_device().name]
    return import_module(module_of(f"{architecture}_gemm_{operands}"))


def multiply(
    kernels: Any,
    sides: tuple[Tensor, Tensor],
    problem: GroupedProblem,
    turns: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply by a module's kernel; `turns` are RoPE table and positions."""
    given = dict(zip("ab", sides, strict=True))
    given |= dict(zip(("turns", "positions"), turns or (), strict=False))
    given |= {} if out is None else {"out": out}
    made: Tensor = kernels.KERNEL.run_one(problem, SETTINGS, **given)
    return made


def launched(case: Case, parts: Any) -> tuple[Tensor, Tensor]:
    """Run a case into poisoned memory; D and the rows behind it stay on the GPU."""
    kernels = kernels_here("grouped")
    a, b, turns = parts
    kind = torch.float32 if case.out == "fp32" else torch.bfloat16
    whole = torch.full((case.tokens + BEHIND, b.shape[0]), torch.nan, dtype=kind, device="cuda")
    out = whole[: case.tokens]
    multiply(kernels, (a, b), case.problem, turns, out)
    return out, whole[case.tokens :]


def composed(case: Case, parts: Any) -> Tensor:
    """Return inverse_rope, then one GEMM a group, in BF16."""
    from degarble.kernels.rows import simt_inverse_rope  # noqa: PLC0415  needs the DSL

    plain_gemm = kernels_here("bf16").KERNEL.run_one
    p, (a, b, turns) = case.problem, parts
    if turns is not None:
        heads = p.groups * p.inner // p.turned
        back = InverseRopeProblem(p.tokens, heads, POSITIONS, width=p.turned)
        table, positions = turns
        given = a.view(p.tokens, heads, p.turned)
        a = simt_inverse_rope.KERNEL.run_one(
            back, SETTINGS, heads=given, turns=table, positions=positions
        )
    made = []
    for group in range(p.groups):
        own = a.reshape(p.tokens, p.groups, p.inner)[:, group].contiguous()
        weight = b[group * p.columns : (group + 1) * p.columns].contiguous()
        problem = GemmProblem(p.tokens, p.columns, p.inner)
        made.append(plain_gemm(problem, SETTINGS, a=own, b=weight))
    return torch.cat(made, 1)


def in_float64(case: Case, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return products that nothing is turned for, and sums of magnitudes, of all groups."""
    p = case.problem
    a, b = a.double().view(p.tokens, p.groups, p.inner), b.double().view(p.groups, p.columns, -1)
    tensors = [
        torch.einsum("tgk,gnk->tgn", *each).flatten(1) for each in ((a, b), (a.abs(), b.abs()))
    ]
    return tensors[0], tensors[1]


def mismatch(case: Case) -> str:
    """Say how a case differs from the composition; empty where it does not."""
    parts = case.operands()
    got, behind = launched(case, parts)
    if not bool(behind.isnan().all()):
        return f"{case.name}: rows behind D were written"
    want = composed(case, parts)
    if case.out == "fp32":
        exact, size = in_float64(case, parts[0], parts[1])
        if not bool(((got.double() - exact).abs() <= 2e-6 * size).all()):
            return f"{case.name}: float32 results are beyond their budget"
        got = got.bfloat16()
    return difference(case.name, got, want)


def difference(name: str, got: Tensor, want: Tensor) -> str:
    """Say how BF16 bits differ, a NaN being a NaN; empty where they do not."""
    lost, expected = got.isnan(), want.isnan()
    if not torch.equal(lost, expected):
        return f"{name}: {int(lost.sum())} NaN, not {int(expected.sum())}"
    wrong = (got.view(torch.int16) != want.view(torch.int16)) & ~expected
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        return f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first {first}"
    return ""


def cases() -> list[Case]:
    """Return the named cases: models' shapes, tokens around tiles, without turns, float32."""
    made = [Case(tokens, TINY, seed=tokens) for tokens in (1, 3, 63, 64, 65, 129, 513, 700)]
    made += [Case(tokens, FLASH, seed=tokens) for tokens in (1, 64, 65, 127, 512, 513, 1000)]
    made += [Case(tokens, PRO) for tokens in (2, 300, 777)]
    made += [Case(tokens, (4, 64, 128, 0)) for tokens in (5, 200, 600)]
    for columns, inner in ((2048, 7168), (1024, 7168), (520, 4096), (2560, 256)):
        made += [Case(tokens, (1, columns, inner, 0), "fp32") for tokens in (1, 65, 300, 1030)]
    made += [Case(77, (3, 128, 512, 0), "fp32"), Case(600, (2, 256, 1024, 512), "bf16")]
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        turned = drawn.choice((0, 128, 512))
        inner = (turned or 64) * drawn.randint(1, 4)
        groups = drawn.choice((1, 2, 3, 8))
        columns = 64 * drawn.randint(1, 9)
        if groups == 1:
            columns = 8 * drawn.randint(1, 80)
        tokens = drawn.choice((drawn.randint(1, 70), drawn.randint(60, 600)))
        out = "bf16" if turned else drawn.choice(("bf16", "fp32"))
        shape = (groups, columns, inner, turned)
        made.append(Case(tokens, shape, out, drawn.randrange(1 << 30)))
    return made
