"""Kernels of attention's rows, of the cache and of mHC: shares of a copy, and nodes of a graph."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.cache.problem import (
    RATIOS,
    PagedPoolProblem,
    PoolProblem,
    StatePages,
    windows_of,
)
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import (
    ENTRIES,
    KEY,
    KEY_WIDTH,
    Pages,
    ReadProblem,
    WriteProblem,
)
from degarble.kernels.rows.mhc_problem import STREAMS, MhcMixProblem, ProjectProblem, split_weight
from degarble.kernels.rows.problem import InverseRopeProblem, QNormRopeProblem
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import floats, integers, kernel_arm, normal, octets
from degarble.suites.bench.runner import (
    MEGABYTES,
    TERABYTES,
    US,
    Arm,
    Bench,
    Claim,
    Comparison,
    Reading,
    copy_arm,
    share_of,
    time_over,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

WANTED_SHARE = 0.8
WANTED_NODES = 2.5  # of an empty node
NODES = 100
EMPTY = "empty node"
POSITIONS = 1 << 16
ENTRIES_OF_PAGE = 64
OF_V32 = ("fp8-v32",)
HEADS = (64, 128)
WIDTHS = (4096, 7168)


@cache
def turns_on(_device: str) -> Any:
    """The table of rotations, which all arms share."""
    return floats(POSITIONS, rows.TABLE_WIDTH)


def rotation(tokens: int) -> dict[str, Any]:
    return {"turns": turns_on(gpu.DEVICE), "positions": integers(0, POSITIONS, (tokens,))}


def pages_for(entry: str, tokens: int) -> Pages:
    """Return a cache with room for the tokens; V3.2's entries have rows of 576, keys of 128."""
    width = {KEY: KEY_WIDTH, **dict.fromkeys(OF_V32, rows.WITH_KEY)}.get(entry, rows.WIDTH)
    return Pages(entry, ENTRIES_OF_PAGE, -(-tokens // ENTRIES_OF_PAGE), width=width)


def cache_of(pages: Pages) -> Any:
    return octets(pages.count, pages.stride)


def written(problem: WriteProblem, _number: int) -> dict[str, Any]:
    slots = torch.randperm(problem.pages.slots, device=gpu.DEVICE)[: problem.tokens]
    return rotation(problem.tokens) | {"slots": slots, "cache": cache_of(problem.pages)}


def read(problem: ReadProblem, _number: int) -> dict[str, Any]:
    slots = torch.randperm(problem.pages.slots, device=gpu.DEVICE)[: problem.count]
    return {"indices": slots.int(), "cache": cache_of(problem.pages)}


def headed(problem: QNormRopeProblem | InverseRopeProblem, _number: int) -> dict[str, Any]:
    heads = normal(problem.tokens, problem.heads, rows.WIDTH)
    in_place = {"out": heads} if getattr(problem, "in_place", False) else {}
    return rotation(problem.tokens) | {"heads": heads} | in_place


def mixed(problem: MhcMixProblem, _number: int) -> dict[str, Any]:
    kinds = gpu.module("simt_mhc").wanted(problem)
    made = {name: normal(*shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    if "squares" in made:
        made["squares"].abs_()
    return made


def projected(problem: ProjectProblem, _number: int) -> dict[str, Any]:
    return {
        "streams": normal(problem.tokens, STREAMS, problem.width),
        "split": split_weight(floats(problem.products, problem.inner)),
    }


def pooled(problem: PoolProblem, _number: int) -> dict[str, Any]:
    """One sequence. A single token comes last in its window: the rows before it are carried."""
    starts = [0 if problem.tokens > 1 else 2 * problem.ratio - 1]
    closing, owners = windows_of(starts, [problem.tokens], problem.ratio)
    fields = {
        "closing": closing, "owners": owners, "starts": torch.tensor(starts),
        "offsets": torch.tensor([0, problem.tokens], dtype=torch.int32),
        "ring_of": torch.zeros(1, dtype=torch.int32),
        "table": torch.arange(problem.windows // ENTRIES_OF_PAGE + 2, dtype=torch.int32)[None],
    }  # fmt: skip
    return {name: tensor.to(gpu.DEVICE) for name, tensor in fields.items()}


def paged(problem: PagedPoolProblem, _number: int) -> dict[str, Any]:
    """One sequence. A single token comes last in its window: the rows before it are in pages."""
    pages, tokens = problem.pages, problem.tokens
    first = 0 if tokens > 1 else 2 * problem.ratio - 1
    at = torch.arange(first, first + tokens)
    fields = {
        "requests": torch.zeros(tokens, dtype=torch.int32), "positions": at, "slots": at,
        "table": torch.arange(pages.count, dtype=torch.int32)[None],
        "entries": torch.where((at + 1) % problem.ratio == 0, at // problem.ratio, -1),
        "states": torch.zeros(pages.count, pages.stride, dtype=torch.uint8),
    }  # fmt: skip
    return {name: tensor.to(gpu.DEVICE) for name, tensor in fields.items()}


# The rows of both tables: a kernel, how its integers are drawn, and its problems at some tokens.


def _writes(tokens: int) -> Iterator[tuple[str, Any]]:
    for entry in (*ENTRIES, *OF_V32, KEY):
        yield f"kv_write {entry}", WriteProblem(tokens, pages_for(entry, tokens), POSITIONS)


def _reads(tokens: int) -> Iterator[tuple[str, Any]]:
    for entry in (*ENTRIES, *OF_V32):
        yield f"kv_read {entry}", ReadProblem(tokens, pages_for(entry, tokens))


def _heads(tokens: int) -> Iterator[tuple[str, Any]]:
    for heads in HEADS:
        yield f"qnorm_rope, {heads} heads", QNormRopeProblem(tokens, heads, POSITIONS)


def _back(tokens: int) -> Iterator[tuple[str, Any]]:
    for place in ("", " in place"):
        problem = InverseRopeProblem(tokens, HEADS[0], POSITIONS, bool(place))
        yield f"inverse_rope{place}, {HEADS[0]} heads", problem


def _mixes(tokens: int) -> Iterator[tuple[str, Any]]:
    for width in WIDTHS:
        for part in ("all", "coefficients", "collapse", "head", "post"):
            yield f"mhc {part}, {width}", MhcMixProblem(tokens, width, part)


def _projections(tokens: int) -> Iterator[tuple[str, Any]]:
    for width in WIDTHS:
        yield f"mhc project, {width}", ProjectProblem(tokens, width)


def _pools(tokens: int) -> Iterator[tuple[str, Any]]:
    for ratio in RATIOS:
        windows = max(1, tokens // ratio)
        problem = PoolProblem(tokens, 1, windows, 1, ratio, page_entries=ENTRIES_OF_PAGE)
        yield f"compressor {ratio}", problem


def _paged_pools(tokens: int) -> Iterator[tuple[str, Any]]:
    """Pooling out of pages, as vLLM has them."""
    for ratio, width in ((4, 512), (4, 128), (128, 512)):
        rows_of_page = {4: 4, 128: 8}[ratio]
        columns = PoolProblem(0, 0, 0, 1, ratio, width).columns
        states = StatePages(rows_of_page, (tokens + 2 * ratio) // rows_of_page + 1, columns)
        name = f"paged pool {ratio}, {width}"
        yield name, PagedPoolProblem(tokens, 1, ratio, states, width)


def bytes_of(problem: Any) -> int:
    if not isinstance(problem, PagedPoolProblem):
        moved: int = problem.bytes_moved
        return moved
    tokens, width = problem.tokens, problem.width
    return 16 * problem.pages.columns * tokens + tokens // problem.ratio * 2 * width + 52 * tokens


KERNELS: tuple[tuple[str, Callable[..., Mapping[str, Any]], Callable[..., Any]], ...] = (
    ("simt_kv_write", written, _writes),
    ("simt_kv_read", read, _reads),
    ("simt_qnorm_rope", headed, _heads),
    ("simt_inverse_rope", headed, _back),
    ("simt_mhc", mixed, _mixes),
    ("simt_mhc_project", projected, _projections),
    ("simt_compressor", pooled, _pools),
    ("simt_paged_pool", paged, _paged_pools),
)  # fmt: skip


def arms_of(tokens: int, **told: Any) -> list[Arm]:
    """Return every arm at so many tokens."""
    return [
        kernel_arm(
            name, kernel, problem, partial(given, problem),
            moved=bytes_of(problem), **told,
        )
        for kernel, given, problems in KERNELS
        for name, problem in problems(tokens)
    ]  # fmt: skip


def of_empty(reading: Reading) -> float:
    return reading.median / reading.beside[EMPTY].median


def cache_rows(options: Any) -> Iterator[Comparison]:
    """Many tokens beside a copy; one token as nodes of a graph beside empty nodes."""
    arms = arms_of(options.tokens)
    yield Comparison(
        f"{options.tokens} tokens",
        [(copy_arm(arm.moved), arm) for arm in arms],
        (MEGABYTES, US, TERABYTES, share_of()),
        [
            Claim(f"{arm.name}, share of copy", arm.name, Reading.share_of, WANTED_SHARE)
            for arm in arms
        ],
    )
    empty = Arm(
        EMPTY, lambda _: partial(torch.cuda._sleep, 0), baseline=True, sets=1, repeats=NODES
    )
    nodes = arms_of(1, sets=1, repeats=NODES)
    yield Comparison(
        "nodes of one token",
        [(empty, *nodes)],
        (US, time_over(EMPTY, "of an empty node")),
        [
            Claim(f"{arm.name}, of an empty node", arm.name, of_empty, WANTED_NODES, False)
            for arm in nodes
        ],
    )  # fmt: skip


BENCHES = {
    "cache-rows": Bench(
        "kernels of attention's rows, caches and mHC beside copies and empty nodes",
        cache_rows, rounds=30, needs="gpu", options={"tokens": 8192},
    ),
}  # fmt: skip
