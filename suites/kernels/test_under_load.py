"""Launches without a pause beside a busy stream: each has the bits that it has alone.

Two sets of operands alternate, so that a launch that reads what another one left, in memory or in a
place that is not yet free, gives other bits. A workspace is one for all launches, as in a model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from degarble.kernels.cache.problem import PagedPoolProblem, StatePages
from degarble.kernels.indexer.problem import TopkProblem
from degarble.kernels.moe.by_row_problem import ByRowProblem
from degarble.kernels.moe.problem import DECODED_TACTICS, MoeProblem
from degarble.suites.kernels import indexer_checks
from degarble.suites.kernels.attention import attention_checks
from degarble.suites.kernels.attention.contract import V32
from degarble.suites.kernels.cache import compressor_checks, paged_pool_checks
from degarble.suites.kernels.contract import SETTINGS, kernels_of
from degarble.suites.kernels.moe import by_row_checks, decoded_checks, moe_checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.suites.kernels.attention.attention_checks import Case
    from degarble.suites.kernels.indexer_checks import ScoresCase

pytestmark = pytest.mark.needs("cutlass")

SEEDS = (1, 2)
HELD = 200  # launches of a graph
BUSY = 60  # products of a neighbour during a graph
BITS = {2: torch.int16, 4: torch.int32}


class Loaded(NamedTuple):
    """Launches on two sets of operands, each into the output that it is given."""

    launches: tuple[Callable[[torch.Tensor], Any], ...]
    out: torch.Tensor


def differing(outs: torch.Tensor, wanted: torch.Tensor) -> int:
    """Return how many outputs [pairs, 2, ...] differ in a bit from those wanted [2, ...]."""
    bits = BITS[outs.element_size()]
    same = (outs.view(bits) == wanted.view(bits)).flatten(2).all(-1)
    return int((~same).sum())


def attention_of(case: Case) -> Loaded:
    """Attend with queries and keys of two seeds."""
    kernel = kernels_of("sm90_sparse_attention").KERNEL
    memory = attention_checks.memory_for(case, torch.device("cuda"))
    launches = []
    for seed in SEEDS:
        drawn = attention_checks.drawn(replace(case, seed=seed))
        given = attention_checks.operands_of(drawn) | memory
        launches.append(partial(_into, kernel.run, case.problem, given))
    return Loaded(tuple(launches), memory["out"])


def _into(run: Any, problem: Any, given: dict[str, Any], out: torch.Tensor) -> None:
    run(problem, SETTINGS, **given | {"out": out})


def experts_of(tactic: Any) -> Loaded:
    """Ask experts of two seeds, of which each token chooses others."""
    case = moe_checks.Case(MoeProblem(200, 512, 384, 16, 4, 16, 10.0), "skewed", 1, tactic)
    inputs = [moe_checks.given_of(replace(case, seed=seed)) for seed in SEEDS]
    memory = decoded_checks.poisoned(case, inputs[0])

    def launch(given: moe_checks.MoeInputs, out: torch.Tensor) -> None:
        decoded_checks.launch(case, given, memory | {"out": out})

    return Loaded(tuple(partial(launch, given) for given in inputs), memory["out"])


def one_token_of(hidden: int) -> Loaded:
    """Ask experts of one token by its rows, whose products quantise what they can."""
    moe = MoeProblem(1, hidden, 512, 16, 4, 16, 10.0)
    cases = [by_row_checks.Case(ByRowProblem(moe, shared=True), seed=seed) for seed in SEEDS]
    inputs = [by_row_checks.given_of(case) for case in cases]
    memory = by_row_checks.memory_of(cases[0], inputs[0])

    def launch(given: by_row_checks.Given, out: torch.Tensor) -> None:
        by_row_checks.launch_whole(cases[0], given, memory | {"out": out})

    return Loaded(tuple(partial(launch, given) for given in inputs), memory["out"])


def behind_tables(case: ScoresCase) -> Loaded:
    """Score keys in pages of a table that the launch in front writes: a guess is the one before."""
    problem, given = case.problem, indexer_checks.sides(case, "cuda").given
    kernel = kernels_of("sm90_indexer_scores").KERNEL
    rows, columns = given["table"].shape
    return _of_tables(
        (rows, problem.pages.count, columns), given["table"],
        lambda out: kernel.run(problem, SETTINGS, **given, out=out),
        torch.empty(problem.tokens, problem.entries, device="cuda"),
    )  # fmt: skip


def pool_of(ratio: int) -> Loaded:
    """Close a window whose pages are in a table that the launch in front writes."""
    case = compressor_checks.Case(ratio, 512, ((2 * ratio,),), seed=3)
    pages = StatePages(paged_pool_checks.ROWS[ratio], 40, case.columns)
    position = torch.tensor([2 * ratio - 1])
    table = torch.zeros(1, 2 * ratio // pages.rows, dtype=torch.int32)
    # The token's own slot is on the first page, which no table lists: ranks leave it out.
    tensors = (
        case.rows[0][:1], case.ape, torch.zeros(1, dtype=torch.int32), position,
        torch.zeros(1, dtype=torch.int64), table, torch.ones(1, dtype=torch.int64),
    )  # fmt: skip
    states = torch.randn(pages.count, pages.stride // 4).view(torch.uint8)
    call = paged_pool_checks.Call(PagedPoolProblem(1, 1, ratio, pages), tensors, states)
    kernel, given = kernels_of("simt_paged_pool").KERNEL, paged_pool_checks.operands_of(call)
    made = kernel.allocate(call.problem, torch.device("cuda"))
    pooled = made.pop("pooled")
    return _of_tables(
        (1, pages.count, table.shape[1]), given["table"],
        lambda out: kernel.run(call.problem, SETTINGS, **given, **made, pooled=out), pooled,
    )  # fmt: skip


def _of_tables(
    shape: tuple[int, int, int], table: torch.Tensor, launch: Callable[[Any], Any], out: Any
) -> Loaded:
    """Write a table by two rankings of all pages but the first, and launch behind it."""
    choice, problem = kernels_of("simt_indexer_topk").KERNEL, TopkProblem(*shape)
    generator = torch.Generator("cuda").manual_seed(4)
    ranks = torch.rand(2, *shape[:2], generator=generator, device="cuda")
    ranks[:, :, 0] = -1

    def behind(rank: torch.Tensor, out: torch.Tensor) -> None:
        choice.run(problem, SETTINGS, scores=rank, out=table)
        launch(out)

    return Loaded(tuple(partial(behind, rank) for rank in ranks), out)


V4 = attention_checks.Case(tokens=1, far=1024, heads=64)
# More items than thread blocks that run at a time: some go on to further ones.
PROMPT = replace(V4, tokens=140, far=200, heads=70, mode="prefill", entry="bf16", lengths=True)
OF_V32 = replace(V32, tokens=1, heads=64)
PROMPT_OF_V32 = replace(V32, tokens=140, heads=70, near=200, mode="prefill", entry="bf16")
ATTENTION = {  # launches in thousands, and a case
    **{f"V4, splits of few heads: {n}": (100, replace(V4, splits=n)) for n in (2, 3, 8, 9)},
    "V4, as many splits as it has": (100, replace(V4, tokens=3, heads=70, lengths=True)),
    **{f"V3.2, splits of few heads: {n}": (100, replace(OF_V32, splits=n)) for n in (2, 3, 16)},
    "V4, blocks that stay": (40, PROMPT),
    "V4, blocks that stay, of codes": (20, replace(PROMPT, entry="fp8")),
    "V3.2, blocks that stay": (40, PROMPT_OF_V32),
}
ONE_TOKEN = indexer_checks.ScoresCase("fp8", 64, (1024, 1024), (1, 1))
LOADS: dict[str, tuple[int, Callable[[], Loaded]]] = {
    **{name: (count, partial(attention_of, case)) for name, (count, case) in ATTENTION.items()},
    **{
        f"decoded experts, tiles of {tactic.rows}": (40, partial(experts_of, tactic))
        for tactic in DECODED_TACTICS
    },
    **{
        f"experts of one token, {hidden} columns": (100, partial(one_token_of, hidden))
        for hidden in (1024, 4352)
    },
    "scores behind a table": (100, partial(behind_tables, ONE_TOKEN)),
    **{f"pool of {ratio} behind a table": (100, partial(pool_of, ratio)) for ratio in (4, 128)},
}


def test_an_output_that_differs_is_counted() -> None:
    wanted = torch.randn(2, 3, 5).bfloat16()
    outs = wanted.repeat(4, 1, 1, 1)
    assert not differing(outs, wanted)
    outs[1, 0, 2, 4] = -outs[1, 0, 2, 4]
    outs[3, 1] = outs[3, 0].clone()
    assert differing(outs, wanted) == 2


@pytest.mark.h200
@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_launches_in_a_row_beside_a_busy_stream_have_the_bits_of_one_alone(name: str) -> None:
    thousands, make = LOADS[name]
    launches, out = make()
    alone = []
    for _ in range(2):  # the second time in memory that the first one left
        for launch in launches:
            out.fill_(torch.nan)
            torch.cuda.synchronize()
            launch(out)
            torch.cuda.synchronize()
            alone.append(out.clone())
    wanted = torch.stack(alone[:2])
    assert not differing(torch.stack(alone[2:])[None], wanted)
    assert differing(wanted.flip(0)[None], wanted) == 2, "each set has outputs of its own"
    outs = torch.empty(HELD // 2, *wanted.shape, dtype=out.dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pair in outs:
            for launch, made in zip(launches, pair, strict=True):
                launch(made)
    neighbour, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").bfloat16()
    for _ in range(thousands * 1000 // HELD):
        outs.fill_(torch.nan)
        with torch.cuda.stream(neighbour):
            for _ in range(BUSY):
                busy @ busy
        graph.replay()
        assert not differing(outs, wanted)
    torch.cuda.synchronize()
