"""Sparse attention on a Hopper GPU beside Triton and torch: a script that prints two tables.

    python -m degarble.suites.bench.bench_sparse_attention [--tokens T] [--batch B] [--rounds N]

Prefill of T tokens over a window of 128 and 1024 entries of a prompt, decoding of B sequences with
a cache each, 64 and 128 heads, every entry format. A torch version gathers rows of a BF16 cache and
multiplies in BF16. A Triton version does so in one kernel; it is left out, with the reason, if
Triton is missing or its numbers are not torch's. Arms are timed as in bench_quantise_kernel:
rotating cold buffers, in a graph, in turns within a round, with a copy of as many bytes as the
chosen entries. Numbers of the kernels are compared by suites/kernels, not here.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import Pages
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.suites.bench.bench_quantise_kernel import (
    Arm,
    Figure,
    captured,
    copy_arm,
    sets_for,
    timed,
)
from degarble.suites.bench.gpu import refused_here, say
from degarble.suites.bench.timing import quartiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

SETTINGS = CompileSettings()
WINDOW, CHOSEN = 128, 1024  # DeepSeek-V4-Pro config.json, sliding_window and index_topk
RATIO = 4
ENTRIES_OF_PAGE = 64
CONTEXT = 8192  # tokens of a sequence that is decoded
HEADS = (64, 128)
WANTED_PREFILL, WANTED_DECODE = 450, 350  # TFLOP/s
ROUNDINGS = 0.02  # shares and outputs of order 1 in BF16, rounded beside other peaks
WANTED_SHARE = 0.7  # of copy bandwidth, decoding


@dataclass(frozen=True)
class Row:
    """What an arm took, beside a copy in the same rounds."""

    figure: Figure
    problem: AttentionProblem

    @property
    def teraflops(self) -> float:
        """Operations a second over the median, in 10**12."""
        return self.problem.operations / self.figure.median * 1e-6

    def line(self, copy: Figure) -> str:
        """One line of the table."""
        first, third = quartiles(self.figure.microseconds)
        return (
            f"| {self.figure.arm.name} | {self.figure.median:.1f} [{first:.1f}, {third:.1f}] | "
            f"{self.teraflops:.0f} | {self.figure.share_of(copy):.2f} |"
        )


def pages_for(entry: str, slots: int) -> Pages:
    """Return a cache with room for so many slots."""
    return Pages(entry, ENTRIES_OF_PAGE, -(-slots // ENTRIES_OF_PAGE))


def prefill(entry: str, tokens: int, heads: int) -> AttentionProblem:
    """Tokens of one prompt share its window rows and its entries."""
    near, far = (
        pages_for(entry, max(slots, least))
        for slots, least in ((tokens, WINDOW), (tokens // RATIO, CHOSEN))
    )
    return AttentionProblem(tokens, heads, KeyList(WINDOW, near), KeyList(CHOSEN, far), "prefill")


def decode(entry: str, batch: int, heads: int) -> AttentionProblem:
    """Every token has a sequence of its own."""
    near, far = (pages_for(entry, batch * slots) for slots in (WINDOW, CONTEXT // RATIO))
    return AttentionProblem(batch, heads, KeyList(WINDOW, near), KeyList(CHOSEN, far), "decode")


def drawn(problem: AttentionProblem) -> dict[str, Tensor]:
    """Draw operands: bytes that every format reads as small numbers, slots without gaps."""
    q = torch.randn(problem.tokens, problem.heads, rows.WIDTH, device="cuda").bfloat16()
    made = {"q": q, "sink": torch.randn(problem.heads, device="cuda")}
    for name, of in zip(("window", "entries"), problem.lists, strict=False):
        pages, shape = of.pages, (of.pages.count, of.pages.stride)
        cache = torch.randint(0x20, 0x40, shape, dtype=torch.uint8, device="cuda")
        cache[:, pages.entries * pages.format.value_bytes :] = 120 if pages.entry == "fp8" else 0x30
        if pages.entry == "bf16":
            cache = torch.randn(shape[0], shape[1] // 2, device="cuda").bfloat16().view(torch.uint8)
        asked = (problem.tokens, of.width)
        slots = torch.randint(pages.slots, asked, dtype=torch.int32, device="cuda")
        made |= {f"{name}_slots": slots, f"{name}_cache": cache}
    return made


def lists_of(operands: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return slots and cache of each list."""
    return [
        (operands[f"{name}_slots"], operands[f"{name}_cache"]) for name in ("window", "entries")
    ]


def kernel_launch(problem: AttentionProblem) -> Callable[[], object]:
    """Return a launch of the kernels on buffers of its own."""
    kernel = import_module("degarble.kernels.attention.sm90_sparse_attention").KERNEL
    given = drawn(problem)
    given |= kernel.allocate(problem, given["q"].device)
    return lambda: kernel.run(problem, SETTINGS, **given)


