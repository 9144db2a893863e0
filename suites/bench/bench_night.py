"""One rate of each kernel beside a ceiling of the same run, for the history: seconds, not tables.

    python -m degarble.suites.bench.bench_night [--only NAME ...] [--rounds N] [--json]

Each kernel has one shape of its own bench, with a copy of as many bytes, cuBLAS, or whatever that
bench compares it with. Arms, buffers and rounds are those of the benches. A kernel that cannot be
timed reports why and leaves the others alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.kernels.gemm.problem import BF16, FP8_BLOCK, NVFP4, GemmProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.indexer.problem import TopkProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.problem import NormProblem
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device
from degarble.suites.bench import bench_attention_row_kernels as attention_rows
from degarble.suites.bench import bench_gemm_kernels as gemms
from degarble.suites.bench import bench_indexer_kernels as indexer
from degarble.suites.bench import bench_moe_kernel as moe
from degarble.suites.bench import bench_quantise_kernel as quantising
from degarble.suites.bench import bench_row_kernels as row_kernels
from degarble.suites.bench import bench_sparse_attention as attention
from degarble.suites.bench import bench_w4a16_kernel as w4a16

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from degarble.suites.bench.bench_quantise_kernel import Arm, Figure

TOKENS = 8192
EXTENTS = (4096, 7168, 4096)
COPY, CUBLAS, TOPK, PLAIN = "copy bandwidth", "cuBLAS", "torch.topk", "the plain product's rate"
EVERYWHERE = (SM90A.name, SM100A.name)
HOPPER = (SM90A.name,)


@dataclass(frozen=True)
class Pair:
    """A kernel's arms, what they are held against, and work of theirs over work of ours."""

    ours: Sequence[Arm]
    theirs: Sequence[Arm]
    of: str
    work: float = 1.0  # ours over theirs: bytes or operations

    def share(self, figures: Sequence[Figure]) -> float:
        """Rate of ours over theirs, the median over rounds."""
        count = len(self.ours)
        own = [sum(each) for each in _columns(figures[:count])]
        other = [sum(each) for each in _columns(figures[count:])]
        ratios = (slow / fast for slow, fast in zip(other, own, strict=True))
        return float(statistics.median(ratios)) * self.work


@dataclass(frozen=True)
class Row:
    """A kernel of the table: how its arms are made, and the targets that have it."""

    make: Callable[[], Pair]
    targets: tuple[str, ...] = EVERYWHERE


def _columns(figures: Sequence[Figure]) -> Any:
    return zip(*(figure.microseconds for figure in figures), strict=True)


def beside_copy(arm: Arm, bytes_moved: int) -> Pair:
    """Hold an arm against a copy of as many bytes."""
    copy = quantising.copy_arm(bytes_moved)
    return Pair((arm,), (copy,), COPY, bytes_moved / copy.bytes_moved)


def _quantise() -> Pair:
    problem = QuantiseProblem(TOKENS, 7168)
    return beside_copy(quantising.kernel_arm("quantise", problem), problem.bytes_moved)


def _rmsnorm() -> Pair:
    problem = NormProblem(TOKENS, 7168)
    return beside_copy(row_kernels.norm_arm("norm", problem), problem.bytes_moved)


def _gemm(operands: str) -> Pair:
    problem = GemmProblem(*EXTENTS, operands, gemms.SCALES[operands])
    return Pair((gemms.kernel_arm(problem),), (gemms.cublas_arm(GemmProblem(*EXTENTS)),), CUBLAS)


def _w4a16() -> Pair:
    problem = W4A16Problem(8, 8192, 8192)
    return beside_copy(w4a16.kernel_arm(problem), problem.weight_bytes)


def _moe() -> Pair:
    problem = moe.problem_of("V4-Flash", TOKENS)
    arms = {arm.name: arm for arm in moe.grouped_arms(problem)}
    plain = [gemms.kernel_arm(each) for each in moe.plain_problems(problem)]
    return Pair((arms[moe.FC1], arms[moe.FC2]), plain, PLAIN)


