"""Sparse attention on Hopper: one softmax over listed cache entries and, in V4, a sink.

    KERNEL.run(
        AttentionProblem(T, H, KeyList(W, pages), KeyList(K, pages_of_entries), mode="decode"),
        settings, q=q_THL, sink=sink_H, window_slots=slots_TW, window_cache=cache,
        entries_slots=slots_TK, entries_cache=cache_of_entries)

Slots are int32 numbers of cache entries. -1 is skipped. A slot beyond the cache makes the token's
output NaN, so that the error shows. A repeated slot counts each time. With lengths, only that many
slots of each list count. A token without keys gets zeros, and -inf as LSE. LSE is the natural
logarithm of the sum over keys, without the sink. The rotation is not undone in the output. Entries
that no slot names are never read, but for a prompt's caches with codes of up to 64 MiB as rows: all
of those are read to BF16 rows first, and rows that no slot names are used for nothing. V3.2's
queries and entries have 576 numbers, the latent and the rotated key, of which 512 are the value; it
has one list, and no sinks (None).

Decoding uses equal splits of at most 576 keys (V3.2: 1024), merged in order in a cluster or, beyond
eight, by a second kernel. A token's bits depend on its own keys and the widths of lists, never on
the other tokens. Never waits for the GPU. T tokens, H heads, L 512, W, K list widths.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cutlass import Float32, Int32, Uint8
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.attention.problem import (
    EXPERIMENT_ENTRY,
    AttentionForm,
    AttentionProblem,
    KeyList,
    MergeProblem,
)
from degarble.kernels.attention.sm90_attention_turns import launch_attention
from degarble.kernels.cache import simt_kv_read as reading
from degarble.kernels.cache import simt_kv_write as writing
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import Pages, ReadProblem, WriteProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.kernel import (
    Kernel,
    LaunchContext,
    Operand,
    Operands,
    Presence,
    Storage,
    nothing_more,
)
from degarble.kernels.runtime.targets import SM90A

# --------------------------------------------------------------------------------------------------
# Round query heads to NVFP4 for `experiment-nvfp4`, which nothing chooses by default.
#
# Queries are rounded to E2M1 with an E4M3 scale for 16 values by the kernels that write and read
# cache entries of nvfp4-v41, in which the whole key is NVFP4. A product of two such numbers, scales
# included, is exact in float32. So BF16 wgmma gives the logits of NVFP4 products with float32 sums,
# but for the order of sums. docs/design-notes/attention_kernel.md says what it loses, and why it is
# no choice.
#
# Allocates what it rounds through; never waits for the GPU; may be captured in a graph. Shape
# letters: T tokens, H heads, L width (512).

ENTRIES_OF_PAGE = 64


def queries_in_nvfp4(q_THL: Tensor, settings: CompileSettings) -> Tensor:
    """Return BF16 query heads rounded to what NVFP4 codes and scales represent."""
    rows = q_THL.flatten(0, 1)
    count = rows.shape[0]
    pages = Pages(EXPERIMENT_ENTRY, ENTRIES_OF_PAGE, -(-count // ENTRIES_OF_PAGE))
    written = WriteProblem(count, pages, source="row")
    cache = writing.empty_cache(written, q_THL.device)
    slots = torch.arange(count, device=q_THL.device)
    writing.KERNEL.run(written, settings, values=rows, slots=slots, cache=cache)
    read = ReadProblem(count, pages)
    made = reading.KERNEL.run_one(read, settings, indices=slots.int(), cache=cache)
    return made.reshape(q_THL.shape)


# --------------------------------------------------------------------------------------------------
# Sparse attention on Hopper: one softmax over listed cache entries and, in V4, a sink.


def rounded(problem: AttentionProblem, tensors: Operands, settings: CompileSettings) -> Operands:
    """Round queries where the problem says so."""
    q = tensors["q"]
    if q is None or problem.products != facts.EXPERIMENT:
        return tensors
    return {**tensors, "q": queries_in_nvfp4(q, settings)}


def rows_of_cache(cache: Tensor, pages: Pages, settings: CompileSettings) -> Tensor:
    """Return all entries of a cache as BF16 rows, slot by slot."""
    slots = torch.arange(pages.slots, dtype=torch.int32, device=cache.device)
    problem = ReadProblem(pages.slots, pages)
    made = reading.KERNEL.run_one(problem, settings, indices=slots, cache=cache)
    return made.view(torch.uint8).reshape(pages.count, -1)


def _ready(problem: AttentionProblem, tensors: Operands, settings: CompileSettings) -> Operands:
    made = dict(rounded(problem, tensors, settings))
    if facts.reads_first(problem):
        for name, of in zip(("window", "entries"), problem.lists, strict=False):
            cache = made[f"{name}_cache"]
            assert cache is not None, "a list that is present has a cache"
            made[f"{name}_cache"] = rows_of_cache(cache, of.pages, settings)
    return made


def merge_problem(problem: AttentionProblem) -> MergeProblem:
    """Return the problem of merging all splits."""
    splits, sinks = facts.choose_splits(problem), problem.family.sinks
    return MergeProblem(problem.tokens, problem.heads, splits, sinks)


def _merged(problem: AttentionProblem, tensors: Operands, settings: CompileSettings) -> None:
    if facts.merges_apart(problem):
        given = {name: tensors.get(name) for name in ("sums", "stats", "sink", "out", "lse")}
        merging.KERNEL.run(merge_problem(problem), settings, **given)


def _require_form_of(problem: AttentionProblem, form: AttentionForm) -> None:
    """Raise on a form that would misread the problem's caches, or leave splits out."""
    chosen = facts.choose_form(problem, form.target)
    for name, value, others in (
        ("reads", form.reads, (chosen.reads,)),
        ("turns", form.turns, (False, chosen.turns)),
        ("page", form.page, (0, chosen.page)),
    ):
        if value not in others:
            raise InvalidArgument(
                "form of attention",
                form,
                f"{name}={others[-1]} for this problem",
                "Leave the form out: the problem chooses it.",
            )


