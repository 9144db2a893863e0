"""Compare mHC's projection on a GPU with float64, and with itself among other tokens.

Budget: a product may be 2e-6 of the sum of magnitudes off (the matrix unit drops bits below 2**-24
of its largest term in each of at most fifty instructions of a piece, pieces are added in float32),
and so may a sum of squares. Where streams and weight are small integers every sum is exact, so
every bit has to be right; so too where a token has one value, which picks a column of the weight
with all its 24 bits. Outputs and partial sums are poisoned before.
Shape letters as in mhc_problem.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.kernels.rows import mhc_problem as facts
from degarble.kernels.rows.mhc_problem import STREAMS, ProjectProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels import latent_checks as plain

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
BUDGET = 2e-6
SPREADS = ("ordinary", "wide", "tiny", "integers", "one")
EXACT = SPREADS[3:]
FEW, LEAST = facts.FEW_TOKENS, facts.LEAST_TOKENS


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    tokens: int
    width: int
    kind: str = "layer"
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        return f"{self.kind} {self.tokens}x{self.width} {self.spread} seed={self.seed}"

    @property
    def problem(self) -> ProjectProblem:
        """What the kernel is asked for."""
        return ProjectProblem(self.tokens, self.width, self.kind)

    @cached_property
    def streams(self) -> Tensor:
        """Draw BF16 streams [T, S, D]."""
        shape = (self.tokens, STREAMS, self.width)
        if self.spread == "integers":
            generator = torch.Generator().manual_seed(self.seed)
            return torch.randint(-3, 4, shape, generator=generator).bfloat16()
        if self.spread == "one":
            generator = torch.Generator().manual_seed(self.seed)
            at = torch.randint(shape[1] * shape[2], (shape[0],), generator=generator)
            one = torch.zeros(shape[0], shape[1] * shape[2], dtype=torch.bfloat16)
            one[torch.arange(shape[0]), at] = 1.0
            return one.view(shape)
        flat = (shape[0], shape[1] * shape[2])  # its parts of 16 reach over streams
        drawn: Tensor = plain.drawn(self.spread, flat, self.seed)
        return drawn.view(shape)

    @cached_property
    def fn(self) -> Tensor:
        """Draw the float32 weight [N, K]."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (facts.WEIGHTS[self.kind], STREAMS * self.width)
        if self.spread == "integers":
            return torch.randint(-8, 9, shape, generator=generator).float()
        return torch.randn(shape, generator=generator) / math.sqrt(shape[1])


def definition(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return products [T, N] and squares [T] in float64, and the products' magnitudes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, fn = (tensor.to(device).double() for tensor in (case.streams.flatten(1), case.fn))
    tensors = (x @ fn.T, x.square().sum(1), x.abs() @ fn.abs().T)
    return tensors[0].cpu(), tensors[1].cpu(), tensors[2].cpu()


def on_device(case: Case) -> tuple[Tensor, Tensor]:
    """Run a case on the GPU; products and squares come back."""
    problem, kernel = case.problem, kernel_named("simt_mhc_project")
    out = kernel.allocate(problem, torch.device("cuda"))
    for tensor in out.values():
        tensor.fill_(torch.nan)
    split = facts.split_weight(case.fn).cuda()
    made = kernel.run(problem, SETTINGS, streams=case.streams.cuda(), split=split, **out)
    return made["products"].cpu(), made["squares"].cpu()


def mismatch(case: Case) -> str:
    """Say what is beyond its budget; empty where nothing is."""
    products, squares = on_device(case)
    want, of_squares, sizes = definition(case)
    allowed = 0.0 if case.spread in EXACT else BUDGET
    for name, got, right, size in (
        ("products", products, want, sizes),
        ("squares", squares, of_squares, of_squares),
    ):
        apart = (got.double() - right).abs()
        bad = ~(apart <= allowed * size + (2.0**-120 if allowed else 0.0))
        if bad.any():
            first = bad.nonzero()[0].tolist()
            worst = float((apart / size.clamp(min=1e-300)).nan_to_num(nan=9e9).max())
            return f"{case.name}: {int(bad.sum())} of {name}, first {first}, worst {worst:.2e}"
    return ""


def cases() -> list[Case]:
    """Return the named cases: widths of models, tokens around every constant, both kinds."""
    made = [Case(5, width, kind) for width in (8, 64, 256, 4096, 7168) for kind in facts.WEIGHTS]
    lengths = (1, 7, 15, 16, 17, LEAST, LEAST + 1, 127, 128, 129, FEW - 1, FEW, FEW + 1, 640, 1027)
    made += [Case(n, 136, spread="integers", seed=n) for n in lengths]
    made += [Case(n, 1032, kind, seed=n) for n in (33, FEW + 33) for kind in facts.WEIGHTS]
    made += [Case(n, 7168, spread="integers") for n in (3, LEAST + 3, FEW + 3)]
    made += [Case(n, 136, spread="integers", seed=n) for n in (4_001, 8_200)]  # groups, spans
    made += [Case(n, 520, spread=spread) for n in (9, FEW + 9) for spread in SPREADS]
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    return [
        Case(
            drawn.choice((drawn.randint(1, 9), drawn.randint(1, 200), FEW + drawn.randint(-9, 99))),
            8 * drawn.choice((drawn.randint(1, 40), drawn.randint(1, 150))),
            drawn.choice(tuple(facts.WEIGHTS)),
            drawn.choice(SPREADS),
            drawn.randrange(1 << 30),
        )
        for _ in range(count)
    ]
