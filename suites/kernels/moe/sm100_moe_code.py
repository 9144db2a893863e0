"""What PTX and cubin of a grouped sm_100a product have to show, against its derived facts.

Owns the readings that differ from those of the plain GEMM (suites/kernels/sm100_code.py, which owns
the words): boxes of one matrix and of many, what FC1 converts and writes without TMA, what FC2
stores warp by warp. Every figure is a number that stands in the text. Kept honest by
suites/kernels/moe/test_sm100_moe_nvfp4.py, which reads PTX with other numbers in it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.moe import problem as moe_facts
from degarble.kernels.moe.problem import GATE_AND_UP
from degarble.kernels.runtime.compiling import cubin_facts, unstated_roundings
from degarble.suites.kernels import sm100_code as plain
from degarble.suites.kernels.gemm_code import expected_bytes

if TYPE_CHECKING:
    from degarble.kernels.moe.problem import MoeForm
    from degarble.kernels.runtime.compiling import CompiledKernel


def count_of(pattern: str, ptx: str) -> int:
    """Count instructions."""
    return len(re.findall(pattern, ptx))


def figures_of_leaving(ptx: str, form: MoeForm) -> dict[str, tuple[Any, Any]]:
    """Return what the text has of a thread's row on its way out."""
    first, pieces = form.gemm.parts == GATE_AND_UP, tensor_memory.stores(form.gemm)
    blocks = moe_facts.blocks_of_tile(form) * first
    outputs, sums = blocks * facts.NVFP4.block, form.gemm.tactic.columns
    return {
        "stores of pieces": (ptx.count("cp.async.bulk.tensor.2d.global"), 0 if first else pieces),
        "stores of codes": (count_of(r"st\.global\.v4\.b32", ptx), blocks // 2),
        "stores of scales": (count_of(r"st\.global\.b32", ptx), blocks // 4),
        "pairs rounded": (
            count_of(r"cvt\.rn\.bf16x2\.f32", ptx),
            first * (sums + outputs) // 2,
        ),
        "numbers rounded": (count_of(r"cvt\.rn\.bf16\.f32", ptx), 0 if first else sums),
        "pairs of codes": (count_of(r"cvt\.rn\.satfinite\.e2m1x2\.f32", ptx), outputs // 2),
        "codes of scales": (count_of(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx), blocks),
        "powers": (count_of(r"ex2\.approx\.ftz\.f32", ptx), outputs),
    }


def complaints(kernel: CompiledKernel, form: MoeForm) -> list[str]:
    """Say what differs from the derived facts."""
    (code,) = cubin_facts(kernel.cubin)
    ptx, of_gemm, held = kernel.ptx, form.gemm, tensor_memory.footprint(form.gemm)
    barriers, loads = plain.barriers_of(ptx), facts.loads(form.gemm)
    kind = f"tcgen05.mma.cta_group::1.{plain.KINDS[of_gemm.operands]}."
    figures = figures_of_leaving(ptx, form)
    figures |= {
        "spills": (code.spills, False),
        "registers fit": (code.registers <= plain.REGISTERS, True),
        "expected bytes": (expected_bytes(ptx), {facts.expected_bytes(of_gemm)}),
        "loads of rows": (
            ptx.count("cp.async.bulk.tensor.2d.shared"),
            sum(load.side == "a" for load in loads),
        ),
        "loads of experts": (
            ptx.count("cp.async.bulk.tensor.3d.shared"),
            sum(load.side == "b" for load in loads),
        ),
        "matrix instructions": (ptx.count(kind), tensor_memory.instructions(of_gemm)),
        "all matrix instructions": (ptx.count("tcgen05.mma"), tensor_memory.instructions(of_gemm)),
        "copies of scales": (
            ptx.count("tcgen05.cp.cta_group::1.32x128b.warpx4"),
            tensor_memory.scale_copies(of_gemm),
        ),
        "reads of sums": (
            ptx.count(f"tcgen05.ld.sync.aligned.32x32b.x{facts.PIECE_COLUMNS}."),
            tensor_memory.stores(of_gemm),
        ),
        "columns": (plain.columns_allocated(ptx), tensor_memory.columns_allocated(of_gemm)),
        "barriers": (len(barriers), held.barriers),
        "end of shared memory": (max(barriers) + facts.BARRIER_BYTES, held.total),
        "threads": (f".reqntid {tensor_memory.threads()}, 1, 1" in ptx, True),
        "roundings unstated": (unstated_roundings(ptx), ()),
    }
    figures |= plain.figures_of_clusters(ptx, of_gemm)
    found = plain.found_words(ptx)
    figures |= {name: (found[name], want) for name, want in plain.wanted_words(of_gemm).items()}
    return [
        f"{name}: got {got}, want {want}" for name, (got, want) in figures.items() if got != want
    ]
