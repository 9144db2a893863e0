"""The indexer's kernels beside cuBLAS, torch.topk and a copy, on a Hopper GPU: a script.

    python -m degarble.suites.bench.bench_indexer_kernels [--rounds N] [--only scores|topk|operand]

Arms: scores of a prefill and of a decode in BF16 and FP8, against torch.mm in BF16 on a large
square, whose rate is the peak of the run; the largest k of rows, against torch.topk on the same
rows; rows of queries, against a copy. Graphs, cold buffers and rounds are those of
bench_quantise_kernel. Numbers are compared with their definitions by suites/kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.indexer import problem as indexer_problem
from degarble.kernels.indexer.problem import (
    OPERANDS,
    KeyPages,
    OperandProblem,
    ScoresProblem,
    TopkProblem,
)
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.bench.bench_quantise_kernel import (
    Arm,
    Figure,
    captured,
    copy_arm,
    sets_for,
    timed,
)
from degarble.suites.bench.gpu import refused_here, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SETTINGS = CompileSettings()
PEAK_EXTENT = 8192  # of the square whose rate is the peak
HEADS = 64
PAGE = 64
PREFILLS = ((2048, 16_384), (4096, 8192))  # tokens, entries
DECODE = (64, 8192)  # sequences of one token, entries of each
ROWS = (1, 64, 4096)
LENGTHS = (8192, 32_768, 131_072)
COUNTS = (512, 1024, 2048)
WANTED_PEAK = 0.6
WANTED_TOPK = 3.0
WANTED_SHARE = 0.8
KINDS = (("bf16", "float32"), ("bf16", "stored"), ("fp8", "float32"), ("fp8", "stored"))


def ratio(slow: Figure, fast: Figure) -> float:
    """Return the median over rounds of one arm's time over another's."""
    pairs = zip(slow.microseconds, fast.microseconds, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def peak_arm() -> Arm:
    """Multiply BF16 squares by torch.mm."""
    shape = (PEAK_EXTENT, PEAK_EXTENT)
    sets = [[torch.randn(shape, device="cuda").bfloat16() for _ in range(2)] for _ in range(2)]
    out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)

    def launch(a: Any, b: Any) -> Callable[[], object]:
        return lambda: torch.mm(a, b.T, out=out)

    return captured("torch.mm, BF16", 6 * PEAK_EXTENT**2, [launch(*each) for each in sets])


def scores_problem(
    tokens: int, entries: int, sequences: int, kind: tuple[str, str]
) -> ScoresProblem:
    """Return a call in which every token sees every entry of its sequence."""
    operands, arithmetic = kind
    pages = KeyPages(operands, PAGE, sequences * entries // PAGE)
    return ScoresProblem(tokens, HEADS, entries, sequences, pages, 1, arithmetic)


def scores_arm(problem: ScoresProblem) -> Arm:
    """Score random operands."""
    from degarble.kernels.indexer import sm90_indexer_scores as kernels  # noqa: PLC0415  needs the DSL

    p, launches = problem, []
    for _ in range(sets_for(p.bytes_moved)):
        q_TNI = torch.randn(p.tokens, p.heads, 128, device="cuda")
        codes = kernels.TORCH[p.pages.operands]
        keys = torch.randn(p.pages.count * PAGE, 128, device="cuda").to(codes)
        pages = torch.full((p.pages.count, p.pages.stride), 0x3B, dtype=torch.uint8, device="cuda")
        held = PAGE * 128 * OPERANDS[p.pages.operands].bytes
        pages[:, :held] = keys.view(torch.uint8).view(p.pages.count, held)
        scales = torch.rand(p.tokens, p.heads, device="cuda") if p.pages.operands == "fp8" else None
        weights = torch.randn(p.tokens, p.heads, device="cuda")
        given = {
            "queries": q_TNI.to(codes),
            "weights": weights.to(kernels.WEIGHTS[p.arithmetic][1]),
            "positions": torch.full((p.tokens,), p.entries - 1, device="cuda"),
            "sequences": torch.arange(p.tokens, device="cuda").int() % p.sequences,
            "table": torch.randperm(p.pages.count, device="cuda").int().view(p.sequences, -1),
            "pages": pages,
            "scales": scales,
            "out": torch.empty(p.tokens, p.entries, device="cuda"),
        }
        launches.append(lambda g=given: kernels.KERNEL.run(p, SETTINGS, **g))
    return captured(f"{p.pages.operands}, {p.arithmetic}", p.bytes_moved, launches)


def scores(rounds: int) -> list[str]:
    """Compare the scores with the peak of the run; return what is missed."""
    missed = []
    for tokens, entries in PREFILLS:
        problems = [scores_problem(tokens, entries, 1, kind) for kind in KINDS]
        figures = timed([peak_arm(), *map(scores_arm, problems)], rounds)
        peak = 2 * PEAK_EXTENT**3 / figures[0].median
        say(
            f"\n**{tokens} tokens, {entries} entries, {HEADS} heads**, "
            f"torch.mm {peak * 1e-6:.0f} TFLOP/s"
        )
        say("\n| arm | us | TFLOP/s | of the peak |\n|---|---|---|---|")
        for problem, figure in zip(problems, figures[1:], strict=True):
            rate = problem.operations / figure.median
            say(
                f"| {figure.arm.name} | {figure.median:.1f} | {rate * 1e-6:.0f} | "
                f"{rate / peak:.3f} |"
            )
            if rate < WANTED_PEAK * peak:
                missed.append(f"scores {figure.arm.name} at {tokens} x {entries}")
        torch.cuda.empty_cache()
    sequences, entries = DECODE
    problems = [scores_problem(sequences, entries, sequences, kind) for kind in KINDS]
    say(f"\n**{sequences} sequences of a token, {entries} entries**\n")
    say("| arm | us | TB/s | of a copy |\n|---|---|---|---|")
    for problem in problems:
        copy, figure = timed([copy_arm(problem.bytes_moved), scores_arm(problem)], rounds)
        say(
            f"| {figure.arm.name} | {figure.median:.1f} | {figure.terabytes_a_second:.2f} | "
            f"{figure.share_of(copy):.3f} |"
        )
    return missed


def topk_arms(problem: TopkProblem) -> list[Arm]:
    """Choose by torch.topk and by the kernel, on the same rows."""
    from degarble.kernels.indexer.simt_indexer_topk import KERNEL  # noqa: PLC0415  needs the DSL

    p, count = problem, sets_for(problem.bytes_moved)
    sets = [torch.randn(p.rows, p.entries, device="cuda") for _ in range(count)]
    out = torch.empty(p.rows, p.count, dtype=torch.int32, device="cuda")
    theirs = [lambda x=x: torch.topk(x, p.count) for x in sets]
    ours = [lambda x=x: KERNEL.run(p, SETTINGS, scores=x, out=out) for x in sets]
    return [
        captured("torch.topk", p.bytes_moved, theirs),
        captured("indexer_topk", p.bytes_moved, ours),
    ]


def topk(rounds: int) -> list[str]:
    """Compare the choice with torch.topk; return what is missed."""
    missed = []
    say("\n| rows | entries | k | torch.topk us | indexer_topk us | TB/s | times |")
    say("|---|---|---|---|---|---|---|")
    for rows in ROWS:
        for entries in LENGTHS:
            for count in COUNTS:
                problem = TopkProblem(rows, entries, count)
                slow, fast = timed(topk_arms(problem), rounds)
                times = ratio(slow, fast)
                say(topk_row(problem, slow, fast))
                if times < WANTED_TOPK:
                    missed.append(f"top-{count} of {rows} x {entries}: {times:.2f}")
                torch.cuda.empty_cache()
    return missed


def topk_row(problem: TopkProblem, slow: Figure, fast: Figure) -> str:
    """One line of the table of top-k."""
    p = problem
    return (
        f"| {p.rows} | {p.entries} | {p.count} | {slow.median:.1f} | {fast.median:.1f} | "
        f"{fast.terabytes_a_second:.2f} | {ratio(slow, fast):.2f} |"
    )


def operand_arm(problem: OperandProblem) -> Arm:
    """Prepare random rows."""
    from degarble.kernels.indexer.simt_indexer_operand import KERNEL  # noqa: PLC0415  needs the DSL

    p, launches = problem, []
    shape = (p.tokens, p.heads, indexer_problem.WIDTH)
    for _ in range(sets_for(p.bytes_moved)):
        x_TNI = torch.randn(shape, device="cuda").bfloat16()
        given = {
            "rows": x_TNI,
            "turns": torch.randn(p.positions, indexer_problem.TABLE_WIDTH, device="cuda"),
            "positions": torch.arange(p.tokens, device="cuda") % p.positions,
            **KERNEL.allocate(p, x_TNI.device),
        }
        launches.append(lambda g=given: KERNEL.run(p, SETTINGS, **g))
    return captured(f"{p.format}, {p.pairing}, coded {p.coded}", p.bytes_moved, launches)


def operand(rounds: int) -> list[str]:
    """Compare rows of queries with a copy; return what is missed."""
    missed = []
    say("\n| rows | us | TB/s | of a copy |\n|---|---|---|---|")
    for pairing, form, coded in (
        ("interleaved", "mxfp4", False),
        ("interleaved", "fp8", True),
        ("halves", "fp8", False),
    ):
        problem = OperandProblem(
            8192, HEADS, pairing, form, hadamard=True, coded=coded, positions=8192
        )
        copy, figure = timed([copy_arm(problem.bytes_moved), operand_arm(problem)], rounds)
        share = figure.share_of(copy)
        say(
            f"| {figure.arm.name} | {figure.median:.1f} | {figure.terabytes_a_second:.2f} | "
            f"{share:.3f} |"
        )
        if share < WANTED_SHARE:
            missed.append(f"rows, {figure.arm.name}: {share:.2f}")
        torch.cuda.empty_cache()
    return missed


PARTS = {"scores": scores, "topk": topk, "operand": operand}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=sorted(PARTS))
    settings = parser.parse_args(arguments)
    if status := refused_here(SM90A, "The scores are Hopper's."):
        return status
    parts = [settings.only] if settings.only else list(PARTS)
    missed = [why for part in parts for why in PARTS[part](settings.rounds)]
    say(f"\nmissed: {'; '.join(missed) or 'nothing'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