def torch_attention(
    problem: AttentionProblem, q: Tensor, sink: Tensor, keys: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Gather rows of a BF16 cache and attend, by torch in BF16 with float32 logits."""
    parts = [
        cache.view(torch.bfloat16).reshape(-1, rows.WIDTH)[slots.long()] for slots, cache in keys
    ]
    chosen = torch.cat(parts, 1)
    logits = torch.bmm(q, chosen.mT).float() * problem.scale
    both = torch.cat((logits, sink[None, :, None].expand(len(q), -1, 1)), -1)
    shares = torch.softmax(both, -1)[..., :-1].bfloat16()
    return torch.bmm(shares, chosen)


def torch_launch(problem: AttentionProblem) -> Callable[[], object]:
    """Return the torch version on buffers of its own: from a BF16 cache, pieces of 256 tokens."""
    operands = drawn(problem)

    def run() -> None:
        for begin in range(0, problem.tokens, 256):
            some = slice(begin, begin + 256)
            keys = [(slots[some], cache) for slots, cache in lists_of(operands)]
            torch_attention(problem, operands["q"][some], operands["sink"], keys)

    return run


def triton_launch(problem: AttentionProblem) -> Callable[[], object]:
    """Return the Triton version on buffers of its own, from a BF16 cache."""
    peer = import_module("degarble.suites.bench.triton_sparse_attention")
    operands = drawn(problem)
    out = torch.empty_like(operands["q"])
    return lambda: peer.attend((operands["q"], operands["sink"], out), lists_of(operands), problem)


def why_not_triton() -> str:
    """Return why the Triton version is not measured; empty where its numbers are torch's."""
    if find_spec("triton") is None:
        return "no Triton version: the package triton is not installed"
    peer = import_module("degarble.suites.bench.triton_sparse_attention")
    problem = prefill("bf16", 8, 64)
    operands = drawn(problem)
    out = torch.full_like(operands["q"], torch.nan)
    peer.attend((operands["q"], operands["sink"], out), lists_of(operands), problem)
    wanted = torch_attention(problem, operands["q"], operands["sink"], lists_of(operands))
    worst = float((out.double() - wanted.double()).abs().max())
    return "" if worst <= ROUNDINGS else f"no Triton version: it is {worst:.3g} away from torch's"


def arm_of(name: str, problem: AttentionProblem, launch: Any) -> Arm:
    """Capture launches on as many buffer sets as leave nothing in the cache, eight at most."""
    sets = min(8, sets_for(problem.gathered_bytes))
    launches = [launch(problem) for _ in range(sets)]
    return captured(name, problem.gathered_bytes, launches)


def measured(problem_of: Any, count: int, rounds: int) -> dict[str, float]:
    """Print a table; return TFLOP/s and, under `<name> share`, the share of copy bandwidth."""
    found = {}
    without_triton = why_not_triton()
    for heads in HEADS:
        plain = problem_of("bf16", count, heads)
        made: list[tuple[str, AttentionProblem, Any]] = [
            (f"{entry}, {heads} heads", problem_of(entry, count, heads), kernel_launch)
            for entry in ("fp8", "nvfp4", "nvfp4-v41", "bf16")
        ]
        if not without_triton:
            made.append((f"Triton, bf16, {heads} heads", plain, triton_launch))
        made.append((f"torch, bf16, {heads} heads", plain, torch_launch))
        for name, problem, launch in made:
            arms = [copy_arm(problem.gathered_bytes), arm_of(name, problem, launch)]
            copy, figure = timed(arms, rounds)
            row = Row(figure, problem)
            say(row.line(copy))
            found[name], found[f"{name} share"] = row.teraflops, figure.share_of(copy)
            del arms, copy, figure, row
            torch.cuda.empty_cache()
    if without_triton:
        say(without_triton)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    settings = parser.parse_args(arguments)
    if status := refused_here():
        return status
    head = "us [quartiles] | TFLOP/s | of a copy of the entries named |\n|---|---|---|---|"
    say(f"| prefill of {settings.tokens} tokens | {head}")
    filled = measured(prefill, settings.tokens, settings.rounds)
    say(f"\n| decoding, batch {settings.batch} | {head}")
    decoded = measured(decode, settings.batch, settings.rounds)
    return verdict(filled, decoded)


def verdict(filled: dict[str, float], decoded: dict[str, float]) -> int:
    """Name what misses its target; return the exit status."""
    said = []
    if filled["bf16, 64 heads"] < WANTED_PREFILL:
        said.append(f"prefill: {filled['bf16, 64 heads']:.0f} TFLOP/s, wanted {WANTED_PREFILL}")
    speed, share = decoded["fp8, 64 heads"], decoded["fp8, 64 heads share"]
    if speed < WANTED_DECODE and share < WANTED_SHARE:
        said.append(
            f"decoding from fp8: {speed:.0f} TFLOP/s and {share:.2f} of copy bandwidth, wanted "
            f"{WANTED_DECODE} or {WANTED_SHARE}"
        )
    for each in said:
        say(each)
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
