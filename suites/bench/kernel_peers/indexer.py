"""FP8 scores of the indexer against DeepGEMM, top-2048 against vLLM's kernels, quack and torch."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.indexer.problem import TopkProblem
from degarble.suites.bench import indexer as bench
from degarble.suites.bench.gpu import floats, normal
from degarble.suites.bench.kernel_peers import operands, vendors
from degarble.suites.bench.kernel_peers.contest import Call, Contender, Row, absent, of_best
from degarble.suites.bench.runner import copy_arm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.kernels.indexer.problem import ScoresProblem

    Drawn = dict[str, Any]

PREFILLS = ((2048, 16_384), (4096, 8192), (2048, 65_536))  # tokens, entries
DECODES = ((1, 8192), (1, 65_536), (16, 32_768), (64, 8192), (64, 32_768), (128, 8192))
WIDTH = 128
DEEP_GEMM = "DeepGEMM"


def scored(problem: ScoresProblem, number: int) -> Drawn:
    """Return all operands of a call in which every token sees all of its sequence."""
    fp8, by_head = torch.float8_e4m3fn, (problem.tokens, problem.heads)
    return {
        **bench.scored(problem, number),
        "queries": normal(*by_head, WIDTH, dtype=fp8),
        "weights": floats(*by_head), "scales": floats(*by_head).abs(),
    }  # fmt: skip


def keys_of(problem: ScoresProblem, given: Drawn, sequence: int) -> tuple[Tensor, Tensor]:
    """Return a sequence's keys [W, 128] and their scales [W] in order."""
    pages, held = given["pages"][given["table"][sequence].long()], bench.PAGE * WIDTH
    keys = pages[:, :held].reshape(-1, WIDTH).contiguous().view(torch.float8_e4m3fn)
    scales = pages[:, held : held + 4 * bench.PAGE].contiguous().view(torch.float32)
    return keys[: problem.entries], scales.flatten()[: problem.entries]


def reference(problem: ScoresProblem, given: Drawn) -> Tensor:
    made = []
    for token in operands.sample(problem.tokens):
        keys, scales = keys_of(problem, given, int(given["sequences"][token]))
        near = (given["queries"][token].double() @ keys.double().T).clamp(min=0)
        factor = given["weights"][token].double() * given["scales"][token].double()
        made.append((factor @ near) * scales.double())
    return torch.stack(made)


def folded(given: Drawn) -> Tensor:
    """Return weights with the scales of queries, as DeepGEMM takes them."""
    made: Tensor = given["weights"] * given["scales"]
    return made


def prefill_by_deep_gemm(problem: ScoresProblem, given: Drawn) -> Call:
    home, made = vendors.deep_gemm(), list[Any]()
    keys, weights = keys_of(problem, given, 0), folded(given)
    first = torch.zeros(problem.tokens, dtype=torch.int32, device=weights.device)
    last, some = first + problem.entries, operands.sample(problem.tokens)

    def run() -> None:
        made[:] = [
            home.fp8_fp4_mqa_logits(
                (given["queries"], None), keys, weights, first, last, clean_logits=False
            )
        ]

    return Call(run, lambda: made[0][some, : problem.entries])


def decode_by_deep_gemm(problem: ScoresProblem, given: Drawn) -> Call:
    """Sequences of one token each; the schedule is made once, as vLLM makes it once a step."""
    home, made, pages = vendors.deep_gemm(), list[Any](), given["pages"]
    held, weights = bench.PAGE * (WIDTH + 4), folded(given)
    keys = pages[:, :held].view(len(pages), bench.PAGE, 1, WIDTH + 4)
    lengths = torch.full((problem.tokens, 1), problem.entries, dtype=torch.int32,
                         device=pages.device)  # fmt: skip
    schedule = home.get_paged_mqa_logits_metadata(
        lengths, bench.PAGE, vendors.processors(pages.device)
    )
    queries, some = given["queries"].unsqueeze(1), operands.sample(problem.tokens)

    def run() -> None:
        made[:] = [
            home.fp8_fp4_paged_mqa_logits(
                (queries, None), keys, weights, lengths, given["table"], schedule,
                problem.entries, clean_logits=False,
            )
        ]  # fmt: skip

    return Call(run, lambda: made[0][some, : problem.entries])


def scores_row(name: str, problem: ScoresProblem, theirs: Callable[..., Call]) -> Row:
    shared, some = cache(partial(scored, problem)), operands.sample(problem.tokens)
    return Row(
        name,
        [
            operands.ours("sm90_indexer_scores", problem, shared,
                          lambda tensors: tensors["out"][some]),
            Contender(DEEP_GEMM, lambda number: theirs(problem, shared(number))),
        ],
        problem.bytes_moved, problem.operations, lambda: reference(problem, shared(0)),
        [of_best(1.05)], ceilings=[copy_arm(problem.bytes_moved)],
    )  # fmt: skip


