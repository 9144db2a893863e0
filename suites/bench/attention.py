"""Sparse attention of V4 and the absorbed form of V3.2 beside Triton, torch and copies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.cli.values import settings_here
from degarble.kernels.attention.problem import AttentionProblem, KeyList, choose_splits
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import Pages
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import floats, integers, normal, octets
from degarble.suites.bench.runner import (
    TERAFLOPS,
    US,
    US_MEDIAN,
    Arm,
    Bench,
    Claim,
    Comparison,
    Part,
    copy_arm,
    sets_for,
    share_of,
    time_over,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.suites.bench.runner import Reading, Readings

    Lists = list[tuple[Tensor, Tensor]]  # slots and cache of each

WINDOW, CHOSEN = 128, 1024  # DeepSeek-V4-Pro config.json, sliding_window and index_topk
RATIO = 4
ENTRIES_OF_PAGE = 64
CONTEXT = 8192  # tokens of a sequence that is decoded
HEADS = (64, 128)
FORMATS = ("fp8", "nvfp4", "nvfp4-v41", "bf16")
WANTED_PREFILL, WANTED_DECODE = 450, 350  # TFLOP/s
WANTED_SHARE = 0.7  # of copy bandwidth, decoding
ROUNDINGS = 0.02  # shares and outputs of order 1 in BF16, rounded beside other peaks
COLUMNS = (US, TERAFLOPS, share_of(header="of a copy of the entries named"))

LATENT_CHOSEN = 2048  # DeepSeek-V3.2 config.json, index_topk
LATENT_SCALE = 0.1352338  # 192**-0.5 times the square of 0.1 ln 40 + 1
LATENT_HEADS = (128, 64, 16)  # and those of ranks
LATENT_FORMATS = ("fp8-v32", "bf16")
SPLITS, TABLES_OWN = (2, 4, 8, 16), "the table's own"
KEYS_OF_SPLITS = {"V3.2": (512, 1024, 2048), "V4": (384, 640, 1152)}
# FlashMLA README, sparse kernels on H800: decoding from FP8, and prefill; nobody's on this machine.
PUBLISHED = {"decode": 410, "prefill": 640}  # TFLOP/s


# ---- problems and operands -----------------------------------------------------------------------


def pages_for(entry: str, slots: int, width: int = rows.WIDTH) -> Pages:
    """Return a cache with room for so many slots."""
    return Pages(entry, ENTRIES_OF_PAGE, -(-slots // ENTRIES_OF_PAGE), width=width)


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


def latent(mode: str, entry: str, count: int, heads: int) -> AttentionProblem:
    """V3.2's absorbed form: every decoded token has a sequence of its own."""
    slots = max(LATENT_CHOSEN, count) if mode == "prefill" else count * CONTEXT
    pages = pages_for(entry, slots, rows.WITH_KEY)
    return AttentionProblem(
        count, heads, KeyList(LATENT_CHOSEN, pages), mode=mode, scale=LATENT_SCALE
    )


