"""Load and store the compressor's rows in registers: new rows of this call, carried rows of a ring.

Only for use inside a kernel that is being traced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.cache.compressor_problem import AT_ONCE, CHANNELS, PoolForm


class Tensors(NamedTuple):
    """Kernels' tensors; float32 in pairs."""

    projected: Any  # [T, 2 F]: latents, gates without bias
    ape: Any  # [ratio, F]
    rings: Any  # [S, R, 2 F]: latents, gates with bias
    closing: Any  # int32 [W]
    owners: Any  # int32 [W]
    starts: Any  # int64 [B]
    offsets: Any  # int32 [B + 1]
    ring_of: Any  # int32 [B]
    table: Any  # int32 [B, N]
    values: Any  # BF16 [W, E]
    positions: Any  # int64 [W]
    slots: Any  # int64 [W]


class Place(NamedTuple):
    """Rows of a sequence: first new position and its token, token count, ring; all Int32."""

    start: Any
    begin: Any
    count: Any
    ring: Any


def place_of(tensors: Tensors, sequence: Any) -> Place:
    """Read the extents of a sequence's rows."""
    begin = Int32(tensors.offsets[sequence])
    count = Int32(tensors.offsets[sequence + 1]) - begin
    start, ring = Int32(tensors.starts[sequence]), Int32(tensors.ring_of[sequence])
    return Place(start, begin, count, ring)


def row_registers() -> tuple[Any, Any]:
    """Make registers for a part's latents and gates."""
    latent, gate = (
        cute.make_rmem_tensor(cute.make_layout((CHANNELS, AT_ONCE)), Float32) for _ in range(2)
    )
    return latent, gate


