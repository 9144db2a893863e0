"""The indexer's kernels beside cuBLAS, torch.topk and a copy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.indexer.problem import (
    OPERANDS,
    KeyPages,
    OperandProblem,
    ScoresProblem,
    TopkProblem,
)
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import empty, floats, kernel_arm, normal, octets
from degarble.suites.bench.runner import (
    TERABYTES,
    TERAFLOPS,
    US_MEDIAN,
    Arm,
    Bench,
    Claim,
    Comparison,
    Reading,
    copy_arm,
    share_of,
    times,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PEAK_EXTENT = 8192  # of the square whose rate is the peak of the run
PEAK = "torch.mm, BF16"
HEADS = 64
PAGE = 64
PREFILLS = ((2048, 16_384), (4096, 8192))  # tokens, entries
DECODE = (64, 8192)  # sequences of one token, entries of each
ROWS = (1, 64, 4096)
LENGTHS = (8192, 32_768, 131_072)
COUNTS = (512, 1024, 2048)
TOPK = "torch.topk"
WANTED_PEAK = 0.6
WANTED_TOPK = 3.0
WANTED_SHARE = 0.8
KINDS = (("bf16", "float32"), ("bf16", "stored"), ("fp8", "float32"), ("fp8", "stored"))
ROWS_OF_QUERIES = (  # pairing, format, coded
    ("interleaved", "mxfp4", False), ("interleaved", "fp8", True), ("halves", "fp8", False),
)  # fmt: skip


def peak_arm() -> Arm:
    """Multiply BF16 squares by torch.mm."""
    shape = (PEAK_EXTENT, PEAK_EXTENT)

    def make(_number: int) -> Callable[[], object]:
        a, b, out = normal(*shape), normal(*shape), empty(*shape)
        return lambda: torch.mm(a, b.T, out=out)

    moved, operations = 6 * PEAK_EXTENT**2, 2 * PEAK_EXTENT**3
    return Arm(PEAK, make, moved, operations, baseline=True, sets=2)


def of_peak(reading: Reading) -> float:
    """Operations a second as a share of the peak's."""
    peak = reading.beside[PEAK]
    return reading.times(PEAK) * reading.arm.operations / peak.arm.operations


def scores_problem(
    tokens: int, entries: int, sequences: int, kind: tuple[str, str]
) -> ScoresProblem:
    """Return a call in which every token sees every entry of its sequence."""
    operands, arithmetic = kind
    pages = KeyPages(operands, PAGE, sequences * entries // PAGE)
    return ScoresProblem(tokens, HEADS, entries, sequences, pages, 1, arithmetic)


def scored(p: ScoresProblem, _number: int) -> dict[str, Any]:
    """Return keys in pages, and tokens that see all of them."""
    codes, device = gpu.module("sm90_indexer_scores").TORCH[p.pages.operands], gpu.DEVICE
    keys = normal(p.pages.count * PAGE, 128, dtype=codes)
    pages = octets(p.pages.count, p.pages.stride, low=0x3B, high=0x3C)
    held = PAGE * 128 * OPERANDS[p.pages.operands].bytes
    pages[:, :held] = keys.view(torch.uint8).view(p.pages.count, held)
    return {
        "positions": torch.full((p.tokens,), p.entries - 1, device=device),
        "sequences": torch.arange(p.tokens, device=device).int() % p.sequences,
        "table": torch.randperm(p.pages.count, device=device).int().view(p.sequences, -1),
        "pages": pages,
    }


def scores_arm(problem: ScoresProblem) -> Arm:
    name = f"{problem.pages.operands}, {problem.arithmetic}"
    given = partial(scored, problem)
    return kernel_arm(name, "sm90_indexer_scores", problem, given, operations=problem.operations)


def scores() -> Iterator[Comparison]:
    for tokens, entries in PREFILLS:
        arms = [scores_arm(scores_problem(tokens, entries, 1, kind)) for kind in KINDS]
        columns = (US_MEDIAN, TERAFLOPS, ("of the peak", lambda each: f"{of_peak(each):.3f}"))
        claims = [
            Claim(f"scores {arm.name} at {tokens} x {entries}, of the peak", arm.name, of_peak,
                  WANTED_PEAK)
            for arm in arms
        ]  # fmt: skip
        title = f"scores: {tokens} tokens, {entries} entries, {HEADS} heads"
        yield Comparison(title, [(peak_arm(), *arms)], columns, claims)
    sequences, entries = DECODE
    problems = [scores_problem(sequences, entries, sequences, kind) for kind in KINDS]
    turns = [(copy_arm(problem.bytes_moved), scores_arm(problem)) for problem in problems]
    columns = (US_MEDIAN, TERABYTES, share_of())
    yield Comparison(f"scores: {sequences} sequences of a token, {entries} entries", turns, columns)


def topk_arms(p: TopkProblem) -> tuple[Arm, Arm]:
    """Choose by torch.topk and by the kernel."""

    def theirs(_number: int) -> Callable[[], object]:
        x = floats(p.rows, p.entries)
        return lambda: torch.topk(x, p.count)

    name = f"top-{p.count} of {p.rows} x {p.entries}"
    ours = kernel_arm(name, "simt_indexer_topk", p)
    return Arm(TOPK, theirs, p.bytes_moved, baseline=True), ours


def topk() -> Iterator[Comparison]:
    turns = [
        topk_arms(TopkProblem(rows, entries, count))
        for rows in ROWS for entries in LENGTHS for count in COUNTS
    ]  # fmt: skip
    claims = [
        Claim(f"{ours.name}, times torch.topk", ours.name, lambda of: of.times(TOPK), WANTED_TOPK)
        for _, ours in turns
    ]

    def theirs(reading: Reading) -> str:
        return f"{reading.beside[TOPK].median * 1e6:.1f}"

    columns = ((f"{TOPK} us", theirs), US_MEDIAN, TERABYTES, times(TOPK, "times"))
    yield Comparison("topk", turns, columns, claims)


def operand_arm(p: OperandProblem) -> Arm:
    """Prepare random rows."""

    def given(_number: int) -> dict[str, Any]:
        return {"positions": torch.arange(p.tokens, device=gpu.DEVICE) % p.positions}

    name = f"{p.format}, {p.pairing}, coded {p.coded}"
    return kernel_arm(name, "simt_indexer_operand", p, given)


def operand() -> Iterator[Comparison]:
    """Rows of queries beside a copy."""
    problems = [
        OperandProblem(8192, HEADS, pairing, form, hadamard=True, coded=coded, positions=8192)
        for pairing, form, coded in ROWS_OF_QUERIES
    ]
    turns = [(copy_arm(problem.bytes_moved), operand_arm(problem)) for problem in problems]
    claims = [
        Claim(f"rows, {arm.name}, of a copy", arm.name, Reading.share_of, WANTED_SHARE)
        for _, arm in turns
    ]
    yield Comparison("operand: rows of queries", turns, (US_MEDIAN, TERABYTES, share_of()), claims)


def indexer(options: Any) -> Iterator[Comparison]:
    """All parts, or those that --only names: scores topk operand."""
    for part in (scores, topk, operand):
        if not options.only or any(part.__name__ in word for word in options.only):
            yield from part()


BENCHES = {
    "indexer": Bench(
        "the indexer's scores, top-k and rows beside cuBLAS, torch.topk and a copy", indexer,
        needs=SM90A.name, remedy="The scores are Hopper's.",
    ),
}  # fmt: skip
