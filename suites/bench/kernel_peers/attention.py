"""Sparse attention against FlashMLA: decoding from FP8 entries, and prefill from BF16 ones.

Both read the same bytes of a cache: fp8 and fp8-v32 entries are FlashMLA's. FlashMLA takes 64 or
128 heads, so fewer are filled up before it is timed. Its schedule is made once, as vLLM makes it
once a step for all layers of a type.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.graph.matrices import MMA_ROWS, VERY_FEW_ROWS
from degarble.harness.cli.values import settings_here
from degarble.kernels.attention.problem import few_token_splits
from degarble.kernels.primitives.kv_problem import WIDTH
from degarble.suites.bench import attention as bench
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import empty
from degarble.suites.bench.kernel_peers import operands, vendors
from degarble.suites.bench.kernel_peers.contest import (
    OURS,
    Call,
    Contender,
    Goal,
    Outcome,
    Row,
    of_best,
)
from degarble.suites.bench.runner import sets_for
from degarble.suites.kernels import cache_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.kernels.attention.problem import AttentionProblem
    from degarble.kernels.primitives.kv_problem import Pages

    Drawn = dict[str, Any]

BATCHES = (1, 16, 64, 128)
HEADS = {"V3.2": (128, 64, 16), "V4": (128, 64, 16)}
PREFILL_HEADS = {"V3.2": (128, 64, 16), "V4": (128, 64)}
TOKENS = 4096
PADDED = 64  # heads that FlashMLA takes at least
FLASH_MLA, TOKENSPEED, FROM_FP8 = "FlashMLA", "tokenspeed-flashmla", "degarble from FP8"
ENTRIES = {"V3.2": "fp8-v32", "V4": "fp8"}


def problem_of(model: str, mode: str, entry: str, count: int, heads: int) -> AttentionProblem:
    if model == "V3.2":
        return bench.latent(mode, entry, count, heads)
    return (bench.prefill if mode == "prefill" else bench.decode)(entry, count, heads)


def result_rows(tokens: int, tensors: Drawn) -> Tensor:
    made: Tensor = tensors["out"][operands.sample(tokens)]
    return made


# ---- the definition ------------------------------------------------------------------------------


def entry_rows(cache_NB: Tensor, slots: Tensor, pages: Pages) -> Tensor:
    """Return the rows of slots in float64."""
    entry, page, within = pages.format, slots // pages.entries, slots % pages.entries
    of_values = torch.arange(entry.step, device=slots.device)
    values = cache_NB[page[:, None], within[:, None] * entry.step + of_values]
    if entry.inside:
        scales = values[:, :0]
    else:
        first = pages.entries * entry.value_bytes
        at = torch.arange(entry.scale_bytes, device=slots.device)
        scales = cache_NB[page[:, None], first + within[:, None] * entry.scale_bytes + at]
    return cache_checks.decoded(values.cpu(), scales.cpu(), entry).to(slots.device).double()


def reference(problem: AttentionProblem, given: Drawn) -> Tensor:
    """Attend in float64, a sampled token at a time."""
    made, pages = [], [key_list.pages for key_list in problem.lists]
    for token in operands.sample(problem.tokens):
        keys = torch.cat(
            [
                entry_rows(cache_NB, slots[token].long(), of)
                for (slots, cache_NB), of in zip(bench.lists_of(given), pages, strict=True)
            ]
        )
        logits = given["q"][token].double() @ keys.T * problem.scale
        if "sink" in given:
            logits = torch.cat((logits, given["sink"].double()[:, None]), 1)
        shares = torch.softmax(logits, -1)[:, : len(keys)]
        made.append(shares @ keys[:, :WIDTH])
    return torch.stack(made)


# ---- FlashMLA ------------------------------------------------------------------------------------


def padded(given: Drawn) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Return queries and sinks of as many heads as FlashMLA takes, and how ours are cut out."""
    q, sink = given["q"], given.get("sink")
    heads = q.shape[1]
    if heads >= PADDED:
        return q, sink, lambda out: out
    more = PADDED - heads
    q = torch.nn.functional.pad(q, (0, 0, 0, more)).contiguous()
    sink = None if sink is None else torch.nn.functional.pad(sink, (0, more))
    return q, sink, lambda out: out[:, :heads]


def as_pages(cache_NB: Tensor, pages: Pages) -> Tensor:
    """Return a cache as FlashMLA takes it: [pages, entries, 1, bytes of an entry]."""
    size, entries = pages.format.entry_bytes, pages.entries
    return cache_NB[:, : entries * size].view(len(cache_NB), entries, size).unsqueeze(2)


def decoding(problem: AttentionProblem, given: Drawn) -> tuple[list[Any], list[Any]]:
    """Return pages and indices of one or two lists."""
    lists = bench.lists_of(given)
    caches = [
        as_pages(cache_NB, of.pages) for (_, cache_NB), of in zip(lists, problem.lists, strict=True)
    ]
    indices = [slots.unsqueeze(1) for slots, _ in lists]
    return [*caches, None][:2], [*indices, None][:2]


def decode_by_vllm(problem: AttentionProblem, given: Drawn) -> Call:
    q, sink, ours_of = padded(given)
    caches, indices = decoding(problem, given)
    q, out = q.unsqueeze(1), empty(len(q), 1, q.shape[1], WIDTH)
    attend = vendors.flash_mla().sparse_decode_fwd
    schedule: list[Any] = [None, None]  # made by the first call, on the device

    def run() -> None:
        _, _, *made = attend(
            q, caches[0], indices[0], None, sink, *schedule, caches[1], indices[1], None, WIDTH,
            problem.scale, out,
        )  # fmt: skip
        schedule[:] = made

    some = operands.sample(problem.tokens)
    return Call(run, lambda: ours_of(out[some, 0]))


