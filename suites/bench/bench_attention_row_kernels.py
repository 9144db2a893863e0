"""Measure the row kernels of attention and mHC on a GPU beside a copy of as many bytes.

    python -m degarble.suites.bench.bench_attention_row_kernels [--tokens T] [--only NAME ...]

Arms: kv_write and kv_read in every entry format, qnorm_rope, inverse_rope, the parts of mHC and its
projection, pooling of the compressor with windows of 4 and of 128. Large ones are timed as in
bench_quantise_kernel: rotating cold buffers, in a graph, the copy in every round. Small ones are
nodes of a graph of 100, one token each, compared with 100 empty nodes of the same run. Results are
compared by suites/kernels, not here.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
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
from degarble.kernels.rows.mhc_problem import STREAMS, MixProblem, ProjectProblem, split_weight
from degarble.kernels.rows.problem import BackProblem, HeadsProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.suites.bench.bench_quantise_kernel import (
    Arm,
    Figure,
    captured,
    copy_arm,
    sets_for,
    table,
    timed,
)
from degarble.suites.bench.gpu import refused_here, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Launches = Callable[[int], Callable[[], object]]

SETTINGS = CompileSettings()
WANTED_SHARE = 0.8
WANTED_NODES = 2.5  # of an empty node
NODES = 100
POSITIONS = 1 << 16
ENTRIES_OF_PAGE = 64
OF_V32 = ("fp8-v32",)
HEADS = (64, 128)
WIDTHS = (4096, 7168)


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Draw numbers on the GPU."""
    return torch.randn(shape, device="cuda").to(dtype)


