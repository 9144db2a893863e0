"""List the cache slots of decoding tokens from positions, owners and a table: one thread a slot.

Entry point: `slots(tensors, problem, settings) -> SlotLists(listed, own)`. One source for
sm_90a and sm_100a. The kinds of lists are in cache/problem. On the GPU, a decoding step needs no
host arithmetic between its kernels, and a captured graph follows changing positions.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph. Shape
letters: T tokens, W width of a list, B sequences, C columns.
"""

from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import CHOSEN, WINDOW, SlotsForm, SlotsProblem
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.targets import TARGETS, target_of_device

FLAT = 1 << 40


class SlotOperands(NamedTuple):
    """Tensors that a launch reads."""

    positions: Tensor  # int64 [T]
    owners: Tensor  # int32 [T], rows of the table; below 0: none
    table: Tensor  # int32 [B, C], -1: no slot
    numbers: Tensor | None = None  # int32 [T, W], for chosen entries


class SlotLists(NamedTuple):
    """Result: int32 lists [T, W]; for a window also the tokens' own int64 slots [T]."""

    listed: Tensor
    own: Tensor | None


class SlotTensors(NamedTuple):
    """Kernel's tensors, flat."""

    positions: Any  # int64 [T]
    owners: Any  # int32 [T]
    table: Any  # int32 [B, C]
    numbers: Any  # int32 [T, W]
    listed: Any  # int32 [T, W]
    own: Any  # int64 [T]


@cute.jit
def slot_at(
    tensors: SlotTensors, owner: Any, number: Any, end: Any, told: tuple[Any, Any], form: SlotsForm
) -> Any:
    """Look a number up in its owner's row; -1 where there is nothing to look up."""
    sequences, columns = told
    found = Int32(facts.NO_SLOT)
    if (owner >= 0) & (owner < sequences) & (number >= 0) & (number < end):
        column = facts.column_of(form.kind, number, columns)
        found = Int32(tensors.table[Int64(owner) * Int64(columns) + Int64(column)])
    return found


@cute.kernel
def slots_kernel(tensors: SlotTensors, extents: tuple[Int32, ...], form: cutlass.Constexpr) -> None:
    """Find the slot of one place of a token's list, and of a window the token's own."""
    thread, _, _ = cute.arch.thread_idx()
    token, part, _ = cute.arch.block_idx()
    width, sequences, columns, ratio = extents
    token, place = Int32(token), Int32(part) * facts.SLOT_THREADS + Int32(thread)
    position, owner = Int32(tensors.positions[token]), Int32(tensors.owners[token])
    end = facts.end_of(form.kind, position, columns, ratio)
    if place < width:
        at = Int64(token) * Int64(width) + Int64(place)
        number = facts.number_of(form.kind, place, position, width)
        if cutlass.const_expr(form.kind == CHOSEN):
            number = Int32(tensors.numbers[at])
        tensors.listed[at] = slot_at(tensors, owner, number, end, (sequences, columns), form)
    if cutlass.const_expr(form.kind == WINDOW):  # noqa: SIM102  one is known in tracing
        if place == 0:
            mine = slot_at(tensors, owner, position, end, (sequences, columns), form)
            tensors.own[token] = Int64(mine)


@cute.jit
def launch_slots(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on tokens, parts of a list, width, sequences, columns, ratio."""
    tokens, parts, *told = extents
    tensors = SlotTensors(*(cute.make_tensor(each, cute.make_layout(FLAT)) for each in pointers))
    slots_kernel(tensors, tuple(told), form).launch(
        grid=[tokens, parts, 1], block=[facts.SLOT_THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: SlotsForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a kind; needs no GPU."""
    extents = tuple(Int32(1) for _ in range(6))
    arguments = (_pointers((None,) * 6), extents, form, any_stream())
    return compile_kernel(launch_slots, arguments, TARGETS[form.target], settings)


def slots(
    told: SlotOperands,
    problem: SlotsProblem,
    settings: CompileSettings,
    *,
    out: SlotLists | None = None,
) -> SlotLists:
    """Return the slots of every token, on the GPU that holds the table."""
    out = empty_slots(problem, told.table.device) if out is None else out
    require_operands(problem, told, out)
    tensors = (*told, *out)
    device = require_device(tensors)
    if problem.tokens:
        form = SlotsForm(problem.kind, target_of_device(device).name)
        numbers = (*problem.blocks, problem.width, problem.sequences, problem.columns)
        extents = tuple(Int32(number) for number in (*numbers, problem.ratio))
        compile_form(form, settings)(_pointers(tensors), extents, current_stream(device))
    return out


def empty_slots(problem: SlotsProblem, device: torch.device) -> SlotLists:
    """Allocate the result; a launch writes every number of it."""
    listed = torch.empty(problem.tokens, problem.width, dtype=torch.int32, device=device)
    own = torch.empty(problem.tokens, dtype=torch.int64, device=device)
    return SlotLists(listed, own if problem.kind == WINDOW else None)


def require_operands(problem: SlotsProblem, told: SlotOperands, out: SlotLists) -> None:
    """Raise on tensors that the kernel would misread."""
    tokens, listed = (problem.tokens,), (problem.tokens, problem.width)
    require_tensor("positions", told.positions, torch.int64, tokens, 8)
    require_tensor("owners", told.owners, torch.int32, tokens, 4)
    of_table = (problem.sequences, problem.columns)
    require_tensor("table of slots", told.table, torch.int32, of_table, 4)
    require_tensor("list of slots", out.listed, torch.int32, listed, 4)
    for name, given, kind in (
        ("numbers of entries", told.numbers, CHOSEN),
        ("slots of the tokens", out.own, WINDOW),
    ):
        if (given is not None) is not (problem.kind == kind):
            raise InvalidArgument(
                name, None if given is None else tuple(given.shape),
                f"given exactly where the kind is {kind}", f"The problem says {problem.kind}.",
            )  # fmt: skip
    if told.numbers is not None:
        require_tensor("numbers of entries", told.numbers, torch.int32, listed, 4)
    if out.own is not None:
        require_tensor("slots of the tokens", out.own, torch.int64, tokens, 8)


def _pointers(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Return the kernel's pointers; None becomes a pointer that is not read."""
    kinds = ((Int64, 8), (Int32, 4), (Int32, 4), (Int32, 4), (Int32, 4), (Int64, 8))
    return tuple(
        pointer(element, tensor, size)
        for (element, size), tensor in zip(kinds, tensors, strict=True)
    )
