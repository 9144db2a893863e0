"""The quantising kernel against a copy of as many bytes, on a GPU: a script that prints a table.

    python -m degarble.suites.bench.bench_quantise_kernel [--rows M] [--columns K] [--rounds N]

Each arm is a CUDA graph that launches once on each of several buffer sets in turn, so that the L2
cache holds nothing that is read next. Arms take turns within a round, and the copy runs in every
round. The share of copy bandwidth is the time of a copy that reads and writes as many bytes, over
the kernel's. The bytes are compared with the definition by suites/kernels, not here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.kernels.primitives.quantise_problem import (
    LAYOUTS,
    SWIGLU,
    QuantiseProblem,
    QuantiseTactic,
    choose_form,
    choose_tactic,
    grid,
)
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.bench.gpu import refused_here, say
from degarble.suites.bench.timing import quartiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SETS = 4
REPEATS = 3  # a graph's launches: SETS times this
COLD_BYTES = 256 << 20  # of all sets together at least: four times the L2 of an H200
PAGE = 4096
WANTED_SHARE = 0.85
WANTED_FUSED = 1.1
WALKERS = (0, 6, 8, 16)


@dataclass(frozen=True)
class Arm:
    """A graph to time: launches, and the bytes that each has to move."""

    name: str
    bytes_moved: int
    launches: int
    replay: Callable[[], object]
    buffers: Sequence[object]  # a graph keeps addresses, so somebody has to keep the memory


@dataclass(frozen=True)
class Figure:
    """What an arm took for a launch, in microseconds, one entry a round."""

    arm: Arm
    microseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.microseconds)

    @property
    def terabytes_a_second(self) -> float:
        """Bytes read and written over the median."""
        return self.arm.bytes_moved / self.median * 1e-6

    def share_of(self, copy: Figure) -> float:
        """Bandwidth as a share of the copy's, the median over rounds."""
        pairs = zip(self.microseconds, copy.microseconds, strict=True)
        of_bytes = self.arm.bytes_moved / copy.arm.bytes_moved
        return statistics.median(theirs / ours * of_bytes for ours, theirs in pairs)

    def row(self, copy: Figure) -> str:
        """One line of the table."""
        first, third = quartiles(self.microseconds)
        return (
            f"| {self.arm.name} | {self.arm.bytes_moved / 1e6:.2f} | {self.median:.2f} "
            f"[{first:.2f}, {third:.2f}] | {self.terabytes_a_second:.3f} | "
            f"{self.share_of(copy):.3f} |"
        )


def captured(name: str, bytes_moved: int, launches: Sequence[Callable[[], object]]) -> Arm:
    """Capture launches, one a buffer set and REPEATS times over, in one graph."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            for launch in launches:
                launch()
    return Arm(name, bytes_moved, REPEATS * len(launches), graph.replay, launches)


def sets_for(bytes_moved: int) -> int:
    """Buffer sets so many that together they leave nothing in the cache."""
    return max(SETS, min(64, COLD_BYTES // max(1, bytes_moved)))


def copy_arm(bytes_moved: int) -> Arm:
    """Copy half as many bytes from one place to another: as many are moved."""
    # Trap: the driver copies whole pages half again as fast as anything that is not a multiple.
    half = max(1, bytes_moved // 2 // PAGE) * PAGE
    pairs = [
        (
            torch.randint(0, 255, (half,), dtype=torch.uint8, device="cuda"),
            torch.empty(half, dtype=torch.uint8, device="cuda"),
        )
        for _ in range(sets_for(bytes_moved))
    ]
    launches = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    return captured(f"copy of {bytes_moved / 1e6:.1f} MB", 2 * half, launches)


def kernel_arm(name: str, problem: QuantiseProblem, tactic: QuantiseTactic | None = None) -> Arm:
    """Quantise random values, one buffer set after the other."""
    from degarble.kernels.quantise import simt_quantise_nvfp4 as kernels  # noqa: PLC0415  needs the DSL

    form = choose_form(problem, target_of_device().name)
    kernel = kernels.compile_form(form, CompileSettings())
    chosen = tactic or choose_tactic(problem)
    launches = []
    for _ in range(sets_for(problem.bytes_moved)):
        shape = (problem.rows, problem.input_columns)
        x_MK = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        scale = (x_MK.abs().max().float() / 2688).reshape(1)
        given = {"values": x_MK, "decode_scale": scale}
        tensors = given | kernels.KERNEL.allocate(problem, x_MK.device)
        launches.append(partial(kernels.KERNEL.launch, kernel, form, problem, tensors, chosen))
    return captured(name, problem.bytes_moved, launches)


def timed(arms: Sequence[Arm], rounds: int) -> list[Figure]:
    """Run the arms by turns, each round beginning with another one."""
    microseconds: list[list[float]] = [[] for _ in arms]
    for turn in range(rounds + 2):
        for place in range(len(arms)):
            at = (turn + place) % len(arms)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            arms[at].replay()
            end.record()
            end.synchronize()
            if turn >= 2:  # the first two warm up
                microseconds[at].append(start.elapsed_time(end) * 1e3 / arms[at].launches)
    return [Figure(arm, tuple(each)) for arm, each in zip(arms, microseconds, strict=True)]


def table(title: str, arms: Sequence[Arm], rounds: int) -> list[Figure]:
    """Time arms, the first of them the copy, and print them."""
    figures = timed(arms, rounds)
    say(
        f"\n**{title}**\n\n| arm | MB | us a launch | TB/s | share of copy |\n|---|---|---|---|---|"
    )
    for figure in figures:
        say(figure.row(figures[0]))
    return figures


def walks(rows: int, columns: int, rounds: int) -> None:
    """Compare ways to walk down the rows."""
    problem = QuantiseProblem(rows, columns)
    arms = [copy_arm(problem.bytes_moved)]
    for walkers in WALKERS:
        tactic = QuantiseTactic(float("inf"), walkers)
        name = f"128x4, {walkers or 'all'} a processor, grid {grid(problem, tactic, 132)[:2]}"
        arms.append(kernel_arm(name, problem, tactic))
    table(f"Walks, {rows} x {columns}", arms, rounds)


def forms(rows: int, columns: int, rounds: int) -> tuple[float, float]:
    """Compare layouts and fused forms; return the targets' two figures."""
    plain = {layout: QuantiseProblem(rows, columns, layout) for layout in LAYOUTS}
    fused = QuantiseProblem(rows, columns, source=SWIGLU.name, limit=10.0)
    arms = [copy_arm(plain["128x4"].bytes_moved)]
    arms += [kernel_arm(layout, problem) for layout, problem in plain.items()]
    arms.append(kernel_arm("SwiGLU, 128x4", fused))
    figures = {figure.arm.name: figure for figure in table(f"{rows} x {columns}", arms, rounds)}
    copy = figures[arms[0].name]
    share, of_fused = figures["128x4"].share_of(copy), figures["SwiGLU, 128x4"].share_of(copy)
    return share, share / of_fused


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=30)
    settings = parser.parse_args(arguments)
    if status := refused_here():
        return status
    walks(settings.rows, settings.columns, settings.rounds)
    share, fused = forms(settings.rows, settings.columns, settings.rounds)
    for rows in (1, 16, 128, 1024):
        forms(rows, settings.columns, settings.rounds)
    say(f"\nshare of copy bandwidth {share:.3f}, wanted at least {WANTED_SHARE}")
    say(f"SwiGLU for its bytes over plain for its own {fused:.3f}, wanted at most {WANTED_FUSED}")
    return int(share < WANTED_SHARE or fused > WANTED_FUSED)


if __name__ == "__main__":
    sys.exit(main())
