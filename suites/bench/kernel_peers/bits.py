"""Whether a row's bits depend on its company: alone, and among others of one launch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from degarble.harness.cli.values import settings_here
from degarble.kernels.gemm.problem import BF16, FP8_BLOCK, GemmProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.indexer.problem import TopkProblem
from degarble.suites.bench import attention as attention_bench
from degarble.suites.bench import gpu
from degarble.suites.bench import indexer as indexer_bench
from degarble.suites.bench.kernel_peers import attention, indexer, linears
from degarble.suites.bench.kernel_peers.contest import OURS, Call, Contender, Row, absent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

PLACE = 5  # of the row that is computed alone
COMPANY = 64
ELSEWHERE = "judged by `make nightly` and by suites/kernels on a GPU, and not by this command"


def company_row(
    name: str,
    kernel: str,
    problems: tuple[Any, Any],
    drawn: Callable[[], Mapping[str, Any]],
    of_row: tuple[str, ...],
) -> Row:
    """Compare one row alone with the same row of a whole launch; `of_row` names its operands."""
    every, one = problems
    given = cache(lambda: gpu.drawn(gpu.module(kernel).KERNEL, every, drawn()))

    def whole() -> Tensor:
        of = gpu.module(kernel).KERNEL
        return of.run(every, settings_here(), **given())["out"][PLACE].double()  # type: ignore[no-any-return]

    def alone(_number: int) -> Call:
        of, inputs = gpu.module(kernel).KERNEL, given()
        kept = {each.name for each in of.prepared(every).inputs}
        tensors = {
            each: tensor[PLACE : PLACE + 1].clone() if each in of_row else tensor
            for each, tensor in inputs.items()
            if each in kept and tensor is not None
        }
        made = {**of.allocate(one, gpu.DEVICE), **tensors}
        return Call(lambda: of.run(one, settings_here(), **made), lambda: made["out"][0])

    return Row(name, [Contender(OURS, alone)], reference=whole, sets=1, repeats=1, exact=True)


def _products() -> Iterator[Row]:
    w4a16 = W4A16Problem(COMPANY, 8192, 8192)

    def packed() -> dict[str, Any]:
        of = linears.product_of(w4a16, 0)
        return {**of._asdict(), "scales": of.scales.flatten()}

    yield company_row("W4A16", "sm90_gemm_w4a16", (w4a16, replace(w4a16, rows=1)), packed, ("x",))
    coded = GemmProblem(COMPANY, *linears.FP8_SHAPE, FP8_BLOCK.name, "float32")
    plain = GemmProblem(COMPANY, *linears.FP8_SHAPE, BF16.name)
    yield company_row(
        "FP8 128x128", "sm90_gemm_fp8_block", (coded, replace(coded, rows=1)),
        lambda: linears.scaled_of(coded, 0)._asdict(), ("a", "a_scales"),
    )  # fmt: skip
    yield company_row("BF16", "sm90_gemm_bf16", (plain, replace(plain, rows=1)), dict, ("a",))


def bits() -> Iterator[Row]:
    """Products, attention, scores and top-k."""
    yield from _products()
    for model in attention.ENTRIES:
        problem = attention.problem_of(model, "decode", attention.ENTRIES[model], COMPANY, 64)
        yield company_row(
            f"decoding, {model}", "sm90_sparse_attention", (problem, replace(problem, tokens=1)),
            partial(attention_bench.drawn, problem),
            ("q", "window_slots", "entries_slots"),
        )  # fmt: skip
    scores = indexer_bench.scores_problem(COMPANY, 8192, COMPANY, ("fp8", "float32"))
    yield company_row(
        "indexer scores", "sm90_indexer_scores", (scores, replace(scores, tokens=1)),
        lambda: indexer.scored(scores, 0),
        ("queries", "weights", "scales", "positions", "sequences"),
    )  # fmt: skip
    topk = TopkProblem(COMPANY, 8192, indexer.COUNT)
    yield company_row(
        "top-k", "simt_indexer_topk", (topk, replace(topk, rows=1)), dict, ("scores",)
    )
    yield Row("healthy captures, planted faults", [absent(OURS, ELSEWHERE)])
