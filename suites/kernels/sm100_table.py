"""Print what a B200 is expected to do with the sm_100a NVFP4 GEMM: derived facts and roofline.

    python -m degarble.suites.kernels.sm100_table

Nothing of it was run. Data sheet: 9 PFLOP/s of dense FP4, 8 TB/s, 148 multiprocessors. Published
figures are other people's; their sources are in docs/design-notes/sm100_gemm.md, which shows what
this prints.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import GemmForm, GemmProblem, choose_form
from degarble.kernels.runtime.targets import SM100A

PEAK, BANDWIDTH, PROCESSORS = 9e15, 8e12, 148
# 9 PFLOP/s are 32,768 operations a clock of each of 148 multiprocessors at 1.86 GHz.
OPERATIONS_A_CLOCK = 32_768
# Extents, and what others published for a B200.
PUBLISHED = {
    (1, 8192, 8192): "1.78 TB/s, FlashInfer (its issue 1732)",
    (1, 7168, 16384): "8.62 us, bound of the GPU MODE contest; 2.6 times that, entries to it",
    (128, 7168, 16384): "8.99 us, bound of the GPU MODE contest at 1.5 GHz",
    (128, 4096, 7168): "2.35 us, the same",
    (128, 7168, 2048): "1.33 us, the same",
    (
        1024,
        7168,
        4608,
    ): "TFLOP/s 3,370 CUTLASS, 2,976 cuDNN, 2,187 TensorRT-LLM (FlashInfer issue 1979)",
    (4096, 7168, 4096): "none found",
    (8192, 7168, 4096): "none found with clocks locked",
}
# Linears of a model: N, K. wo_a is a group's; gate and up are one matrix.
MODELS = {
    "V4-Pro": {
        "wq_a": (1536, 7168),
        "wq_b": (65536, 1536),
        "wkv": (512, 7168),
        "wo_a": (1024, 4096),
        "wo_b": (7168, 16384),
        "shared w1, w3": (6144, 7168),
        "shared w2": (7168, 3072),
    },
    "V4-Flash": {
        "wq_a": (1024, 4096),
        "wq_b": (32768, 1024),
        "wkv": (512, 4096),
        "wo_a": (1024, 4096),
        "wo_b": (4096, 8192),
        "shared w1, w3": (4096, 4096),
        "shared w2": (4096, 2048),
    },
    "V3.2": {
        "wq_a, wkv_a": (2112, 7168),
        "wq_b": (24576, 1536),
        "wo": (7168, 16384),
        "dense w1, w3": (36864, 7168),
        "dense w2": (7168, 18432),
        "shared w1, w3": (4096, 7168),
        "shared w2": (7168, 2048),
    },
}
DECODED, PREFILLED = 16, 4096  # rows of A


class Bound(NamedTuple):
    """The least time of a form, and what it follows from."""

    blocks: int  # thread blocks at work, at most one a processor
    waves: int
    filled: float  # share of whole tiles in whole waves that lies within D
    seconds: float
    by_memory: bool

    @property
    def limit(self) -> str:
        """What bounds the time."""
        return "memory" if self.by_memory else "matrix"


def bound_of(problem: GemmProblem, form: GemmForm) -> Bound:
    """Return the bound: whole tiles in whole waves at the peak, or all bytes once."""
    tactic = form.tactic
    size = tactic.cluster_rows * tactic.cluster_columns
    rows, columns = facts.cluster_tiles(problem, tactic)
    tiles, at_once = rows * columns * size, PROCESSORS // size * size
    waves = ceil_div(tiles, at_once)
    # What lies beyond D is multiplied as well.
    whole = waves * PROCESSORS * tactic.rows * tactic.columns * 2 * problem.inner
    matrix, memory = whole / PEAK, problem.bytes_moved / BANDWIDTH
    filled = problem.operations / whole
    return Bound(min(tiles, at_once), waves, filled, max(matrix, memory), memory > matrix)


def forms() -> list[GemmForm]:
    """Return every form of both tables."""
    one = choose_form(GemmProblem(1, 8, 32, "nvfp4", "e4m3"), SM100A.name)
    tactics = (*facts.TACTICS[SM100A.name, "nvfp4"], *tensor_memory.PAIRS)
    return [replace(one, tactic=tactic) for tactic in tactics]


def tile(form: GemmForm) -> str:
    """Name a tile: of swapped operands the rows are those of B."""
    tactic = form.tactic
    return f"{tactic.together * tactic.rows} x {tactic.columns}" + " swapped" * tactic.swapped


def facts_of_forms() -> list[str]:
    """Return a line a form."""
    lines = [
        "| tile | stages | expected | shared memory | sums | columns | copies | clocks | read |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for form in forms():
        held, tactic = tensor_memory.footprint(form), form.tactic
        clocks = 2 * tactic.rows * tactic.columns * tactic.inner // OPERATIONS_A_CLOCK
        read = sum(facts.bytes_of(form, name) for name in "ab") // clocks
        lines.append(
            f"| {tile(form)} | {held.stages} of {held.stage_bytes:,} | "
            f"{facts.expected_bytes(form):,} | {held.total:,} | "
            f"{tensor_memory.places_of_sums(form)} | "
            f"{tensor_memory.columns_held(form)} of {tensor_memory.columns_allocated(form)} | "
            f"{tensor_memory.scale_copies(form)} | {clocks} | {read} |"
        )
    return lines


def roofline() -> list[str]:
    """Return a line a problem."""
    lines = [
        "| M x N x K | matrix, us | memory, us | tile, waves, filled | TFLOP/s | published |",
        "|---|---|---|---|---|---|",
    ]
    for extents, published in PUBLISHED.items():
        problem = GemmProblem(*extents, "nvfp4", "e4m3")
        form = choose_form(problem, SM100A.name)
        bound = bound_of(problem, form)
        matrix, memory = problem.operations / PEAK * 1e6, problem.bytes_moved / BANDWIDTH * 1e6
        lines.append(
            f"| {extents[0]} x {extents[1]} x {extents[2]} | {matrix:.2f} | {memory:.2f} | "
            f"{tile(form)}, {bound.waves}, {bound.filled:.2f} | "
            f"{problem.operations / bound.seconds / 1e12:,.0f} | {published} |"
        )
    return lines


def of_models() -> list[str]:
    """Return a line a linear: at M of decoding, and of a long prompt.

    Weights under way are those of all stages of all thread blocks at work.
    """
    lines = [
        f"| N x K | M = {DECODED}: us | blocks | KB | M = {PREFILLED}: us | filled | TFLOP/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, linears in MODELS.items():
        for name, (n, k) in linears.items():
            few, many = (GemmProblem(rows, n, k, "nvfp4", "e4m3") for rows in (DECODED, PREFILLED))
            form = choose_form(few, SM100A.name)
            decoded, long = (
                bound_of(problem, choose_form(problem, SM100A.name)) for problem in (few, many)
            )
            weights = facts.bytes_of(form, "a") + facts.bytes_of(form, "scales of a")
            under_way = decoded.blocks * tensor_memory.footprint(form).stages * weights
            lines.append(
                f"| {model} {name}, {n} x {k} | {decoded.seconds * 1e6:.2f}, {decoded.limit} | "
                f"{decoded.blocks} | {under_way // 1024:,} | {long.seconds * 1e6:.1f}, "
                f"{long.limit} | {long.filled:.2f} | "
                f"{many.operations / long.seconds / 1e12:,.0f} |"
            )
    return lines


def main() -> int:
    """Print all tables."""
    lines = ["Derived, not run.", "", *facts_of_forms(), "", *roofline(), "", *of_models()]
    print("\n".join(lines))  # noqa: T201  a script
    return 0


if __name__ == "__main__":
    sys.exit(main())
