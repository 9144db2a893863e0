"""Print what a B200 is expected to do with the sm_100a NVFP4 GEMM: derived facts and roofline.

    python -m degarble.suites.kernels.sm100_table

Nothing of it was run. Data sheet: 9 PFLOP/s of dense FP4, 8 TB/s, 148 multiprocessors. Published
figures are others' (shared facts on kernels; sources in docs/design-notes/sm100_gemm.md). Kept
honest by suites/kernels/test_sm100_gemm_nvfp4.py: the note shows what this prints.
"""

from __future__ import annotations

import sys

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.common import gemm_problem as facts
from degarble.kernels.common import gemm_tensor_memory as tensor_memory
from degarble.kernels.common.gemm_problem import GemmForm, GemmProblem, choose_form
from degarble.kernels.common.targets import SM100A

PEAK, BANDWIDTH, PROCESSORS = 9e15, 8e12, 148
# Extents, and what others published for a B200.
PUBLISHED = {
    (1, 8192, 8192): "1.78 TB/s, FlashInfer (its issue 1732)",
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


def facts_of_forms() -> list[str]:
    """Return a line a form."""
    lines = [
        "| tile | stages | shared memory | sums | columns | instructions, copies | clocks |",
        "|---|---|---|---|---|---|---|",
    ]
    for tactic in facts.TACTICS[SM100A.name, "nvfp4"]:
        form = GemmForm("nvfp4", "e4m3", SM100A.name, tactic)
        held = tensor_memory.footprint(form)
        # 9 PFLOP/s are 32,768 operations a clock of each of 148 multiprocessors at 1.86 GHz.
        clocks = 2 * tactic.rows * tactic.columns * tactic.inner // 32_768
        lines.append(
            f"| {tactic.rows} x {tactic.columns} x {tactic.inner} | {held.stages} of "
            f"{held.stage_bytes:,} | {held.total:,} | {tensor_memory.accumulators(form)} | "
            f"{tensor_memory.columns_held(form)} of {tensor_memory.columns_allocated(form)} | "
            f"{tensor_memory.instructions(form)}, {tensor_memory.scale_copies(form)} | {clocks} |"
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
        tactic = choose_form(problem, SM100A.name).tactic
        rows, columns = facts.cluster_tiles(problem, tactic)
        waves = ceil_div(rows * columns, PROCESSORS)
        matrix, memory = problem.operations / PEAK * 1e6, problem.bytes_moved / BANDWIDTH * 1e6
        # Whole tiles in whole waves: what lies beyond D is multiplied as well.
        whole = waves * PROCESSORS * tactic.rows * tactic.columns * 2 * problem.inner
        bound = problem.operations / max(whole / PEAK, problem.bytes_moved / BANDWIDTH) / 1e12
        lines.append(
            f"| {extents[0]} x {extents[1]} x {extents[2]} | {matrix:.2f} | {memory:.2f} | "
            f"{tactic.rows} x {tactic.columns}, {waves}, {problem.operations / whole:.2f} | "
            f"{bound:,.0f} | {published} |"
        )
    return lines


def main() -> int:
    """Print both tables."""
    print("\n".join([*facts_of_forms(), "", *roofline()]))  # noqa: T201  a script
    return 0


if __name__ == "__main__":
    sys.exit(main())