def scores() -> Iterator[Row]:
    for tokens, entries in PREFILLS:
        problem = bench.scores_problem(tokens, entries, 1, ("fp8", "float32"))
        name = f"prefill, {tokens:,} tokens, {entries:,} entries"
        yield scores_row(name, problem, prefill_by_deep_gemm)
    for batch, entries in DECODES:
        problem = bench.scores_problem(batch, entries, batch, ("fp8", "float32"))
        name = f"decode, batch {batch}, {entries:,} entries"
        yield scores_row(name, problem, decode_by_deep_gemm)


# ---- top-k ---------------------------------------------------------------------------------------

COUNT = 2048
TOPK_ROWS, LENGTHS = (1, 16, 64, 4096), (8192, 32_768, 131_072)
COOPERATIVE_ROWS = 32  # vllm/model_executor/layers/sparse_attn_indexer.py
QUACK_LIMITS = "quack 0.6.5 takes at most 4,096 entries and chooses at most 128 (quack/topk.py)"


def falling(scores: Tensor) -> Tensor:
    made: Tensor = scores.sort(descending=True).values
    return made


def on_scores(
    choose: Callable[[Tensor], Call], shared: Callable[[int], Tensor], number: int
) -> Call:
    return choose(shared(number))


def chosen_call(scores: Tensor, choose: Callable[[Tensor], object]) -> Call:
    """Choose; the result is the chosen scores in falling order, which every order of ties gives."""
    shape, some = (len(scores), COUNT), operands.sample(len(scores))
    out = torch.empty(shape, dtype=torch.int32, device=scores.device)

    def result() -> Tensor:
        return falling(scores[some].gather(1, out[some].long()))

    return Call(lambda: choose(out), result)


def by_decode_kernel(scores: Tensor) -> Call:
    lengths = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    choose = vendors.common().top_k_per_row_decode
    told = len(scores), *scores.stride(), COUNT
    return chosen_call(scores, lambda out: choose(scores, 1, lengths, out, *told))


def by_prefill_kernel(scores: Tensor) -> Call:
    first = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
    last, choose = first + scores.shape[1], vendors.common().top_k_per_row_prefill
    told = len(scores), *scores.stride(), COUNT
    return chosen_call(scores, lambda out: choose(scores, first, last, out, *told))


def by_workspace_kernel(name: str, scores: Tensor) -> Call:
    """vLLM's persistent and cooperative kernels, which share a signature."""
    lengths = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    work = torch.zeros(vendors.TOPK_WORKSPACE, dtype=torch.uint8, device=scores.device)
    choose = getattr(vendors.common(), name)
    return chosen_call(
        scores, lambda out: choose(scores, lengths, out, work, COUNT, scores.shape[1])
    )


def by_torch(scores: Tensor) -> Call:
    found: list[Any] = []

    def run() -> None:
        found[:] = [torch.topk(scores, COUNT, sorted=False)]

    some = operands.sample(len(scores))
    return Call(run, lambda: falling(found[0].values[some]))


TOPK_PEERS: dict[str, Callable[[Tensor], Call]] = {
    "vLLM decode": by_decode_kernel,
    "vLLM prefill": by_prefill_kernel,
    "vLLM persistent": partial(by_workspace_kernel, "persistent_topk"),
    "vLLM cooperative": partial(by_workspace_kernel, "cooperative_topk"),
    "torch.topk": by_torch,
}


def topk_row(problem: TopkProblem) -> Row:
    shared = cache(lambda _number: floats(problem.rows, problem.entries))
    some = operands.sample(problem.rows)

    def result(tensors: Any) -> Tensor:
        return falling(tensors["scores"][some].gather(1, tensors["out"][some].long()))

    def wanted() -> Tensor:
        return falling(shared(0)[some].double())[:, :COUNT]

    peers = [
        Contender(name, partial(on_scores, make, shared))
        for name, make in TOPK_PEERS.items()
        if name != "vLLM cooperative" or problem.rows <= COOPERATIVE_ROWS
    ]  # fmt: skip
    if problem.rows > COOPERATIVE_ROWS:
        why = f"vLLM calls it for at most {COOPERATIVE_ROWS} rows"
        peers.append(absent("vLLM cooperative", why))
    kernel = operands.ours(
        "simt_indexer_topk", problem, lambda number: {"scores": shared(number)}, result
    )
    return Row(
        f"{problem.rows:,} rows, {problem.entries:,} entries",
        [kernel, *peers, absent("quack", QUACK_LIMITS)], problem.bytes_moved, 0, wanted,
        [of_best(1.05)], ceilings=[copy_arm(problem.bytes_moved)],
    )  # fmt: skip


def topk() -> Iterator[Row]:
    for entries in LENGTHS:
        for rows in TOPK_ROWS:
            yield topk_row(TopkProblem(rows, entries, COUNT))
