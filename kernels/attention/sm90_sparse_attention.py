"""Sparse attention on Hopper: one softmax over listed cache entries and, in V4, a sink.

    out_THL, lse_TH = sparse_attention(
        Operands(q_THL, sink_H, Keys(slots_TW, cache), Keys(slots_TK, cache_of_entries)),
        AttentionProblem(T, H, KeyList(W, pages), KeyList(K, pages_of_entries), mode="decode"),
        settings)

Slots are int32 numbers of cache entries. -1 is skipped. A slot beyond the cache makes the token's
output NaN, so that the error shows. A repeated slot counts each time. With lengths, only that many
slots of each list count. A token without keys gets zeros, and -inf as LSE. LSE is the natural
logarithm of the sum over keys, without the sink. The rotation is not undone in the output. Entries
that no slot names are never read. V3.2's queries and entries have 576 numbers, the latent and the
rotated key, of which 512 are the value; it has one list, and no sinks (None).

Decoding uses splits of 576 keys (V3.2: 1024), merged in order in a cluster or, beyond eight, by a
second kernel. A token's bits depend on its own keys and the widths of lists, never on the other
tokens. Never waits for the GPU. T tokens, H heads, L 512, W, K list widths.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from cutlass import Float32, Int32, Uint8
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.attention.problem import (
    EXPERIMENT_ENTRY,
    AttentionForm,
    AttentionProblem,
    MergeForm,
)
from degarble.kernels.attention.sm90_attention_kernel import AttentionAddresses, launch_attention
from degarble.kernels.cache import simt_kv_read as reading
from degarble.kernels.cache import simt_kv_write as writing
from degarble.kernels.gemm import contract
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import Pages, ReadProblem, WriteProblem
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.targets import SM90A, TARGETS, Target

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
    operands = writing.WriteOperands(rows, None, None, None, slots)
    writing.kv_write(operands, cache, written, settings)
    made = reading.kv_read(slots.int(), cache, ReadProblem(count, pages), settings)
    return made.reshape(q_THL.shape)


# --------------------------------------------------------------------------------------------------
# Sparse attention on Hopper: one softmax over listed cache entries and, in V4, a sink.


@cache
def compile_form(form: AttentionForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    return compiled(launch_attention, form, settings)


def compiled(jitted: Any, form: AttentionForm, settings: CompileSettings) -> CompiledKernel:
    """Compile the launch of a target's kernel."""
    pointers = tuple(pointer(Uint8, None, 4) for _ in AttentionAddresses._fields)
    # As many as _extents returns; the values do not matter to the compiler.
    extents = tuple(Int32(1) for _ in range(13))
    arguments = (pointers, extents, Float32(1.0), form, any_stream())
    return compile_kernel(jitted, arguments, TARGETS[form.target], settings)


class Keys(NamedTuple):
    """One list of slots: int32 [T, width], pages of uint8, and optional lengths int32 [T]."""

    slots: Tensor
    cache: Tensor
    lengths: Tensor | None = None


class AttentionOperands(NamedTuple):
    """Query heads (BF16, rotated) as wide as keys, sinks [H] (float32; V4), the lists of keys."""

    q: Tensor
    sink: Tensor | None
    window: Keys
    entries: Keys | None = None


class Results(NamedTuple):
    """Heads [T, H, L] in BF16, still rotated, and float32 logarithms of sums [T, H]."""

    out: Tensor
    lse: Tensor


class AttentionWorkspace(NamedTuple):
    """Results of splits: float32 sums [T, splits, H, L], peaks and sums of shares [..., 2]."""

    sums: Tensor
    stats: Tensor


def empty_results(problem: AttentionProblem, device: torch.device) -> Results:
    """Allocate the results of a launch."""
    heads = (problem.tokens, problem.heads)
    return Results(
        torch.empty(*heads, rows.WIDTH, dtype=torch.bfloat16, device=device),
        torch.empty(*heads, dtype=torch.float32, device=device),
    )


def empty_workspace(problem: AttentionProblem, device: torch.device) -> AttentionWorkspace | None:
    """Allocate the workspace of splits that do not merge in a cluster; None without them."""
    splits = facts.choose_splits(problem)
    if splits <= facts.MOST_TOGETHER:
        return None
    shape = (problem.tokens, splits, problem.heads)
    made = (torch.empty(*shape, n, dtype=torch.float32, device=device) for n in (rows.WIDTH, 2))
    return AttentionWorkspace(*made)


def sparse_attention(
    operands: AttentionOperands,
    problem: AttentionProblem,
    settings: CompileSettings,
    *,
    results: Results | None = None,
    workspace: AttentionWorkspace | None = None,
) -> Results:
    """Attend, on the GPU that holds the operands; allocate memory that is not given."""
    entry = compile_form, SM90A
    return attended(entry, operands, problem, settings, (results, workspace))