def entries_of(pages: Pages) -> Any:
    """Bytes that every format reads as small numbers."""
    shape = (pages.count, pages.stride)
    if pages.entry == "bf16":
        return normal(shape[0], shape[1] // 2).view(torch.uint8)
    cache = octets(*shape, high=0x40)
    if pages.width == rows.WITH_KEY:  # scales of 1
        by_entry = cache.view(-1, pages.format.step)
        ones = torch.ones(len(by_entry), pages.format.scales, device=cache.device)
        by_entry[:, slice(pages.format.code_bytes, pages.format.rest_at)] = ones.view(torch.uint8)
    else:
        cache[:, pages.entries * pages.format.value_bytes :] = 120 if pages.entry == "fp8" else 0x30
    return cache


def drawn(problem: AttentionProblem) -> dict[str, Tensor]:
    """Draw operands: slots without gaps."""
    width = problem.window.pages.width
    made = {"q": normal(problem.tokens, problem.heads, width)}
    if width == rows.WIDTH:
        made["sink"] = floats(problem.heads)
    for name, of in zip(("window", "entries"), problem.lists, strict=False):
        slots = integers(0, of.pages.slots, (problem.tokens, of.width), torch.int32)
        made |= {f"{name}_slots": slots, f"{name}_cache": entries_of(of.pages)}
    return made


def lists_of(operands: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return slots and cache of each list."""
    return [
        (operands[f"{name}_slots"], operands[f"{name}_cache"])
        for name in ("window", "entries")
        if f"{name}_slots" in operands
    ]


# ---- arms ----------------------------------------------------------------------------------------


def kernel_launch(problem: AttentionProblem, _number: int) -> Callable[[], object]:
    """Return a launch of the kernels on buffers of its own."""
    kernel, given = gpu.module("sm90_sparse_attention").KERNEL, drawn(problem)
    given |= kernel.allocate(problem, given["q"].device)
    return partial(kernel.run, problem, settings_here(), **given)


def torch_attention(
    problem: AttentionProblem, q: Tensor, sink: Tensor | None, keys: Lists
) -> Tensor:
    """Gather rows of a BF16 cache and attend, by torch in BF16 with float32 logits."""
    parts = [
        cache.view(torch.bfloat16).reshape(-1, q.shape[-1])[slots.long()] for slots, cache in keys
    ]
    chosen = torch.cat(parts, 1)
    logits = torch.bmm(q, chosen.mT).float() * problem.scale
    if sink is not None:
        logits = torch.cat((logits, sink[None, :, None].expand(len(q), -1, 1)), -1)
    shares = torch.softmax(logits, -1)[..., : chosen.shape[1]].bfloat16()
    return torch.bmm(shares, chosen[..., : rows.WIDTH])


def torch_launch(problem: AttentionProblem, _number: int) -> Callable[[], object]:
    """Return the torch version on buffers of its own: from a BF16 cache, in pieces."""
    operands = drawn(problem)
    at_once = 256 if "sink" in operands else 64  # tokens, each with 2048 rows of 1,152 bytes

    def run() -> None:
        for begin in range(0, problem.tokens, at_once):
            some = slice(begin, begin + at_once)
            keys = [(slots[some], cache) for slots, cache in lists_of(operands)]
            torch_attention(problem, operands["q"][some], operands.get("sink"), keys)

    return run


def triton_launch(problem: AttentionProblem, _number: int) -> Callable[[], object]:
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
    q, sink, lists = operands["q"], operands["sink"], lists_of(operands)
    out = torch.full_like(q, torch.nan)
    peer.attend((q, sink, out), lists, problem)
    wanted = torch_attention(problem, q, sink, lists)
    worst = float((out.double() - wanted.double()).abs().max())
    return "" if worst <= ROUNDINGS else f"no Triton version: it is {worst:.3g} away from torch's"


def arm_of(name: str, problem: AttentionProblem, launch: Any = kernel_launch) -> Arm:
    """An arm on as many buffer sets as leave nothing in the cache, eight at most."""
    moved = problem.gathered_bytes
    return Arm(
        name, partial(launch, problem), moved, problem.operations, sets=min(8, sets_for(moved))
    )


def beside_copies(title: str, arms: list[Arm], *claims: Claim, **told: Any) -> Comparison:
    turns = [(copy_arm(arm.moved), arm) for arm in arms]
    return Comparison(title, turns, COLUMNS, claims, **told)


# ---- the tables ----------------------------------------------------------------------------------


def teraflops(reading: Reading) -> float:
    return reading.speed * 1e-12


def decoded_enough(reading: Reading) -> float:
    """The nearer of rate and bandwidth to what is wanted of it; 1 is enough."""
    return max(teraflops(reading) / WANTED_DECODE, reading.share_of() / WANTED_SHARE)


PREFILL_CLAIM = Claim(
    "prefill, bf16, 64 heads, TFLOP/s", "bf16, 64 heads", teraflops, WANTED_PREFILL
)
DECODE_CLAIM = Claim(
    f"decoding, fp8, 64 heads: of {WANTED_DECODE} TFLOP/s or {WANTED_SHARE} of a copy",
    "fp8, 64 heads",
    decoded_enough,
    1.0,
)


def sparse(options: Any) -> Iterator[Part]:
    """Prefill of a prompt and decoding of sequences, every entry format, 64 and 128 heads."""
    without_triton = why_not_triton()
    for title, problem_of, count, claim in (
        (f"prefill of {options.tokens} tokens", prefill, options.tokens, PREFILL_CLAIM),
        (f"decoding, batch {options.batch}", decode, options.batch, DECODE_CLAIM),
    ):
        arms = []
        for heads in HEADS:
            plain = problem_of("bf16", count, heads)
            arms += [
                arm_of(f"{entry}, {heads} heads", problem_of(entry, count, heads))
                for entry in FORMATS
            ]
            if not without_triton:
                arms.append(arm_of(f"Triton, bf16, {heads} heads", plain, triton_launch))
            arms.append(arm_of(f"torch, bf16, {heads} heads", plain, torch_launch))
        yield beside_copies(title, arms, claim)
    if without_triton:
        yield without_triton


def latent_attention(options: Any) -> Iterator[Comparison]:
    """Prefill and decoding over 2048 chosen keys, 128 heads and those of ranks."""
    for mode, count in (("decode", options.batch), ("prefill", options.tokens)):
        arms = [
            arm_of(f"{entry}, {heads} heads", latent(mode, entry, count, heads))
            for heads in LATENT_HEADS
            for entry in LATENT_FORMATS
        ]
        plain = latent(mode, "bf16", count, LATENT_HEADS[0])
        arms.append(arm_of(f"torch, bf16, {LATENT_HEADS[0]} heads", plain, torch_launch))

        def best(found: Readings, of: str = mode) -> Iterator[str]:
            most = max(teraflops(reading) for reading in found.values() if reading.arm.operations)
            yield f"{of}: {most:.0f} TFLOP/s at best; published for H800: {PUBLISHED[of]}"

        yield beside_copies(f"{mode}, {count} tokens", arms, notes=best)


def splits_table(title: str, problem: AttentionProblem) -> Comparison:
    """Time the table's splits and others in turns; all read the same lists."""
    counts = [count for count in SPLITS if count <= problem.tiles]
    arms = [arm_of(TABLES_OWN, problem)]
    arms += [arm_of(f"{count} splits", replace(problem, splits=count)) for count in counts]

    def best(found: Readings) -> Iterator[str]:
        fastest = min(found.values(), key=lambda reading: reading.median)
        yield f"{choose_splits(problem)} splits by the table; fastest: {fastest.arm.name}"

    columns = (US_MEDIAN, time_over(TABLES_OWN, "time / the table's"))
    return Comparison(title, [tuple(arms)], columns, notes=best)


def attention_splits(options: Any) -> Iterator[Comparison]:
    """Decode from FP8 entries by 2, 4, 8 and 16 splits, for lengths of lists and numbers of tokens.

    A table by length alone keeps bits independent of the batch; one by lanes of a graph as well.
    """
    for keys, batch in product(KEYS_OF_SPLITS[options.family], options.lanes):
        if options.family == "V4":
            near, far = (pages_for("fp8", batch * n) for n in (WINDOW, CONTEXT // RATIO))
            lists = KeyList(WINDOW, near), KeyList(keys - WINDOW, far)
            problem = AttentionProblem(batch, options.heads, *lists, "decode")
        else:
            pages = pages_for("fp8-v32", batch * CONTEXT, rows.WITH_KEY)
            problem = AttentionProblem(
                batch, options.heads, KeyList(keys, pages), mode="decode", scale=LATENT_SCALE
            )
        yield splits_table(f"{options.family}, {keys} keys, {batch} tokens", problem)


BENCHES = {
    "attention": Bench(
        "sparse attention of V4 beside Triton, torch and copies", sparse, rounds=20, needs="gpu",
        options={"tokens": 4096, "batch": 64},
    ),
    "latent-attention": Bench(
        "V3.2's absorbed attention beside torch and copies", latent_attention, rounds=20,
        needs="gpu", options={"tokens": 1024, "batch": 64},
    ),
    "attention-splits": Bench(
        "decoding by 2, 4, 8 and 16 splits of the keys, by length and number of tokens",
        attention_splits, rounds=20, needs="gpu",
        options={"family": ("V3.2", "V4"), "lanes": (1, 4, 16, 64, 128), "heads": 64},
    ),
}  # fmt: skip
