"""V3.2's absorbed attention on a Hopper GPU beside torch: a script that prints two tables.

    python -m degarble.suites.bench.bench_latent_attention [--tokens T] [--batch B] [--rounds N]

Prefill of T tokens and decoding of B sequences, 2048 chosen keys each, 128 heads and those of eight
ranks, 656-byte entries and BF16. torch gathers rows of a BF16 cache and multiplies in BF16. Arms
are timed as in bench_sparse_attention, with a copy of as many bytes as the chosen entries. Numbers
are compared by suites/kernels, not here.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import Pages
from degarble.suites.bench.bench_quantise_kernel import copy_arm, timed
from degarble.suites.bench.bench_sparse_attention import SETTINGS, Row, arm_of
from degarble.suites.bench.gpu import refused_here, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

CHOSEN = 2048  # DeepSeek-V3.2 config.json, index_topk
SCALE = 0.1352338  # 192**-0.5 times the square of 0.1 ln 40 + 1
CONTEXT = 8192  # tokens of a sequence that is decoded
ENTRIES_OF_PAGE = 64
HEADS = (128, 64, 16)
FORMATS = ("fp8-v32", "bf16")
# FlashMLA README, sparse kernels on H800: decoding from FP8, and prefill; nobody's on this machine.
PUBLISHED = {"decode": 410, "prefill": 640}  # TFLOP/s
TORCH_AT_ONCE = 64  # tokens, each with 2048 rows of 1,152 bytes


def problem_of(mode: str, entry: str, count: int, heads: int) -> AttentionProblem:
    """Every decoded token has a sequence of its own; a prompt's tokens share one."""
    slots = max(CHOSEN, count) if mode == "prefill" else count * CONTEXT
    pages = Pages(entry, ENTRIES_OF_PAGE, -(-slots // ENTRIES_OF_PAGE), width=rows.WITH_KEY)
    return AttentionProblem(count, heads, KeyList(CHOSEN, pages), mode=mode, scale=SCALE)


def drawn(problem: AttentionProblem, device: str = "cuda") -> dict[str, Tensor]:
    """Draw operands: codes of small numbers, scales of 1, slots without gaps."""
    of, pages = problem.window, problem.window.pages
    shape = (pages.count, pages.stride)
    if pages.entry == "bf16":
        values = torch.randn(shape[0], shape[1] // 2, device=device).bfloat16()
        cache = values.view(torch.uint8)
    else:
        cache = torch.randint(0x20, 0x40, shape, dtype=torch.uint8, device=device)
        by_entry = cache.view(-1, pages.format.step)
        ones = torch.ones(len(by_entry), pages.format.scales, device=device)
        scales = slice(pages.format.code_bytes, pages.format.rest_at)
        by_entry[:, scales] = ones.view(torch.uint8)
    asked = (problem.tokens, of.width)
    slots = torch.randint(pages.slots, asked, dtype=torch.int32, device=device)
    q = torch.randn(problem.tokens, problem.heads, rows.WITH_KEY, device=device).bfloat16()
    return {"q": q, "window_slots": slots, "window_cache": cache}


def kernel_launch(problem: AttentionProblem) -> Callable[[], object]:
    """Return a launch of the kernels on buffers of its own."""
    kernel = import_module("degarble.kernels.attention.sm90_sparse_attention").KERNEL
    given = drawn(problem)
    given |= kernel.allocate(problem, given["q"].device)
    return lambda: kernel.run(problem, SETTINGS, **given)


def torch_attention(problem: AttentionProblem, q: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """Gather rows of a BF16 cache and attend, by torch in BF16 with float32 logits."""
    slots, cache = keys
    chosen = cache.view(torch.bfloat16).reshape(-1, rows.WITH_KEY)[slots.long()]
    logits = torch.bmm(q, chosen.mT).float() * problem.scale
    shares = torch.softmax(logits, -1).bfloat16()
    return torch.bmm(shares, chosen[..., : rows.WIDTH])


def torch_launch(problem: AttentionProblem) -> Callable[[], object]:
    """Return the torch version on buffers of its own: from a BF16 cache, pieces of 64 tokens."""
    operands = drawn(problem)

    def run() -> None:
        for begin in range(0, problem.tokens, TORCH_AT_ONCE):
            some = slice(begin, begin + TORCH_AT_ONCE)
            keys = operands["window_slots"][some], operands["window_cache"]
            torch_attention(problem, operands["q"][some], keys)

    return run


def measured(mode: str, count: int, rounds: int) -> dict[str, float]:
    """Print a table; return TFLOP/s."""
    found = {}
    for heads in HEADS:
        arms: list[tuple[str, str, Any]] = [
            (f"{entry}, {heads} heads", entry, kernel_launch) for entry in FORMATS
        ]
        if heads == HEADS[0]:
            arms.append((f"torch, bf16, {heads} heads", "bf16", torch_launch))
        for name, entry, launch in arms:
            problem = problem_of(mode, entry, count, heads)
            pair = [copy_arm(problem.gathered_bytes), arm_of(name, problem, launch)]
            copy, figure = timed(pair, rounds)
            row = Row(figure, problem)
            say(row.line(copy))
            found[name] = row.teraflops
            del pair, copy, figure, row
            torch.cuda.empty_cache()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    settings = parser.parse_args(arguments)
    if status := refused_here():
        return status
    head = "us [quartiles] | TFLOP/s | of a copy of the entries named |\n|---|---|---|---|"
    for mode, count in (("decode", settings.batch), ("prefill", settings.tokens)):
        say(f"\n| {mode}, {count} tokens | {head}")
        best = max(measured(mode, count, settings.rounds).values())
        say(f"{mode}: {best:.0f} TFLOP/s at best; published for H800: {PUBLISHED[mode]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
