"""Compare products of few rows of heads with the launches in whose place they stand, bit for bit.

Those are the merge of splits, the grouped product, and either the assembly of query rows or the
quantiser that decodes; each has a suite of its own. The rows that nobody writes are full of NaN.
Shape letters as in heads_problem.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.attention.heads_problem import MOST_TOKENS, HeadsProblem
from degarble.kernels.attention.problem import MergeProblem, QueryProblem
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.format_checks import difference

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "sm90_latent_heads"
SETTINGS = CompileSettings()
POSITIONS = 300
KEYS, VALUES = (512, 128, 192), (128, 512, 512)  # N, K and a head's width of V3.2
KINDS = ("keys", "values", "decoded", "merged", "merged and decoded")


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    kind: str
    tokens: int
    heads: int
    extents: tuple[int, int, int]
    splits: int = 0
    spread: str = "wide"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        shape = "x".join(map(str, (self.tokens, self.heads, *self.extents)))
        return f"{self.kind} {shape} splits={self.splits} {self.spread} seed={self.seed}"

    @property
    def problem(self) -> HeadsProblem:
        """Return the problem that the kernel gets."""
        positions = POSITIONS if self.kind == "keys" else 0
        decoded = "decoded" in self.kind
        return HeadsProblem(self.tokens, self.heads, *self.extents, positions, decoded, self.splits)

    def operands(self, device: str = "cuda") -> dict[str, Tensor]:
        """Draw the operands by name."""
        p, generator = self.problem, torch.Generator().manual_seed(self.seed)
        given = {"weight": plain.drawn("ordinary", (p.heads * p.columns, p.inner), self.seed) / 16}
        if p.splits:
            shape = (p.tokens, p.splits, p.heads)
            given["sums"] = plain.drawn(self.spread, (*shape, p.width), self.seed + 1).float()
            peaks = torch.randn(shape, generator=generator) * 3
            totals = torch.rand(shape, generator=generator) + 0.5
            given["stats"] = torch.stack((peaks, totals), -1)
            # No keys: sums that nobody wrote.
            given["stats"][:, -1, ::2] = torch.tensor([-torch.inf, 0.0])
            given["sums"][:, -1, ::2] = torch.nan
        else:
            given["x"] = plain.drawn(self.spread, (p.tokens, p.heads, p.width), self.seed + 1)
        if p.positions:
            given["turns"] = plain.table_of_turns(p.positions)
            given["positions"] = torch.randint(p.positions, (p.tokens,), generator=generator)
            given["positions"][2:4] = torch.tensor([p.positions, -1])[: max(0, p.tokens - 2)]
        if p.decoded:
            given["decode_scale"] = torch.rand(1, generator=generator) * 1e-2 + 1e-3
        return {name: tensor.contiguous().to(device) for name, tensor in given.items()}


def run(name: str, problem: Any, **given: Tensor) -> Tensor:
    """Run a kernel of one result."""
    made: Tensor = kernel_named(name).run_one(problem, SETTINGS, **given)
    return made


def apart(case: Case, given: dict[str, Tensor]) -> Tensor:
    """Return what the launches give that stood there before."""
    p = case.problem
    if p.splits:
        splits = {name: given[name] for name in ("sums", "stats")}
        merging = MergeProblem(p.tokens, p.heads, p.splits, False)
        x = kernel_named("simt_attention_merge").run(merging, SETTINGS, **splits)["out"]
    else:
        x = given["x"]
    values = x[..., : p.inner].flatten(1).contiguous()
    grouped = GroupedProblem(p.tokens, p.heads, p.columns, p.inner)
    sums = run("sm90_gemm_grouped", grouped, a=values, b=given["weight"])
    if p.positions:
        query = QueryProblem(p.tokens, p.heads, p.width, p.positions)
        turning = {name: given[name] for name in ("turns", "positions")}
        latent = sums.view(p.tokens, p.heads, p.columns)
        return run("simt_latent_query", query, latent=latent, heads=x, **turning)
    if p.decoded:
        coded = QuantiseProblem(p.tokens, p.heads * p.columns, "linear", decoded=True)
        scale = given["decode_scale"]
        sums = run("simt_quantise_nvfp4", coded, values=sums, decode_scale=scale)
    return sums.view(p.tokens, p.heads, p.columns)


def launched(case: Case) -> Tensor:
    """Run a case on the GPU, into poisoned memory."""
    kernel, given = kernel_named(KERNEL), case.operands()
    out = kernel.allocate(case.problem, given["weight"].device)["out"].fill_(torch.nan)
    made: Tensor = kernel.run_one(case.problem, SETTINGS, **given, out=out)
    return made


def mismatch(case: Case) -> str:
    """Say how a case differs on the GPU from the launches apart; empty where it does not."""
    got, want = launched(case), apart(case, case.operands())
    return difference(case.name, plain.bits(got), plain.bits(want))


def _case(kind: str, tokens: int, heads: int, **more: Any) -> Case:
    extents = KEYS if kind == "keys" else VALUES
    splits = 16 if "merged" in kind else 0
    return Case(kind, tokens, heads, extents, **{"splits": splits, **more})


def cases() -> list[Case]:
    """Return the named cases: one token and several of V3.2, every kind and spread."""
    found = [_case(kind, tokens, 128) for kind in KINDS for tokens in (1, 3, MOST_TOKENS)]
    found += [_case(kind, 2, 5, spread=each) for kind in KINDS for each in plain.SPREADS]
    found += [_case("merged", 4, 3, splits=each) for each in (4, 7, 24, 32)]
    return found + fuzzed(11, 40)


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases; a head's matrix has whole tiles of 64 rows and of 64 values."""
    some, made = random.Random(seed), []
    for number in range(count):
        kind = some.choice(KINDS)
        inner = 64 * some.randint(1, 8)
        extents = 64 * some.randint(1, 9), inner, inner + 64 * some.randint(1, 2)
        if kind == "keys":
            extents = KEYS[0], *extents[1:]
        if "merged" in kind:
            extents = extents[0], VALUES[1], VALUES[2]
        splits = some.randint(2, 32) if "merged" in kind else 0
        shape = some.randint(1, MOST_TOKENS), some.randint(1, 20)
        made.append(Case(kind, *shape, extents, splits, some.choice(plain.SPREADS), number))
    return made