def _numbers(of: LaunchContext[AttentionProblem, AttentionForm]) -> tuple[Any, ...]:
    problem = of.problem
    if of.form.target == SM90A.name:
        _require_form_of(problem, of.form)
    # A list that is absent has width 0.
    near, far = problem.window, problem.entries or replace(problem.window, width=0)
    of_lists = []
    for key_list in (near, far):
        pages = facts.rows_of_pages(key_list.pages) if of.form.reads else key_list.pages
        of_lists += [key_list.width, pages.entries, pages.stride, pages.slots]
    splits, each = facts.choose_splits(problem), facts.tiles_each(problem)
    heads = facts.heads_of_block(problem) if of.form.target == SM90A.name else facts.HEADS
    blocks = facts.grid(problem, heads)
    if of.form.stays or of.form.pairs_stay:
        assert of.form.together, of.form
        blocks = min(blocks, of.processors // of.form.together * of.form.together)
    extents = (problem.tokens, problem.heads, splits, each, *of_lists, heads, blocks)
    return extents, problem.scale


_Operand = Operand[AttentionProblem]
_BF16, _BYTES = (Storage(Uint8, dtype, 16, assumed=4) for dtype in (torch.bfloat16, torch.uint8))
_SPLITS = Storage(Uint8, torch.float32, 16, assumed=4)
_FP32, _INT32 = Storage(Uint8, torch.float32, 4), Storage(Uint8, torch.int32, 4)


def _keys(list_name: str, of: Callable[[AttentionProblem], KeyList | None]) -> tuple[_Operand, ...]:
    """Return the operands of a list: slots, lengths and cache."""

    def slots(problem: AttentionProblem) -> tuple[int, ...]:
        keys = of(problem)
        return (problem.tokens, keys.width if keys else 0)

    def pages(problem: AttentionProblem) -> tuple[int, ...]:
        keys = of(problem)
        return (keys.pages.count, keys.pages.stride) if keys else ()

    listed = Presence[AttentionProblem](
        lambda p: of(p) is not None, lambda p: f"Lists of keys: {len(p.lists)}."
    )
    exactly = "lengths of every list exactly if the problem says so"
    counted = Presence[AttentionProblem](
        lambda p: of(p) is not None and p.lengths,
        lambda p: f"The problem says lengths={p.lengths}.",
        exactly,
        exactly,
    )
    return tuple(
        _Operand(
            f"{list_name}_{name}",
            storage,
            shape,
            present,
            label=f"{name} of the {list_name}",
            # Width 0 keeps what an absent list would name unread.
            address_of=f"window_{name}" if list_name != "window" else "",
        )
        for name, storage, shape, present in (
            ("slots", _INT32, slots, listed),
            ("lengths", _INT32, lambda p: (p.tokens,), counted),
            ("cache", _BYTES, pages, listed),
        )
    )


_SINKS = Presence[AttentionProblem](
    lambda p: p.family.sinks,
    lambda p: f"Keys of {p.family.key} are those of {p.family.name}.",
    "one a head",
    "none",
)
_APART = Presence[AttentionProblem](
    facts.merges_apart, lambda p: f"Of {facts.choose_splits(p)} splits; a run allocates it."
)
KERNEL = Kernel[AttentionProblem, AttentionForm](
    entry=launch_attention,
    operands=(
        # BF16, rotated, as wide as keys.
        _Operand("q", _BF16, lambda p: (p.tokens, p.heads, p.family.key), label="query heads"),
        _Operand("sink", _FP32, lambda p: (p.heads,), _SINKS, label="sinks"),
        *_keys("window", lambda p: p.window),
        *_keys("entries", lambda p: p.entries),
        # Still rotated.
        _Operand(
            "out", _BF16, lambda p: (p.tokens, p.heads, rows.WIDTH), output=True, label="output"
        ),
        # The logarithm of the sum over keys.
        _Operand("lse", _FP32, lambda p: (p.tokens, p.heads), output=True, label="LSE"),
        _Operand(
            "sums",
            _SPLITS,
            lambda p: (p.tokens, facts.choose_splits(p), p.heads, rows.WIDTH),
            _APART,
            output=True,
            scratch=True,
        ),
        _Operand(
            "stats",
            _SPLITS,
            lambda p: (p.tokens, facts.choose_splits(p), p.heads, 2),
            _APART,
            output=True,
            scratch=True,
            label="peaks",
        ),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * 14, Float32),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
    target=SM90A,
    before=_ready,
    after=_merged,
)
# Leaves splits that are to be merged apart: `out` and `lse` are not written.
SPLITS = replace(KERNEL, after=nothing_more)
compile_form = KERNEL.compile_form
