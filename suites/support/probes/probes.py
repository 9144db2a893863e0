"""Probe functions that run on ints, on tensors and in a kernel, so that the three can be compared.

A probe maps one sample (a number 0 to 65,535 and its two bytes) to an unsigned 32-bit integer. On
the host the sample is an int or a tensor; in the kernel it is the thread's own, its bytes read from
memory. Probes cover codecs on all byte pairs and all bfloat16 numbers, and scale layouts, cache
rows and row orders at every coordinate, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.cache_rows import CACHE_ROWS, CacheRow
from degarble.harness.formats.codec import high_nibble, low_nibble, pack_pair
from degarble.harness.formats.layouts import (
    ROW_ORDERS,
    SCALE_LAYOUTS,
    RowOrder,
    ScaleLayout,
    offset_128x4,
    round_up,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

SAMPLES = 65_536
LAYOUT_SHAPES = ((256, 16), (300, 21), (37, 5))  # rows, scale columns: whole tiles and ragged ones
CACHE_ENTRIES = 64
ORDER_ROWS = 768


class Sample(NamedTuple):
    """A number below SAMPLES and its bytes, all unsigned; in a kernel memory holds the bytes."""

    index: Any
    low: Any
    high: Any


@dataclass(frozen=True)
class Probe:
    """One value a sample, as an unsigned 32-bit integer."""

    name: str
    value: Callable[[Sample], Any]


def sample_bytes() -> Tensor:
    """Return the table of bytes that a kernel reads, uint8 [SAMPLES, 2], low byte first."""
    index = torch.arange(SAMPLES, dtype=torch.int64)
    return torch.stack([index % 256, index // 256], dim=-1).to(torch.uint8)


def expected(group: str, device: str = "cpu") -> Tensor:
    """Return what a group has to yield, int64 [probes, SAMPLES], from the world of tensors."""
    index = torch.arange(SAMPLES, dtype=torch.int64, device=device)
    sample = Sample(index, index % 256, index // 256)
    return torch.stack([ops.unsigned(probe.value(sample)) for probe in GROUPS[group]])


def canonical_bits(number: Any) -> Any:
    """Return the bits of a float32 with one pattern for all NaN: payloads differ by processor."""
    bits = ops.bits_of(number)
    return ops.select((bits & 0x7FFF_FFFF) > 0x7F80_0000, 0x7FC0_0000, bits)


def number(sample: Sample) -> Any:
    """Return the bfloat16 number whose bits are the sample."""
    return codecs.bf16_decode(sample.low + sample.high * 256)


def swapped(sample: Sample) -> Any:
    """Return the bfloat16 number of the two bytes in the other order."""
    return codecs.bf16_decode(sample.high + sample.low * 256)


def dense(sample: Sample, factor: int) -> Any:
    """Return a number in 0.5 .. 1 with a full mantissa, so that products have to round."""
    scrambled = ops.shift_right(sample.index * factor, 9)  # factor < 2**16
    return ops.number_of((scrambled & 0x7F_FFFF) + 0x3F00_0000)


def _tensor_scale(sample: Sample) -> Any:
    """Canonical encode scale of a tensor whose largest magnitude the sample and its twin hold."""
    amax = ops.maximum(ops.absolute(number(sample)), ops.absolute(swapped(sample)))
    return codecs.nvfp4_tensor_encode_scale(amax)


def _rotated(sample: Sample, odd: int) -> Any:
    pair = codecs.rope_rotate(
        number(sample), swapped(sample), dense(sample, 40503), dense(sample, 60493)
    )
    return canonical_bits(pair[odd])


CODEC_PROBES = (
    Probe("e2m1 of bf16", lambda s: codecs.e2m1_encode(number(s))),
    Probe("e4m3 of bf16", lambda s: codecs.e4m3_encode(number(s))),
    Probe("ue8m0 of bf16", lambda s: codecs.ue8m0_encode(number(s))),
    Probe("bf16 of float32", lambda s: codecs.bf16_encode(ops.number_of(_spread(s, 0x10001)))),
    Probe(
        "bf16 of ties", lambda s: codecs.bf16_encode(ops.number_of(_spread(s, 0x10000) + 0x8000))
    ),
    Probe("bf16 rounded", lambda s: canonical_bits(codecs.bf16_round(dense(s, 40503)))),
    Probe("bf16 number", lambda s: ops.bits_of(number(s))),
    Probe("low nibble", lambda s: ops.bits_of(codecs.e2m1_decode(low_nibble(s.low)))),
    Probe("high nibble", lambda s: ops.bits_of(codecs.e2m1_decode(high_nibble(s.low)))),
    Probe("e4m3 low byte", lambda s: canonical_bits(codecs.e4m3_decode(s.low))),
    Probe("e4m3 high byte", lambda s: canonical_bits(codecs.e4m3_decode(s.high))),
    Probe("ue8m0 low byte", lambda s: canonical_bits(codecs.ue8m0_decode(s.low))),
    Probe(
        "low nibble times scale",
        lambda s: canonical_bits(codecs.nvfp4_decode(low_nibble(s.low), s.high)),
    ),
    Probe(
        "high nibble times scale",
        lambda s: canonical_bits(codecs.nvfp4_decode(high_nibble(s.low), s.high)),
    ),
    Probe("repacked", lambda s: pack_pair(high_nibble(s.high), low_nibble(s.low))),
    Probe("tensor scale", lambda s: ops.bits_of(codecs.nvfp4_tensor_encode_scale(number(s)))),
    Probe(
        "block scale",
        lambda s: codecs.nvfp4_block_scale(ops.absolute(number(s)), _tensor_scale(s)),
    ),
    Probe(
        "block encode scale",
        lambda s: ops.bits_of(codecs.nvfp4_block_encode_scale(s.low, _tensor_scale(s))),
    ),
    Probe(
        "nvfp4 of bf16",
        lambda s: codecs.nvfp4_encode(
            number(s), codecs.nvfp4_block_encode_scale(s.low, _tensor_scale(s))
        ),
    ),
)


def _spread(sample: Sample, factor: int) -> Any:
    """Return the sample's number times a factor below 2**17, as float32 bits."""
    return sample.index * factor