def pages_for(entry: str, tokens: int) -> Pages:
    """Return a cache with room for the tokens; V3.2's entries have rows of 576, keys of 128."""
    width = {KEY: KEY_WIDTH, **dict.fromkeys(OF_V32, rows.WITH_KEY)}.get(entry, rows.WIDTH)
    return Pages(entry, ENTRIES_OF_PAGE, -(-tokens // ENTRIES_OF_PAGE), width=width)


def cache_of(pages: Pages) -> Any:
    """Return pages of bytes that every format reads as numbers."""
    shape = (pages.count, pages.stride)
    return torch.randint(0x20, 0x50, shape, dtype=torch.uint8, device="cuda")


def write_launch(problem: WriteProblem, turns: Any, _number: int) -> Callable[[], object]:
    """Return a launch of kv_write on buffers of its own."""
    from degarble.kernels.cache import simt_kv_write as kernels  # noqa: PLC0415  needs the DSL

    tokens = problem.tokens
    operands = kernels.WriteOperands(
        on_gpu(tokens, problem.pages.width),
        on_gpu(min(problem.pages.width, rows.WIDTH)),
        turns,
        torch.randint(POSITIONS, (tokens,), device="cuda"),
        torch.randperm(problem.pages.slots, device="cuda")[:tokens],
    )
    cache = cache_of(problem.pages)
    return lambda: kernels.kv_write(operands, cache, problem, SETTINGS)


def read_launch(problem: ReadProblem, _number: int) -> Callable[[], object]:
    """Return a launch of kv_read on buffers of its own."""
    from degarble.kernels.cache import simt_kv_read as kernels  # noqa: PLC0415  needs the DSL

    indices = torch.randperm(problem.pages.slots, device="cuda")[: problem.count].int()
    cache, out = cache_of(problem.pages), on_gpu(problem.count, problem.pages.width)
    return lambda: kernels.kv_read(indices, cache, problem, SETTINGS, out=out)


def heads_launch(
    problem: HeadsProblem | BackProblem, turns: Any, _number: int
) -> Callable[[], object]:
    """Return a launch of qnorm_rope or inverse_rope on buffers of its own."""
    from degarble.kernels.rows import simt_inverse_rope, simt_qnorm_rope  # noqa: PLC0415  need the DSL

    heads = on_gpu(problem.tokens, problem.heads, rows.WIDTH)
    positions = torch.randint(POSITIONS, (problem.tokens,), device="cuda")
    if isinstance(problem, HeadsProblem):
        out = torch.empty_like(heads)
        return lambda: simt_qnorm_rope.qnorm_rope(
            heads, turns, positions, problem, SETTINGS, out=out
        )
    target = heads if problem.in_place else torch.empty_like(heads)
    return lambda: simt_inverse_rope.inverse_rope(
        heads, turns, positions, problem, SETTINGS, out=target
    )


def mix_launch(problem: MixProblem, _number: int) -> Callable[[], object]:
    """Return a launch of a part of mHC on buffers of its own."""
    from degarble.kernels.rows import simt_mhc as kernels  # noqa: PLC0415  needs the DSL

    kinds = kernels.wanted(problem)
    tensors = kernels.MixOperands(
        **{name: on_gpu(*shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    )
    if tensors.squares is not None:
        tensors.squares.abs_()
    return lambda: kernels.mhc(tensors, problem, SETTINGS)


def project_launch(problem: ProjectProblem, _number: int) -> Callable[[], object]:
    """Return a launch of mHC's projection on buffers of its own."""
    from degarble.kernels.rows import simt_mhc_project as kernels  # noqa: PLC0415  needs the DSL

    streams = on_gpu(problem.tokens, STREAMS, problem.width)
    split = split_weight(on_gpu(problem.products, problem.inner, dtype=torch.float32))
    out = kernels.empty_outputs(problem, streams.device)
    return lambda: kernels.mhc_project(streams, split, problem, SETTINGS, out=out)


def pool_launch(problem: PoolProblem, _number: int) -> Callable[[], object]:
    """Return a launch of pooling on buffers of its own: one sequence, one token closes its window.

    A single token comes last in its window, so that the rows before it are carried ones.
    """
    from degarble.kernels.cache import simt_compressor as kernels  # noqa: PLC0415  needs the DSL

    starts = [0 if problem.tokens > 1 else 2 * problem.ratio - 1]
    closing, owners = windows_of(starts, [problem.tokens], problem.ratio)
    of_row = 2 * problem.columns
    carried = kernels.Carried(
        on_gpu(problem.tokens, of_row, dtype=torch.float32),
        on_gpu(problem.ratio, problem.columns, dtype=torch.float32),
        on_gpu(1, problem.ring_rows, of_row, dtype=torch.float32),
    )
    pages = problem.windows // ENTRIES_OF_PAGE + 2
    told = (closing, owners, torch.tensor(starts))
    closing, owners, first = (tensor.cuda() for tensor in told)
    ends = torch.tensor([0, problem.tokens], dtype=torch.int32).cuda()
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    windows = kernels.Windows(closing, owners, first, ends, table.new_zeros(1), table)
    out = kernels.empty_entries(problem, torch.device("cuda"))
    return lambda: kernels.pool(
        carried, windows, problem, SETTINGS, page_entries=ENTRIES_OF_PAGE, out=out
    )


def paged_launch(problem: PagedPoolProblem, _number: int) -> Callable[[], object]:
    """Return a launch of keeping and pooling on buffers of its own: one sequence, from 0 on.

    A single token comes last in its window, so that the rows before it are in their pages.
    """
    from degarble.kernels.cache import simt_paged_pool as kernels  # noqa: PLC0415  needs the DSL

    pages, tokens = problem.pages, problem.tokens
    first = 0 if tokens > 1 else 2 * problem.ratio - 1
    at = torch.arange(first, first + tokens, device="cuda")
    entries = torch.where((at + 1) % problem.ratio == 0, at // problem.ratio, -1)
    operands = kernels.PagedOperands(
        on_gpu(tokens, 2 * problem.columns, dtype=torch.float32),
        on_gpu(problem.ratio, problem.columns, dtype=torch.float32),
        torch.zeros(tokens, dtype=torch.int32, device="cuda"), at, at,
        torch.arange(pages.count, dtype=torch.int32, device="cuda")[None], entries,
    )  # fmt: skip
    states = torch.zeros(pages.count, pages.stride, dtype=torch.uint8, device="cuda")
    out = kernels.empty_entries(problem, torch.device("cuda"))
    return lambda: kernels.paged_pool(operands, states, problem, SETTINGS, out=out)


def paged_arm(tokens: int, ratio: int, width: int) -> tuple[str, int, Launches]:
    """Return name, bytes and launches of pooling out of pages, as vLLM has them."""
    rows_of_page = {4: 4, 128: 8}[ratio]
    columns = PoolProblem(0, 0, 0, 1, ratio, width).columns
    count = (tokens + 2 * ratio) // rows_of_page + 1
    states = StatePages(rows_of_page, count, columns)
    problem = PagedPoolProblem(tokens, 1, ratio, states, width)
    moved = 16 * columns * tokens + tokens // ratio * 2 * width + 52 * tokens
    return f"paged pool {ratio}, {width}", moved, partial(paged_launch, problem)


def launches_of(tokens: int, turns: Any) -> list[tuple[str, int, Launches]]:
    """Return name, bytes and launches of every arm at so many tokens."""
    made: list[tuple[str, int, Launches]] = []
    for entry in (*ENTRIES, *OF_V32):
        pages = pages_for(entry, tokens)
        write, read = WriteProblem(tokens, pages, POSITIONS), ReadProblem(tokens, pages)
        made.append((f"kv_write {entry}", write.bytes_moved, partial(write_launch, write, turns)))
        made.append((f"kv_read {entry}", read.bytes_moved, partial(read_launch, read)))
    problems: list[HeadsProblem | BackProblem] = [
        *(HeadsProblem(tokens, heads, POSITIONS) for heads in HEADS),
        *(BackProblem(tokens, HEADS[0], POSITIONS, in_place) for in_place in (False, True)),
    ]
    for heads in problems:
        name = "qnorm_rope"
        if isinstance(heads, BackProblem):
            name = "inverse_rope" + " in place" * heads.in_place
        of_heads = partial(heads_launch, heads, turns)
        made.append((f"{name}, {heads.heads} heads", heads.bytes_moved, of_heads))
    for width in WIDTHS:
        for part in ("all", "coefficients", "collapse", "head", "post"):
            mix = MixProblem(tokens, width, part)
            made.append((f"mhc {part}, {width}", mix.bytes_moved, partial(mix_launch, mix)))
        project = ProjectProblem(tokens, width)
        of_project = partial(project_launch, project)
        made.append((f"mhc project, {width}", project.bytes_moved, of_project))
    for ratio in RATIOS:
        pool = PoolProblem(tokens, 1, max(1, tokens // ratio), 1, ratio)
        made.append((f"compressor {ratio}", pool.bytes_moved, partial(pool_launch, pool)))
    made += [paged_arm(tokens, *served) for served in ((4, 512), (4, 128), (128, 512))]
    write = WriteProblem(tokens, pages_for(KEY, tokens), POSITIONS)
    made.append((f"kv_write {KEY}", write.bytes_moved, partial(write_launch, write, turns)))
    return made


def chosen(
    made: list[tuple[str, int, Launches]], only: Sequence[str]
) -> list[tuple[str, int, Launches]]:
    """Keep the arms whose names begin so; all, where nothing is named."""
    return [each for each in made if not only or each[0].startswith(tuple(only))]


def large(arms_of: list[tuple[str, int, Launches]], tokens: int, rounds: int) -> dict[str, float]:
    """Time every arm beside a copy of as many bytes; return shares of its bandwidth."""
    shares = {}
    for name, bytes_moved, launch in arms_of:
        launches = [launch(number) for number in range(sets_for(bytes_moved))]
        arms = [copy_arm(bytes_moved), captured(name, bytes_moved, launches)]
        copy, figure = table(f"{name}, {tokens} tokens", arms, rounds)
        shares[name] = figure.share_of(copy)
        del launches, arms, copy, figure
        torch.cuda.empty_cache()
    return shares


def node_arm(name: str, launch: Callable[[], object]) -> Arm:
    """Capture a hundred launches in a graph."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NODES):
            launch()
    return Arm(name, 0, NODES, graph.replay, (launch,))


def small(arms_of: list[tuple[str, int, Launches]], rounds: int) -> list[Figure]:
    """Time nodes of one token, the first of them empty."""
    empty = partial(torch.cuda._sleep, 0)
    arms = [node_arm("empty node", empty)]
    arms += [node_arm(name, launch(0)) for name, _, launch in arms_of]
    return timed(arms, rounds)


def node_row(figure: Figure, empty: Figure) -> str:
    """One line of the table of nodes."""
    times = figure.median / empty.median
    return f"| {figure.arm.name} | {figure.median:.2f} | {times:.2f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME")
    settings = parser.parse_args(arguments)
    if status := refused_here():
        return status
    turns = on_gpu(POSITIONS, rows.TABLE_WIDTH, dtype=torch.float32)
    only = settings.only
    many = chosen(launches_of(settings.tokens, turns), only)
    shares = large(many, settings.tokens, settings.rounds)
    figures = small(chosen(launches_of(1, turns), only), settings.rounds)
    say("\n| node of one token | us | of an empty node |\n|---|---|---|")
    for figure in figures:
        say(node_row(figure, figures[0]))
    return verdict(shares, figures)


def verdict(shares: dict[str, float], figures: Sequence[Figure]) -> int:
    """Name what misses its target; return the exit status."""
    slow = {name: share for name, share in shares.items() if share < WANTED_SHARE}
    empty = figures[0].median
    long = {f.arm.name: f.median / empty for f in figures if f.median > WANTED_NODES * empty}
    for name, share in slow.items():
        say(f"{name}: {share:.3f} of copy bandwidth, wanted at least {WANTED_SHARE}")
    for name, times in long.items():
        say(f"{name}: {times:.2f} empty nodes, wanted at most {WANTED_NODES}")
    return int(bool(slow or long))


if __name__ == "__main__":
    sys.exit(main())
