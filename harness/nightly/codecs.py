"""Known-answer tests of the number formats, with bytes stated here.

Vectors: codes and values of E2M1, E4M3, UE8M0 and BF16 from their standards, ties that go to the
even code, one NVFP4 block with its scale, and the place of a scale in the swizzled layout. They are
literals, so that they do not depend on the code under test. Sources: OCP Microscaling Formats 1.0,
tables of E2M1 and UE8M0; OCP 8-bit Floating Point 1.0, E4M3; cuBLAS 13 documentation, the 128x4
tile of block scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.codec import decode, decode_array, encode, encode_array
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout
from degarble.harness.formats.number_formats import BF16, E2M1, E4M3, NVFP4, UE8M0
from degarble.harness.formats.quantise import dequantise, quantise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat

# Format, number, code: each is encoded, and what encodes exactly is decoded as well.
ELEMENTS: tuple[tuple[ElementFormat, float, int], ...] = (
    *((E2M1, value, code) for code, value in enumerate((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))),
    *((E2M1, -value, code) for code, value in ((9, 0.5), (10, 1.0), (13, 3.0), (15, 6.0))),
    (E4M3, 0.0, 0x00),
    (E4M3, 2.0**-9, 0x01),
    (E4M3, 2.0**-6, 0x08),
    (E4M3, 1.0, 0x38),
    (E4M3, 1.125, 0x39),
    (E4M3, 240.0, 0x77),
    (E4M3, 448.0, 0x7E),
    (E4M3, -1.0, 0xB8),
    (UE8M0, 2.0**-127, 0x00),
    (UE8M0, 1.0, 0x7F),
    (UE8M0, 2.0, 0x80),
    (BF16, 1.0, 0x3F80),
    (BF16, -2.0, 0xC000),
    (BF16, 448.0, 0x43E0),
)
# Halfway between two codes: the even one is taken.
TIES: tuple[tuple[ElementFormat, float, int], ...] = (
    (E2M1, 0.25, 0),
    (E2M1, 0.75, 2),
    (E2M1, 1.25, 2),
    (E2M1, 1.75, 4),
    (E2M1, 2.5, 4),
    (E2M1, 3.5, 6),
    (E2M1, 5.0, 6),
    (E4M3, 1.0625, 0x38),
    (E4M3, 1.1875, 0x3A),
)
# A block whose scale is 1: the decode scale of the tensor is 1, and the largest magnitude is 6.
BLOCK = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK_CODES = bytes.fromhex("1032547698badcfe")  # the even value in the low nibble
BLOCK_SCALE = 0x38
# Row and column of a scale of 128 x 4, and the byte at which it lies.
PLACES = (((0, 0), 0), ((0, 3), 3), ((1, 0), 16), ((32, 0), 4), ((33, 2), 22), ((127, 3), 511))


def wrong_codecs() -> list[str]:
    """Compute every known answer; return those that are wrong."""
    return [*_elements(), *_block(), *_places()]


def count() -> int:
    """Return the number of known answers."""
    return len(ELEMENTS) + len(TIES) + 3 + len(PLACES)


def _elements() -> Iterator[str]:
    for fmt, value, code in (*ELEMENTS, *TIES):
        made = {encode(value, fmt), int(_coded(value, fmt))}
        if made != {code}:
            yield f"{fmt.name}: {value} is {_hex(made)}, not {code:#x}"
    for fmt, value, code in ELEMENTS:
        read = {decode(code, fmt), float(decode_array(torch.tensor([code]), fmt)[0])}
        if read != {value}:
            yield f"{fmt.name}: {code:#x} reads {sorted(read)}, not {value}"


def _coded(value: float, fmt: ElementFormat) -> Tensor:
    return encode_array(torch.tensor([value]), fmt)[0]


def _hex(codes: set[int]) -> str:
    return ", ".join(f"{code:#x}" for code in sorted(codes))


def _block() -> Iterator[str]:
    values = torch.tensor([BLOCK], dtype=torch.bfloat16)
    made = quantise(values, NVFP4, decode_scale=torch.tensor(1.0))
    codes = bytes(made.codes.flatten().tolist())
    if codes != BLOCK_CODES:
        yield f"NVFP4 block: codes {codes.hex()}, not {BLOCK_CODES.hex()}"
    if made.block_scale.flatten().tolist() != [BLOCK_SCALE]:
        yield f"NVFP4 block: scale {made.block_scale.flatten().tolist()}, not [{BLOCK_SCALE}]"
    if not torch.equal(dequantise(made), values.float()):
        yield "NVFP4 block: what was quantised without loss reads otherwise"


def _places() -> Iterator[str]:
    for (row, column), place in PLACES:
        scales = torch.zeros(128, 4, dtype=torch.uint8)
        scales[row, column] = 1
        found = to_layout(scales, SWIZZLE_128X4).flatten().nonzero().flatten().tolist()
        if found != [place]:
            yield f"scale {row}, {column} of a swizzled tile lies at {found}, not {place}"