def decode_by_tokenspeed(problem: AttentionProblem, given: Drawn) -> Call:
    home = vendors.module("flash_mla")
    q, sink, ours_of = padded(given)
    caches, indices = decoding(problem, given)
    schedule, _ = home.get_mla_metadata()
    q, made = q.unsqueeze(1), list[Any]()

    def run() -> None:
        made[:] = home.flash_mla_with_kvcache(
            q, caches[0], None, None, WIDTH, schedule, softmax_scale=problem.scale,
            is_fp8_kvcache=True, indices=indices[0], attn_sink=sink, extra_k_cache=caches[1],
            extra_indices_in_kvcache=indices[1],
        )  # fmt: skip

    some = operands.sample(problem.tokens)
    return Call(run, lambda: ours_of(made[0][some, 0]))


def joined(given: Drawn) -> tuple[Tensor, Tensor]:
    """Return BF16 rows of all caches [S, 1, L], and indices [T, 1, K] into them."""
    rows, indices, first = [], [], 0
    for slots, cache_NB in bench.lists_of(given):
        of = cache_NB.view(torch.bfloat16).reshape(-1, given["q"].shape[-1])
        rows.append(of)
        indices.append(slots + first)
        first += len(of)
    return torch.cat(rows).unsqueeze(1), torch.cat(indices, 1).unsqueeze(1)


def prefill_by_vllm(problem: AttentionProblem, given: Drawn) -> Call:
    q, sink, ours_of = padded(given)
    (rows, indices), out = joined(given), empty(len(q), q.shape[1], WIDTH)
    attend, some = vendors.flash_mla().sparse_prefill_fwd, operands.sample(problem.tokens)

    def run() -> None:
        attend(q, rows, indices, problem.scale, WIDTH, sink, None, out)

    return Call(run, lambda: ours_of(out[some]))


def prefill_by_tokenspeed(problem: AttentionProblem, given: Drawn) -> Call:
    home = vendors.module("flash_mla")
    q, sink, ours_of = padded(given)
    (rows, indices), made = joined(given), list[Any]()

    def run() -> None:
        made[:] = home.flash_mla_sparse_fwd(q, rows, indices, problem.scale, WIDTH, sink)

    some = operands.sample(problem.tokens)
    return Call(run, lambda: ours_of(made[0][some]))


# ---- rows ----------------------------------------------------------------------------------------


def of_other(name: str, wanted: float) -> Goal:
    """Hold our form from FP8 against ours from BF16."""

    def value(of: Outcome) -> float:
        return of.readings[name].times(OURS)

    return Goal("from FP8, of ours from BF16", value, wanted, name)


def on_drawn(
    call: Callable[[AttentionProblem, Drawn], Call],
    problem: AttentionProblem,
    shared: Callable[[int], Drawn],
    number: int,
) -> Call:
    return call(problem, shared(number))


def row(name: str, problem: AttentionProblem, peers: dict[str, Any], *more: Contender) -> Row:
    shared = cache(lambda _number: bench.drawn(problem))
    of = [
        Contender(peer, partial(on_drawn, call, problem, shared))
        for peer, call in peers.items()
    ]  # fmt: skip
    kernel = operands.ours(
        "sm90_sparse_attention", problem, shared, partial(result_rows, problem.tokens)
    )
    goals = [of_best(1.05), *(of_other(each.name, 0.95) for each in more)]
    return Row(
        name, [kernel, *of, *more], problem.gathered_bytes, problem.operations,
        lambda: reference(problem, shared(0)), goals,
        sets=min(8, sets_for(problem.gathered_bytes)),
    )  # fmt: skip


def decode() -> Iterator[Row]:
    """Every model, number of heads and batch."""
    peers = {FLASH_MLA: decode_by_vllm, TOKENSPEED: decode_by_tokenspeed}
    for model, several in HEADS.items():
        for heads in several:
            for batch in BATCHES:
                problem = problem_of(model, "decode", ENTRIES[model], batch, heads)
                if batch <= MMA_ROWS:
                    few = batch <= VERY_FEW_ROWS
                    splits = few_token_splits(problem.lists, heads, most=few)
                    problem = replace(problem, splits=splits)
                yield row(f"{model}, {heads} heads, batch {batch}", problem, peers)


def from_fp8(problem: AttentionProblem) -> Contender:
    """Our prefill out of FP8 entries; its numbers are of other entries, so bits alone count."""

    def make(_number: int) -> Call:
        of, given = gpu.module("sm90_sparse_attention").KERNEL, bench.drawn(problem)
        given |= of.allocate(problem, given["q"].device)
        return Call(partial(of.run, problem, settings_here(), **given))

    return Contender(FROM_FP8, make)


def prefill() -> Iterator[Row]:
    peers = {FLASH_MLA: prefill_by_vllm, TOKENSPEED: prefill_by_tokenspeed}
    for model, several in PREFILL_HEADS.items():
        for heads in several:
            problem = problem_of(model, "prefill", "bf16", TOKENS, heads)
            coded = problem_of(model, "prefill", ENTRIES[model], TOKENS, heads)
            name = f"{model}, {heads} heads, {TOKENS:,} tokens"
            yield row(name, problem, peers, from_fp8(coded))