def attended(
    entry: tuple[Callable[[AttentionForm, CompileSettings], CompiledKernel], Target],
    operands: AttentionOperands,
    problem: AttentionProblem,
    settings: CompileSettings,
    memory: tuple[Results | None, AttentionWorkspace | None],
) -> Results:
    """Check operands, allocate missing memory and launch the forms of an entry's target."""
    (compile_, target), device = entry, operands.q.device
    results, workspace = memory
    if results is None:
        results = empty_results(problem, device)
    if workspace is None:
        workspace = empty_workspace(problem, device)
    require_operands(problem, operands, results, workspace)
    tensors = _tensors(operands, results, workspace)
    require_device(tensors)
    if problem.tokens:
        contract.require_place(tuple(each for each in tensors if each is not None), target)
        if problem.products == facts.EXPERIMENT:
            operands = operands._replace(q=queries_in_nvfp4(operands.q, settings))
        kernel = compile_(facts.choose_form(problem, target.name), settings)
        merge = None
        if workspace:
            merge = merging.compile_form(MergeForm(target.name, problem.family.sinks), settings)
        launch((kernel, merge), problem, operands, results, workspace)
    return results


def launch(
    kernels: tuple[CompiledKernel, CompiledKernel | None],
    problem: AttentionProblem,
    operands: AttentionOperands,
    results: Results,
    workspace: AttentionWorkspace | None,
) -> None:
    """Launch on checked tensors."""
    device = operands.q.device.index or 0
    stream = current_stream(device)
    # Without a second list its pointers repeat the first; width 0 keeps them unread.
    near, far = operands.window, operands.entries or operands.window
    sums, stats = workspace or (None, None)
    given = (
        operands.q, operands.sink, near.slots, near.lengths, near.cache,
        far.slots, far.lengths, far.cache, *results, sums, stats,
    )  # fmt: skip
    pointers = tuple(pointer(Uint8, tensor, 4) for tensor in given)
    kernels[0](pointers, _extents(problem), Float32(problem.scale), stream)
    if kernels[1] is not None:
        merged = (sums, stats, operands.sink, *results)
        pointers = tuple(pointer(Uint8, tensor, 4) for tensor in merged)
        blocks = problem.tokens * problem.heads
        numbers = (problem.heads, facts.choose_splits(problem), blocks)
        kernels[1](pointers, tuple(map(Int32, numbers)), stream)


def _extents(problem: AttentionProblem) -> tuple[Int32, ...]:
    """Return the extents of a launch; a list that is absent has width 0."""
    near, far = problem.window, problem.entries or replace(problem.window, width=0)
    of_lists = [
        number
        for each in (near, far)
        for number in (each.width, each.pages.entries, each.pages.stride, each.pages.slots)
    ]
    splits, each = facts.choose_splits(problem), facts.tiles_each(problem)
    numbers = (problem.tokens, problem.heads, splits, each, *of_lists, facts.grid(problem))
    return tuple(Int32(number) for number in numbers)


def require_operands(
    problem: AttentionProblem,
    operands: AttentionOperands,
    results: Results,
    workspace: AttentionWorkspace | None,
) -> None:
    """Raise on tensors that the kernels would misread."""
    tokens, heads = problem.tokens, problem.heads
    shape = (tokens, heads, rows.WIDTH)
    of_queries = (tokens, heads, problem.family.key)
    require_tensor("query heads", operands.q, torch.bfloat16, of_queries, 16)
    if (operands.sink is not None) != problem.family.sinks:
        raise InvalidArgument(
            "sinks",
            "given" if operands.sink is not None else None,
            "one a head" if problem.family.sinks else "none",
            f"Keys of {problem.family.key} are those of {problem.family.name}.",
        )
    if operands.sink is not None:
        require_tensor("sinks", operands.sink, torch.float32, (heads,), 4)
    given = [operands.window] if operands.entries is None else [operands.window, operands.entries]
    if len(given) != len(problem.lists):
        raise ShapeMismatch(
            "lists of keys", len(given), f"{len(problem.lists)}, as the problem says", "Give both."
        )
    for name, keys, of in zip(("window", "entries"), given, problem.lists, strict=False):
        require_tensor(f"slots of the {name}", keys.slots, torch.int32, (tokens, of.width), 4)
        pages = (of.pages.count, of.pages.stride)
        require_tensor(f"cache of the {name}", keys.cache, torch.uint8, pages, 16)
        if (keys.lengths is not None) != problem.lengths:
            raise InvalidArgument(
                f"lengths of the {name}",
                "given" if keys.lengths is not None else None,
                "lengths of every list exactly if the problem says so",
                f"The problem says lengths={problem.lengths}.",
            )
        if keys.lengths is not None:
            require_tensor(f"lengths of the {name}", keys.lengths, torch.int32, (tokens,), 4)
    require_tensor("output", results.out, torch.bfloat16, shape, 16)
    require_tensor("LSE", results.lse, torch.float32, (tokens, heads), 4)
    splits = facts.choose_splits(problem)
    if (workspace is not None) != (splits > facts.MOST_TOGETHER):
        raise InvalidArgument("workspace", workspace, f"one for {splits} splits", "Leave it out.")
    if workspace is not None:
        of_splits = (tokens, splits, heads)
        require_tensor("sums", workspace.sums, torch.float32, (*of_splits, rows.WIDTH), 16)
        require_tensor("peaks", workspace.stats, torch.float32, (*of_splits, 2), 16)


def _tensors(
    operands: AttentionOperands, results: Results, workspace: AttentionWorkspace | None
) -> list[Any]:
    lists = [*operands.window, *(operands.entries or ())]
    return [operands.q, operands.sink, *lists, *results, *(workspace or ())]
