"""List the cache slots of decoding tokens from positions, owners and a table: one thread a slot.

One source for sm_90a and sm_100a. The kinds of lists are in cache/problem. On the GPU, a decoding
step needs no host arithmetic between its kernels, and a captured graph follows changing positions.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph. Shape
letters: T tokens, W width of a list, B sequences, C columns.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, cute

from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import CHOSEN, WINDOW, SlotsForm, SlotsProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

FLAT = 1 << 40


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
    tensors: SlotTensors,
    owner: Any,
    number: Any,
    end: Any,
    numbers: tuple[Any, Any],
    form: SlotsForm,
) -> Any:
    """Look a number up in its owner's row; -1 where there is nothing to look up."""
    sequences, columns = numbers
    found = Int32(facts.NO_SLOT)
    if (owner >= 0) & (owner < sequences) & (number >= 0) & (number < end):
        column = facts.column_of(form.kind, number, columns)
        found = Int32(tensors.table[Int64(owner) * Int64(columns) + Int64(column)])
    return found


@cute.kernel
def slots_kernel(tensors: SlotTensors, extents: tuple[Int32, ...], form: cutlass.Constexpr) -> None:
    """Find the slot of one place of a token's list, and of a window the token's own."""
    follow()
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
    tensors = SlotTensors(
        *(cute.make_tensor(pointer, cute.make_layout(FLAT)) for pointer in pointers)
    )
    slots_kernel(tensors, tuple(told), form).launch(
        grid=[tokens, parts, 1], block=[facts.SLOT_THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[SlotsProblem, SlotsForm]) -> tuple[Any, ...]:
    problem = of.problem
    sizes = (problem.width, problem.sequences, problem.columns, problem.ratio)
    return ((*problem.blocks, *sizes),)


def _of_kind(kind: str) -> Presence[SlotsProblem]:
    expected = f"given exactly where the kind is {kind}"
    return Presence(
        lambda p: p.kind == kind, lambda p: f"The problem says {p.kind}.", expected, expected
    )


def _listed(problem: SlotsProblem) -> tuple[int, ...]:
    return problem.tokens, problem.width


_Operand = Operand[SlotsProblem]
_PLACES, _NUMBERS = Storage(Int64, torch.int64, 8), Storage(Int32, torch.int32, 4)
KERNEL = Kernel[SlotsProblem, SlotsForm](
    entry=launch_slots,
    operands=(
        _Operand("positions", _PLACES, lambda p: (p.tokens,)),
        _Operand("owners", _NUMBERS, lambda p: (p.tokens,)),
        _Operand("table", _NUMBERS, lambda p: (p.sequences, p.columns), label="table of slots"),
        _Operand("numbers", _NUMBERS, _listed, _of_kind(CHOSEN), label="numbers of entries"),
        _Operand("listed", _NUMBERS, _listed, output=True, label="list of slots"),
        _Operand(
            "own",
            _PLACES,
            lambda p: (p.tokens,),
            _of_kind(WINDOW),
            output=True,
            label="slots of the tokens",
        ),
    ),
    choose_form=lambda problem, target: SlotsForm(problem.kind, target),
    kinds=((Int32,) * 6,),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