ROTATION_PROBES = (
    Probe("rope even", partial(_rotated, odd=0)),
    Probe("rope odd", partial(_rotated, odd=1)),
)

ARITHMETIC_PROBES = (
    Probe("multiply", lambda s: canonical_bits(ops.multiply_rn(number(s), dense(s, 40503)))),
    Probe("add", lambda s: canonical_bits(ops.add_rn(number(s), dense(s, 40503)))),
    Probe("subtract", lambda s: canonical_bits(ops.subtract_rn(number(s), swapped(s)))),
    Probe("divide", lambda s: canonical_bits(ops.divide_rn(number(s), swapped(s)))),
    Probe("divide dense", lambda s: canonical_bits(ops.divide_rn(number(s), dense(s, 60493)))),
    Probe(
        "fma",
        lambda s: canonical_bits(ops.fma_rn(number(s), dense(s, 40503), swapped(s))),
    ),
    Probe(
        "fma cancelling",
        lambda s: canonical_bits(
            ops.fma_rn(
                dense(s, 40503),
                dense(s, 60493),
                -ops.multiply_rn(dense(s, 40503), dense(s, 60493)),
            )
        ),
    ),
    Probe("minimum", lambda s: canonical_bits(ops.minimum(number(s), swapped(s)))),
    Probe("maximum", lambda s: canonical_bits(ops.maximum(number(s), swapped(s)))),
    Probe("absolute", lambda s: canonical_bits(ops.absolute(number(s)))),
    Probe("integer minimum", lambda s: ops.minimum(s.index, 1000)),
    Probe("integer maximum", lambda s: ops.maximum(1000, s.index)),
    Probe("floor_mod", lambda s: ops.floor_mod(ops.signed(s.index) - 32_768, 37)),
    Probe("shift_left", lambda s: ops.shift_left(_spread(s, 0x10001), s.low % 32)),
    Probe("shift_right", lambda s: ops.shift_right(_spread(s, 0x10001), s.low % 32)),
    Probe(
        "count",
        lambda s: ops.count(s.low > 3, s.high > 3, s.low > s.high, s.low == s.high, s.index >= 0),
    ),
    Probe("select", lambda s: ops.select(s.low > s.high, s.low * 1, 7)),
    Probe("single", lambda s: ops.bits_of(ops.single(s.index))),
)