def _row(name: str) -> Pair:
    turns = attention_rows.on_gpu(attention_rows.POSITIONS, rows.TABLE_WIDTH, dtype=torch.float32)
    made = {each[0]: each for each in attention_rows.launches_of(TOKENS, turns)}
    _, bytes_moved, launch = made[name]
    launches = [launch(number) for number in range(quantising.sets_for(bytes_moved))]
    return beside_copy(quantising.captured(name, bytes_moved, launches), bytes_moved)


def _scores() -> Pair:
    problem = indexer.scores_problem(4096, 8192, 1, ("bf16", "float32"))
    work = problem.operations / (2 * indexer.PEAK_EXTENT**3)
    return Pair((indexer.scores_arm(problem),), (indexer.peak_arm(),), CUBLAS, work)


def _topk() -> Pair:
    theirs, ours = indexer.topk_arms(TopkProblem(64, 32_768, 1024))
    return Pair((ours,), (theirs,), TOPK)


def _attention(problem_of: Any, entry: str, count: int) -> Pair:
    problem = problem_of(entry, count, 64)
    arm = attention.arm_of(entry, problem, attention.kernel_launch)
    work = problem.operations / (2 * indexer.PEAK_EXTENT**3)
    return Pair((arm,), (indexer.peak_arm(),), CUBLAS, work)


ROWS: Mapping[str, Row] = {
    "quantise_nvfp4": Row(_quantise),
    "rmsnorm": Row(_rmsnorm),
    **{f"gemm_{each.name}": Row(partial(_gemm, each.name)) for each in (BF16, NVFP4, FP8_BLOCK)},
    "gemm_w4a16": Row(_w4a16, HOPPER),
    "moe_nvfp4": Row(_moe, HOPPER),
    "kv_write_fp8": Row(partial(_row, "kv_write fp8")),
    "kv_read_fp8": Row(partial(_row, "kv_read fp8")),
    "qnorm_rope": Row(partial(_row, "qnorm_rope, 64 heads")),
    "inverse_rope": Row(partial(_row, "inverse_rope in place, 64 heads")),
    "mhc": Row(partial(_row, "mhc all, 7168")),
    "mhc_project": Row(partial(_row, "mhc project, 7168")),
    "compressor": Row(partial(_row, "compressor 4")),
    "indexer_scores": Row(_scores, HOPPER),
    "indexer_topk": Row(_topk),
    "attention_prefill": Row(partial(_attention, attention.prefill, "bf16", 4096), HOPPER),
    "attention_decode": Row(partial(_attention, attention.decode, "fp8", 64), HOPPER),
}  # fmt: skip


def measured(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Time kernels one after the other; what cannot be timed says why."""
    speeds: dict[str, dict[str, float | str]] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            pair = ROWS[name].make()
            figures = quantising.timed([*pair.ours, *pair.theirs], rounds)
            own = statistics.median(sum(each) for each in _columns(figures[: len(pair.ours)]))
            speeds[name] = {"share": pair.share(figures), "of": pair.of, "microseconds": own}
            del pair, figures
        except Exception as error:  # noqa: BLE001  the next kernel is another
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        torch.cuda.empty_cache()
    return {"speeds": speeds, "failed": failed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a kernel could not be timed, 2 where nothing can be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one document on the last line")
    settings = parser.parse_args(arguments)
    try:
        target = target_of_device()
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    names = settings.only or [name for name, row in ROWS.items() if target.name in row.targets]
    found = measured(names, settings.rounds)
    if settings.json:
        print(json.dumps({"target": target.name, **found}))  # noqa: T201  a script
    else:
        print(f"{torch.cuda.get_device_name()} ({target.name}), torch {torch.__version__}")  # noqa: T201
        for line in lines_of(found):
            print(line)  # noqa: T201  a script
    return int(bool(found["failed"]))


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """The table for people."""
    told = ["", "| kernel | us | share | of |", "|---|---|---|---|"]
    for name, each in found["speeds"].items():
        told.append(f"| {name} | {each['microseconds']:.1f} | {each['share']:.3f} | {each['of']} |")
    return [*told, *(f"not timed: {name}: {why}" for name, why in found["failed"].items())]


if __name__ == "__main__":
    sys.exit(main())
