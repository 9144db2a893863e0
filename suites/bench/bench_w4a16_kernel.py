"""BF16 times NVFP4 on a GPU against copies and against cuBLAS in BF16: a script that prints.

    python -m degarble.suites.bench.bench_w4a16_kernel [--rounds N] [--layout NAME]

Rows: M = 1 to 16 at two shapes. Arms are timed as in bench_quantise_kernel: graphs that launch on
one buffer set after the other, all of them colder than the L2 cache, in turns. The share counts
packed weights (0.5625 bytes each) against two copies: one that moves as many bytes and is launched
as often, and a large one, for which a launch costs nothing in comparison. Targets use the stricter
one. Results are compared with float64 by suites/kernels, not here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.kernels.gemm.w4a16_problem import (
    LAYOUTS,
    W4A16Problem,
    choose_form,
    choose_tactic,
)
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.bench.bench_quantise_kernel import (
    Arm,
    Figure,
    captured,
    copy_arm,
    sets_for,
    timed,
)
from degarble.suites.bench.timing import quartiles

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPES = ((7168, 4096), (8192, 8192))  # N x K
ROWS = (1, 2, 4, 8, 16)
LARGE_COPY = 150_000_000
WANTED_SHARE = 0.6
WANTED_FASTER = 2.0


@dataclass(frozen=True)
class Row:
    """One shape and M: the kernel's figure beside a copy of its bytes, a large one and cuBLAS."""

    kernel: Figure
    copy: Figure
    large: Figure
    cublas: Figure

    @property
    def shares(self) -> tuple[float, float]:
        """Bandwidth as a share of the two copies', medians over rounds."""
        return self.kernel.share_of(self.copy), self.kernel.share_of(self.large)

    @property
    def faster(self) -> float:
        """How many times cuBLAS takes, the median over rounds."""
        pairs = zip(self.cublas.microseconds, self.kernel.microseconds, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    @property
    def meets(self) -> bool:
        """Whether both targets are met, by the stricter copy."""
        return min(self.shares) >= WANTED_SHARE and self.faster >= WANTED_FASTER

    def line(self) -> str:
        """One line of the table."""
        first, third = quartiles(self.kernel.microseconds)
        small, large = self.shares
        return (
            f"| {self.kernel.arm.name} | {self.kernel.median:.2f} [{first:.2f}, {third:.2f}] | "
            f"{self.kernel.terabytes_a_second:.2f} | {small:.2f} | {large:.2f} | "
            f"{self.cublas.median:.2f} | {self.faster:.2f} |"
        )


def operands(problem: W4A16Problem, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw activations, codes, scales, a decode scale and an output, on the GPU."""
    drawn = torch.Generator("cuda").manual_seed(seed)
    shape = (problem.rows, problem.columns)
    x_MK = torch.randn(shape, device="cuda", generator=drawn).bfloat16()
    shape = (problem.outputs, problem.columns // 2)
    any_byte: dict[str, Any] = {"dtype": torch.uint8, "device": "cuda", "generator": drawn}
    codes_NP = torch.randint(0, 256, shape, **any_byte)
    scales = torch.randint(0x30, 0x48, (problem.scale_bytes,), **any_byte)
    out_MN = torch.empty(problem.rows, problem.outputs, dtype=torch.bfloat16, device="cuda")
    return x_MK, codes_NP, scales, torch.full((1,), 0.01, device="cuda"), out_MN


def kernel_arm(problem: W4A16Problem) -> Arm:
    """Multiply with one buffer set after the other."""
    from degarble.kernels.gemm import sm90_gemm_w4a16 as kernels  # noqa: PLC0415  needs the DSL

    form = choose_form(problem, choose_tactic(problem), target_of_device().name)
    kernel = kernels.compile_form(form, CompileSettings())
    sets = [operands(problem, seed) for seed in range(sets_for(problem.weight_bytes))]
    launches = [lambda s=s: kernels.launch(kernel, problem, form, s) for s in sets]
    name = f"{problem.outputs}x{problem.columns}, M = {problem.rows}"
    return captured(name, problem.weight_bytes, launches)


def cublas_arm(problem: W4A16Problem) -> Arm:
    """Multiply with BF16 weights by torch.mm."""
    extents = (problem.outputs, problem.columns)
    size = 2 * problem.outputs * problem.columns
    x_MK, *_, out_MN = operands(problem, 0)
    weights = [torch.randn(extents, device="cuda").bfloat16() for _ in range(sets_for(size))]
    launches = [lambda w=w: torch.mm(x_MK, w.T, out=out_MN) for w in weights]
    return captured("cuBLAS BF16", size, launches)


def row_of(problem: W4A16Problem, rounds: int) -> Row:
    """Time the four arms of a row by turns."""
    copies = copy_arm(problem.weight_bytes), copy_arm(LARGE_COPY)
    arms = (kernel_arm(problem), *copies, cublas_arm(problem))
    return Row(*timed(arms, rounds))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="linear")
    settings = parser.parse_args(arguments)
    try:
        target = target_of_device()
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    where = f"{torch.cuda.get_device_name()} ({target.name}), torch {torch.__version__}"
    _say(f"{where}, {settings.layout} scales")
    _say("\n| N x K | us a launch | TB/s | share of a copy | of a large one | cuBLAS us | faster |")
    _say("|---|---|---|---|---|---|---|")
    rows = []
    for outputs, columns in SHAPES:
        for m in ROWS:
            problem = W4A16Problem(m, outputs, columns, settings.layout)
            rows.append(row_of(problem, settings.rounds))
            _say(rows[-1].line())
    met = sum(row.meets for row in rows)
    wanted = f"share {WANTED_SHARE} of both copies and {WANTED_FASTER} times cuBLAS"
    _say(f"\n{met} of {len(rows)} rows have what is wanted: {wanted}")
    return int(met < len(rows))


def _say(text: Any) -> None:
    print(text, flush=True)  # noqa: T201  a script


if __name__ == "__main__":
    sys.exit(main())
