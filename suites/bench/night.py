"""One rate of each kernel beside a ceiling of the same run, for the history: seconds, not tables.

Each kernel has one shape of its own bench, with a copy of as many bytes, cuBLAS, or whatever that
bench compares it with. A kernel that cannot be timed reports why and leaves the others alone.
`python -m degarble.suites.bench.night --json` is what the nightly run reads.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from degarble.kernels.gemm.problem import BF16, FP8_BLOCK, NVFP4, GemmProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.indexer.problem import TopkProblem
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.problem import NormProblem
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device
from degarble.suites.bench import attention, cache, gemm, indexer, moe, rows
from degarble.suites.bench.runner import (
    US_MEDIAN,
    Arm,
    Bench,
    Comparison,
    copy_arm,
    pair_share,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.suites.bench.runner import Reading

TOKENS = 8192
EXTENTS = (4096, 7168, 4096)
COPY, CUBLAS, TOPK, PLAIN = "copy bandwidth", "cuBLAS", "torch.topk", "the plain product's rate"
EVERYWHERE = (SM90A.name, SM100A.name)
HOPPER = (SM90A.name,)


@dataclass(frozen=True)
class Row:
    """A kernel of the table: how its arms are made, what they are held against, and on what."""

    make: Callable[[], Sequence[Arm]]  # baselines are what the others are held against
    of: str = COPY
    targets: tuple[str, ...] = EVERYWHERE


def beside_copy(arm: Arm) -> tuple[Arm, Arm]:
    return arm, copy_arm(arm.moved)


def _quantise() -> Sequence[Arm]:
    return beside_copy(rows.quantise_arm("quantise", QuantiseProblem(TOKENS, 7168)))


def _rmsnorm() -> Sequence[Arm]:
    return beside_copy(rows.norm_arm("norm", NormProblem(TOKENS, 7168)))


def _gemm(operands: str) -> Sequence[Arm]:
    problem = GemmProblem(*EXTENTS, operands, gemm.SCALES[operands])
    return gemm.gemm_arm(operands, problem), gemm.cublas_arm(GemmProblem(*EXTENTS))


def _w4a16() -> Sequence[Arm]:
    return beside_copy(gemm.w4a16_arm(W4A16Problem(8, 8192, 8192)))


def _moe() -> Sequence[Arm]:
    """Both products together, against both plain ones."""
    problem = moe.problem_of("V4-Flash", TOKENS)
    _, first, second = moe.products_arms(problem)
    return first, second, *moe.plain_arms(problem)


def _row(name: str) -> Sequence[Arm]:
    return beside_copy(next(arm for arm in cache.arms_of(TOKENS) if arm.name == name))


def _scores() -> Sequence[Arm]:
    problem = indexer.scores_problem(4096, 8192, 1, ("bf16", "float32"))
    return indexer.scores_arm(problem), indexer.peak_arm()


def _topk() -> Sequence[Arm]:
    return indexer.topk_arms(TopkProblem(64, 32_768, 1024))


def _attention(problem_of: Any, entry: str, count: int) -> Sequence[Arm]:
    return attention.arm_of(entry, problem_of(entry, count, 64)), indexer.peak_arm()


ROWS: Mapping[str, Row] = {
    "quantise_nvfp4": Row(_quantise),
    "rmsnorm": Row(_rmsnorm),
    **{
        f"gemm_{operand_format.name}": Row(partial(_gemm, operand_format.name), CUBLAS)
        for operand_format in (BF16, NVFP4, FP8_BLOCK)
    },
    "gemm_w4a16": Row(_w4a16, COPY, HOPPER),
    "moe_nvfp4": Row(_moe, PLAIN, HOPPER),
    "kv_write_fp8": Row(partial(_row, "kv_write fp8")),
    "kv_read_fp8": Row(partial(_row, "kv_read fp8")),
    "qnorm_rope": Row(partial(_row, "qnorm_rope, 64 heads")),
    "inverse_rope": Row(partial(_row, "inverse_rope in place, 64 heads")),
    "mhc": Row(partial(_row, "mhc all, 7168")),
    "mhc_project": Row(partial(_row, "mhc project, 7168")),
    "compressor": Row(partial(_row, "compressor 4")),
    "indexer_scores": Row(_scores, CUBLAS, HOPPER),
    "indexer_topk": Row(_topk, TOPK),
    "attention_prefill": Row(partial(_attention, attention.prefill, "bf16", 4096), CUBLAS, HOPPER),
    "attention_decode": Row(partial(_attention, attention.decode, "fp8", 64), CUBLAS, HOPPER),
}


def work_share(reading: Reading, of: str) -> float:
    """Rate over that of the baselines: times, and bytes or operations where they differ."""
    arms = [each.arm for each in reading.beside.values()]
    ours, theirs = ([arm for arm in arms if arm.baseline == side] for side in (False, True))
    if of == COPY:
        work = sum(arm.moved for arm in ours) / sum(arm.moved for arm in theirs)
    elif of == CUBLAS:
        work = sum(arm.operations for arm in ours) / sum(arm.operations for arm in theirs)
    else:
        work = 1.0
    return pair_share(reading) * work


def one_row(name: str, row: Row) -> Comparison:
    """Time a kernel; several arms of its own count together, under its name."""

    def share(reading: Reading) -> tuple[float, str]:
        return work_share(reading, row.of), row.of

    columns = (
        US_MEDIAN, ("share", lambda reading: f"{share(reading)[0]:.3f}"), ("of", lambda _: row.of),
    )  # fmt: skip
    return Comparison(
        name, [tuple(row.make())], columns, against=share, keep_going=True, as_one=name,
    )  # fmt: skip


def night(_options: Any) -> Iterator[Comparison]:
    here = target_of_device().name
    for name, row in ROWS.items():
        if here in row.targets:
            yield one_row(name, row)


BENCHES = {"night": Bench("one rate of each kernel, for the history", night, needs="gpu")}

if __name__ == "__main__":
    from degarble.suites.bench.__main__ import main

    sys.exit(main(["night", *sys.argv[1:]]))
