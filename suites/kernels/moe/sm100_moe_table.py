"""Print what a B200 is expected to do with the grouped sm_100a products: derived facts, roofline.

    python -m degarble.suites.kernels.moe.sm100_moe_table

Nothing of it was run. Data sheet and clock are those of sm100_table; the sources of other people's
published figures are in docs/design-notes/sm100_moe.md, which shows what this prints. Slots lie as
evenly as they can over as many experts as even choices visit.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import NVFP4, GemmTactic, loads
from degarble.kernels.moe import problem as moe
from degarble.kernels.moe.problem import MoeForm, MoeProblem
from degarble.kernels.runtime.targets import SM100A
from degarble.suites.kernels.sm100_table import (
    BANDWIDTH,
    OPERATIONS_A_CLOCK,
    PEAK,
    PROCESSORS,
)

BYTES_OF_NUMBER = 0.5 + 1 / NVFP4.block  # a code, and its share of a scale
OUTPUT_BYTES = 2  # of a number of FC2's rows
MODELS = {
    "V4-Pro": (7168, 3072, 384, 6),
    "V4-Flash": (4096, 2048, 256, 6),
    "V3.2": (7168, 2048, 256, 8),
}
CLUSTERS = ((1, 1), (1, 2), (2, 1), (2, 2))
TOKENS = (1, 16, 128, 2048, 8192)
PUBLISHED = MoeProblem(65_536, 7168, 2048, 8, 1, 8)  # nvfp4moe's BENCHMARKS.md: 8 experts of V3.2


class Bound(NamedTuple):
    """The least time of a product, and what it follows from."""

    tiles: int
    filled: float  # share of whole tiles in whole waves that holds slots and columns
    matrix: float  # seconds of whole tiles in whole waves
    memory: float  # seconds
    brought: float  # bytes that tiles load for one from memory

    @property
    def seconds(self) -> float:
        """The greater of both."""
        return max(self.matrix, self.memory)


def visited(problem: MoeProblem) -> int:
    """Experts that even choices visit, to the nearest."""
    missed = (1 - problem.chosen / problem.routed) ** problem.tokens
    return max(1, round(problem.experts * (1 - missed)))


def tiles_of_rows(problem: MoeProblem, form: MoeForm) -> int:
    """Tiles of rows where slots lie as evenly as they can."""
    count = visited(problem)
    least, more = divmod(problem.slots, count)
    rows = form.gemm.tactic.rows
    tiles: int = more * ceil_div(least + 1, rows) + (count - more) * ceil_div(least, rows)
    return tiles


def bound(problem: MoeProblem, form: MoeForm) -> Bound:
    """Return the bound of one product."""
    tactic, (columns, inner) = form.gemm.tactic, moe.columns_of(problem, form)
    tiles = tiles_of_rows(problem, form) * ceil_div(columns, tactic.columns)
    waves = ceil_div(tiles, PROCESSORS)
    steps, stage = ceil_div(inner, tactic.inner), tensor_memory.footprint(form.gemm).stage_bytes
    whole = waves * PROCESSORS * 2 * tactic.rows * tactic.columns * steps * tactic.inner
    weights = visited(problem) * columns * inner * BYTES_OF_NUMBER
    of_slot = inner * BYTES_OF_NUMBER
    if form.gemm.parts == moe.GATE_AND_UP:
        of_slot += problem.width * BYTES_OF_NUMBER
    else:
        of_slot += problem.hidden * OUTPUT_BYTES
    moved = weights + problem.slots * of_slot
    return Bound(
        tiles,
        2 * problem.slots * columns * inner / whole,
        whole / PEAK,
        moved / BANDWIDTH,
        tiles * steps * stage / moved,
    )


def clocks_of(form: MoeForm) -> int:
    """Clocks of the matrix unit a stage."""
    tactic = form.gemm.tactic
    clocks: int = 2 * tactic.rows * tactic.columns * tactic.inner // OPERATIONS_A_CLOCK
    return clocks


def bytes_a_clock(form: MoeForm) -> float:
    """Bytes that a multiprocessor takes of the L2 cache for a clock of its matrix unit."""
    sharers = tensor_memory.sharers(form.gemm)
    own = (load.bytes / count for load, count in zip(loads(form.gemm), sharers, strict=True))
    return sum(own) / clocks_of(form)


def clusters() -> list[str]:
    """Return a line a shape of cluster."""
    lines = ["| cluster | rows of one expert | FC1 | FC2 |", "|---|---|---|---|"]
    for shape in CLUSTERS:
        tactic = clustered(shape)
        first, second = map(bytes_a_clock, moe.forms_of(PUBLISHED, SM100A.name, tactic))
        rows = moe.rows_of_one_expert(tactic)
        lines.append(f"| {shape[0]} x {shape[1]} | {rows} | {first:.0f} | {second:.0f} |")
    return lines


def clustered(shape: tuple[int, int]) -> GemmTactic:
    """Return the tactic of the table in clusters."""
    (tactic,) = moe.TACTICS[SM100A.name]
    return replace(tactic, cluster_rows=shape[0], cluster_columns=shape[1])


def facts_of_forms() -> list[str]:
    """Return a line a form."""
    lines = [
        "| | tile | stages | shared memory | sums | columns | instructions, copies | clocks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, form in zip(("FC1", "FC2"), moe.forms_of(PUBLISHED, SM100A.name), strict=True):
        tactic, held = form.gemm.tactic, tensor_memory.footprint(form.gemm)
        lines.append(
            f"| {name} | {tactic.rows} x {tactic.columns} x {tactic.inner} | {held.stages} of "
            f"{held.stage_bytes:,} | {held.total:,} | {tensor_memory.accumulators(form.gemm)} | "
            f"{tensor_memory.columns_held(form.gemm)} of "
            f"{tensor_memory.columns_allocated(form.gemm)} | "
            f"{tensor_memory.instructions(form.gemm)}, {tensor_memory.scale_copies(form.gemm)} | "
            f"{clocks_of(form)} |"
        )
    return lines


def line_of(name: str, problem: MoeProblem) -> str:
    """Return a line of the roofline."""
    first, second = (bound(problem, form) for form in moe.forms_of(problem, SM100A.name))
    both = first.seconds + second.seconds
    parts = " | ".join(
        f"{each.tiles:,}, {each.filled:.2f}, {each.brought:.1f} | {each.matrix * 1e6:.1f} | "
        f"{each.memory * 1e6:.1f}"
        for each in (first, second)
    )
    rate = problem.operations / both / 1e12
    return (
        f"| {name}, {problem.tokens:,} | {visited(problem)} | {parts} | {both * 1e6:.1f} | "
        f"{rate:,.0f} |"
    )


def roofline() -> list[str]:
    """Return a line a problem."""
    of_each = "tiles, filled, brought | matrix, us | memory, us"
    lines = [
        f"| model, tokens | experts | FC1: {of_each} | FC2: {of_each} | both, us | TFLOP/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (hidden, width, experts, chosen) in MODELS.items():
        for tokens in TOKENS:
            problem = MoeProblem(tokens, hidden, width, experts, chosen, experts, 10.0)
            lines.append(line_of(name, problem))
    lines.append(line_of("V3.2 rows for 8 experts", PUBLISHED))
    return lines


def main() -> int:
    """Print all tables."""
    tables = (facts_of_forms(), clusters(), roofline())
    print("\n\n".join("\n".join(lines) for lines in tables))  # noqa: T201  a script
    return 0


if __name__ == "__main__":
    sys.exit(main())