@cute.jit
def read_new_rows(
    tensors: Tensors,
    registers: tuple[Any, Any],
    told: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Read eight rows as if all came in this call; `told` is first token, part, chunk of E.

    So the loads are issued before the sequence's start is known; choose_rows corrects them.
    """
    first, part, chunk = told
    rLatent, rGate = registers
    of_row, of_gate, of_entry = (
        n // CHANNELS for n in (2 * form.columns, form.columns, form.width)
    )
    begin = first + part * AT_ONCE
    if begin >= 0:  # rows lie a fixed distance apart: one address for all of them
        at = Int64(begin) * of_row + Int64(chunk)
        for row in cutlass.range_constexpr(AT_ONCE):
            own = at + (row * of_row + row // form.ratio * of_entry)
            cute.autovec_copy(tensors.projected[None, own], rLatent[None, row])
            cute.autovec_copy(tensors.projected[None, own + of_gate], rGate[None, row])
    else:
        for row in cutlass.range_constexpr(AT_ONCE):
            at = Int64(ops.maximum(begin + row, Int32(0))) * of_row + Int64(chunk)
            own = at + row // form.ratio * of_entry
            cute.autovec_copy(tensors.projected[None, own], rLatent[None, row])
            cute.autovec_copy(tensors.projected[None, own + of_gate], rGate[None, row])
    rBias = cute.make_rmem_tensor(cute.make_layout((CHANNELS, AT_ONCE)), Float32)
    at = part * AT_ONCE % form.ratio * of_gate + chunk
    for row in cutlass.range_constexpr(AT_ONCE):
        # With overlap a window has its own half of the columns.
        own = at + (row % form.ratio * of_gate + row // form.ratio * of_entry)
        cute.autovec_copy(tensors.ape[None, own], rBias[None, row])
    for row in cutlass.range_constexpr(AT_ONCE):
        for channel in cutlass.range_constexpr(CHANNELS):
            biased = ops.add_rn(Float32(rGate[channel, row]), Float32(rBias[channel, row]))
            rGate[channel, row] = biased


@cute.jit
def read_only_new_row(
    tensors: Tensors, registers: tuple[Any, Any], told: tuple[Any, Any], form: cutlass.Constexpr
) -> None:
    """Read the last row of a window whose others are all carried; `told` is token, chunk of E."""
    token, chunk = told
    rLatent, rGate = registers
    of_row, of_gate, of_entry = (
        n // CHANNELS for n in (2 * form.columns, form.columns, form.width)
    )
    rLatent.fill(0.0)
    rGate.fill(0.0)
    rBias = cute.make_rmem_tensor(CHANNELS, Float32)
    row = AT_ONCE - 1
    column = chunk + row // form.ratio * of_entry
    at = Int64(token) * of_row + Int64(column)
    cute.autovec_copy(tensors.projected[None, at], rLatent[None, row])
    cute.autovec_copy(tensors.projected[None, at + of_gate], rGate[None, row])
    cute.autovec_copy(tensors.ape[None, (form.ratio - 1) * of_gate + column], rBias)
    for channel in cutlass.range_constexpr(CHANNELS):
        rGate[channel, row] = ops.add_rn(Float32(rGate[channel, row]), Float32(rBias[channel]))


def ring_at(place: Place, rings: Any, form: PoolForm) -> tuple[Any, Any]:
    """Return whether a sequence carries rows, and the first row of its ring."""
    carries = keeps(place, rings)
    return carries, Int64(ops.select(carries, place.ring, Int32(0))) * form.ring_rows


@cute.jit
def read_old_rows(
    tensors: Tensors,
    carried: tuple[Any, Any],
    told: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Read a part's rows of the ring; `told`: first position, part, chunk of E, the ring's row."""
    first, part, chunk, ring = told
    rOld, rOldGate = carried
    of_row, of_gate, of_entry = (
        n // CHANNELS for n in (2 * form.columns, form.columns, form.width)
    )
    for row in cutlass.range_constexpr(AT_ONCE):
        position = ops.maximum(first + (part * AT_ONCE + row), Int32(0))
        column = chunk + row // form.ratio * of_entry
        at = (ring + Int64(position % form.ring_rows)) * of_row + Int64(column)
        cute.autovec_copy(tensors.rings[None, at], rOld[None, row])
        cute.autovec_copy(tensors.rings[None, at + of_gate], rOldGate[None, row])


@cute.jit
def choose_rows(
    registers: tuple[Any, Any],
    carried: tuple[Any, Any],
    place: Place,
    told: tuple[Any, Any, Any],
) -> None:
    """Replace rows from before this call by carried rows; `told`: first, part, carries.

    By selects, not branches: behind a branch each load would be waited for separately.
    """
    first, part, carries = told
    rLatent, rGate = registers
    rOld, rOldGate = carried
    for row in cutlass.range_constexpr(AT_ONCE):
        position = first + (part * AT_ONCE + row)
        is_new, is_there = position >= place.start, position >= 0
        is_old = is_there & carries
        lost = ops.select(is_there, Float32.nan, Float32(0.0))  # a ring that there is not
        # A gate of -inf: rows before the sequence's start have no weight.
        before = ops.select(is_there, Float32(0.0), -Float32.inf)
        for channel in cutlass.range_constexpr(CHANNELS):
            latent = ops.select(is_old, Float32(rOld[channel, row]), lost)
            gate = ops.select(is_old, Float32(rOldGate[channel, row]), before)
            rLatent[channel, row] = ops.select(is_new, Float32(rLatent[channel, row]), latent)
            rGate[channel, row] = ops.select(is_new, Float32(rGate[channel, row]), gate)


def kept_registers() -> tuple[Any, Any]:
    """Make registers for a few columns of a token."""
    latent, gate = (cute.make_rmem_tensor(CHANNELS, Float32) for _ in range(2))
    return latent, gate


def keeps(place: Place, rings: Any) -> Any:
    """Return whether a sequence has a ring."""
    return (place.ring >= 0) & (place.ring < rings)


@cute.jit
def read_kept(
    tensors: Tensors,
    kept: tuple[Any, Any],
    place: Place,
    told: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Read a few columns of a token as its ring has them; `told` is token, column."""
    token, column = told
    rLatent, rGate = kept
    of_row, of_gate = 2 * form.columns // CHANNELS, form.columns // CHANNELS
    position = place.start + (token - place.begin)
    rBias = cute.make_rmem_tensor(CHANNELS, Float32)
    at = Int64(token) * of_row + Int64(column)
    cute.autovec_copy(tensors.projected[None, at], rLatent)
    cute.autovec_copy(tensors.projected[None, at + of_gate], rGate)
    cute.autovec_copy(tensors.ape[None, position % form.ratio * of_gate + column], rBias)
    for channel in cutlass.range_constexpr(CHANNELS):
        rGate[channel] = ops.add_rn(Float32(rGate[channel]), Float32(rBias[channel]))


@cute.jit
def write_kept(
    tensors: Tensors,
    kept: tuple[Any, Any],
    place: Place,
    told: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Write what read_kept read into the token's ring."""
    token, column = told
    of_row, of_gate = 2 * form.columns // CHANNELS, form.columns // CHANNELS
    position = place.start + (token - place.begin)
    held = place.ring * form.ring_rows + position % form.ring_rows
    at = Int64(held) * of_row + Int64(column)
    cute.autovec_copy(kept[0], tensors.rings[None, at])
    cute.autovec_copy(kept[1], tensors.rings[None, at + of_gate])