def _layout_offset(sample: Sample, layout: ScaleLayout, rows: int, columns: int) -> Any:
    padded_columns = round_up(columns, layout.column_tile)
    index = sample.index % layout.storage_size(rows, columns)
    return layout.offset_of(index // padded_columns, index % padded_columns, rows, columns)


def _layout_coordinate(sample: Sample, layout: ScaleLayout, rows: int, columns: int) -> Any:
    offset = sample.index % layout.storage_size(rows, columns)
    row, column = layout.coordinate_of(offset, rows, columns)
    return row * 65_536 + column


def _layout_probes(layout: ScaleLayout, rows: int, columns: int) -> tuple[Probe, ...]:
    name = f"{layout.name} {rows}x{columns}"
    offset = partial(_layout_offset, layout=layout, rows=rows, columns=columns)
    coordinate = partial(_layout_coordinate, layout=layout, rows=rows, columns=columns)
    return Probe(f"{name} offset", offset), Probe(f"{name} coordinate", coordinate)


def _ragged_offset(sample: Sample) -> Any:
    """128x4 with a column count known in the kernel only, as a ragged batch has it."""
    columns = sample.low + sample.high + 1
    return offset_128x4(sample.high * 3, sample.low, columns)


LAYOUT_PROBES = (
    *(
        probe
        for layout in SCALE_LAYOUTS.values()
        for rows, columns in LAYOUT_SHAPES
        for probe in _layout_probes(layout, rows, columns)
    ),
    Probe("128x4 ragged", _ragged_offset),
)


def _cache_coordinate(sample: Sample, dims: int) -> tuple[Any, Any]:
    index = sample.index % (CACHE_ENTRIES * dims)
    return index // dims, index % dims


def _cache_byte(sample: Sample, row: CacheRow) -> Any:
    return row.byte_of(*_cache_coordinate(sample, row.dims))


def _cache_inverse(sample: Sample, row: CacheRow) -> Any:
    entry, dim = row.coordinate_of(_cache_byte(sample, row))
    return entry * 65_536 + dim


def _scale_byte(sample: Sample, row: CacheRow) -> Any:
    entry, dim = _cache_coordinate(sample, row.scaled_dims)
    return row.scale_byte_of(entry, dim, CACHE_ENTRIES)


def _scale_inverse(sample: Sample, row: CacheRow) -> Any:
    entry, scale = row.scale_coordinate_of(_scale_byte(sample, row), CACHE_ENTRIES)
    return entry * 65_536 + scale


CACHE_PROBES = tuple(
    Probe(f"{row.name} {what}", partial(function, row=row))
    for row in CACHE_ROWS.values()
    for what, function in (
        ("byte", _cache_byte),
        ("coordinate", _cache_inverse),
        ("scale byte", _scale_byte),
        ("scale coordinate", _scale_inverse),
    )
)


def _order_source(sample: Sample, order: RowOrder) -> Any:
    return order.source(sample.index % ORDER_ROWS, ORDER_ROWS)


def _order_destination(sample: Sample, order: RowOrder) -> Any:
    return order.destination(sample.index % ORDER_ROWS, ORDER_ROWS)


ORDER_PROBES = tuple(
    Probe(f"{order.name} {what}", partial(function, order=order))
    for order in ROW_ORDERS.values()
    for what, function in (("source", _order_source), ("destination", _order_destination))
)

GROUPS: Mapping[str, tuple[Probe, ...]] = MappingProxyType(
    {
        "codecs": CODEC_PROBES,
        "rotation": ROTATION_PROBES,
        "arithmetic": ARITHMETIC_PROBES,
        "layouts": LAYOUT_PROBES,
        "cache_rows": CACHE_PROBES,
        "row_orders": ORDER_PROBES,
    }
)
